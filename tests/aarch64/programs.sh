#!/usr/bin/env bash
# Builds the program as a static binary and the Python package as a wheel for AArch64, and runs both under qemu.
#
# Both quantize and evaluate the demo model; check_programs.py compares the results with those of this machine's
# program. setup.sh has the compiler for Rust. C code is compiled, and the wheel is linked, by zig from the package
# index, which can link against an old glibc, so that the wheel also runs on older systems.
#
# Without a compiler or emulator (setup.sh), this only prints a line that starts with SKIPPED.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$(dirname "$here")")
made=$root/target/aarch64/bin
tools=$root/target/aarch64-tools
built=$root/target/aarch64-build/aarch64-unknown-linux-gnu/release
status=0
"$here/setup.sh" || status=$?
if ((status == 3)); then
    exit 0
elif ((status != 0)); then
    exit "$status"
fi

if [[ ! -x $tools/bin/maturin ]]; then
    python3 -m venv --clear "$tools"
    "$tools/bin/pip" install --quiet ziglang==0.17.0 maturin==1.16.0
fi
# zig rejects the names that Rust gives to targets, and by default adds checks to C code that need its own runtime.
for program in cc c++; do
    cat >"$tools/bin/aarch64-$program" <<END
#!/bin/sh
for word; do
    shift
    case \$word in
    --target=*) ;;
    *) set -- "\$@" "\$word" ;;
    esac
done
exec "$tools/bin/python" -m ziglang $program -target aarch64-linux-gnu.2.17 -fno-sanitize=all "\$@"
END
done
printf '#!/bin/sh\nexec "%s" -m ziglang ar "$@"\n' "$tools/bin/python" >"$tools/bin/aarch64-ar"
chmod +x "$tools"/bin/aarch64-*
export CC_aarch64_unknown_linux_gnu=$tools/bin/aarch64-cc CXX_aarch64_unknown_linux_gnu=$tools/bin/aarch64-c++
export AR_aarch64_unknown_linux_gnu=$tools/bin/aarch64-ar

flags="-C target-feature=+crt-static --cfg getrandom_backend=\"linux_getrandom\""
QUANT_RUSTFLAGS=$flags "$here/run.sh" build --release --locked -p quant-cli

wheels=$root/target/aarch64-build/wheels
rm -rf "$wheels"
(
    export RUSTC=$made/rustc CARGO_TARGET_DIR=$root/target/aarch64-build/wheel
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=$tools/bin/aarch64-cc
    "$tools/bin/maturin" build --release --locked --target aarch64-unknown-linux-gnu --compatibility manylinux2014 \
        --manifest-path "$root/python/Cargo.toml" --out "$wheels"
)
package=$root/target/aarch64-build/package
rm -rf "$package"
"$tools/bin/pip" install --quiet --no-deps --no-index --target "$package" --platform manylinux2014_aarch64 \
    --python-version 3.13 --only-binary :all: "$wheels"/*.whl
ls -l "$built/quant" "$wheels"/*.whl

cargo build --quiet --locked --workspace --bin quant
"$tools/bin/python" "$here/check_programs.py" --here "${CARGO_TARGET_DIR:-$root/target}/debug/quant" \
    --there "$built/quant" --emulator "$made/run" --python "$root/target/aarch64/sysroot/usr/bin/python3.13" \
    --package "$package"
