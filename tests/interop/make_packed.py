"""Rounds a float checkpoint to nearest and writes it as compressed-tensors `pack-quantized`.

This gives the scripts in this directory an input that the program under test has not written. Decoder linears are
packed; embeddings, norms and lm_head are copied.
"""

import argparse
import json
import math
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def quantize(weight, bits, group, symmetric):
    """Signed levels int64 [out, in], scale f32 and zero point int64 [out, groups]."""
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    groups = weight.float().unflatten(1, (-1, group))
    if symmetric:
        scale = groups.abs().amax(-1, keepdim=True) * 2 / (high - low)
        zero = torch.zeros_like(scale)
    else:
        least = groups.amin(-1, keepdim=True).clamp(max=0)
        most = groups.amax(-1, keepdim=True).clamp(min=0)
        scale = (most - least) / (high - low)
    scale = scale.to(weight.dtype).float()
    if not symmetric:
        zero = (low - least / scale).round().clamp(low, high)
    levels = (groups / scale + zero).round().clamp(low, high)
    return levels.flatten(1).long(), scale.squeeze(-1), zero.squeeze(-1).long()


def pack(levels, bits):
    """Signed values [rows, columns] -> int32 [rows, ceil(columns*bits/32)], low bits first."""
    rows, columns = levels.shape
    words = torch.zeros(rows, math.ceil(columns * bits / 32) + 1, dtype=torch.int64)
    for column in range(columns):
        word, shift = divmod(column * bits, 32)
        value = (levels[:, column] + (1 << (bits - 1))) << shift
        words[:, word] |= value & 0xFFFFFFFF
        words[:, word + 1] |= value >> 32
    return words[:, :-1].to(torch.int32).contiguous()


def weight_arguments(bits, group, symmetric):
    """The `weights` of a config group; group 0 means one scale per row."""
    shape = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False} | shape


def parse_scheme(text):
    bits, group, symmetry = text.split(",")
    return int(bits), int(group), {"sym": True, "asym": False}[symmetry]


def parse_override(text):
    pattern, scheme = text.split("=")
    return pattern, parse_scheme(scheme)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="FLOAT_DIR", type=Path)
    parser.add_argument("out", metavar="OUT_DIR", type=Path, help="must not exist")
    parser.add_argument("scheme", metavar="BITS,GROUP,sym|asym", type=parse_scheme,
                        help="GROUP 0 means per channel; example 4,128,sym")
    parser.add_argument("--override", metavar="REGEX=BITS,GROUP,sym|asym", type=parse_override,
                        help="another scheme for the modules whose names match")
    arguments = parser.parse_args()

    groups = [(["Linear"], arguments.scheme)]
    if arguments.override:
        pattern, scheme = arguments.override
        groups.insert(0, ([f"re:{pattern}"], scheme))

    tensors = {}
    for path in sorted(arguments.source.glob("*.safetensors")):
        tensors |= load_file(path)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors.pop(name)
        module = name.removesuffix(".weight")
        overridden = arguments.override and re.match(arguments.override[0], module)
        bits, group, symmetric = arguments.override[1] if overridden else arguments.scheme
        levels, scale, zero = quantize(weight, bits, group or weight.shape[1], symmetric)
        tensors[f"{module}.weight_packed"] = pack(levels, bits)
        tensors[f"{module}.weight_scale"] = scale.to(weight.dtype)
        tensors[f"{module}.weight_shape"] = torch.tensor(weight.shape)
        if not symmetric:
            tensors[f"{module}.weight_zero_point"] = pack(zero.T, bits).T.contiguous()

    config = json.loads((arguments.source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{index}": {"targets": targets, "weights": weight_arguments(*scheme)}
            for index, (targets, scheme) in enumerate(groups)},
        "ignore": ["lm_head"],
    }
    arguments.out.mkdir(parents=True)
    save_file(tensors, arguments.out / "model.safetensors", metadata={"format": "pt"})
    (arguments.out / "config.json").write_text(json.dumps(config, indent=2))
    shutil.copy(arguments.source / "tokenizer.json", arguments.out)


if __name__ == "__main__":
    main()
