# shellcheck shell=bash
# A rail is lost, and from then on its peer's IPv4 address resolves to another hardware address.
# This happens where twins answer ARP for each other. Attempts by IPv4 fail, and the rail returns by
# the link-local addresses of the two interfaces.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

# seen PATTERN: waits until the ranks' output has at least two lines that match.
seen() {
  wait_until 120 has_lines wrong 2 "$1" || fail "fewer than two lines say /$1/ after 120 s"
}

trouble() {
  once_connected wrong
  rail_black_hole 1
  seen 'rail [ab]1:1 to [^ ]* lost: '
  # These are rail 0's hardware addresses. Rail 1's NICs drop packets to them.
  ip neigh replace "$(rail_address b 1)" lladdr "$(rail_mac b 0)" dev ea1 nud permanent
  ip neigh replace "$(rail_address a 1)" lladdr "$(rail_mac a 0)" dev eb1 nud permanent
  rail_rate 1 80mbit
  seen 'rail [ab]1:1 to [^ ]* recovered '
}

# The job has to outlast the trouble, on a busy machine too.
rails 4 80mbit
trouble &
breaker=$!
spark wrong sendrecv a0,a1,a2,a3 b0,b1,b2,b3 -b 2M -e 2M -n 400 -w 1 -c 1 "${slow_wire[@]}"
wait "$breaker" || fail "the rail did not return"
check_table 1
check_lost 1
check_back 1
# The rail could not have returned by IPv4: a new job uses only the others.
spark after all-gather a0,a1,a2,a3 b0,b1,b2,b3 -b 1M -e 1M -n 2 -w 1 -c 1
check_table 1
check_says 'rail [ab]1:1 not used with .*test write' "that rail 1 does not carry by IPv4"
