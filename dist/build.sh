#!/bin/bash
# Builds the release files for x86-64 and aarch64: a deb, a wheel and a tarball for each, an SBOM,
# and checksums of all.
#
#   dist/build.sh [--out DIR] [x86_64|aarch64]...      default: dist/out, both architectures
#
# Runs on x86-64 Linux. It first looks for the programs that it needs (check_needs), and names the
# missing ones with the commands that install them. The Python packages of requirements.txt go into
# a virtual environment below the target folder.
#
# zig is the linker: one wheel from PyPI links for both architectures and any glibc version.
# Debian's cross compiler would make the files need the building machine's glibc. dpkg-deb makes the
# deb: it exists wherever debs are built, works for other architectures, and honours
# SOURCE_DATE_EPOCH. cargo-deb would take minutes to compile, and make the same package.
#
# The files load with glibc 2.28 and later (manylinux_2_28). The same commit and the same tools give
# the same bytes in any folder: the files contain no time, path or file order of this machine.
set -euo pipefail
shopt -s inherit_errexit

cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly glibc=2.28
readonly target=${CARGO_TARGET_DIR:-$PWD/target}
readonly tools=$target/dist-tools
out=$PWD/dist/out
architectures=()

main() {
  while [[ $# -gt 0 ]]; do
    case $1 in
      --out) [[ -n ${2:-} ]] || die "--out needs a folder"; out=$(realpath -m "$2"); shift ;;
      x86_64 | aarch64) architectures+=("$1") ;;
      *) die "$1: give --out DIR, x86_64 or aarch64" ;;
    esac
    shift
  done
  [[ ${#architectures[@]} -gt 0 ]] || architectures=(x86_64 aarch64)
  [[ $(uname -m) == x86_64 ]] || die "this machine is $(uname -m); the releases are built on x86-64"
  check_needs

  version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
  repository=$(sed -n '/^\[workspace.package\]/,/^\[/s/^repository = "\(.*\)"/\1/p' Cargo.toml)
  [[ -n $version && -n $repository ]] || die "Cargo.toml names no version or no repository"
  name_versions
  # The commit's time, or that of CHANGELOG.md if the sources have no git history.
  SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || stat --format=%Y CHANGELOG.md)}
  export SOURCE_DATE_EPOCH
  # The script deletes $out below, so the folder must be empty or contain a release.
  [[ $out == "$PWD/dist/out" || ! -e $out || -e $out/SHA256SUMS || -z $(find "$out" -maxdepth 0 -not -empty) ]] || die "--out $out is neither empty nor a release folder"
  umask 022
  make_tools
  rm -rf "$out"
  mkdir -p "$out"
  notices=$target/dist-notices
  make_notices
  # The completions and manual pages are printed by the x86-64 command line.
  compile x86_64
  pages=$target/dist-pages
  make_pages
  for architecture in "${architectures[@]}"; do
    [[ $architecture == x86_64 ]] || compile "$architecture"
    stage=$target/dist-stage/$architecture
    make_stage
    make_tarball
    make_deb
    make_wheel
  done
  "$tools/bin/python" dist/sbom.py >"$out/nccl-net-spark-$name_version.cdx.json"
  (cd "$out" && sha256sum -- * >SHA256SUMS)
  ls -l "$out"
}

die() {
  echo "build: $*" >&2
  exit 1
}

# Fails with a list of the missing programs. The C compiler is needed to link build scripts.
check_needs() {
  missing=
  local command need have triple
  need=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
  if command -v cargo >/dev/null && command -v rustc >/dev/null; then
    have=$(rustc --version | cut -d ' ' -f 2)
    [[ $(printf '%s\n' "$need" "$have" | sort -V | head -n 1) == "$need" ]] || lacks "Rust $need or later: this is $have" "rustup update"
    # x86-64 is always built: its command line prints the completions and manual pages.
    for triple in $(printf '%s-unknown-linux-gnu\n' x86_64 "${architectures[@]}" | sort -u); do
      [[ -d $(rustc --print target-libdir --target "$triple") ]] || lacks "Rust's standard library for $triple" "rustup target add $triple"
    done
    [[ -d $(rustc --print sysroot)/lib/rustlib/src/rust/library ]] || lacks "the standard library's sources" "rustup component add rust-src"
  else
    lacks "Rust $need or later" "https://rustup.rs; then rustup component add rust-src, rustup target add aarch64-unknown-linux-gnu"
  fi
  command -v cc >/dev/null || lacks "a C compiler" "apt install build-essential"
  python3 -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    lacks "Python 3.11 or later with venv" "apt install python3-venv"
  for command in dpkg-deb:dpkg gzip:gzip tar:tar; do
    command -v "${command%:*}" >/dev/null || lacks "${command%:*}" "apt install ${command#*:}"
  done
  [[ -z $missing ]] || die "nothing was built, as this is missing:$missing"
}

lacks() {
  missing+=$'\n'"  $1: $2"
}

# Sets the versions and the reference for links. A release is built from its tag, or from sources
# without git history. Packages of any other commit have a version that sorts before the release's.
# It contains the commit's time, so that a later commit is newer; the deb's version also contains
# the commit. A count of commits would be wrong in a shallow clone.
name_versions() {
  deb_version=$version wheel_version=$version name_version=$version reference=v$version
  local top time
  # The sources may be inside the checkout of another project, whose commit is not theirs.
  top=$(git rev-parse --quiet --verify HEAD >/dev/null 2>&1 && git rev-parse --show-toplevel) || return 0
  [[ $top == "$(realpath .)" ]] || return 0
  if git tag --points-at HEAD | grep -qxF "v$version" && [[ -z $(git status --porcelain) ]]; then return; fi
  reference=$(git rev-parse HEAD)
  time=$(TZ=UTC git log -1 --date=format-local:%Y%m%d%H%M%S --format=%cd)
  deb_version=$version~git$time.${reference:0:12} wheel_version=$version.dev$time name_version=$version-dev$time
}

make_tools() {
  [[ -x $tools/bin/python ]] || python3 -m venv "$tools"
  "$tools/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary=:all: \
    -r dist/requirements.txt
}

# compile ARCHITECTURE: builds three stripped files in $target/dist-files/ARCHITECTURE.
compile() {
  local triple=$1-unknown-linux-gnu
  local built=$target/$triple/dist files=$target/dist-files/$1 sysroot
  sysroot=$(rustc --print sysroot)
  # Otherwise panic messages would contain paths of this machine.
  local -a flags=("--remap-path-prefix=$PWD=." "--remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=cargo" "--remap-path-prefix=$sysroot=rust")
  local IFS=$'\x1f'
  export CARGO_ENCODED_RUSTFLAGS="${flags[*]}"
  unset IFS
  # The data path crosses crates, so LTO saves instructions. Cargo has no LTO for an rlib.
  PATH=$tools/bin:$PATH CARGO_PROFILE_DIST_LTO=thin cargo-zigbuild rustc --locked --profile dist --target "$triple.$glibc" \
    -p nccl-net-spark --lib --crate-type cdylib
  PATH=$tools/bin:$PATH cargo zigbuild --locked --profile dist --target "$triple.$glibc" -p nccl-tests-harness --bin nccl-spark
  # Cargo builds the software fabric as a program that its build script turns into a shared object
  # (softverbs/build.rs). zig's linker rejects the arguments for this as contradictory. So the same
  # object is linked here from a static library. zig's own unwinder is linked in, as in the other
  # two files. -z defs rejects symbols that would be missing when the library is loaded.
  cargo rustc --locked --profile dist --target "$triple" -p softverbs --lib --crate-type staticlib
  mkdir -p "$files"
  "$tools/bin/python" -m ziglang cc -target "$1-linux-gnu.$glibc" -shared -s -o "$files/softverbs-ibverbs" \
    -Wl,--whole-archive "$built/libsoftverbs.a" -Wl,--no-whole-archive -Wl,--gc-sections -Wl,--build-id=none \
    -Wl,--version-script=softverbs/ibverbs.map -Wl,-soname,libsoftverbs-ibverbs.so.1 -Wl,-z,nodelete -Wl,-z,now -Wl,-z,relro \
    -Wl,-z,defs -lunwind
  cp "$built/libnccl_net_spark.so" "$files/libnccl-net-spark.so"
  cp "$built/nccl-spark" "$files/nccl-spark"
}

make_pages() {
  local program=$target/dist-files/x86_64/nccl-spark
  rm -rf "$pages"
  mkdir -p "$pages"/man/man1 "$pages"/bash-completion/completions "$pages"/zsh/site-functions "$pages"/fish/vendor_completions.d
  "$program" completions bash >"$pages/bash-completion/completions/nccl-spark"
  "$program" completions zsh >"$pages/zsh/site-functions/_nccl-spark"
  "$program" completions fish >"$pages/fish/vendor_completions.d/nccl-spark.fish"
  "$program" man --out "$pages/man/man1"
  gzip -9n "$pages"/man/man1/*
}

# Writes the notices and licence texts of everything linked, which are the same for all
# architectures. Also writes the deb's copyright file, which contains them.
make_notices() {
  mkdir -p "$notices"
  "$tools/bin/python" dist/third_party.py >"$notices/THIRD-PARTY-LICENSES"
  "$tools/bin/python" dist/third_party.py --debian >"$notices/copyright"
}

# absolute_links FILE: prints a page with absolute links to files that a package does not have.
# Links between pages of docs/guide stay relative: a package has all of these pages or none.
absolute_links() {
  local root=$repository/blob/$reference
  case $1 in
    README.md) sed -E "s,\]\((#[^)]*)\),](README.md\1),g; s,\]\(([^):]*)\),]($root/\1),g" "$1" ;;
    docs/guide/*) sed -E "s,\]\(\.\./\.\./([^)]*)\),]($root/\1),g; s,\]\(\.\./([^)]*)\),]($root/docs/\1),g" "$1" ;;
    *) die "absolute_links: $1 is neither README.md nor in docs/guide" ;;
  esac
}

# Makes $stage, a folder with the bin, lib and share that `nccl-spark install` writes.
make_stage() {
  local files=$target/dist-files/$architecture
  rm -rf "$stage"
  install -D -m 755 "$files/nccl-spark" "$stage/bin/nccl-spark"
  install -D -m 644 "$files/libnccl-net-spark.so" "$stage/lib/libnccl-net-spark.so"
  install -D -m 644 "$files/softverbs-ibverbs" "$stage/lib/nccl-spark/softverbs-ibverbs"
  mkdir -p "$stage/share"
  cp -r "$pages/." "$stage/share/"
}

make_tarball() {
  local name=nccl-net-spark-$name_version-linux-$architecture
  local folder=$target/dist-tarball/$name
  rm -rf "$target/dist-tarball"
  mkdir -p "$folder"
  cp -r "$stage/." "$folder/"
  cp dist/tarball/README LICENSE-MIT LICENSE-APACHE "$notices/THIRD-PARTY-LICENSES" "$folder/"
  tar --directory "$target/dist-tarball" --sort=name --format=gnu --owner=0 --group=0 --numeric-owner \
    --mtime="@$SOURCE_DATE_EPOCH" --create "$name" | gzip -9n >"$out/$name.tar.gz"
}

make_deb() {
  local debian triplet page root=$target/dist-deb
  case $architecture in
    x86_64) debian=amd64 ;;
    aarch64) debian=arm64 ;;
  esac
  triplet=$architecture-linux-gnu
  local doc=$root/usr/share/doc/nccl-net-spark
  rm -rf "$root"
  mkdir -p "$root/usr/lib/$triplet" "$root/DEBIAN" "$doc" "$root/usr/share/lintian/overrides"
  cp -r "$stage/bin" "$stage/share" "$root/usr/"
  mkdir -p "$root/usr/share/zsh/vendor-completions"
  mv "$root/usr/share/zsh/site-functions/_nccl-spark" "$root/usr/share/zsh/vendor-completions/"
  rmdir "$root/usr/share/zsh/site-functions"
  cp -r "$stage/lib/." "$root/usr/lib/$triplet/"
  cp "$notices/copyright" "$doc/"
  absolute_links README.md >"$doc/README.md"
  mkdir "$doc/guide"
  for page in docs/guide/*.md; do absolute_links "$page" >"$doc/guide/$(basename "$page")"; done
  install -D -m 644 -t "$doc/guide/netplan" docs/guide/netplan/*.yaml
  gzip -9nc CHANGELOG.md >"$doc/changelog.gz"
  gzip -9nc >"$doc/changelog.Debian.gz" <<END
nccl-net-spark ($deb_version-1) unstable; urgency=medium

  * Version $deb_version: see changelog.gz.

 -- $(sed -n 's/^Maintainer: //p' dist/deb/control)  $(date --utc --rfc-email --date="@$SOURCE_DATE_EPOCH")
END
  install -D -m 644 -t "$root/usr/lib/udev/rules.d" nccl-tests-harness/src/commands/install/60-nccl-spark.rules
  cp dist/deb/triggers "$root/DEBIAN/"
  cp dist/deb/lintian-overrides "$root/usr/share/lintian/overrides/nccl-net-spark"
  local size
  # In whole KiB, like dpkg-gencontrol, so that the file system of this machine does not matter.
  size=$(find "$root/usr" -printf '%y %s\n' | awk '{ kib += $1 == "f" ? int(($2 + 1023) / 1024) : 1 } END { print kib }')
  sed -e "s/@VERSION@/$deb_version-1/" -e "s/@ARCHITECTURE@/$debian/" -e "s/@SIZE@/$size/" dist/deb/control >"$root/DEBIAN/control"
  (cd "$root" && find usr -type f -print0 | sort -z | xargs -0 md5sum >DEBIAN/md5sums)
  find "$root" -type d -exec chmod 755 {} +
  find "$root" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
  # xz, because lintian of Debian 12 knows no later format.
  dpkg-deb --root-owner-group -Zxz --build "$root" "$out/nccl-net-spark_$deb_version-1_$debian.deb" >/dev/null
}

make_wheel() {
  local folder=$target/dist-wheel
  rm -rf "$folder"
  mkdir -p "$folder"
  cp -r dist/wheel/. "$folder/"
  absolute_links README.md >"$folder/README.md"
  cp LICENSE-MIT LICENSE-APACHE "$notices/THIRD-PARTY-LICENSES" "$folder/"
  cp -r "$stage/bin" "$stage/lib" "$folder/nccl_net_spark/"
  cp -r "$stage/share" "$folder/"
  (cd "$folder" &&
    NCCL_NET_SPARK_VERSION=$wheel_version NCCL_NET_SPARK_PLATFORM=manylinux_${glibc/./_}_$architecture \
      "$tools/bin/python" -m build --wheel --no-isolation --outdir "$out" . >/dev/null)
}

main "$@"
