#!/usr/bin/env bash
# The CPU kernels' tests on AArch64, for every instruction set that they have a path for.
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

while read -r processor paths; do
    echo "$processor: $paths"
    # What a processor lacks is not tested on it, so the paths that it must have are told.
    QUANT_QEMU_CPU=$processor QUANT_EXPECTED_ISAS=$paths \
        "$here/run.sh" test --locked --package quant-kernels-cpu --features rayon --lib --tests "$@"
done <<'END'
cortex-a53 scalar,neon
cortex-a76 scalar,neon,neondot
max scalar,neon,neondot,neoni8mm
END
