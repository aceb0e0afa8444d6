"""``plan``, ``quantize`` and ``inspect``."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import fewbits
import pytest
from conftest import BLOCKS, QUICK, digests


def test_a_plan_says_what_quantize_does(model: Path, rtn: Path) -> None:
    plan = fewbits.plan(model, method="rtn")
    assert plan.method == "rtn" and not plan.is_gguf
    assert plan.output_bytes == fewbits.inspect(rtn).bytes < plan.input_bytes
    assert plan.peak_memory_bytes and plan.seconds is not None
    (planned,) = plan.formats
    assert planned.format == "compressed-tensors"
    assert planned.bits_per_quantized_weight == pytest.approx(4.125, rel=1e-3)
    engines = {(one.engine.split(",")[0], one.ranks): one.loads for one in planned.engines}
    assert engines[("vLLM", 1)] == "yes"
    assert plan.to_dict()["schema"] == "quant-plan/2"
    assert "compressed-tensors" in repr(plan)
    assert "<table>" in plan._repr_html_()


def test_quantize_gives_the_bytes_of_the_command_line(model: Path, tmp_path: Path) -> None:
    done = fewbits.quantize(model, tmp_path / "api", scheme="w4a16-g64", ignore="o_proj", **QUICK)
    assert isinstance(done, fewbits.Quantized)
    line = ["--scheme", "w4a16-g64", "--ignore", "o_proj", "--samples", "4", "--seq-len", "64", "--quiet"]
    command = [sys.executable, "-m", "fewbits", "quantize", str(model), "-o", str(tmp_path / "cli"), *line]
    subprocess.run(command, check=True, capture_output=True)
    assert digests(tmp_path / "api") == digests(tmp_path / "cli")

    assert done.method == "awq" and done.path == str(tmp_path / "api")
    assert done.bytes_after < done.bytes_before and done.seconds > 0
    assert "awq" in done.steps and done.peak_memory_bytes
    (output,) = done.outputs
    assert output.worst_tensor is not None and 0 < output.worst_tensor.relative_rms < 1
    assert done.to_dict()["schema"] == "quant-summary/2"
    assert done.path in repr(done)


def test_a_notebook_shows_the_report(model: Path, tmp_path: Path) -> None:
    out, report = tmp_path / "<out>", tmp_path / "report.html"
    done = fewbits.quantize(model, out, method="rtn", report=report)
    shown = done._repr_html_()
    assert shown.startswith("<iframe sandbox") and "srcdoc=" in shown
    assert done.outputs[0].report_page() == report.read_text()
    assert "<out>" not in report.read_text() and "&lt;out&gt;" in report.read_text()
    (out / "quant_report.json").unlink()
    assert done._repr_html_().startswith("<pre>") and "<out>" not in done._repr_html_()


def test_several_formats_in_one_run(model: Path, tmp_path: Path) -> None:
    formats = ["compressed-tensors", "gptq"]
    done = fewbits.quantize(model, tmp_path / "out", method="rtn", format=formats, symmetric=True)
    assert [one.format for one in done.outputs] == formats
    assert [Path(one.path).name for one in done.outputs] == formats
    methods = [fewbits.inspect(one.path).quant_method for one in done.outputs]
    assert methods == ["compressed-tensors", "gptq"]


def test_a_recipe_is_a_file_or_its_text(model: Path, tmp_path: Path) -> None:
    text = fewbits.preset_recipe("gptq-w4a16").replace("samples = 64", "samples = 4").replace("length = 512", "length = 64")
    assert "samples = 4" in text and "length = 64" in text
    file = tmp_path / "mine.toml"
    file.write_text(text)
    fewbits.quantize(model, tmp_path / "file", recipe=file)
    fewbits.quantize(model, tmp_path / "text", recipe=text)
    assert digests(tmp_path / "file") == digests(tmp_path / "text")
    assert fewbits.plan(model, recipe=text).method == "gptq"
    with pytest.raises(fewbits.UsageError, match=r"\[calibration\] of the recipe has no effect"):
        fewbits.plan(model, recipe=text, method="rtn")


def test_overrides_and_channels(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    fewbits.quantize(model, out, method="rtn", group_size="channel", override={"down_proj": "w8a16-g32"})
    stored = {one.module.split(".")[-1]: one.stored for one in fewbits.inspect(out).linears}
    assert stored["down_proj"] == "w8a16-g32-sym" and stored["up_proj"] == "w4a16-channel-sym"


def test_a_gguf_file(model: Path, tmp_path: Path) -> None:
    done = fewbits.quantize(model, tmp_path / "a.gguf", format="gguf", scheme="Q8_0")
    assert isinstance(done, fewbits.Gguf)
    assert Path(done.path).read_bytes()[:4] == b"GGUF"
    assert done.mixture == "Q8_0" and done.types["Q8_0"] > 0 and done.bits_per_weight > 8
    assert done.bytes_after < done.bytes_before and "Q8_0" in repr(done)
    plan = fewbits.plan(model, format="gguf", scheme="Q8_0")
    assert plan.is_gguf and plan.method is None and plan.formats[0].format == "gguf"
    assert plan.peak_memory_bytes is not None and plan.smallest_budget_bytes == plan.peak_memory_bytes


def test_a_float_checkpoint(model: Path, tmp_path: Path) -> None:
    source = fewbits.quantize(model, tmp_path / "a.gguf", format="gguf", scheme="Q8_0")
    done = fewbits.quantize(source.path, tmp_path / "floats", format="safetensors", scheme="bf16")
    assert isinstance(done, fewbits.Floats)
    assert done.dtype == "BF16" and done.dequantized_from == "Q8_0" and done.types["BF16"] > 0
    assert fewbits.inspect(done.path).quant_method is None and "BF16" in repr(done)


def test_inspect(model: Path, rtn: Path) -> None:
    float_model, packed = fewbits.inspect(model), fewbits.inspect(rtn)
    assert (float_model.family, float_model.layers) == ("llama", BLOCKS)
    assert float_model.quant_method is None and packed.quant_method == "compressed-tensors"
    assert len(packed.linears) == 7 * BLOCKS
    assert {one.stored for one in packed.linears} == {"w4a16-g128-sym"}
    assert sum(one.bytes for one in packed.tensors) == packed.bytes < float_model.bytes
    assert "<table>" in packed._repr_html_() and "llama" in repr(packed)


TEXTS = [f"The mill stood by the river, and in year {year} nobody knew who owned it. " * 20 for year in range(30)]


def test_all_kinds_of_calibration_texts(model: Path, tmp_path: Path) -> None:
    import json

    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    rows = [{"text": text, "id": number, "odd": object()} for number, text in enumerate(TEXTS)]
    kinds: dict[str, Any] = {
        "path": file,
        "name": str(file),
        "strings": TEXTS,
        "iterator": iter(TEXTS),
        "rows": rows,
        "generator": (row for row in rows),
    }
    made = {}
    for kind, calibration in kinds.items():
        out = tmp_path / kind
        fewbits.quantize(model, out, calibration=calibration, **QUICK)
        made[kind] = digests(out)
    assert all(one == made["path"] for one in made.values())
    fewbits.quantize(model, tmp_path / "builtin", calibration="builtin", **QUICK)
    fewbits.quantize(model, tmp_path / "default", **QUICK)
    assert digests(tmp_path / "builtin") == digests(tmp_path / "default") != made["path"]


def test_conversations(model: Path, tmp_path: Path) -> None:
    import json
    import shutil

    chatty = tmp_path / "chatty"
    shutil.copytree(model, chatty)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (chatty / "chat_template.jinja").write_text(template)
    chats = [
        [{"role": "user", "content": f"What is {n} and {n}?"}, {"role": "assistant", "content": TEXTS[n]}]
        for n in range(20)
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    kinds: dict[str, Any] = {"file": file, "lists": chats, "rows": [{"messages": chat} for chat in chats]}
    made = {}
    for kind, calibration in kinds.items():
        fewbits.quantize(chatty, tmp_path / kind, calibration=calibration, mask="prompts", **QUICK)
        made[kind] = digests(tmp_path / kind)
    assert made["lists"] == made["file"] == made["rows"]
    long = [{"role": "user", "content": "Tell me."}, {"role": "assistant", "content": " ".join(TEXTS)}]
    fewbits.quantize(chatty, tmp_path / "one", calibration=long, **QUICK)


def test_any_number_of_threads_gives_the_same_bytes(model: Path, tmp_path: Path) -> None:
    for threads in (1, 3):
        fewbits.quantize(model, tmp_path / str(threads), threads=threads, **QUICK)
    assert digests(tmp_path / "1") == digests(tmp_path / "3")


def test_two_threads_quantize_at_once(model: Path, tmp_path: Path) -> None:
    failed: list[BaseException] = []

    def work(name: str) -> None:
        try:
            fewbits.quantize(model, tmp_path / name, **QUICK)
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failed and digests(tmp_path / "a") == digests(tmp_path / "b")


def test_presets_are_recipes(model: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(fewbits.preset_recipe("gptq-w4a16"))
    assert fewbits.plan(model, recipe=recipe).to_dict() == fewbits.plan(model, preset="gptq-w4a16").to_dict()
