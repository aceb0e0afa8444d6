#!/usr/bin/env bash
# The interop check: independent implementations load quant's output. See README.md.
#
# Creates the environment and builds the programs it needs. Real models are taken from
# ../shared/data if that exists; otherwise the parts that need them are SKIPPED.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

venv=${QUANT_INTEROP_VENV:-target/interop-venv}
bash tests/interop/setup_venv.sh "$venv"
llama_cpp=${QUANT_INTEROP_LLAMA_CPP:-target/interop-llama-cpp}
status=0
bash tests/interop/setup_llama_cpp.sh "$llama_cpp" || status=$?
# 3: the environment cannot be created on this machine.
((status == 0 || status == 3)) || exit "$status"
status=0
bash tests/interop/setup_chromium.sh >target/interop-chromium || status=$?
if ((status == 3)); then cat target/interop-chromium; elif ((status)); then exit "$status"; fi
chromium=$(tail -n 1 target/interop-chromium)
# The whole workspace is named, so that the dependencies built for its tests are reused.
cargo test --quiet --locked --workspace --no-run --test starts --test suite
# Without this setting, glibc maps and unmaps torch's large tensors repeatedly.
export MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=8589934592
programs=${CARGO_TARGET_DIR:-target}/debug
if [[ "$*" != "--only fewbits" ]]; then
    "$venv/bin/python" tests/interop/check.py --programs "$programs" --data ../shared/data \
        --llama-cpp "$llama_cpp" --chromium "$chromium" "$@"
fi

# The Python package, unpacked by `cargo xtask python`. It is checked if this script gets no arguments, or
# `--only fewbits`.
package=${CARGO_TARGET_DIR:-target}/python/package
if (($# == 0)) || [[ "$*" == "--only fewbits" ]]; then
    if [[ -d $package/fewbits ]]; then
        FEWBITS_PACKAGE=$PWD/$package "$venv/bin/python" tests/interop/check_fewbits.py 2>&1 | grep -v "it/s\]"
    else
        echo "SKIPPED: no Python package, which cargo xtask python builds (tests/interop/run.sh)"
    fi
fi
