#!/bin/bash
# A whole aarch64 machine, emulated by qemu: this Debian's arm64 kernel, glibc and libibverbs.
# Installs the arm64 deb there, runs all-gather from it over the software fabric (two processes that
# read each other's memory, which qemu-user cannot emulate) and over soft-RoCE, and removes it.
# Every byte is checked.
#
#   run.sh [--tests] DEB [CASE]...     CASE: a file of cases/ without .sh; all need 00-install
#   run.sh --list
#
# --tests: also 30-tests, the tests that qemu-user cannot run; builds them with cargo and
# gcc-aarch64-linux-gnu.
#
# Runs on x86-64 Debian 12 or later. Needs root only to install packages, and changes nothing else
# on this machine (tests/rxe-vm/boot.sh). Logs are left in CARGO_TARGET_DIR/aarch64-vm.
# BED_TIMEOUT_S: time limit of the whole run in seconds (default 1500).
#
# Emulation on x86-64 keeps x86-64's order of loads and stores, so errors with a weaker order do not
# show here. loom, Miri and the test of the machine code (docs/developing.md) cover those.
set -euo pipefail
shopt -s inherit_errexit

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly here bed=$here/../rxe-vm
# shellcheck source=SCRIPTDIR/../rxe-vm/host.sh
source "$bed/host.sh"
# Packages of the guest, in addition to Debian's essential ones.
readonly packages=(iproute2 procps kmod libibverbs1 ibverbs-providers ibverbs-utils)
readonly triple=aarch64-unknown-linux-gnu

main() {
  local checkout deb logs target options=()
  if [[ ${1:-} == --list ]]; then
    basename -s .sh "$here"/cases/*.sh
    exit 0
  fi
  tests=
  if [[ ${1:-} == --tests ]]; then
    tests=yes
    shift
  fi
  [[ $# -ge 1 ]] || die "usage: run.sh [--tests] DEB [CASE]..."
  deb=$(realpath -e "$1")
  [[ $(dpkg-deb -f "$deb" Architecture) == arm64 ]] || die "$deb is not an arm64 package"
  shift
  choose_cases "$@"
  checkout=$(cd "$here/../.." && pwd)
  target=$(realpath -m "${CARGO_TARGET_DIR:-$checkout/target}")
  logs=$target/aarch64-vm
  rm -rf "$logs"
  # The guest sees the whole folder $logs/deb.
  install -D "$deb" "$logs/deb/$(basename "$deb")"
  if [[ -n $tests ]]; then
    (cd "$checkout" && build_tests >"$logs/cargo.json")
    list_tests "$logs/cargo.json" >"$logs/deb/tests.list"
    options=(--share "$(realpath "$target/$triple/debug")" --env BED_TESTS="$logs/deb/tests.list")
  fi
  find_cache
  root=$cache/arm64-root-$(root_key)
  if begin_build "$root"; then
    build_root
    end_build "$root"
  fi
  "$bed/boot.sh" --arch arm64 --root "$root/root" --timeout "${BED_TIMEOUT_S:-1500}" --memory 4G --results "$logs" \
    --share "$here" --share "$logs/deb" --env BED_DEB="$logs/deb/$(basename "$deb")" "${options[@]}" "$bed/guest.sh" "${cases[@]}"
}

choose_cases() {
  local name names=("$@")
  [[ $# -gt 0 ]] || mapfile -t names < <(basename -s .sh "$here"/cases/*.sh)
  cases=()
  for name in "${names[@]}"; do
    [[ -e $here/cases/$name.sh ]] || die "no case $name; there are: $(basename -s .sh "$here"/cases/*.sh | paste -sd' ')"
    if [[ $name == 30-tests && -z $tests ]]; then
      [[ $# == 0 ]] || die "30-tests needs --tests"
      continue
    fi
    cases+=("$here/cases/$name.sh")
  done
}

# The simulation opens the software fabric's library, which test programs do not include.
build_tests() {
  export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
  cargo build --target "$triple" -p softverbs
  cargo test --no-run --message-format=json --target "$triple" \
    -p nccl-net-spark -p spark-host -p spark-verbs -p softverbs --lib --test core --test simulation --test returns --test lies
}

root_key() {
  { declare -p packages; declare -f use_archive build_root fetch_packages unpack_package configure_root; } | sha256sum | cut -c1-16
}

# Builds the guest's root filesystem. The necessary parts of the packages' own scripts are done here
# instead: they are arm64 programs, and emulated they take more than ten minutes.
build_root() {
  local package
  fetch_packages
  mkdir -p "$root/root"/usr/{bin,sbin,lib} "$root/root/var/lib/dpkg"/{info,updates}
  ln -s usr/bin usr/sbin usr/lib "$root/root"
  for package in "$root"/packages/*.deb; do
    unpack_package "$package" "$root/root/var/lib/dpkg"
  done
  configure_root
  rm -r "$root/packages"
}

fetch_packages() (
  echo "aarch64-vm: fetching Debian's packages (arm64)"
  use_archive arm64
  mkdir -p "$root/packages/partial"
  apt-get install -y -qq --download-only --no-install-recommends -o Dir::Cache::Archives="$root/packages" \
    '?essential' "${packages[@]}" >/dev/null
)

# Unpacks PACKAGE and records it as installed in dpkg's folder.
unpack_package() {
  local package=$1 dpkg=$2 name
  name=$(dpkg-deb -f "$package" Package)
  [[ $(dpkg-deb -f "$package" Multi-Arch) != same ]] || name+=:arm64
  dpkg-deb --fsys-tarfile "$package" | tar --extract --keep-directory-symlink --directory "$root/root"
  dpkg-deb --fsys-tarfile "$package" | tar --list | sed -e 's:^\.::' -e 's:/$::' -e 's:^$:/.:' >"$dpkg/info/$name.list"
  {
    dpkg-deb -f "$package"
    printf 'Status: install ok installed\n\n'
  } >>"$dpkg/status"
}

configure_root() {
  local etc=$root/root/etc share=$root/root/usr/share
  cp "$share/base-passwd/passwd.master" "$etc/passwd"
  cp "$share/base-passwd/group.master" "$etc/group"
  cp "$share/libc-bin/nsswitch.conf" "$etc/nsswitch.conf"
  echo '127.0.0.1 localhost bed' >"$etc/hosts"
  ln -s mawk "$root/root/usr/bin/awk"
  echo 1 >"$root/root/var/lib/dpkg/info/format"
}

die() {
  echo "aarch64-vm: $*" >&2
  exit 125
}

main "$@"
