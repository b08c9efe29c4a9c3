# shellcheck shell=bash
# The ends of a rail are in two subnets, with a router between. The rail pairs by the kernel's
# routes. Then the router forwards only RoCE packets of one flow label, as the rules in an owner's
# ring may do.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

routed_rail
mark 1
spark routed alltoall a0 b0 -b 1M -e 4M -f 4 -n 5 -w 1 -c 1
check_table 2
check_says 'connected with .* over 1 rail: a0:1 to b0:1' "that the routed rail is used"
check_carried 0

# Flow label 16382 is UDP source port 65534 (a rule cannot name the last port).
in_router ip rule add pref 5 ipproto udp sport 65534 dport 4791 lookup main
in_router ip rule add pref 6 ipproto udp dport 4791 prohibit
label=(--rank-env 0:NCCL_SPARK_FLOW_LABEL=16382 --rank-env 1:NCCL_SPARK_FLOW_LABEL=16382)
spark labelled all-gather a0 b0 -b 1M -e 1M -n 5 -w 1 -c 1 "${label[@]}"
check_table 1
limit=(--rank-env 0:NCCL_SPARK_CONNECT_TIMEOUT_S=12 --rank-env 1:NCCL_SPARK_CONNECT_TIMEOUT_S=12)
if spark_status unlabelled all-gather a0 b0 -b 1M -e 1M -n 5 -w 1 -c 1 "${limit[@]}"; then
  fail "packets without the label were forwarded"
fi
check_says 'this path is routed: each host on it must forward RoCE' "what the path needs"
