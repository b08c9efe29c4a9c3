#!/bin/bash
# Runs in the guest: guest.sh CASE_FILE... Each case has its own session and time limit; its
# leftovers (processes, rails) are removed before the next. Ends with "N passed, N failed"; status 0
# only when none failed.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=SCRIPTDIR/rails.sh
source "$here/rails.sh"
readonly case_limit_s=600
passed=0 failed=0

run_case() {
  local file=$1 name status=0 session reason started=$SECONDS
  name=$(basename "$file" .sh)
  export BED_LOGS=/run/bed/results/$name
  mkdir -p "$BED_LOGS"
  setsid timeout --kill-after=5 "$case_limit_s" bash "$file" >"$BED_LOGS/case.log" 2>&1 </dev/null &
  session=$!
  wait "$session" || status=$?
  pkill -KILL -s "$session" || true
  if [[ -e /sys/class/net/ea0 ]]; then rails_remove; fi
  if [[ $status == 0 ]]; then
    passed=$((passed + 1))
    echo "PASS $name ($((SECONDS - started)) s)"
    return
  fi
  failed=$((failed + 1))
  reason=$(sed -n 's/^REASON: //p' "$BED_LOGS/case.log" | head -n 1)
  [[ $status != 124 ]] || reason="still running after $case_limit_s s"
  tail -n 60 "$BED_LOGS/case.log" | sed 's/^/    | /'
  echo "FAIL $name: ${reason:-ended with status $status}"
}

for file in "$@"; do run_case "$file"; done
echo "$passed passed, $failed failed"
[[ $failed == 0 && $passed -gt 0 ]]
