"""Results of runs: the JSON output of the command line, with attributes."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fewbits._errors import QuantError


def _size(count: int) -> str:
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"


def _table(header: list[str], rows: Iterator[list[str]]) -> str:
    """Returns a table for a notebook (HTML). Names come from files and are escaped."""
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def _frame(page: str) -> str:
    """Returns a frame that shows a page inside a notebook. The page has no scripts, and the frame would not run any."""
    return (
        f'<iframe sandbox style="width:100%;height:36rem;border:0" title="report" '
        f'srcdoc="{html.escape(page, quote=True)}"></iframe>'
    )


class Result:
    """A result. ``to_dict()`` gives what the command line prints with ``--json``."""

    __slots__ = ("_fields",)

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = dict(fields)

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields of the JSON output."""
        copy: dict[str, Any] = json.loads(json.dumps(self._fields))
        return copy

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, Result) and self._fields == other._fields

    __hash__ = None  # type: ignore[assignment]

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes the JSON to a file."""
        with open(file, "w", encoding="utf-8") as out:
            json.dump(self._fields, out, indent=2)
            out.write("\n")

    def _shown(self) -> str:
        return ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._shown()})"


@dataclass(frozen=True)
class TensorError:
    """A tensor and its rounding error, relative to the root mean square of its weights."""

    tensor: str
    relative_rms: float

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields."""
        return asdict(self)


@dataclass(frozen=True)
class Checkpoint:
    """A written checkpoint."""

    path: str
    format: str
    bytes_after: int
    bits_per_quantized_weight: float
    #: The tensor with the largest rounding error, if any was rounded.
    worst_tensor: TensorError | None

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields."""
        return asdict(self)

    def report_page(self) -> str:
        """Returns the report as a page (HTML), read from the checkpoint's directory."""
        from fewbits._call import run

        page = run("page", self.path)
        if page is None:
            raise FileNotFoundError(f"{self.path} has no quant_report.json")
        text: str = page
        return text


def _worst(fields: Mapping[str, Any]) -> TensorError | None:
    worst = fields["worst_tensor"]
    return None if worst is None else TensorError(**worst)


class Quantized(Result):
    """The checkpoints written by :func:`fewbits.quantize`. A notebook shows the report of the first."""

    __slots__ = ()

    @property
    def method(self) -> str:
        """The method."""
        return str(self._fields["method"])

    @property
    def outputs(self) -> tuple[Checkpoint, ...]:
        """The checkpoints, one per format."""
        return tuple(Checkpoint(**{**one, "worst_tensor": _worst(one)}) for one in self._fields["outputs"])

    @property
    def path(self) -> str:
        """The directory of the first checkpoint."""
        return self.outputs[0].path

    @property
    def bytes_before(self) -> int:
        """The size of the model's tensors in bytes."""
        return int(self._fields["bytes_before"])

    @property
    def bytes_after(self) -> int:
        """The size of the first checkpoint's tensors in bytes."""
        return self.outputs[0].bytes_after

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return float(self._fields["seconds"])

    @property
    def steps(self) -> dict[str, float]:
        """Seconds per step, summed over all blocks."""
        return {step["step"]: step["seconds"] for step in self._fields["steps"]}

    @property
    def peak_memory_bytes(self) -> int | None:
        """The peak memory of this process so far in bytes, including other work."""
        peak = self._fields["peak_memory_bytes"]
        return None if peak is None else int(peak)

    def _shown(self) -> str:
        outputs = ", ".join(
            f"{one.path!r} ({one.format}, {_size(one.bytes_after)})" for one in self.outputs
        )
        return f"{self.method}: {_size(self.bytes_before)} to {outputs} in {self.seconds:.1f} s"

    def _repr_html_(self) -> str:
        try:
            return _frame(self.outputs[0].report_page())
        except (QuantError, OSError):
            # If the directory has been moved or deleted, only the summary is shown.
            return f"<pre>{html.escape(repr(self))}</pre>"


class Gguf(Result):
    """The GGUF file written by :func:`fewbits.quantize`."""

    __slots__ = ()

    @property
    def path(self) -> str:
        """The path of the file, or of the directory that contains it or its parts."""
        return str(self._fields["path"])

    @property
    def mixture(self) -> str:
        """The mixture of types."""
        return str(self._fields["mixture"])

    @property
    def bytes_before(self) -> int:
        """The size of the model's files in bytes."""
        return int(self._fields["bytes_before"])

    @property
    def bytes_after(self) -> int:
        """The size of the output in bytes."""
        return int(self._fields["bytes_after"])

    @property
    def bits_per_weight(self) -> float:
        """The mean number of bits per weight over all tensors."""
        return float(self._fields["bits_per_weight"])

    @property
    def types(self) -> dict[str, int]:
        """The number of tensors of each type."""
        return dict(self._fields["types"])

    @property
    def worst_tensor(self) -> TensorError | None:
        """The tensor with the largest rounding error, if any was rounded."""
        return _worst(self._fields)

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return float(self._fields["seconds"])

    def _shown(self) -> str:
        return f"{self.path!r}: {self.mixture}, {_size(self.bytes_after)}, {self.bits_per_weight:.2f} bits per weight"


class Floats(Result):
    """The float checkpoint written by :func:`fewbits.quantize` with ``format="safetensors"``."""

    __slots__ = ()

    @property
    def path(self) -> str:
        """The directory."""
        return str(self._fields["path"])

    @property
    def dtype(self) -> str:
        """The type of the floats."""
        return str(self._fields["dtype"])

    @property
    def dequantized_from(self) -> str | None:
        """What the model was quantized to: a method, or the types of GGUF blocks; None for a float model."""
        return self._fields.get("dequantized_from")

    @property
    def bytes_before(self) -> int:
        """The size of the model's tensors in bytes."""
        return int(self._fields["bytes_before"])

    @property
    def bytes_after(self) -> int:
        """The size of the output in bytes."""
        return int(self._fields["bytes_after"])

    @property
    def types(self) -> dict[str, int]:
        """The number of tensors of each type."""
        return dict(self._fields["types"])

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return float(self._fields["seconds"])

    def _shown(self) -> str:
        return f"{self.path!r}: {self.dtype}, {_size(self.bytes_after)}"


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error, if there are enough windows for one."""

    mean: float
    standard_error: float | None

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields."""
        return asdict(self)

    def __format__(self, spec: str) -> str:
        error = "?" if self.standard_error is None else format(self.standard_error, spec)
        return f"{format(self.mean, spec)} ± {error}"


def _estimate(fields: Mapping[str, Any]) -> Estimate:
    return Estimate(fields["mean"], fields["standard_error"])


class Evaluation(Result):
    """The result of :func:`fewbits.evaluate`. :meth:`save` writes the file that gates and the command line read."""

    __slots__ = ("_page",)

    def __init__(self, fields: Mapping[str, Any], page: str | None = None) -> None:
        super().__init__(fields)
        self._page = page

    @property
    def name(self) -> str:
        """The last part of the model's path, which is the name of this result in a gate."""
        return os.path.basename(os.path.normpath(str(self._fields["model"]["path"])))

    @property
    def perplexity(self) -> Estimate:
        """Perplexity."""
        return _estimate(self._fields["perplexity"])

    @property
    def nll(self) -> Estimate:
        """The mean negative log-likelihood, in nats per token."""
        return _estimate(self._fields["nll"])

    def _of_comparison(self, name: str) -> Estimate | None:
        comparison = self._fields.get("comparison")
        return None if comparison is None else _estimate(comparison[name])

    @property
    def kl(self) -> Estimate | None:
        """The mean KL divergence from the reference, in nats per token; lower is better."""
        return self._of_comparison("kl")

    @property
    def perplexity_ratio(self) -> Estimate | None:
        """The perplexity divided by that of the reference."""
        return self._of_comparison("perplexity_ratio")

    @property
    def top1_agreement(self) -> Estimate | None:
        """The share of positions with the same most likely token as the reference, from 0 to 1."""
        return self._of_comparison("top1_agreement")

    @property
    def at_noise_floor(self) -> bool | None:
        """Whether the divergence is below three times its noise floor, so that this text shows no difference; None
        without a reference."""
        comparison = self._fields.get("comparison")
        return None if comparison is None else comparison.get("at_noise_floor")

    @property
    def profile(self) -> str:
        """The profile: the rule by which texts are split into windows and scored."""
        return str(self._fields["profile"])

    @property
    def windows(self) -> int:
        """The number of scored windows."""
        return int(self._fields["windows"])

    @property
    def tokens_scored(self) -> int:
        """The number of scored tokens."""
        return int(self._fields["tokens_scored"])

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return float(self._fields["seconds"])

    def page(self) -> str | None:
        """Returns the report as a page (HTML); None for a result that was read from a file."""
        return self._page

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Evaluation:
        """Reads a file written by :meth:`save`. The fields are not validated until a gate uses the result."""
        with open(file, encoding="utf-8") as read:
            return cls(json.load(read))

    def _shown(self) -> str:
        kl = "" if self.kl is None else f", KL {self.kl:.5f} nats"
        return f"{self.name}: perplexity {self.perplexity:.3f}{kl}, {self.windows} windows"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>" if self._page is None else _frame(self._page)


@dataclass(frozen=True)
class Check:
    """One check of a gate."""

    result: str
    profile: str
    #: What was checked, such as ``perplexity against baseline``.
    name: str
    #: The line of the policy that requires the check.
    line: int
    #: ``pass``, ``fail`` or ``inconclusive``.
    verdict: str
    #: The value that was checked: a degradation, or the capped metric.
    value: float
    standard_error: float | None
    #: The confidence bounds of the degradation, at the one-sided level of the policy.
    low: float | None
    high: float | None
    #: The limits of the value.
    at_most: float | None
    at_least: float | None
    windows: int
    #: The approximate number of windows that would decide an inconclusive check with 80 % power.
    windows_needed: int | None
    #: The value with its interval or error, and the limits, in the same unit.
    measured: str
    allowed: str
    #: The check as a sentence.
    message: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.verdict}: {self.result}: {self.message} (line {self.line} of the policy)"


class GateResult(Result):
    """The result of :func:`fewbits.gate`."""

    __slots__ = ("_page", "summary")

    #: A summary in Markdown.
    summary: str

    def __init__(self, fields: Mapping[str, Any], page: str, summary: str) -> None:
        super().__init__(fields)
        self._page = page
        self.summary = summary

    @property
    def verdict(self) -> str:
        """The verdict: ``pass``, ``fail`` or ``inconclusive``."""
        return str(self._fields["verdict"])

    @property
    def passed(self) -> bool:
        """Whether the verdict is ``pass``."""
        return self.verdict == "pass"

    @property
    def exit_code(self) -> int:
        """The exit code of the command line: 0, 1 or 3."""
        return {"pass": 0, "fail": 1, "inconclusive": 3}[self.verdict]

    @property
    def checks(self) -> tuple[Check, ...]:
        """The checks."""
        return tuple(Check(**{name: one[name] for name in Check.__dataclass_fields__}) for one in self._fields["checks"])

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks whose verdict is not ``pass``."""
        return tuple(one for one in self.checks if one.verdict != "pass")

    def check(self) -> None:
        """Raises :class:`GateFailed`, an ``AssertionError``, unless the gate passes; for tests."""
        if not self.passed:
            raise GateFailed(self)

    def page(self) -> str:
        """Returns the report as a page (HTML)."""
        return self._page

    def _shown(self) -> str:
        failed = "".join(f"; {one}" for one in self.failed)
        return f"{self.verdict}, {len(self.checks)} checks{failed}"

    def _repr_html_(self) -> str:
        return _frame(self._page)


class GateFailed(AssertionError):
    """A gate did not pass. ``str()`` lists the checks that did not pass, with what was measured and what is allowed."""

    #: The result of the gate.
    result: GateResult
    #: The checks that did not pass.
    checks: tuple[Check, ...]

    def __init__(self, result: GateResult) -> None:
        self.result, self.checks = result, result.failed
        what = "the gate failed" if result.verdict == "fail" else f"the gate is {result.verdict}"
        count = f"{len(self.checks)} of {len(result.checks)} checks did not pass"
        super().__init__("\n".join([f"{what}: {count}", *(f"  {one}" for one in self.checks)]))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.result,)
