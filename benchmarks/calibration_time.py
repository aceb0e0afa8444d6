"""Where the time of calibration goes: samples of `quant quantize`, taken by `perf` and divided by kind of work.

    python benchmarks/calibration_time.py QUANT XTASK TEXT OUT

QUANT is a program of this workspace with symbols (`cargo build --release`, or a development build, whose dependencies
are optimized too), XTASK is that of the same workspace; TEXT is a calibration text. A synthetic Llama with layers in
the shape of a 1B model is written to OUT and quantized by AWQ and by GPTQ on 32 windows of 512 tokens, once each, with
all threads. Needs `perf`, and permission to sample this user's processes. Writes a record under
`record/calibration-time/`.
"""

import collections
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import records

LAYERS = 2
SAMPLING = ["--samples", "32", "--seq-len", "512"]
# The first kind whose pattern is found in the symbol of a sample.
KINDS = [
    ("kernel: clearing and mapping memory", r"clear_page|folio|_fault|zap_|mmap|madvise|\bunmap"),
    ("kernel: other", r"\[k\]"),
    ("matrix products in f32 and f64", r"gemm|matmul|ukr|microkernel|\[unknown asm\]|^f(32|64)_|_simd\d+x?\w*"),
    ("dot products in bf16", r"bf16|avx512::tile"),
    ("rounding weights and candidates", r"quantize|rounding|scaled|grid|codes|round"),
    ("attention and its mask", r"attention|softmax|rope|exp"),
    ("copying and element-wise operations of candle", r"candle|memcpy|memmove|memset|StoredValues|widen|narrow"),
    ("Hessians, factors and the solve", r"hessian|cholesky|factor|solve|lblt|triang"),
    ("hashing", r"sha|blake"),
]
OTHER = "other"


def kind(symbol: str) -> str:
    for name, pattern in KINDS:
        if re.search(pattern, symbol):
            return name
    return OTHER


def shares(data: Path) -> tuple[collections.Counter, int, collections.Counter]:
    """Samples by kind, all samples, and samples by symbol."""
    command = ["perf", "report", "--stdio", "--no-children", "-g", "none", "-n", "--sort", "symbol", "-i", data]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    kinds, symbols = collections.Counter(), collections.Counter()
    for line in printed.splitlines():
        if found := re.match(r"\s*[\d.]+%\s+(\d+)\s+(\[.\] .*?)\s*$", line):
            kinds[kind(found[2])] += int(found[1])
            symbols[found[2]] += int(found[1])
    return kinds, sum(kinds.values()), symbols


def main() -> None:
    quant, xtask, text, out = records.paths(__doc__, "quant", "xtask", "text", "out")
    out.mkdir(parents=True, exist_ok=True)
    model = out / "model"
    if not model.exists():
        subprocess.run([xtask, "synth", model, "--layers", str(LAYERS), "--vocab", "4096"], check=True)
    rows, lines = [], []
    for method in ["awq", "gptq"]:
        data, result = out / f"{method}.perf", out / "result"
        shutil.rmtree(result, ignore_errors=True)
        run = [quant, "quantize", model, "-o", result, "--method", method, *SAMPLING, "--calibration", text, "-q"]
        started = time.monotonic()
        subprocess.run(["perf", "record", "-q", "-F", "199", "-o", data, "--", *run], check=True)
        seconds = time.monotonic() - started
        kinds, count, symbols = shares(data)
        lines += [f"### {method}", "", f"{seconds:.1f} s, {count} samples.", "", "| work | share |", "| --- | --- |"]
        for name, samples in kinds.most_common():
            lines.append(f"| {name} | {100 * samples / count:.1f} % |")
            rows.append([method, f"{seconds:.2f}", name, samples, count])
        lines += ["", "The symbols with the most samples:", ""]
        lines += [f"- {100 * n / count:.1f} %: `{symbol[:110]}`" for symbol, n in symbols.most_common(8)]
        lines.append("")
    head = records.header(
        "Where the time of calibration goes",
        "python benchmarks/calibration_time.py QUANT XTASK books_calib.txt OUT",
    )
    note = (
        f"Synthetic Llama, {LAYERS} layers in the shape of a 1B model, vocabulary of 4,096, random weights, 32 windows of "
        "512 tokens, one run each, all threads. Candidates for the scales of AWQ differ little on random weights, so "
        "more of them stay in the race than on a trained model. Samples of user and kernel code, 199 per second and "
        "thread, by the name of the function."
    )
    columns = ["method", "seconds", "work", "samples", "of"]
    records.write("calibration-time", [*head, "", note, "", *lines], columns, rows)


if __name__ == "__main__":
    sys.exit(main())
