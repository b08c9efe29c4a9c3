# shellcheck shell=bash
# The link-local address of a rail's interface is not derived from its MAC, as with NetworkManager's
# stable-privacy, and the interface has no other address. The GID table has GIDs for the MAC and for
# the address, and the rail uses the one for the address.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

# other_link_local SIDE I ADDRESS: replaces all addresses of the interface by ADDRESS.
other_link_local() {
  local device=e$1$2
  ip -4 addr flush dev "$device"
  ip -6 addr flush dev "$device"
  ip addr add "$3/64" dev "$device" nodad
  wait_until 10 has_two_link_local "$1$2" ||
    fail "$1$2 does not have two link-local GIDs: $(gids "$1$2" | sort -u | paste -sd' ')"
}

gids() {
  cat /sys/class/infiniband/"$1"/ports/1/gids/* 2>/dev/null || true
}

has_two_link_local() {
  [[ $(gids "$1" | grep -c '^fe80') == 2 ]]
}

rails 2 80mbit
other_link_local a 1 fe80::a:1234:5678
other_link_local b 1 fe80::b:1234:5678
mark 2
spark private all-gather a0,a1 b0,b1 -b 4M -e 4M -n 5 -w 1 -c 1
check_table 1
check_says 'connected with .* over 2 rails' "that both rails are used"
check_carried 0 1
