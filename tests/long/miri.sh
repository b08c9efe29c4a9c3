#!/bin/bash
# The unit tests of the rooms with `unsafe`, and of those that decode and keep what a peer says, under Miri: it looks for undefined
# behaviour. Takes what it needs by `rustup toolchain install nightly -c miri -c rust-src`.
#
#   miri.sh [TEST]...     default: all that Miri can run
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# The tests ask the system for numbers and the time, cast marks to pointers that are never followed, and leak what is leaked on purpose
# (tests/long/lsan.supp; AddressSanitizer looks for other leaks).
export MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-permissive-provenance -Zmiri-ignore-leaks ${MIRIFLAGS:-}" PROPTEST_CASES=${PROPTEST_CASES:-8}
cargo +nightly miri --version >/dev/null 2>&1 ||
  { echo "miri: missing: rustup toolchain install nightly --profile minimal -c miri -c rust-src" >&2; exit 125; }

# Miri opens no libraries, knows no madvise of memory that is kept from a fork, and streams in virtual time and the search through
# every order of events take it hours.
readonly skipped=(verbs::library verbs::memory flow::striping flow::pace flow::plan flow::paths flow::recovery::tests::search)
[[ $# -gt 0 ]] || set -- abi:: comm::datapath flow:: verbs:: wire::
cargo +nightly miri test -p nccl-net-spark --lib --no-fail-fast -- "${skipped[@]/#/--skip=}" "$@"
