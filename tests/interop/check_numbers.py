"""Compares floating-point codes with torch: the value of every code, and the code of a weight.

The values are those in the table of the independent implementation. The weights are a model's own, mixed with special
values; `quant` rounds them to FP8 per channel, and torch from the same scales.
"""

import json
import shutil

import numpy
import torch
from independent_floats import e4m3_numbers
from safetensors.torch import load_file, save_file

TYPE = torch.float8_e4m3fn
LARGEST = 448.0


def table():
    theirs = torch.arange(256, dtype=torch.uint8).view(TYPE).float().numpy()
    ours = e4m3_numbers()
    different = [hex(code) for code in range(256)
                 if ours[code].tobytes() != theirs[code].tobytes()
                 and not (numpy.isnan(ours[code]) and numpy.isnan(theirs[code]))]
    return different or "256 codes", not different


def plant(weight):
    """Writes rows with scale 1, whose weights are rounded as they are: the value of every code, every tie, and values
    near ties; and two rows of zeros."""
    numbers = torch.from_numpy(e4m3_numbers())
    numbers = numbers[numbers.isfinite()]
    ordered = numbers.unique()
    ties = (ordered[1:] + ordered[:-1]) / 2
    small = torch.tensor([-0.0, 2.0 ** -10, -(2.0 ** -10), 3 * 2.0 ** -11, -1e-7])
    values = torch.cat([numbers, ties, ties * (1 + 2.0 ** -9), ties * (1 - 2.0 ** -9), small])
    columns = weight.shape[1] - 1
    rows = -(-len(values) // columns)
    values = torch.nn.functional.pad(values, (0, rows * columns - len(values))).reshape(rows, columns)
    weight[:rows, 1:] = values.to(weight.dtype)
    weight[:rows, 0] = LARGEST
    weight[rows] = 0
    weight[rows + 1] = -0.0
    return weight


def codes(check, name):
    model = check.scratch / f"numbers-{name}"
    shutil.copytree(check.model(name), model)
    path = model / "model.safetensors"
    weights = load_file(path)
    planted = next(key for key in sorted(weights) if key.endswith("up_proj.weight"))
    weights[planted] = plant(weights[planted])
    save_file(weights, path, metadata={"format": "pt"})
    out = check.scratch / f"numbers-{name}-out"
    check.program("quant", "quantize", model, "-o", out, "--quiet", "--method", "rtn", "--scheme", "wf8a16")
    written = load_file(out / "model.safetensors")
    different, compared = [], 0
    for key, scale in written.items():
        if not key.endswith(".weight_scale"):
            continue
        weight, stored = weights[key.removesuffix("_scale")], written[key.removesuffix("_scale")]
        largest = weight.float().abs().amax(1, keepdim=True)
        expected = torch.where(largest == 0, 1.0, largest / LARGEST).to(scale.dtype)
        rounded = (weight.float() / scale.float()).clamp(-LARGEST, LARGEST).to(TYPE)
        same = torch.equal(expected, scale) and torch.equal(rounded.view(torch.uint8), stored.view(torch.uint8))
        compared += weight.numel()
        if not same:
            different.append(key)
    verdict = json.dumps(different) if different else f"{compared} weights"
    return verdict, compared > 0 and not different


def run_all(check, only):
    if only in "numbers table":
        check.step("numbers table", table)
    for name in ["demo", "stories260k"]:
        if only in f"numbers {name}" and check.model(name) is not None:
            check.step(f"numbers {name}", lambda name=name: codes(check, name))
