#!/bin/bash
# Runs the software fabric's tests and the plugin's own under AddressSanitizer (with its leak check)
# and ThreadSanitizer.
#
#   sanitizers.sh [address|thread]...     default: both
#
# ThreadSanitizer needs the standard library built with it too, and so its sources: rustup component
# add rust-src. SPARK_SIM_RUNS: number of runs of the simulation (default 300).
set -euo pipefail

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
readonly target=x86_64-unknown-linux-gnu
# Without the perftest suite: its programs load the library without a sanitizer's runtime.
readonly fabric=(-p softverbs --lib --test core --test c_surface)
readonly plugin=(-p nccl-net-spark -p spark-host -p spark-proto -p spark-verbs --lib --test connections --test failover --test quiet_data_path --test simulation)

# Runs as cargo's wrapper around rustc: `$0 RUSTC ARGUMENT...`. Only the program may contain a
# sanitizer's runtime. The fabric's library is a `bin` that the linker turns into a shared object,
# so rustc would add a second runtime to it.
compile() {
  local extra=()
  [[ " $* " != *" --crate-name softverbs_ibverbs "* ]] || extra=(-Zexternal-clangrt)
  exec "$@" "${extra[@]}"
}

main() {
  local sanitizer failed=0
  [[ $# -gt 0 ]] || set -- address thread
  for sanitizer in "$@"; do
    case $sanitizer in
      address | thread) ;;
      *) die "no sanitizer $sanitizer: address or thread" ;;
    esac
  done
  for sanitizer in "$@"; do
    (under "$sanitizer") || failed=1
  done
  exit "$failed"
}

under() {
  local sanitizer=$1 std=() failed=0
  cd "$checkout" || die "no $checkout"
  # With this, stable Rust accepts the unstable flags of its own sanitizers.
  export RUSTC_BOOTSTRAP=1 RUSTC_WORKSPACE_WRAPPER=$checkout/tests/long/sanitizers.sh
  # The fabric's library finds the runtime in the program that loads it. Reports walk the stack by
  # frame pointers.
  export RUSTFLAGS="-Zsanitizer=$sanitizer -Clink-arg=-rdynamic -Cforce-frame-pointers=yes"
  export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$checkout/target}/$sanitizer SPARK_SIM_RUNS=${SPARK_SIM_RUNS:-300}
  if [[ $sanitizer == thread ]]; then
    [[ -d $(rustc --print sysroot)/lib/rustlib/src/rust/library ]] || die "no sources of std: rustup component add rust-src"
    std=(-Zbuild-std)
    export TSAN_OPTIONS="second_deadlock_stack=1 ${TSAN_OPTIONS:-}"
  else
    export ASAN_OPTIONS="detect_stack_use_after_return=1 ${ASAN_OPTIONS:-}"
    export LSAN_OPTIONS="suppressions=$checkout/tests/long/lsan.supp print_suppressions=0 ${LSAN_OPTIONS:-}"
  fi
  echo "== $sanitizer"
  # The tests load the fabric's library, but cargo does not know that they need it.
  cargo build "${std[@]}" --target "$target" -p softverbs || die "the software fabric does not build"
  cargo test --no-fail-fast "${std[@]}" --target "$target" "${fabric[@]}" || failed=1
  cargo test --no-fail-fast "${std[@]}" --target "$target" "${plugin[@]}" || failed=1
  return "$failed"
}

die() {
  echo "sanitizers: $*" >&2
  exit 2
}

if [[ ${1:-} == */rustc || ${1:-} == rustc ]]; then
  compile "$@"
fi
main "$@"
