#!/bin/bash
# Storms of events in real time: functions, ports and whole NICs go and return, again and again.
#
#   storms.sh                 two processes over the software fabric, used as NCCL's proxy thread
#                             uses them. SPARK_STORM_SEED and SPARK_STORM_RUNS choose the runs
#                             (default: seed 0, 5 runs of some 10 s each)
#   storms.sh nccl DIR [SECONDS [PROGRAM]...]
#                             real NCCL on a GPU: DIR is a build of nccl-tests. A storm of SECONDS
#                             seconds (default 60) for each program (default: all_reduce, the same
#                             with LL, all_gather, alltoall), with two ranks. If there is only one
#                             GPU, start MPS before. SPARK_STORM_SEED as above. If SECONDS is
#                             `twice`, both NICs leave twice: with seed 0 at once, with seed 1 after
#                             all ports, with seed 2 after single ports, three, and all
#
# Each run prints its seed and its events. It fails if it does not end, or if a byte is wrong.
set -euo pipefail

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$checkout/target}
export SPARK_STORM_SEED=${SPARK_STORM_SEED:-0}
bin=$CARGO_TARGET_DIR/release

main() {
  cd "$checkout"
  if [[ ${1:-} == nccl ]]; then
    shift
    [[ $# -ge 1 ]] || { echo "storms: which build of nccl-tests? storms.sh nccl DIR" >&2; exit 2; }
    with_nccl "$@"
  else
    export SPARK_STORM_RUNS=${SPARK_STORM_RUNS:-5}
    storms --exact in_real_time
  fi
}

# Runs an ignored test of tests/storms.rs, as `cargo test` has built it.
storms() { cargo test --quiet --test storms -- "$@" --ignored --nocapture; }

with_nccl() {
  local dir=$1 seconds=${2:-60} program protocol name
  local limit_s=300 iterations=900
  [[ $seconds == twice ]] || limit_s=$((4 * seconds + 60)) iterations=$((seconds * 12))
  shift $(($# > 2 ? 2 : $#))
  [[ $# -gt 0 ]] || set -- all_reduce all_reduce:LL all_gather alltoall
  cargo build --quiet --release --workspace
  job='' log=$(mktemp)
  trap 'rm -f "$log"; [[ -z $job ]] || kill -- "-$job"' EXIT
  export SOFTVERBS_DIR=${SOFTVERBS_DIR:-/dev/shm/spark-storms}
  mkdir -p "$SOFTVERBS_DIR"
  for program in "$@"; do
    protocol=${program#*:} program=${program%%:*} name=storm-$SPARK_STORM_SEED
    [[ $protocol != "$program" ]] || protocol=^LL128
    echo "seed $SPARK_STORM_SEED: $program, NCCL_PROTO=$protocol"
    NCCL_PROTO=$protocol setsid "$bin/spark-lab" as-spark --allow-few-channels "$bin/nccl-spark" nccl-tests "$program" \
      --dir "$dir" --profile spark-2cable --scale 0.1 --fabric-name "$name" -T "$limit_s" \
      -- -b 64M -e 64M -n "$iterations" -c 1 >"$log" 2>&1 &
    job=$!
    until "$bin/nccl-spark" fabric status --fabric-name "$name" 2>/dev/null | grep -q 'node 1 (process'; do
      kill -0 "$job" 2>/dev/null || { cat "$log"; exit 1; }
      sleep 0.2
    done
    # Until the ranks are connected and send.
    sleep 3
    SOFTVERBS_FABRIC=$name SPARK_STORM_SECONDS=$seconds storms --exact rage_in_a_fabric
    wait "$job" || { job='' && tail -n 20 "$log"; exit 1; }
    grep -E 'bus bandwidth|wrong' "$log"
    SPARK_STORM_SEED=$((SPARK_STORM_SEED + 1))
  done
}

main "$@"
