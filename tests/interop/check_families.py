"""Families of models, each against transformers: float and quantized logits, from whole windows and from a cache.

A tiny random model of each is run on windows shorter and longer than its attention's windows and than the lengths at
which its rotation changes. Our logits may be off by 2e-6 of the largest one, or by twice as much as transformers' own
in single precision are, from what it computes in double precision. Checkpoints quantized to 4 bits, by plain
rounding and by AWQ, must load without a missing or unexpected key, and give our logits.
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

TOLERANCE = 2e-6
# Quantized weights are the same numbers for both, so nothing but the order of sums differs.
QUANTIZED_TOLERANCE = 1e-5
LENGTHS = [24, 112]
OPTIONS = ["--group-size", "32"]
METHODS = {"rtn": ["--method", "rtn"], "awq": ["--samples", "4", "--seq-len", "128"]}
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
    "norms side by side": ("gpt_neox-sequential", {"use_parallel_residual": True}),
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
        theirs = reference_model.logits(reference_model.load(out), window).numpy()
        apart = relative(self.ours(out, "logits", window), theirs)
        return f"{apart:.1e}", apart <= QUANTIZED_TOLERANCE

    def trap(self, changes):
        """Our logits of the weights under a changed configuration, which must not be transformers' of the right one."""
        model = self.check.model(self.name)
        wrong = self.check.scratch / "trap"
        shutil.rmtree(wrong, ignore_errors=True)
        shutil.copytree(model, wrong)
        make_tiny.edit_config(wrong / "config.json", lambda config: config.update(changes))
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
