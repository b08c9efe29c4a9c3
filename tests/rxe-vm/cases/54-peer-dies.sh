# shellcheck shell=bash
# A peer that is stopped in mid-transfer (SIGSTOP) is awaited, and no rail is lost, because the
# kernel's soft-RoCE still acknowledges. A warning says that the peer does not answer. A peer that
# is killed (SIGKILL) is reported within the limit below. The command that started the ranks is
# stopped meanwhile: it would end the other rank as soon as the killed rank is dead.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

# A peer is probed for 2 s, and pending completions may take 2 s more. The remaining time is for an
# emulated machine on a busy host. Without the report, rank 0 would wait without end.
readonly told_within_s=60
# The death shows by the earlier of two signs. One is the end of the peer's bootstrap connection,
# reported with all rails. The other is a write to memory whose registration ended a moment before
# its queue pairs, reported with that rail.
gone_pattern() {
  echo "(:$1 is gone: .*rails a0:1 to b0:1.*a1:1 to b1:1|rail a[01]:1 to [^ ]*:$1 failed: peer denied access)"
}

# rank_pid FILE RANK: prints the process of a rank, once the run that writes FILE has named it.
rank_pid() {
  wait_until 60 named_pid "$@" || fail "the run does not say who rank $2 is"
}

named_pid() {
  sed -nE "s/^# +Rank +$2 Pid +([0-9]+) .*/\\1/p" "$1" 2>/dev/null | grep .
}

# moving: waits until node A has sent two more megabytes, so that the job is in mid-transfer. The
# bytes may be on any rail: a busy machine's rails need not carry equally.
moving() {
  wait_until 60 has_sent $(($(node_bytes) + 2097152)) || fail "the rails carry nothing"
}

has_sent() {
  (($(node_bytes) >= $1))
}

# quiet: waits until node A has sent everything that was granted to it.
quiet() {
  local tries before
  for ((tries = 0; tries < 60; tries++)); do
    before=$(node_bytes)
    sleep 1
    (($(node_bytes) - before >= 65536)) || return 0
  done
  fail "the job goes on without its rank 1"
}

node_bytes() {
  echo $(($(rail_bytes a 0) + $(rail_bytes a 1)))
}

freeze() {
  local pid
  once_connected frozen
  pid=$(rank_pid "$BED_LOGS/frozen.txt" 1)
  moving
  kill -STOP "$pid"
  quiet
  mark 2
  sleep 3
  # The rails only repeat control frames, which the stopped rank does not read.
  echo "while rank 1 stands still: $(sent_bytes a 0), $(sent_bytes a 1), $(sent_bytes b 0), $(sent_bytes b 1) bytes"
  (($(sent_bytes a 0) + $(sent_bytes a 1) < 1048576)) || fail "the job goes on without its rank 1"
  # Rank 0 has to log that its stopped peer does not answer.
  wait_until 60 grep -E "no progress with [^ ]*:$pid for .*: the peer has not answered for" "$BED_LOGS/frozen.txt" ||
    fail "no line says that rank 1 does not answer"
  kill -CONT "$pid"
}

murder() {
  local pid lead begun told=$BED_LOGS/killed.txt
  once_connected killed
  pid=$(rank_pid "$told" 1)
  moving
  lead=$(awk '{ print $4 }' "/proc/$pid/stat")
  [[ $(tr '\0' ' ' <"/proc/$lead/cmdline") == *nccl-spark* ]] || fail "process $lead did not start the ranks"
  kill -STOP "$lead"
  kill -KILL "$pid"
  begun=$SECONDS
  until grep -Eq "$(gone_pattern "$pid")" "$told"; do
    if ((SECONDS - begun > told_within_s)); then
      kill -CONT "$lead"
      fail "rank 0 has not told within $told_within_s s that rank 1 is gone"
    fi
    sleep 0.1
  done
  echo "rank 1 was killed; told after $((SECONDS - begun)) s: $(grep -E "$(gone_pattern "$pid")" "$told" | head -n 1)"
  kill -CONT "$lead"
}

rails 2 80mbit
freeze &
freezer=$!
spark frozen sendrecv a0,a1 b0,b1 -b 2M -e 2M -n 60 -w 1 -c 1 --rank-env 0:NCCL_SPARK_STALL_WARN_S=2 "${slow_wire[@]}"
wait "$freezer" || fail "rank 1 could not be stopped and continued in mid-transfer"
check_table 1
! grep -E 'rail .* lost: ' "$output" || fail "a rail was lost because the peer's process stood still"

murder &
murderer=$!
status=0
spark_status killed sendrecv a0,a1 b0,b1 -b 2M -e 2M -n 2000 -w 1 -c 1 "${slow_wire[@]}" || status=$?
wait "$murderer" || fail "rank 0 was not told of rank 1's death"
[[ $status != 0 && $status != 124 ]] || fail "a job whose rank 1 was killed ended with status $status"
check_says 'rank 1: killed by signal 9' "that rank 1 was killed"
check_says "rank 0: .*ncclRemoteError.*$(gone_pattern '[0-9]+')" "rank 0's own error"
