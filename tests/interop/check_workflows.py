"""Checks the workflows under docs/ci against the schemas of the systems that read them.

check-jsonschema includes copies of the schemas that GitHub and GitLab publish, so nothing is downloaded. The policy
next to the workflows is read by `quant gate` itself. check.py runs these as its `workflow` checks.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from ruamel.yaml import YAML

FOLDER = Path(__file__).resolve().parents[2] / "docs/ci"

# File, and the options that tell check-jsonschema its schema.
WORKFLOWS = [
    ("github-actions.yml", ["--builtin-schema", "vendor.github-workflows"]),
    ("gitlab-ci.yml", ["--builtin-schema", "vendor.gitlab-ci", "--data-transform", "gitlab-ci"]),
]
POLICY = "gate.toml"
ACTION = "action.yml"


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
    """Runs the gate with the policy on an 8-bit model, which must pass."""

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


def action(check):
    """The action is valid, and its scripts do what they say: for a baseline, a passing model, a failing one, and a
    wrong checksum of quant."""

    def work():
        wrong = validate(FOLDER / ACTION, ["--builtin-schema", "vendor.github-actions"])
        if wrong:
            return wrong, False
        described = YAML(typ="safe").load((FOLDER / ACTION).read_text())
        defaults = {name: str(field.get("default", "")) for name, field in described["inputs"].items()}
        folder = check.scratch / "action"
        (folder / ".quant").mkdir(parents=True, exist_ok=True)
        model = check.model("demo")
        for bits in ("8", "2"):
            check.program("quant", "quantize", model, "-o", folder / f"w{bits}", "--method", "rtn", "--scheme",
                          f"w{bits}a16-g64-sym", "--quiet", "--force")
        shutil.copy(FOLDER / POLICY, folder / ".quant/gate.toml")
        program = (check.programs / "quant").resolve()
        given = {
            "url": program.as_uri(),
            "sha256": hashlib.sha256(program.read_bytes()).hexdigest(),
            "reference": str(model),
        }
        short = {"text": str(check.text("demo")), "windows": "8", "options": "--window 64"}

        def stored():
            return list((folder / ".quant-action").glob("reference-*.bin"))

        def run(given=given | short, **inputs):
            values = {**defaults, **given, **inputs}
            for step in described["runs"]["steps"]:
                if "run" not in step:
                    continue
                outputs = folder / "outputs"
                lines = outputs.read_text().splitlines() if outputs.exists() else []
                known = values | dict(line.split("=", 1) for line in lines)
                environment = dict(os.environ, GITHUB_OUTPUT=str(outputs))
                for name, value in step["env"].items():
                    environment[name] = re.sub(
                        r"\$\{\{ (?:inputs|steps\.\w+\.outputs)\.(\w+) \}\}", lambda m: known[m[1]], value)
                done = subprocess.run(["bash", "-e", "-o", "pipefail", "-c", step["run"]], cwd=folder, env=environment,
                                      capture_output=True, text=True, check=False)
                if done.returncode:
                    return step["name"], done.returncode
            return None, 0

        found = [run(model="w8", update="true"), run(model="w8"), run(model="w2"), run(model="w8", sha256="0" * 64)]
        wanted = [(None, 0), (None, 0), ("Gate", 1), ("Install quant", 4)]
        right = found == wanted and len(stored()) == 1
        # The defaults of the action: all windows of the built-in text. The stored reference is that of another text.
        found += [run(given, model="w8", update="true"), run(given, model="w8"), run(given, model="w2")]
        # A second reference in the same job has a stored reference of its own.
        found.append(run(given, model="w8", reference=str(folder / "w2")))
        kept = len(stored()) == 3
        return f"{found}", right and kept and found[len(wanted):] == [(None, 0), (None, 0), ("Gate", 1), ("Gate", 4)]

    check.step(f"workflow {ACTION}", work)


def run_all(check, only):
    if only in f"workflow {ACTION}":
        action(check)
    for name, schema in WORKFLOWS:
        if only in f"workflow {name}":
            workflow(check, name, schema)
    if only in f"workflow {POLICY}":
        policy(check)
