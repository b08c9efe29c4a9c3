# shellcheck shell=bash
# A small message travels on one rail: with four rails the number of RDMA packets for each message
# is that of one rail.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

iterations=1000

# packets RAILS: counts both sides' packets for $iterations sendrecvs of 8 bytes over rails
# 0..RAILS-1.
packets() {
  local count=$1 rail total=0 list_a list_b
  list_a=$(seq -s, -f 'a%g' 0 $((count - 1)))
  list_b=$(seq -s, -f 'b%g' 0 $((count - 1)))
  mark 4
  spark "rails-$count" sendrecv "$list_a" "$list_b" -b 8 -e 8 -n "$iterations" -w 0 -c 1
  check_table 1
  for rail in 0 1 2 3; do
    total=$((total + $(sent_packets a "$rail") + $(sent_packets b "$rail")))
  done
  echo "$count rails: $total RDMA packets"
  packets=$total
}

rails 4
packets 1
one=$packets
# Each iteration sends a message each way. Each message takes at least one packet for the data, one
# for the CTS, and acknowledgements.
((one >= 4 * iterations)) || fail "$one packets for $((2 * iterations)) messages: the counters do not see the traffic"
packets 4
((packets <= one + one / 2)) || fail "8-byte messages cost $packets packets on four rails and $one on one"
