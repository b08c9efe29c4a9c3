# shellcheck shell=bash
# Cables are pulled and put back in mid-transfer: each rail in turn (rail 0 carries the bootstrap's
# TCP too), then all but one. Both directions run together, and every byte is checked. The job must
# not notice.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

# trouble: pulls rails and puts them back while the job runs.
trouble() {
  local i
  once_connected flapping
  for i in 0 1 2 3; do
    rail_down "$i"
    sleep 1
    rail_up "$i"
    sleep 1
  done
  for i in 1 2 3; do rail_down "$i"; done
  sleep 1
  for i in 1 2 3; do rail_up "$i"; done
}

# The job has to outlast the trouble, on a busy machine too.
rails 4 80mbit
trouble &
breaker=$!
spark flapping sendrecv a0,a1,a2,a3 b0,b1,b2,b3 -b 2M -e 2M -n 300 -w 1 -c 1 "${slow_wire[@]}"
wait "$breaker" || fail "the rails could not be pulled and put back"
check_table 1
check_lost 0 1 2 3
check_back 0 1 2 3

# All four rails carry the next job.
check_next_job
