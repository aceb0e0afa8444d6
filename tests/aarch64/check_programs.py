"""Compares the program and the Python package for AArch64, run by an emulator, with this machine's program: the bytes of
a checkpoint, and perplexities. programs.sh builds them.

Rounding to nearest has no sums, so it gives the same bytes on every processor. Perplexities differ by rounding only.
"""

import argparse
import hashlib
import json
import os
import subprocess
import tempfile
from pathlib import Path

# Relative difference of perplexities. The order of additions, and so the rounding, depends on the processor.
FLOATS = 1e-5
# The kernels of both processors also round activations to bf16 in different ways.
KERNELS = 2e-3
EVALUATION = ["--text", "builtin-heldout", "--window", "64", "--windows", "2", "--quiet", "--json"]

# Runs in the emulated interpreter: a plan, a checkpoint, its perplexity, and an error.
IN_PYTHON = """
import json, sys, warnings
import fewbits
warnings.simplefilter("ignore")
model, out = sys.argv[1:]
plan = fewbits.plan(model, method="rtn")
done = fewbits.quantize(model, out, method="rtn")
result = fewbits.evaluate(out, text="builtin-heldout", window=64, windows=2)
try:
    fewbits.quantize(model, out + "-error", group_size=100)
    error = "no error"
except fewbits.UsageError as raised:
    error = raised.message
[text] = fewbits.Model(out).generate(["Once upon a time"], max_new_tokens=8)
print(json.dumps({"peak": plan.peak_memory_bytes, "after": done.bytes_after, "perplexity": result.perplexity,
                  "error": error, "text": text.text}))
"""


def weights(directory: Path) -> dict[str, str]:
    """Returns the digest of every file with weights."""
    files = sorted(directory.glob("*.safetensors"))
    assert files, f"no weights in {directory}"
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def agree(what: str, there: float, here: float, bound: float) -> None:
    assert abs(there / here - 1) <= bound, f"{what}: {there} on AArch64, {here} here"
    print(f"{what}: {there:.6f} on AArch64, {here:.6f} here")


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("here", "there", "emulator", "python", "package"):
        parser.add_argument(f"--{name}", required=True)
    arguments = parser.parse_args()
    here, there = [arguments.here], [arguments.emulator, arguments.there]

    def run(command: list[str], *words: object, **settings: object) -> str:
        line = [*command, *map(str, words)]
        done = subprocess.run(line, capture_output=True, text=True, **settings)
        assert done.returncode == 0, f"{line} exited with {done.returncode}\n{done.stderr}"
        return done.stdout

    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        run(here, "demo", "--save-model", model)
        outs = {}
        for name, command in (("here", here), ("there", there)):
            outs[name] = Path(scratch) / name
            run(command, "quantize", model, "-o", outs[name], "--method", "rtn", "--quiet")
        assert weights(outs["there"]) == weights(outs["here"]), "rounding to nearest gives other bytes"
        print("program: the same weights as here")
        for execution, bound in (("fake", FLOATS), ("kernels", KERNELS)):
            words = ["eval", outs["here"], *EVALUATION, "--execution", execution]
            perplexities = [json.loads(run(command, *words))["perplexity"] for command in (there, here)]
            agree(f"perplexity, {execution}", *perplexities, bound)
        refused = subprocess.run([*there, "quantize", str(model), "-o", f"{scratch}/no", "--group-size", "100"],
                                 capture_output=True, text=True)
        assert refused.returncode == 2 and "group" in refused.stderr, refused

        python = [arguments.emulator, arguments.python, "-B", "-c", IN_PYTHON]
        environment = {**os.environ, "PYTHONPATH": arguments.package}
        printed = run(python, model, Path(scratch) / "python", env=environment)
        result = json.loads(printed.splitlines()[-1])
        assert weights(Path(scratch) / "python") == weights(outs["here"])
        print("package: the same weights as here")
        native = json.loads(run(here, "eval", outs["here"], *EVALUATION))["perplexity"]
        agree("perplexity, package", result["perplexity"], native, FLOATS)
        assert "group" in result["error"] and result["text"] and result["after"] > 0 and result["peak"] > 0, result
        usage = subprocess.run([arguments.emulator, arguments.python, "-B", "-m", "fewbits", "--version"],
                               capture_output=True, text=True, env=environment)
        assert usage.returncode == 0 and usage.stdout.startswith("quant "), usage


if __name__ == "__main__":
    main()
