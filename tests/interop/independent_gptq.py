"""Reads GPTQ v1 checkpoints with numpy alone.

Written from the description of the format, so that it shares no code with the program under test
or with any engine. For a linear layer X of shape [out, in], b bits, groups of g:

  X.qweight  int32 [in*b/32, out]    a little-endian stream of b-bit codes down every column
  X.qzeros   int32 [in/g, out*b/32]  the same along every row, each zero minus one
  X.scales   half  [in/g, out]
  X.g_idx    int32 [in]              the group of every input

and w[o, i] = (q[i, o] - z[g_idx[i], o]) * s[g_idx[i], o], computed in f32 with one rounding. One is subtracted from
all zeros of a word at once, with borrows between them; with 3 bits, it is subtracted from each zero modulo 8.
"""

import argparse
import re

import numpy
from independent_pack import Checkpoint, expect
from safetensors.numpy import save_file


def unpack(words, bits):
    """[rows, words] of int32 -> [rows, 32 * words / bits] of codes, from single bits."""
    words = numpy.ascontiguousarray(words).view(numpy.uint32)
    ones = (words[:, :, None] >> numpy.arange(32, dtype=numpy.uint32)) & 1
    ones = ones.reshape(words.shape[0], -1, bits).astype(numpy.int32)
    return ones @ (1 << numpy.arange(bits, dtype=numpy.int32))


def unpack_zeros(words, bits):
    """[rows, words] of int32 -> [rows, 32 * words / bits] of zeros."""
    if bits == 3:
        return (unpack(words, bits) + 1) & 7
    one = sum(1 << shift for shift in range(0, 32, bits))
    words = numpy.ascontiguousarray(words).view(numpy.uint32)
    return unpack(words + numpy.uint32(one), bits)


def dequantize(checkpoint, module, bits, group_size):
    """f32 [out, in]"""
    codes = unpack(checkpoint.read(f"{module}.qweight").T, bits).T
    inputs, outputs = codes.shape
    group = inputs if group_size == -1 else group_size
    if inputs % group != 0:
        raise ValueError(f"{module}: {inputs} inputs do not divide into groups of {group}")
    zeros = unpack_zeros(checkpoint.read(f"{module}.qzeros"), bits)
    scales = checkpoint.read(f"{module}.scales")
    index = checkpoint.read(f"{module}.g_idx")
    expect(f"shape of {module}.qzeros", zeros.shape, (inputs // group, outputs))
    expect(f"shape of {module}.scales", scales.shape, (inputs // group, outputs))
    expect(f"{module}.g_idx", index.tolist(), (numpy.arange(inputs) // group).tolist())
    levels = (codes - zeros[index]).astype(numpy.float32)
    return numpy.ascontiguousarray((levels * scales[index].astype(numpy.float32)).T)


def is_excluded(module, dynamic):
    return any(re.match(key.removeprefix("-:"), module) for key in dynamic)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quantized", metavar="QUANTIZED_DIR")
    parser.add_argument("--out", metavar="FILE", required=True,
                        help="write the dequantized weights, f32, HF names")
    arguments = parser.parse_args()

    checkpoint = Checkpoint(arguments.quantized)
    quantization = checkpoint.config["quantization_config"]
    wanted = {"quant_method": "gptq", "checkpoint_format": "gptq", "desc_act": False, "lm_head": False}
    found = {key: quantization.get(key) for key in wanted}
    if found != wanted:
        raise ValueError(f"quantization_config says {found}")
    dynamic = quantization.get("dynamic", {})
    if not all(key.startswith("-:") for key in dynamic):
        raise ValueError(f"dynamic says {dynamic}")
    suffix = ".qweight"
    modules = [name.removesuffix(suffix) for name in checkpoint.places if name.endswith(suffix)]
    for name, (_, _, entry) in checkpoint.places.items():
        module = name.removesuffix(".weight")
        if name != module and len(entry["shape"]) == 2 and not module.endswith(("embed_tokens", "embed_positions", "lm_head")):
            if not is_excluded(module, dynamic):
                raise ValueError(f"{name} is not packed, and dynamic does not name it")
    for module in modules:
        if is_excluded(module, dynamic):
            raise ValueError(f"{module} is packed, but dynamic excludes it")
    bits, group_size = quantization["bits"], quantization["group_size"]
    weights = {f"{module}.weight": dequantize(checkpoint, module, bits, group_size) for module in modules}
    if quantization["sym"]:
        for module in modules:
            zeros = unpack_zeros(checkpoint.read(f"{module}.qzeros"), bits)
            expect(f"zeros of {module}", sorted(set(zeros.flatten().tolist())), [1 << (bits - 1)])
    save_file(weights, arguments.out)


if __name__ == "__main__":
    main()
