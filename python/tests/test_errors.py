"""Exceptions: their class, their message, and its wording."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import pickle
import shutil
import struct
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import fewbits
import numpy
import pytest
from conftest import QUICK, read_safetensors, write_safetensors


def test_one_hierarchy() -> None:
    kinds = {
        fewbits.UsageError: ("usage", 2, ValueError),
        fewbits.InputError: ("input", 4, ValueError),
        fewbits.EnvironmentFailure: ("environment", 5, OSError),
        fewbits.NumericError: ("numeric", 6, ArithmeticError),
        fewbits.InternalError: ("internal", 70, RuntimeError),
        fewbits.InterruptedRun: ("interrupted", 75, Exception),
    }
    for kind, (category, exit_code, also) in kinds.items():
        assert issubclass(kind, fewbits.QuantError) and issubclass(kind, also)
        error = kind("what", "do", "a.weight", "/p")
        assert (error.category, error.exit_code) == (category, exit_code)
        assert (error.message, error.remedy, error.tensor, error.path) == ("what", "do", "a.weight", "/p")
        assert str(error) == "what\n  do" and str(kind("what")) == "what"
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind and (again.message, again.tensor) == ("what", "a.weight")
    assert fewbits.EnvironmentFailure("what").errno is None


@pytest.mark.parametrize(
    ("arguments", "message", "remedy"),
    [
        ({"group_size": 100}, "does not divide", "choose a group_size= that divides these widths"),
        ({"ignore": "dwon_proj"}, "ignore= `dwon_proj` matches no linear", "did you mean down_proj"),
        ({"method": "rtn", "samples": 4}, "samples= has no effect: method `rtn`", "choose a different method="),
        ({"method": "rtn", "calibration": "builtin"}, 'calibration="builtin" has no effect', "leave it out"),
        ({"scheme": "w4a16-g64", "group_size": 128}, 'scheme="w4a16-g64" contradicts group_size=', "specify group size and symmetry only once"),
        ({"preset": "awq-w4a16", "recipe": "x.toml"}, "preset= and recipe= cannot be combined", "omit one of them"),
        ({"scheme": "q4_k_m"}, "", 'add format="gguf"'),
        ({"format": "gguf", "alpha": 0.5}, 'alpha= has no effect with format="gguf"', "leave it out"),
        ({"pre": "qwen2"}, "pre= has no effect", 'add format="gguf"'),
        ({"override": ["down_proj"]}, "has no `=`", "override="),
        ({"threads": 0}, "threads=0", "1 to 1024"),
        ({"seed": -1}, "seed=-1 is negative", "positive number"),
        ({"recipe": "awq-w4a16"}, "awq-w4a16 does not exist", 'preset="awq-w4a16" selects the preset'),
        ({"recipe": "method: awq\nscheme: w4a16\n"}, "line 1: ", "correct the recipe, which must be TOML"),
    ],
)
def test_usage(model: Path, tmp_path: Path, arguments: dict[str, Any], message: str, remedy: str) -> None:
    with pytest.raises(fewbits.UsageError) as caught:
        fewbits.quantize(model, tmp_path / "out", **arguments)
    error = caught.value
    assert message in error.message and remedy in error.remedy, str(error)
    assert " --" not in str(error) and "‹" not in str(error), str(error)
    assert not (tmp_path / "out").exists()


def test_an_output_that_exists(model: Path, rtn: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(rtn, out)
    with pytest.raises(fewbits.UsageError, match="replace it with force=True") as caught:
        fewbits.quantize(model, out, method="rtn")
    assert caught.value.path == str(out)
    fewbits.quantize(model, out, method="rtn", force=True)


def test_input(model: Path, tmp_path: Path) -> None:
    with pytest.raises(fewbits.InputError) as caught:
        fewbits.inspect(tmp_path)
    assert caught.value.path is not None and str(tmp_path) in caught.value.message
    with pytest.raises(fewbits.InputError, match="neither an existing file nor a known text set"):
        fewbits.quantize(model, tmp_path / "out", calibration="no-such-set")
    with pytest.raises(fewbits.InputError, match=r"calibration:2: .*no string field `text`"):
        fewbits.quantize(model, tmp_path / "out", calibration=[{"text": "a"}, {"tokens": [1]}])
    with pytest.raises(fewbits.InputError, match="samples=, seq_len="):
        fewbits.quantize(model, tmp_path / "out", calibration=["too short"])
    # An unpaired surrogate is not valid text.
    with pytest.raises(fewbits.InputError, match="calibration:1: "):
        fewbits.quantize(model, tmp_path / "out", calibration=["\ud800"])
    config = json.loads((model / "config.json").read_text())
    shutil.copytree(model, tmp_path / "odd")
    (tmp_path / "odd/config.json").write_text(json.dumps({**config, "architectures": ["OddForCausalLM"]}))
    with pytest.raises(fewbits.InputError, match="OddForCausalLM"):
        fewbits.plan(tmp_path / "odd")


def test_environment(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(fewbits.EnvironmentFailure) as caught:
        fewbits.quantize(model, tmp_path / "file/out", method="rtn")
    assert isinstance(caught.value, OSError) and str(tmp_path) in str(caught.value.path)


def test_numeric(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    tensors = read_safetensors(broken / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    dtype, shape, data = tensors[name]
    tensors[name] = (dtype, shape, data[:10] + struct.pack("<e", float("nan")) + data[12:])
    write_safetensors(broken / "model.safetensors", tensors)
    with pytest.raises(fewbits.NumericError) as caught:
        fewbits.quantize(broken, tmp_path / "out", method="rtn")
    assert caught.value.tensor == name and caught.value.exit_code == 6
    assert isinstance(caught.value, ArithmeticError)


def test_rows_of_a_wrong_type(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(TypeError, match="put a single row into a list"):
        fewbits.quantize(model, out, calibration={"text": "a"})
    with pytest.raises(TypeError, match="row 1 of calibration="):
        fewbits.quantize(model, out, calibration=[object()])
    with pytest.raises(TypeError):
        fewbits.quantize(model, out, groupsize=64)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": ["awq", "gptq"]}, "method= must be a string, not list ['awq', 'gptq']"),
        ({"symmetric": "yes"}, "symmetric= must be True or False, not str 'yes'"),
        ({"force": 1}, "force= must be True or False, not int 1"),
        ({"damping": "much"}, "damping= must be a number, not str 'much'"),
        ({"block_size": 1.5}, "block_size= must be an integer, not float 1.5"),
        ({"seed": True}, "seed= must be an integer, not bool True"),
        ({"ignore": 5}, "ignore= must be a string or a list of strings, not int 5"),
        ({"ignore": ["a", 5]}, "ignore= must be a string or a list of strings, not list ['a', 5]"),
        ({"override": {"a": 8}}, "override= must be a dictionary of strings, a string or a list of strings, not dict"),
        ({"steps": {"awq": 5}}, "steps= must be a dictionary of dictionaries, not dict {'awq': 5}"),
        ({"calibration": 5}, "calibration= must be a string, a path or a list, not int 5"),
        ({"output": None}, "output= must be a string or a path, not None"),
        ({"on_event": 3}, "on_event= must be a function, not int 3"),
    ],
)
def test_a_wrong_type_is_named(model: Path, tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    given = {"model": model, "output": tmp_path / "out", "method": "gptq", **arguments}
    with pytest.raises(TypeError) as caught:
        fewbits.quantize(**given)
    assert str(caught.value).startswith(message)


def test_a_wrong_type_is_named_by_every_function(model: Path) -> None:
    any_: Any = fewbits
    calls = {
        "model= must be a string or a path, not int 5": lambda: any_.inspect(5),
        "preset= must be a string, not None": lambda: any_.preset_recipe(None),
        "threads= must be an integer, not str '2'": lambda: any_.plan(model, threads="2"),
        "window= must be an integer, not str '64'": lambda: any_.evaluate(model, text="builtin-heldout", window="64"),
        "kv= must be a string or an integer, not float 1.5": lambda: any_.evaluate(model, text="", kv=1.5),
        "results= must be a string, a path, an instance of Evaluation, ": lambda: any_.gate({"a": 5}, policy="p"),
        "results= must be ": lambda: any_.update_baseline(5, "b"),
        "max_length= must be an integer, not str 'x'": lambda: any_.Model(model, max_length="x"),
    }
    loaded: Any = fewbits.Model(model)
    calls |= {
        "temperature= must be a number, not str 'x'": lambda: loaded.generate(["a"], temperature="x"),
        "prompts= must be a list of strings or lists of integers, not str 'a'": lambda: loaded.generate("a"),
        "stop= must be a list of strings, not str 'end'": lambda: loaded.generate(["a"], stop="end"),
        "texts= must be a list of strings, not list [1]": lambda: loaded.encode([1]),
        "tokens= must be a list of integers, not list ['1']": lambda: loaded.decode(["1"]),
        "messages= must be a list of dictionaries, not list ['a']": lambda: loaded.chat_prompt(["a"]),
        "requests= must be a list of tuples of a list of integers and a list of integers, not list [([1], 2)]": lambda: loaded.log_likelihoods([([1], 2)]),
    }
    for message, call in calls.items():
        with pytest.raises(TypeError) as caught:
            call()
        assert str(caught.value).startswith(message)


def test_numbers_of_other_packages(model: Path, tmp_path: Path) -> None:
    any_: Any = fewbits
    ours: dict[str, Any] = {"method": "gptq", "group_size": 64, "damping": 0.25, "symmetric": True, "seed": 7}
    theirs = {
        "method": "gptq",
        "group_size": numpy.int64(64),
        "damping": numpy.array(0.25),
        "symmetric": numpy.True_,
        "seed": numpy.array(7),
    }
    expected = any_.plan(model, **ours).to_dict()
    assert any_.plan(model, **theirs).to_dict() == expected
    for value in (Fraction(1, 4), numpy.float32(0.25), numpy.float64(0.25)):
        assert any_.plan(model, **{**ours, "damping": value}).to_dict() == expected
    steps = {"gptq": {"damping": numpy.float32(0.25)}}
    assert any_.plan(model, **{**ours, "damping": None, "steps": steps}).to_dict() == expected
    loaded: Any = fewbits.Model(model, max_length=numpy.int32(256))
    tokens = loaded.encode(["The mill stood"])[0]
    assert loaded.decode(numpy.array(tokens)) == loaded.decode(tokens)
    assert loaded.generate([numpy.array(tokens)], max_new_tokens=numpy.int64(2), temperature=numpy.float32(1))
    refused = {
        "seed= must be an integer, not bool": {"seed": numpy.True_},
        "seed= must be an integer, not float64": {"seed": numpy.float64(1)},
        "seed= must be an integer, not ndarray array([1])": {"seed": numpy.array([1])},
        "seed= must be an integer, not ndarray array(1.5)": {"seed": numpy.array(1.5)},
        "damping= must be a number, not bool": {"damping": numpy.False_},
        "damping= must be a number, not complex128": {"damping": numpy.complex128(1)},
        "force= must be True or False, not int64": {"force": numpy.int64(1)},
    }
    for message, arguments in refused.items():
        with pytest.raises(TypeError) as caught:
            any_.quantize(model, tmp_path / "out", method="gptq", **arguments)
        assert str(caught.value).startswith(message)
    with pytest.raises(TypeError, match="ndarray .* cannot be passed as a setting"):
        any_.plan(model, method="gptq", steps={"gptq": {"damping": numpy.array([1, 2])}})


def test_names_of_datasets_on_a_hub(model: Path, tmp_path: Path) -> None:
    for call in (
        lambda: fewbits.quantize(model, tmp_path / "out", calibration="org/chats"),
        lambda: fewbits.evaluate(model, text="org/chats"),
    ):
        with pytest.raises(fewbits.InputError) as caught:
            call()
        assert "pass its rows: datasets.load_dataset('org/chats', split=...)" in caught.value.remedy
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import fewbits.transformers

    modules = {"lm_eval": ("lm_eval", "lm-eval"), "ray": ("ray", "ray")}
    for name, (package, extra) in modules.items():
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules, f"fewbits.{name}", raising=False)
        with pytest.raises(ImportError, match=rf"fewbits\.{name} needs .*pip install 'fewbits\[{extra}\]'"):
            importlib.import_module(f"fewbits.{name}")
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    with pytest.raises(ImportError, match=r"pip install 'fewbits\[transformers\]'"):
        fewbits.transformers.enable()
    assert not fewbits.transformers.is_enabled()
    extras = importlib.metadata.metadata("fewbits").get_all("Provides-Extra")
    assert extras is not None and {"lm-eval", "ray", "transformers"} <= set(extras)


def test_warnings_are_python_s(model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    (bare / "tokenizer.json").unlink()
    with pytest.warns(fewbits.FewbitsWarning, match="no tokenizer.json"):
        fewbits.quantize(bare, tmp_path / "out", method="rtn")
    with pytest.warns(fewbits.FewbitsWarning, match="use seq_len=[0-9]+ or less"), pytest.raises(fewbits.InputError):
        fewbits.quantize(model, tmp_path / "long", samples=1000, seq_len=100_000)


def test_a_hostile_template_does_not_end_this_process(model: Path, tmp_path: Path) -> None:
    """The template runs in a separate process, which is terminated."""
    hostile = tmp_path / "hostile"
    shutil.copytree(model, hostile)
    (hostile / "chat_template.jinja").write_text("{% set x = 'a' * 100000000000 %}{{ x }}")
    chat = [[{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello."}]]
    with pytest.raises(fewbits.QuantError) as caught:
        fewbits.quantize(hostile, tmp_path / "out", calibration=chat, **QUICK)
    assert caught.value.category in ("input", "environment")
