"""Reads floating-point weights of compressed-tensors checkpoints with numpy alone.

Written from the descriptions of the formats, so that it shares no code with the program under test or with
compressed-tensors. For a linear layer X of shape [out, in]:

  float-quantized       X.weight               F8_E4M3 [out, in]
                        X.weight_scale         float   [out, 1], [1], or [ceil(out/128), ceil(in/128)] of blocks
                        X.input_scale          float   [1]   static activations only
  nvfp4-pack-quantized  X.weight_packed        U8      [out, in/2]   low nibble: even column
                        X.weight_scale         F8_E4M3 [out, in/16]
                        X.weight_global_scale  F32     [1]   a divisor
                        X.input_global_scale   F32     [1]   rounded activations only
  mxfp4-pack-quantized  X.weight_packed        U8      [out, in/2]
                        X.weight_scale         U8      [out, in/32]  exponent + 127
  mxfp8-quantized       X.weight               F8_E4M3 [out, in]
                        X.weight_scale         U8      [out, in/32]

A weight is its number times its scale, with one rounding in f32; for NVFP4, the scale is scale / global, rounded to f32
first.
"""

import numpy

FORMATS = ("float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized")


def e4m3_numbers():
    """f32 [256]: the value of each code of F8_E4M3, which has no infinity; NaN is all ones except for the sign."""
    codes = numpy.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = numpy.where(exponent == 0, mantissa / 8 * 2.0 ** -6,
                            (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    magnitude[(codes & 0x7F) == 0x7F] = numpy.nan
    return numpy.where(codes >> 7 == 1, -magnitude, magnitude).astype(numpy.float32)


def e2m1_numbers():
    """f32 [16]: sign, two bits of exponent with bias 1, one of mantissa."""
    codes = numpy.arange(16)
    exponent, mantissa = codes >> 1 & 3, codes & 1
    magnitude = numpy.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1.0))
    return numpy.where(codes >> 3 == 1, -magnitude, magnitude).astype(numpy.float32)


def e5m2_numbers():
    """f32 [256]: as IEEE floats of that size, with infinities."""
    codes = numpy.arange(256)
    exponent, mantissa = codes >> 2 & 31, codes & 3
    magnitude = numpy.where(exponent == 0, mantissa / 4 * 2.0 ** -14,
                            (1 + mantissa / 4) * 2.0 ** (exponent - 15.0))
    magnitude[exponent == 31] = numpy.where(mantissa[exponent == 31] == 0, numpy.inf, numpy.nan)
    return numpy.where(codes >> 7 == 1, -magnitude, magnitude).astype(numpy.float32)


def e8m0_numbers():
    """f32 [256]: powers of two; the last is NaN."""
    powers = numpy.ldexp(1.0, numpy.arange(255) - 127)
    return numpy.append(powers, numpy.nan).astype(numpy.float32)


def expect(what, found, wanted):
    if tuple(found) != tuple(wanted):
        raise ValueError(f"{what} is {tuple(found)}, expected {tuple(wanted)}")


def stored(checkpoint, name, dtype):
    expect(f"type of {name}", (checkpoint.places[name][2]["dtype"],), (dtype,))
    return checkpoint.read(name)


def numbers_of(checkpoint, module, scheme):
    """f32 [out, in]: the values of the codes."""
    if scheme["num_bits"] == 4:
        packed = stored(checkpoint, f"{module}.weight_packed", "U8")
        codes = numpy.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
        return e2m1_numbers()[codes]
    numbers = e4m3_numbers()[stored(checkpoint, f"{module}.weight", "F8_E4M3")]
    if not numpy.isfinite(numbers).all():
        raise ValueError(f"{module}.weight holds NaN")
    return numbers


def check_input(checkpoint, module, activations):
    """The stored tensors of the input must match the group's description of it."""
    dynamic = True if activations is None else activations["dynamic"]
    stored = {"input_scale": dynamic is False, "input_global_scale": dynamic == "local", "input_zero_point": False}
    for suffix, wanted in stored.items():
        name = f"{module}.{suffix}"
        if wanted != (name in checkpoint.places):
            raise ValueError(f"the group's input_activations require {name}, or rule it out")
        if wanted:
            scale = checkpoint.read(name)
            expect(f"shape of {name}", scale.shape, (1,))
            if not (scale[0] > 0 and numpy.isfinite(scale[0])):
                raise ValueError(f"{name} is {scale[0]}")


def dequantize(checkpoint, module, scheme, form):
    """f32 [out, in]"""
    if scheme["type"] != "float" or scheme["symmetric"] is not True or scheme["dynamic"] is not False:
        raise ValueError(f"{module} is {form} as {scheme}")
    numbers = numbers_of(checkpoint, module, scheme)
    rows, columns = numbers.shape
    name = f"{module}.weight_scale"
    bits, strategy = scheme["num_bits"], scheme["strategy"]
    if form == "float-quantized":
        scale = checkpoint.read(name)
        shapes = {"channel": (rows, 1), "tensor": (1,), "block": (-(-rows // 128), -(-columns // 128))}
        expect("bits", (bits,), (8,))
        expect(f"shape of {name}", scale.shape, shapes[strategy])
        if strategy == "block":
            expect("block_structure", scheme["block_structure"], (128, 128))
            scale = scale.repeat(128, axis=0)[:rows].repeat(128, axis=1)[:, :columns]
        return numbers * scale
    group = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32, "mxfp8-quantized": 32}[form]
    expect("group", (scheme["group_size"], strategy),
           (group, "tensor_group" if form == "nvfp4-pack-quantized" else "group"))
    expect("bits", (bits,), (8 if form == "mxfp8-quantized" else 4,))
    if form == "nvfp4-pack-quantized":
        scale = e4m3_numbers()[stored(checkpoint, name, "F8_E4M3")]
        divisor = stored(checkpoint, f"{module}.weight_global_scale", "F32")
        expect(f"shape of {module}.weight_global_scale", divisor.shape, (1,))
        scale = scale / divisor
    else:
        scale = e8m0_numbers()[stored(checkpoint, name, "U8")]
    expect(f"shape of {name}", scale.shape, (rows, columns // group))
    if not (numpy.isfinite(scale).all() and (scale >= 0).all()):
        raise ValueError(f"{name} has a value that is negative or not finite")
    return numbers * scale.repeat(group, axis=1)


def modelopt(checkpoint, module):
    """f32 [out, in] of a linear layer in ModelOpt's layout of NVFP4, whose global scale multiplies:

      X.weight          U8      [out, in/2]   low nibble: even column
      X.weight_scale    F8_E4M3 [out, in/16]
      X.weight_scale_2  F32     []

    A weight is its number times scale * scale_2, a product that is rounded to f32 first.
    """
    packed = stored(checkpoint, f"{module}.weight", "U8")
    codes = numpy.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    scales = e4m3_numbers()[stored(checkpoint, f"{module}.weight_scale", "F8_E4M3")]
    factor = stored(checkpoint, f"{module}.weight_scale_2", "F32")
    expect(f"shape of {module}.weight_scale_2", factor.shape, ())
    expect(f"shape of {module}.weight_scale", scales.shape, (len(codes), codes.shape[1] // 16))
    if not numpy.isfinite(scales).all() or (scales < 0).any() or not 0 < float(factor) < 1:
        raise ValueError(f"{module}: a scale is negative or not finite, or weight_scale_2 is not between 0 and 1")
    scales = (scales * numpy.float32(factor)).astype(numpy.float32)
    return e2m1_numbers()[codes] * numpy.repeat(scales, 16, axis=1)
