"""The cost in KL divergence of quantizing spans of blocks independently with GPTQ (`--span-blocks`).

    python benchmarks/span_kl.py QUANT DATA OUT

QUANT is the program. DATA has checkpoints in `models/` (`books-7m`, `tinystories-656k`, `stories260k`) and their texts
in `text/`. Each model is quantized block by block (sequentially), in spans of 4, 2 and 1 blocks, with inputs from the
float model, and with RTN. All are scored against the float model on the same windows, and each is compared with the
sequential run window by window. Writes the record to benchmarks/record/span-kl.
"""

import json
import math
import shutil
import statistics
import subprocess
from pathlib import Path

import records

MODELS = {
    "books-7m": ("books_calib.txt", "books_valid.txt", []),
    "tinystories-656k": ("tinystories_calib.jsonl", "tinystories_valid.txt", []),
    # Its width of 172 is not a multiple of the group size.
    "stories260k": ("tinystories_calib.jsonl", "tinystories_valid.txt", ["--ignore", "down_proj"]),
}
GPTQ = ["--method", "gptq", "--samples", "128"]
VARIANTS = {
    "sequential": GPTQ,
    "spans of 4 blocks": [*GPTQ, "--span-blocks", "4"],
    "spans of 2 blocks": [*GPTQ, "--span-blocks", "2"],
    "spans of 1 block": [*GPTQ, "--span-blocks", "1"],
    "inputs from the float model": [*GPTQ, "--layer-inputs", "float"],
    "RTN": ["--method", "rtn"],
}
SCHEMES = ["w4a16-g32", "w3a16-g32"]
WINDOW, WINDOWS = 512, 40


def score(quant: Path, model: Path, texts: tuple[Path, Path], options: list[str], out: Path) -> list[float]:
    """Quantizes a model and returns the mean KL divergence of each window."""
    shutil.rmtree(out, ignore_errors=True)
    if "--samples" in options:
        options = [*options, "--seq-len", str(WINDOW), "--calibration", texts[0]]
    subprocess.run([quant, "quantize", model, "-o", out, "-q", *options], check=True, stdout=subprocess.DEVNULL)
    command = [quant, "eval", out, "--reference", model, "--text", texts[1], "--json", "-q"]
    windows = ["--window", str(WINDOW), "--windows", str(WINDOWS)]
    result = json.loads(subprocess.run([*command, *windows], check=True, capture_output=True, text=True).stdout)
    return result["comparison"]["window_kl"]


def mean_and_error(values: list[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def main() -> None:
    quant, data, out = records.paths(__doc__, "QUANT", "DATA", "OUT")
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, (*texts, more) in MODELS.items():
        model = data / "models" / name
        blocks = json.loads((model / "config.json").read_text())["num_hidden_layers"]
        texts = tuple(data / "text" / text for text in texts)
        for scheme in SCHEMES:
            sequential = []
            for variant, options in VARIANTS.items():
                found = score(quant, model, texts, [*options, *more, "--scheme", scheme], out / "quantized")
                sequential = sequential or found
                kl, error = mean_and_error(found)
                change, of_change = mean_and_error([a - b for a, b in zip(found, sequential)])
                rows.append([name, blocks, scheme, variant, len(found), kl, error, change, of_change])
                print(rows[-1], flush=True)
    shutil.rmtree(out / "quantized", ignore_errors=True)
    lines = records.header("Spans of blocks with GPTQ", "python benchmarks/span_kl.py QUANT DATA OUT")
    lines += [
        "",
        f"Mean KL divergence from the float model in nats per token, over {WINDOWS} windows of {WINDOW} tokens (or the",
        "number of positions of the model, if that is less). The change is the paired difference to the sequential run on",
        "the same windows, with its standard error over windows. Every variant was scored once on these rows.",
        "",
        "| model | blocks | scheme | variant | KL | change | in % |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, blocks, scheme, variant, _, kl, _, change, error in rows:
        base = kl - change
        lines.append(
            f"| {name} | {blocks} | {scheme} | {variant} | {kl:.5f} | {change:+.5f} ± {error:.5f} | {change / base:+.1%} |"
        )
    columns = ["model", "blocks", "scheme", "variant", "windows", "kl", "kl_error", "change", "change_error"]
    records.write("span-kl", lines, columns, rows)


if __name__ == "__main__":
    main()
