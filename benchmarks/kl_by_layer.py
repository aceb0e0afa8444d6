"""Which linears the KL divergence comes from: only one block, or only one linear of every block, is quantized.

    python benchmarks/kl_by_layer.py QUANT DATA OUT

QUANT is the program. DATA has `models/books-7m`, a checkpoint, and `text/books_valid.txt`. Writes the record to
benchmarks/record/kl-by-layer. `cargo xtask charts` draws it.
"""

import json
import math
import shutil
import statistics
import subprocess
from pathlib import Path

import records

MODEL, TEXT = "books-7m", "books_valid.txt"
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SCHEME = "w4a16-g128"
WINDOW, WINDOWS = 512, 128


def score(quant: Path, model: Path, text: Path, ignored: list[str], out: Path) -> list[float]:
    """Rounds the linears that are not ignored to the nearest codes, and returns the mean KL divergence per window."""
    shutil.rmtree(out, ignore_errors=True)
    options = [word for pattern in ignored for word in ("--ignore", pattern)]
    quantize = [quant, "quantize", model, "-o", out, "-q", "--method", "rtn", "--scheme", SCHEME, *options]
    subprocess.run(quantize, check=True, stdout=subprocess.DEVNULL)
    command = [quant, "eval", out, "--reference", model, "--text", text, "--json", "-q"]
    windows = ["--window", str(WINDOW), "--windows", str(WINDOWS)]
    result = json.loads(subprocess.run([*command, *windows], check=True, capture_output=True, text=True).stdout)
    return result["comparison"]["window_kl"]


def main() -> None:
    quant, data, out = records.paths(__doc__, "QUANT", "DATA", "OUT")
    out.mkdir(parents=True, exist_ok=True)
    model, text = data / "models" / MODEL, data / "text" / TEXT
    blocks = range(json.loads((model / "config.json").read_text())["num_hidden_layers"])
    variants = [("all", "all", [])]
    variants += [("block", str(i), [f"*.layers.{j}.*" for j in blocks if j != i]) for i in blocks]
    variants += [("linear", name, [other for other in LINEARS if other != name]) for name in LINEARS]
    rows = []
    for kind, name, ignored in variants:
        found = score(quant, model, text, ignored, out / "quantized")
        error = statistics.stdev(found) / math.sqrt(len(found))
        rows.append([MODEL, SCHEME, kind, name, len(found), statistics.fmean(found), error])
        print(rows[-1], flush=True)
    shutil.rmtree(out / "quantized", ignore_errors=True)
    total = rows[0][5]
    lines = records.header("KL divergence by layer", "python benchmarks/kl_by_layer.py QUANT DATA OUT")
    lines += [
        "",
        f"{MODEL} in {SCHEME}, rounded to nearest. In each row, only the named block or linear is quantized. Mean KL",
        f"divergence from the float model in nats per token, over {len(found)} windows of {WINDOW} tokens of {TEXT}, with",
        "the standard error over windows, which says nothing about other models. Every variant was scored once on these",
        "rows.",
        "",
        "| quantized | KL | of all |",
        "|---|---|---|",
    ]
    for _, _, kind, name, _, kl, error in rows:
        what = {"all": "everything", "block": f"block {name}", "linear": f"`{name}` of every block"}[kind]
        lines.append(f"| {what} | {kl:.6f} ± {error:.6f} | {kl / total:.0%} |")
    records.write("kl-by-layer", lines, ["model", "scheme", "kind", "name", "windows", "kl", "kl_error"], rows)


if __name__ == "__main__":
    main()
