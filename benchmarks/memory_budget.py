"""Peak memory and time of `quant quantize` under memory budgets, compared with what `quant plan` predicts.

    python benchmarks/memory_budget.py QUANT XTASK TEXT OUT [--shape 1B|8B|70B] [--layers N] [--vocab N] [--samples N]
                                       [--seq-len N] [--methods awq,gptq,…] [--pairs N] [--share 0.33]

QUANT and XTASK are programs of this workspace; TEXT is a calibration text. For each method, a synthetic model of the
shape is quantized in memory, with the predicted peak as the budget, and with a smaller budget: the smallest possible
one, or the given share of the predicted peak if that is larger. The runs with the smaller budget are inside a memory
control group with this limit, if this user may create one. Peak memory is the VmHWM that the program reports. The
weight files of all runs of a method must be equal byte for byte. Prints a Markdown table, and appends its rows to
OUT/memory-budget.csv. The methods that begin with `gguf` write GGUF files of the type Q4_K_M: without a text, with an
importance matrix, with AWQ, or with GPTQ.
"""

import argparse
import csv
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path

SHAPES = {
    "1B": ["--hidden", "2048", "--intermediate", "8192", "--heads", "32", "--kv-heads", "8", "--head-dim", "64"],
    "8B": ["--hidden", "4096", "--intermediate", "14336", "--heads", "32", "--kv-heads", "8", "--head-dim", "128"],
    "70B": ["--hidden", "8192", "--intermediate", "28672", "--heads", "64", "--kv-heads", "8", "--head-dim", "128"],
}
GGUF = ["--format", "gguf", "--scheme", "q4_k_m", "--pre", "none"]
# Options, and whether there is a calibration text.
METHODS = {
    "awq": (["--method", "awq"], True),
    "gptq": (["--method", "gptq"], True),
    "awq-gptq": (["--method", "awq-gptq"], True),
    "smoothquant": (["--preset", "smoothquant-w8a8"], True),
    "rtn": (["--method", "rtn"], False),
    "gguf": (GGUF, False),
    "gguf-imatrix": (GGUF, True),
    "gguf-awq": ([*GGUF, "--method", "awq"], True),
    "gguf-gptq": ([*GGUF, "--method", "gptq"], True),
}


class Group:
    """A memory control group with a limit. If none can be created, nothing is limited."""

    def __init__(self, limit: int):
        self.directory = None
        for root, name in [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")]:
            if not (Path(root) / name).exists() and not (Path(root) / "cgroup.controllers").exists():
                continue
            directory = Path(root) / f"quant-budget-{os.getpid()}"
            try:
                directory.mkdir(exist_ok=True)
                (directory / name).write_text(str(limit))
                self.directory = directory
                return
            except OSError:
                continue

    def enter(self) -> None:
        if self.directory:
            (self.directory / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        if self.directory:
            self.directory.rmdir()


def digest(directory: Path) -> str:
    total = hashlib.sha256()
    for path in sorted([*directory.glob("*.safetensors"), *directory.glob("*.gguf")]):
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quant", type=Path)
    parser.add_argument("xtask", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="1B")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--methods", default="awq,gptq,smoothquant")
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--share", type=float)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    model = asked.out / f"model-{asked.shape}-{asked.layers}-{asked.vocab}"
    if not model.exists():
        shape = [*SHAPES[asked.shape], "--layers", str(asked.layers), "--vocab", str(asked.vocab)]
        subprocess.run([asked.xtask, "synth", *shape, model], check=True, stdout=subprocess.DEVNULL)
    rows = []
    for method in asked.methods.split(","):
        options, has_text = METHODS[method]
        sampling = ["--samples", str(asked.samples), "--seq-len", str(asked.seq_len)] if has_text else []
        options = [*options, *sampling]
        plan = json.loads(subprocess.run([asked.quant, "plan", model, *options, "--json"], check=True, capture_output=True).stdout)
        if has_text:
            # The text is optional for some runs.
            plan = plan.get("with_calibration", plan)
        smallest, memory = plan["smallest_budget_bytes"], plan["peak_memory_bytes"]
        budget = smallest if asked.share is None else max(smallest, int(asked.share * memory))
        found: dict[str, list] = {"in memory": [], "budget": []}
        for _ in range(asked.pairs):
            for name, limit in [("in memory", memory), ("budget", budget)]:
                out = asked.out / "quantized"
                shutil.rmtree(out, ignore_errors=True)
                limit = -(-limit // (1 << 20)) << 20
                text = ["--calibration", asked.text] if has_text else []
                command = [asked.quant, "quantize", model, "-o", out, "--json", *options, *text, "--memory-budget", f"{limit >> 20}MiB"]
                group = Group(limit) if name == "budget" else None
                started = time.monotonic()
                run = subprocess.run(command, capture_output=True, text=True, preexec_fn=group.enter if group else None)
                seconds = time.monotonic() - started
                if group:
                    group.remove()
                if run.returncode:
                    raise SystemExit(f"{method}, {name}: exit code {run.returncode}\n{run.stderr}")
                used = json.loads(run.stdout)["peak_memory_bytes"]
                limited = bool(group and group.directory)
                found[name].append((limit, used, seconds, digest(out), limited))
        hashes = {run[3] for runs in found.values() for run in runs}
        if len(hashes) != 1:
            raise SystemExit(f"{method}: outputs differ")
        for name, runs in found.items():
            limit, used = runs[0][0], max(run[1] for run in runs)
            seconds = statistics.median(run[2] for run in runs)
            pairs = zip(found["budget"], found["in memory"])
            ratio = statistics.median(b[2] / m[2] for b, m in pairs) if name == "budget" else 1.0
            rows.append([method, name, limit, used, round(used / limit, 3), round(seconds, 1), round(ratio, 3), runs[0][4]])
            print(rows[-1], flush=True)
    with (asked.out / "memory-budget.csv").open("a", newline="") as file:
        writer = csv.writer(file)
        for row in rows:
            writer.writerow([asked.shape, asked.layers, asked.vocab, asked.samples, asked.seq_len, asked.pairs, *row])
    print("\n| method | states | predicted | used | used / predicted | seconds | time ratio |\n|---|---|---|---|---|---|---|")
    for method, name, limit, used, share, seconds, ratio, limited in rows:
        group = ", in a control group" if limited else ""
        print(f"| {method} | {name}{group} | {limit / 1e9:.2f} GB | {used / 1e9:.2f} GB | {share:.2f} | {seconds} | {ratio:.2f} |")
    shutil.rmtree(asked.out / "quantized", ignore_errors=True)


if __name__ == "__main__":
    main()
