"""The model of lm-evaluation-harness: tasks from local files, without torch."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import fewbits
import pytest

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

import fewbits.lm_eval
import lm_eval
from fewbits.lm_eval import FewbitsLM
from lm_eval.api.instance import Instance

QUESTIONS = 40


def sentences() -> list[str]:
    text = (Path(os.environ["FEWBITS_ROOT"]) / "calibration-data/heldout/narrative.txt").read_text()
    found = [" ".join(one.split()) for one in re.split(r"(?<=[.!?])\s", text)]
    return [one for one in found if 40 < len(one) < 300]


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A task like HellaSwag: which of four endings completes a sentence. The wrong ones are reversed or from other
    sentences."""
    all_sentences = sentences()
    rows = []
    for number in range(QUESTIONS):
        words = all_sentences[number].split()
        half = len(words) // 2
        others = [all_sentences[-1 - (2 * number + step)].split() for step in (0, 1)]
        choices = [words[half:][::-1], *(other[len(other) // 2 :] for other in others)]
        gold = number % 4
        choices.insert(gold, words[half:])
        rows.append({"query": " ".join(words[:half]), "choices": [" ".join(c) for c in choices], "gold": gold})
    file = tmp_path_factory.mktemp("task") / "endings.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "task": "endings",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": str(file)}},
        "validation_split": "validation",
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}",
        "doc_to_choice": "choices",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }


def run(task: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    done = lm_eval.simple_evaluate(
        model="fewbits", model_args=arguments, tasks=[task], bootstrap_iters=0, log_samples=True
    )
    assert done is not None
    return dict(done)


def instances(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    return [
        Instance(request_type=kind, doc={}, arguments=one, idx=number)  # type: ignore[arg-type]
        for number, one in enumerate(arguments)
    ]


def test_multiple_choice_from_local_files(rtn: Path, endings: dict[str, Any]) -> None:
    done = run(endings, pretrained=str(rtn))
    result = done["results"]["endings"]
    assert len(done["samples"]["endings"]) == QUESTIONS
    # Computed by hand: the most likely ending, and the most likely per character.
    model = fewbits.Model(rtn)
    [file] = endings["dataset_kwargs"]["data_files"].values()
    right = {"acc,none": 0, "acc_norm,none": 0}
    for row in map(json.loads, Path(file).read_text().splitlines()):
        [context, *wholes] = model.encode([row["query"], *(f"{row['query']} {one}" for one in row["choices"])])
        found = model.log_likelihoods([(context, whole[len(context) :]) for whole in wholes])
        scores = [value for value, _ in found]
        by_length = [value / len(one) for value, one in zip(scores, row["choices"], strict=True)]
        right["acc,none"] += scores.index(max(scores)) == row["gold"]
        right["acc_norm,none"] += by_length.index(max(by_length)) == row["gold"]
    assert 0 < right["acc,none"] < QUESTIONS
    assert {name: result[name] * QUESTIONS for name in right} == pytest.approx(right)
    again = run(endings, pretrained=str(rtn), execution="fake", threads=1)["samples"]["endings"]
    for one, other in zip(done["samples"]["endings"], again, strict=True):
        for (a, _), (b, _) in zip(one["filtered_resps"], other["filtered_resps"], strict=True):
            assert math.isclose(a, b, rel_tol=5e-3)
    assert "torch" not in sys.modules


def test_pairs_are_split_as_the_harness_splits_them(rtn: Path) -> None:
    lm = FewbitsLM(str(rtn))
    pairs = [("The mill", " stood"), ("The mill ", "stood"), ("", "The mill"), ("The river", "")]
    seen: list[Any] = []
    lm._loglikelihood_tokens = lambda requests, **_: seen.extend(requests) or []  # type: ignore[method-assign]
    lm.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
    ours = list(seen)
    seen.clear()
    super(FewbitsLM, lm).loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
    assert ours == seen and ours[0][2] == ours[1][2]


def test_rolling_is_the_evaluator_s_profile(rtn: Path, tmp_path: Path) -> None:
    # The evaluator takes the token before a document from this file, which the demo model lacks.
    named = tmp_path / "named"
    shutil.copytree(rtn, named)
    (named / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    texts = [" ".join(sentences()[:30]), sentences()[30]]
    lm = FewbitsLM(str(named), execution="fake", max_length=128)
    totals = lm.loglikelihood_rolling(instances("loglikelihood_rolling", *((text,) for text in texts)), disable_tqdm=True)
    result = fewbits.evaluate(named, text=texts, profile="lmeval-rolling", window=128).to_dict()
    assert math.isclose(-sum(totals), result["nll"]["mean"] * result["tokens_scored"], rel_tol=1e-6)


def test_generation(rtn: Path) -> None:
    lm = FewbitsLM(str(rtn))
    prompt = sentences()[0]
    free, bounded, stopped = lm.generate_until(
        instances(
            "generate_until",
            (prompt, {"until": [], "max_gen_toks": 20}),
            (prompt, {"max_new_tokens": 5, "until": "\0"}),
            (prompt, {"until": ["e"], "max_gen_toks": 20, "temperature": 0.0}),
        ),
        disable_tqdm=True,
    )
    assert free.startswith(bounded) and len(bounded) < len(free)
    assert stopped == free.split("e")[0]
    with pytest.raises(ValueError, match="num_beams"):
        lm.generate_until(instances("generate_until", (prompt, {"num_beams": 3})), disable_tqdm=True)
    with pytest.raises(ValueError, match="no room"):
        lm.generate_until(instances("generate_until", (prompt, {"max_gen_toks": 512})), disable_tqdm=True)


def test_long_requests_lose_their_beginning(rtn: Path) -> None:
    lm = FewbitsLM(str(rtn), max_length=32)
    [tokens] = lm.model.encode([" ".join(sentences()[:9])], special_tokens=False)
    assert len(tokens) > 64
    long, short = lm._loglikelihood_tokens(
        [(None, tokens[:60], tokens[60:64]), (None, tokens[31:60], tokens[60:64])], disable_tqdm=True
    )
    assert long == short


def test_it_is_found(rtn: Path) -> None:
    points = importlib.metadata.entry_points(group="lm_eval.models")
    assert [point.load() for point in points if point.name == "fewbits"] == [FewbitsLM]
    with pytest.raises(ValueError, match="runs only on the CPU"):
        FewbitsLM(str(rtn), device="cuda:0")


def test_the_code_of_the_guide_runs(rtn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(os.environ["FEWBITS_ROOT"]) / "docs/guide/lm-eval.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    # A task is defined in the block after the one that refers to it.
    blocks.sort(key=lambda block: "TASK = {" not in block)
    assert len(blocks) == 3
    (tmp_path / "OUT").symlink_to(rtn)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/guide/lm-eval.md", "exec"), names)
    assert names["results"]["results"]["endings"]["acc,none"] >= 0.5
