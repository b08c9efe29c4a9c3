#!/bin/bash
# Builds examples/containers' overlay images over root file systems with the glibc of common images,
# runs the plugin in them, and applies the mod of spark-vllm-docker as its launch-cluster.sh does.
#
#   tests/containers/images.sh [--releases DIR] ROOT...
#
# ROOT: the folder of a root file system of this machine's architecture with Python and pip, made by
# debootstrap (--variant=minbase --components=main,universe
# --include=ca-certificates,python3,python3-pip). vLLM's images are Ubuntu 22.04 (jammy) by default;
# NGC's, SGLang's and spark-vllm-docker's are Ubuntu 24.04 (noble). DIR: the output of
# dist/build.sh, default dist/out. Needs buildah, overlayfs, and root. Uses its own storage, and
# removes it.
set -euo pipefail
shopt -s inherit_errexit

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
readonly examples=$PWD/examples/containers
readonly library=/usr/local/lib/libnccl-net-spark.so
readonly mod=/workspace/mods/nccl-net-spark
work=$(mktemp -d)
releases=dist/out
storage=(--root "$work/storage" --runroot "$work/run" --storage-driver overlay)
trap clean_up EXIT

main() {
  [[ ${1:-} != --releases ]] || { releases=${2:?--releases needs a folder}; shift 2; }
  [[ $# -gt 0 ]] || die "give the folder of a root file system"
  releases=$(realpath "$releases")
  [[ -f $releases/SHA256SUMS ]] || die "$releases/SHA256SUMS not found: run dist/build.sh first"
  unpack_library
  local root
  for root in "$@"; do try_root "$(realpath "$root")"; done
  echo "images: all checks passed"
}

clean_up() {
  buildah "${storage[@]}" rm --all >/dev/null 2>&1 || true
  rm -rf "$work"
}

die() {
  echo "images: $*" >&2
  exit 1
}

unpack_library() {
  local deb
  deb=$(echo "$releases"/nccl-net-spark_*_"$(dpkg --print-architecture)".deb)
  dpkg-deb -x "$deb" "$work/deb"
  cp "$work/deb/usr/lib/$(uname -m)-linux-gnu/libnccl-net-spark.so" "$work/"
}

try_root() {
  local root=$1 base kind
  name=$(sed -n 's/^PRETTY_NAME="\(.*\)"/\1/p' "$root/etc/os-release")
  base=$(make_base "$root")
  echo "== $name, $(in_container "$base" ldd --version | head -n 1)"
  try_mod "$base"
  for kind in deb wheel; do try_overlay "$kind"; done
  try_empty_folder
  buildah "${storage[@]}" rm --all >/dev/null
}

# Makes the image localhost/base from the root folder, and prints the name of a container from it.
make_base() {
  local container
  container=$(buildah "${storage[@]}" from scratch)
  tar --directory "$1" --create --exclude ./proc/'*' --exclude ./sys/'*' --exclude ./dev/'*' --exclude ./debootstrap . >"$work/root.tar"
  buildah "${storage[@]}" add --quiet "$container" "$work/root.tar" / >/dev/null
  rm "$work/root.tar"
  buildah "${storage[@]}" commit --quiet "$container" localhost/base >/dev/null
  echo "$container"
}

in_container() {
  local container=$1
  shift
  buildah "${storage[@]}" run --isolation chroot "$container" -- "$@"
}

try_overlay() {
  local kind=$1 container
  build "$kind" "$releases" >"$work/log" 2>&1 || { cat "$work/log"; die "$name: the overlay with the $kind cannot be built"; }
  container=$(buildah "${storage[@]}" from localhost/overlay)
  # shellcheck disable=SC2016 # the container's shell expands it
  [[ $(in_container "$container" sh -c 'echo "$NCCL_NET_PLUGIN,${NCCL_NET-unset}"') == "$library,unset" ]] || die "$name, $kind: the image has other variables"
  [[ $(in_container "$container" sh -c 'ls /etc/libibverbs.d/mlx5.driver') == */mlx5.driver ]] || die "$name, $kind: no driver for mlx5"
  all_gather "$container"
  echo "$name: the overlay with the $kind is built, and an all-gather over the software fabric runs in it, 0 wrong"
}

build() {
  buildah "${storage[@]}" build --isolation chroot --file "$examples/overlay/$1.Dockerfile" --build-arg IMAGE=localhost/base --tag localhost/overlay "$2"
}

# Runs an all-gather of the image's own nccl-spark, which loads the plugin from the path in the
# image's NCCL_NET_PLUGIN.
all_gather() {
  local text
  text=$(in_container "$1" nccl-spark all-gather -r 2 -b 8 -e 32K -f 4 --fabric soft --profile unpaced --plugin "$library")
  [[ $(awk '$1 ~ /^[0-9]+$/ && $NF == "0"' <<<"$text" | wc -l) == 7 ]] || die "$name: all-gather: $text"
}

# A folder without the package causes an error that names the file.
try_empty_folder() {
  local kind
  mkdir -p "$work/empty"
  for kind in deb wheel; do
    ! build "$kind" "$work/empty" >"$work/log" 2>&1 || die "$name: an overlay was built without the $kind"
    grep -q "the build's folder needs one" "$work/log" || { cat "$work/log"; die "$name, $kind: no word about the missing file"; }
  done
}

# Applies the mod as launch-cluster.sh copies and runs it, then a second time, and then where it has
# to refuse.
try_mod() {
  local container=$1 settings text
  in_container "$container" mkdir -p "$mod"
  buildah "${storage[@]}" copy --quiet "$container" "$examples/spark-vllm-docker/nccl-net-spark" "$mod" >/dev/null
  refuses "copy libnccl-net-spark.so into the mod's folder" "$container" ""
  buildah "${storage[@]}" copy --quiet "$container" "$work/libnccl-net-spark.so" "$mod/" >/dev/null
  refuses "NCCL_NET_PLUGIN=none is set" "$container" "NCCL_NET_PLUGIN=none "
  refuses "NCCL_NET=IB is set" "$container" "NCCL_NET=IB "
  in_container "$container" sh -c 'printf "NCCL_NET=IB\n# kept\nNCCL_IB_USE_INLINE=1" >/etc/nccl.conf'
  settings=$'# kept\nNCCL_IB_USE_INLINE=1\nNCCL_NET_PLUGIN='$library$'\nNCCL_NET=Spark'
  # The second application changes nothing.
  for text in first second; do
    text=$(apply_mod "$container" "" 2>&1) || die "$name: the mod fails: $text"
    [[ $(in_container "$container" cat /etc/nccl.conf) == "$settings" ]] || die "$name: /etc/nccl.conf is $(in_container "$container" cat /etc/nccl.conf)"
  done
  apply_mod "$container" "NCCL_NET_PLUGIN=$library NCCL_NET=Spark " >/dev/null || die "$name: the mod refuses its own variables"
  in_container "$container" sh -c 'echo NCCL_NET=Socket >/root/.nccl.conf'
  refuses "/root/.nccl.conf sets NCCL_NET to something else" "$container" ""
  echo "$name: the mod installs the verbs packages and the plugin, which loads, and refuses what would keep NCCL from it"
}

apply_mod() {
  in_container "$1" bash -c "cd / && export $2 WORKSPACE_DIR=\$PWD && cd $mod && chmod +x run.sh && ./run.sh"
}

# refuses WORDS CONTAINER VARIABLES: checks that the mod refuses, and that its message has WORDS.
refuses() {
  local text
  ! text=$(apply_mod "$2" "$3" 2>&1) || die "$name: the mod was applied, where it should say \"$1\": $text"
  [[ $text == *"$1"* ]] || die "$name: the mod should say \"$1\", and says: $text"
}

main "$@"
