#!/bin/bash
# Runs unit tests under Miri, which looks for undefined behaviour: those of the rooms with `unsafe`,
# and of the rooms that decode and keep a peer's messages. Needs `rustup toolchain install nightly
# -c miri -c rust-src`.
#
#   miri.sh [TEST]...     default: every test that Miri can run
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
readonly skipped=(verbs::library verbs::memory flow::striping flow::pace flow::plan flow::paths flow::recovery::tests::search)
[[ $# -gt 0 ]] || set -- abi:: comm::datapath flow:: verbs:: wire::
cargo +nightly miri test -p nccl-net-spark -p spark-proto --lib --no-fail-fast -- "${skipped[@]/#/--skip=}" "$@"
