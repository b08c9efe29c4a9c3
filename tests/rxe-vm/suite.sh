#!/bin/bash
# Tests the plugin on the kernel's own RDMA stack: builds the release files and the test programs,
# boots the bed (boot.sh) and runs the cases there.
#
#   suite.sh [--no-build] [CASE]...     CASE: a name in cases/, with or without number and .sh;
#                                       default: all
#   suite.sh --list
#
# Logs are left in CARGO_TARGET_DIR/rxe-vm. Status 0 only when every case passed. BED_TIMEOUT_S:
# limit of the whole run (default 2700).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
checkout=$(cd "$here/../.." && pwd)
# shellcheck source=SCRIPTDIR/host.sh
source "$here/host.sh"
build=yes

main() {
  while [[ ${1:-} == --* ]]; do
    case $1 in
      --no-build) build=no ;;
      --list) basename -s .sh "$here"/cases/*.sh; exit 0 ;;
      *) die "unknown option $1 (allowed: --no-build --list)" ;;
    esac
    shift
  done
  choose_cases "$@"
  cd "$checkout"
  export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$checkout/target}
  mkdir -p "$CARGO_TARGET_DIR"
  target=$(cd "$CARGO_TARGET_DIR" && pwd)
  logs=$target/rxe-vm
  if [[ $build == yes ]]; then build_all; fi
  [[ -s $logs/tests.list ]] || die "$logs/tests.list is missing: run without --no-build once"
  local name
  for name in nccl-spark libnccl_net_spark.so; do
    [[ -e $target/release/$name ]] || die "$target/release/$name is missing: run without --no-build once"
  done
  "$here/boot.sh" --timeout "${BED_TIMEOUT_S:-2700}" --memory 4G --share "$checkout" --share "$target" --results "$logs" \
    --env BED_CHECKOUT="$checkout" --env BED_TARGET="$target" --env BED_TESTS="$logs/tests.list" \
    "$here/guest.sh" "${cases[@]}"
}

choose_cases() {
  local wanted file found
  cases=()
  [[ $# -gt 0 ]] || cases=("$here"/cases/*.sh)
  for wanted in "$@"; do
    found=
    for file in "$here"/cases/*.sh; do
      case $(basename "$file" .sh) in
        "$(basename "$wanted" .sh)" | [0-9][0-9]-"$wanted") found=$file ;;
      esac
    done
    [[ -n $found ]] || die "no case $wanted; there are: $(basename -s .sh "$here"/cases/*.sh | paste -sd' ')"
    cases+=("$found")
  done
}

build_all() {
  mkdir -p "$logs"
  cargo build --release --workspace
  cargo test --workspace --no-run --message-format=json >"$logs/cargo.json"
  list_tests "$logs/cargo.json" >"$logs/tests.list"
}

die() {
  echo "suite: $*" >&2
  exit 125
}

main "$@"
