#!/usr/bin/env bash
# Runs a job with the real program on an S3 store, with two workers, one of which is killed. See check.py.
#
# The store is moto's server, a process of this machine. The program must have been built with the feature `store`:
# `cargo build -p quant-cli --features store`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

venv=${QUANT_STORE_VENV:-target/store-venv}
if [[ ! -x $venv/bin/moto_server ]]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet "moto[s3,server]==5.2.5"
fi
quant=${1:-${CARGO_TARGET_DIR:-target}/debug/quant}
exec "$venv/bin/python" tests/store/check.py "$quant"
