"""KL divergence of AWQ and GPTQ in quant and llm-compressor, on models with experts and on the same tokens.

    python benchmarks/experts_peers.py QUANT TEXT MODEL... [--bits B]... [--samples N] [--out DIR] [--check]

QUANT is the program. Each MODEL was trained by `train_experts.py` on the same text, with a seed of its own. TEXT is a
text of the same kind, such as `tinystories_valid.txt`. llm-compressor must be installed by `peers/setup_venv.sh`. It
calibrates every expert on all tokens by default; it also runs on routed tokens only, as quant does by default. With
--check, a claim that does not hold is an error. Writes the record to benchmarks/record/experts-peers.
"""

import argparse
import json
import shutil
import statistics
import subprocess
from pathlib import Path

import records
from experts_kl import LENGTH, WINDOWS, mean_and_error, over_seeds, quantize, window_kl

GROUP = 32
PEER = records.ROOT / "benchmarks/peers/llm_compressor.py"
PYTHON = records.ROOT / "target/peers-venv/bin/python"
METHODS = {"AWQ": "awq", "GPTQ": "gptq"}
OURS, THEIRS, ROUTED = "quant", "llm-compressor", "llm-compressor, routed tokens"
TOKENS = {OURS: "routed", THEIRS: "all", ROUTED: "routed"}


class Comparison:
    """The programs, and what all their runs share."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.versions = args, {}
        self.checkpoint, self.result = args.out / "quantized", args.out / "result.json"

    def ours(self, model: Path, bits: int, method: str) -> tuple[list[float], str]:
        """The divergence of each window, and the digest of the calibration tokens."""
        options = ["--method", method, "--scheme", f"w{bits}a16-g{GROUP}"]
        if method != "rtn":
            options += ["--samples", str(self.args.samples)]
        report = quantize(self.args.quant, model, options, self.checkpoint)
        return self.scored(model), (report.get("calibration") or {}).get("tokens_sha256", "")

    def theirs(self, model: Path, bits: int, method: str, who: str, tokens: str) -> list[float]:
        """The divergence of each window for a checkpoint that llm-compressor calibrated on tokens with this digest."""
        shutil.rmtree(self.checkpoint, ignore_errors=True)
        command = [PYTHON, PEER, model, self.checkpoint, "--method", method, "--calibration", model / "calibration.jsonl"]
        command += ["--samples", str(self.args.samples), "--seq-len", str(LENGTH), "--tokens-sha256", tokens]
        command += ["--bits", str(bits), "--group-size", str(GROUP), "--threads", "1", "--result", self.result]
        if who == ROUTED:
            command += ["--set", "experts=routed"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"llm-compressor failed:\n{done.stderr[-4000:]}")
        self.versions = json.loads(self.result.read_text())["versions"]
        return self.scored(model)

    def scored(self, model: Path) -> list[float]:
        return window_kl(self.args.quant, model, self.args.text, self.checkpoint)


def difference(a: list[float], b: list[float]) -> tuple[float, float]:
    """The mean of the paired differences `a - b`, and its standard error over windows."""
    return mean_and_error([x - y for x, y in zip(a, b)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quant", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--bits", type=int, action="append")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("target/experts-peers"))
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    comparison = Comparison(args)
    recipes = [json.loads((model / "recipe.json").read_text()) for model in args.models]
    rows, tables, claims, broken = [], [], [], []

    def claim(text: str, holds: bool) -> None:
        line = f"- {text}: **{'holds' if holds else 'does not hold'}**"
        print(line, flush=True)
        claims.append(line)
        if not holds:
            broken.append(line)

    for bits in args.bits or [4, 3]:
        found: dict[tuple[str, str], list[list[float]]] = {}

        def add(model: Path, method: str, who: str, kl: list[float]) -> None:
            found.setdefault((method, who), []).append(kl)
            rows.extend([model.name, bits, method, who, window, value] for window, value in enumerate(kl))
            print(model.name, bits, method, who, f"{statistics.fmean(kl):.6f}", flush=True)

        for model in args.models:
            add(model, "RTN", OURS, comparison.ours(model, bits, "rtn")[0])
            for name, method in METHODS.items():
                kl, tokens = comparison.ours(model, bits, method)
                add(model, name, OURS, kl)
                for who in [THEIRS, ROUTED]:
                    add(model, name, who, comparison.theirs(model, bits, method, who, tokens))
        pooled = {variant: over_seeds(kl) for variant, kl in found.items()}
        nearest = pooled["RTN", OURS]
        for (method, who), kl in pooled.items():
            mean, (change, error) = statistics.fmean(kl), difference(kl, nearest)
            each = ", ".join(f"{statistics.fmean(values):.6f}" for values in found[method, who])
            against = "" if method == "RTN" else f"{change:+.6f} ± {error:.6f} ({change / statistics.fmean(nearest):+.1%})"
            tokens = "" if method == "RTN" else TOKENS[who]
            tables.append(f"| {bits} | {method} | {who.partition(',')[0]} | {tokens} | {each} | {mean:.6f} | {against} |")
        for method in METHODS:
            own = pooled[method, OURS]
            change, error = difference(own, nearest)
            claim(f"{bits} bits, {method}: below RTN by more than two standard errors ({change:+.6f} ± {error:.6f})",
                  change < -2 * error)
            for who in [THEIRS, ROUTED]:
                change, error = difference(own, pooled[method, who])
                allowed = max(0.005 * statistics.fmean(pooled[method, who]), 2 * error)
                share = change / statistics.fmean(pooled[method, who])
                claim(f"{bits} bits, {method}: no worse than {who} ({change:+.6f} ± {error:.6f}, {share:+.1%})",
                      change <= allowed)
    shutil.rmtree(args.out, ignore_errors=True)
    versions = ", ".join(f"{name} {version}" for name, version in comparison.versions.items())
    shape, seeds = recipes[0], ", ".join(str(recipe["seed"]) for recipe in recipes)
    losses = ", ".join(f"{recipe['loss']:.2f}" for recipe in recipes)
    lines = records.header("AWQ and GPTQ of experts: quant and llm-compressor",
                           "python benchmarks/experts_peers.py QUANT TEXT MODEL...")
    lines += [
        "",
        f"{len(recipes)} models with 16 experts, 4 per token, in 4 blocks ({shape['parameters']:,} parameters), trained by",
        f"`benchmarks/train_experts.py` with the seeds {seeds} for {shape['steps']} steps of {shape['batch']} × "
        f"{shape['length']} tokens (loss at the end",
        f"{losses} nats per token) on `{shape['text']}`. All are quantized in symmetric groups of {GROUP} weights, with",
        f"embeddings, routers and head as floats, and calibrated on the same {args.samples} windows of {LENGTH} tokens of the part",
        "of that text that the models were not trained on; the digests of the tokens are compared.",
        "",
        f"Peers: {versions};",
        "in float32, with their defaults. llm-compressor calibrates every expert on all tokens by default; it also ran with",
        "`moe_calibrate_all_experts=False`. quant runs with its defaults, so on routed tokens.",
        "",
        f"Mean KL divergence from the float model in nats per token, over {WINDOWS} windows of {LENGTH} tokens of",
        f"`{args.text.name}`, for each model and over all, all scored by `quant eval`. Changes are paired by window, after",
        "the mean over models, with standard errors over windows.",
        "",
        "| bits | method | program | tokens of experts | KL of each model | KL | change to RTN |",
        "|---|---|---|---|---|---|---|",
        *tables,
        "",
        "No worse means by at most 0.5 % of the divergence, or two standard errors of the paired difference, whichever is",
        "larger.",
        "",
        *claims,
    ]
    records.write("experts-peers", lines, ["model", "bits", "method", "program", "window", "kl"], rows)
    if args.check and broken:
        raise SystemExit(f"{len(broken)} claims do not hold")


if __name__ == "__main__":
    main()
