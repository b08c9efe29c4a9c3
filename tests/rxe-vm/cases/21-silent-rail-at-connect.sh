# shellcheck shell=bash
# The ports of a rail are up on both sides, but it carries nothing (a wrong VLAN, a dead switch
# port). The rail is left out, with a log line that names it, and the job runs on the others. When
# the rail carries again, a running job adds it.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

rails 4 80mbit
rail_black_hole 1
mark 4
spark three all-gather a0,a1,a2,a3 b0,b1,b2,b3 -b 4M -e 4M -n 5 -w 1 -c 1
check_table 1
check_carried 0 2 3
check_says 'rail a1:1 not used with' "that a1 is left out"

heal() {
  once_connected late
  rail_rate 1 80mbit
}

mark 4
heal &
healer=$!
# The run is long enough for several attempts, whose intervals grow. The rail is repaired after the
# first attempt.
spark late sendrecv a0,a1,a2,a3 b0,b1,b2,b3 -b 2M -e 2M -n 500 -w 1 -c 1 "${slow_wire[@]}"
wait "$healer" || fail "the rail could not be mended"
check_table 1
check_says 'rail a1:1 not used with' "that a1 is left out at first"
check_back 1
check_carried 1
