"""Compares floating-point formats with torch, transformers and compressed-tensors.

  numbers  the value of every code, in the tables of the independent implementation and in torch or compressed-tensors
  floats   a checkpoint that `quant quantize` wrote: the weights that quant reads from it, those of the independent one
           (equal in f32) and those of transformers after its first forward pass (equal in the type it was loaded
           in), without a missing, unexpected or mismatched key; linears that engines fuse have one global scale;
           also files that mix formats, and W4A8 with FP8 activations
  shared   models with experts, latent attention and keys that are also values: linears that engines fuse have one
           global scale, and the weights that quant reads are those of the independent reader
  inputs   activations on tensors, quant's and compressed-tensors' own simulation of them, equal bit for bit
  layouts  NVFP4 in ModelOpt's layout: the weights that quant reads are those of the independent one, except for
           the rounding of a reciprocal; converted from a compressed-tensors file it has the same codes and scales, and
           converts back to equal tensors
  source   FP8 blocks as they are published (`quant_method: fp8`), and ModelOpt's FP8, made by torch, and MXFP4 with
           quantized activations, made by numpy: the weights that quant reads
  converted FP8 per row and in blocks, and NVFP4 in both layouts, by llama.cpp's converter: the tensors of its file,
           dequantized by its own `gguf`, are the weights that quant reads
  cache    keys and values in FP8: their rounding against numpy alone, for every value of the format and values
           between and beyond; and the logits of a model with calibrated scales, against transformers' own simulation
"""

import contextlib
import importlib
import json
import re
import shutil
import sys

import numpy
import torch
import independent_floats
import independent_pack
from independent_floats import dequantize, e2m1_numbers, e4m3_numbers, e5m2_numbers, e8m0_numbers, modelopt
from independent_pack import Checkpoint, scheme_of
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch
from transformers import AutoModelForCausalLM

QUICK = ["--samples", "4", "--seq-len", "64"]
# Model, scheme, options. FP8 is loaded in f32; formats with groups of four-bit values or powers of two load only in
# bf16.
CASES = [
    ("demo", "wf8a16-tensor", ["--method", "rtn"]),
    ("demo", "wf8af8-channel", ["--method", "gptq", *QUICK]),
    ("qwen2", "wf8af8-tensor-static", ["--method", "rtn", *QUICK]),
    ("demo", "wf8af8-channel-static", ["--method", "awq", *QUICK]),
    ("demo", "wf8af8-b128", ["--method", "rtn"]),
    ("tied", "wf8a16-b128", ["--method", "awq", *QUICK]),
    ("demo", "wf4a16-g16-nv", ["--method", "rtn"]),
    ("demo", "wf4a16-g16-nv", ["--method", "awq-gptq", *QUICK]),
    ("qwen2", "wf4af4-g16-nv", ["--method", "gptq", *QUICK]),
    ("sharded-bf16", "wf4a16-g16-nv", ["--method", "rtn", "--scale-search", "four-over-six"]),
    ("demo", "wf4a16-g32-mx", ["--method", "awq", *QUICK]),
    ("demo", "wf8a16-g32-mx", ["--method", "rtn"]),
    ("qwen2", "wf8af8-g32-mx", ["--method", "rtn"]),
]
# Model, scheme, type in which transformers loads the result, and options: W4A8 with FP8 activations, and files that mix
# several formats.
MIXED = [
    ("demo", "w4af8-g128-sym", "float32", ["--method", "rtn"]),
    ("demo", "w4af8-g128-sym", "float32", ["--method", "gptq", *QUICK]),
    ("demo", "wf4a16-g16-nv", "bfloat16", ["--method", "rtn", "--override", "*self_attn*=wf8af8-channel"]),
    ("demo", "wf4af4-g16-nv", "bfloat16", ["--method", "rtn", *QUICK, "--override", "*down_proj=wf8af8-channel",
                                          "--override", "*o_proj=wf8a16-g32-mx"]),
]
# Models in which further linears share a scale. transformers keeps all experts of a layer in one parameter, so its
# weights are not compared.
SHARED = ["qwen3-moe", "mixtral", "deepseek_v3-mla", "gemma4-shared-keys", "gemma4-with-experts"]
SHARED_SCHEMES = [("wf4a16-g16-nv", ["--method", "rtn"]), ("wf4af4-g16-nv", ["--method", "awq", *QUICK]),
                  ("wf4a16-g16-nv", ["--method", "gptq", *QUICK]), ("wf8a16-tensor", ["--method", "rtn"])]
# Linears that engines fuse.
FUSED = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa")]


def tables():
    def bytes_of(dtype):
        return torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()

    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    nibbles = torch.tensor([low | high << 4 for low, high in zip(range(0, 16, 2), range(1, 16, 2))], dtype=torch.uint8)
    fours = unpack_fp4_from_uint8(nibbles.reshape(1, 8), 1, 16).float().numpy()[0]
    pairs = [("E4M3", e4m3_numbers(), bytes_of(torch.float8_e4m3fn)),
             ("E5M2", e5m2_numbers(), bytes_of(torch.float8_e5m2)),
             ("E8M0", e8m0_numbers(), bytes_of(torch.float8_e8m0fnu)), ("E2M1", e2m1_numbers(), fours)]
    different = [name for name, ours, theirs in pairs
                 if not numpy.array_equal(ours, theirs, equal_nan=True)]
    return different or f"{sum(len(ours) for _, ours, _ in pairs)} codes", not different


def transformers_weights(path, dtype):
    """The weights that transformers multiplies with, by name."""
    with contextlib.redirect_stdout(sys.stderr):
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="eager", output_loading_info=True)
    problems = {kind: sorted(map(str, keys)) for kind, keys in report.items() if keys}
    if problems:
        raise ValueError(f"loading reports {json.dumps(problems)}")
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([[1, 5, 9, 13]]), use_cache=False).logits
    if not torch.isfinite(output).all():
        raise ValueError("a logit is not finite")
    return {f"{name}.weight": module.weight.detach() for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear)}


def shares(written):
    """The names of scales that differ within fused linears, or None, and the number of groups with equal scales."""
    equal = 0
    kinds = ("weight_global_scale", "weight_scale", "input_scale", "input_global_scale")
    prefixes = sorted({name.rsplit(".", 2)[0] for name in written if name.rsplit(".", 1)[-1] in kinds})
    for prefix in prefixes:
        for parts in FUSED:
            for kind in kinds:
                names = [f"{prefix}.{part}.{kind}" for part in parts if f"{prefix}.{part}.{kind}" in written]
                scales = [written[name] for name in names]
                if len(names) < 2 or scales[0].shape != (1,):
                    continue
                if any(not torch.equal(scales[0], other) for other in scales):
                    return names, equal
                equal += 1
    return None, equal


def shared(check, name, scheme, options):
    """Checks that linears that engines fuse have one scale, and that quant reads the same weights as the independent
    reader."""
    out, dump = check.scratch / f"shared-{name}-{scheme}-{options[1]}", check.scratch / "weights.safetensors"
    check.program("quant", "quantize", check.model(name), "-o", out, "--quiet", "--scheme", scheme, *options)
    check.program("interop-dump", "weights", out, dump)
    ours, checkpoint = load_file(dump), Checkpoint(out)
    written = {}
    for path in sorted(out.glob("*.safetensors")):
        written |= load_torch(path)
    apart, equal = shares(written)
    if apart:
        return f"{' and '.join(apart)} differ", False
    quantization = checkpoint.config["quantization_config"]
    modules = checkpoint.packed_modules()
    for module in modules:
        group = scheme_of(module, quantization)
        if not numpy.array_equal(ours[f"{module}.weight"],
                                 dequantize(checkpoint, module, group["weights"], group["format"])):
            return f"{module}: the independent reader finds other weights", False
    shutil.rmtree(out)
    return f"{len(modules)} linears, {equal} shared scales", equal > 0


def floats(check, name, scheme, options, dtype=None):
    out = check.scratch / f"floats-{name}-{scheme}-{len(options)}-{options[1]}"
    shutil.rmtree(out, ignore_errors=True)
    check.program("quant", "quantize", check.model(name), "-o", out, "--quiet", "--scheme", scheme, *options)
    ours = check.scratch / "weights.safetensors"
    check.program("interop-dump", "weights", out, ours)
    ours = load_file(ours)
    checkpoint = Checkpoint(out)
    quantization = checkpoint.config["quantization_config"]
    written = {}
    for path in sorted(out.glob("*.safetensors")):
        written |= load_torch(path)
    apart, _ = shares(written)
    if apart:
        return f"{' and '.join(apart)} differ", False
    if dtype is not None:
        dtype = getattr(torch, dtype)
    else:
        dtype = torch.float32 if scheme.startswith("wf8") and not scheme.endswith("mx") else torch.bfloat16
    theirs = transformers_weights(out, dtype)
    modules = checkpoint.packed_modules()
    for module in modules:
        group = scheme_of(module, quantization)
        reader = independent_pack if group["weights"]["type"] == "int" else independent_floats
        weight = reader.dequantize(checkpoint, module, group["weights"], group["format"])
        key = f"{module}.weight"
        if not numpy.array_equal(ours[key], weight):
            return f"{key}: the independent reader finds other weights", False
        if not torch.equal(torch.from_numpy(weight).to(dtype), theirs[key].to(dtype)):
            return f"{key}: transformers multiplies with other weights", False
    return f"{len(modules)} linears", len(modules) > 0


def inputs(check):
    """Checks every rule for activations on values of many magnitudes, with zeros and rows of few distinct values."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    generator = torch.Generator().manual_seed(5)
    values = torch.randn(64, 512, generator=generator) * torch.logspace(-9, 5, 64)[:, None]
    values *= torch.rand(64, 512, generator=generator).lt(0.02).float() * 30 + 1
    values[3] = 0
    values[5, 17:] = 0
    values[7, 128:256] = 0
    values[9] = 448 * 2.0 ** torch.randint(-6, 6, (512,), generator=generator)
    values[10] = 1.75 * 2.0 ** torch.randint(-6, 6, (512,), generator=generator)
    values[11] = -1e-30
    amax = values[:48].abs().max()
    scale = (amax / 448).bfloat16().float().reshape(1)
    divisor = (2688 / amax).float().reshape(1)
    rules = [
        ("fp8-token", {"num_bits": 8, "strategy": "token", "dynamic": True}, None),
        ("fp8-group", {"num_bits": 8, "strategy": "group", "group_size": 128, "dynamic": True}, None),
        ("mxfp8", {"num_bits": 8, "strategy": "group", "group_size": 32, "dynamic": True,
                   "scale_dtype": torch.uint8}, None),
        ("fp8-static", {"num_bits": 8, "strategy": "tensor", "dynamic": False}, scale),
        ("nvfp4", {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "dynamic": "local",
                   "scale_dtype": torch.float8_e4m3fn}, divisor),
    ]
    stored, rounded = check.scratch / "inputs.safetensors", check.scratch / "rounded.safetensors"
    save_file({"x": values.numpy()}, stored)
    different = []
    for name, arguments, constant in rules:
        args = QuantizationArgs(type="float", symmetric=True, **arguments)
        # A batch of one: tokens are its second dimension.
        x = values.unsqueeze(0)
        if name == "fp8-static":
            expected = fake_quantize(x, constant, None, args)
        else:
            found, zero = compute_dynamic_scales_and_zp(x, args, None, global_scale=constant)
            expected = fake_quantize(x, found, zero, args, global_scale=constant)
        given = [] if constant is None else [repr(float(constant))]
        check.program("interop-dump", "inputs", name, stored, rounded, *given)
        ours = torch.from_numpy(load_file(rounded)["x"])
        if not torch.equal(ours, expected[0]):
            places = (ours != expected[0]).nonzero()
            row, column = places[0].tolist()
            different.append(f"{name}: {len(places)} values, the first at {row}, {column}: {values[row, column]} becomes "
                             f"{ours[row, column]}, not {expected[0][row, column]}")
    return different or f"{len(rules)} rules, {values.numel()} values", not different


def source(check):
    """The weights that quant reads from native FP8 blocks made by torch, some of which are cut off at an edge."""
    model, out = check.model("demo"), check.scratch / "native-fp8"
    shutil.copytree(model, out)
    weights = load_torch(out / "model.safetensors")
    expected, stored = {}, {}
    for name, weight in weights.items():
        if not re.search(r"_proj\.weight$", name):
            stored[name] = weight
            continue
        rows, columns = weight.shape
        padded = torch.nn.functional.pad(weight.float(), (0, -columns % 128, 0, -rows % 128))
        blocks = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scale = blocks.abs().amax((1, 3)) / 448
        wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        codes = (weight.float() / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        expected[name] = (codes.float() * wide).numpy()
        stored[name] = codes
        stored[name.replace(".weight", ".weight_scale_inv")] = scale
    save_torch(stored, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                                     "weight_block_size": [128, 128]}
    (out / "config.json").write_text(json.dumps(config))
    dump = check.scratch / "weights.safetensors"
    check.program("interop-dump", "weights", out, dump)
    ours = load_file(dump)
    different = [name for name, weight in expected.items() if not numpy.array_equal(ours[name], weight)]
    return different or f"{len(expected)} linears", bool(expected) and not different


def mxfp4_inputs(check):
    """The weights that quant reads from MXFP4 with quantized activations, whose codes are random numbers of numpy."""
    model, out = check.model("demo"), check.scratch / "mxfp4-inputs"
    shutil.copytree(model, out)
    generator, expected, stored = numpy.random.default_rng(11), {}, {}
    for name, weight in load_file(out / "model.safetensors").items():
        if not re.search(r"_proj\.weight$", name):
            stored[name] = weight
            continue
        rows, columns = weight.shape
        codes = generator.integers(0, 16, (rows, columns), dtype=numpy.uint8)
        scales = generator.integers(110, 124, (rows, columns // 32), dtype=numpy.uint8)
        expected[name] = e2m1_numbers()[codes] * e8m0_numbers()[scales].repeat(32, axis=1)
        stored[name.replace(".weight", ".weight_packed")] = codes[:, ::2] | codes[:, 1::2] << 4
        stored[name.replace(".weight", ".weight_scale")] = scales
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    mxfp4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32,
             "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": mxfp4 | {"dynamic": False},
                                      "input_activations": mxfp4 | {"dynamic": True},
                                      "format": "mxfp4-pack-quantized"}},
        "ignore": ["lm_head"]}
    (out / "config.json").write_text(json.dumps(config))
    dump = check.scratch / "weights.safetensors"
    check.program("interop-dump", "weights", out, dump)
    ours = load_file(dump)
    different = [name for name, weight in expected.items() if not numpy.array_equal(ours[name], weight)]
    return different or f"{len(expected)} linears", bool(expected) and not different


def modelopt_fp8(check):
    """The weights that quant reads from ModelOpt's FP8 per tensor, made by torch, with input and cache scales."""
    model, out = check.model("demo"), check.scratch / "modelopt-fp8"
    shutil.copytree(model, out)
    expected, stored = {}, {}
    for name, weight in load_torch(out / "model.safetensors").items():
        if not re.search(r"_proj\.weight$", name):
            stored[name] = weight
            continue
        module, scale = name.removesuffix(".weight"), (weight.float().abs().max() / 448).reshape(())
        stored[name] = (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored[f"{module}.weight_scale"] = scale
        stored[f"{module}.input_scale"] = torch.tensor(0.0173)
        for part in "kv":
            if module.endswith(f"self_attn.{part}_proj"):
                stored[f"{module}.{part}_scale"] = torch.tensor(0.02)
    save_torch(stored, out / "model.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint(out)
    for name in stored:
        if name.endswith(".weight_scale"):
            module = name.removesuffix(".weight_scale")
            codes = checkpoint.read(f"{module}.weight")
            expected[f"{module}.weight"] = e4m3_numbers()[codes] * numpy.float32(checkpoint.read(name).reshape(()))
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"],
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.47.0"}}
    (out / "config.json").write_text(json.dumps(config))
    dump = check.scratch / "weights.safetensors"
    check.program("interop-dump", "weights", out, dump)
    ours = load_file(dump)
    different = [name for name, weight in expected.items() if not numpy.array_equal(ours[name], weight)]
    return different or f"{len(expected)} linears", bool(expected) and not different


def fp8_of(values, scale):
    """Values rounded as by an FP8 cache, from the definition of the format."""
    number = (values / numpy.float32(scale)).astype(numpy.float32)
    magnitude = numpy.minimum(numpy.abs(number), 448).astype(numpy.float64)
    step = 2.0 ** (numpy.floor(numpy.log2(numpy.maximum(magnitude, 2.0 ** -6))) - 3)
    rounded = numpy.copysign(numpy.minimum(numpy.rint(magnitude / step) * step, 448), number).astype(numpy.float32)
    return rounded * numpy.float32(scale)


def cache_numbers(check):
    finite = e4m3_numbers()
    finite = finite[numpy.isfinite(finite)]
    middles = (numpy.sort(finite)[1:] + numpy.sort(finite)[:-1]) / 2
    random = numpy.random.default_rng(3).normal(size=2000).astype(numpy.float32) * 40
    values = numpy.concatenate([finite, middles, numpy.nextafter(middles, numpy.float32(1e9)), random,
                                numpy.float32([448, 449, 464, 480, 1e9, 3e38, 1e-30])]).astype(numpy.float32)
    values = numpy.concatenate([values, -values])
    stored, rounded = check.scratch / "cached.safetensors", check.scratch / "cache.safetensors"
    for scale in [1.0, 2.0 ** -7, 0.0123291015625, 37.25]:
        with numpy.errstate(over="ignore"):
            x = (values * numpy.float32(scale)).reshape(1, -1)
        x = x[numpy.isfinite(x)].reshape(1, -1)
        save_file({"x": x}, stored)
        check.program("interop-dump", "inputs", "kv-fp8", stored, rounded, repr(scale))
        ours, expected = load_file(rounded)["x"], fp8_of(x, scale)
        torchs = ((torch.from_numpy(x) / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).numpy()
        for name, other in [("numpy", expected), ("torch", torchs)]:
            if not numpy.array_equal(ours.view(numpy.uint32), other.view(numpy.uint32)):
                place = numpy.argmax(ours != other)
                return f"{name}, scale {scale}: {x.flat[place]} becomes {ours.flat[place]}, not {other.flat[place]}", False
    return f"{len(values)} values, 4 scales", True


def cache_logits(check):
    """Compares quant's logits with those of transformers for the same scales. They must be far closer to each other
    than to the logits with a float cache."""
    out, plain = check.scratch / "cache", check.scratch / "cache-plain"
    check.program("quant", "quantize", check.model("demo"), "-o", out, "--quiet", "--scheme", "wf8a16kvf8-channel",
                  "--method", "rtn", *QUICK)
    config = json.loads((out / "config.json").read_text())
    scheme = config["quantization_config"].pop("kv_cache_scheme")
    if scheme != {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}:
        return f"kv_cache_scheme is {scheme}", False
    shutil.copytree(out, plain)
    (plain / "config.json").write_text(json.dumps(config))
    tokens = check.scratch / "cache-tokens.json"
    tokens.write_text(json.dumps([[(i * 37 + w * 11) % 251 for i in range(48)] for w in range(3)]))
    logits = {}
    for name, path in [("cached", out), ("float", plain)]:
        check.program("interop-dump", "logits", path, tokens, check.scratch / "logits.safetensors")
        logits[name] = load_file(check.scratch / "logits.safetensors")["logits"]
    with contextlib.redirect_stdout(sys.stderr):
        model, report = AutoModelForCausalLM.from_pretrained(
            out, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    problems = {kind: sorted(map(str, keys)) for kind, keys in report.items() if keys}
    if problems:
        return f"loading reports {json.dumps(problems)}", False
    with torch.inference_mode():
        theirs = model(input_ids=torch.tensor(json.loads(tokens.read_text())), use_cache=True).logits.numpy()
    off, moved = (numpy.abs(logits["cached"] - other).mean() for other in (theirs, logits["float"]))
    return f"{off:.2e} from transformers, {moved:.2e} from floats", moved > 1e-4 and off < 0.05 * moved


def layouts(check):
    first, other, back = (check.scratch / f"layout-{name}" for name in ("ct", "modelopt", "ct-again"))
    check.program("quant", "quantize", check.model("sharded-bf16"), "-o", first, "--quiet", "--scheme", "nvfp4a16",
                  "--method", "rtn")
    for source, out, container in [(first, other, "modelopt"), (other, back, "compressed-tensors")]:
        check.program("quant", "quantize", source, "-o", out, "--quiet", "--format", container)

    def tensors(path):
        return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_torch(file).items()}

    before, here, after = tensors(first), tensors(other), tensors(back)
    for name, tensor in before.items():
        if name not in after or not torch.equal(tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor,
                                                after[name].view(torch.uint8) if tensor.element_size() == 1 else after[name]):
            return f"{name} does not come back", False
    dump = check.scratch / "weights.safetensors"
    check.program("interop-dump", "weights", other, dump)
    ours, checkpoint = load_file(dump), Checkpoint(other)
    modules = [name.removesuffix(".weight_scale_2") for name in here if name.endswith(".weight_scale_2")]
    for module in modules:
        if not torch.equal(before[f"{module}.weight_packed"], here[f"{module}.weight"]):
            return f"{module}: other codes", False
        if not torch.equal(before[f"{module}.weight_scale"].view(torch.uint8), here[f"{module}.weight_scale"].view(torch.uint8)):
            return f"{module}: other scales of groups", False
        # The largest magnitude of bf16 weights is itself bf16, and both forms are derived from it.
        largest = (2688 / before[f"{module}.weight_global_scale"]).bfloat16().float()
        if not torch.equal((largest / 2688).reshape(()), here[f"{module}.weight_scale_2"]):
            return f"{module}: its multiplier is not that of the largest magnitude", False
        weight = modelopt(checkpoint, module)
        off = numpy.abs(weight - ours[f"{module}.weight"]) > numpy.abs(weight) * 2.0 ** -22
        if off.any():
            return f"{module}: the independent reader finds other weights", False
    quantization = json.loads((other / "hf_quant_config.json").read_text())["quantization"]
    if (quantization["quant_algo"], quantization["group_size"]) != ("W4A16_NVFP4", 16):
        return f"hf_quant_config.json says {quantization}", False
    return f"{len(modules)} linears", len(modules) > 0


# Formats that llama.cpp's converter can read.
CONVERTED = [("wf8af8-channel", []), ("wf8af8-b128", []), ("wf4a16-g16-nv", []),
             ("wf4a16-g16-nv", ["--format", "modelopt"])]


def converted(check, llama_cpp, scheme, options):
    out, theirs = check.scratch / f"converted-{scheme}-{len(options)}", check.scratch / "converted.gguf"
    check.program("quant", "quantize", check.model("demo"), "-o", out, "--quiet", "--scheme", scheme, "--method", "rtn",
                  *options)
    dump = check.scratch / "weights.safetensors"
    check.program("interop-dump", "weights", out, dump)
    ours = load_file(dump)
    importlib.import_module("reference_llama_cpp").convert(llama_cpp, out, "smollm", theirs)
    gguf = importlib.import_module("gguf")
    found = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape(tuple(int(n) for n in reversed(t.shape)))
             for t in gguf.GGUFReader(theirs).tensors}
    config = json.loads((out / "config.json").read_text())
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    compared = 0
    for layer in range(config["num_hidden_layers"]):
        for part, name in [(f"self_attn.{p}_proj", "attn_output" if p == "o" else f"attn_{p}") for p in "qkvo"] + [
                (f"mlp.{p}_proj", f"ffn_{p}") for p in ("gate", "up", "down")]:
            weight = ours[f"model.layers.{layer}.{part}.weight"]
            if (count := heads.get(name.removeprefix("attn_"))) is not None:
                # llama.cpp's rotary embedding pairs neighbouring channels; quant's pairs channel i of one half with
                # channel i of the other.
                halves = weight.reshape(count, 2, -1, weight.shape[1])
                weight = halves.swapaxes(1, 2).reshape(weight.shape)
            other = found[f"blk.{layer}.{name}.weight"]
            # For NVFP4, a separate tensor holds the global scale.
            if (scale := found.get(f"blk.{layer}.{name}.scale")) is not None:
                other = other * scale
            off = numpy.abs(weight - other)
            if (off > numpy.abs(weight) * 2.0 ** -21).any():
                return f"blk.{layer}.{name}: {off.max()} apart", False
            compared += 1
    return f"{compared} linears", compared > 0


def run_all(check, only, llama_cpp):
    if only in "numbers all tables":
        check.step("numbers all tables", tables)
    if only in "inputs floats":
        check.step("inputs floats", lambda: inputs(check))
    if only in "layouts nvfp4 modelopt":
        check.step("layouts nvfp4 modelopt", lambda: layouts(check))
    if only in "source modelopt fp8":
        check.step("source modelopt fp8", lambda: modelopt_fp8(check))
    if only in "source mxfp4 with mxfp4 inputs":
        check.step("source mxfp4 with mxfp4 inputs", lambda: mxfp4_inputs(check))
    if only in "cache numbers":
        check.step("cache numbers", lambda: cache_numbers(check))
    if only in "cache logits":
        check.step("cache logits", lambda: cache_logits(check))
    if only in "source native fp8":
        check.step("source native fp8", lambda: source(check))
    for scheme, options in CONVERTED:
        title = f"converted {scheme} {' '.join(options)}"
        if only not in title:
            continue
        if llama_cpp is None or not (llama_cpp / "source").is_dir():
            print(f"SKIPPED: llama.cpp is not available: {title}", flush=True)
            continue
        check.step(title, lambda scheme=scheme, options=options: converted(check, llama_cpp.resolve(), scheme, options))
    for name, scheme, options in CASES:
        title = f"floats {name} {options[1]} {scheme}"
        if only in title:
            check.step(title, lambda name=name, scheme=scheme, options=options: floats(check, name, scheme, options))
    for name, scheme, dtype, options in MIXED:
        title = f"floats mixed {name} {options[1]} {scheme} {options[-1]}"
        if only in title:
            check.step(title, lambda case=(name, scheme, options, dtype): floats(check, *case))
    for name in SHARED:
        for scheme, options in SHARED_SCHEMES:
            title = f"shared {name} {options[1]} {scheme}"
            if only in title:
                check.step(title, lambda name=name, scheme=scheme, options=options: shared(check, name, scheme, options))
