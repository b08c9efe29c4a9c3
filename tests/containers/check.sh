#!/bin/bash
# Validates every file of examples/containers.
#
#   tests/containers/check.sh
#
# Needs Python 3.11 or later with venv, shellcheck and systemd-analyze. The Python packages of
# requirements.txt are installed into a virtual environment below the target folder.
set -euo pipefail
shopt -s inherit_errexit

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
readonly tools=${CARGO_TARGET_DIR:-$PWD/target}/containers-tools

if ! cmp --silent tests/containers/requirements.txt "$tools/requirements.txt"; then
  rm -rf "$tools"
  python3 -m venv "$tools"
  "$tools/bin/python" -m pip install --quiet --disable-pip-version-check --requirement tests/containers/requirements.txt
  cp tests/containers/requirements.txt "$tools/"
fi
PATH=$tools/bin:$PATH
python tests/containers/check.py examples/containers
