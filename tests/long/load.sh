#!/bin/bash
# Connections under load for a long time (tests/load.rs): two processes over the software fabric, in
# real time, while rails go down and up. Prints the traffic, and measurements of the processes
# before, during and after. Fails if a value does not return to its initial value.
#
#   load.sh flapping [SECONDS]           default 600; a connection each way at full rate, and a rail
#                                        that flaps every second
#   load.sh connections [COUNT]          default 10000; one after the other, each opened, used once
#                                        and closed
#   load.sh many [SECONDS [CONNECTIONS]] default 120 and 64; traffic on all together while rails
#                                        flap, then all are closed
#   load.sh all                          the three, with their defaults
#   load.sh brief                        the three, some seconds each
#   load.sh leaks [NAME]...              plants each leak of tests/long/leaks/*.patch in a copy of
#                                        the sources; `brief` has to fail with each
#
# SPARK_LOAD_SEED=N changes the flaps.
set -euo pipefail

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$checkout/target} RUST_BACKTRACE=0

main() {
  cd "$checkout"
  local part=${1:-all}
  shift || true
  case $part in
    flapping) build && SPARK_LOAD_SECONDS=${1:-600} load flapping ;;
    connections) build && SPARK_LOAD_CONNECTIONS=${1:-10000} load connections ;;
    many) build && SPARK_LOAD_SECONDS=${1:-120} SPARK_LOAD_AT_ONCE=${2:-64} load many ;;
    all) main flapping && main connections && main many ;;
    brief) build && load_each ;;
    leaks) leaks "$@" ;;
    *) die "no part $part; there are: flapping, connections, many, all, brief, leaks" ;;
  esac
}

# Builds the plugin in its shipped form, and the software fabric, which the processes load.
build() {
  cargo build --quiet --release -p softverbs
  cargo test --quiet --release -p nccl-net-spark --test load --no-run
}

load() {
  cargo test --quiet --release -p nccl-net-spark --test load -- --ignored --exact "$1" --nocapture
}

leaks() {
  local copy name output missed=0
  [[ $# -gt 0 ]] || mapfile -t names < <(cd tests/long/leaks && printf '%s\n' *.patch | sed 's/\.patch$//')
  [[ $# -eq 0 ]] || names=("$@")
  copy=$(mktemp -d)
  output=$copy.output
  # shellcheck disable=SC2064 # these folders, even if the variables change later
  trap "rm -rf '$copy' '$output'" EXIT
  git archive HEAD | tar -x -C "$copy"
  export CARGO_TARGET_DIR=$CARGO_TARGET_DIR/leaks
  cd "$copy"
  build
  load_each || die "the sources as they are fail"
  for name in "${names[@]}"; do
    [[ -r tests/long/leaks/$name.patch ]] || die "no leak $name"
    patch -s -p1 <"tests/long/leaks/$name.patch"
    build
    if load_each >"$output" 2>&1; then
      echo "MISSED  $name"
      missed=1
    else
      echo "found   $name:"
      grep -hE '^(process .*|[0-9]+ queue pairs are left)$' "$output" | sed 's/^/          /'
    fi
    patch -s -R -p1 <"tests/long/leaks/$name.patch"
  done
  return "$missed"
}

load_each() {
  load flapping && load connections && load many
}

die() {
  echo "load: $*" >&2
  exit 2
}

main "$@"
