# shellcheck shell=bash
# All cables are pulled in mid-transfer. If they are back in time, the job continues. If not, both
# ends fail with an error that names the loss.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

# all_down_for NAME SECONDS: takes all rails down in mid-transfer of that run.
all_down_for() {
  local i
  once_connected "$1"
  for i in 0 1; do rail_down "$i"; done
  sleep "$2"
  for i in 0 1; do rail_up "$i"; done
}

rails 2 80mbit
all_down_for in-time 3 &
breaker=$!
spark in-time all-gather a0,a1 b0,b1 -b 2M -e 2M -n 100 -w 1 -c 1 "${slow_wire[@]}"
wait "$breaker"
check_table 1
check_back 0

all_down_for too-late 12 &
breaker=$!
status=0
spark_status too-late all-gather a0,a1 b0,b1 -b 2M -e 2M -n 200 -w 1 -c 1 "${slow_wire[@]}" \
  --rank-env 0:NCCL_SPARK_LOSS_TIMEOUT_S=4 --rank-env 1:NCCL_SPARK_LOSS_TIMEOUT_S=4 || status=$?
wait "$breaker"
[[ $status != 0 ]] || fail "a job without any rail for 12 s succeeded"
check_says 'no usable rail to .* for .*NCCL_SPARK_LOSS_TIMEOUT_S=4.*a0:1 to b0:1' "which rails were lost, and the limit"
