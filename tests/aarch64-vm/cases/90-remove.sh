# shellcheck shell=bash
# The deb is removed. None of its files are left, and no files of the earlier cases.
# shellcheck source-path=SCRIPTDIR source=../../rxe-vm/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../rxe-vm/lib.sh"

dpkg -r nccl-net-spark
find / -xdev -path /var/lib/dpkg -prune -o -path /var/log -prune -o -print | sort >/run/bed/results/files-after.txt
diff /run/bed/results/files-before.txt /run/bed/results/files-after.txt || fail "files of before and after differ"
# The folder of the software fabrics stays, empty.
left=$(find /tmp /dev/shm -mindepth 1 ! -path "/dev/shm/softverbs-$(id -u)")
[[ -z $left ]] || fail "left behind: $left"
! pgrep -a nccl-spark || fail "a process is left"
