#!/bin/bash
# Started in the guest by bench.sh: bench-guest.sh [CASE]...
# bench.sh sets BED_TARGET (cargo's build folder), BED_AGAINST (another plugin's library, or empty)
# and BED_ROUNDS.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=SCRIPTDIR/rails.sh
source "$here/rails.sh"
readonly release=$BED_TARGET/release results=/run/bed/results

# On slow wires, the ranks sleep briefly when no data has moved. They poll on the processors on
# which the kernel runs both NICs, and would slow it down. Where the processors are the limit, both
# ranks share one and yield to each other. The messages in flight on slow wires take longer than the
# time after which a Spark's rail counts as lost, so both sides use NCCL's own time-out.
readonly slow_wire=(--rest-us 200 --rank-env 0:NCCL_IB_TIMEOUT=20 --rank-env 1:NCCL_IB_TIMEOUT=20)

# bench NAME RAILS SCENARIO [OPTION]...: runs SCENARIO over rails 0..RAILS-1.
bench() {
  local name=$1 count=$2 i hca_a='' hca_b='' against=() prefix=()
  shift 2
  [[ " $* " == *" --rest-us "* ]] || prefix=(taskset -c 1)
  for ((i = 0; i < count; i++)); do hca_a+=${hca_a:+,}a$i hca_b+=${hca_b:+,}b$i; done
  if [[ -n $BED_AGAINST ]]; then
    against=(--against "$BED_AGAINST" --against-env NCCL_IB_MERGE_NICS=1)
  fi
  echo "== $name: $count rails"
  "${prefix[@]}" "$release/spark-lab" bench "$@" --rounds "$BED_ROUNDS" --plugin "$release/libnccl_net_spark.so" "${against[@]}" \
    --rank-env "0:NCCL_IB_HCA==$hca_a" --rank-env 0:NCCL_SOCKET_IFNAME=ea0 \
    --rank-env "1:NCCL_IB_HCA==$hca_b" --rank-env 1:NCCL_SOCKET_IFNAME=eb0 \
    --json "$results/$name.json" 2>&1 | grep -v 'Could not find real path' | tee "$results/$name.txt"
}

# With this setting, net_ib (NCCL's own transport) stripes large messages evenly. Without it, net_ib
# sends whole messages by turns.
striped=()
[[ -z $BED_AGAINST ]] || striped=(--against-env NCCL_IB_SPLIT_DATA_ON_QPS=1)
readonly striped

# Makes the ranks' processor receive the packets of all rails.
on_one_processor() {
  local queue
  for queue in /sys/class/net/e[ab]?/queues/rx-0/rps_cpus; do echo 2 >"$queue"; done
}

case_equal() {
  rails 4 80mbit
  bench equal 4 bandwidth -b 512K -e 512K --seconds 4 --limit-mbps 320 "${striped[@]}" "${slow_wire[@]}"
}

case_unequal() {
  rails 4 80mbit
  rail_rate 3 20mbit
  bench unequal 4 bandwidth -b 512K -e 512K --seconds 4 --limit-mbps 260 "${striped[@]}" "${slow_wire[@]}"
}

case_slowdown() {
  rails 4 80mbit
  bench slowdown 4 slowdown --slowdown-bytes 512K --seconds 2 --limit-mbps 320 "${striped[@]}" "${slow_wire[@]}" \
    --fall "bash -c 'source $here/rails.sh; rail_rate 2 20mbit'" \
    --return "bash -c 'source $here/rails.sh; rail_rate 2 80mbit'"
}

# A cable is pulled and put back. Only the plugin runs, because another plugin's job would end then.
case_lost() {
  rails 4 80mbit
  BED_AGAINST='' bench lost 4 slowdown --slowdown-bytes 512K --seconds 2 --limit-mbps 320 "${slow_wire[@]}" \
    --fall "bash -c 'source $here/rails.sh; rail_down 2'" --return "bash -c 'source $here/rails.sh; rail_up 2'"
}

case_latency() {
  rails 4
  on_one_processor
  bench latency-1 1 latency -b 8 -e 8 --seconds 2
  bench latency-4 4 latency -b 8 -e 8 --seconds 2
}

case_stream() {
  rails 4
  on_one_processor
  bench stream-1 1 bandwidth -b 4K -e 4K --seconds 2
  bench stream-4 4 bandwidth -b 4K -e 4K --seconds 2
}

[[ $# -gt 0 ]] || set -- equal unequal slowdown lost latency stream
for name in "$@"; do
  [[ $(type -t "case_$name") == function ]] || { echo "bench-guest: no case $name" >&2; exit 2; }
  "case_$name"
  rails_remove
done
