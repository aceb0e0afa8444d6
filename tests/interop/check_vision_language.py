"""The checks of vision-language models: a part of check.py, which describes the comparisons.

  float    logits of the text tower against those of transformers' class given text alone, at most 5e-6 of the largest
           apart (Gemma 4: 1e-5)
  loads    as for other models, by transformers' own class
  carried  everything except the text tower, and every file except the weights, equal byte for byte; and the
           configuration, except for what quantization adds

`check.py --only vision-language` runs only these.
"""

import json

from make_vision_language import VARIANTS
from reference_model import module_name

# Tolerance for logits in f32, somewhat above the difference between transformers' own f32 and f64 logits.
TOLERANCE = 5e-6
# The attention scores of these are not scaled, so that rounding has more effect.
STEEP = {"gemma4-vl": 1e-5, "gemma4-vl-small": 1e-5}
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


def run_all(check, only, whole):
    for name in VARIANTS:
        if only in f"vision-language float {name}":
            check.float_model(name, STEEP.get(name, TOLERANCE))
    for name, case, options, dequantize in [*QUANTIZED, *(MORE if whole else [])]:
        if only not in f"vision-language {name} {case}":
            continue
        check.quantized_model(name, case, options, dequantize)
        check.step(f"carried {name} {case}", lambda: carried(check, name, check.scratch / f"{name}-{case}"))
