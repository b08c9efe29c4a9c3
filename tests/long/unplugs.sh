#!/bin/bash
# Removes PCI functions from the bus and returns them, repeatedly, under a running job: two ranks
# over the software fabric, in real time. Prints the resources of each rank before, during and
# after. Fails if a byte is wrong, a rail does not recover, or a resource is left behind.
#
#   unplugs.sh [COUNT]           total number of removed functions, default 1000
#   unplugs.sh gap [ROUNDS]      default 5: the pause of a job while one function, and while the
#                                whole NIC, is away for a second
#
# Most rounds remove one function of each node, two different ones together. Some rounds remove the
# whole NIC of a node, or reset the firmware of a function. Each round waits, for at most 60 s,
# until both ranks have logged that every lost rail has recovered.
#
# These must end exactly as after the first 40 removals: descriptors, threads, registrations and
# queue pairs of each rank, and the files of the fabric. Anonymous memory may grow by 1 MiB. A
# leaked lane has 30 KiB or more (its queues), so 40 leaks in 1000 removals would show. Smaller
# objects are counted one by one.
# (The allocator's own variation was up to 60 KiB in load.sh connections.)
set -euo pipefail

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$checkout/target}
nccl_spark=$CARGO_TARGET_DIR/debug/nccl-spark
rails=(rocep1s0f0 roceP2p1s0f0 rocep1s0f1 roceP2p1s0f1)
warm_up=40
grows_kib=1024
patience_s=60
name=unplugs-$$
away_s=0.05
unplugged=0 losses=0 job='' dir=''

main() {
  local count=${1:-1000}
  [[ $count != gap ]] || { gaps "${2:-5}"; return; }
  [[ $count =~ ^[0-9]+$ && $count -gt $warm_up ]] || die "COUNT must be a number above $warm_up"
  cd "$checkout"
  cargo build --quiet --workspace
  dir=$(mktemp -d)
  export SOFTVERBS_DIR=$dir
  log=$dir/log
  trap 'end_job; rm -rf "$dir"' EXIT
  start_job
  take_away_until "$warm_up"
  local before after
  before=$(held)
  show
  while [[ $unplugged -lt $count ]]; do
    take_away_until $((unplugged + 120 < count ? unplugged + 120 : count))
    show
  done
  after=$(held)
  [[ $before == "$after" ]] || die "left behind: before and after"$'\n'"$before"$'\n'"$after"
  for rank in 0 1; do
    [[ $((anonymous_kib[rank] - warm_kib[rank])) -le $grows_kib ]] || die "rank $rank has grown by more than $grows_kib KiB"
  done
  end_job
  local rows wrong
  rows=$(rows | wc -l)
  wrong=$(rows | awk '$9 != 0' | wc -l)
  [[ $rows -gt 0 && $wrong -eq 0 ]] || die "$wrong of $rows rows have wrong bytes"
  ! grep -m 1 -E 'internal error|panicked' "$log" || die "the log above"
  echo "$unplugged functions taken away, $(count_of 'recovered after') recoveries logged by both ranks, longest $(longest) s"
  echo "$rows rows of 5 times 4 MiB each way, every byte checked: 0 wrong"
}

# Runs a job for each case, at the fabric's full rate. Prints its longest pause, as the job measured
# it, and the ranks' log lines about rails.
gaps() {
  local round what file
  [[ $1 =~ ^[0-9]+$ && $1 -gt 0 ]] || die "ROUNDS must be a number above 0"
  cd "$checkout"
  cargo build --quiet --workspace
  dir=$(mktemp -d)
  export SOFTVERBS_DIR=$dir
  log=$dir/log file=$dir/json
  trap 'end_job; rm -rf "$dir"' EXIT
  for what in none one_function whole_nic; do
    for ((round = 1; round <= $1; round++)); do
      "$nccl_spark" sendrecv --fabric-name "$name" --profile spark-2cable --scale 0.02 -b 4M -e 4M -n 1000 -c 1 -v --json "$file" >"$log" 2>&1 &
      job=$!
      until fabric status 2>/dev/null | grep -q '^  node 1 (process'; do sleep 0.1; done
      # Waits until the ranks are connected and send.
      sleep 2
      away_s=1
      case $what in
        one_function) one_function 0:rocep1s0f0 >/dev/null ;;
        whole_nic) whole_nic 0 >/dev/null ;;
      esac
      wait "$job" || die "the job has failed"$'\n'"$(tail -n 20 "$log")"
      job=
      echo "$what $round: $(sed -nE 's/^ *"longest_pause_us": ([0-9.]+),?$/longest pause \1 us/p; s/^ *"wrong": ([0-9]+),?$/\1 wrong/p' "$file" | paste -sd,)," \
        "recovered after $(grep -oE 'recovered after [0-9.]+' "$log" | awk '{print $3}' | sort -g | uniq -c | awk '{printf "%s%s s (%s times)", sep, $2, $1; sep=", "}')"
    done
  done
}

# Starts a job that prints rows until it is ended; each message is a byte larger than the one before
# and has its own data.
start_job() {
  "$nccl_spark" sendrecv --fabric-name "$name" --profile spark-2cable --scale 0.02 -b 4M -e 5M -i 1 -n 1 -w 0 -c 4 -v >"$log" 2>&1 &
  job=$!
  local deadline=$((SECONDS + patience_s))
  until [[ $(rows | wc -l) -gt 0 ]]; do
    check_time "$deadline" "the job does not come up"
  done
  mapfile -t pids < <(fabric status | sed -nE 's/^  node [01] \(process ([0-9]+)\).*/\1/p')
  [[ ${#pids[@]} -eq 2 ]] || die "no two ranks: $(fabric status)"
}

end_job() {
  [[ -n $job ]] || return 0
  # Not by SIGINT, which background jobs of a shell ignore.
  kill -TERM "$job" 2>/dev/null || true
  wait "$job" 2>/dev/null || true
  job=
}

# Runs rounds until this many functions were removed.
take_away_until() {
  local turn node rail
  while [[ $unplugged -lt $1 ]]; do
    turn=$((turns++))
    node=$((turn % 2)) rail=${rails[turn / 2 % 4]}
    case $((turn % 20)) in
      9) take_away 4 whole_nic 0 ;;
      19) take_away 4 whole_nic 1 ;;
      4 | 15) take_away 1 fabric reset "$node:$rail" ;;
      *) take_away 2 two_functions "$node:$rail" "$((1 - node)):${rails[(turn / 2 + 1) % 4]}" ;;
    esac
  done
}

one_function() {
  fabric unplug "$1"
  sleep $away_s
  fabric plug "$1"
}

two_functions() {
  fabric unplug "$1"
  fabric unplug "$2"
  sleep $away_s
  fabric plug "$1"
  fabric plug "$2"
}

whole_nic() {
  local rail
  for rail in "${rails[@]}"; do fabric unplug "$1:$rail"; done
  sleep $away_s
  for rail in "${rails[@]}"; do fabric plug "$1:$rail"; done
}

# take_away FUNCTIONS COMMAND...: removes FUNCTIONS functions by COMMAND. Waits until both ranks
# have logged their losses, and as many recoveries.
take_away() {
  local functions=$1 deadline
  shift
  "$@" >/dev/null
  deadline=$((SECONDS + patience_s))
  until [[ $(count_of ' lost: ') -ge $((losses + 2 * functions)) && $(count_of ' lost: ') -eq $(count_of 'recovered after') ]]; do
    check_time "$deadline" "not recovered $patience_s s after: $*"
  done
  losses=$(count_of ' lost: ')
  unplugged=$((unplugged + functions))
}

check_time() {
  [[ $SECONDS -lt $1 ]] || die "$2"$'\n'"$(tail -n 20 "$log")"
  kill -0 "$job" 2>/dev/null || die "the job has ended"$'\n'"$(tail -n 20 "$log")"
  sleep 0.1
}

# Prints the resources that must not change.
held() {
  local rank
  for rank in 0 1; do
    echo "rank $rank: $(find "/proc/${pids[rank]}/fd" -mindepth 1 | wc -l) descriptors," \
      "$(find "/proc/${pids[rank]}/task" -mindepth 1 -maxdepth 1 | wc -l) threads," \
      "$(fabric status | sed -nE "s/^  node $rank \(process [0-9]+\): (.*)/\1/p")"
  done
  echo "$(find "$SOFTVERBS_DIR/$name" -not -path '*/removed*' | wc -l) files of the fabric"
}

show() {
  local rank
  echo "$unplugged functions taken away, $(rows | wc -l) rows, $SECONDS s"
  for rank in 0 1; do
    anonymous_kib[rank]=$(awk '/^Anonymous:/ {print $2}' "/proc/${pids[rank]}/smaps_rollup")
    : "${warm_kib[rank]:=${anonymous_kib[rank]}}"
  done
  held | sed "1s/\$/, ${anonymous_kib[0]} KiB of anonymous memory/; 2s/\$/, ${anonymous_kib[1]} KiB of anonymous memory/; s/^/  /"
}

rows() { grep -E '^ +[0-9]+ +[0-9]+ +int8 ' "$log" || true; }

count_of() { grep -c -- "$1" "$log" || true; }

longest() { grep -oE 'recovered after [0-9.]+' "$log" | awk '{print $3}' | sort -g | tail -n 1; }

fabric() { "$nccl_spark" fabric "$@" --fabric-name "$name"; }

die() {
  echo "unplugs: $*" >&2
  exit 1
}

turns=0 pids=() anonymous_kib=() warm_kib=()
main "$@"
