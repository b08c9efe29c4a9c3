# shellcheck shell=bash
# nccl-spark doctor --peer between the two nodes of the bed, with a partner that was started by
# hand, and its token. Each rail alone and both together are measured and graded. A slow rail and a
# rail that carries nothing are named.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

readonly release=${BED_TARGET:+$BED_TARGET/release}
readonly program=${release:+$release/}nccl-spark
export NCCL_NET=Spark NCCL_NET_PLUGIN=${release:-/usr/local/lib}/libnccl_net_spark.so NCCL_SPARK_PROBE_TIMEOUT_MS=20000
# On wires as slow as these, a measurement takes longer than the default time-out, and so does the
# first write of many queue pairs.
export NCCL_IB_TIMEOUT=18

# examine NAME: runs the doctor on node A with a partner on node B, over a0 and a1. The partner has
# to end without help. Sets $output to a file with the text, $json to a file with the answer as
# JSON, and $found to the findings between the two nodes.
examine() {
  local name=$1 address token partner status=0 out
  output=$BED_LOGS/$name.txt json=$BED_LOGS/$name.json out=$BED_LOGS/$name.partner
  NCCL_IB_HCA=b0,b1 NCCL_SOCKET_IFNAME=eb0 timeout 120 "$program" doctor --partner --interface eb0 >"$out" 2>&1 &
  partner=$!
  wait_until 20 grep -q '^nccl-spark-partner ' "$out" || true
  read -r _ _ address token < <(grep '^nccl-spark-partner ' "$out") || fail "the partner has said nothing in 20 s: $(cat "$out")"
  NCCL_IB_HCA=a0,a1 NCCL_SOCKET_IFNAME=ea0 SPARK_DOCTOR_TOKEN=$token \
    timeout 120 "$program" doctor --peer "$address" --json "$json" >"$output" 2>&1 || status=$?
  # The progress line overwrites itself.
  tr '\r' '\n' <"$output" | grep -v '█' || true
  echo "== $name: status $status"
  [[ $status == 1 ]] || fail "$name: the doctor ended with status $status in place of 1"
  wait "$partner" || fail "$name: the partner ended with status $?"
  found=$(python3 -ISc 'import json, sys
here = ("subnet-clash", "slow-failover")
for one in json.load(open(sys.argv[1]))["findings"]:
    if one["id"] not in here: print(one["severity"], one["id"], one["text"].split(" of ")[0])' "$json")
  echo "$found"
}

# rate_kbps PATH WAY: prints the rate of path PATH in kb/s, over all its bytes, in the direction WAY
# (to_peer or from_peer).
rate_kbps() {
  python3 -ISc 'import json, sys
figures = json.load(open(sys.argv[1]))["peer"]["paths"][int(sys.argv[2])]["measured"]
assert figures["wrong_bytes"] == 0, figures
print(int(figures[sys.argv[3]]["mbps"] * 1000))' "$json" "$1" "$2"
}

# check_rate PATH LEAST MOST: checks both ways, in kb/s.
check_rate() {
  local way kbps
  for way in to_peer from_peer; do
    kbps=$(rate_kbps "$1" "$way")
    echo "path $1 $way: $kbps kb/s"
    ((kbps >= $2 && kbps <= $3)) || fail "path $1 $way: $kbps kb/s, not between $2 and $3"
  done
}

# Wires of 12 Mb/s. Their ports still report 10 Gb/s, as a veth does, so both rails are bad. No rail
# carries more than its wire and the wire's burst allow. The lowest rate depends on the machine's
# load and is not checked, so a bad rail may be reported as slow-path or as slow-rail.
rails 2 12mbit
sysctl -qw net.ipv4.conf.all.arp_ignore=1
examine alike
[[ ${found//slow-rail/slow-path} == $'slow slow-path a0:1 to b0:1\nslow slow-path a1:1 to b1:1' ]] || fail "found between two rails that are alike: $found"
check_says 'a0:1 to b0:1: 0\.0[0-9]+ Gb/s \(0 %, BAD\) there' "how a0 is graded"
check_says 'of 9\.80 Gb/s' "what a rail of 10 Gb/s should carry"
check_rate 0 1 13200
check_rate 1 1 13200
check_rate 2 1 26400

# One rail gets a sixth of the rate. The doctor reports only that rail as slow-rail.
tc qdisc replace dev ea1 root netem rate 2mbit limit 100000
tc qdisc replace dev eb1 root netem rate 2mbit limit 100000
examine slow
[[ $found == $'slow slow-path a0:1 to b0:1\nslow slow-rail a1:1 to b1:1' ]] || fail "found with a1 slow: $found"
check_rate 0 1 13200
check_rate 1 1 2200

# Every packet of one rail is lost. Its ports are up, but nothing arrives.
rail_black_hole 1
NCCL_SPARK_PROBE_TIMEOUT_MS=2000
examine silent
grep -q '^slow pair-unreachable nothing gets through' <<<"$found" || fail "a1 is not said to carry nothing: $found"
check_says 'a1:1 to b1:1: carries no data' "that a1 carries nothing"
check_rate 0 1 13200
