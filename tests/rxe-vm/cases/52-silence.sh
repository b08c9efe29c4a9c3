# shellcheck shell=bash
# The bootstrap's cable is pulled permanently, so that the two ends can only communicate over their
# rails. Then another cable is pulled and put back, and a third rail becomes silent while its ports
# stay up (only its unanswered packets show that). After that every rail loses one packet in a
# hundred, and the plugin warns of the losses by soft-RoCE's counters.
# Both directions run together, and every byte is checked.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

trouble() {
  once_connected silence
  rail_down 0
  sleep 1
  rail_down 1
  sleep 1
  rail_up 1
  sleep 2
  rail_black_hole 2
  sleep 5
  rail_rate 2 80mbit
  sleep 4
  rail_up 0
}

rails 4 80mbit
trouble &
breaker=$!
spark silence sendrecv a0,a1,a2,a3 b0,b1,b2,b3 -b 2M -e 2M -n 280 -w 1 -c 1 "${slow_wire[@]}"
wait "$breaker" || fail "the rails could not be pulled and put back"
check_table 1
check_lost 1 2
check_back 1 2
check_says 'rail [ab]2:1 to [^ ]* lost: no acknowledgement from the peer after all retries .*peer rail [ab]2:1' "that rail 2 fell silent"

for i in 0 1 2 3; do
  tc qdisc replace dev "ea$i" root netem loss 1%
  tc qdisc replace dev "eb$i" root netem loss 1%
done
spark lossy sendrecv a0,a1,a2,a3 b0,b1,b2,b3 -b 64K -e 1M -f 4 -n 20 -w 1 -c 1
check_table 3
check_says 'more than one packet in 100000 is lost and sent again: [ab][0-3] lost ' 'that packets are lost'
