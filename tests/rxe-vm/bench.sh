#!/bin/bash
# Benchmarks on the kernel's soft-RoCE: the plugin alone, or beside another one in the same run.
# Boots the bed and runs bench-guest.sh there. The machine is emulated: only ratios within one run
# have a meaning.
#
#   bench.sh [--against LIBRARY] [--rounds N] [CASE]...
#
# CASE: equal unequal slowdown lost latency stream (default: all)
#
# Needs the release build (cargo build --release --workspace). Tables and JSON are left in
# CARGO_TARGET_DIR/rxe-bench.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
checkout=$(cd "$here/../.." && pwd)

main() {
  local against='' rounds=3 target shares=()
  while [[ ${1:-} == --* ]]; do
    [[ $# -ge 2 ]] || die "$1 needs a value"
    case $1 in
      --against) against=$(realpath -e "$2") ;;
      --rounds) [[ $2 =~ ^[1-9][0-9]*$ ]] || die "--rounds takes a number from 1 on, not '$2'"; rounds=$2 ;;
      *) die "unknown option $1 (allowed: --against --rounds)" ;;
    esac
    shift 2
  done
  target=$(realpath -e "${CARGO_TARGET_DIR:-$checkout/target}")
  [[ -x $target/release/spark-lab ]] || die "$target/release/spark-lab is missing: cargo build --release --workspace"
  shares=(--share "$checkout" --share "$target")
  [[ -z $against ]] || shares+=(--share "$(dirname "$against")")
  "$here/boot.sh" --timeout 3000 --memory 4G "${shares[@]}" --results "$target/rxe-bench" \
    --env BED_TARGET="$target" --env BED_AGAINST="$against" --env BED_ROUNDS="$rounds" \
    "$here/bench-guest.sh" "$@"
}

die() {
  echo "bench: $*" >&2
  exit 125
}

main "$@"
