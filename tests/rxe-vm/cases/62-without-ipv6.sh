# shellcheck shell=bash
# IPv6 is off on the interfaces. Each GID table still has the link-local GID of the MAC, but that
# address does not answer. Rails with an IPv4 address use that one. A port without an IPv4 address
# is not used as a rail: the log names the cure, and no connection tries its link-local address.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

rails 3 80mbit
for device in ea{0..2} eb{0..2}; do sysctl -qw "net.ipv6.conf.$device.disable_ipv6=1"; done
for device in ea2 eb2; do ip -4 addr flush dev "$device"; done
grep -q '^fe80' /sys/class/infiniband/a2/ports/1/gids/0 || fail "a2 has no link-local GID, and so this shows nothing"
mark 3
spark ipv4 all-gather a0,a1,a2 b0,b1,b2 -b 4M -e 4M -n 5 -w 1 -c 1
check_table 1
check_says 'connected with .* over 2 rails' "that both rails with an address are used"
for side in a b; do
  check_says "${side}2:1 not used as a rail: .*link-local .* e${side}2 does not have: .*link-local: \[ipv6\] in netplan" "what ${side}2 lacks"
done
check_carried 0 1
check_unused 2
