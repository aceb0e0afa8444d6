#!/usr/bin/env bash
# Runs cargo for AArch64: run.sh CARGO-ARGUMENTS..., as in `run.sh test -p quant-kernels-cpu`
#
# Programs run under qemu as the processor that QUANT_QEMU_CPU names: `max` (default) has dotprod and i8mm, `cortex-a76`
# only dotprod, `cortex-a53` neither. QUANT_RUSTFLAGS adds flags of the compiler. Exits with 3 if setup.sh does.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$(dirname "$here")")
"$here/setup.sh" "$root/target/aarch64"
made=$root/target/aarch64/bin

cd "$root"
export RUSTC=$made/rustc CARGO_BUILD_TARGET=aarch64-unknown-linux-gnu CARGO_TARGET_DIR=$root/target/aarch64-build
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=$made/ld CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=$made/run
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS="-C linker-flavor=ld.lld ${QUANT_RUSTFLAGS:-}"
exec cargo "$@"
