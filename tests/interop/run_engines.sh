#!/usr/bin/env bash
# The check against ONNX Runtime GenAI and mlx-lm on a CPU; see check_engines.py. Creates the environments and builds the
# program it needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

venv=${QUANT_INTEROP_VENV:-target/interop-venv}
bash tests/interop/setup_venv.sh "$venv"
engines=${QUANT_INTEROP_ENGINES:-target/interop-engines}
stamp=$(sha256sum tests/interop/run_engines.sh tests/interop/requirements.txt | sha256sum | cut -d' ' -f1)
if [[ ! -f $engines/interop-stamp || $(<"$engines/interop-stamp") != "$stamp" ]]; then
    python3 -m venv --clear "$engines"
    "$engines/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
        onnxruntime-genai==0.18.0 onnxruntime==1.32.0 onnx==1.23.2 onnx-ir==1.1.0 ml_dtypes==0.6.0 \
        flatbuffers==25.12.19 protobuf==7.36.2 coloredlogs==15.0.1 humanfriendly==10.0 \
        mlx==0.32.4 mlx-cpu==0.32.4 mlx-lm==0.32.2
    # torch, transformers and numpy are those of the interop check.
    "$engines/bin/python" - "$PWD/$venv" <<'PYTHON'
import pathlib, sys, sysconfig
[packages] = pathlib.Path(sys.argv[1]).glob("lib/python*/site-packages")
path = pathlib.Path(sysconfig.get_path("purelib")) / "interop.pth"
path.write_text(f"import site; site.addsitedir({str(packages)!r})\n")
PYTHON
    echo "$stamp" >"$engines/interop-stamp"
fi
cargo build --quiet --locked --workspace --bin quant
"$engines/bin/python" tests/interop/check_engines.py --quant "${CARGO_TARGET_DIR:-target}/debug/quant" "$@"
