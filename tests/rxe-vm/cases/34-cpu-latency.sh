# shellcheck shell=bash
# The kernel's limit of the CPU wake-up latency is the plugin's while a job runs, and no longer:
# for root, for a plain user in the group of our udev rule, and for a container's root. A user
# outside the group gets one line, and the job runs on without the request.
#
# The guest has no udev and no container engine. The case sets owner and mode of the device as the
# rule says, and makes the container of what an engine uses: a mount namespace, a /dev that holds
# only the devices of the README's command, and Docker's default capabilities.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

readonly latency=/dev/cpu_dma_latency limit_us=7 unlimited_us=2000000000
readonly rule=$BED_CHECKOUT/nccl-tests-harness/src/commands/install/60-nccl-spark.rules
readonly docker_capabilities=-all,+chown,+dac_override,+fsetid,+fowner,+mknod,+net_raw,+setgid,+setuid,+setfcap,+setpcap,+net_bind_service,+sys_chroot,+kill,+audit_write

# limit: prints the limit that is in effect for the whole machine, in microseconds.
limit() {
  od -An -td4 -N4 "$latency" | tr -d ' '
}

has_limit() {
  [[ $(limit) == "$1" ]]
}

# job NAME PREFIX...: starts a job of some seconds whose program runs under the command PREFIX.
job() {
  local name=$1
  shift
  output=$BED_LOGS/$name.txt
  NCCL_DEBUG=INFO NCCL_SPARK_CPU_LATENCY_US=$limit_us timeout 200 "$@" \
    "$BED_TARGET/release/nccl-spark" sendrecv -r 2 --plugin "$BED_TARGET/release/libnccl_net_spark.so" \
    --rank-env 0:NCCL_IB_HCA=a0,a1 --rank-env 0:NCCL_SOCKET_IFNAME=ea0 \
    --rank-env 1:NCCL_IB_HCA=b0,b1 --rank-env 1:NCCL_SOCKET_IFNAME=eb0 \
    -b 1M -e 1M -n 20 -w 1 -c 1 "${slow_wire[@]}" >"$output" 2>&1 &
  job=$!
}

# ends: waits for the job, which has to succeed with every byte right.
ends() {
  local status=0
  wait "$job" || status=$?
  cat "$output"
  [[ $status == 0 ]] || fail "the job ended with status $status"
  check_table 1
}

# holds NAME PREFIX...: the limit is the job's while it runs, and is gone after it.
holds() {
  has_limit "$unlimited_us" || fail "$1: before the job, the limit is $(limit) us"
  job "$@"
  wait_until 60 has_limit "$limit_us" || { cat "$output"; fail "$1: the limit is $(limit) us"; }
  echo "$1: $(limit) us during the job"
  ends
  has_limit "$unlimited_us" || fail "$1: after the job, the limit is $(limit) us"
}

# Runs the command that follows as a container's root.
# shellcheck disable=SC2016 # the inner shell expands them
readonly in_container=(unshare --mount bash -c '
  set -e
  mkdir /run/container
  mount -t tmpfs tmpfs /run/container
  mkdir /run/container/{infiniband,shm}
  for file in null zero full random urandom cpu_dma_latency infiniband/uverbs{0..3}; do
    touch "/run/container/$file"
    mount --bind "/dev/$file" "/run/container/$file"
  done
  mount --bind /dev/shm /run/container/shm
  ln -s /proc/self/fd /run/container/fd
  mount --move /run/container /dev
  exec "$@"' container
  setpriv --bounding-set "$docker_capabilities" --inh-caps "$docker_capabilities" --no-new-privs)

rails 2 80mbit
chmod 666 /dev/infiniband/uverbs* # as rdma-core's rule sets it
holds root env
holds container "${in_container[@]}"

group=$(sed -n 's/.*GROUP="\([^"]*\)".*/\1/p' "$rule") mode=$(sed -n 's/.*MODE="\([^"]*\)".*/\1/p' "$rule")
groupadd --system --force "$group"
group_id=$(getent group "$group" | cut -d: -f3)
chgrp "$group" "$latency"
chmod "$mode" "$latency"
ulimit -l unlimited
holds user setpriv --reuid 65534 --regid 65534 --groups "$group_id" --bounding-set -all

job outsider setpriv --reuid 65534 --regid 65534 --clear-groups --bounding-set -all
sleep 5
has_limit "$unlimited_us" || fail "a user outside the group has set the limit: $(limit) us"
ends
check_says 'cpu_dma_latency' "why the request was not made"
