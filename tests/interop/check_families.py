"""Families of models, each against transformers: float and quantized logits, from whole windows and from a cache.

A tiny random model of each is run on windows shorter and longer than its attention's windows and than the lengths at
which its rotation changes. Our logits may be off by 2e-6 of the largest one, or by twice as much as transformers' own
in single precision are, from what it computes in double precision. Checkpoints quantized to 4 bits, by plain
rounding, AWQ and GPTQ, must load without a missing or unexpected key, and give our logits.
"""

import datetime
import json
import random
import shutil

import make_tiny
import numpy
import reference_model
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

TOLERANCE = 2e-6
# Quantized weights are the same numbers for both, so nothing but the order of sums differs.
QUANTIZED_TOLERANCE = 1e-5
LENGTHS = [24, 112]
OPTIONS = ["--group-size", "32"]
SAMPLES = ["--samples", "4", "--seq-len", "128"]
METHODS = {"rtn": ["--method", "rtn"], "awq": SAMPLES, "gptq": ["--method", "gptq", *SAMPLES]}
# Checked on every change; of the others some, by the day.
ALWAYS = ["gemma3", "phi3"]
PER_DAY = 6

# What a reader may get wrong, as another configuration of the same weights: logits must then be others.
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
TRAPS = {
    "a window one longer": ("gemma2", {"sliding_window": make_tiny.WINDOW + 1}),
    "no soft cap of scores": ("gemma2", {"attn_logit_softcapping": None}),
    "no soft cap of logits": ("gemma2", {"final_logit_softcapping": None}),
    "another scale of scores": ("gemma3", {"query_pre_attn_scalar": 40}),
    "one rotation for all layers": ("gemma3", {"rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 5000.0} for kind in (make_tiny.FULL, make_tiny.SLIDING)}}),
    "no residual multiplier": ("granite", {"residual_multiplier": 1.0}),
    "scores divided by the root of the width": ("granite", {"attention_multiplier": 24 ** -0.5}),
    "all layers turned": ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}),
    "halves for neighbors": ("ernie4_5", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "twice as many channels turned": ("glm4", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "no logit scale": ("cohere", {"logit_scale": 1.0}),
    "a part for a proportion": ("gemma4", {"rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.0, "rope_theta": 50000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}}}),
    "twice as many channels turned, after a gate": ("qwen3_5", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}),
    "another base of a part": ("qwen3_next", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}}),
    "norms side by side": ("gpt_neox-sequential", {"use_parallel_residual": True}),
}


def scaled(part, change):
    """Changes the tensors whose names have `part`."""
    return lambda name, tensor: change(tensor).contiguous() if part in name else tensor


def halves_swapped(rows):
    """Of every `2 rows` rows, the first `rows` behind the others."""
    return lambda tensor: tensor.unflatten(0, (-1, 2, rows)).flip(1).flatten(0, 2)


def gates_before_values(tensor):
    """Of every key head of Qwen3-Next, the rows of gates before those of values."""
    keys, values = (make_tiny.HYBRID[f"linear_{kind}_head_dim"] for kind in ("key", "value"))
    parts = tensor.unflatten(0, (2, -1)).split([2 * keys, 2 * values, 2 * values], dim=1)
    return torch.cat([parts[0], parts[2], parts[1]], dim=1).flatten(0, 1)


# The same as other weights under the same configuration: what a reader that takes them for something else computes.
WEIGHT_TRAPS = {
    "norms multiply by what is stored": ("qwen3_5", scaled("layernorm.weight", lambda w: w - 1)),
    "norms of heads multiply by what is stored": ("qwen3_5", scaled("q_norm.weight", lambda w: w - 1)),
    "norms after delta nets multiply by 1 more": ("qwen3_5", scaled("linear_attn.norm", lambda w: w + 1)),
    "gates before queries": ("qwen3_5", scaled("q_proj.weight", halves_swapped(make_tiny.HEAD))),
    "states do not decay": ("qwen3_5", scaled("A_log", lambda w: w - 20)),
    "steps without their bias": ("qwen3_5", scaled("dt_bias", torch.zeros_like)),
    "norms of Gemma 4 multiply by 1 more": ("gemma4", scaled("layernorm.weight", lambda w: w + 1)),
    "outputs of blocks not scaled": ("gemma4", scaled("layer_scalar", torch.ones_like)),
    "the first third for the second": ("lfm2", scaled("conv.in_proj", lambda w: w.unflatten(0, (3, -1))[[1, 0, 2]].flatten(0, 1))),
    "short convolutions turned around": ("lfm2", scaled("conv.conv", lambda w: w.flip(-1))),
    "short convolutions without biases": ("lfm2-bias", scaled("conv.conv.bias", torch.zeros_like)),
    "convolutions turned around": ("qwen3_5", scaled("conv1d", lambda w: w.flip(-1))),
    "convolutions of a token alone": ("qwen3_next", scaled("conv1d", lambda w: w * torch.eye(4)[3])),
    "`a` before `b`": ("qwen3_next", scaled("in_proj_ba", halves_swapped(2))),
    "gates before values": ("qwen3_next", scaled("in_proj_qkvz", gates_before_values)),
}


def chosen(which):
    """The families of this run: `all`, one by name, or those whose turn it is."""
    names = list(make_tiny.FAMILIES)
    if which == "all":
        return names
    if which in names:
        return [which]
    others = [name for name in names if name not in ALWAYS]
    day = datetime.datetime.now(datetime.timezone.utc).date().toordinal()
    return ALWAYS + [others[(PER_DAY * day + i) % len(others)] for i in range(PER_DAY)]


def run_all(check, which, only):
    # So small that threads cost more than they bring.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run_chosen(check, which, only)
    finally:
        torch.set_num_threads(threads)


def run_chosen(check, which, only):
    for name in chosen(which):
        if only in f"family {name}":
            Family(check, name).run()
    for title, (name, changes) in TRAPS.items() if which == "all" else ():
        if only in f"family trap: {title}":
            check.step(f"family trap: {title}", lambda: Family(check, name).trap(changes))
    for title, (name, change) in WEIGHT_TRAPS.items() if which == "all" else ():
        if only in f"family trap: {title}":
            check.step(f"family trap: {title}", lambda: Family(check, name).trap({}, change))


def relative(found, expected):
    """The largest difference, of the largest expected value."""
    return float(numpy.abs(found - expected).max() / numpy.abs(expected).max())


class Family:
    def __init__(self, check, name):
        self.check, self.name = check, name

    def run(self):
        model = self.check.model(self.name)
        self.check.step(f"family {self.name} float", lambda: self.float_logits(model))
        for method, options in METHODS.items():
            self.check.step(f"family {self.name} {method}", lambda: self.quantized_logits(model, method, options))

    def float_logits(self, model):
        """Whole windows and a cache, short and long, of what transformers computes in double precision."""
        single, double = reference_model.load(model), reference_model.load(model).double()
        ours, theirs = 0.0, 0.0
        for window in map(self.tokens, LENGTHS):
            for compute, command in [(reference_model.logits, "logits"), (reference_model.decoded_logits, "decoded")]:
                exact = compute(double, window, torch.float64).numpy()
                ours = max(ours, relative(self.ours(model, command, window), exact))
                theirs = max(theirs, relative(compute(single, window).numpy(), exact))
        return f"{ours:.1e} (transformers {theirs:.1e})", ours <= max(TOLERANCE, 2 * theirs)

    def quantized_logits(self, model, method, options):
        out = self.check.scratch / f"{self.name}-{method}"
        self.check.program("quant", "quantize", model, "-o", out, "--quiet", *OPTIONS, *options)
        window = self.tokens(LENGTHS[-1])
        model = reference_model.load(out)
        theirs = reference_model.logits(model, window).numpy()
        # Its weights are floats from the first run on.
        with torch.inference_mode():
            model.double()
        exact = reference_model.logits(model, window, torch.float64).numpy()
        theirs, ours = (relative(logits, exact) for logits in (theirs, self.ours(out, "logits", window)))
        return f"{ours:.1e} (transformers {theirs:.1e})", ours <= max(QUANTIZED_TOLERANCE, 2 * theirs)

    def trap(self, changes, change=None):
        """Our logits of a changed configuration, or of changed weights, which must not be transformers' of the right ones."""
        model = self.check.model(self.name)
        wrong = self.check.scratch / "trap"
        shutil.rmtree(wrong, ignore_errors=True)
        shutil.copytree(model, wrong)
        make_tiny.edit_config(wrong / "config.json", lambda config: config.update(changes))
        if change:
            path = wrong / "model.safetensors"
            tensors = {name: change(name, tensor) for name, tensor in load_torch(path).items()}
            save_torch(tensors, path, metadata={"format": "pt"})
        window = self.tokens(LENGTHS[-1])
        theirs = reference_model.logits(reference_model.load(model), window).numpy()
        apart = relative(self.ours(wrong, "logits", window), theirs)
        return f"{apart:.1e} of the largest logit", apart > 100 * TOLERANCE

    def ours(self, model, command, window):
        tokens, out = self.check.scratch / "family.json", self.check.scratch / "family.safetensors"
        tokens.write_text(json.dumps([window]))
        self.check.program("interop-dump", command, model, tokens, out)
        return load_file(out)["logits"][0]

    @staticmethod
    def tokens(length):
        """Random tokens: none that a model may take for padding."""
        generator = random.Random(length)
        return [generator.randrange(2, make_tiny.VOCABULARY) for _ in range(length)]
