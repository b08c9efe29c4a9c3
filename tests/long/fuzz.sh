#!/bin/bash
# The fuzz targets for long: 10^8 executions in total by default, in equal parts (of `admission`, which goes over TCP, a tenth of one). Says how
# many each target did, and how many all did together. What was found worth keeping is kept in fuzz/corpus, so that another run
# goes on from there. Some hours on two cores.
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
  # Ten targets and a tenth; one more each, so that rounding does not leave it below.
  "$checkout/fuzz/run.sh" --executions $((total * 10 / 101 + 10)) --jobs "$jobs" --corpus "$checkout/fuzz/corpus" |
    tee "$output" || status=1
  awk '/ executions, / { all += $2; targets += 1 } END { printf "%d targets, %d executions in total\n", targets, all }' "$output"
  return "$status"
}

main "$@"
