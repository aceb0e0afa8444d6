"""The contents of the package: the command line, stubs, the llm-compressor interface, the examples of its page."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import fewbits
import pytest
from conftest import QUICK, digests
from fewbits import _names, llmcompressor
from fewbits.llmcompressor import (
    AWQModifier,
    GPTQModifier,
    QuantizationModifier,
    SmoothQuantModifier,
    oneshot,
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, check=False)


def test_the_command_line_is_the_program_s(model: Path, tmp_path: Path) -> None:
    script = Path(sys.executable).parent / "quant"
    for command in ([str(script)], [sys.executable, "-m", "fewbits"]):
        version = run(*command, "--version")
        assert version.returncode == 0 and version.stdout.strip() == f"quant {fewbits.__version__}"
        refused = run(*command, "quantize", str(model), "-o", str(tmp_path / "out"), "--group-size", "100")
        assert refused.returncode == 2 and "choose a --group-size" in refused.stderr
        assert run(*command, "inspect", str(tmp_path / "none")).returncode == 4
        assert run(*command, "--no-such-option").returncode == 2


def test_metadata() -> None:
    metadata = importlib.metadata.metadata("fewbits")
    assert metadata["Version"] == fewbits.__version__
    assert metadata["License-Expression"] == "MIT OR Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert importlib.resources.files("fewbits").joinpath("py.typed").is_file()
    assert sorted(fewbits.__all__) == fewbits.__all__
    assert all(hasattr(fewbits, name) for name in fewbits.__all__)
    required = importlib.metadata.requires("fewbits") or []
    assert all("extra ==" in requirement for requirement in required)


def test_stubs_are_those_of_the_extension(tmp_path: Path) -> None:
    # Excluded: modules that need torch or Ray, which are not installed here; fields that ctypes creates; and a class whose
    # base class has no types.
    allowed = tmp_path / "allowed"
    allowed.write_text("fewbits\\._torch\nfewbits\\.ray\nfewbits\\._kernels\\._?[A-Z].*\nfewbits\\.lm_eval\\.FewbitsLM.*\n")
    options = ["--ignore-disjoint-bases", "--allowlist", str(allowed), "--ignore-unused-allowlist"]
    done = run(sys.executable, "-m", "mypy.stubtest", "fewbits", *options)
    assert done.returncode == 0, done.stdout + done.stderr


def test_types_hold() -> None:
    done = run(sys.executable, "-m", "mypy", "--strict", "-p", "fewbits")
    assert done.returncode == 0, done.stdout + done.stderr


def test_oneshot(model: Path, tmp_path: Path) -> None:
    rows = [{"body": "The mill stood by the river, and nobody knew who owned it. " * 30}] * 10
    recipe = [SmoothQuantModifier(smoothing_strength=0.8), GPTQModifier(scheme="W8A8", ignore=["lm_head"])]
    arguments: dict[str, Any] = {"num_calibration_samples": 4, "max_seq_length": 64}
    oneshot(
        model=str(model),
        dataset=rows,
        text_column="body",
        recipe=recipe,
        output_dir=tmp_path / "theirs",
        **arguments,
    )
    fewbits.quantize(
        model,
        tmp_path / "ours",
        method="smoothquant-gptq",
        scheme="w8a8",
        alpha=0.8,
        damping=0.01,
        calibration=[row["body"] for row in rows],
        **QUICK,
    )
    assert digests(tmp_path / "theirs") == digests(tmp_path / "ours")


def test_schemes_of_oneshot_exist(model: Path) -> None:
    for name, scheme in llmcompressor.SCHEMES.items():
        method = "rtn" if scheme != "w8a8" else "smoothquant"
        assert fewbits.plan(model, method=method, scheme=scheme, group_size=None).formats, name


CALIBRATED = GPTQModifier(scheme="W4A16", ignore=["lm_head"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: QuantizationModifier(config_groups={}), "QuantizationModifier does not support `config_groups`"),
        (lambda: GPTQModifier(scheme="W4A16", offload_hessians=True), "`offload_hessians`"),
        (lambda: GPTQModifier(scheme="W4A16", actorder="group"), "unknown actorder='group'"),
        (lambda: AWQModifier(mappings=[]), "`mappings`"),
        (lambda: SmoothQuantModifier(num_calibration_steps=3), "`num_calibration_steps`"),
        (lambda: QuantizationModifier(scheme="W3A5"), "unknown scheme='W3A5'"),
        (lambda: QuantizationModifier(scheme="W4A16", targets=["re:.*mlp.*"]), "targets="),
        (lambda: shot(pipeline="basic"), "oneshot does not support `pipeline`"),
        (lambda: shot(model=3), "model= must be the path of a model directory, not int"),
        (lambda: shot(recipe="recipe.yaml"), "recipes as text or files are not supported here"),
        (lambda: shot(recipe=object()), "recipe= must be a modifier or a list of modifiers, not object"),
        (lambda: shot(recipe=None), "recipe= must be a modifier or a list of modifiers, not NoneType"),
        (lambda: shot(max_seq_length="a"), "max_seq_length= must be an integer, not str 'a'"),
        (lambda: shot(recipe=CALIBRATED, dataset={"train": []}), "put a single row into a list"),
        (lambda: QuantizationModifier(ignore=5), "ignore= must be a string or a list of strings, not int 5"),
        (lambda: GPTQModifier(dampening_frac="a"), "dampening_frac= must be a number, not str 'a'"),
        (lambda: SmoothQuantModifier(smoothing_strength="a"), "smoothing_strength= must be a number, not str 'a'"),
        (lambda: shot(recipe=GPTQModifier(scheme="W4A16")), 'add ignore=["lm_head"], or call fewbits.quantize()'),
        (
            lambda: shot(recipe=[AWQModifier(ignore=["lm_head"]), QuantizationModifier(scheme="W4A16")]),
            "QuantizationModifier does not ignore the output head",
        ),
        (lambda: shot(recipe=GPTQModifier(scheme="W4A16", ignore=["re:("])), "does not ignore the output head"),
        (lambda: shot(recipe=[GPTQModifier(), GPTQModifier()]), "GPTQModifier then GPTQModifier is not a supported recipe"),
        (lambda: shot(recipe=GPTQModifier()), "the recipe has 0 different schemes"),
        (lambda: shot(save_compressed=False), "save_compressed=False"),
        (lambda: shot(recipe=CALIBRATED, dataset=[{"input_ids": [1]}]), "contains tokens"),
    ],
)
def test_what_oneshot_does_not_know_is_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises((fewbits.UsageError, TypeError)) as caught:
        call()
    assert message in str(caught.value)


def test_errors_of_oneshot_name_its_arguments(model: Path, tmp_path: Path) -> None:
    def refused(recipe: Any = CALIBRATED, **arguments: Any) -> str:
        with pytest.raises((fewbits.QuantError, TypeError)) as caught:
            oneshot(model=model, recipe=recipe, output_dir=tmp_path / "out", **arguments)
        text = str(caught.value)
        for name in ("samples", "seq_len", "calibration", "damping", "act_order", "alpha"):
            assert not re.search(rf"(?<![\w.]){name}[=:]", text), text
        return text

    short = refused(dataset=["too short"])
    assert short.startswith("dataset has ") and "num_calibration_samples=, max_seq_length=" in short
    assert "num_calibration_samples=-1 is negative" in refused(num_calibration_samples=-1)
    assert "dampening_frac=" in refused(GPTQModifier(scheme="W4A16", ignore=["lm_head"], dampening_frac=-1.0))
    assert "smoothing_strength=" in refused(
        [SmoothQuantModifier(smoothing_strength=2.0), QuantizationModifier(scheme="W8A8", ignore=["lm_head"])]
    )
    assert 'such as dataset["train"]' in refused(dataset={"train": []})
    assert "row 2 of dataset= has no column `text`; its columns are `body`" in refused(
        dataset=[{"text": "a"}, {"body": "b"}]
    )
    assert "dataset:2: " in refused(dataset=["a", {"text": 5}])
    for name in ("ultrachat_200k", "org/chats"):
        assert f"pass its rows: datasets.load_dataset('{name}', split=...)" in refused(dataset=name)
    assert "ignore= `none`" in refused(GPTQModifier(scheme="W4A16", ignore=["lm_head", "none"]))
    (tmp_path / "out").mkdir()
    assert "replace it with force=True" in refused(num_calibration_samples=4, max_seq_length=64)
    with pytest.warns(fewbits.FewbitsWarning, match="use max_seq_length=[0-9]+ or less"):
        refused(max_seq_length=100_000, force=True)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("choose a group_size= that divides", "choose a fewbits.quantize(group_size=) that divides"),
        ('leave out group_size="channel"', 'leave out fewbits.quantize(group_size="channel")'),
        ('use scheme="w4a16-g128-sym"', 'use scheme="W4A16"'),
        ("`plan(MODEL, samples=4)`, samples=4", "`plan(MODEL, samples=4)`, num_calibration_samples=4"),
        ("a.samples=3 /samples=3 threads=2", "a.samples=3 /samples=3 threads=2"),
    ],
)
def test_spelling_of_oneshot(ours: str, theirs: str) -> None:
    with _names.naming(llmcompressor._spelling):
        assert _names.spelled(ours) == theirs
    assert _names.spelled(ours) == ours


def shot(**arguments: Any) -> object:
    given: dict[str, Any] = {"model": "M", "recipe": QuantizationModifier(scheme="W4A16", ignore="lm_head"), "output_dir": "O"}
    return oneshot(**{**given, **arguments})


@pytest.mark.parametrize(("scheme", "is_calibrated"), [("FP8", True), ("NVFP4", True), ("FP8_DYNAMIC", False)])
def test_static_scales_are_calibrated_on_the_dataset(
    scheme: str, is_calibrated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(llmcompressor, "quantize", lambda *_, **arguments: calls.append(arguments))
    recipe = QuantizationModifier(scheme=scheme, ignore=["re:.*lm_head"])
    shot(recipe=recipe, dataset=["one", "two"], num_calibration_samples=2)
    [arguments] = calls
    assert arguments["ignore"] == []
    assert (arguments.get("calibration") == ["one", "two"]) == is_calibrated
    assert arguments.get("samples") == (2 if is_calibrated else None)


def page_of_the_guide() -> str:
    return (Path(os.environ["FEWBITS_ROOT"]) / "docs/guide/python.md").read_text()


def test_the_code_of_the_guide_runs(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs all Python code blocks of the page in order, in a directory that contains the model as `MODEL`."""
    text = page_of_the_guide()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 6
    (tmp_path / "MODEL").symlink_to(model)
    policy = (Path(os.environ["FEWBITS_ROOT"]) / "docs/guide/gate.md").read_text().split("```toml\n")[1]
    (tmp_path / "gate.toml").write_text(policy.split("```")[0])
    monkeypatch.chdir(tmp_path)
    quick_quantize, quick_evaluate = fewbits.quantize, fewbits.evaluate

    # The arguments on the page are for real models.
    def quantize(*positional: Any, **arguments: Any) -> Any:
        if arguments.get("method") != "rtn":
            arguments.update(QUICK)
        return quick_quantize(*positional, **arguments)

    monkeypatch.setattr(fewbits, "quantize", quantize)
    monkeypatch.setattr(fewbits, "evaluate", lambda *p, **a: quick_evaluate(*p, **{**a, "window": 128, "windows": 4}))
    monkeypatch.setattr(llmcompressor, "quantize", quantize)
    names: dict[str, Any] = {"__name__": "guide"}
    for block in blocks:
        exec(compile(block, "docs/guide/python.md", "exec"), names)
    assert (tmp_path / "OUT").is_dir()


@pytest.mark.parametrize("page", ["README.md", "python/README.md"])
def test_the_code_of_the_readmes_runs(page: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the examples as printed, except for fewer calibration samples and windows."""
    text = (Path(os.environ["FEWBITS_ROOT"]) / page).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    assert blocks
    (tmp_path / "MODEL").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    quantize, evaluate = fewbits.quantize, fewbits.evaluate
    monkeypatch.setattr(fewbits, "quantize", lambda *p, **a: quantize(*p, **{**a, **QUICK}))
    monkeypatch.setattr(fewbits, "evaluate", lambda *p, **a: evaluate(*p, **{**a, "window": 128, "windows": 4}))
    printed: list[Any] = []
    for block in blocks:
        exec(compile(block, page, "exec"), {"__name__": "readme", "print": printed.append})
    assert (tmp_path / "OUT/config.json").is_file()
    assert printed and all(0 < kl.mean < 1 for kl in printed)


def test_the_page_lists_every_function() -> None:
    text = page_of_the_guide()
    functions = [name for name in fewbits.__all__ if name[0].islower() and not name.startswith("__")]
    assert functions and all(f"{name}(" in text for name in functions)
