"""``evaluate``, ``gate`` and baselines."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import fewbits
import pytest

SHORT = {"window": 128, "windows": 4}


def test_perplexity_is_that_of_the_command_line(model: Path, tmp_path: Path) -> None:
    result = fewbits.evaluate(model, text="builtin-heldout", **SHORT)
    file = tmp_path / "cli.json"
    line = ["--text", "builtin-heldout", "--window", "128", "--windows", "4", f"--json={file}", "--quiet"]
    subprocess.run([sys.executable, "-m", "fewbits", "eval", str(model), *line], check=True, capture_output=True)
    theirs = fewbits.Evaluation.load(file)
    assert theirs.perplexity == result.perplexity and theirs.nll == result.nll
    assert theirs.to_dict()["tool"] == result.to_dict()["tool"]
    assert result.windows == 4 and result.profile == theirs.profile and result.tokens_scored > 0
    assert result.kl is None and result.top1_agreement is None and result.at_noise_floor is None
    assert result.perplexity.standard_error and "±" in f"{result.perplexity:.3f}"
    assert repr(result).startswith("Evaluation(demo-model: perplexity ")
    assert result._repr_html_().startswith("<iframe sandbox") and theirs._repr_html_().startswith("<pre>")


def test_a_comparison(model: Path, rtn: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    result = fewbits.evaluate(rtn, text="builtin-heldout", reference=model, report=report, **SHORT)
    assert result.kl is not None and 0 < result.kl.mean < 1
    assert result.perplexity_ratio is not None and result.top1_agreement is not None
    assert 0.5 < result.top1_agreement.mean <= 1
    assert report.read_text() == result.page()
    kernels = fewbits.evaluate(rtn, text="builtin-heldout", execution="kernels", kv=8, **SHORT)
    assert kernels.perplexity.mean == pytest.approx(result.perplexity.mean, rel=0.02)
    kept = tmp_path / "reference"
    fewbits.evaluate(model, text="builtin-heldout", save_reference=kept, **SHORT)
    again = fewbits.evaluate(rtn, text="builtin-heldout", reference=kept, **SHORT)
    assert again.kl == result.kl


def test_texts(model: Path, tmp_path: Path) -> None:
    documents = ["Rain in the morning, and sun in the afternoon. " * 60, "The night was clear. " * 120]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    by_file = fewbits.evaluate(model, text=file, **SHORT)
    by_rows = fewbits.evaluate(model, text=[{"text": text} for text in documents], **SHORT)
    assert by_file.perplexity == by_rows.perplexity


def test_conversations(model: Path, tmp_path: Path) -> None:
    chats = [
        [{"role": "user", "content": f"What is {n} and {n}?"}, {"role": "assistant", "content": "Rain. " * (20 + n)}]
        for n in range(20)
    ]
    with pytest.raises(fewbits.InputError, match="has no chat template"):
        fewbits.evaluate(model, text=chats, **SHORT)
    chatty = tmp_path / "chatty"
    shutil.copytree(model, chatty)
    (chatty / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}")
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    by_file = fewbits.evaluate(chatty, text=file, **SHORT)
    assert by_file.perplexity == fewbits.evaluate(chatty, text=chats, **SHORT).perplexity
    rows = [{"messages": chat, "id": number} for number, chat in enumerate(chats)]
    assert by_file.perplexity == fewbits.evaluate(chatty, text=rows, **SHORT).perplexity
    assert by_file.perplexity != fewbits.evaluate(chatty, text=chats[1:], **SHORT).perplexity


def test_what_cannot_be_asked_for(model: Path, tmp_path: Path) -> None:
    for arguments, message in [
        ({"execution": "fast"}, 'execution="fast" is not a valid value'),
        ({"kv": 3}, "kv=3 is not a valid value"),
        ({"device": "cuda"}, 'device="cuda" requires execution="kernels"'),
        ({"windows": 0}, "no windows"),
        ({"save_reference": "a", "journal": tmp_path / "b"}, "journal= and save_reference= cannot be combined"),
        ({"profile": "x"}, "x"),
    ]:
        with pytest.raises(fewbits.UsageError) as caught:
            fewbits.evaluate(model, text="builtin-heldout", **arguments)  # type: ignore[arg-type]
        assert message in caught.value.message and " --" not in str(caught.value)


def test_a_journal_continues(model: Path, tmp_path: Path) -> None:
    whole = fewbits.evaluate(model, text="builtin-heldout", window=128, windows=24)
    journal, seen = tmp_path / "journal", []

    def stop(event: fewbits.Event) -> None:
        seen.append(event)
        if sum(isinstance(one, fewbits.UnitDone) for one in seen) == 8:
            raise KeyboardInterrupt

    arguments = {"text": "builtin-heldout", "window": 128, "windows": 24, "journal": journal}
    with pytest.raises(KeyboardInterrupt):
        fewbits.evaluate(model, on_event=stop, **arguments)  # type: ignore[arg-type]
    assert journal.is_file()
    result = fewbits.evaluate(model, **arguments)  # type: ignore[arg-type]
    assert result.perplexity == whole.perplexity and not journal.exists()


GATE = """\
schema = "quant-gate-policy/1"
level = 0.05
on_inconclusive = "inconclusive"

[[non_inferiority]]
metric = "perplexity"
against = "baseline"
margin = 0.5

[[cap]]
metric = "size_bytes"
at_most = 40_000_000
"""


def test_the_gate(model: Path, rtn: Path, tmp_path: Path) -> None:
    good = fewbits.evaluate(model, text="builtin-heldout", **SHORT)
    worse = fewbits.evaluate(rtn, text="builtin-heldout", **SHORT)
    baseline = tmp_path / "baseline.json"
    assert fewbits.update_baseline({"model": good}, baseline) == str(baseline)
    policy = tmp_path / "gate.toml"
    policy.write_text(GATE)
    done = fewbits.gate({"model": good}, policy=policy, baseline=baseline)
    assert done.verdict == "pass" and done.passed and done.exit_code == 0
    done.check()
    report, junit = tmp_path / "gate.html", tmp_path / "gate.xml"
    text = GATE.replace("40_000_000", "1")
    failed = fewbits.gate({"model": worse}, policy=text, baseline=baseline, report=report, junit=junit)
    assert failed.verdict == "fail" and failed.exit_code == 1 and not failed.passed
    with pytest.raises(fewbits.GateFailed) as caught:
        failed.check()
    assert isinstance(caught.value, AssertionError) and caught.value.result is failed
    line, *checks = str(caught.value).splitlines()
    assert line == f"the gate failed: {len(caught.value.checks)} of 2 checks did not pass"
    [size] = [check for check in checks if "size_bytes" in check]
    assert size.startswith("  fail: model: size_bytes is ") and size.endswith("at most 1 B allowed (line 10 of the policy)")
    assert size.strip() in repr(failed) and caught.value.checks == failed.failed
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert len(failed.checks) == 2 and {one.verdict for one in failed.checks} >= {"fail"}
    assert all(one.result == "model" and one.windows == 4 for one in failed.checks)
    assert report.read_text() == failed.page() and "<testsuite" in junit.read_text()
    assert failed.summary and failed._repr_html_().startswith("<iframe")
    # The gate also accepts results as files.
    good.save(tmp_path / "model.json")
    assert fewbits.gate(tmp_path / "model.json", policy=policy, baseline=baseline).passed
    assert fewbits.gate([tmp_path / "model.json"], policy=policy, baseline=baseline).passed


def test_a_suggested_policy(model: Path, rtn: Path, tmp_path: Path) -> None:
    result = fewbits.evaluate(rtn, text="builtin-heldout", reference=model, **SHORT)
    policy = fewbits.suggest_policy({"rtn": result})
    assert 'schema = "quant-gate-policy/1"' in policy and 'results = ["rtn"]' in policy
    baseline = fewbits.update_baseline({"rtn": result}, tmp_path / "baseline.json")
    assert fewbits.gate({"rtn": result}, policy=policy, baseline=baseline).passed
    result.save(tmp_path / "rtn.json")
    assert fewbits.suggest_policy(tmp_path / "rtn.json") == policy
    with pytest.raises(fewbits.InputError, match=r"`suggest_policy\(\[RESULT…\]\)` makes a policy to start from"):
        fewbits.gate({"rtn": result}, policy=tmp_path / "none.toml")
    with pytest.raises(fewbits.UsageError, match="no results were given"):
        fewbits.suggest_policy([])


def test_faults_of_gates(model: Path, tmp_path: Path) -> None:
    result = fewbits.evaluate(model, text="builtin-heldout", **SHORT)
    with pytest.raises(fewbits.InputError) as caught:
        fewbits.gate({"model": result}, policy=GATE)
    assert "baseline=FILE" in caught.value.remedy and "`update_baseline()`" in caught.value.remedy
    fields = result.to_dict()
    fields["perplexity"]["mean"] += 1
    with pytest.raises(fewbits.InputError):
        fewbits.gate({"model": fewbits.Evaluation(fields)}, policy=GATE)
    other = tmp_path / "other.json"
    other.write_text("{}")
    with pytest.raises(fewbits.InputError):
        fewbits.update_baseline({"model": result}, other)
    assert other.read_text() == "{}"
    with pytest.raises(fewbits.InputError, match=":1"):
        fewbits.gate({"model": result}, policy="schema = 3\n")


def test_evaluations_in_a_thread(model: Path) -> None:
    """Jobs also run on other threads, although only the main thread can check for signals."""
    results: list[fewbits.Evaluation] = []
    worker = threading.Thread(
        target=lambda: results.append(fewbits.evaluate(model, text="builtin-heldout", **SHORT))
    )
    worker.start()
    worker.join()
    assert len(results) == 1
