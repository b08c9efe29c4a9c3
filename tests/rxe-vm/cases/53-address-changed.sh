# shellcheck shell=bash
# Cables are pulled in mid-transfer, and their rails return with another address, and so another GID
# at another index of the port's table. Rail 1 changes its address on node B, and rail 2 on node A.
# The rails return by their new GIDs, every byte is right, and the next job uses all of them.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

# readdressed SIDE I HOST: pulls rail I, changes its address on SIDE, and puts it back.
readdressed() {
  local side=$1 i=$2 before after
  before=$(rail_gid_index "$side$i" "$(rail_address "$side" "$i")")
  rail_down "$i"
  rail_readdress "$side" "$i" "$3"
  after=$(rail_gid_index "$side$i" "$(rail_address "$side" "$i")")
  [[ $before != "$after" ]] || fail "the GID of $side$i has kept its place $before"
  sleep 0.3
  rail_up "$i"
  echo "rail $side$i: GID $before before, $after now"
}

# returns SIDE I: counts rail I's recoveries so far, in all connections of that rank, in the output
# $BED_LOGS/readdressed.txt.
returns() {
  local other=b
  [[ $1 == a ]] || other=a
  grep -Ec "rail $1$2:1 to [^ ]* recovered .*peer rail $other$2:1" "$BED_LOGS/readdressed.txt" || true
}

# returned_since I COUNT_A COUNT_B: true if rail I has more recoveries than these on both sides.
returned_since() {
  (($(returns a "$1") > $2 && $(returns b "$1") > $3))
}

# changed SIDE I HOST: changes the address of rail I's end on SIDE. Both ranks have to log that the
# rail has returned.
changed() {
  local before_a before_b
  before_a=$(returns a "$2")
  before_b=$(returns b "$2")
  readdressed "$@"
  wait_until 90 returned_since "$2" "$before_a" "$before_b" || fail "rail $2 does not return with a new address on side $1"
}

trouble() {
  once_connected readdressed
  changed b 1 22
  changed a 2 11
}

# The job has to outlast the trouble, on a busy machine too.
rails 4 80mbit
trouble &
breaker=$!
spark readdressed sendrecv a0,a1,a2,a3 b0,b1,b2,b3 -b 2M -e 2M -n 400 -w 1 -c 1 "${slow_wire[@]}"
wait "$breaker" || fail "rails whose addresses change did not return"
check_table 1
check_lost 1 2

# All four rails carry the next job, over the new addresses.
[[ $(rail_address b 1) == 192.168.101.22 && $(rail_address a 2) == 192.168.102.11 ]] || fail "rails 1 and 2 have their old addresses"
check_next_job
