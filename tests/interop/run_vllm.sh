#!/usr/bin/env bash
# The check against vLLM on a CPU; see check_vllm.py. Creates the environments and builds the programs it needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

venv=${QUANT_INTEROP_VENV:-target/interop-venv}
bash tests/interop/setup_venv.sh "$venv"
vllm=${QUANT_INTEROP_VLLM:-target/interop-vllm}
status=0
bash tests/interop/setup_vllm.sh "$vllm" || status=$?
# 3: the environment cannot be created on this machine.
((status == 3)) && exit 0
((status == 0)) || exit "$status"
cargo test --quiet --locked --workspace --no-run --test starts --test suite
"$venv/bin/python" tests/interop/check_vllm.py --programs "${CARGO_TARGET_DIR:-target}/debug" --vllm "$vllm" \
    --data ../shared/data "$@"
