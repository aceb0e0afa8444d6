"""The functions of the package. Keyword arguments have the names and defaults of the command-line options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, Union

from fewbits._arguments import check_types, plain
from fewbits._call import PathOrName, Texts, explains_datasets, optional_path, path, run, text_argument
from fewbits._errors import UsageError
from fewbits._events import Event
from fewbits._plans import Inspection, Plan
from fewbits._results import Evaluation, Floats, GateResult, Gguf, Quantized

_OnEvent = Union[Callable[[Event], object], None]
_Patterns = Union[str, Sequence[str]]
_Overrides = Union[Mapping[str, str], str, Sequence[str]]
_Number = Union[str, float]


def _list(given: _Patterns) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def _overrides(given: _Overrides) -> list[str]:
    if isinstance(given, Mapping):
        return [f"{pattern}={scheme}" for pattern, scheme in given.items()]
    return _list(given)


def _text(given: _Number | None) -> str | None:
    return None if given is None else str(plain(given))


def _check_count(name: str, count: int | None, least: int = 1) -> None:
    # The extension explains why zero is refused.
    if count is not None and count < 0:
        remedy = "use a positive number" if least else "use zero or a positive number"
        raise UsageError(f"{name}={count} is negative", remedy)


def _settings(
    *,
    preset: str | None,
    recipe: PathOrName | None,
    method: str | None,
    scheme: str | None,
    format: _Patterns,
    group_size: int | str | None,
    symmetric: bool | None,
    ignore: _Patterns,
    override: _Overrides,
    alpha: _Number | None,
    smooth_producers: str | None,
    channel_maxima: PathOrName | None,
    skip: _Patterns,
    output_alpha: _Number | None,
    attention_alpha: _Number | None,
    search: str | None,
    damping: float | None,
    block_size: int | None,
    act_order: str | None,
    layer_inputs: str | None,
    span_blocks: int | None,
    steps: Mapping[str, Mapping[str, Any]] | None,
    scale_search: str | None,
    requantize: bool,
    samples: int | None,
    seq_len: int | None,
    seed: int | None,
    packing: str | None,
    mask: str | None,
    expert_tokens: str | None,
    expert_floor: int | None,
    pre: str | None,
    allow_fallback: bool,
    reference_search: bool,
    imatrix: PathOrName | None,
    save_imatrix: PathOrName | None = None,
) -> dict[str, Any]:
    """Converts the settings of a recipe to the form that the extension takes."""
    counts = {
        "block_size": block_size,
        "span_blocks": span_blocks,
        "samples": samples,
        "seq_len": seq_len,
    }
    for name, count in counts.items():
        _check_count(name, count)
    for name, count in {"seed": seed, "expert_floor": expert_floor}.items():
        _check_count(name, count, least=0)
    return {
        "preset": preset,
        "recipe": optional_path(recipe),
        "method": method,
        "scheme": scheme,
        "format": _list(format),
        "group_size": _text(group_size),
        "symmetric": symmetric,
        "ignore": _list(ignore),
        "override": _overrides(override),
        "gguf": {
            "pre": pre,
            "allow_fallback": allow_fallback,
            "reference_search": reference_search,
            "imatrix": optional_path(imatrix),
            "save_imatrix": optional_path(save_imatrix),
        },
        "alpha": _text(alpha),
        "smooth_producers": smooth_producers,
        "channel_maxima": optional_path(channel_maxima),
        "skip": _list(skip),
        "output_alpha": _text(output_alpha),
        "attention_alpha": _text(attention_alpha),
        "search": search,
        "damping": damping,
        "act_order": act_order,
        "layer_inputs": layer_inputs,
        "steps": {step: dict(keys) for step, keys in (steps or {}).items()},
        "scale_search": scale_search,
        "requantize": requantize,
        "packing": packing,
        "mask": mask,
        "expert_tokens": expert_tokens,
        **counts,
    }


def plan(
    model: PathOrName,
    *,
    preset: str | None = None,
    recipe: PathOrName | None = None,
    method: str | None = None,
    scheme: str | None = None,
    format: _Patterns = (),
    group_size: int | str | None = None,
    symmetric: bool | None = None,
    ignore: _Patterns = (),
    override: _Overrides = (),
    alpha: _Number | None = None,
    smooth_producers: str | None = None,
    channel_maxima: PathOrName | None = None,
    skip: _Patterns = (),
    output_alpha: _Number | None = None,
    attention_alpha: _Number | None = None,
    search: str | None = None,
    damping: float | None = None,
    block_size: int | None = None,
    act_order: str | None = None,
    layer_inputs: str | None = None,
    span_blocks: int | None = None,
    steps: Mapping[str, Mapping[str, Any]] | None = None,
    scale_search: str | None = None,
    requantize: bool = False,
    samples: int | None = None,
    seq_len: int | None = None,
    seed: int | None = None,
    packing: str | None = None,
    mask: str | None = None,
    expert_tokens: str | None = None,
    expert_floor: int | None = None,
    pre: str | None = None,
    allow_fallback: bool = False,
    reference_search: bool = False,
    imatrix: PathOrName | None = None,
    threads: int | None = None,
) -> Plan:
    """Shows what :func:`quantize` with the same arguments would do to every tensor, without quantizing anything.

    ``format`` is one format or several, ``symmetric=False`` selects grids with a zero point, and ``override`` is
    ``{"PATTERN": "SCHEME"}`` or a list of ``"PATTERN=SCHEME"``. ``recipe`` is the path of a recipe file, or its text
    (TOML), as :func:`preset_recipe` returns it. ``steps`` is ``{"STEP": {"KEY": value}}``, as in a recipe file. The
    other arguments are those of the command line.

    Raises :class:`QuantError`.
    """
    check_types(plan, locals())
    settings = _settings(
        preset=preset,
        recipe=recipe,
        method=method,
        scheme=scheme,
        format=format,
        group_size=group_size,
        symmetric=symmetric,
        ignore=ignore,
        override=override,
        alpha=alpha,
        smooth_producers=smooth_producers,
        channel_maxima=channel_maxima,
        skip=skip,
        output_alpha=output_alpha,
        attention_alpha=attention_alpha,
        search=search,
        damping=damping,
        block_size=block_size,
        act_order=act_order,
        layer_inputs=layer_inputs,
        span_blocks=span_blocks,
        steps=steps,
        scale_search=scale_search,
        requantize=requantize,
        samples=samples,
        seq_len=seq_len,
        seed=seed,
        packing=packing,
        mask=mask,
        expert_tokens=expert_tokens,
        expert_floor=expert_floor,
        pre=pre,
        allow_fallback=allow_fallback,
        reference_search=reference_search,
        imatrix=imatrix,
    )
    return Plan(run("plan", {"model": path(model), "settings": settings}, threads=threads))


def quantize(
    model: PathOrName,
    output: PathOrName,
    *,
    preset: str | None = None,
    recipe: PathOrName | None = None,
    method: str | None = None,
    scheme: str | None = None,
    format: _Patterns = (),
    group_size: int | str | None = None,
    symmetric: bool | None = None,
    ignore: _Patterns = (),
    override: _Overrides = (),
    alpha: _Number | None = None,
    smooth_producers: str | None = None,
    channel_maxima: PathOrName | None = None,
    skip: _Patterns = (),
    output_alpha: _Number | None = None,
    attention_alpha: _Number | None = None,
    search: str | None = None,
    damping: float | None = None,
    block_size: int | None = None,
    act_order: str | None = None,
    layer_inputs: str | None = None,
    span_blocks: int | None = None,
    steps: Mapping[str, Mapping[str, Any]] | None = None,
    scale_search: str | None = None,
    requantize: bool = False,
    samples: int | None = None,
    seq_len: int | None = None,
    seed: int | None = None,
    packing: str | None = None,
    mask: str | None = None,
    expert_tokens: str | None = None,
    expert_floor: int | None = None,
    pre: str | None = None,
    allow_fallback: bool = False,
    reference_search: bool = False,
    imatrix: PathOrName | None = None,
    save_imatrix: PathOrName | None = None,
    calibration: Texts | None = None,
    save_channel_maxima: PathOrName | None = None,
    memory_budget: str | None = None,
    force: bool = False,
    resume: bool = False,
    report: PathOrName | None = None,
    threads: int | None = None,
    on_event: _OnEvent = None,
    progress: bool = False,
) -> Quantized | Gguf | Floats:
    """Quantizes a model into ``output``, which appears only when it is complete and verified.

    ``calibration`` is the path of a text or ``.jsonl`` file, the name of a built-in text, or rows: strings, rows of a
    dataset with a field ``text`` or ``messages``, or lists of chat messages. An iterable is read to its end.

    ``memory_budget`` is the memory that the run may use, such as ``"8GiB"``; the default is 80 % of what is
    available. Hidden states that do not fit are kept in files next to ``output``. The output does not depend on the
    budget.

    ``on_event`` is called with every :class:`Event` on the calling thread; an exception that it raises stops the run.
    ``progress=True`` shows a tqdm bar. Ctrl-C stops the run, keeps the finished work and raises ``KeyboardInterrupt``;
    the same call continues it, and the result is the same, byte for byte. A call with different arguments raises
    :class:`UsageError`, except with ``force=True``, which discards the interrupted run and replaces a finished one.
    ``resume=True`` fails unless the interrupted run, if there is one, can be continued.

    Raises :class:`QuantError`.
    """
    check_types(quantize, locals())
    settings = _settings(
        preset=preset,
        recipe=recipe,
        method=method,
        scheme=scheme,
        format=format,
        group_size=group_size,
        symmetric=symmetric,
        ignore=ignore,
        override=override,
        alpha=alpha,
        smooth_producers=smooth_producers,
        channel_maxima=channel_maxima,
        skip=skip,
        output_alpha=output_alpha,
        attention_alpha=attention_alpha,
        search=search,
        damping=damping,
        block_size=block_size,
        act_order=act_order,
        layer_inputs=layer_inputs,
        span_blocks=span_blocks,
        steps=steps,
        scale_search=scale_search,
        requantize=requantize,
        samples=samples,
        seq_len=seq_len,
        seed=seed,
        packing=packing,
        mask=mask,
        expert_tokens=expert_tokens,
        expert_floor=expert_floor,
        pre=pre,
        allow_fallback=allow_fallback,
        reference_search=reference_search,
        imatrix=imatrix,
        save_imatrix=save_imatrix,
    )
    named, rows = text_argument(calibration, "calibration")
    request = {
        "model": path(model),
        "output": path(output),
        "settings": settings,
        "calibration": named,
        "save_channel_maxima": optional_path(save_channel_maxima),
        "memory_budget": memory_budget,
        "force": force,
        "resume": resume,
        "report": optional_path(report),
    }
    with explains_datasets(calibration):
        done = run(
            "quantize",
            request,
            rows=rows,
            on_event=on_event,
            progress=progress,
            threads=threads,
            resumes=True,
        )
    kinds: dict[str, type[Quantized | Gguf | Floats]] = {
        "quant-gguf-summary": Gguf,
        "quant-floats-summary": Floats,
    }
    return kinds.get(done["schema"].partition("/")[0], Quantized)(done)


def evaluate(
    model: PathOrName,
    *,
    text: Texts,
    reference: PathOrName | None = None,
    save_reference: PathOrName | None = None,
    profile: str | None = None,
    window: int | None = None,
    windows: int | None = None,
    execution: Literal["fake", "kernels"] = "fake",
    device: Literal["cpu", "cuda"] = "cpu",
    kv: Literal["auto", "16", "8", "4", "fp8"] | int = "auto",
    journal: PathOrName | None = None,
    report: PathOrName | None = None,
    compare: Iterable[PathOrName] = (),
    threads: int | None = None,
    on_event: _OnEvent = None,
    progress: bool = False,
) -> Evaluation:
    """Measures perplexity on a text, and the divergence from ``reference`` if one is given.

    ``text`` is the path of a text or ``.jsonl`` file, the name of a built-in text, or rows: strings, rows of a
    dataset with a field ``text`` or ``messages``, or lists of chat messages, which the model's chat template renders.
    ``on_event``, ``progress`` and Ctrl-C work as in :func:`quantize`; with a ``journal``, the same call continues a
    stopped evaluation.

    Raises :class:`QuantError`.
    """
    check_types(evaluate, locals())
    _check_count("window", window)
    _check_count("windows", windows)
    named, rows = text_argument(text, "text")
    request = {
        "model": path(model),
        "text": named,
        "reference": optional_path(reference),
        "save_reference": optional_path(save_reference),
        "profile": profile,
        "window": window,
        "windows": windows,
        "execution": execution,
        "device": device,
        "kv": str(plain(kv)),
        "journal": optional_path(journal),
        "report": optional_path(report),
        "compare": [path(one) for one in compare],
    }
    with explains_datasets(text):
        done = run(
            "evaluate",
            request,
            rows=rows,
            on_event=on_event,
            progress=progress,
            threads=threads,
            resumes=journal is not None,
        )
    return Evaluation(done["result"], done["page"])


_Results = Union[PathOrName, Evaluation, Mapping[str, Evaluation], Sequence[Union[PathOrName, Evaluation]]]


def _results(given: _Results) -> list[dict[str, Any]]:
    """Converts results to the form that the extension takes, with their names if they are evaluations."""
    if isinstance(given, Mapping):
        return [{"name": name, "result": result.to_dict()} for name, result in given.items()]
    if isinstance(given, (str, PathLike, Evaluation)):
        given = [given]
    return [
        {"name": one.name, "result": one.to_dict()} if isinstance(one, Evaluation) else {"path": path(one)}
        for one in given
    ]


def gate(
    results: _Results,
    *,
    policy: PathOrName,
    baseline: PathOrName | None = None,
    report: PathOrName | None = None,
    junit: PathOrName | None = None,
) -> GateResult:
    """Checks whether models have become worse than a policy allows.

    ``results`` are files that :meth:`Evaluation.save` or the command line wrote, evaluations, or
    ``{"name": evaluation}``. A file is identified by its name without the extension, an evaluation by the last part of
    its model's path. ``policy`` is a path, or the text of a policy (TOML); :func:`suggest_policy` returns one to start
    from. A failed gate does not raise: see :attr:`GateResult.verdict`, or call :meth:`GateResult.check`.

    Raises :class:`QuantError`.
    """
    check_types(gate, locals())
    named = path(policy)
    request = {
        "results": _results(results),
        "policy": None if "\n" in named else named,
        "policy_text": named if "\n" in named else None,
        "baseline": optional_path(baseline),
        "report": optional_path(report),
        "junit": optional_path(junit),
    }
    done = run("gate", request)
    return GateResult(done["outcome"], done["page"], done["summary"])


def suggest_policy(results: _Results) -> str:
    """Returns a draft of a policy (TOML) that these results pass with some slack. A policy says how much worse later
    models may be; it cannot know whether these results are good enough.

    Raises :class:`QuantError`.
    """
    check_types(suggest_policy, locals())
    text: str = run("suggest", {"results": _results(results)})
    return text


def update_baseline(results: _Results, baseline: PathOrName) -> str:
    """Writes results as the baseline of later gates, and returns the path of the file. An existing file is replaced
    only if it is a baseline.

    Raises :class:`QuantError`.
    """
    check_types(update_baseline, locals())
    written: str = run("baseline", {"results": _results(results), "baseline": path(baseline)})
    return written


def inspect(model: PathOrName) -> Inspection:
    """Describes the contents of a checkpoint.

    Raises :class:`QuantError`.
    """
    check_types(inspect, locals())
    return Inspection(run("inspect", path(model)))


def preset_recipe(preset: str) -> str:
    """Returns the text of a preset as a recipe (TOML) with comments, a starting point for a custom one. Pass the edited
    text, or a file that contains it, as ``recipe`` of :func:`quantize`.

    Raises :class:`QuantError`.
    """
    check_types(preset_recipe, locals())
    text: str = run("recipe", preset)
    return text
