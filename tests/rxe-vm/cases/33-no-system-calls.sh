# shellcheck shell=bash
# Between its two marks tests/rxe_quiet.rs makes no system call but soft-RoCE's own doorbell: a write to the device.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

rails 2
program=$(cut -f 2 "$BED_TESTS" | grep '/rxe_quiet-') || fail "the test program rxe_quiet was not built"
trace=$BED_LOGS/strace
SPARK_TEST_RAILS="a;b" timeout 120 strace -ff -y -o "$trace" "$program" --ignored
path=$(grep -l data-path-begins "$trace".*) || fail "the trace has no mark"
sed '1,/data-path-begins/d; /data-path-ends/,$d' "$path" >"$trace-data-path"
grep -q 'data-path-ends' "$path" || fail "the trace has no end mark"
echo "system calls on the data path: $(wc -l <"$trace-data-path"), by name:"
sed 's/(.*//' "$trace-data-path" | sort | uniq -c
grep -q 'uverbs' "$trace-data-path" || fail "not even the doorbell is seen: the marks are wrong"
others=$(grep -Ev '^write\([0-9]+</dev/infiniband/uverbs' "$trace-data-path" | head -n 5 || true)
[[ -z $others ]] || fail "system calls on the data path: $others"
