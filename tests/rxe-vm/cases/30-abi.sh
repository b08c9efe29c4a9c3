# shellcheck shell=bash
# The C program of tests/abi_drive.rs uses every version of the C ABI: both ends in one thread,
# grouped and optional receives, refusals.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

rails 4
export SPARK_TEST_RDMA=1
test=with_devices_data_moves_in_every_version
timeout 200 "$(test_program abi_drive)" --exact "$test" --nocapture 2>&1 | tee "$BED_LOGS/drive.txt"
grep -q "^test $test \.\.\. ok" "$BED_LOGS/drive.txt" || grep -q '^test result: ok\. 1 passed' "$BED_LOGS/drive.txt" ||
  fail "the test $test is not there"
! grep -qi skipped "$BED_LOGS/drive.txt" || fail "the test $test skipped itself"
