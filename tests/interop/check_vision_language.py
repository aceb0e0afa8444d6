"""The checks of vision-language models: a part of check.py, which describes the comparisons.

  float    logits of the text tower from whole windows and from a cache, against those of transformers' class given text
           alone: the bound of check_families.py
  loads    as for other models, by transformers' own class
  carried  everything except the text tower, and every file except the weights, equal byte for byte; and the
           configuration, except for what quantization adds

`check.py --only vision-language` runs only these.
"""

import json
import shutil

import make_tiny
import reference_model
import torch
from check_families import LENGTHS, TOLERANCE, due, float_errors, logits_of, random_tokens, relative
from family_traps import scaled
from make_vision_language import MINISTRAL3, QWEN_TOKENS, VARIANTS
from reference_model import module_name
from safetensors.torch import load_file, save_file

# Tokens beyond the vocabulary stand for images.
TEXT_TOKENS = min(QWEN_TOKENS.values())
# Float models that are compared on every change; they take turns by the day.
PER_DAY = 5
QUICK = ["--samples", "4", "--seq-len", "64"]
# Model, name of the case, options of `quant quantize`, and whether transformers must dequantize. The cases in MORE run
# only with --whole.
QUANTIZED = [
    ("qwen2-vl", "awq-w4-g32", ["--group-size", "32", *QUICK], False),
    ("qwen2.5-vl-flat", "rtn-w4-g128", ["--method", "rtn"], False),
    ("qwen3-vl", "gptq-w4-g64", ["--method", "gptq", "--group-size", "64", *QUICK], False),
    ("gemma4-vl", "rtn-w4-g32", ["--method", "rtn", "--group-size", "32"], False),
    ("qwen3.5", "awq-w4-g32", ["--group-size", "32", *QUICK], False),
    ("qwen3.5-moe-published", "awq-w4-g32", ["--group-size", "32", *QUICK], False),
    ("mistral3", "rtn-w4-g32-ignored",
     ["--method", "rtn", "--group-size", "32", "--ignore", "*.layers.1.self_attn.*"], False),
    ("gemma3-vl", "awq-w4-g32", ["--group-size", "32", *QUICK], False),
    ("llava-llama", "rtn-w4-and-w8",
     ["--method", "rtn", "--override", "down_proj=w8a16-g64", "--override", "lm_head=w8a16"], False),
]
MORE = [
    ("llama4-vl", "rtn-w4-g32", ["--method", "rtn", "--group-size", "32"], False),
    ("gemma4-vl-small", "awq-w4-g32", ["--group-size", "32", *QUICK], False),
    ("qwen2-vl-modules", "rtn-w4-g32", ["--method", "rtn", "--group-size", "32"], False),
    ("qwen3-vl-tied", "awq-w4-g32-head", ["--group-size", "32", "--override", "lm_head=w4a16-g32", *QUICK], False),
    ("qwen2-vl", "format-awq-g32", ["--format", "awq", "--group-size", "32", *QUICK], False),
    ("mistral3", "format-gptq-g32", ["--format", "gptq", "--method", "gptq", "--group-size", "32", *QUICK], False),
    ("mistral3-modules", "rtn-w4-g64", ["--method", "rtn", "--group-size", "64"], False),
    ("mistral3-ministral3", "rtn-w4-g32", ["--method", "rtn", "--group-size", "32"], False),
    ("llava-modules", "awq-w8-channel", ["--scheme", "w8a16-channel", *QUICK], False),
    ("llava-mistral", "awq-w4-g32-asym", ["--scheme", "w4a16-g32-asym", *QUICK], True),
    ("llava-qwen2", "format-awq-g64", ["--format", "awq", "--group-size", "64", *QUICK], False),
]


# Mistakes in reading a text model inside another, as in check_families.py: a model, changes of the text model's
# configuration, and a change of weights.
TRAPS = {
    "windows of a text model one longer": ("gemma3-vl", {"sliding_window": 49}, None),
    "scores of a text model scaled by the width of heads": ("gemma3-vl", {"query_pre_attn_scalar": 40}, None),
    "norms of a text model multiply by what is stored": ("gemma3-vl", {}, scaled("language_model.model.norm", lambda w: w - 1)),
    "queries of a text model not scaled by position": ("mistral3-ministral3", {
        "rope_parameters": MINISTRAL3["text_config"]["rope_parameters"] | {"llama_4_scaling_beta": 0.0}}, None),
    "another base of a text model": ("qwen2-vl", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 5000.0, "mrope_section": [4, 6, 6]}}, None),
    "ups of a text model before gates": ("qwen3-vl-moe-published", {}, scaled(
        "experts.gate_up_proj", lambda w: w.unflatten(-1, (2, -1)).flip(-2).flatten(-2))),
    "keys of a text model without the weights of their norm": ("gemma4-vl", {}, scaled("self_attn.k_norm", torch.ones_like)),
}


def is_text(name):
    return module_name(name).startswith(("model.language_model.", "lm_head."))


def raw_tensors(model):
    """The tensors outside the text tower: type, shape and bytes by name."""
    found = {}
    for path in sorted(model.glob("*.safetensors")):
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            for name, entry in header.items():
                if name == "__metadata__" or is_text(name):
                    continue
                begin, end = entry["data_offsets"]
                file.seek(8 + length + begin)
                found[name] = entry["dtype"], entry["shape"], file.read(end - begin)
    return found


def carried(check, name, out):
    before, after = check.model(name), out
    tensors, written = raw_tensors(before), raw_tensors(after)
    if not tensors or tensors != written:
        return f"tensors differ: {sorted(tensors.keys() ^ written.keys())}", False
    config, new = (json.loads((model / "config.json").read_text()) for model in (before, after))
    new.pop("quantization_config")
    if "tie_word_embeddings" in new and "head" in out.name:
        for part in (config, new, config.get("text_config", {}), new.get("text_config", {})):
            part.pop("tie_word_embeddings", None)
    if config != new:
        return "config.json differs", False
    ours = {"config.json", "quant_report.json", "quantize_config.json", "model.safetensors"}
    files = {path.name for path in before.iterdir()} - ours
    missing = [name for name in files
               if not (after / name).exists() or (after / name).read_bytes() != (before / name).read_bytes()]
    return missing or f"{len(tensors)} tensors, {len(files)} files", not missing


def float_logits(check, name):
    model = check.model(name)
    windows = [random_tokens(length, end=TEXT_TOKENS) for length in LENGTHS]
    ours, theirs = float_errors(check, model, model, windows)
    return f"{ours} (transformers {theirs})", ours.within(theirs, TOLERANCE)


def trap(check, name, changes, change):
    model, wrong = check.model(name), check.scratch / "trap"
    shutil.rmtree(wrong, ignore_errors=True)
    shutil.copytree(model, wrong)
    make_tiny.edit_config(wrong / "config.json", lambda config: config["text_config"].update(changes))
    if change:
        path = wrong / "model.safetensors"
        tensors = {name: change(name, tensor) for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    window = random_tokens(LENGTHS[-1], end=TEXT_TOKENS)
    theirs = reference_model.logits(reference_model.load(model), window).numpy()
    apart = relative(logits_of(check, wrong, "logits", window), theirs)
    return f"{apart:.1e} of the largest logit", apart > 100 * TOLERANCE


def run_all(check, only, whole):
    for name in VARIANTS if whole or only else due(list(VARIANTS), PER_DAY):
        if only in f"vision-language float {name}":
            check.step(f"vision-language float {name}", lambda name=name: float_logits(check, name))
    for title, case in TRAPS.items() if whole or only else ():
        if only in f"vision-language trap: {title}":
            check.step(f"vision-language trap: {title}", lambda case=case: trap(check, *case))
    for name, case, options, dequantize in [*QUANTIZED, *(MORE if whole else [])]:
        if only not in f"vision-language {name} {case}":
            continue
        check.quantized_model(name, case, options, dequantize)
        check.step(f"carried {name} {case}", lambda: carried(check, name, check.scratch / f"{name}-{case}"))
