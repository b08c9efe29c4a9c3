# shellcheck shell=bash
# nccl-spark doctor on the kernel's soft-RoCE. Checks its findings on the unchanged bed, and with
# each fault that the kernel can have here: a port down, an unequal MTU, no address, twins of one
# wire that answer ARP for each other, a limit of locked memory. Its exit status agrees with its
# JSON.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

# Command prefix for the doctor.
limited=()

# doctor NAME STATUS [VARIABLE=VALUE]...: examines node A, with rails a0 and a1 unless the variables
# differ. The doctor has to end with STATUS. Sets $output to a file with its text, followed by the
# findings again, one on each line. Sets $found to the severity and id of each finding, one on each
# line: "fragile arp".
doctor() {
  local name=$1 wanted=$2 release=${BED_TARGET:+$BED_TARGET/release} status=0 verdict
  shift 2
  output=$BED_LOGS/$name.txt answer=$BED_LOGS/$name.json
  env NCCL_NET=Spark NCCL_NET_PLUGIN="${release:-/usr/local/lib}/libnccl_net_spark.so" NCCL_SOCKET_IFNAME=lo NCCL_IB_HCA=a0,a1 "$@" \
    timeout 60 "${limited[@]}" "${release:+$release/}nccl-spark" doctor --json "$answer" >"$output" 2>&1 || status=$?
  echo "== $name: status $status"
  # The text is folded, so a searched phrase may span two lines. python3 refuses invalid JSON.
  found=$(python3 -ISc 'import json, sys
told = json.load(open(sys.argv[1]))
print(told["verdict"])
for one in told["findings"]: print(one["severity"], one["id"])
with open(sys.argv[2], "a") as out:
    for one in told["findings"]: print(one["text"], file=out)' "$answer" "$output") || fail "$name: no JSON: $(head -c 300 "$answer")"
  verdict=$(head -n 1 <<<"$found") found=$(sed 1d <<<"$found")
  cat "$output"
  [[ $status == "$wanted" ]] || fail "$name: the doctor ended with status $status in place of $wanted"
  case $status:$verdict in
    0:good | 1:impaired | 3:broken) ;;
    *) fail "$name: status $status, and the verdict in JSON is $verdict" ;;
  esac
}

# check_found [SEVERITY ID]...: checks that the last doctor found exactly these. Ignores
# subnet-clash, which the bed causes: both nodes are one host, so node B's interfaces are in the
# subnets of node A's rails.
check_found() {
  local wanted
  wanted=$(while [[ $# -gt 0 ]]; do echo "$1 $2"; shift 2; done | sort)
  [[ $(sed '/ subnet-clash$/d' <<<"$found" | sort) == "$wanted" ]] || fail "found: ${found:-nothing}; wanted: ${wanted:-nothing}"
}

# Runs the commands of a finding, as the doctor prints them: `follow ID cure`, or `follow ID now` for
# those that last until the next boot.
follow() {
  local commands
  commands=$(python3 -ISc 'import json, sys
found = [one for one in json.load(open(sys.argv[1]))["findings"] if one["id"] == sys.argv[2]]
print(found[0][sys.argv[3]])' "$answer" "$1" "$2") || fail "the doctor names no $2 for $1"
  echo "following: $commands"
  # shellcheck disable=SC2317 # The commands call sudo.
  (sudo() { "$@"; } && eval "$commands") || fail "the doctor's command for $1 failed: $commands"
}

# A machine with the kernel's drivers and without a device.
doctor no-device 3
check_found broken no-rdma-device

rails 2
sysctl -qw net.ipv4.conf.all.arp_ignore=1
doctor as-it-is 1
check_found
check_says 'eb0 is in the subnet of a0 \(192\.168\.100\.0/24\)' "that node B's interface shares a subnet"
check_says 'a0:1 .*10 Gb/s' "what the picture has of a0"
check_says 'together: ' "what both rails carry together"
# Without node B the doctor finds nothing.
ip addr flush dev eb0 scope global
ip addr flush dev eb1 scope global
doctor healthy 0
[[ -z $found ]] || fail "found on a healthy node: $found"
check_says '^The plugin works here' "that all is well"

# The doctor judges variables too.
doctor kept-out 3 NCCL_NET=IB
check_found broken network-not-spark
doctor ib-disable 1 NCCL_IB_DISABLE=1
check_found fragile ib-disable

# Two limits of locked memory: too little for any job, and enough for NCCL alone. The kernel does
# not limit processes with CAP_IPC_LOCK.
(
  ulimit -l 8192
  doctor memlock-lifted 0
  check_found
  limited=(setpriv --bounding-set -ipc_lock)
  doctor memlock 3
  check_found broken memlock
  check_says 'locked memory is 8 MB' "how much is allowed"
)
(
  ulimit -l $((16 << 20))
  limited=(setpriv --bounding-set -ipc_lock)
  doctor memlock-large 1
  check_found fragile memlock
)

rail_down 1
doctor port-down 1
check_found fragile hca-filter-unusable
check_says 'NCCL_IB_HCA names a1, which is not usable: the port is down' "that a1 is down"
doctor port-down-alone 3 NCCL_IB_HCA=a1
check_found broken no-rail broken no-rail fragile hca-filter-unusable
check_says 'a0, b0 and b1 cannot be used: NCCL_IB_HCA excludes them' "which ports the filter leaves out"
doctor port-down-again 1
follow hca-filter-unusable now
rail_wait 1 ACTIVE
doctor port-up 0

ip link set ea1 mtu 1500
doctor one-small-mtu 1
check_found slow small-mtu
check_says 'a1 has a path MTU of 1024 bytes because ea1 has MTU 1500' "which interface has the small MTU"
ip link set ea0 mtu 1500
doctor small-mtus 1
check_found slow small-mtu
check_says 'a0 and a1 have a path MTU of 1024 bytes because ea0 and ea1 have MTU 1500' "both interfaces"
follow small-mtu now
doctor cured-mtus 0

ip addr flush dev ea1
doctor no-address 1
check_found fragile hca-filter-unusable
check_says 'its only GIDs are link-local addresses that its interface ea1' "what a1 lacks"
ip addr add 192.168.101.1/24 dev ea1
rail_gid_wait a1 192.168.101.1

doctor other-interface 3 NCCL_SOCKET_IFNAME=eth7
check_found broken socket-ifname

# Twins of one wire answer ARP for each other with Ubuntu's settings. With the doctor's cure they do
# not.
rails_remove
bridged_rails 2
ip addr flush dev eb0 scope global
ip addr flush dev eb1 scope global
sysctl -qw net.ipv4.conf.all.rp_filter=2 net.ipv4.conf.all.arp_ignore=0
doctor twins 1
check_found fragile arp fragile shared-subnet
check_says 'for the address of one of a0 and a1 may be answered by another' "that the twins answer ARP for each other"
follow arp cure
grep -q 'arp_ignore=1' /etc/sysctl.d/90-nccl-spark.conf || fail "the cure for ARP does not last"
doctor twins-cured 0
[[ -z $found ]] || fail "found with the doctor's cure in place: $found"
