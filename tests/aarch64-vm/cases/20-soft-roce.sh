# shellcheck shell=bash
# All-gather over four merged rails of the kernel's soft-RoCE, through Debian's own libibverbs for
# arm64.
# shellcheck source-path=SCRIPTDIR source=../../rxe-vm/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../rxe-vm/lib.sh"

rails 4
ibv_devices
NCCL_IB_HCA=a0,a1,a2,a3 nccl-spark rails | tee "$BED_LOGS/rails.txt"
for rail in 0 1 2 3; do
  grep -Eq "\<a$rail\>" "$BED_LOGS/rails.txt" || fail "nccl-spark rails does not name a$rail"
done
mark 4
spark sizes all-gather a0,a1,a2,a3 b0,b1,b2,b3 -b 8 -e 1M -f 2 -n 5 -w 1 -c 1
check_table 18
check_says 'merged 4 rails' "that 4 rails are merged"
check_says 'connected with .* over 4 rails: .*a0.*a1.*a2.*a3' "that the connection has 4 rails"
# Each side sends half of 7 all-gathers of 1 MiB. The processors' speed decides how much of it each
# rail carries.
for rail in 0 1 2 3; do
  check_carried a "$rail" 16384
  check_carried b "$rail" 16384
done
