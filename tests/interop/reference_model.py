"""Loads a checkpoint with Hugging Face transformers and refuses any load that is not perfect.

transformers replaces a missing tensor by random values and continues. Therefore `load` fails on every key in the
loading report, and checks that exactly the modules that a checkpoint packs were read as packed.
"""

import contextlib
import json
import os
import re
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"

import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM, AutoModelForImageTextToText, Mistral4Config, Mistral4ForCausalLM)

# transformers has the class but does not list it.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)


class CheckpointError(Exception):
    """The checkpoint cannot serve as a reference; the message says why."""


@contextlib.contextmanager
def stop_on_error():
    """Turns a CheckpointError into one line on stderr and exit code 1."""
    try:
        yield
    except CheckpointError as error:
        sys.exit(f"error: {error}")


def load(model_dir, dequantize=False):
    """Returns the model on the CPU in float32 with eager attention, in evaluation mode.

    `dequantize` dequantizes the weights while loading instead of at the first forward pass: the only way in which
    compressed-tensors 0.18 to 0.20 reads asymmetric weights. That path multiplies in the dtype of the stored scales,
    so the scales are passed in f32 for the same accuracy as at the first forward pass.
    """
    model_dir = Path(model_dir)
    config = json.loads((model_dir / "config.json").read_text())
    quantization = config.get("quantization_config")
    kind = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    suffix = f".{packed_attribute(quantization)}"
    packed = {name.removesuffix(suffix)
              for name in tensor_names(model_dir) if name.endswith(suffix)}
    check_config(quantization, packed, dequantize)

    with tempfile.TemporaryDirectory() as directory:
        source = write_for_dequantizing(model_dir, Path(directory)) if dequantize else model_dir
        try:
            # gptqmodel prints a greeting, but stdout is for results.
            with contextlib.redirect_stdout(sys.stderr):
                model, report = kind.from_pretrained(
                    source, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager",
                    output_loading_info=True)
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"transformers cannot load {model_dir}: {error}") from error

    problems = {kind: sorted(map(str, keys)) for kind, keys in report.items() if keys}
    if problems:
        raise CheckpointError(f"loading {model_dir} reports {json.dumps(problems)}")
    check_modules(model, packed, packed_attribute(quantization), dequantize)
    round_embedding_scales(model, config)
    return model.eval()


def round_embedding_scales(model, config):
    """Rounds factors of embeddings to the dtype of the checkpoint, as transformers does if it runs the model in it."""
    dtype = getattr(torch, config.get("dtype", "float32"))
    for module in model.modules():
        if hasattr(module, "embed_scale"):
            module.embed_scale.copy_(module.embed_scale.to(dtype))


def packed_attribute(quantization):
    """The name of a module's packed codes."""
    if quantization is None:
        return "weight_packed"
    in_columns = quantization.get("quant_method") in ("awq", "gptq")
    # Tensors of bytes have the name of the float weight; only their scales distinguish them.
    bytes_too = quantization.get("format") != "pack-quantized"
    return "qweight" if in_columns else "weight_scale" if bytes_too else "weight_packed"


def logits(model, tokens, dtype=torch.float32):
    """Logits of one window, [length, vocab]; fails on any value that is not finite."""
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    if not torch.isfinite(output).all():
        raise CheckpointError("a logit is not finite")
    return output.to(dtype).contiguous()


def decoded_logits(model, tokens, dtype=torch.float32):
    """Logits from a cache, [length - length // 2 + 1, vocab]: the last of the first half, which is run at once, and
    those of every token after it."""
    half = len(tokens) // 2
    pieces, cache = [tokens[:half], *([token] for token in tokens[half:])], None
    rows = []
    with torch.inference_mode():
        for piece in pieces:
            output = model(input_ids=torch.tensor([piece]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            rows.append(output.logits[0, -1].to(dtype))
    logits = torch.stack(rows)
    if not torch.isfinite(logits).all():
        raise CheckpointError("a logit is not finite")
    return logits


def tensor_names(model_dir):
    """Names of all tensors in the safetensors files of a checkpoint."""
    names = []
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names.extend(file.keys())
    return names


def module_name(name):
    """The name of transformers' module for a tensor saved under `name`; other names are already those of modules."""
    for saved, module in (("language_model.model.", "model.language_model."), ("language_model.lm_head", "lm_head"),
                          ("vision_tower.", "model.vision_tower."), ("visual.", "model.visual."),
                          ("multi_modal_projector.", "model.multi_modal_projector."),
                          ("model.layers.", "model.language_model.layers."),
                          ("model.norm.", "model.language_model.norm."),
                          ("model.embed_tokens.", "model.language_model.embed_tokens.")):
        if name.startswith(saved):
            return module + name.removeprefix(saved)
    return name


def write_for_dequantizing(model_dir, directory):
    """Rewrites the checkpoint with `dequantize` set and the scales in f32."""
    config = json.loads((model_dir / "config.json").read_text())
    config["quantization_config"]["dequantize"] = True
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        tensors |= load_file(path)
    wide = {name: tensor.float() if name.endswith(".weight_scale") else tensor
            for name, tensor in tensors.items()}
    save_file(wide, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def check_config(quantization, packed, dequantize):
    """Refuses a quantization_config that transformers would accept and then misread."""
    if quantization is None:
        if packed:
            raise CheckpointError("packed tensors, but config.json has no quantization_config")
        if dequantize:
            raise CheckpointError("--dequantize, but config.json has no quantization_config")
        return
    if not packed:
        raise CheckpointError("config.json has a quantization_config, but no tensor is packed")
    if quantization["quant_method"] in ("awq", "gptq"):
        if dequantize:
            raise CheckpointError("--dequantize is for compressed-tensors")
        return
    if quantization.get("quantization_status") != "compressed":
        raise CheckpointError('quantization_config lacks "quantization_status": "compressed"')
    schemes = [group["weights"] for group in quantization["config_groups"].values()]
    if dequantize and any(scheme != schemes[0] for scheme in schemes):
        raise CheckpointError("with --dequantize transformers applies the first config group to "
                             "every tensor; these groups differ")


def check_modules(model, packed, attribute, dequantize):
    """The modules that hold packed weights must be exactly those that the checkpoint packs.

    Experts are an exception: in transformers they are not modules, and are dequantized while they load.
    """
    modules = dict(model.named_modules())
    # The modules of Llama 4 have the published names.
    if "vision_config" in model.config.to_dict() and model.config.model_type != "llama4":
        packed = {module_name(name) for name in packed}
    # Nemotron-H is published under a name that differs from its module's.
    packed = {re.sub(r"^backbone\.", "model.", name) for name in packed}
    if model.config.model_type == "hy_v3":
        packed = {name.replace(".mlp.shared_mlp.", ".mlp.shared_experts.") for name in packed}
    held = {name for name, module in modules.items() if hasattr(module, attribute)}
    fused = {name for name in packed if name not in modules and re.search(r"\.experts\.\d+\.", name)}
    expected = set() if dequantize else packed - fused
    if held != expected:
        raise CheckpointError(f"modules packed in only one of model and checkpoint: "
                             f"{sorted(held ^ expected)}")
