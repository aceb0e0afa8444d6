"""llm-compressor's interface, :func:`oneshot` and its modifiers, implemented by this package.

The call and its modifiers stay the same if this module supports their arguments:

>>> from fewbits.llmcompressor import GPTQModifier, oneshot
>>> oneshot(                                                                        # doctest: +SKIP
...     model="MODEL",
...     dataset=rows,
...     recipe=GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]),
...     output_dir="OUT",
...     max_seq_length=2048,
...     num_calibration_samples=512,
... )

Unsupported arguments are never ignored: they are rejected by name before any work. There are these differences:

- A sample is not a truncated row but a window of ``max_seq_length`` tokens. Texts are joined and then cut into windows.
- The output head must be in ``ignore`` of each modifier with a scheme, as ``"lm_head"`` or a pattern that matches it.
  llm-compressor quantizes a head that is not ignored, also one that is tied to the embedding, which it unties. Here, a
  head is quantized with :func:`fewbits.quantize` and an override.
- ``dataset`` is a path, the name of a built-in text, or rows, not the name of a dataset on a hub: load it with
  ``datasets.load_dataset(NAME, split=...)``, and pass the result.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Union

from fewbits._api import quantize
from fewbits._arguments import check_types
from fewbits._call import PathOrName, Texts
from fewbits._errors import UsageError
from fewbits._events import Event
from fewbits._names import naming
from fewbits._results import Floats, Gguf, Quantized

__all__ = ["AWQModifier", "GPTQModifier", "QuantizationModifier", "SmoothQuantModifier", "oneshot"]

#: Names of schemes in llm-compressor and here.
SCHEMES = {
    "W4A16": "w4a16-g128-sym",
    "W4A16_ASYM": "w4a16-g128-asym",
    "W8A16": "w8a16-channel-sym",
    "W8A8": "w8a8",
    "INT8": "w8a8",
    "FP8": "fp8-static",
    "FP8_DYNAMIC": "fp8",
    "FP8_BLOCK": "fp8-block",
    "NVFP4": "nvfp4",
    "NVFP4A16": "nvfp4a16",
    "MXFP4A16": "mxfp4a16",
    "MXFP8": "mxfp8",
}

#: Schemes whose activation scales are calibrated, even if weights are rounded to nearest.
CALIBRATED = ("fp8-static", "nvfp4")

#: Column orders in llm-compressor and here.
ACT_ORDERS: dict[object, str] = {
    "static": "static-groups",
    "weight": "static-groups",
    None: "none",
    False: "none",
}

#: Arguments of :func:`fewbits.quantize` by the names that they have here, in :func:`oneshot` or in a modifier.
_ARGUMENTS = {
    "output": "output_dir",
    "calibration": "dataset",
    "samples": "num_calibration_samples",
    "seq_len": "max_seq_length",
    "method": "recipe",
    "alpha": "smoothing_strength",
    "damping": "dampening_frac",
    "act_order": "actorder",
}
#: Arguments of both, with the same name.
_SAME = frozenset({"model", "scheme", "ignore", "block_size", "resume", "force", "threads", "on_event", "progress"})

_Names = Union[str, Sequence[str]]


def _refuse(what: str, unknown: Mapping[str, object], known: Iterable[str]) -> None:
    if unknown:
        listed = ", ".join(f"`{name}`" for name in sorted(unknown))
        raise UsageError(f"{what} does not support {listed} here", f"it supports {', '.join(sorted(known))}")


class _Scheme:
    """The common base of modifiers with a scheme."""

    def __init__(self, targets: _Names, scheme: str | None, ignore: _Names) -> None:
        name = type(self).__name__
        check_types(_Scheme.__init__, locals())
        if ([targets] if isinstance(targets, str) else list(targets)) != ["Linear"]:
            raise UsageError(
                f"{name}: targets={targets!r} is not supported",
                'use targets="Linear", and list what stays float in ignore=',
            )
        if scheme is not None and scheme.upper() not in SCHEMES:
            raise UsageError(f"{name}: unknown scheme={scheme!r}", f"choose one of {', '.join(SCHEMES)}")
        self.scheme = None if scheme is None else SCHEMES[scheme.upper()]
        self.ignore = [ignore] if isinstance(ignore, str) else list(ignore)


class QuantizationModifier(_Scheme):
    """Rounds to nearest."""

    def __init__(
        self, *, targets: _Names = "Linear", scheme: str | None = None, ignore: _Names = (), **unknown: object
    ) -> None:
        _refuse("QuantizationModifier", unknown, ("targets", "scheme", "ignore"))
        super().__init__(targets, scheme, ignore)


class GPTQModifier(_Scheme):
    """Rounds with GPTQ."""

    def __init__(
        self,
        *,
        targets: _Names = "Linear",
        scheme: str | None = None,
        ignore: _Names = (),
        block_size: int = 128,
        dampening_frac: float = 0.01,
        actorder: object = "static",
        **unknown: object,
    ) -> None:
        known = ("targets", "scheme", "ignore", "block_size", "dampening_frac", "actorder")
        _refuse("GPTQModifier", unknown, known)
        check_types(GPTQModifier.__init__, locals())
        super().__init__(targets, scheme, ignore)
        order = getattr(actorder, "value", actorder)
        if not isinstance(order, (str, bool, type(None))) or order not in ACT_ORDERS:
            raise UsageError(
                f"GPTQModifier: unknown actorder={order!r}", 'choose "static", "weight", or None'
            )
        self.settings = {
            "block_size": block_size,
            "damping": dampening_frac,
            "act_order": ACT_ORDERS[order],
        }


class AWQModifier(_Scheme):
    """Scales channels with AWQ, and rounds to nearest unless another modifier rounds."""

    def __init__(
        self, *, targets: _Names = "Linear", scheme: str | None = None, ignore: _Names = (), **unknown: object
    ) -> None:
        _refuse("AWQModifier", unknown, ("targets", "scheme", "ignore"))
        super().__init__(targets, scheme, ignore)


class SmoothQuantModifier:
    """Divides activations by a scale per channel, and multiplies the weights by it."""

    def __init__(self, *, smoothing_strength: float = 0.5, **unknown: object) -> None:
        _refuse("SmoothQuantModifier", unknown, ("smoothing_strength",))
        check_types(SmoothQuantModifier.__init__, locals())
        self.smoothing_strength = smoothing_strength


def _matches_head(pattern: str) -> bool:
    """Whether an element of ``ignore`` matches the output head."""
    try:
        return pattern == "lm_head" or (pattern.startswith("re:") and bool(re.match(pattern[3:], "lm_head")))
    except re.error:
        return False


_Modifier = Union[QuantizationModifier, GPTQModifier, AWQModifier, SmoothQuantModifier]


def _settings(recipe: _Modifier | Sequence[_Modifier]) -> dict[str, Any]:
    """Converts modifiers to arguments of :func:`fewbits.quantize`."""
    kinds = (QuantizationModifier, GPTQModifier, AWQModifier, SmoothQuantModifier)
    if isinstance(recipe, (str, PathLike)):
        raise UsageError(
            "recipes as text or files are not supported here",
            "pass modifiers, or a TOML recipe to fewbits.quantize(recipe=)",
        )
    if not isinstance(recipe, (*kinds, Iterable)):
        raise TypeError(f"recipe= must be a modifier or a list of modifiers, not {type(recipe).__name__}")
    modifiers = [recipe] if isinstance(recipe, kinds) else list(recipe)
    for modifier in modifiers:
        if not isinstance(modifier, kinds):
            names = ", ".join(kind.__name__ for kind in kinds)
            raise UsageError(
                f"`{type(modifier).__name__}` is not a modifier of fewbits.llmcompressor", f"its modifiers are {names}"
            )
    order = [type(modifier) for modifier in modifiers]
    methods: dict[tuple[type, ...], str] = {
        (QuantizationModifier,): "rtn",
        (GPTQModifier,): "gptq",
        (AWQModifier,): "awq",
        (AWQModifier, QuantizationModifier): "awq",
        (AWQModifier, GPTQModifier): "awq-gptq",
        (SmoothQuantModifier, QuantizationModifier): "smoothquant",
        (SmoothQuantModifier, GPTQModifier): "smoothquant-gptq",
    }
    method = methods.get(tuple(order))
    if method is None:
        names = " then ".join(kind.__name__ for kind in order) or "nothing"
        known = "; ".join(" then ".join(kind.__name__ for kind in kinds) for kinds in methods)
        raise UsageError(f"{names} is not a supported recipe", f"use one of these: {known}")
    settings: dict[str, Any] = {"method": method}
    ignore: list[str] = []
    schemes = set()
    for modifier in modifiers:
        if isinstance(modifier, SmoothQuantModifier):
            settings["alpha"] = modifier.smoothing_strength
            continue
        if modifier.scheme is not None:
            schemes.add(modifier.scheme)
            if not any(map(_matches_head, modifier.ignore)):
                raise UsageError(
                    f"{type(modifier).__name__} does not ignore the output head, which oneshot() does not quantize",
                    'add ignore=["lm_head"], or call fewbits.quantize() with override={"lm_head": SCHEME}',
                )
        ignore += [name for name in modifier.ignore if name not in ignore]
        if isinstance(modifier, GPTQModifier):
            settings.update(modifier.settings)
    if len(schemes) != 1:
        raise UsageError(
            f"the recipe has {len(schemes)} different schemes, but must have one",
            "set the same scheme= in its modifiers, or set it in only one of them",
        )
    # The head stays float by default. Its name may differ, and a pattern that matches nothing is an error.
    settings["ignore"] = [name for name in ignore if name not in ("lm_head", "re:.*lm_head")]
    settings["scheme"] = schemes.pop()
    return settings


def _spelling(name: str, value: str) -> str:
    """Spells an argument of :func:`fewbits.quantize` as callers of :func:`oneshot` do."""
    if name == "scheme":
        value = next((f'"{theirs}"' for theirs, ours in SCHEMES.items() if f'"{ours}"' == value), value)
    known = _ARGUMENTS.get(name, name)
    has_no_name = known == name and name not in _SAME and name in inspect.signature(quantize).parameters
    return f"fewbits.quantize({name}={value})" if has_no_name else f"{known}={value}"


def _rows(dataset: Texts, column: str) -> Texts:
    """Returns the rows of a dataset with their texts, which are in ``column``, under the name ``text``."""
    if isinstance(dataset, (str, PathLike, Mapping)):
        return dataset

    def renamed(row: Any, number: int) -> Any:
        if not isinstance(row, Mapping) or "messages" in row:
            return row
        if column not in row and "input_ids" in row:
            raise UsageError(
                "the dataset contains tokens (`input_ids`)",
                "pass the texts or messages instead; this function tokenizes them",
            )
        if column not in row:
            columns = ", ".join(f"`{name}`" for name in row)
            raise UsageError(
                f"row {number} of dataset= has no column `{column}`; its columns are {columns}",
                "name the column with the texts with text_column=",
            )
        return {"text": row[column]}

    return [renamed(row, number) for number, row in enumerate(dataset, 1)]


def oneshot(
    *,
    model: PathOrName,
    recipe: _Modifier | Sequence[_Modifier],
    output_dir: PathOrName,
    dataset: Texts | None = None,
    num_calibration_samples: int = 512,
    max_seq_length: int = 384,
    text_column: str = "text",
    save_compressed: bool = True,
    resume: bool = False,
    force: bool = False,
    threads: int | None = None,
    on_event: Callable[[Event], object] | None = None,
    progress: bool = False,
    **unknown: object,
) -> Quantized | Gguf | Floats:
    """Quantizes a model directory into ``output_dir``, as compressed-tensors.

    ``recipe`` is a modifier or several; each one with a scheme must ignore the output head. ``dataset`` takes the same
    values as ``calibration`` of :func:`fewbits.quantize`; None selects the built-in text. With a
    ``QuantizationModifier`` alone, ``dataset``, ``num_calibration_samples`` and ``max_seq_length`` are used only if the
    scheme has static activation scales (``FP8``, ``NVFP4``). The last five arguments are those of
    :func:`fewbits.quantize`. Errors and warnings name the arguments of this function and its modifiers.

    Raises :class:`fewbits.QuantError`; :class:`fewbits.UsageError` names each unknown argument.
    """
    given = locals()
    known = ("model", "recipe", "output_dir", "dataset", "num_calibration_samples", "max_seq_length", "text_column")
    _refuse("oneshot", unknown, (*known, "save_compressed", "resume", "force", "threads", "on_event", "progress"))
    if not isinstance(model, (str, PathLike)):
        raise UsageError(
            f"model= must be the path of a model directory, not {type(model).__name__}",
            "pass the directory that the model was loaded from",
        )
    settings = _settings(recipe)
    check_types(oneshot, {name: value for name, value in given.items() if name != "recipe"})
    if not save_compressed:
        raise UsageError("save_compressed=False is not supported: the output is always packed", "omit it")
    # A data-free run refuses settings for a text that it does not read.
    if settings["method"] != "rtn" or settings["scheme"] in CALIBRATED:
        settings.update(samples=num_calibration_samples, seq_len=max_seq_length)
        settings["calibration"] = None if dataset is None else _rows(dataset, text_column)
    with naming(_spelling):
        return quantize(
            model,
            output_dir,
            resume=resume,
            force=force,
            threads=threads,
            on_event=on_event,
            progress=progress,
            **settings,
        )
