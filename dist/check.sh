#!/bin/bash
# Checks the output of dist/build.sh: dependencies, exports and sizes of the files, and that each
# package works when it is installed.
#
#   dist/check.sh [--root DIR]... [DIR]        DIR: the folder with the release files,
#                                              default dist/out
#
# --root DIR: a Debian root folder in which the deb is tried; may be repeated. In an x86-64 root
# (debootstrap, with /proc mounted; needs root) the deb is installed, run, upgraded and removed. For
# an aarch64 root (debootstrap --foreign, with libibverbs1, ibverbs-providers and their dependencies
# unpacked into it by dpkg-deb -x) the deb's files run under qemu-user with that root's libraries.
#
# Needs binutils, Python 3.11 with venv, lintian, qemu-user for aarch64, and the Python packages
# that build.sh has left below the target folder.
set -euo pipefail
shopt -s inherit_errexit

cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly target=${CARGO_TARGET_DIR:-$PWD/target}
readonly tools=$target/dist-tools
readonly floor=2.28
roots=()
crates=()
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

main() {
  while [[ ${1:-} == --* ]]; do
    [[ $1 == --root && -d ${2:-} ]] || die "$*: give --root DIR, or the folder with the release files"
    roots+=("$(realpath "$2")")
    shift 2
  done
  out=$(realpath "${1:-dist/out}")
  [[ -f $out/SHA256SUMS ]] || die "$out/SHA256SUMS not found: run dist/build.sh first"
  (cd "$out" && sha256sum --quiet --check SHA256SUMS)
  local tarball
  for tarball in "$out"/*.tar.gz; do check_files "$tarball"; done
  find_crates
  for tarball in "$out"/*.tar.gz; do check_notices "$tarball" "$work/$(basename "$tarball" .tar.gz)/THIRD-PARTY-LICENSES"; done
  check_sbom
  check_debs
  check_wheels
  check_wheel_installed
  local root
  for root in "${roots[@]}"; do check_in_root "$root"; done
  echo "check: all checks passed"
}

die() {
  echo "check: $*" >&2
  exit 1
}

check_files() {
  local tarball=$1 folder architecture
  tar --directory "$work" -xf "$tarball"
  folder=$work/$(basename "$tarball" .tar.gz)
  architecture=${folder##*-}
  check_elf "$folder/bin/nccl-spark" 12000
  check_elf "$folder/lib/libnccl-net-spark.so" 2400
  check_elf "$folder/lib/nccl-spark/softverbs-ibverbs" 1000
  local exported
  exported=$(exports "$folder/lib/libnccl-net-spark.so")
  [[ $exported == "$(tables)" ]] ||
    die "$tarball: the plugin exports $exported"
  exported=$(exports "$folder/lib/nccl-spark/softverbs-ibverbs")
  [[ $exported == *ibv_create_qp* ]] || die "$tarball: the software fabric exports $exported"
  local word
  for word in "nccl-spark install" "nccl-spark doctor" "nccl-spark rails" "nccl-spark env" "--ipc host"; do
    grep -qF -- "$word" "$folder/README" || die "$tarball: its README does not mention $word"
  done
  check_pages "$tarball" "$folder/share"
  check_without_lab "$tarball" "$folder"
}

check_without_lab() {
  [[ -z $(find "$2" -name '*spark-lab*') ]] || die "$1 contains spark-lab"
}

# check_pages PACKAGE FOLDER [ZSH]: looks for the manual pages and each shell's completions.
check_pages() {
  local page
  for page in man/man1/nccl-spark{,-doctor,-all-gather}.1.gz bash-completion/completions/nccl-spark \
    "${3:-zsh/site-functions}/_nccl-spark" fish/vendor_completions.d/nccl-spark.fish; do
    [[ -s $2/$page ]] || die "$1 lacks $page"
  done
}

# Sets $crates to the crates that the tarballs' panic messages name, each as NAME-VERSION.
find_crates() {
  mapfile -t crates < <(grep -rahoE '(registry/src/[^/]+|rust/deps)/[a-zA-Z0-9_-]+-[0-9]+\.[0-9]+\.[0-9]+' "$work"/nccl-net-spark-*/{bin,lib} |
    sed 's|.*/||' | sort -u)
  [[ ${#crates[@]} -gt 10 ]] || die "the binaries name only ${#crates[@]} crates: did --remap-path-prefix of build.sh change?"
}

# Checks that the SBOM names all linked crates, and no procedural macros, bindgen or cc.
check_sbom() {
  local sbom crate
  sbom=$(echo "$out"/*.cdx.json)
  for crate in "${crates[@]}"; do
    grep -qF "\"pkg:cargo/${crate%-*}@${crate##*-}\"" "$sbom" || die "$sbom does not name $crate"
  done
  for crate in rust-std libunwind; do
    grep -qF "\"name\": \"$crate\"" "$sbom" || die "$sbom does not name $crate"
  done
  ! grep -E '"pkg:cargo/(syn|quote|proc-macro2|[a-z_]+[-_](derive|impl|macros)|cc|bindgen)@' "$sbom" || die "$sbom names what is not linked"
  echo "the SBOM has the ${#crates[@]} crates that the binaries name"
}

# check_notices PACKAGE FILE: checks that the file names each of $crates, and has the licence texts
# that only the standard library or the unwinder needs.
check_notices() {
  local package=$1 file=$2 crate text
  for crate in "${crates[@]}"; do
    grep -qwF "${crate%-*} ${crate##*-}" "$file" || die "$package: $(basename "$file") does not name $crate"
  done
  for text in "UNICODE LICENSE V3" "LLVM Exceptions to the Apache 2.0 License" "The Rust Project Developers"; do
    grep -qF "$text" "$file" || die "$package: $(basename "$file") lacks \"$text\""
  done
  ! grep -qF "$HOME/" "$file" || die "$package: $(basename "$file") names a folder of this machine"
}

# check_elf FILE KIB: checks the machine, the needed libraries, the highest glibc symbol version,
# that the file has no path of the building machine, and that its size is at most KIB.
check_elf() {
  local file=$1 machine glibc needed size
  case $architecture in
    x86_64) machine='Advanced Micro Devices X86-64' ;;
    *) machine=AArch64 ;;
  esac
  [[ $(readelf -h "$file" | sed -n 's/ *Machine: *//p') == "$machine" ]] || die "$file is not for $architecture"
  glibc=$(readelf --dyn-syms --wide "$file" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -n 1)
  [[ $(printf '%s\n' "GLIBC_$floor" "$glibc" | sort -V | tail -n 1) == "GLIBC_$floor" ]] || die "$file needs $glibc"
  needed=$(readelf -d "$file" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort | tr '\n' ' ')
  ! tr " " "\n" <<<"$needed" | grep -qvxE "(lib(c|dl|pthread|m|rt|util|gcc_s)\.so\.[0-9]+|ld-linux-.*)?" || die "$file needs $needed"
  ! readelf -d "$file" | grep -qE 'RPATH|RUNPATH' || die "$file has a run path"
  ! grep -qaF "$PWD" "$file" || die "$file names $PWD"
  size=$(($(stat -c %s "$file") / 1024))
  ((size <= $2)) || die "$file has $size KiB: more than $2"
  printf '%-66s %-12s %6d KiB  %s\n' "${file#"$work"/}" "$glibc" "$size" "$needed"
}

# Prints the tables that the library must export, in the order of `exports`.
tables() {
  awk '$1 == "extern" && $4 ~ /Plugin_v/ { sub(";", "", $4); print $4 }' include/nccl_net_spark.h | sort | tr '\n' ' ' | sed 's/ $//'
}

exports() {
  readelf --dyn-syms --wide "$1" | awk '$5 == "GLOBAL" && $7 != "UND" && $7 != "ABS" { sub("@.*", "", $8); print $8 }' | sort -u | tr '\n' ' ' | sed 's/ $//'
}

# check_links PACKAGE PAGE...: checks that each link of a page is absolute, or leads to a file of
# the package or to a heading of a page in docs/guide.
check_links() {
  local package=$1 page link
  shift
  for page in "$@"; do
    while read -r link; do
      case $link in
        https://*) ;;
        '#'*) [[ $page == */guide/* ]] || die "$package: $(basename "$page") links to $link, which is not where it is shown" ;;
        *) [[ -f $(dirname "$page")/${link%%#*} ]] || die "$package: $(basename "$page") links to $link, which it does not have" ;;
      esac
    done < <(grep -oE '\]\([^)]*\)' "$page" | sed 's/^](//; s/)$//')
  done
}

check_debs() {
  local deb
  for deb in "$out"/*.deb; do
    echo "lintian $(basename "$deb")"
    lintian --allow-root --fail-on error,warning "$deb"
    rm -rf "$work/deb"
    dpkg-deb -x "$deb" "$work/deb"
    check_notices "$deb" "$work/deb/usr/share/doc/nccl-net-spark/copyright"
    check_pages "$deb" "$work/deb/usr/share" zsh/vendor-completions
    check_without_lab "$deb" "$work/deb"
    check_links "$deb" "$work"/deb/usr/share/doc/nccl-net-spark/{README.md,guide/*.md}
  done
}

check_wheels() {
  local wheel
  for wheel in "$out"/*.whl; do
    "$tools/bin/python" -m auditwheel show "$wheel" 2>&1 | tr '\n' ' ' | grep -q "consistent with the following platform tag: \"manylinux_${floor/./_}_" ||
      die "auditwheel does not agree with the tag of $wheel"
    echo "auditwheel agrees: $(basename "$wheel")"
    rm -rf "$work/wheel"
    "$tools/bin/python" -m zipfile -e "$wheel" "$work/wheel"
    check_notices "$wheel" "$work"/wheel/*.dist-info/licenses/THIRD-PARTY-LICENSES
    check_without_lab "$wheel" "$work/wheel"
    check_links "$wheel" "$work"/wheel/*.dist-info/METADATA
  done
}

# Installs the wheel into a fresh virtual environment. The command runs, path() names a library that
# loads, an import changes nothing, vLLM's entry point acts only with NCCL_SPARK_VLLM=1, and pip
# removes every file.
check_wheel_installed() {
  python3 -m venv "$work/venv"
  "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-index "$out"/*x86_64.whl
  check_pages "the installed wheel" "$work/venv/share"
  all_gather "$work/venv/bin/nccl-spark"
  refuses "pip uninstall nccl-net-spark" "$work/venv/bin/nccl-spark"
  env -u NCCL_NET -u NCCL_NET_PLUGIN "$work/venv/bin/python" dist/check_wheel.py
  "$work/venv/bin/python" -m pip uninstall --quiet --yes nccl-net-spark
  [[ -z $(find "$work/venv" -name '*nccl*spark*') ]] || die "the wheel left files behind"
}

# all_gather COMMAND...: runs two ranks over the software fabric, and expects 0 wrong at 7 sizes.
all_gather() {
  local text
  text=$("$@" all-gather -r 2 -b 8 -e 32K -f 4 --fabric soft --profile unpaced)
  [[ $(awk '$1 ~ /^[0-9]+$/ && $NF == "0"' <<<"$text" | wc -l) == 7 ]] || die "$* all-gather: $text"
  echo "all-gather, 0 wrong: $*"
}

# refuses ADVICE COMMAND...: checks that a package's install and uninstall fail with their advice.
refuses() {
  local advice=$1 status=0 text
  shift
  text=$("$@" install 2>&1) || status=$?
  [[ $status == 1 && $text == *"nothing to install"* ]] || die "$* install: status $status, $text"
  status=0
  text=$("$@" uninstall 2>&1) || status=$?
  [[ $status == 1 && $text == *"$advice"* ]] || die "$* uninstall: status $status, $text"
}

check_in_root() {
  local root=$1 deb name
  if readelf -h "$root/usr/bin/dpkg" | grep -q AArch64; then
    check_in_arm_root "$root"
    return
  fi
  deb=$(basename "$out"/*_amd64.deb)
  name=$(sed -n "s/^PRETTY_NAME=\"\(.*\)\"/\1/p" "$root/etc/os-release")
  cp "$out/$deb" "$root/tmp/"
  local run=(chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive)
  "${run[@]}" apt-get install -y -qq --no-install-recommends "/tmp/$deb" >/dev/null
  all_gather "${run[@]}" nccl-spark
  refuses "apt remove nccl-net-spark" "${run[@]}" nccl-spark
  # A second installation is an upgrade.
  "${run[@]}" apt-get install -y -qq --reinstall "/tmp/$deb" >/dev/null
  "${run[@]}" nccl-spark --version
  "${run[@]}" apt-get purge -y -qq nccl-net-spark >/dev/null
  [[ -z $(find "$root/usr" -name '*nccl*spark*' -not -path '*/src/*') ]] || die "$name: the deb left files"
  echo "deb installed, run, upgraded and removed: $name"
}

# qemu-user runs the deb's own files with the libraries of the root folder.
check_in_arm_root() {
  local root=$1 folder=$work/arm name
  name=$(sed -n "s/^PRETTY_NAME=\"\(.*\)\"/\1/p" "$root/etc/os-release")
  rm -rf "$folder"
  dpkg-deb -x "$out"/*_arm64.deb "$folder"
  "$tools/bin/python" -m ziglang cc -target "aarch64-linux-gnu.$floor" -o "$folder/loads" dist/loads.c
  local run=(qemu-aarch64 -L "$root" -E NCCL_SPARK_SETTINGS_FILE=/dev/null) library=$folder/usr/lib/aarch64-linux-gnu symbols text status=0
  read -ra symbols <<<"$(tables)"
  "${run[@]}" "$folder/usr/bin/nccl-spark" --version
  # Without an RDMA device, `rails` ends with status 1 after it has called the root's libibverbs.
  text=$("${run[@]}" "$folder/usr/bin/nccl-spark" rails 2>&1) || status=$?
  [[ $status == 0 || ($status == 1 && $text == *"no RDMA device found"*) ]] || die "$name: rails: $text"
  "${run[@]}" "$folder/loads" "$library/libnccl-net-spark.so" "${symbols[@]}"
  "${run[@]}" "$folder/loads" "$library/nccl-spark/softverbs-ibverbs" ibv_get_device_list ibv_create_qp
  echo "arm64, under qemu-user: --version, rails and dlopen work: $name"
}

main "$@"
