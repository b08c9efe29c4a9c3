#!/bin/bash
# Builds the fuzz targets with libFuzzer's instrumentation, on stable Rust, and runs each from its
# kept seeds. Runs are repeatable: libFuzzer's random seed is always 1. Failing inputs are left in
# fuzz/artifacts/TARGET, and the last lines name the command that repeats them.
#
#   fuzz/run.sh [--executions N] [--jobs N] [--corpus FOLDER] [TARGET]...
#
#     --executions   number of executions of each target, including its seeds (default 200000);
#                    a tenth for `admission`, which uses TCP
#     --jobs         number of targets that run in parallel (default 1)
#     --corpus       folder that keeps interesting inputs for the next run; default: a scratch
#                    folder
#
# Repeats one input: $CARGO_TARGET_DIR/fuzz/HOST/release/TARGET FILE
set -euo pipefail
shopt -s inherit_errexit

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target_folder=${CARGO_TARGET_DIR:-$checkout/target}/fuzz
readonly all=(handle handshake control mailbox clear_to_send receives streams recovery control_link admission settings profile)
# Flags that cargo-fuzz sets with `--sanitizer none`, for coverage counters and traced comparisons.
readonly flags="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing"

main() {
  local executions=200000 jobs=1 corpus='' host name status=0
  while [[ ${1:-} == --* ]]; do
    case $1 in
      --executions) executions=${2:?} ;;
      --jobs) jobs=${2:?} ;;
      --corpus) corpus=${2:?} ;;
      *) die "no option $1" ;;
    esac
    shift 2
  done
  [[ $executions =~ ^[0-9]+$ && $jobs =~ ^[1-9][0-9]*$ ]] || die "--executions and --jobs take numbers"
  for name in "$@"; do
    [[ " ${all[*]} " == *" $name "* ]] || die "no target $name; there are: ${all[*]}"
  done
  [[ $# -gt 0 ]] || set -- "${all[@]}"
  host=$(rustc -vV | sed -n 's/^host: //p')
  # Because of --target, cargo does not use the flags for build scripts.
  RUSTFLAGS=$flags cargo build --release --quiet --bins --manifest-path "$checkout/fuzz/Cargo.toml" --target "$host" \
    --target-dir "$target_folder"
  programs=$target_folder/$host/release
  outputs=$(mktemp -d)
  trap 'rm -rf "$outputs"' EXIT
  [[ -n $corpus ]] || corpus=$outputs/corpus
  for name in "$@"; do
    while [[ $(jobs -rp | wc -l) -ge $jobs ]]; do wait -n || true; done
    fuzz "$name" "$executions" "$corpus/$name" &
  done
  wait
  for name in "$@"; do
    [[ -e $outputs/$name.ok ]] || status=1
  done
  return "$status"
}

# Fuzzes one target. Prints one line at the end, or the failing input.
fuzz() {
  local name=$1 executions=$2 corpus=$3 began=$SECONDS artifacts=$checkout/fuzz/artifacts/$1 output=$outputs/$1 done_so_far crash
  [[ $name != admission ]] || executions=$((executions / 10))
  local dictionary=()
  [[ ! -e $checkout/fuzz/dictionaries/$name ]] || dictionary=(-dict="$checkout/fuzz/dictionaries/$name")
  mkdir -p "$corpus" "$artifacts"
  # An input takes microseconds, so one that takes a minute hangs, even on a busy machine.
  if "$programs/$name" -runs="$executions" -seed=1 -timeout=60 -rss_limit_mb=2048 -print_final_stats=1 \
    "${dictionary[@]}" -artifact_prefix="$artifacts/" "$corpus" "$checkout/fuzz/seeds/$name" >"$output" 2>&1; then
    done_so_far=$(sed -n 's/^stat::number_of_executed_units: //p' "$output")
    echo "$name: $done_so_far executions, $(find "$corpus" -type f | wc -l) inputs kept, $((SECONDS - began)) s"
    touch "$outputs/$name.ok"
  else
    crash=$(sed -n 's/.*Test unit written to //p' "$output" | tail -n 1)
    done_so_far=$(grep -oE '^#[0-9]+' "$output" | tail -n 1 || true)
    grep -vE '^#[0-9]+|^INFO:' "$output" | head -n 60
    echo "$name: FOUND SOMETHING after ${done_so_far:-#0}. To repeat it: $programs/$name ${crash:-(no input was written)}"
  fi
}

die() {
  echo "fuzz: $*" >&2
  exit 2
}

main "$@"
