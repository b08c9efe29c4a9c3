#!/bin/bash
# Shows that the simulation, the storms and the search through recovery's events find bugs. Plants
# one bug at a time (tests/long/planted/*.patch) in a copy of the sources. The search has to find the
# bugs named recovery-*, the storms those named storm-*, and `rails_return` those named device-*. The
# simulation has to find the others.
# The simulation and the storms have to name the seed. Takes half a minute a bug.
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
  # The unchanged sources: `recovery-unchanged` for the search, and so on.
  for name in $(printf '%s\n' "$@" | sed -E 's/^(device-|recovery-|storm-)?.*/\1unchanged/' | sort -u); do
    compile "$name"
    found_by "$name" >/dev/null && die "a test fails on the sources as they are ($name)"
  done
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

# Compiles first, so that the time limits below count for the tests alone.
compile() {
  case $1 in
    recovery-*) cargo test --quiet --no-run -p spark-proto --lib ;;
    *) cargo build --quiet -p softverbs && cargo test --quiet --no-run --test "$(played_by "$1")" ;;
  esac
}

# Prints where the bug showed. Fails if it did not.
found_by() {
  case $1 in
    recovery-*) events_of ;;
    *) seed_of "$(played_by "$1")" ;;
  esac
}

played_by() {
  case $1 in
    device-*) echo rails_return ;;
    storm-*) echo storms ;;
    *) echo simulation ;;
  esac
}

# Prints the number of events that the search needed. Fails if the search finds nothing.
events_of() {
  local output
  output=$(mktemp)
  ! timeout 300 cargo test --quiet -p spark-proto --lib flow::recovery::tests::search >"$output" 2>&1 || { rm "$output"; return 1; }
  # A search that reaches the time limit also fails, but has found nothing.
  grep -q ', after \[' "$output" || { cat "$output" >&2; die "the search did not end with an order of events"; }
  echo "the search, after $(grep -m 1 -oE ', after \[[^]]*\]' "$output" |
    grep -oE '(Grant|LandGrant|Post|PostCut|Land|Confirm|Lose|CutOff|Stop|Report|PortDown|PortUp|ReceiveFrame|DropFrame|Probe|FailNext|HangNext|Return|BreakTcp|FindTcp|Dial|Limit|Close|Leave|Tick|Wait|Expire)\b' | wc -l) events"
  rm "$output"
}

# Prints the seed that the simulation or the storms name. Fails if they find nothing.
seed_of() {
  local output
  output=$(mktemp)
  ! SPARK_SIM_RUNS=6000 SPARK_STORM_RUNS=200 timeout 600 cargo test --quiet --test "$1" >"$output" 2>&1 || { rm "$output"; return 1; }
  grep -oE '(SIM|STORM)_SEED=[0-9]+' "$output" | tail -n 1 || { cat "$output" >&2; die "no seed in the output of $1"; }
  rm "$output"
}

die() {
  echo "planted: $*" >&2
  exit 125
}

main "$@"
