#!/usr/bin/env bash
# Creates the virtual environment for a comparison with peers: setup_venv.sh [DIR [PEERS]]
#
# PEERS is awq (default) for llm-compressor; modelopt for llm-compressor and NVIDIA's Model Optimizer; or kernels for
# ONNX Runtime, OpenVINO and PyTorch. DIR defaults to target/peers-venv under the repository root; PYTHON names the
# interpreter (default python3). A finished environment contains a stamp, the hash of its requirements and the scripts.
# If the stamp matches, the script returns at once; otherwise it rebuilds everything. torch is installed without its GPU
# libraries if it works without them; see tests/interop/reduced_torch.sh.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$(dirname "$here")")
directory=${1:-$root/target/peers-venv}
peers=${2:-awq}
case $peers in
awq) requirements=$here/requirements.txt ;;
modelopt) requirements=$here/modelopt_requirements.txt ;;
kernels) requirements=$here/kernels_requirements.txt ;;
*) echo "unknown peers: $peers" >&2 && exit 2 ;;
esac
python=$directory/bin/python
stamp_file=$directory/peers-stamp
shared=$root/tests/interop/reduced_torch.sh
source "$shared"

stamp=$(cat "$requirements" "$here/requirements.txt" "$here/setup_venv.sh" "$shared" | "${PYTHON:-python3}" -c \
    'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')

is_ready() {
    [[ -f $stamp_file && $(<"$stamp_file") == "$stamp" ]] && "$python" -c '' 2>/dev/null
}

create() {
    rm -rf "$directory"
    "${PYTHON:-python3}" -m venv "$directory"
    "$python" -m pip install --quiet --disable-pip-version-check --no-compile \
        "$@" --requirement "$requirements"
}

works() {
    "works_$peers"
}

works_kernels() {
    "$python" - <<'PYTHON'
import gguf, numpy, onnx, onnxruntime, openvino, torch

assert "onednn" in torch.backends.quantized.supported_engines
assert openvino.Core().available_devices == ["CPU"]
PYTHON
}

works_modelopt() {
    HF_HUB_OFFLINE=1 "$python" - <<'PYTHON'
import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint

# Check only that quantization is enabled, since quantized layers run on a GPU only.
layers = torch.nn.Sequential(torch.nn.Linear(64, 64))
mtq.quantize(layers, mtq.W4A16_NVFP4_CFG, lambda m: m(torch.ones(1, 64)))
assert layers[0].weight_quantizer.is_enabled
PYTHON
}

works_awq() {
    HF_HUB_OFFLINE=1 "$python" - <<'PYTHON'
import numpy, torch
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from transformers import LlamaForCausalLM

matrix = torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64) / 4096
expected = numpy.matmul(matrix.numpy(), matrix.numpy())
assert numpy.allclose((matrix @ matrix).numpy(), expected, rtol=1e-5)
PYTHON
}

mkdir -p "$(dirname "$directory")"
if command -v flock >/dev/null; then
    exec 9>"$directory.lock"
    flock 9
fi

if is_ready; then
    echo "peers environment ready: $directory"
    exit 0
fi

SECONDS=0
create --no-deps
add_stand_ins "$python"
if works; then
    kind=reduced
else
    echo "the reduced install does not work here; installing torch with all its dependencies" >&2
    create
    works
    kind=full
fi
echo "$stamp" >"$stamp_file"
echo "peers environment ($kind) created in ${SECONDS} s: $directory"
