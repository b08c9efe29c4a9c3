# shellcheck shell=bash
# The deb installs on an aarch64 machine, and its command line runs there.
# shellcheck source-path=SCRIPTDIR source=../../rxe-vm/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../rxe-vm/lib.sh"

uname -a
[[ $(uname -m) == aarch64 ]] || fail "the machine is $(uname -m)"
# The case 90-remove compares with this list.
find / -xdev -path /var/lib/dpkg -prune -o -path /var/log -prune -o -print | sort >/run/bed/results/files-before.txt
dpkg -i "$BED_DEB"
dpkg -L nccl-net-spark
nccl-spark --version
