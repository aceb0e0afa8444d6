"""Compares each model family with transformers: float and quantized logits, from whole windows and from a cache.

A tiny random model of each family is run on windows that are shorter, and on windows that are longer, than its
attention windows and than the lengths at which its rotation changes. quant's logits may differ from transformers' result
in double precision by 2e-6 of the largest logit, or by twice as much as transformers' own logits in single precision.
Since the largest of many errors varies randomly, it is taken over several windows of each length. If a token is so
ill-conditioned that quant's error is larger nevertheless, it must be at most 1.5 times transformers' largest error on the
same window over copies of the model with slightly different weights. Checkpoints quantized to 4 bits, by plain rounding,
AWQ and GPTQ, must load without a missing or unexpected key, and give quant's logits within the same bounds, with 1e-5
instead of 2e-6; the families of IN_COLUMNS also in the AWQ and GPTQ formats, which gptqmodel reads.
"""

import contextlib
import copy
import datetime
import json
import math
import random
import re
import shutil

import make_tiny
import numpy
import reference_model
import torch
from family_traps import REFERENCE_TRAPS, TENSOR_TRAPS, TRAPS, WEIGHT_TRAPS
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

TOLERANCE = 2e-6
# Both programs use the same dequantized weights, so only the order of sums differs.
QUANTIZED_TOLERANCE = 1e-5
# If quant's largest error exceeds the tolerance, its maximum ratio to transformers' largest error in single precision.
RATIO = 2
# The number of copies of a model with an ill-conditioned token, and the largest relative change of their weights.
# quant's window is the worst of many, so it may have a somewhat larger error than the worst copy.
COPIES, CHANGE = 16, 1e-6
OF_COPIES = 1.5
# Quantized models with a larger ratio: the states of delta nets amplify differences.
QUANTIZED_RATIOS = {"qwen3_next-unnormalized": 4}
LENGTHS = [24, 112]
# Windows of each length for float models.
WINDOWS = 3
OPTIONS = ["--group-size", "32"]
SAMPLES = ["--samples", "4", "--seq-len", "128"]
METHODS = {"rtn": ["--method", "rtn"], "awq": SAMPLES, "gptq": ["--method", "gptq", *SAMPLES]}
# The formats that gptqmodel reads, and the families whose quantized checkpoints it reads in them.
FORMATS = {"format-awq": ["--format", "awq", *SAMPLES], "format-gptq": ["--method", "gptq", "--format", "gptq", *SAMPLES]}
IN_COLUMNS = [
    "llama-yarn", "smollm3", "granite", "ministral3", "seed_oss", "ernie4_5", "hunyuan-dense", "gemma2", "gemma3", "gemma4",
    "olmo2", "olmo3", "exaone4", "glm", "glm4", "phi3", "phi", "cohere", "cohere2", "internlm3", "lfm2", "falcon_h1",
    "nemotron_h", "granitemoehybrid"]
# gptqmodel multiplies in half precision.
COLUMNS_TOLERANCE = 1e-2
# Checked on every change; the other families take turns by the day.
ALWAYS = ["gemma3", "phi3"]
PER_DAY = 6
# Families whose quantized checkpoints transformers cannot read. An independent implementation dequantizes the weights,
# and transformers runs the resulting float model.
THROUGH_FLOATS = ["gpt_oss", "gpt_oss-mxfp4", "gpt_oss-floats", "granitemoe", "gemma4-experts", "gpt2", "gpt2-scaled",
                  "gpt2-bare", "granitemoehybrid-experts", "mistral4", *make_tiny.BUILT_AS_LLAMA]
# Models whose published checkpoints are quantized. Their values are computed from codes and scales without quant.
STORED_QUANTIZED = ["gpt_oss-mxfp4", "deepseek_v3-fp8"]


def chosen(which):
    """The families of this run: all of them (`all`), one by name, or those that are due today."""
    names = list(make_tiny.FAMILIES)
    if which == "all":
        return names
    if which in names:
        return [which]
    return ALWAYS + due([name for name in names if name not in ALWAYS], PER_DAY)


def due(names, count):
    """The `count` names whose turn it is today."""
    day = datetime.datetime.now(datetime.timezone.utc).date().toordinal()
    return [names[(count * day + i) % len(names)] for i in range(min(count, len(names)))]


def run_all(check, which, only):
    # Threads cost more than they save in such small models.
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
    for title, (name, changes, *zeroed) in TRAPS.items() if which == "all" else ():
        if only in f"family trap: {title}":
            check.step(f"family trap: {title}", lambda: Family(check, name).trap(changes, *zeroed))
    for title, (name, change) in WEIGHT_TRAPS.items() if which == "all" else ():
        if only in f"family trap: {title}":
            check.step(f"family trap: {title}", lambda: Family(check, name).trap({}, change=change))
    for title, (name, changes, whole) in TENSOR_TRAPS.items() if which == "all" else ():
        if only in f"family trap: {title}":
            check.step(f"family trap: {title}", lambda: Family(check, name).trap(changes, whole=whole))
    for title, (name, mistake) in REFERENCE_TRAPS.items() if which == "all" else ():
        if only in f"family trap: {title}":
            check.step(f"family trap: {title}", lambda: Family(check, name).trap({}, mistake=mistake))


def relative(found, expected):
    """The largest difference, relative to the largest expected value; infinite if a value is not finite."""
    difference = float(numpy.abs(found - expected).max() / numpy.abs(expected).max())
    return difference if math.isfinite(difference) else math.inf


class Errors:
    """The largest difference from the exact logits, relative to the largest exact logit."""

    def __init__(self):
        self.largest, self.where = 0.0, None

    def add(self, found, exact, where=None):
        """Adds the error of the logits of a window; `where` identifies it."""
        error = relative(found, exact)
        if error >= self.largest:
            self.largest, self.where = error, where

    def within(self, others, tolerance, ratio=RATIO):
        """Whether the errors are at most the tolerance, or `ratio` times the errors `others`."""
        return math.isfinite(others.largest) and self.largest <= max(tolerance, ratio * others.largest)

    def __str__(self):
        return f"{self.largest:.1e}"


def float_errors(check, model, reference, windows):
    """The errors of quant's and of transformers' logits in single precision, from whole windows and from a cache, with
    respect to transformers' logits of `reference` in double precision."""
    single, double = reference_model.load(reference), reference_model.load(reference).double()
    ours, theirs = Errors(), Errors()
    for window in windows:
        for compute, command in [(reference_model.logits, "logits"), (reference_model.decoded_logits, "decoded")]:
            exact = compute(double, window, torch.float64).numpy()
            ours.add(logits_of(check, model, command, window), exact, (compute, window))
            theirs.add(compute(single, window).numpy(), exact)
    return ours, theirs


def errors_of_copies(exact, compute, window):
    """The errors of transformers' logits in single precision, over copies of the model `exact`, which is in double
    precision, with slightly different weights."""
    errors = Errors()
    for seed in range(COPIES):
        # transformers refuses this method of quantized models, although these weights are floats by now.
        single, generator = torch.nn.Module.float(copy.deepcopy(exact)), torch.Generator().manual_seed(seed)
        with torch.inference_mode():
            for weight in filter(torch.is_floating_point, single.parameters()):
                weight.mul_(1 + CHANGE * (2 * torch.rand(weight.shape, generator=generator) - 1))
        found = compute(single, window).numpy()
        errors.add(found, compute(single.double(), window, torch.float64).numpy())
    return errors


def logits_of(check, model, command, window):
    """quant's logits of a window."""
    tokens, out = check.scratch / "family.json", check.scratch / "family.safetensors"
    tokens.write_text(json.dumps([window]))
    check.program("interop-dump", command, model, tokens, out)
    return load_file(out)["logits"][0]


def random_tokens(length, seed=0, end=make_tiny.VOCABULARY):
    """Random tokens, without any that a model may treat as padding."""
    generator = random.Random(length + 1000 * seed)
    return [generator.randrange(2, end) for _ in range(length)]


class Family:
    def __init__(self, check, name):
        self.check, self.name = check, name

    def run(self):
        model = self.check.model(self.name)
        self.check.step(f"family {self.name} float", lambda: self.float_logits(model))
        if self.name == "gpt_oss-mxfp4":
            self.check.step(f"family {self.name} bits", lambda: self.mxfp4_bits(model))
        for method, options in METHODS.items():
            self.check.step(f"family {self.name} {method}", lambda: self.quantized_logits(model, method, options))
        for method, options in FORMATS.items() if self.name in IN_COLUMNS else ():
            self.check.step(f"family {self.name} {method}", lambda: self.columns_logits(model, method, options))

    def float_logits(self, model):
        """Compares whole windows and a cache, short and long, with transformers' result in double precision."""
        windows = [random_tokens(length, seed) for length in LENGTHS for seed in range(WINDOWS)]
        reference = self.reference(model)
        ours, theirs = float_errors(self.check, model, reference, windows)
        if ours.within(theirs, TOLERANCE):
            return f"{ours} (transformers {theirs})", True
        copies = errors_of_copies(reference_model.load(reference).double(), *ours.where)
        return f"{ours} (transformers {theirs}, copies {copies})", ours.within(copies, TOLERANCE, OF_COPIES)

    def columns_logits(self, model, method, options):
        out = self.check.scratch / f"{self.name}-{method}"
        self.check.program("quant", "quantize", model, "-o", out, "--quiet", *OPTIONS, *options)
        window = random_tokens(LENGTHS[-1])
        theirs = reference_model.logits(reference_model.load(out), window).numpy()
        apart = relative(logits_of(self.check, out, "logits", window), theirs)
        return f"{apart:.1e}", apart <= COLUMNS_TOLERANCE

    def quantized_logits(self, model, method, options):
        out = self.check.scratch / f"{self.name}-{method}"
        again = ["--requantize"] if self.name in STORED_QUANTIZED else []
        self.check.program("quant", "quantize", model, "-o", out, "--quiet", *OPTIONS, *options, *again)
        window = random_tokens(LENGTHS[-1])
        model = reference_model.load(self.as_floats(out) if self.name in THROUGH_FLOATS else out)
        theirs = reference_model.logits(model, window).numpy()
        # The first forward pass replaced the packed weights by floats.
        with torch.inference_mode():
            model.double()
        exact = reference_model.logits(model, window, torch.float64).numpy()
        errors = Errors(), Errors()
        for error, logits in zip(errors, (logits_of(self.check, out, "logits", window), theirs)):
            error.add(logits, exact)
        ours, theirs = errors
        if ours.within(theirs, QUANTIZED_TOLERANCE, QUANTIZED_RATIOS.get(self.name, RATIO)):
            return f"{ours} (transformers {theirs})", True
        copies = errors_of_copies(model, reference_model.logits, window)
        return f"{ours} (transformers {theirs}, copies {copies})", ours.within(copies, QUANTIZED_TOLERANCE, OF_COPIES)

    def reference(self, model):
        """The model that transformers runs. If the model is stored quantized, this is a model with the same values
        as floats; for InternLM2, it is an equivalent Llama."""
        if self.name == "gpt_oss-mxfp4":
            return self.check.model("gpt_oss-floats")
        if self.name in make_tiny.BUILT_AS_LLAMA:
            return self.as_llama(model)
        if self.name != "deepseek_v3-fp8":
            return model
        floats = self.check.scratch / f"{model.name}-floats"
        shutil.rmtree(floats, ignore_errors=True)
        shutil.copytree(model, floats)
        make_tiny.edit_config(floats / "config.json", lambda config: config.pop("quantization_config"))
        stored = load_torch(model / "model.safetensors")
        for name in [name for name in stored if name.endswith("_scale_inv")]:
            scales, weight = stored.pop(name), name.removesuffix("_scale_inv")
            rows, columns = stored[weight].shape
            spread = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
            stored[weight] = stored[weight].float() * spread
        save_file({name: tensor.numpy() for name, tensor in stored.items()}, floats / "model.safetensors",
                  metadata={"format": "pt"})
        return floats

    def as_llama(self, model):
        """Converts InternLM2, whose code is not in transformers, to an equivalent Llama."""
        llama = self.check.scratch / f"{model.name}-llama"
        shutil.rmtree(llama, ignore_errors=True)
        llama.mkdir()
        config = json.loads((model / "config.json").read_text())
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        width, repeat = config["hidden_size"] // heads, heads // kv_heads
        stored = {name: tensor for path in model.glob("*.safetensors") for name, tensor in load_file(path).items()}
        config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": config.pop("bias"),
                   "head_dim": width}
        (llama / "config.json").write_text(json.dumps(config))
        group = numpy.arange((repeat + 2) * width)
        at = {"q": group < repeat * width, "v": group >= (repeat + 1) * width}
        at["k"] = ~(at["q"] | at["v"])
        names = {"attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj",
                 "feed_forward.w3": "mlp.up_proj", "attention_norm": "input_layernorm",
                 "ffn_norm": "post_attention_layernorm", "model.tok_embeddings": "model.embed_tokens", "output": "lm_head"}
        tensors = {}
        for name, tensor in stored.items():
            module, _, kind = name.rpartition(".")
            if module.endswith("attention.wqkv"):
                for letter, rows in at.items():
                    tensors[f"{module.replace('attention.wqkv', f'self_attn.{letter}_proj')}.{kind}"] = (
                        tensor[numpy.tile(rows, kv_heads)])
                continue
            inside = re.fullmatch(r"(model\.layers\.\d+\.)(.*)", module)
            module = inside[1] + names[inside[2]] if inside else names.get(module, module)
            tensors[f"{module}.{kind}"] = tensor
        save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
        return llama

    def as_floats(self, model):
        """Writes a float checkpoint with joined experts from a packed one, dequantized by the independent
        implementation."""
        floats, read = self.check.scratch / f"{model.name}-floats", self.check.scratch / "packed.safetensors"
        shutil.rmtree(floats, ignore_errors=True)
        floats.mkdir()
        self.check.script("independent_pack", model, "--out", read)
        tensors = {name: tensor.float().numpy() for path in model.glob("*.safetensors")
                   for name, tensor in load_torch(path).items()}
        packed = {name for name in tensors if name.endswith((".weight_packed", ".weight_scale", ".weight_shape"))}
        tensors = {name: tensor for name, tensor in tensors.items() if name not in packed} | load_file(read)
        config = json.loads((model / "config.json").read_text())
        del config["quantization_config"]
        (floats / "config.json").write_text(json.dumps(config))
        if config["model_type"] in ("gpt2", "internlm2"):
            if config["model_type"] == "gpt2":
                # The rows of packed weights are outputs.
                packed = load_file(read)
                tensors |= {name: numpy.ascontiguousarray(weight.T) for name, weight in packed.items()}
            save_file(tensors, floats / "model.safetensors", metadata={"format": "pt"})
            return self.as_llama(floats) if config["model_type"] == "internlm2" else floats
        if config["model_type"] == "mistral4":
            self.join_experts(tensors)
            save_file(tensors, floats / "model.safetensors", metadata={"format": "pt"})
            return floats
        is_granite = config["model_type"] in ("granitemoe", "granitemoehybrid")
        is_gemma = config["model_type"] == "gemma4_text"
        linears = ("gate_proj", "up_proj", "down_proj")
        count = config["num_experts" if is_gemma else "num_local_experts"]
        for layer in range(config["num_hidden_layers"]):
            mlp = f"model.layers.{layer}.{'block_sparse_moe.' if is_granite else '' if is_gemma else 'mlp.'}"

            def take(linear, what):
                names = [f"{mlp}experts.{e}.{linear}.{what}" for e in range(count)]
                return numpy.stack([tensors.pop(name) for name in names])

            if is_gemma:
                gate, up, down = (take(linear, "weight") for linear in linears)
                tensors[f"{mlp}experts.gate_up_proj"] = numpy.concatenate([gate, up], axis=1)
                tensors[f"{mlp}experts.down_proj"] = down
                continue

            if is_granite:
                gate, up, down = (take(linear, "weight") for linear in linears)
                tensors[f"{mlp}input_linear.weight"] = numpy.concatenate([gate, up], axis=1)
                tensors[f"{mlp}output_linear.weight"] = down
                continue
            for what, suffix in [("weight", ""), ("bias", "_bias")]:
                gate, up, down = (take(linear, what) for linear in linears)
                both = numpy.stack([gate, up], axis=2).reshape(gate.shape[0], -1, *gate.shape[2:])
                columns = (lambda array: array.swapaxes(1, 2)) if what == "weight" else (lambda array: array)
                tensors[f"{mlp}experts.gate_up_proj{suffix}"] = numpy.ascontiguousarray(columns(both))
                tensors[f"{mlp}experts.down_proj{suffix}"] = numpy.ascontiguousarray(columns(down))
        save_file(tensors, floats / "model.safetensors", metadata={"format": "pt"})
        return floats

    @staticmethod
    def join_experts(tensors):
        """Joins the experts of each block in two tensors, gates first."""
        for prefix in sorted({name.split(".experts.")[0] for name in tensors if re.search(r"\.experts\.\d", name)}):
            count = len([name for name in tensors if re.fullmatch(re.escape(prefix) + r"\.experts\.\d+\.down_proj\.weight", name)])
            gate, up, down = (numpy.stack([tensors.pop(f"{prefix}.experts.{e}.{linear}.weight") for e in range(count)])
                              for linear in ("gate_proj", "up_proj", "down_proj"))
            for linear, weight in [("gate_up_proj", numpy.concatenate([gate, up], axis=1)), ("down_proj", down)]:
                tensors[f"{prefix}.experts.{linear}"] = numpy.ascontiguousarray(weight)

    def mxfp4_bits(self, model):
        """Compares every expert's weight with transformers' dequantization of codes and scales."""
        out = self.check.scratch / "weights.safetensors"
        self.check.program("interop-dump", "weights", model, out)
        ours, stored, different = load_file(out), load_torch(model / "model.safetensors"), []
        for name in [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]:
            values = convert_moe_packed_tensors(
                stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32).transpose(1, 2)
            experts, _, linear = name.rpartition(".")
            linears = {"down_proj": values} if linear == "down_proj" else {
                "gate_proj": values[:, 0::2], "up_proj": values[:, 1::2]}
            different += [f"{experts}.{e}.{linear}" for linear, values in linears.items() for e in range(len(values))
                          if not numpy.array_equal(ours[f"{experts}.{e}.{linear}.weight"], values[e].numpy())]
        return different or "equal", not different

    def trap(self, changes, zeroed=None, change=None, whole=None, mistake=contextlib.nullcontext):
        """Checks that a mistake is detected: with it, quant's logits must differ from transformers' logits of the right
        model. `mistake` is made by transformers instead."""
        model = self.check.model(self.name)
        wrong = self.check.scratch / "trap"
        shutil.rmtree(wrong, ignore_errors=True)
        shutil.copytree(model, wrong)
        make_tiny.edit_config(wrong / "config.json", lambda config: config.update(changes))
        if change:
            path = wrong / "model.safetensors"
            tensors = {name: change(name, tensor) for name, tensor in load_torch(path).items()}
            save_torch(tensors, path, metadata={"format": "pt"})
        if whole:
            path = wrong / "model.safetensors"
            tensors = {name: tensor.clone() for name, tensor in whole(load_torch(path)).items()}
            save_torch(tensors, path, metadata={"format": "pt"})
        if zeroed:
            tensors = load_file(wrong / "model.safetensors")
            tensors |= {name: 0 * tensor if name.endswith(zeroed) else tensor for name, tensor in tensors.items()}
            # A sink of 0 still takes part in the softmax; minus infinity would not.
            tensors |= {name: tensor - 1e4 for name, tensor in tensors.items() if zeroed == ".sinks" == name[-6:]}
            save_file(tensors, wrong / "model.safetensors", metadata={"format": "pt"})
        window = random_tokens(LENGTHS[-1])
        with mistake():
            theirs = reference_model.logits(reference_model.load(self.reference(model)), window).numpy()
        apart = relative(logits_of(self.check, wrong, "logits", window), theirs)
        return f"{apart:.1e} of the largest logit", apart > 100 * TOLERANCE
