#!/bin/bash
# Boots a Debian kernel with soft-RoCE (rdma_rxe) under qemu and runs one script there, as root. The
# guest's root filesystem is this machine's own or another folder: read-only, below a tmpfs, so
# nothing of the host changes. Needs no RDMA hardware and loads no module on the host. Needs x86-64
# Debian (12 or later); root only where packages have to be installed.
#
#   boot.sh [OPTION]... GUEST_SCRIPT [ARGUMENT]...
#
#   --arch ARCH       amd64 (default), or arm64: emulated, on a root filesystem of its own (--root)
#   --root DIR        the guest's root filesystem (default /)
#   --share DIR       show DIR at the same path in the guest (copy on write). The guest has its own
#                     /tmp, /run, /dev, /proc and /sys; the folder of GUEST_SCRIPT is always shown
#   --env NAME=VALUE  set a variable for GUEST_SCRIPT
#   --timeout SECONDS limit of the whole boot and run (default 300)
#   --memory SIZE     of the guest (default 4G)
#   --cpus N          of the guest (default 2)
#   --results DIR     folder for a copy of GUEST_SCRIPT's files in /run/bed/results
#
# Exit status: that of GUEST_SCRIPT; 124 after a timeout; 125 when the guest could not be started or
# ended without a status (by a kernel panic, for example). SPARK_BED_CACHE names the folder for the
# kernel and the initrd (default: under $XDG_CACHE_HOME, else /var/tmp).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly here
# shellcheck source=SCRIPTDIR/host.sh
source "$here/host.sh"
# Modules for the guest, in loading order. modprobe adds the modules that these need.
readonly modules=(virtio_pci 9p 9pnet_virtio overlay crc32_generic rdma_rxe ib_uverbs rdma_ucm veth bridge
  sch_tbf sch_netem sch_htb ifb act_mirred cls_matchall sch_ingress)
# Packages for booting a guest, and packages for a guest that runs on this machine's root
# filesystem.
readonly boot_packages=(cpio kmod) root_packages=(iproute2 procps strace libibverbs1 ibverbs-providers ibverbs-utils)

main() {
  parse_arguments "$@"
  [[ $(uname -m) == x86_64 ]] || die "the bed needs an x86-64 machine; this one is $(uname -m)"
  install_packages
  find_cache
  image=$cache/$arch-$(image_key)
  if begin_build "$image"; then
    build_initrd
    end_build "$image"
  fi
  run_dir=$(mktemp -d "$cache/run.XXXXXX")
  trap 'rm -rf "$run_dir"' EXIT
  describe_run
  boot
  report
}

parse_arguments() {
  arch=amd64 root=/ shares=() variables=() time_limit_s=300 memory=4G cpus=2 results=
  while [[ ${1:-} == --* ]]; do
    [[ $# -ge 2 ]] || die "$1 needs a value"
    case $1 in
      --arch) [[ $2 =~ ^(amd64|arm64)$ ]] || die "--arch takes amd64 or arm64, not '$2'"; arch=$2 ;;
      --root) root=$(realpath -e "$2") ;;
      --share) shares+=("$(realpath -e "$2")") ;;
      --env) [[ $2 == ?*=* ]] || die "--env takes NAME=VALUE, not '$2'"; variables+=("$2") ;;
      --timeout) [[ $2 =~ ^[1-9][0-9]*$ ]] || die "--timeout takes seconds, not '$2'"; time_limit_s=$2 ;;
      --memory) memory=$2 ;;
      --cpus) cpus=$2 ;;
      --results) results=$2 ;;
      *) die "unknown option $1 (allowed: --arch --root --share --env --timeout --memory --cpus --results)" ;;
    esac
    shift 2
  done
  [[ $# -ge 1 ]] || die "usage: boot.sh [OPTION]... GUEST_SCRIPT [ARGUMENT]..."
  [[ $arch == amd64 || $root != / ]] || die "--arch $arch needs a root filesystem of its own: --root DIR"
  guest_script=$(realpath -e "$1")
  shift
  guest_arguments=("$@")
  shares+=("$(dirname "$guest_script")")
}

install_packages() {
  local package packages missing=()
  packages=("${boot_packages[@]}")
  case $arch in
    amd64) packages+=(qemu-system-x86) ;;
    arm64) packages+=(qemu-system-arm) ;;
  esac
  [[ $root != / ]] || packages+=("${root_packages[@]}")
  for package in "${packages[@]}"; do
    [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
  done
  [[ ${#missing[@]} -gt 0 ]] || return 0
  [[ $(id -u) == 0 ]] || die "not root, and these packages are missing: apt-get install ${missing[*]}"
  echo "bed: installing ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# Prints the cache's key for the kernel and initrd, a hash of everything that they are made from.
image_key() {
  { cat "$here/guest-init.sh"; declare -p modules; declare -f use_archive build_initrd unpack_packages fill_initrd; } | sha256sum | cut -c1-16
}

# Unpacks (without installing) the packages of the kernel and of busybox, and makes an initrd of
# busybox, the modules and guest-init.sh.
build_initrd() {
  mkdir "$image/unpacked" "$image/root"
  (
    use_archive "$arch"
    unpack_packages
  )
  fill_initrd
  mv "$image"/unpacked/boot/vmlinuz-* "$image/vmlinuz"
  rm -rf "$image/unpacked" "$image/root"
}

unpack_packages() {
  local kernel package
  kernel=$(apt-cache depends "linux-image-$arch" | awk '/Depends: linux-image-/ { print $2; exit }')
  [[ -n $kernel ]] || die "apt knows no linux-image-$arch: this needs Debian's package archive"
  cd "$image"
  for package in "$kernel" busybox-static; do
    echo "bed: fetching $package ($arch)"
    timeout 600 apt-get download -qq -o APT::Sandbox::User="$(id -un)" "$package" || die "apt-get download $package failed"
    dpkg -x "$package"_*.deb unpacked
    rm "$package"_*.deb
  done
}

fill_initrd() {
  local release module path number=0 paths unpacked=$image/unpacked initrd=$image/root
  release=$(basename "$unpacked"/lib/modules/*)
  depmod -b "$unpacked" "$release"
  mkdir -p "$initrd"/{bin,proc,sys,dev,newroot,modules,layers}
  cp "$unpacked/bin/busybox" "$initrd/bin/"
  install -m 755 "$here/guest-init.sh" "$initrd/init"
  paths=$(for module in "${modules[@]}"; do
    modprobe -d "$unpacked" -S "$release" --show-depends "$module" || die "this kernel has no module $module"
  done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }')
  for path in $paths; do
    number=$((number + 1))
    cp "$path" "$initrd/modules/$(printf %02d "$number")-$(basename "$path")"
  done
  (cd "$initrd" && find . | cpio --quiet -o -H newc | gzip -1 >"$image/initrd.gz")
}

# Describes the guest's task, in a folder that both sides can write.
describe_run() {
  local share kept=() last=/nothing
  mkdir "$run_dir/results"
  # A folder inside another share is shown already.
  while read -r share; do
    [[ $share/ != "$last"/* ]] || continue
    kept+=("$share")
    last=$share
  done < <(printf '%s\n' "${shares[@]}" | sort -u)
  shares=("${kept[@]}")
  printf '%s\n' "${shares[@]}" >"$run_dir/shares"
  {
    echo 'export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C'
    [[ ${#variables[@]} -eq 0 ]] || printf 'export %q\n' "${variables[@]}"
    echo 'ulimit -l unlimited'
    printf 'cd %q\n' "$(dirname "$guest_script")"
    printf 'exec bash'
    printf ' %q' "$guest_script" "${guest_arguments[@]}"
    echo
  } >"$run_dir/command"
}

boot() {
  local share number=0 command parameters
  case $arch in
    amd64)
      # The emulated counter is reliable, but the kernel would not trust it. Without these
      # parameters every read of the clock is a system call to an emulated device.
      parameters="console=ttyS0 mitigations=off tsc=reliable clocksource=tsc"
      command=(qemu-system-x86_64 -M q35 -cpu max)
      if kvm_works; then command+=(-accel kvm); fi
      ;;
    arm64)
      parameters="console=ttyAMA0 mitigations=off"
      # The architecture's pointer authentication takes most of the time of an emulated call.
      command=(qemu-system-aarch64 -M virt -cpu "max,pauth-impdef=on")
      ;;
  esac
  command+=(-accel "tcg,thread=multi,tb-size=512" -m "$memory" -smp "$cpus" -display none -vga none -monitor none
    -serial stdio -nic none -no-reboot -kernel "$image/vmlinuz" -initrd "$image/initrd.gz"
    -append "quiet loglevel=4 panic=-1 oops=panic $parameters"
    -virtfs "local,path=${root//,/,,},mount_tag=host,security_model=none,readonly=on,multidevs=remap"
    -virtfs "local,path=${run_dir//,/,,},mount_tag=run,security_model=none,multidevs=remap")
  for share in "${shares[@]}"; do
    command+=(-virtfs "local,path=${share//,/,,},mount_tag=share$number,security_model=none,readonly=on,multidevs=remap")
    number=$((number + 1))
  done
  set +e
  timeout --kill-after=10 "$time_limit_s" "${command[@]}" </dev/null 2>&1 | tr -d '\r'
  qemu_status=${PIPESTATUS[0]}
  set -e
}

# /dev/kvm can exist although the processor lacks the support (in a container on a virtual machine).
# qemu would then hang or die.
kvm_works() {
  grep -qwE 'vmx|svm' /proc/cpuinfo && [[ -r /dev/kvm && -w /dev/kvm ]]
}

report() {
  [[ -z $results ]] || { mkdir -p "$results" && cp -r "$run_dir/results/." "$results/"; }
  case $qemu_status in
    0) ;;
    124 | 137) echo "bed: the guest was still running after $time_limit_s s" >&2; exit 124 ;;
    *) die "qemu ended with status $qemu_status" ;;
  esac
  [[ -s $run_dir/status ]] || die "the guest ended without reporting a status (a kernel panic?)"
  local status
  status=$(<"$run_dir/status")
  [[ $status =~ ^[0-9]+$ ]] || die "the guest failed before its script ran: $status"
  exit "$status"
}

die() {
  echo "bed: $*" >&2
  exit 125
}

main "$@"
