"""Times AWQ, GPTQ or SmoothQuant by llm-compressor on the calibration tokens of `quant`.

Uses llm-compressor's defaults: one window per batch, the sequential pipeline, the min-max observer, and its mappings
for the architecture. Options as in peer.py. `awq` is AWQModifier (duo scaling, 20 ratios), then rounding to nearest;
`gptq` is GPTQModifier; `smoothquant` is SmoothQuantModifier, then rounding to nearest with the scheme W8A8, regardless
of the given bits and groups; `rtn` is QuantizationModifier alone.

`--set scheme=NAME` uses the weight format of a preset of compressed-tensors (NVFP4A16, FP8_DYNAMIC, …) instead of bits
and groups, and leaves activations as floats; `--set observer=NAME` selects a different observer of these weights.

In models with experts, every expert is calibrated on all tokens, which is the default, or with `--set experts=routed` on
the tokens that are routed to it.
"""

import peer

METHODS = ["awq", "gptq", "smoothquant", "rtn"]
args = peer.arguments(__doc__, METHODS)
PRESET, OBSERVER, EXPERTS = (args.settings.pop(name, None) for name in ["scheme", "observer", "experts"])

import torch  # noqa: E402
from compressed_tensors.quantization import (  # noqa: E402
    QuantizationArgs, QuantizationScheme, preset_name_to_scheme)
from llmcompressor import oneshot  # noqa: E402
from llmcompressor.modeling.moe.linearize import linearize_moe  # noqa: E402
from llmcompressor.modifiers.gptq import GPTQModifier  # noqa: E402
from llmcompressor.modifiers.quantization import QuantizationModifier  # noqa: E402
from llmcompressor.modifiers.transform.awq import AWQModifier  # noqa: E402
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier  # noqa: E402
from llmcompressor.pipelines.cache import IntermediatesCache  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: E402


def grid(group_size):
    """The number format of the weights."""
    if group_size == "channel":
        return QuantizationArgs(num_bits=args.bits, symmetric=True, strategy="channel")
    return QuantizationArgs(
        num_bits=args.bits, symmetric=True, strategy="group", group_size=int(group_size))


def groups():
    """The formats of the weights, and the linear layers that each applies to."""
    if PRESET is not None:
        weights = preset_name_to_scheme(PRESET, ["Linear"]).weights
        if OBSERVER is not None:
            weights = weights.model_copy(update={"observer": OBSERVER})
        return {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=grid(args.group_size))}
    if args.channel:
        targets = [f"re:.*{name}$" for name in args.channel]
        groups["group_1"] = QuantizationScheme(targets=targets, weights=grid("channel"))
    return groups


def recipe():
    """llm-compressor's recipe for the method."""
    settings = {name: float(value) for name, value in args.settings.items()}
    ignore = ["lm_head"]
    if args.method == "awq":
        return [AWQModifier(**settings), QuantizationModifier(config_groups=groups(), ignore=ignore)]
    if args.method == "gptq":
        return [GPTQModifier(config_groups=groups(), ignore=ignore, **settings)]
    if args.method == "rtn":
        return [QuantizationModifier(config_groups=groups(), ignore=ignore, **settings)]
    w8a8 = QuantizationModifier(targets="Linear", scheme="W8A8", ignore=ignore)
    return [SmoothQuantModifier(**settings), w8a8]


# llm-compressor pins cached inputs for a GPU even if there is none, and fails without a driver.
IntermediatesCache.pin_memory = lambda *_: None
torch.set_num_threads(args.threads)

checkpoint = peer.Checkpoint(args.model)
batches = DataLoader([{"input_ids": torch.tensor([w])} for w in peer.windows(args)], batch_size=None)
run = peer.Run(args)
model = AutoModelForCausalLM.from_pretrained(checkpoint.directory, dtype=getattr(torch, args.dtype))
linearize_moe(model)
checkpoint.verify(model)
run.done()
oneshot(
    model=model, processor=PreTrainedTokenizerFast(tokenizer_file=str(args.model / "tokenizer.json")),
    dataset=batches, recipe=recipe(), num_calibration_samples=args.samples,
    max_seq_length=args.seq_len, moe_calibrate_all_experts=EXPERTS != "routed")
run.done()
model.save_pretrained(args.out, save_compressed=True)
run.done()
run.finish(["llmcompressor", "compressed-tensors", "transformers", "torch"])
