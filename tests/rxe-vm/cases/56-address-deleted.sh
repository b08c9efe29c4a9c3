# shellcheck shell=bash
# Interfaces lose addresses in mid-transfer, as by `ip address del`, and by `netplan apply` without
# link-local addresses, which takes all addresses of a node. The links stay up. The log names the
# addresses, the job goes on, and every byte is right.
#
# The kernel's RDMA core treats soft-RoCE's GID table as mlx5's. But here the plugin destroys the
# queue pairs that hold the old entry before the address returns, so it returns at the same index.
# And soft-RoCE has no table in hardware. It looks for a route for each packet, and without the
# address there is none: a queue pair may fail with a local error before the plugin has read the
# table.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

# losses SIDE I CAUSE: counts the lines so far that report the loss of the rail for this cause, an
# extended regular expression.
losses() {
  grep -Ec "rail $1$2:1 to [^ ]* lost: $3" "$BED_LOGS/deleted.txt" || true
}

# has_lost SIDE I COUNT: true if more than COUNT lines report that this end lost the rail.
has_lost() {
  (($(losses "$1" "$2" '(address|local QP)') > $3))
}

# says_lost SIDE I COUNT: waits until `has_lost`.
says_lost() {
  wait_until 30 has_lost "$@" || fail "no line reports that rail $1$2 was lost with its address"
}

# put_back SIDE I ADDRESS: adds the address again, with the routes that its deletion has removed.
put_back() {
  ip addr add "$3/24" dev "e$1$2"
  rail_routes "$2"
  rail_gid_wait "$1$2" "$3"
}

# deleted_alone SIDE I SECONDS: one address goes and comes back after SECONDS. The interface keeps
# its link-local address.
deleted_alone() {
  local side=$1 i=$2 address before after lost
  address=$(rail_address "$side" "$i")
  before=$(rail_gid_index "$side$i" "$address")
  lost=$(losses "$side" "$i" '(address|local QP)')
  ip addr del "$address/24" dev "e$side$i"
  sleep "$3"
  put_back "$side" "$i" "$address"
  says_lost "$side" "$i" "$lost"
  after=$(rail_gid_index "$side$i" "$address")
  echo "rail $side$i: GID $before before, $after now"
}

# all_deleted SIDE: all addresses of all rails go, and the IPv4 addresses come back.
all_deleted() {
  local side=$1 i
  local -a addresses lost
  for i in 0 1 2 3; do
    lost[i]=$(losses "$side" "$i" '(address|local QP)')
    addresses[i]=$(rail_address "$side" "$i")
    ip addr flush dev "e$side$i"
  done
  for i in 0 1 2 3; do says_lost "$side" "$i" "${lost[i]}"; done
  for i in 0 1 2 3; do put_back "$side" "$i" "${addresses[i]}"; done
}

trouble() {
  once_connected deleted
  deleted_alone b 1 1
  sleep 2
  deleted_alone a 2 0
  sleep 2
  all_deleted a
}

# The job has to outlast the trouble, on a busy machine too.
rails 4 80mbit
trouble &
breaker=$!
spark deleted sendrecv a0,a1,a2,a3 b0,b1,b2,b3 -b 2M -e 2M -n 400 -w 1 -c 1 "${slow_wire[@]}"
wait "$breaker" || fail "the addresses could not be deleted and added"
check_table 1
check_back 0 1 2 3
check_says 'lost: address 192\.168\.10[0-3]\.[12] left index [0-9]+ of the GID table' "which address was lost"

# All four rails carry the next job.
check_next_job
