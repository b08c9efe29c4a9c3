# shellcheck shell=bash
# Two rails of each node are on one wire with addresses in one subnet. With Ubuntu's default
# settings (rp_filter 2, arp_ignore 0) the rails' ends answer ARP for each other. The plugin warns
# and names the cure. The job runs on the rail that works. The other rail is left out; the reason
# names the hardware address to which the peer's address resolves. With the cure both rails carry
# and there is no warning.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

readonly warning='an ARP request for the address of one of a0 and a1 may be answered by another of them'
readonly cure='net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2'

# neighbours: prints each end's neighbour entries for the other node.
neighbours() {
  local side i
  for side in a b; do for i in 0 1; do echo "e$side$i is $(rail_mac "$side" "$i"), $(rail_address "$side" "$i")"; done; done
  ip -4 neigh show
}

# resolved_wrongly: asks from ea0 for the address of eb0 until eb1's answer is accepted, which comes
# first unless the machine is slow. Requests from eb0 would meanwhile give ea0 the right address, so
# eb0 gets a permanent entry. That entry is wrong too: only the direction that fails first is
# reported, and it can be either.
resolved_wrongly() {
  local tries found
  ip neigh replace "$(rail_address a 0)" lladdr "$(rail_mac a 1)" dev eb0 nud permanent
  for ((tries = 0; tries < 50; tries++)); do
    ip neigh flush all
    echo >/dev/udp/"$(rail_address b 0)"/9 || true
    sleep 0.2
    found=$(ip -4 neigh show dev ea0 "$(rail_address b 0)")
    if [[ $found == *"$(rail_mac b 1)"* ]]; then return; fi
  done
  fail "ea0 has not once taken eb1's answer: $found"
}

bridged_rails 2
equal_rails 2
sysctl -qw net.ipv4.conf.all.rp_filter=2 net.ipv4.conf.all.arp_ignore=0
resolved_wrongly
mark 2
spark flux all-gather a0,a1 b0,b1 -b 4M -e 4M -n 5 -w 1 -c 1 "${slow_wire[@]}"
told_a="192.168.100.12 resolves to $(rail_mac b 1), which is the address of b1:1 and not of b0:1 .*$(rail_mac b 0)"
told_b="192.168.100.11 resolves to $(rail_mac a 1), which is the address of a1:1 and not of a0:1 .*$(rail_mac a 0)"
told="($told_a|$told_b).*they answer ARP for each other; run sysctl -w $cure on"
neighbours
check_table 1
check_says "WARN NET/Spark: $warning.*$cure.* on this host.*/etc/sysctl.d" "that the rails answer ARP for each other"
check_says 'a0 and a1 are in one subnet' "that the rails share a subnet"
check_says 'rail [ab]0:1 not used with .*test write' "that rail 0 is left out"
check_says "$told" "the cure on the peer"
check_carried 1

sysctl -qw net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2
ip neigh del "$(rail_address a 0)" dev eb0
ip neigh flush all
mark 2
spark cured all-gather a0,a1 b0,b1 -b 4M -e 4M -n 5 -w 1 -c 1 "${slow_wire[@]}"
neighbours
check_table 1
if grep -E "$warning|not used with" "$output"; then fail "it warns although the cure is in place"; fi
check_carried 0 1
