#!/usr/bin/env bash
# Runs a job with the real program on a Ray cluster of three nodes, one of which is killed. See check.py.
#
# The nodes are processes of this machine. The program must have been built: `cargo build -p quant-cli`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

venv=${QUANT_RAY_VENV:-target/ray-venv}
if [[ ! -x $venv/bin/ray ]]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet "ray==2.60.0"
fi
quant=${1:-${CARGO_TARGET_DIR:-target}/debug/quant}
RAY_USAGE_STATS_ENABLED=0 "$venv/bin/python" tests/ray/check.py "$quant"
