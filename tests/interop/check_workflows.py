"""Checks the workflows under docs/ci against the schemas of the systems that read them.

check-jsonschema includes copies of the schemas that GitHub and GitLab publish, so nothing is downloaded. The policy
beside the workflows is read by `quant gate` itself. check.py runs these as its `workflow` checks.
"""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs/ci"

# File, and the options that tell check-jsonschema its schema; GitLab's tag `!reference` needs a separate option.
WORKFLOWS = [
    ("github-actions.yml", ["--builtin-schema", "vendor.github-workflows"]),
    ("gitlab-ci.yml", ["--builtin-schema", "vendor.gitlab-ci", "--data-transform", "gitlab-ci"]),
]
POLICY = "gate.toml"


def validate(file, schema):
    """The errors of a workflow; empty if it is valid."""
    command = [sys.executable, "-m", "check_jsonschema", "--output-format", "json", *schema, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    return (done.stdout + done.stderr).strip()


def workflow(check, name, schema):
    def work():
        wrong = validate(FOLDER / name, schema)
        return wrong or f"valid by {schema[1]}", not wrong

    check.step(f"workflow {name}", work)


def policy(check):
    """Runs the gate with the policy on an 8-bit model, compared with its float model. The model must pass, so a
    failure is an error in the policy."""

    def work():
        model, results = check.model("demo"), check.scratch / "results"
        results.mkdir(exist_ok=True)
        # The policy refers to a result with this name.
        result, baseline = results / "wikitext.json", check.scratch / "baseline.json"
        rounded = check.scratch / "policy-w8"
        check.program("quant", "quantize", model, "-o", rounded, "--method", "rtn", "--scheme", "w8a16-g64-sym",
                      "--quiet")
        check.program("quant", "eval", rounded, "--reference", model, "--text", check.text("demo"),
                      "--window", "64", "--windows", "8", "--quiet", f"--json={result}")
        check.program("quant", "gate", "--quiet", "--update", "--baseline", baseline, result)
        output = check.program("quant", "gate", "--policy", FOLDER / POLICY, "--baseline", baseline, result)
        return output.splitlines()[-1], True

    check.step(f"workflow {POLICY}", work)


def run_all(check, only):
    for name, schema in WORKFLOWS:
        if only in f"workflow {name}":
            workflow(check, name, schema)
    if only in f"workflow {POLICY}":
        policy(check)
