# shellcheck shell=bash
# Sourced in the guest. A rail is a veth pair eaI <-> ebI with a soft-RoCE device on each end: aI
# belongs to node A (192.168.100+I.1/24), bI to node B (.2). Both nodes are in one kernel, so
# routing rules force traffic between them over the wire.

# rails COUNT [RATE]: makes rails 0..COUNT-1, each of RATE (in `tc`'s notation, "80mbit") or
# unlimited.
rails() {
  local count=$1 rate=${2:-} i
  rails_begin
  for ((i = 0; i < count; i++)); do
    ip link add "ea$i" mtu 9000 type veth peer name "eb$i" mtu 9000
    ip link set "ea$i" up
    ip link set "eb$i" up
    ip addr add "192.168.$((100 + i)).1/24" dev "ea$i"
    ip addr add "192.168.$((100 + i)).2/24" dev "eb$i"
    rail_rules "$i"
    rail_routes "$i"
    rail_in_order "$i"
    rdma link add "a$i" type rxe netdev "ea$i"
    rdma link add "b$i" type rxe netdev "eb$i"
    [[ -z $rate ]] || rail_rate "$i" "$rate"
    rail_wait "$i" ACTIVE
  done
}

rails_begin() {
  sysctl -qw net.ipv4.conf.{all,default}.accept_local=1 net.ipv4.conf.{all,default}.rp_filter=0
  # A link-local address, and so its GID, is usable immediately.
  sysctl -qw net.ipv6.conf.default.accept_dad=0
  # After boot the kernel's table of local addresses is the first; here it must come after the
  # rails' own routes.
  ip rule add pref 100 lookup local
  ip rule del pref 0
}

# bridged_rails COUNT [MTU]: makes rails 0..COUNT-1 with all their ends on one bridge and all
# addresses in one subnet. The bridge's ports silently drop packets longer than MTU (default 9000,
# as at the rails' ends). TCP's segments pass. A bridge sends a broadcast first to the port that
# joined it last, and one processor receives all packets here. So the end of the last rail answers
# an ARP request first. No end answers for addresses of the other node.
bridged_rails() {
  local count=$1 mtu=${2:-9000} i j side device
  rails_begin
  ip link add wire type bridge mcast_snooping 0
  ip link set wire addrgenmode none arp off up
  for ((i = 0; i < count; i++)); do
    for side in a b; do
      ip link add "e$side$i" mtu 9000 type veth peer name "w$side$i" mtu "$mtu"
      ip link set "w$side$i" addrgenmode none arp off up master wire
      ip link set "e$side$i" up
    done
    ip addr add "192.168.100.$((10 * i + 11))/24" dev "ea$i"
    ip addr add "192.168.100.$((10 * i + 12))/24" dev "eb$i"
    rail_rules "$i"
    rail_routes "$i" advmss $((mtu - 100))
    for side in a b; do
      # As in rail_in_order: the bridge's ports receive packets as well.
      for device in "e$side$i" "w$side$i"; do echo 1 >"/sys/class/net/$device/queues/rx-0/rps_cpus"; done
    done
    rdma link add "a$i" type rxe netdev "ea$i"
    rdma link add "b$i" type rxe netdev "eb$i"
    rail_wait "$i" ACTIVE
  done
  for ((i = 0; i < count; i++)); do
    for ((j = 0; j < count; j++)); do
      ip rule add pref 5 iif "ea$i" to "$(rail_address b "$j")" prohibit
      ip rule add pref 5 iif "eb$i" to "$(rail_address a "$j")" prohibit
    done
  done
}

# routed_rail: makes rail 0 with its ends in two subnets (192.168.100.0/24, 192.168.110.0/24) and a
# router between them, the network namespace "router". `in_router COMMAND...` runs a command there.
routed_rail() {
  local side net
  rails_begin
  ip netns add router
  in_router sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.{all,default}.rp_filter=0
  for side in a b; do
    net=192.168.100
    [[ $side == a ]] || net=192.168.110
    ip link add "e${side}0" mtu 9000 type veth peer name "r${side}0" mtu 9000 netns router
    ip link set "e${side}0" up
    in_router ip link set "r${side}0" up
    in_router ip addr add "$net.254/24" dev "r${side}0"
    # As in rail_in_order.
    in_router sh -c "echo 1 >/sys/class/net/r${side}0/queues/rx-0/rps_cpus"
  done
  ip addr add 192.168.100.1/24 dev ea0
  ip addr add 192.168.110.2/24 dev eb0
  rail_rules 0
  ip route add 192.168.110.2 via 192.168.100.254 dev ea0 src 192.168.100.1 table 200
  ip route add 192.168.100.1 via 192.168.110.254 dev eb0 src 192.168.110.2 table 201
  rail_in_order 0
  rdma link add a0 type rxe netdev ea0
  rdma link add b0 type rxe netdev eb0
  rail_wait 0 ACTIVE
}

in_router() {
  ip netns exec router "$@"
}

# rail_mac SIDE I: the hardware address of rail I's end on SIDE.
rail_mac() {
  cat "/sys/class/net/e$1$2/address"
}

# A veth's packets wait on the processor that sent them. Packets from two processors would overtake
# each other, which never happens on a cable. So one processor receives all packets of a rail.
rail_in_order() {
  local device
  for device in "ea$1" "eb$1"; do
    echo $((1 << $1 % $(nproc))) >"/sys/class/net/$device/queues/rx-0/rps_cpus"
  done
}

# Arriving packets are local; packets to the other end use the rail's own table.
rail_rules() {
  local i=$1
  ip rule add pref $((10 + 2 * i)) iif "ea$i" lookup local
  ip rule add pref $((11 + 2 * i)) iif "eb$i" lookup local
  ip rule add pref $((50 + 2 * i)) to "$(rail_address b "$i")" lookup $((200 + 2 * i))
  ip rule add pref $((51 + 2 * i)) to "$(rail_address a "$i")" lookup $((201 + 2 * i))
}

# rail_routes I [ATTRIBUTE]...: sets the routes of rail I, each with these attributes.
rail_routes() {
  local i=$1 a b
  shift
  a=$(rail_address a "$i")
  b=$(rail_address b "$i")
  ip route replace "$b" dev "ea$i" src "$a" table $((200 + 2 * i)) "$@"
  ip route replace "$a" dev "eb$i" src "$b" table $((201 + 2 * i)) "$@"
}

# rail_address SIDE I: prints the IPv4 address of rail I's end on SIDE.
rail_address() {
  ip -4 -o addr show dev "e$1$2" | awk '{ sub("/.*", "", $4); print $4; exit }'
}

# rail_readdress SIDE I HOST: gives rail I's end on SIDE another address of its subnet, with HOST as
# its last number. The rail must be down, because `rail_up` sets its routes again. The new address
# is added before the old one is removed, so that its GID has another index.
rail_readdress() {
  local side=$1 i=$2 new=192.168.$((100 + $2)).$3 device=e$1$2 old pref=$((50 + 2 * $2))
  old=$(rail_address "$side" "$i")
  # Otherwise removing an address would remove later ones of its subnet too.
  sysctl -qw "net.ipv4.conf.$device.promote_secondaries=1"
  ip addr add "$new/24" dev "$device"
  rail_gid_wait "$side$i" "$new"
  ip addr del "$old/24" dev "$device"
  [[ $side == b ]] || pref=$((pref + 1))
  ip rule del pref "$pref"
  ip rule add pref "$pref" to "$new" lookup $((pref + 150))
}

# rail_gid_index DEVICE ADDRESS: prints the index of an IPv4 address's GID. Fails if there is none.
rail_gid_index() {
  local numbers gid file
  IFS=. read -ra numbers <<<"$2"
  gid=0000:0000:0000:0000:0000:ffff:$(printf '%02x%02x:%02x%02x' "${numbers[@]}")
  file=$(grep -lx "$gid" /sys/class/infiniband/"$1"/ports/1/gids/* 2>/dev/null | head -n 1)
  [[ -n $file ]] && basename "$file"
}

# rail_gid_wait DEVICE ADDRESS: waits until the address has a GID (the RDMA core notices a new
# address a little later).
rail_gid_wait() {
  wait_until 10 rail_gid_index "$@" >/dev/null || {
    echo "rails: $1 has no GID for $2" >&2
    return 1
  }
}

# rail_wait I STATE: waits until both ends' ports have STATE (the RDMA core notices a link's change
# a little later).
rail_wait() {
  local device
  for device in "a$1" "b$1"; do
    wait_until 10 grep -q "$2" "/sys/class/infiniband/$device/ports/1/state" || {
      echo "rails: $device did not become $2" >&2
      return 1
    }
  done
}

# wait_until SECONDS COMMAND...: runs the command every 0.1 s until it succeeds. Fails if it has not
# succeeded after SECONDS, not counting the time of the command itself.
wait_until() {
  local tries=$((10 * $1))
  shift
  until "$@"; do
    ((tries-- > 0)) || return 1
    sleep 0.1
  done
}

# rail_rate I RATE: limits both directions of rail I to RATE. The queue is long enough to drop
# nothing.
rail_rate() {
  tc qdisc replace dev "ea$1" root tbf rate "$2" burst 64k latency 4s
  tc qdisc replace dev "eb$1" root tbf rate "$2" burst 64k latency 4s
}

# equal_rails COUNT: limits rails 0..COUNT-1 to 80 Mb/s each, so that they are about equal.
equal_rails() {
  local i
  for ((i = 0; i < $1; i++)); do rail_rate "$i" 80mbit; done
}

# rail_slow I DELAY: delays each packet of rail I by DELAY ("5ms"); replaces a rate.
rail_slow() {
  tc qdisc replace dev "ea$1" root netem delay "$2" limit 100000
  tc qdisc replace dev "eb$1" root netem delay "$2" limit 100000
}

# rail_free I: removes a rate or a delay.
rail_free() {
  tc qdisc del dev "ea$1" root 2>/dev/null || true
  tc qdisc del dev "eb$1" root 2>/dev/null || true
}

# rail_black_hole I: loses all packets of rail I; its ports stay ACTIVE.
rail_black_hole() {
  tc qdisc replace dev "ea$1" root netem loss 100%
  tc qdisc replace dev "eb$1" root netem loss 100%
}

# rail_down I, rail_up I: pulls rail I's cable, or puts it back. A link that goes down loses its
# routes.
rail_down() {
  ip link set "ea$1" down
  rail_wait "$1" DOWN
}

rail_up() {
  ip link set "ea$1" up
  rail_routes "$1"
  rail_wait "$1" ACTIVE
}

# rails_remove: restores the state before `rails`.
rails_remove() {
  local i
  for ((i = 0; i < 16; i++)); do
    [[ -e /sys/class/net/ea$i ]] || continue
    rdma link del "a$i"
    rdma link del "b$i"
    ip link del "ea$i"
    # The other end is removed too, unless a bridge joined the two ends.
    ip link del "eb$i" 2>/dev/null || true
    ip rule del pref $((10 + 2 * i))
    ip rule del pref $((11 + 2 * i))
    ip rule del pref $((50 + 2 * i))
    ip rule del pref $((51 + 2 * i))
  done
  while ip rule del pref 5 2>/dev/null; do :; done
  ip route flush table 200 2>/dev/null || true
  ip route flush table 201 2>/dev/null || true
  ip netns del router 2>/dev/null || true
  ip link del wire 2>/dev/null || true
  sysctl -qw net.ipv4.conf.{all,default}.arp_ignore=0
  ip rule add pref 0 lookup local
  ip rule del pref 100
}

# rail_bytes SIDE I, rail_packets SIDE I: prints the total bytes of netdev eSIDEI, and the total
# RDMA packets of device SIDEI.
rail_bytes() {
  cat "/sys/class/net/e$1$2/statistics/tx_bytes"
}

rail_packets() {
  cat "/sys/class/infiniband/$1$2/ports/1/hw_counters/sent_pkts"
}
