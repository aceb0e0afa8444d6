"""The operator and the module behind :mod:`fewbits.transformers`. Imports torch."""

from __future__ import annotations

import collections
import ctypes
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]

from fewbits import _kernels
from fewbits._memory import MappedFiles, anonymous, release, trim

_LOGGER = logging.getLogger("fewbits")
#: Kinds of numbers in messages.
_NUMBERS = {"int": "integer"}
# Codes that are unpacked at a time when a linear is packed, one per byte.
_CODES = 16 << 20


def _gomp_parallel() -> int | None:
    """Returns the address of ``GOMP_parallel`` in the OpenMP runtime that torch uses, or None if torch uses none."""
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    library = Path(torch.__file__).parent / "lib/libtorch_cpu.so"
    try:
        # A symbol is looked up in the library and in those it is linked to. Nothing is loaded.
        found = ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_LAZY).GOMP_parallel
    except (AttributeError, OSError):
        return None
    return ctypes.cast(found, ctypes.c_void_p).value


_kernels.use_openmp(_gomp_parallel())

_OPERATORS = torch.library.Library("fewbits", "DEF")
_OPERATORS.define(
    "linear(Tensor x, Tensor packed, int[] layout, Tensor? bias, str activations, float? scale, int zero) -> Tensor"
)


def _linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    layout: list[int],
    bias: torch.Tensor | None,
    activations: str,
    scale: float | None,
    zero: int,
) -> torch.Tensor:
    # Indices of fields of `layout`: see _kernels.Layout.
    n, k = layout[6], layout[7]
    if x.shape[-1] != k:
        raise ValueError(f"the input must have the width {k}, got shape {tuple(x.shape)}")
    if packed.numel() < layout[11] or packed.dtype != torch.uint8 or not packed.is_contiguous():
        raise ValueError(
            f"packed weights must have at least {layout[11]} contiguous uint8 values, got shape {tuple(packed.shape)} "
            f"and dtype {packed.dtype}"
        )
    kind = _kernels.TYPES.get(str(x.dtype).removeprefix("torch."))
    if kind is None:
        raise TypeError(f"packed weights do not support activations of type {x.dtype}")
    if bias is not None and (bias.dtype != torch.float32 or bias.numel() != n or not bias.is_contiguous()):
        raise ValueError(
            f"bias must have {n} contiguous float32 values, got shape {tuple(bias.shape)} and dtype {bias.dtype}"
        )
    x = x.contiguous()
    out = torch.empty((*x.shape[:-1], n), dtype=torch.float32)
    if out.numel():
        _kernels.linear(
            layout,
            packed.data_ptr(),
            x.data_ptr(),
            kind,
            x.numel(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            activations,
            None if scale is None else (scale, zero),
            torch.get_num_threads(),
        )
    return out.to(x.dtype)


_OPERATORS.impl("linear", _linear, "CPU")


@torch.library.register_fake("fewbits::linear", lib=_OPERATORS)  # type: ignore[untyped-decorator,unused-ignore]
def _(
    x: torch.Tensor,
    packed: torch.Tensor,
    layout: list[int],
    bias: torch.Tensor | None,
    activations: str,
    scale: float | None,
    zero: int,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], layout[6]))


def _backward(_context: Any, _gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    raise NotImplementedError("packed weights have no gradients; load the model without fewbits.transformers to train")


# Without this, gradients of the layers before a packed linear would be wrong, because torch ignores operators without a
# derivative.
torch.library.register_autograd("fewbits::linear", _backward, lib=_OPERATORS)


class PackedLinear(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    """A linear whose weight is packed for the kernels."""

    packed: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        codes: Callable[[int, int], torch.Tensor],
        shape: tuple[int, int],
        bits: int,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        activations: str = "float",
        static: tuple[float, int] | None = None,
    ) -> None:
        """``codes(first, end)`` returns the codes of a range of the rows, ``[end - first, k]``: unsigned, one per byte,
        with the zero point at ``2^(bits − 1)``. It is called once for every row, in order. ``shape`` is ``(n, k)``;
        ``scales`` are ``[n, groups]``; ``activations`` and ``static`` are as in :func:`fewbits._kernels.linear`."""
        super().__init__()
        self.out_features, self.in_features = n, k = shape
        scales = scales.to(torch.float32).contiguous()
        if scales.shape[0] != n or k % scales.shape[1]:
            raise ValueError(
                f"expected scales [n, groups] with n = {n} and groups a divisor of {k}, got {tuple(scales.shape)}"
            )
        # The layout depends on all scales, but only some rows of codes are in memory at a time.
        unpacked = torch.frombuffer(anonymous(n * k), dtype=torch.uint8).view(n, k)
        weights, layout = _kernels.layout_of(
            bits,
            shape,
            k // scales.shape[1],
            unpacked.data_ptr(),
            scales.data_ptr(),
            sums=static is not None and static[1] != 0,
        )
        packed = torch.frombuffer(anonymous(layout.bytes, huge_pages=True), dtype=torch.uint8)
        step = max(_CODES // k // _kernels.PANEL_ROWS, 1) * _kernels.PANEL_ROWS
        for first in range(0, n, step):
            rows = unpacked[first : first + step]
            rows.copy_(codes(first, first + len(rows)))
            _kernels.pack(weights, layout, first, len(rows), packed.data_ptr(), torch.get_num_threads())
            release(rows)
        self.layout = _kernels.layout_numbers(layout)
        self.activations = activations
        self.scale: float | None = None if static is None else static[0]
        self.zero = 0 if static is None else static[1]
        self.bits = bits
        self.register_buffer("packed", packed)
        self.register_buffer("bias", None if bias is None else bias.detach().to(torch.float32).contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.fewbits.linear(  # type: ignore[no-any-return,unused-ignore]
            x, self.packed, self.layout, self.bias, self.activations, self.scale, self.zero
        )

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLinear:
        # `model.to(dtype)` must not convert the bias, because the kernels require its type.
        bias = self.bias
        super()._apply(fn, recurse)
        if bias is not None and self.bias is not None and self.bias.device.type == "cpu":
            self.bias = bias
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, {self.activations}"


def _codes(stored: torch.Tensor, bits: int, k: int) -> torch.Tensor:
    """Returns the unsigned codes of some rows of a linear, one per byte, with the zero point at ``2^(bits − 1)``."""
    rows = stored.contiguous().view(torch.uint8)
    if stored.dtype == torch.int8:
        return rows ^ 0x80
    # Codes are packed in little-endian words, so the bytes of a word are in the order of columns.
    if bits == 8:
        return rows[:, :k].clone()
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    spread = (rows.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return spread.reshape(len(rows), -1)[:, :k]


def _activations(scheme: Any, module: torch.nn.Module) -> tuple[str, tuple[float, int] | None] | str:
    """Returns how a scheme treats the inputs: the arguments ``activations`` and ``static`` of :class:`PackedLinear`; or
    what the kernels do not support."""
    inputs = scheme.input_activations
    if inputs is None:
        return "float", None
    kind = getattr(inputs.type, "value", inputs.type)
    strategy = getattr(inputs.strategy, "value", inputs.strategy)
    if kind != "int" or inputs.num_bits != 8:
        return f"{inputs.num_bits}-bit {_NUMBERS.get(kind, kind)} activations"
    if inputs.dynamic is True and strategy == "token" and inputs.symmetric:
        return "int8", None
    if inputs.dynamic is False and strategy == "tensor" and hasattr(module, "input_scale"):
        zero = getattr(module, "input_zero_point", None)
        zero_point = 0 if zero is None else int(zero.item())
        return "int8", (float(module.input_scale.item()), zero_point)
    return f"activations with a scale per {strategy}"


def _unsupported(scheme: Any, module: torch.nn.Linear) -> str | None:
    """Returns why the kernels do not support the weight of a quantized linear; None if they do."""
    weights = scheme.weights
    kind = getattr(weights.type, "value", weights.type)
    strategy = getattr(weights.strategy, "value", weights.strategy)
    if kind != "int" or weights.num_bits not in (2, 4, 8):
        return f"{weights.num_bits}-bit {_NUMBERS.get(kind, kind)} weights"
    if not weights.symmetric:
        return "asymmetric weights"
    if strategy not in ("group", "channel", "tensor"):
        return f"weights with a scale per {strategy}"
    if getattr(weights, "actorder", None) == "group" or getattr(module, "weight_g_idx", None) is not None:
        return "groups of inputs that are not adjacent"
    if module.weight_scale.device.type != "cpu":
        return f"weights on the device {module.weight_scale.device.type}"
    if getattr(scheme, "output_activations", None) is not None:
        return "quantized outputs"
    stored = getattr(module, "weight_packed", None)
    if stored is None and (weights.num_bits != 8 or module.weight.dtype != torch.int8):
        return "weights that are not packed"
    if stored is not None and stored.dtype != torch.int32:
        return f"packed weights of type {stored.dtype}"
    return None


def _packed(module: torch.nn.Linear, files: MappedFiles) -> PackedLinear | str:
    """Returns the packed form of a quantized linear, or what the kernels do not support. The pages of its weight are
    released if they are mapped from one of the files."""
    scheme: Any = module.quantization_scheme
    weights = getattr(scheme, "weights", None)
    if weights is None:
        return "float weights"
    unsupported = _unsupported(scheme, module)
    if unsupported is not None:
        return unsupported
    activations = _activations(scheme, module)
    if isinstance(activations, str):
        return activations
    n, k = module.out_features, module.in_features
    strategy = getattr(weights.strategy, "value", weights.strategy)
    scales = module.weight_scale.data.reshape(-1, module.weight_scale.shape[-1] if strategy == "group" else 1)
    if strategy == "tensor":
        scales = scales.expand(n, 1)
    bias = getattr(module, "bias", None)
    stored = getattr(module, "weight_packed", None)
    data = (module.weight if stored is None else stored).data

    def codes(first: int, end: int) -> torch.Tensor:
        found = _codes(data[first:end], weights.num_bits, k)
        if data.is_contiguous():
            files.release(data[first:end])
        return found

    return PackedLinear(
        codes,
        (n, k),
        weights.num_bits,
        scales,
        None if bias is None else bias.data,
        *activations,
    )


def replace_linears(model: torch.nn.Module) -> tuple[int, dict[str, str]]:
    """Replaces linears of compressed-tensors by packed ones. Returns how many were replaced, and those that were not,
    with the reason."""
    replaced = 0
    stayed: dict[str, str] = {}
    files = MappedFiles()
    for name, module in list(model.named_modules()):
        if getattr(module, "quantization_scheme", None) is None or not isinstance(module, torch.nn.Linear):
            continue
        packed = _packed(module, files)
        if isinstance(packed, str):
            stayed[name] = packed
            continue
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, packed)
        # Free the source tensors before the next linear is packed.
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                # The packed linear may keep the bias itself.
                if tensor is not None and key != "bias" and tensor.is_contiguous():
                    files.release(tensor)
            tensors.clear()
        replaced += 1
        # Unpacking leaves gaps between the tensors of the C library, which add up to a third of the model.
        trim()
    return replaced, stayed


def quantizer(base: type[Any]) -> type[Any]:
    """Returns a subclass of transformers' quantizer for compressed-tensors checkpoints that packs the linears after
    loading."""

    class PackedQuantizer(base):  # type: ignore[misc,valid-type,unused-ignore]
        """Loads the checkpoint as the base class does, then packs its linears."""

        _packs = False

        def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
            model = super()._process_model_after_weight_loading(model, **kwargs) or model
            if self.quantization_config.dequantize:
                return model
            replaced, stayed = replace_linears(model)
            self._packs = replaced > 0
            model._fewbits_unpacked = stayed
            if stayed:
                reasons = collections.Counter(stayed.values()).most_common()
                _LOGGER.warning(
                    "the kernels do not support %d of %d quantized linears, so transformers unpacks them: %s",
                    len(stayed),
                    replaced + len(stayed),
                    ", ".join(f"{reason} ({count})" for reason, count in reasons),
                )
            if replaced and not stayed:
                hook = getattr(model, "ct_decompress_hook", None)
                if hook is not None:
                    hook.remove()
                    delattr(model, "ct_decompress_hook")
            return model

        @property
        def is_trainable(self) -> bool:
            return not self._packs and bool(super().is_trainable)

        def is_serializable(self) -> bool:
            # Packed weights cannot be saved in a format that can be loaded again.
            return not self._packs and bool(super().is_serializable())

    return PackedQuantizer
