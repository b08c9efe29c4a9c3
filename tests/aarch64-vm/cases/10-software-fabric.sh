# shellcheck shell=bash
# All-gather over the software fabric, in two processes: each reads the other's memory with
# process_vm_readv.
# shellcheck source-path=SCRIPTDIR source=../../rxe-vm/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../rxe-vm/lib.sh"

output=$BED_LOGS/all-gather.txt
NCCL_DEBUG=INFO timeout 300 nccl-spark all-gather -r 2 --fabric soft --profile unpaced \
  -b 8 -e 1M -f 2 -n 5 -w 1 -c 1 >"$output" 2>&1 || { cat "$output"; fail "nccl-spark all-gather failed"; }
cat "$output"
check_table 18
check_says 'merged [0-9]+ rails' "that rails are merged"
