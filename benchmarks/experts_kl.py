"""KL divergence of quantized models with experts, for each choice of the tokens on which experts are calibrated.

    python benchmarks/experts_kl.py QUANT TEXT MODEL... [--scheme S]... [--out DIR]

QUANT is the program. Each MODEL was trained by `train_experts.py` on the same text, with a seed of its own. TEXT is a
text of the same kind, such as `tinystories_valid.txt`. Every variant is scored against the float model on the same
windows. Writes the record to benchmarks/record/experts-kl.
"""

import argparse
import json
import math
import shutil
import statistics
import subprocess
from pathlib import Path

import records

LENGTH, WINDOWS = 256, 60
ALL, FLOOR = ["--expert-tokens", "all"], ["--expert-floor", "512"]
METHODS = {"AWQ": ["--method", "awq"], "GPTQ": ["--method", "gptq"]}
TOKENS = {"routed": [], "all": ALL, "floor 512": FLOOR}
SAMPLES = [8, 64]


def variants() -> dict:
    """The options of each variant, by method, calibration windows, and tokens of experts."""
    found = {("RTN", 0, "none"): ["--method", "rtn"]}
    for samples in SAMPLES:
        for method, options in METHODS.items():
            for tokens, more in TOKENS.items():
                # With many windows, every expert has more tokens than the floor.
                if tokens != "floor 512" or samples == SAMPLES[0]:
                    found[method, samples, tokens] = [*options, *more, "--samples", str(samples)]
    return found


def quantize(quant: Path, model: Path, options: list[str], out: Path) -> dict:
    """Quantizes a model, on its calibration text if `options` give a number of windows. Returns the report."""
    shutil.rmtree(out, ignore_errors=True)
    if "--samples" in options:
        calibration = ["--calibration", model / "calibration.jsonl", "--packing", "stream"]
        options = [*options, "--seq-len", str(LENGTH), *calibration]
    subprocess.run([quant, "quantize", model, "-o", out, "-q", *options], check=True, stdout=subprocess.DEVNULL)
    return json.loads((out / "quant_report.json").read_text())


def window_kl(quant: Path, model: Path, text: Path, checkpoint: Path) -> list[float]:
    """The mean KL divergence of each window from the float model."""
    command = [quant, "eval", checkpoint, "--reference", model, "--text", text, "--json", "-q"]
    command += ["--window", str(LENGTH), "--windows", str(WINDOWS)]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result["comparison"]["window_kl"]


def score(quant: Path, model: Path, text: Path, options: list[str], out: Path) -> tuple[list[float], list[int]]:
    """Quantizes a model. Returns the mean KL divergence of each window, and the numbers of routed tokens of experts."""
    report = quantize(quant, model, options, out)
    experts = [tensor for tensor in report["tensors"] if ".experts." in tensor["tensor"]]
    routed = [tensor.get("routed_tokens") or tensor.get("calibration_tokens") or 0 for tensor in experts]
    return window_kl(quant, model, text, out), routed


def mean_and_error(values: list[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def over_seeds(found: list[list[float]]) -> list[float]:
    """The mean over models for each window. The models share the windows, so these are the independent values."""
    return [statistics.fmean(values) for values in zip(*found)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quant", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--scheme", action="append")
    parser.add_argument("--out", type=Path, default=Path("target/experts-kl"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    schemes = args.scheme or ["w4a16-g32", "w3a16-g32"]
    recipes = [json.loads((model / "recipe.json").read_text()) for model in args.models]
    rows, tables = [], []
    for scheme in schemes:
        of = {variant: [] for variant in variants()}
        fewest = {}
        for model in args.models:
            for variant, options in variants().items():
                found, routed = score(args.quant, model, args.text, [*options, "--scheme", scheme], args.out / "quantized")
                of[variant].append(found)
                fewest[variant] = min(routed + [fewest.get(variant, max(routed))])
                rows += [[model.name, scheme, *variant, window, kl] for window, kl in enumerate(found)]
                print(model.name, scheme, *variant, f"{statistics.fmean(found):.5f}", flush=True)
        nearest = over_seeds(of["RTN", 0, "none"])
        for variant, found in of.items():
            method, samples, tokens = variant
            kl = over_seeds(found)
            each = ", ".join(f"{statistics.fmean(values):.5f}" for values in found)
            change, error = mean_and_error([a - b for a, b in zip(kl, nearest)])
            against = ""
            if tokens not in ("none", "routed"):
                routed = over_seeds(of[method, samples, "routed"])
                by, error_by = mean_and_error([a - b for a, b in zip(kl, routed)])
                against = f"{by:+.5f} ± {error_by:.5f} ({by / statistics.fmean(routed):+.1%})"
            of_nearest = "" if tokens == "none" else f"{change:+.5f} ± {error:.5f} ({change / statistics.fmean(nearest):+.1%})"
            tables.append(
                f"| {scheme} | {method} | {samples or ''} | {'' if tokens == 'none' else tokens} "
                f"| {fewest[variant] if samples else ''} | {each} | {statistics.fmean(kl):.5f} | {of_nearest} | {against} |")
    shutil.rmtree(args.out / "quantized", ignore_errors=True)
    lines = records.header("Tokens for the calibration of experts", "python benchmarks/experts_kl.py QUANT TEXT MODEL...")
    losses = ", ".join(f"{recipe['loss']:.2f}" for recipe in recipes)
    lines += [
        "",
        f"{len(recipes)} models with 16 experts, 4 per token, in 4 blocks ({recipes[0]['parameters']:,} parameters), trained",
        f"by `benchmarks/train_experts.py` with the seeds {', '.join(str(recipe['seed']) for recipe in recipes)} for "
        f"{recipes[0]['steps']} steps of {recipes[0]['batch']} × {recipes[0]['length']} tokens",
        f"(loss at the end {losses} nats per token) on `{recipes[0]['text']}`. They were calibrated on the part of that text",
        f"that they were not trained on, in windows of {LENGTH} tokens.",
        "",
        f"Mean KL divergence from the float model in nats per token, over {WINDOWS} windows of {LENGTH} tokens of",
        f"`{args.text.name}`, for each model and over all. Changes are paired by window, after the mean over models, with",
        "standard errors over windows. *Fewest* is the smallest number of tokens that were routed to an expert.",
        "",
        "| scheme | method | windows | tokens of experts | fewest | KL of each model | KL | change to RTN | change to routed |",
        "|---|---|---|---|---|---|---|---|---|",
        *tables,
    ]
    records.write("experts-kl", lines, ["model", "scheme", "method", "samples", "tokens", "window", "kl"], rows)


if __name__ == "__main__":
    main()
