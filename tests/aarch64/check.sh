#!/usr/bin/env bash
# Checks the CPU kernels on AArch64: runs clippy, and the kernels' tests for every instruction set that has a path.
#
# Without a compiler or emulator (setup.sh), this only prints a line that starts with SKIPPED.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
status=0
"$here/setup.sh" || status=$?
if ((status == 3)); then
    exit 0
elif ((status != 0)); then
    exit "$status"
fi

package=(--locked --package quant-kernels-cpu --features rayon)
# These variables replace cargo-clippy, which would look for its driver among rustup's toolchains.
RUSTC_WORKSPACE_WRAPPER=$(dirname "$(dirname "$here")")/target/aarch64/bin/clippy-driver \
    CLIPPY_ARGS=-Dwarnings__CLIPPY_HACKERY__ "$here/run.sh" check "${package[@]}" --lib

# The last processor has all paths and runs all tests.
while read -r processor paths tests; do
    echo "$processor: $paths"
    # Tests skip the paths that a processor lacks, so the paths that it must have are passed explicitly.
    # shellcheck disable=SC2086
    QUANT_QEMU_CPU=$processor QUANT_EXPECTED_ISAS=$paths \
        "$here/run.sh" test "${package[@]}" $tests "$@"
done <<'END'
cortex-a53 scalar,neon --lib
cortex-a76 scalar,neon,neondot --lib
max scalar,neon,neondot,neoni8mm --lib --tests
END
