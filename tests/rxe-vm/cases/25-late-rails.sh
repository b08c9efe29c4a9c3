# shellcheck shell=bash
# When the job starts, rail 2 has no cable and rail 1 has no address on node B. The job begins over
# the other rails. The address comes 5 s later and the link 3 s after that: both rails join the
# running connections, without a restart. A rail that may never come is no reason to wait: where
# nothing else pairs, the job fails immediately.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

late() {
  once_connected late
  sleep 4
  ip addr add "$address/24" dev eb1
  rail_routes 1
  rail_gid_wait b1 "$address"
  sleep 3
  rail_up 2
}

rails 4 80mbit
address=$(rail_address b 1)
ip addr flush dev eb1
rail_down 2
mark 4
late &
helper=$!
spark late sendrecv a0,a1,a2,a3 b0,b1,b2,b3 -b 2M -e 2M -n 400 -w 1 -c 1 "${slow_wire[@]}"
wait "$helper" || fail "rail 1 got no address, or rail 2 no link"
check_table 1
check_says 'used as soon as they have a link and an address: a2:1' "that a2 is awaited"
check_says 'used as soon as they have a link and an address: b1:1, b2:1' "that b1 and b2 are awaited"
check_carried 0 1 2 3

# Cable 0 has another subnet at each end, and cable 1 no link.
rail_down 1
ip addr flush dev eb0
ip addr add 10.99.0.2/24 dev eb0
started=$SECONDS
if spark_status apart sendrecv a0,a1 b0,b1 -b 8 -e 8 -n 1 -w 0 -c 1; then fail "hosts without a common subnet connected"; fi
check_says 'no rail in common' "that no rails pair"
((SECONDS - started < 60)) || fail "the error took $((SECONDS - started)) s"
