#!/usr/bin/env bash
# Creates the virtual environment of the interop check: setup_venv.sh [DIR]
#
# DIR defaults to target/interop-venv under the repository root; PYTHON names the interpreter (default python3). If
# requirements.txt and the scripts have not changed, a finished environment is kept; otherwise everything is rebuilt.
#
# torch comes without its GPU libraries (see reduced_torch.sh). If the result cannot import and compute, the full set is
# installed instead.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
directory=${1:-$(dirname "$(dirname "$here")")/target/interop-venv}
requirements=$here/requirements.txt
python=$directory/bin/python
stamp_file=$directory/interop-stamp
source "$here/reduced_torch.sh"

stamp=$(cat "$requirements" "$here/setup_venv.sh" "$here/reduced_torch.sh" | "${PYTHON:-python3}" -c \
    'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')

is_ready() {
    [[ -f $stamp_file && $(<"$stamp_file") == "$stamp" ]] && "$python" -c '' 2>/dev/null
}

install() {
    "$python" -m pip install --quiet --disable-pip-version-check --no-compile \
        "$@" --requirement "$requirements"
    # Of gptqmodel, only the source is published. Its build inspects the installed torch, so it comes last and without
    # build isolation.
    "$python" -m pip install --quiet --disable-pip-version-check --no-compile \
        --no-deps --no-build-isolation gptqmodel==7.7.0
}

works() {
    "$python" - <<'PYTHON'
import accelerate, check_jsonschema, compressed_tensors.quantization, dill, gptqmodel, lm_eval, numpy
import optimum.gptq
import playwright.sync_api, sentencepiece, tokenizers, torch, transformers

matrix = torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64) / 4096
expected = numpy.matmul(matrix.numpy(), matrix.numpy())
assert numpy.allclose((matrix @ matrix).numpy(), expected, rtol=1e-5)
from transformers import LlamaForCausalLM
PYTHON
}

create() {
    rm -rf "$directory"
    "${PYTHON:-python3}" -m venv "$directory"
}

mkdir -p "$(dirname "$directory")"
if command -v flock >/dev/null; then
    exec 9>"$directory.lock"
    flock 9
fi

if is_ready; then
    echo "interop environment ready: $directory"
    exit 0
fi

SECONDS=0
create
install --no-deps
add_stand_ins "$python"
if works; then
    kind=reduced
else
    echo "the reduced install does not work here; installing torch with all its dependencies" >&2
    create
    install
    works
    kind=full
fi
echo "$stamp" >"$stamp_file"
echo "interop environment ($kind) made in ${SECONDS} s: $directory"
