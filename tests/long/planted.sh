#!/bin/bash
# Is the simulation worth anything? Plants a bug (tests/long/planted/*.patch) in a copy of the sources, one at a time, and runs the
# simulation on it, which has to find each and name the seed. Takes half a minute a bug.
#
#   planted.sh [NAME]...     default: all
set -euo pipefail

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$checkout/target}/planted RUST_BACKTRACE=0

main() {
  local copy name seed missed=0 all
  mapfile -t all < <(cd "$checkout/tests/long/planted" && printf '%s\n' *.patch | sed 's/\.patch$//')
  [[ $# -gt 0 ]] || set -- "${all[@]}"
  copy=$(mktemp -d)
  trap 'rm -rf "$copy"' EXIT
  git -C "$checkout" archive HEAD | tar -x -C "$copy"
  cd "$copy"
  cargo build --quiet --workspace
  seed_of >/dev/null && die "the simulation fails on the sources as they are"
  for name in "$@"; do
    [[ -r tests/long/planted/$name.patch ]] || die "no planted bug $name"
    patch -s -p1 <"tests/long/planted/$name.patch"
    if seed=$(seed_of); then
      echo "found   $name: $seed"
    else
      echo "MISSED  $name"
      missed=1
    fi
    patch -s -R -p1 <"tests/long/planted/$name.patch"
  done
  exit "$missed"
}

# The seed that the simulation names; fails where it finds nothing.
seed_of() {
  local output
  output=$(mktemp)
  ! timeout 300 cargo test --quiet --test simulation >"$output" 2>&1 || { rm "$output"; return 1; }
  grep -oE 'seed [0-9]+' "$output" | tail -n 1 || { cat "$output" >&2; die "the simulation did not end with a seed"; }
  rm "$output"
}

die() {
  echo "planted: $*" >&2
  exit 125
}

main "$@"
