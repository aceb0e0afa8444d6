"""transformers on a CPU with packed weights: the linears of a checkpoint stay packed in memory, and this
package's kernels multiply them.

>>> import fewbits.transformers
>>> fewbits.transformers.enable()                                       # doctest: +SKIP
>>> model = AutoModelForCausalLM.from_pretrained("OUT")                 # doctest: +SKIP

Without this, transformers dequantizes a compressed-tensors checkpoint before the first token. With it, these linears
keep their codes: symmetric integer weights of 2, 4 or 8 bits with a scale per group, channel or tensor, and with float
activations, or 8-bit activations that are dynamic per token or static. torch computes all other linears and the rest of
the model as before; :func:`linears` lists the quantized linears of a model that stay packed and those that do not.
Checkpoints of other formats, such as AWQ and GPTQ, are loaded as before, and the first of each kind logs a warning.
Packed linears have no gradients: ``backward`` through one raises ``NotImplementedError``.

Needs torch, transformers and compressed-tensors, which ``pip install "fewbits[transformers]"`` installs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from fewbits._call import needs

__all__ = ["Linears", "disable", "enable", "is_enabled", "linears"]

_METHOD = "compressed-tensors"
_LOGGER = logging.getLogger("fewbits")
#: What :func:`enable` replaced, while it is replaced: the quantizer, and the function that chooses quantizers.
_BEFORE: list[Any] = []
#: The kinds of checkpoints for which the warning was logged.
_WARNED: set[str] = set()


@dataclass(frozen=True)
class Linears:
    """The quantized linears of a model, by name. A model whose format is not compressed-tensors has none."""

    #: Those that stay packed.
    packed: tuple[str, ...]
    #: Those that transformers unpacks, with the reason.
    unpacked: dict[str, str]


def linears(model: Any) -> Linears:
    """Returns which quantized linears of a model stay packed. The model was loaded after :func:`enable`."""
    from fewbits._torch import PackedLinear

    packed = (name for name, module in model.named_modules() if isinstance(module, PackedLinear))
    return Linears(tuple(packed), dict(getattr(model, "_fewbits_unpacked", {})))


def _warn_of(method: str) -> None:
    if method == _METHOD or method in _WARNED:
        return
    _WARNED.add(method)
    remedy = '; fewbits.quantize(MODEL, OUT, format="compressed-tensors") converts it' if method == "gptq" else ""
    _LOGGER.warning(
        "fewbits.transformers keeps only compressed-tensors checkpoints packed, so transformers loads this one, `%s`, "
        "in its own way%s",
        method,
        remedy,
    )


def is_enabled() -> bool:
    """Whether checkpoints loaded from now on keep packed weights."""
    return bool(_BEFORE)


def enable() -> None:
    """Makes ``from_pretrained`` keep the packed weights of compressed-tensors checkpoints on a CPU from now on. Linears
    that cannot stay packed, and checkpoints of other formats, are logged as warnings; see :func:`linears`.

    Raises ``ImportError`` with the command to install what is missing.
    """
    if _BEFORE:
        return
    with needs("fewbits.transformers", "torch, transformers and compressed-tensors", "transformers"):
        import compressed_tensors  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: F401
        from transformers.quantizers.auto import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
            AUTO_QUANTIZER_MAPPING,
            AutoHfQuantizer,
        )

        from fewbits._torch import quantizer

    chosen = vars(AutoHfQuantizer)["from_config"]

    def from_config(cls: Any, *arguments: Any, **options: Any) -> Any:
        found = chosen.__get__(None, cls)(*arguments, **options)
        method = found.quantization_config.quant_method
        _warn_of(str(getattr(method, "value", method)))
        return found

    _BEFORE.extend((AUTO_QUANTIZER_MAPPING[_METHOD], chosen))
    AUTO_QUANTIZER_MAPPING[_METHOD] = quantizer(_BEFORE[0])
    AutoHfQuantizer.from_config = classmethod(from_config)


def disable() -> None:
    """Makes transformers load checkpoints in its default way again. Models that were already loaded are unchanged."""
    if _BEFORE:
        from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AutoHfQuantizer

        AUTO_QUANTIZER_MAPPING[_METHOD], AutoHfQuantizer.from_config = _BEFORE
        _BEFORE.clear()
