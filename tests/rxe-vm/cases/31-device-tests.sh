# shellcheck shell=bash
# The Rust tests that need an RDMA device: those marked #[ignore], of every test program; and all of those that otherwise
# run on the software fabric.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

rails 4
export SPARK_TEST_RXE=a0,b0 SPARK_TEST_RAILS="a0,a1,a2,a3;b0,b1,b2,b3"
ran=0 failed=
while IFS=$'\t' read -r folder program; do
  # These pull the software fabric's rails, or mark with it what is another test's process.
  [[ $program != */failover-* && $program != */simulation-* && $program != */load-* && $program != */admission-* && $program != */known_paths-* ]] || continue
  echo "== $program"
  log=$BED_LOGS/$(basename "$program").txt
  # The long search of recovery's states needs no device, and would take an hour here.
  status=0 which=(--ignored --skip every_order_of_many_events)
  # What is ignored of these takes minutes here and seconds on the software fabric.
  [[ $program != */connections-* && $program != */quiet_data_path-* ]] || which=()
  (cd "$folder" && CARGO_MANIFEST_DIR=$folder timeout 600 "$program" "${which[@]}" --test-threads 1) >"$log" 2>&1 </dev/null ||
    status=$?
  cat "$log"
  [[ $status == 0 ]] || failed+=" $(basename "$program"): $(sed -n 's/^test \(.*\) \.\.\. FAILED.*/\1/p' "$log" | paste -sd' ')"
  passed=$(sed -n 's/^test result: [a-zA-Z]*\. \([0-9]*\) passed.*/\1/p' "$log")
  ran=$((ran + ${passed:-0}))
done <"$BED_TESTS"
echo "$ran device tests"
[[ -z $failed ]] || fail "failed:$failed"
((ran > 0)) || fail "no test program has a device test"
