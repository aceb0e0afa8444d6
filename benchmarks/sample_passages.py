"""Prints sixty random passages of the project: 30 comments, 15 paragraphs of documentation and 15 messages.

    python benchmarks/sample_passages.py SEED

Run it in the root of the repository. Someone who did not write the passages reads each with its code open; docs/style.md
has the rules, and benchmarks/record/prose the results. Records and generated files are left out.
"""

import argparse
import random
import re
import subprocess
from pathlib import Path

COUNTS = {"comment": 30, "docs": 15, "message": 15}
# The shortest passages that are drawn, in characters.
SHORTEST = {"comment": 50, "docs": 80, "message": 35}


def tracked(*patterns):
    files = subprocess.run(["git", "ls-files", *patterns], check=True, capture_output=True, text=True).stdout.split()
    return [Path(file) for file in files if "record" not in Path(file).parts]


def comments():
    """Runs of lines that are comments."""
    for path in tracked("*.rs", "*.py", "*.cu", "*.cuh"):
        marker = r"#" if path.suffix == ".py" else r"//[/!]?"
        run, start = [], 0
        for number, line in enumerate([*path.read_text().splitlines(), ""], 1):
            found = re.match(rf"\s*{marker} ?(.*)$", line)
            if found:
                start = start if run else number
                run.append(found[1])
            elif run:
                yield f"{path}:{start}", "\n".join(run)
                run = []


def paragraphs():
    for path in tracked("*.md"):
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        for paragraph in text.split("\n\n"):
            if not paragraph.startswith("|"):
                yield str(path), paragraph.strip()


def messages():
    """String literals with several words, outside of tests."""
    for path in tracked("*.rs"):
        if "tests" in path.parts or path.parts[0] in ("xtask", "fuzz", "benchmarks"):
            continue
        text = path.read_text().split("#[cfg(test)]")[0]
        for literal in re.finditer(r'"((?:[^"\\\n]|\\.|\\\n)*)"', text):
            if literal[1].count(" ") > 5:
                line = text.count("\n", 0, literal.start()) + 1
                yield f"{path}:{line}", re.sub(r"\\\n\s*", "", literal[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("SEED")
    random.seed(parser.parse_args().SEED)
    for kind, found in {"comment": comments, "docs": paragraphs, "message": messages}.items():
        long_enough = [(place, text) for place, text in found() if len(text) > SHORTEST[kind]]
        for place, text in random.sample(long_enough, COUNTS[kind]):
            print(f"--- [{kind}] {place}\n{text}\n")


if __name__ == "__main__":
    main()
