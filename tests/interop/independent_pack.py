"""Reads compressed-tensors checkpoints with numpy alone.

Written from the description of the format, so that it shares no code with the program under test
or with compressed-tensors. For a linear layer X of shape [out, in] with b-bit weights:

  X.weight_packed      int32 [out, ceil(in*b/32)]     q + 2^(b-1), dense along `in`, low bits first
  X.weight_scale       float [out, in/group] or [out, 1]
  X.weight_shape       integer [2] = (out, in)
  X.weight_zero_point  int32 [ceil(out*b/32), groups] z + 2^(b-1), dense along `out`;
                       asymmetric only

or, `int-quantized`,

  X.weight             int8 [out, in]                 q
  X.weight_scale       float [out, 1]
  X.input_scale        float [1]                      static activations only
  X.input_zero_point   int8 [1]                       asymmetric static activations only

and w = (q - z) * scale, computed in f32 with one rounding. Values whose width does not divide 32
straddle words, as compressed-tensors has written them since 0.18. Floating-point weights are read by
independent_floats.py.

Prints one line of JSON per packed tensor: its scheme and, given the float original, the relative RMS
error (plain rounding only: a method that folds scales changes the original weights too).
"""

import argparse
import json
import re
import shutil
from pathlib import Path

import independent_floats
import numpy
from safetensors.numpy import save_file

DTYPES = {"F8_E4M3": "<u1", "U8": "<u1", "I8": "<i1", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4", "I64": "<i8"}


class Checkpoint:
    """The tensors of all safetensors files in a directory, by name; f16 and bf16 are converted to f32,
    FP8 is read as codes."""

    def __init__(self, directory):
        self.directory = Path(directory)
        self.config = json.loads((self.directory / "config.json").read_text())
        self.places = {}
        for path in sorted(self.directory.glob("*.safetensors")):
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                self.places[name] = (path, 8 + length, entry)

    def read(self, name):
        path, start, entry = self.places[name]
        begin, end = entry["data_offsets"]
        with path.open("rb") as file:
            file.seek(start + begin)
            values = numpy.frombuffer(file.read(end - begin), DTYPES[entry["dtype"]])
        if entry["dtype"] == "BF16":
            values = (values.astype("<u4") << 16).view("<f4")
        elif entry["dtype"] == "F16":
            values = values.astype("<f4")
        return values.reshape(entry["shape"])

    def packed_modules(self):
        # Every quantized module has scales.
        suffix = ".weight_scale"
        return sorted(name.removesuffix(suffix) for name in self.places if name.endswith(suffix))


def matches(module, target):
    """Whether a target or ignore entry names the module, itself or by a regular expression."""
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target == module


# Lookup tables, which are not linears.
EMBEDDINGS = ("embed_tokens", "embed_tokens_per_layer", "embed_positions", "tok_embeddings", ".wte", ".wpe")


def scheme_of(module, quantization):
    """The group that applies to a module: exact names take precedence over `re:`, and these over the class."""
    its_class = "Embedding" if module.endswith("embed_tokens") else "Linear"
    if any(matches(module, entry) for entry in quantization["ignore"]):
        raise ValueError(f"{module} is packed, but ignored in quantization_config")
    found = [(0 if target == module else 2 if target == its_class else 1, target, group)
             for group in quantization["config_groups"].values() for target in group["targets"]
             if target == its_class or matches(module, target)]
    if not found:
        raise ValueError(f"{module} is packed, but no config group targets it")
    return min(found, key=lambda entry: entry[:2])[2]


def check_plain_layers(checkpoint, quantization):
    """Every linear layer left in float must be ignored; otherwise loaders expect it to be packed."""
    quantized = set(checkpoint.packed_modules())
    for name, (_, _, entry) in checkpoint.places.items():
        module = name.removesuffix(".weight")
        is_linear = (name != module and module not in quantized and len(entry["shape"]) == 2
                     and not module.endswith(EMBEDDINGS))
        if is_linear and not any(matches(module, entry) for entry in quantization["ignore"]):
            raise ValueError(f"{name} is not packed, and quantization_config does not ignore it")


def unpack(words, bits, columns):
    """[rows, words] of int32 -> [rows, columns] of signed values, from a dense bit stream."""
    stream = numpy.ascontiguousarray(words, "<i4").view(numpy.uint8)
    stream = numpy.unpackbits(stream, axis=1, bitorder="little")[:, :columns * bits]
    digits = stream.reshape(len(words), columns, bits).astype(numpy.int32)
    return digits @ (1 << numpy.arange(bits, dtype=numpy.int32)) - (1 << (bits - 1))


def expect(what, found, wanted):
    if tuple(found) != tuple(wanted):
        raise ValueError(f"{what} is {tuple(found)}, expected {tuple(wanted)}")


def check_input(checkpoint, module, activations):
    """The stored tensors of the input must match the group's description of it."""
    if activations is not None and activations["type"] == "float":
        independent_floats.check_input(checkpoint, module, activations)
        return
    static = activations is not None and not activations["dynamic"]
    stored = {"input_scale": static, "input_zero_point": static and not activations["symmetric"]}
    for suffix, wanted in stored.items():
        name = f"{module}.{suffix}"
        if wanted != (name in checkpoint.places):
            raise ValueError(f"{name} must be there if and only if the group's input_activations require it")
        if wanted:
            expect(f"shape of {name}", checkpoint.read(name).shape, (1,))
    if static and not checkpoint.read(f"{module}.input_scale")[0] > 0:
        raise ValueError(f"{module}.input_scale is not above zero")


def dequantize(checkpoint, module, scheme, form):
    """f32 [out, in]"""
    bits = scheme["num_bits"]
    if (form in independent_floats.FORMATS) != (scheme["type"] == "float"):
        raise ValueError(f"{module} is {form} as {scheme}")
    if form in independent_floats.FORMATS:
        return independent_floats.dequantize(checkpoint, module, scheme, form)
    if form == "int-quantized":
        if (bits, scheme["strategy"], scheme["symmetric"]) != (8, "channel", True):
            raise ValueError(f"{module} is int-quantized as {scheme}")
        scale = checkpoint.read(f"{module}.weight_scale")
        codes = checkpoint.read(f"{module}.weight")
        expect(f"shape of {module}.weight_scale", scale.shape, (len(codes), 1))
        return codes.astype(numpy.float32) * scale
    rows, columns = (int(size) for size in checkpoint.read(f"{module}.weight_shape"))
    group = columns if scheme["strategy"] == "channel" else scheme["group_size"]
    if columns % group != 0:
        raise ValueError(f"{module}: {columns} columns do not divide into groups of {group}")

    packed = checkpoint.read(f"{module}.weight_packed")
    expect(f"shape of {module}.weight_packed", packed.shape, (rows, -(-columns * bits // 32)))
    levels = unpack(packed, bits, columns).reshape(rows, columns // group, group)

    scale = checkpoint.read(f"{module}.weight_scale")
    expect(f"shape of {module}.weight_scale", scale.shape, (rows, columns // group))

    zero_name = f"{module}.weight_zero_point"
    if scheme.get("symmetric", True) == (zero_name in checkpoint.places):
        raise ValueError(f"{zero_name} must be there if and only if the scheme is asymmetric")
    if zero_name in checkpoint.places:
        zeros = checkpoint.read(zero_name)
        expect(f"shape of {zero_name}", zeros.shape, (-(-rows * bits // 32), columns // group))
        levels = levels - unpack(zeros.T, bits, rows).T[:, :, None]
    return (levels.astype(numpy.float32) * scale[:, :, None]).reshape(rows, columns)


def relative_rms_error(weight, original):
    difference = weight.astype(numpy.float64) - original
    return float(numpy.linalg.norm(difference) / numpy.linalg.norm(original))


def write_float_checkpoint(checkpoint, weights, directory):
    """Writes the same model with all tensors in f32 and without quantization_config, so that any program can load
    it."""
    directory.mkdir(parents=True)
    quantized = tuple(f"{module}.weight_" for module in checkpoint.packed_modules())
    plain = {name: checkpoint.read(name) for name in checkpoint.places
             if not name.startswith(quantized) and ".input_" not in name}
    save_file(plain | weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = {key: value for key, value in checkpoint.config.items()
              if key not in ("quantization_config", "torch_dtype")} | {"dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    shutil.copy(checkpoint.directory / "tokenizer.json", directory)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quantized", metavar="QUANTIZED_DIR")
    parser.add_argument("--original", metavar="FLOAT_DIR", help="report errors relative to its weights")
    parser.add_argument("--out", metavar="FILE",
                        help="write the dequantized weights, f32, HF names")
    parser.add_argument("--checkpoint", metavar="DIR", type=Path,
                        help="write a float checkpoint with these weights (must not exist)")
    arguments = parser.parse_args()

    checkpoint = Checkpoint(arguments.quantized)
    quantization = checkpoint.config["quantization_config"]
    original = Checkpoint(arguments.original) if arguments.original else None
    check_plain_layers(checkpoint, quantization)

    weights = {}
    for module in checkpoint.packed_modules():
        group = scheme_of(module, quantization)
        scheme = group["weights"]
        name = f"{module}.weight"
        check_input(checkpoint, module, group["input_activations"])
        weights[name] = dequantize(checkpoint, module, scheme, group["format"])
        line = {"tensor": name, "bits": scheme["num_bits"],
                "group_size": scheme["group_size"] if scheme["strategy"] == "group" else None,
                "symmetric": scheme.get("symmetric", True),
                "activations": group["input_activations"]}
        if original is not None:
            line["relative_rms_error"] = relative_rms_error(weights[name], original.read(name))
        print(json.dumps(line))

    if arguments.out:
        save_file(weights, arguments.out)
    if arguments.checkpoint:
        write_float_checkpoint(checkpoint, weights, arguments.checkpoint)


if __name__ == "__main__":
    main()
