# shellcheck shell=bash
# Once connected, the thread that drives the data path allocates nothing and makes no system call.
# quiet_data_path counts the allocations itself. It queries a missing file before the data path, and
# another one after it. Between the two, strace sees only soft-RoCE's doorbells, which the verbs
# library rings by `write` to the device (real adapters ring theirs in memory).
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

rails 4
export SPARK_TEST_RAILS="a0,a1,a2,a3;b0,b1,b2,b3"
trace=$(mktemp -d)
# Writes one file for each thread, and shows each descriptor's path.
timeout 200 strace -ff -qq -y -e 'signal=!all' -o "$trace/thread" \
  "$(test_program quiet_data_path)" --test-threads 1 || fail "quiet_data_path ended with status $?"

thread=$(grep -l '"/data-path-ends"' "$trace"/thread.*) || fail "no thread asked for /data-path-ends"
awk '/"\/data-path-begins"/ { inside = 1; next } /"\/data-path-ends"/ { exit } inside' "$thread" >"$trace/between"
doorbells=$(grep -c '^write([0-9]*</dev/infiniband/uverbs' "$trace/between" || true)
others=$(grep -v '^write([0-9]*</dev/infiniband/uverbs' "$trace/between" || true)
echo "$doorbells doorbells; other calls: ${others:-none}"
# 50 rounds of five shapes, each at least a message and its CTS.
((doorbells >= 500)) || fail "only $doorbells doorbells: the trace does not see the traffic"
[[ -z $others ]] || fail "system calls on the data path: $(head -n 3 <<<"$others" | paste -sd' ')"
