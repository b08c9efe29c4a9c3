#!/bin/bash
# Runs unit tests under Miri, which looks for undefined behaviour: those of the rooms with `unsafe`,
# and of the rooms that decode and keep a peer's messages. Needs `rustup toolchain install nightly
# -c miri -c rust-src`.
#
#   miri.sh [PACKAGE [TEST]...]     default: the rooms above, in three packages
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# The tests read random numbers and the time from the system, cast numbers to pointers that are
# never followed, and leak some memory on purpose (tests/long/lsan.supp; AddressSanitizer looks for
# other leaks).
export MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-permissive-provenance -Zmiri-ignore-leaks ${MIRIFLAGS:-}" PROPTEST_CASES=${PROPTEST_CASES:-8}
cargo +nightly miri --version >/dev/null 2>&1 ||
  { echo "miri: missing: rustup toolchain install nightly --profile minimal -c miri -c rust-src" >&2; exit 125; }

# Miri cannot open libraries, and does not know madvise(MADV_DONTFORK). The tests of striping in
# virtual time, and the search through every order of events, would take hours.
readonly skipped=(library::tests memory::tests flow::striping flow::pace flow::plan flow::paths flow::recovery::tests::search)
miri() {
  cargo +nightly miri test -p "$1" --lib --no-fail-fast -- "${skipped[@]/#/--skip=}" "${@:2}"
}
if [[ $# -gt 0 ]]; then
  miri "$@"
else
  miri nccl-net-spark abi:: comm::datapath
  miri spark-verbs
  miri spark-proto backoff:: device:: flow:: wire::
fi
