"""Reads QServe checkpoints with numpy alone.

Written from the published formulas, so that it shares no code with the program under test or with
any engine. For a linear layer X of shape [N, K]:

  X.qweight    int8 [N, K/2]     with n = 32 nt + 16 p + 8 h + nl and k = 32 kt + 16 kh + 4 kl + kr, code
                                 [n, k] is in byte ((nt K/32 + kt) 32 + 4 nl + kl) 16 + 8 kh + 4 h + kr,
                                 in its low nibble if p is 0, else in the high one
  X.s1_scales  half [N]
  X.s2_scales  int8 [K/128, N]   of 32 outputs, number 8 j + nl is at 4 nl + j
  X.s2_zeros   int8 [K/128, N]   likewise; to be added to code * s2 modulo 256
  X.s1_szeros  half [N]          without groups: zero * s1

or, with 8 bits, X.weight int8 [N, K] and X.dequant_scale half [N]. A kernel computes
w[n, k] = int8(code * s2 + s2_zero) * s1, or (code - zero) * s1, computed in f32 with one rounding.
"""

import argparse
import json
from pathlib import Path

import numpy
from independent_pack import Checkpoint, expect
from safetensors.numpy import save_file

GROUP = 128


def codes(stored):
    """int8 [N, K/2] -> int32 [N, K] of codes, one index at a time by the formula."""
    rows, columns = stored.shape[0], stored.shape[1] * 2
    flat = numpy.ascontiguousarray(stored).view(numpy.uint8).reshape(-1).astype(numpy.int32)
    n, k = numpy.meshgrid(numpy.arange(rows), numpy.arange(columns), indexing="ij")
    tile = (n // 32) * (columns // 32) + k // 32
    lane = 4 * (n % 8) + k // 4 % 4
    byte = (tile * 32 + lane) * 16 + 8 * (k // 16 % 2) + 4 * (n // 8 % 2) + k % 4
    return flat[byte] >> (4 * (n // 16 % 2)) & 15


def by_output(stored):
    """int8 [K/128, N] in the order of a kernel's lanes -> uint8 as int32 [N, K/128]."""
    outputs = numpy.arange(stored.shape[1])
    place = outputs - outputs % 32 + 4 * (outputs % 8) + outputs % 32 // 8
    return numpy.ascontiguousarray(stored).view(numpy.uint8).astype(numpy.int32)[:, place].T


def of_groups(checkpoint, module):
    q = codes(checkpoint.read(f"{module}.qweight"))
    outputs, inputs = q.shape
    scales = checkpoint.read(f"{module}.s2_scales")
    zeros = checkpoint.read(f"{module}.s2_zeros")
    s1 = checkpoint.read(f"{module}.s1_scales")
    for name, tensor, shape in [("s2_scales", scales, (inputs // GROUP, outputs)),
                                ("s2_zeros", zeros, (inputs // GROUP, outputs)), ("s1_scales", s1, (outputs,))]:
        expect(f"shape of {module}.{name}", tensor.shape, shape)
    scales, zeros = (by_output(t)[:, :, None] for t in (scales, zeros))
    if scales.min() < 1 or scales.max() > 16:
        raise ValueError(f"{module}.s2_scales: from {scales.min()} to {scales.max()}, not 1 to 16")
    product = q.reshape(outputs, -1, GROUP) * scales
    integers = (product + zeros & 255).astype(numpy.uint8).view(numpy.int8).astype(numpy.int32)
    # The integers must not wrap around: -s2_zero modulo 256 is zero * scale, 0 to 240.
    if not numpy.array_equal(integers, product - (-zeros & 255)):
        raise ValueError(f"{module}: an integer does not fit 8 bits")
    return integers.reshape(outputs, inputs).astype(numpy.float32) * s1.astype(numpy.float32)[:, None]


def of_rows(checkpoint, module):
    q = codes(checkpoint.read(f"{module}.qweight"))
    s1, szeros = (checkpoint.read(f"{module}.{name}").astype(numpy.float32) for name in ("s1_scales", "s1_szeros"))
    zeros = numpy.rint(szeros / s1)
    if not numpy.array_equal((zeros * s1).astype(numpy.float16).astype(numpy.float32), szeros):
        raise ValueError(f"{module}.s1_szeros: the zeros are not integers")
    return (q - zeros.astype(numpy.int32)[:, None]).astype(numpy.float32) * s1[:, None]


def of_bytes(checkpoint, module):
    weight = checkpoint.read(f"{module}.weight").astype(numpy.float32)
    return weight * checkpoint.read(f"{module}.dequant_scale").astype(numpy.float32)[:, None]


def check_manifest(directory, config):
    """The file next to the configuration must agree with these formulas."""
    manifest = json.loads((Path(directory) / config["manifest"]).read_text())
    weights = manifest["weights"]
    found = [manifest["schema"], weights["bits"], weights["group_size"], weights.get("s2_order"),
             manifest["modules_to_not_convert"]]
    wanted = ["quant-qserve/1", config["wbits"], config["group_size"], config.get("s2_order"),
              config["modules_to_not_convert"]]
    if found != wanted:
        raise ValueError(f"{config['manifest']} says {found}, config.json {wanted}")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quantized", metavar="QUANTIZED_DIR")
    parser.add_argument("--out", metavar="FILE", required=True,
                        help="write the dequantized weights, f32, HF names")
    arguments = parser.parse_args()

    checkpoint = Checkpoint(arguments.quantized)
    config = checkpoint.config["quantization_config"]
    kinds = {(4, GROUP): (of_groups, ".qweight"), (4, -1): (of_rows, ".qweight"),
             (8, -1): (of_bytes, ".dequant_scale")}
    kind = kinds.get((config["wbits"], config["group_size"]))
    if config["quant_method"] != "qoq" or config["layout_version"] != 1 or kind is None:
        raise ValueError(f"quantization_config says {config}")
    if config.get("s2_order", "kernel") != "kernel":
        raise ValueError(f"scales are in the order {config['s2_order']}")
    check_manifest(arguments.quantized, config)
    dequantize, suffix = kind
    modules = [name.removesuffix(suffix) for name in checkpoint.places if name.endswith(suffix)]
    for name, (_, _, entry) in checkpoint.places.items():
        module = name.removesuffix(".weight")
        is_linear = name != module and len(entry["shape"]) == 2 and not module.endswith(("embed_tokens", "embed_positions"))
        if is_linear and (module in modules) == (module in config["modules_to_not_convert"]):
            raise ValueError(f"{name}: modules_to_not_convert is wrong about it")
    weights = {f"{module}.weight": dequantize(checkpoint, module) for module in modules}
    save_file(weights, arguments.out)


if __name__ == "__main__":
    main()
