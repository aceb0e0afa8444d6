#!/usr/bin/env bash
# The CPU kernels on AArch64: clippy, and their tests for every instruction set that they have a path for.
#
# Where there is no compiler or emulator (setup.sh), a line that starts with SKIPPED is all.
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
# As cargo-clippy does it, which would look for its driver among rustup's.
RUSTC_WORKSPACE_WRAPPER=$(dirname "$(dirname "$here")")/target/aarch64/bin/clippy-driver \
    CLIPPY_ARGS=-Dwarnings__CLIPPY_HACKERY__ "$here/run.sh" check "${package[@]}" --lib

# The last processor has all paths, and runs all tests; the others show that what they lack is not taken.
while read -r processor paths tests; do
    echo "$processor: $paths"
    # What a processor lacks is not tested on it, so the paths that it must have are told.
    # shellcheck disable=SC2086
    QUANT_QEMU_CPU=$processor QUANT_EXPECTED_ISAS=$paths \
        "$here/run.sh" test "${package[@]}" $tests "$@"
done <<'END'
cortex-a53 scalar,neon --lib
cortex-a76 scalar,neon,neondot --lib
max scalar,neon,neondot,neoni8mm --lib --tests
END
