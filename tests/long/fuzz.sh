#!/bin/bash
# Runs the fuzz targets for a long time: 10^8 executions in total by default, in equal parts
# (`admission`, which uses TCP, gets a tenth of a part). Prints the number for each target, and the
# total. Interesting inputs are kept in fuzz/corpus, and another run starts from them. Takes some
# hours on two cores.
#
#   fuzz.sh [--executions TOTAL] [--jobs N]
set -euo pipefail

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

main() {
  local total=100000000 jobs status=0 output
  jobs=$(nproc)
  while [[ $# -gt 0 ]]; do
    case $1 in
      --executions) total=${2:?} ;;
      --jobs) jobs=${2:?} ;;
      *) echo "fuzz: no option $1" >&2; exit 2 ;;
    esac
    shift 2
  done
  output=$(mktemp)
  trap 'rm -f "$output"' EXIT
  # Eleven targets get this number, and `admission` a tenth of it: 11.1 parts. Each gets ten more,
  # so that rounding does not give less than the total.
  "$checkout/fuzz/run.sh" --executions $((total * 10 / 111 + 10)) --jobs "$jobs" --corpus "$checkout/fuzz/corpus" |
    tee "$output" || status=1
  awk '/ executions, / { all += $2; targets += 1 } END { printf "%d targets, %d executions in total\n", targets, all }' "$output"
  return "$status"
}

main "$@"
