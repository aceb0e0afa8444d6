"""Results of functions that only read a model: plans and inspections."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fewbits._results import Result, _size, _table


@dataclass(frozen=True)
class EngineVerdict:
    """A verdict on whether an engine loads the planned output."""

    engine: str
    version: str
    #: The number of ranks (GPUs).
    ranks: int
    #: ``yes``, ``yes, but`` (under the conditions in ``reason``), ``unsure`` or ``no``.
    loads: str
    reason: str | None

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields."""
        return asdict(self)


@dataclass(frozen=True)
class PlannedFormat:
    """The planned output in one format."""

    format: str
    output_bytes: int
    #: Bits per quantized weight; None for GGUF files, whose bits are counted over all weights.
    bits_per_quantized_weight: float | None
    warnings: tuple[str, ...]
    #: The parts of the requested quantization that the format cannot represent.
    loses: tuple[str, ...]
    engines: tuple[EngineVerdict, ...]
    #: One dictionary per tensor, with the keys of the JSON output.
    tensors: tuple[Mapping[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields."""
        return asdict(self)


class Plan(Result):
    """The result of :func:`fewbits.plan`."""

    __slots__ = ("seconds",)

    #: The estimated time of a run on this machine in seconds, if known.
    seconds: float | None

    def __init__(self, answer: Mapping[str, Any]) -> None:
        super().__init__(answer["plan"])
        self.seconds = answer["seconds"]

    @property
    def is_gguf(self) -> bool:
        """Whether the plan is for a GGUF file."""
        return "mixture" in self._fields

    @property
    def method(self) -> str | None:
        """The method; None for GGUF files."""
        return self._fields.get("method")

    @property
    def input_bytes(self) -> int:
        """The size of the model in bytes."""
        return int(self._fields["input_bytes"])

    @property
    def peak_memory_bytes(self) -> int | None:
        """The estimated peak memory of a run in bytes, if known."""
        return self._fields.get("peak_memory_bytes")

    @property
    def smallest_budget_bytes(self) -> int | None:
        """The smallest sufficient ``memory_budget`` in bytes, if known. With it, hidden states are kept in files."""
        return self._fields.get("smallest_budget_bytes")

    @property
    def formats(self) -> tuple[PlannedFormat, ...]:
        """The planned outputs, one per format."""
        fields = self._fields
        if self.is_gguf:
            one = {"format": fields["format"], "output_bytes": fields["output_bytes"], "warnings": fields["notes"]}
            return (_planned({**one, "tensors": fields["tensors"]}),)
        return tuple(_planned(one) for one in fields["formats"])

    @property
    def output_bytes(self) -> int:
        """The size of the output in the first format, in bytes."""
        return self.formats[0].output_bytes

    def _shown(self) -> str:
        written = ", ".join(f"{one.format} {_size(one.output_bytes)}" for one in self.formats)
        return f"{self.method or 'gguf'}: {_size(self.input_bytes)} to {written}"

    def _repr_html_(self) -> str:
        parts = [f"<p>{html.escape(repr(self))}</p>"]
        for planned in self.formats:
            tensors = (
                [
                    str(t["tensor"]),
                    "×".join(map(str, t["shape"])),
                    str(t.get("action", t.get("type"))),
                    _size(t.get("bytes_after", t.get("bytes", 0))),
                ]
                for t in planned.tensors
            )
            parts.append(_table(["tensor", "shape", "gets", "bytes"], tensors))
            engines = ([one.engine, one.version, str(one.ranks), one.loads, one.reason or ""] for one in planned.engines)
            if planned.engines:
                parts.append(_table(["engine", "version", "ranks", "loads it", "why"], engines))
        return "".join(parts)


def _planned(fields: Mapping[str, Any]) -> PlannedFormat:
    engines = (
        EngineVerdict(one["engine"], one["version"], rank["ranks"], rank["loads"], rank["reason"])
        for one in fields.get("engines", ())
        for rank in one["ranks"]
    )
    return PlannedFormat(
        format=fields["format"],
        output_bytes=fields["output_bytes"],
        bits_per_quantized_weight=fields.get("bits_per_quantized_weight"),
        warnings=tuple(fields["warnings"]),
        loses=tuple(fields.get("loses", ())),
        engines=tuple(engines),
        tensors=tuple(fields["tensors"]),
    )


@dataclass(frozen=True)
class LinearInfo:
    """A linear of a checkpoint, and how its weight is stored."""

    module: str
    shape: tuple[int, int]
    stored: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields."""
        return asdict(self)


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a checkpoint."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    file: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields."""
        return asdict(self)


class Inspection(Result):
    """The result of :func:`fewbits.inspect`."""

    __slots__ = ()

    @property
    def family(self) -> str:
        """The model family."""
        return str(self._fields["family"])

    @property
    def layers(self) -> int:
        """The number of decoder blocks."""
        return int(self._fields["layers"])

    @property
    def hidden_size(self) -> int:
        """The width of the hidden states."""
        return int(self._fields["hidden_size"])

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary: the rows of the embedding."""
        return int(self._fields["vocab_size"])

    @property
    def max_positions(self) -> int:
        """The maximum number of positions in the model's configuration."""
        return int(self._fields["max_positions"])

    @property
    def quant_method(self) -> str | None:
        """The ``quant_method`` of the checkpoint; None for a float model."""
        method: str | None = self._fields["quant_method"]
        return method

    @property
    def bytes(self) -> int:
        """The size of all tensors in bytes."""
        return int(self._fields["bytes"])

    @property
    def linears(self) -> tuple[LinearInfo, ...]:
        """The linears of all blocks."""
        return tuple(
            LinearInfo(one["module"], (one["shape"][0], one["shape"][1]), one["stored"])
            for one in self._fields["linears"]
        )

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """All tensors."""
        return tuple(
            TensorInfo(one["tensor"], one["dtype"], tuple(one["shape"]), one["bytes"], one["file"])
            for one in self._fields["tensors"]
        )

    def _shown(self) -> str:
        stored = self.quant_method or "not quantized"
        return f"{self.family}: {self.layers} blocks, hidden {self.hidden_size}, {stored}, {_size(self.bytes)}"

    def _repr_html_(self) -> str:
        rows = (
            [one.tensor, one.dtype, "×".join(map(str, one.shape)), _size(one.bytes), one.file] for one in self.tensors
        )
        return f"<p>{html.escape(repr(self))}</p>" + _table(["tensor", "dtype", "shape", "size", "file"], rows)
