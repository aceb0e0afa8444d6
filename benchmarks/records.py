"""The common code of the Python benchmarks that write records: the header with the machine, and the names of the files,
both in the form that `cargo xtask` uses.
"""

import argparse
import csv
import datetime
import os
import platform
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks/record"


def paths(description: str, *names: str) -> list[Path]:
    """Parses the command line of a script whose arguments are these paths. `--help` prints the description."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in names:
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    return [getattr(given, name) for name in names]


def today() -> datetime.date:
    return datetime.datetime.now(datetime.timezone.utc).date()


def field(file: str, key: str) -> str:
    """The value of the first `key: value` line of a file; empty if there is none."""
    try:
        text = Path(file).read_text()
    except OSError:
        return ""
    found = re.search(rf"^{re.escape(key)}\s*:\s*(.*?)\s*$", text, re.MULTILINE)
    return found.group(1) if found else ""


def cpu() -> str:
    return field("/proc/cpuinfo", "model name") or platform.machine()


def generation() -> str:
    """The CPU's family and model, which tell generations apart that virtual machines name alike."""
    family, model = field("/proc/cpuinfo", "cpu family"), field("/proc/cpuinfo", "model")
    return f" (family {family}, model {model})" if family and model else ""


def cpus() -> int:
    return len(os.sched_getaffinity(0))


def header(title: str, command: str) -> list[str]:
    """The first lines of a record."""
    git = ["git", "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    gib = round(int((field("/proc/meminfo", "MemTotal") or "0").split()[0]) / 2**20)
    host = f"{cpu()}{generation()}, {cpus()} CPUs, {gib} GiB, Linux {platform.release()}"
    return [f"# {title}", "", f"- date: {today()}", f"- commit: {commit}", f"- host: {host}", f"- command: `{command}`"]


def write(kind: str, lines: list[str], columns: list[str], rows: list) -> None:
    """Writes the text and the measurements of a record; an earlier one of the same day and machine is replaced."""
    place = FOLDER / kind
    place.mkdir(parents=True, exist_ok=True)
    words = [word for word in re.split(r"[^a-z0-9]+", cpu().lower()) if word][:4]
    base = place / f"{today()}-{'-'.join(words)}-{cpus()}cpu"
    base.with_suffix(".md").write_text("\n".join(lines) + "\n")
    with open(base.with_suffix(".csv"), "w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(columns)
        table.writerows(rows)
