#!/bin/bash
# Checks the simulation and the search through recovery's events. Plants a bug
# (tests/long/planted/*.patch) in a copy of the sources, one at a time. The simulation has to find
# each and print the seed; bugs with names recovery-* have to be found by the search alone. Takes
# half a minute for each bug.
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
  compile unchanged
  seed_of >/dev/null && die "the simulation fails on the sources as they are"
  for name in "$@"; do
    [[ -r tests/long/planted/$name.patch ]] || die "no planted bug $name"
    patch -s -p1 <"tests/long/planted/$name.patch"
    compile "$name"
    if seed=$(found_by "$name"); then
      echo "found   $name: $seed"
    else
      echo "MISSED  $name"
      missed=1
    fi
    patch -s -R -p1 <"tests/long/planted/$name.patch"
  done
  exit "$missed"
}

# The limits below are only for the tests, not for a busy machine's compiler.
compile() {
  case $1 in
    recovery-*) cargo test --quiet --no-run --lib ;;
    *) cargo test --quiet --no-run --test simulation ;;
  esac
}

# Prints how the bug was found; fails where it was not.
found_by() {
  case $1 in
    recovery-*) events_of ;;
    *) seed_of ;;
  esac
}

# Prints the number of events that the search needed; fails where it finds nothing.
events_of() {
  local output
  output=$(mktemp)
  ! timeout 300 cargo test --quiet --lib flow::recovery::tests::search >"$output" 2>&1 || { rm "$output"; return 1; }
  # The limit also ends a search that is too slow, without a finding.
  grep -q ', after \[' "$output" || { cat "$output" >&2; die "the search did not end with an order of events"; }
  echo "the search, after $(grep -m 1 -oE ', after \[[^]]*\]' "$output" |
    grep -oE '(Post|Land|Confirm|Lose|PortDown|PortUp|Hear|DropFrame|Probe|FailNext|Tick|Expire)\b' | wc -l) events"
  rm "$output"
}

# Prints the simulation's seed; fails where it finds nothing.
seed_of() {
  local output
  output=$(mktemp)
  ! SPARK_SIM_RUNS=6000 timeout 300 cargo test --quiet --test simulation >"$output" 2>&1 || { rm "$output"; return 1; }
  grep -oE 'seed [0-9]+' "$output" | tail -n 1 || { cat "$output" >&2; die "the simulation did not end with a seed"; }
  rm "$output"
}

die() {
  echo "planted: $*" >&2
  exit 125
}

main "$@"
