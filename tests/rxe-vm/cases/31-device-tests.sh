# shellcheck shell=bash
# The Rust tests that need an RDMA device, and those that otherwise run on the software fabric. They
# are listed here, because #[ignore] also marks measurements, load tests, and tests that another
# test starts as a process.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

rails 4
export SPARK_TEST_RXE=a0,b0 SPARK_TEST_RAILS="a0,a1,a2,a3;b0,b1,b2,b3"

# device_tests NAME [OPTION]...: runs the test program tests/NAME.rs.
device_tests() {
  local program log passed status=0
  program=$(test_program "$1") log=$BED_LOGS/$1.txt
  (cd "$BED_CHECKOUT" && CARGO_MANIFEST_DIR=$BED_CHECKOUT timeout 600 "$program" "${@:2}" --test-threads 1) >"$log" 2>&1 \
    </dev/null || status=$?
  cat "$log"
  [[ $status == 0 ]] ||
    failed+=" $1 ended with status $status: $(sed -n 's/^test \(.*\) \.\.\. FAILED.*/\1/p' "$log" | paste -sd' ')"
  passed=$(sed -n 's/^test result: [a-zA-Z]*\. \([0-9]*\) passed.*/\1/p' "$log")
  ((${passed:-0} > 0)) || failed+=" $1: no test has passed"
  ran=$((ran + ${passed:-0}))
}

ran=0 failed=
device_tests verbs_rxe --ignored
# The ignored tests of these programs take minutes here and seconds on the software fabric.
device_tests connections
device_tests quiet_data_path
echo "$ran device tests"
[[ -z $failed ]] || fail "failed:$failed"
