# shellcheck shell=bash
# During the connect every rail's IPv4 address resolves to the hardware address of its twin, in both
# directions. This happens where twins answer ARP for each other. Packets to a rail then reach its
# twin, which drops them. No rail carries by IPv4, but all carry by their link-local addresses, and
# the job runs over these.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

# cross I J: on each node, makes the address of the other node's rail I resolve to the hardware
# address of the other node's rail J.
cross() {
  ip neigh replace "$(rail_address b "$1")" lladdr "$(rail_mac b "$2")" dev "ea$1" nud permanent
  ip neigh replace "$(rail_address a "$1")" lladdr "$(rail_mac a "$2")" dev "eb$1" nud permanent
}

bridged_rails 2
equal_rails 2
cross 0 1
cross 1 0
# On a single connection, a rail may recover more than a second after the other rails. The job must
# take longer.
mark 2
spark crossed all-gather a0,a1 b0,b1 -b 4M -e 4M -n 40 -w 1 -c 1 "${slow_wire[@]}"
ip -4 neigh show
check_table 1
check_carried 0 1
# The first attempt, by IPv4, fails on every rail. The wrong hardware addresses are still in use at
# the end.
check_says 'rail [ab][01]:1 not used with .*: test write' "that no rail carries by IPv4"
check_says 'rail [ab][01]:1 to .* recovered after' "that the rails carry by their link-local addresses"
