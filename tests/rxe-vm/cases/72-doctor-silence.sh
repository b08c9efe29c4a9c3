# shellcheck shell=bash
# nccl-spark doctor --silence on the kernel's soft-RoCE, which keeps to the specification: both
# rails of node A report a destroyed queue pair, not before the specified time, apart from the
# kernel's ticks. With settings that make the report late, that is a finding.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

readonly release=${BED_TARGET:+$BED_TARGET/release}
export NCCL_NET=Spark NCCL_NET_PLUGIN=${release:-/usr/local/lib}/libnccl_net_spark.so NCCL_SOCKET_IFNAME=lo NCCL_IB_HCA=a0,a1

# measure NAME: measures both rails. Sets $json to a file with the answer.
measure() {
  local status=0
  json=$BED_LOGS/$1.json output=$BED_LOGS/$1.txt
  timeout 120 "${release:+$release/}nccl-spark" doctor --silence --json "$json" >"$output" 2>&1 || status=$?
  cat "$output"
  [[ $status == 0 || $status == 1 ]] || fail "$1: the doctor ended with status $status"
  python3 -ISc 'import json, sys
silence = json.load(open(sys.argv[1]))["silence"]
rails = {one["rail"]: one.get("reported_s") for one in silence["rails"]}
assert set(rails) == {"a0:1", "a1:1"}, rails
assert all(seconds and seconds >= 0.9 * silence["specified_s"] for seconds in rails.values()), silence' "$json" ||
    fail "$1: a rail was not measured, or reported too soon"
}

rails 2
measure usual
NCCL_IB_TIMEOUT=18 NCCL_IB_RETRY_CNT=3 measure late
grep -q '"late-report"' "$json" || fail "4 s is no finding"
check_says 'unset NCCL_IB_TIMEOUT NCCL_IB_RETRY_CNT' "what helps"
