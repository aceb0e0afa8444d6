"""Reads AutoAWQ `gemm` checkpoints with numpy alone.

Written from the description of the format, so that it shares no code with the program under test
or with any engine. For a linear layer X of shape [out, in] in groups of g:

  X.qweight  int32 [in, out/8]    nibble j of a word holds output 8c + (0, 2, 4, 6, 1, 3, 5, 7)[j]
  X.qzeros   int32 [in/g, out/8]  packed alike
  X.scales   half  [in/g, out]

and w[o, i] = (q[i, o] - z[i // g, o]) * s[i // g, o], computed in f32 with one rounding.
"""

import argparse

import numpy
from independent_pack import Checkpoint, expect
from safetensors.numpy import save_file

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack(words):
    """[rows, words] of int32 -> [rows, 8 * words] of codes."""
    words = numpy.ascontiguousarray(words).astype(numpy.int64)
    codes = numpy.empty((words.shape[0], words.shape[1] * 8), numpy.int32)
    for nibble, output in enumerate(ORDER):
        codes[:, output::8] = (words >> (4 * nibble)) & 15
    return codes


def dequantize(checkpoint, module, group_size):
    """f32 [out, in]"""
    codes = unpack(checkpoint.read(f"{module}.qweight"))
    inputs, outputs = codes.shape
    group = inputs if group_size == -1 else group_size
    if inputs % group != 0:
        raise ValueError(f"{module}: {inputs} inputs do not divide into groups of {group}")
    zeros = unpack(checkpoint.read(f"{module}.qzeros"))
    scales = checkpoint.read(f"{module}.scales")
    expect(f"shape of {module}.qzeros", zeros.shape, (inputs // group, outputs))
    expect(f"shape of {module}.scales", scales.shape, (inputs // group, outputs))
    levels = (codes.reshape(-1, group, outputs) - zeros[:, None]).astype(numpy.float32)
    return numpy.ascontiguousarray((levels * scales[:, None]).reshape(inputs, outputs).T)


def check_plain_layers(checkpoint, names):
    """Every linear layer left in float must be listed; otherwise loaders expect it to be packed."""
    for name, (_, _, entry) in checkpoint.places.items():
        module = name.removesuffix(".weight")
        is_linear = (name != module and len(entry["shape"]) == 2
                     and not module.endswith(("embed_tokens", "embed_positions")))
        if is_linear and not any(part in module for part in names):
            raise ValueError(f"{name} is not packed, and modules_to_not_convert does not name it")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quantized", metavar="QUANTIZED_DIR")
    parser.add_argument("--out", metavar="FILE", required=True,
                        help="write the dequantized weights, f32, HF names")
    arguments = parser.parse_args()

    checkpoint = Checkpoint(arguments.quantized)
    quantization = checkpoint.config["quantization_config"]
    wanted = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
    found = {key: quantization.get(key) for key in wanted}
    if found != wanted:
        raise ValueError(f"quantization_config says {found}")
    names = quantization["modules_to_not_convert"]
    check_plain_layers(checkpoint, names)
    suffix = ".qweight"
    modules = [name.removesuffix(suffix) for name in checkpoint.places if name.endswith(suffix)]
    for module in modules:
        if any(part in module for part in names):
            raise ValueError(f"{module} is packed, but modules_to_not_convert names it")
    weights = {f"{module}.weight": dequantize(checkpoint, module, quantization["group_size"])
               for module in modules}
    save_file(weights, arguments.out)


if __name__ == "__main__":
    main()
