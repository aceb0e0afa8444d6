"""Makes a record of the results of run.sh.

    record.py RESULTS COMMIT [--note TEXT]

RESULTS contains `bench.json`, and `torch.jsonl`, `tests.txt` and `device.txt` if there are any; COMMIT is that of the
program. Writes `benchmarks/record/cuda/<date>-<device>.md` and `.csv`, with the date of `bench.json`.
"""

import argparse
import csv
import json
import statistics
from datetime import datetime, timezone
from pathlib import Path

OUT = Path(__file__).resolve().parents[1] / "record/cuda"
# The numbers of tokens in the tables; the CSV file has all.
TOKENS = [1, 16, 64, 256, 4096]


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def micro(seconds):
    return f"{seconds * 1e6:.1f}"


def peers_of(path):
    found, about = {}, ""
    if path.exists():
        for line in map(json.loads, path.read_text().splitlines()):
            if "kernel" in line:
                found.setdefault((line["kernel"], line["shape"], line["tokens"]), {})[line["peer"]] = line["seconds"]
            else:
                about = f"torch {line['torch']}"
    return found, about


def linears(kernels, peers):
    """One table per scheme: shares of the limits, and times relative to torch."""
    parts = []
    names = list(dict.fromkeys(k["kernel"] for k in kernels if k["kernel"].startswith("w")))
    for name in names:
        own = [k for k in kernels if k["kernel"] == name]
        columns = list(dict.fromkeys(peer for k in own for peer in peers.get((name, k["shape"], k["tokens"]), {})))
        rows = []
        for k in own:
            if k["tokens"] not in TOKENS:
                continue
            theirs = peers.get((name, k["shape"], k["tokens"]), {})
            ratios = [f"{theirs[peer] / k['seconds']:.2f} ×" if peer in theirs else "" for peer in columns]
            rows.append([k["shape"], str(k["tokens"]), micro(k["seconds"]), f"{100 * k['share']:.0f} % of {k['bound']}", *ratios])
        parts.append(f"### `{name}`\n\n" + table(["weights", "tokens", "µs", "share", *columns], rows))
    return parts


def others(kernels, peers):
    own = [k for k in kernels if not k["kernel"].startswith("w")]
    rows = []
    for k in own:
        theirs = peers.get((k["kernel"], k["shape"], k["tokens"]), {})
        compared = ", ".join(f"{peer} {seconds / k['seconds']:.2f} ×" for peer, seconds in theirs.items())
        rows.append([f"`{k['kernel']}`", k["shape"], str(k["tokens"]), micro(k["seconds"]), f"{100 * k['share']:.0f} % of {k['bound']}", compared])
    return table(["kernel", "shape", "tokens", "µs", "share", "compared"], rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("commit")
    parser.add_argument("--note", default="")
    arguments = parser.parse_args()
    bench = json.loads((arguments.results / "bench.json").read_text())
    peers, torch = peers_of(arguments.results / "torch.jsonl")
    device, limits, kernels = bench["device"], bench["ceilings"], bench["kernels"]
    written = (arguments.results / "bench.json").stat().st_mtime
    date = datetime.fromtimestamp(written, timezone.utc).date().isoformat()
    spread = statistics.median((k["all_seconds"][-1] - k["all_seconds"][0]) / k["seconds"] / 2 for k in kernels)
    text = [
        f"# CUDA kernels on an {device['name']}",
        f"- date: {date}\n- commit: {arguments.commit[:12]}\n- device: {device['name']}, compute capability "
        f"{device['compute_capability']}, {device['multiprocessors']} multiprocessors, driver for CUDA {device['driver_cuda']}\n"
        f"- command: `cargo xtask gpu`, then `./run.sh bench torch` on the machine with the GPU, and `record.py` on its results",
        f"Measured limits: reads {limits['read_gb_per_second']:.0f} GB/s, copies {limits['copy_gb_per_second']:.0f} GB/s; `mma` in "
        f"registers: f16 {limits['f16_tops']:.0f}, bf16 {limits['bf16_tops']:.0f}, int8 {limits['int8_tops']:.0f} TOPS; an empty launch in a "
        f"series {micro(limits['launch_seconds'])} µs. A share is the time that the bytes or products of a case take at these limits, "
        "divided by its time. A time is the median of five measurements of at least 50 ms of launches in a row, which take their "
        f"weights, caches or rows in turn from copies that exceed the L2 cache ten times; half the range of the five is {100 * spread:.1f} % "
        "in the median. Times include the launch.",
    ]
    if torch:
        text.append(
            f"Compared with {torch} on the same machine, right after: `torch f16` is `linear` with f16 weights (cuBLAS), `torch int8` "
            "`_int_mm` without the quantization of activations, `torch int4` `_weight_int4pack_mm` with groups of 128 in bf16, `torch sdpa` "
            "attention on an f16 cache without pages. Ratios are their time divided by ours: above 1, ours is faster."
        )
    if arguments.note:
        text.append(arguments.note)
    if bench["failed"]:
        text.append("Failed: " + ", ".join(sorted({f["kernel"] for f in bench["failed"]})))
    text.append("## Linears")
    text += linears(kernels, peers)
    text += ["## Experts, attention and activations", others(kernels, peers)]
    OUT.mkdir(parents=True, exist_ok=True)
    name = f"{date}-{device['name'].lower().replace(' ', '-')}"
    (OUT / f"{name}.md").write_text("\n\n".join(text) + "\n")
    with (OUT / f"{name}.csv").open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["contestant", "kernel", "shape", "tokens", "seconds", "floor_seconds", "bound", "measurements"])
        for k in kernels:
            every = " ".join(f"{s:.4e}" for s in k["all_seconds"])
            out.writerow(["quant", k["kernel"], k["shape"], k["tokens"], f"{k['seconds']:.4e}", f"{k['floor_seconds']:.4e}", k["bound"], every])
        for (kernel, shape, tokens), theirs in peers.items():
            for peer, seconds in theirs.items():
                out.writerow([peer, kernel, shape, tokens, f"{seconds:.4e}", "", "", ""])
    print(OUT / f"{name}.md")


if __name__ == "__main__":
    main()
