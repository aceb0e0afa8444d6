"""transformers on a CPU with packed weights: the linears of a checkpoint stay packed in memory, and this
package's kernels multiply them.

>>> import fewbits.transformers
>>> fewbits.transformers.enable()                                       # doctest: +SKIP
>>> model = AutoModelForCausalLM.from_pretrained("OUT")                 # doctest: +SKIP

Without this, transformers dequantizes a compressed-tensors checkpoint before the first token. With it, these linears
keep their codes: symmetric integer weights of 2, 4 or 8 bits with a scale per group, channel or tensor, and with float
activations, or 8-bit activations that are dynamic per token or static. torch computes all other linears and the rest of
the model as before. Packed linears have no gradients: ``backward`` through one raises ``NotImplementedError``.

Needs torch, transformers and compressed-tensors, which ``pip install "fewbits[transformers]"`` installs.
"""

from __future__ import annotations

import logging
from typing import Any

from fewbits._call import needs

__all__ = ["disable", "enable", "is_enabled"]

_METHOD = "compressed-tensors"
_LOGGER = logging.getLogger("fewbits")
#: The quantizer that :func:`enable` replaced, while it is replaced.
_BEFORE: list[Any] = []


def is_enabled() -> bool:
    """Whether checkpoints loaded from now on keep packed weights."""
    return bool(_BEFORE)


def enable() -> None:
    """Makes ``from_pretrained`` keep the packed weights of compressed-tensors checkpoints on a CPU from now on.

    Raises ``ImportError`` with the command to install what is missing.
    """
    if _BEFORE:
        return
    with needs("fewbits.transformers", "torch, transformers and compressed-tensors", "transformers"):
        import compressed_tensors  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: F401
        from transformers.quantizers.auto import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
            AUTO_QUANTIZER_MAPPING,
        )

        from fewbits._torch import quantizer

    _BEFORE.append(AUTO_QUANTIZER_MAPPING[_METHOD])
    AUTO_QUANTIZER_MAPPING[_METHOD] = quantizer(_BEFORE[0])


def disable() -> None:
    """Makes transformers load checkpoints in its default way again. Models that were already loaded are unchanged."""
    if _BEFORE:
        from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

        AUTO_QUANTIZER_MAPPING[_METHOD] = _BEFORE.pop()
