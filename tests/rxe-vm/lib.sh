# shellcheck shell=bash
# Sourced by every case, in the guest. A case is a file cases/NN-name.sh: it makes its rails, runs
# commands, and checks results. It passes by reaching its end. `fail` ends it with a reason, and so
# does any command that fails. suite.sh sets three variables through guest.sh: BED_CHECKOUT,
# BED_TARGET (cargo's build folder; without it the installed nccl-spark is run), and BED_TESTS (a
# file that lists the test programs: package folder, tab, program). guest.sh sets BED_LOGS (a folder
# for this case's files; it outlives the guest).
set -euo pipefail

# shellcheck source=SCRIPTDIR/rails.sh
source "$(dirname "${BASH_SOURCE[0]}")/rails.sh"
trap 'echo "REASON: line $LINENO: \"$BASH_COMMAND\" ended with status $?"' ERR
# The trap also works in functions and substitutions, so that no failing check goes unnoticed.
set -o errtrace
shopt -s inherit_errexit

fail() {
  trap - ERR
  echo "REASON: $*"
  exit 1
}

# spark NAME COMMAND RAILS_A RAILS_B [OPTION]...: runs `nccl-spark COMMAND` with rank 0 on node A's
# devices RAILS_A (a comma list) and rank 1 on node B's; it has to succeed. Its output is written to
# $BED_LOGS/NAME.txt, whose path is $output.
spark() {
  local status=0
  spark_status "$@" || status=$?
  [[ $status == 0 ]] || fail "nccl-spark $2 ($1) ended with status $status: $(grep -v '^#' "$output" | tail -n 1)"
}

# spark_status: does the same as `spark` for a run that may fail, and returns its status.
spark_status() {
  local name=$1 command=$2 rails_a=$3 rails_b=$4 release=${BED_TARGET:+$BED_TARGET/release} status=0
  shift 4
  output=$BED_LOGS/$name.txt
  NCCL_DEBUG=INFO timeout 300 "${release:+$release/}nccl-spark" "$command" -r 2 \
    ${release:+--plugin "$release/libnccl_net_spark.so"} \
    --rank-env "0:NCCL_IB_HCA=$rails_a" --rank-env 0:NCCL_SOCKET_IFNAME=ea0 \
    --rank-env "1:NCCL_IB_HCA=$rails_b" --rank-env 1:NCCL_SOCKET_IFNAME=eb0 \
    "$@" >"$output" 2>&1 || status=$?
  cat "$output"
  return "$status"
}

# On rails of 80 Mb/s, the messages in flight take longer than the default time-out, which is for
# rails a thousand times as fast. With the default, everything would be sent again repeatedly.
# shellcheck disable=SC2034 # the cases use it
readonly slow_wire=(--rank-env 0:NCCL_IB_TIMEOUT=16 --rank-env 1:NCCL_IB_TIMEOUT=16)

# once_connected NAME: waits until run NAME's two ranks have connected, both ways, and carry data.
once_connected() {
  wait_until 100 has_lines "$1" 4 'connected with' || fail "run $1 has not connected in 100 s"
  sleep 1
}

# has_lines NAME COUNT PATTERN: true if run NAME's output has COUNT lines that match the extended
# regular expression, or more.
has_lines() {
  [[ $(grep -Ec "$3" "$BED_LOGS/$1.txt" 2>/dev/null) -ge $2 ]]
}

# check_table ROWS: checks that the last run printed ROWS sizes, with no wrong byte in any.
# A row begins with a number and ends with #wrong, as in nccl-tests.
check_table() {
  local rows wrong
  rows=$(awk '$1 ~ /^[0-9]+$/' "$output" | wc -l)
  wrong=$(awk '$1 ~ /^[0-9]+$/ && $NF != "0"' "$output")
  [[ $rows == "$1" ]] || fail "$rows sizes in the table in place of $1"
  [[ -z $wrong ]] || fail "wrong bytes: $wrong"
}

# check_says PATTERN WHAT: checks that a line of the last run matches the extended regular
# expression.
check_says() {
  grep -Eq "$1" "$output" || fail "no line says $2 (/$1/)"
}

# check_lost I..., check_back I...: checks that each of these rails was lost in the last run, or
# that each returned.
check_lost() {
  local i
  for i in "$@"; do check_says "rail a$i:1 to [^ ]* lost: .*peer rail b$i:1" "that rail $i was lost"; done
}

check_back() {
  local i
  for i in "$@"; do check_says "rail a$i:1 to [^ ]* recovered .*peer rail b$i:1" "that rail $i came back"; done
}

# test_program NAME: the path of the test program tests/NAME.rs.
test_program() {
  local program
  program=$(awk -F'\t' -v name="$1" '$2 ~ "/" name "-[0-9a-f]+$" { print $2 }' "$BED_TESTS")
  [[ -n $program ]] || fail "there is no test program $1"
  echo "$program"
}

# mark COUNT: stores the counters of rails 0..COUNT-1 for the functions below.
mark() {
  local side i
  declare -gA marked_bytes marked_packets
  for side in a b; do
    for ((i = 0; i < $1; i++)); do
      marked_bytes[$side$i]=$(rail_bytes "$side" "$i")
      marked_packets[$side$i]=$(rail_packets "$side" "$i")
    done
  done
}

# sent_bytes SIDE I, sent_packets SIDE I: the counts since `mark`.
sent_bytes() {
  echo $(($(rail_bytes "$1" "$2") - marked_bytes[$1$2]))
}

sent_packets() {
  echo $(($(rail_packets "$1" "$2") - marked_packets[$1$2]))
}

# check_carried I...: checks that these rails carried at least 64 KiB from each side since `mark`. A
# new connection does not know its rails' rates, so it divides its first large message evenly, and
# each rail carries at least 64 KiB. Later amounts are not checked: where the emulated machine's
# processors are the limit and not the wires, no rail needs to carry its part. The tests of
# crates/proto/src/flow/striping.rs check the division of messages, by their own clock.
check_carried() {
  local side i
  for i in "$@"; do
    for side in a b; do check_sent "$side" "$i" 65536; done
  done
}

# check_sent SIDE I BYTES: checks that rail I sent at least BYTES from SIDE since `mark`.
check_sent() {
  local bytes
  bytes=$(sent_bytes "$1" "$2")
  echo "rail $1$2 sent $bytes bytes, $(sent_packets "$1" "$2") RDMA packets"
  ((bytes >= $3)) || fail "rail $1$2 carried $bytes bytes: less than $3"
}

# check_unused I...: checks that these rails sent no RDMA packet since `mark`.
check_unused() {
  local side i packets
  for i in "$@"; do
    for side in a b; do
      packets=$(sent_packets "$side" "$i")
      [[ $packets == 0 ]] || fail "rail $side$i sent $packets RDMA packets; expected none"
    done
  done
}

# check_next_job: checks that all four rails carry another job.
check_next_job() {
  mark 4
  spark after all-gather a0,a1,a2,a3 b0,b1,b2,b3 -b 4M -e 4M -n 5 -w 1 -c 1
  check_table 1
  check_carried 0 1 2 3
}
