# shellcheck shell=bash
# The tests that read a process's memory with process_vm_readv, which qemu-user does not have: all
# of the software fabric's own, and both ends of a connection in virtual time.
# shellcheck source-path=SCRIPTDIR source=../../rxe-vm/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../rxe-vm/lib.sh"

# tests PROGRAM [ARGUMENT]...: checks that the tests of PROGRAM pass, and that there is at least
# one.
tests() {
  local said=$BED_LOGS/$1.txt started=$SECONDS program
  program=$(test_program "$1")
  "$program" "${@:2}" >"$said" 2>&1 || { cat "$said"; fail "the tests of $1 failed"; }
  grep -E '^test result' "$said"
  grep -Eq 'ok\. [1-9][0-9]* passed' "$said" || fail "there is no such test in $1"
  echo "$1: $((SECONDS - started)) s"
}

TMPDIR=$(mktemp -d)
export TMPDIR
tests softverbs reading_another_process reading_unmapped_memory only_what_the_processor_can_read
tests core
SPARK_SIM_RUNS=50 tests simulation --nocapture
tests returns
tests lies
rm -r "$TMPDIR"
