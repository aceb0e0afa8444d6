"""A model in memory that scores and generates text, with packed weights and without torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union

from fewbits import _native
from fewbits._arguments import check_types, plain
from fewbits._call import PathOrName, as_json, check_threads, code, path, python
from fewbits._errors import UsageError
from fewbits._events import Event, Listener

_OnEvent = Union[Callable[[Event], object], None]


@dataclass(frozen=True)
class Generated:
    """A text that a model generated."""

    text: str
    #: The generated tokens, including those of a stop string, but without an end-of-text token.
    tokens: tuple[int, ...]
    #: The reason why the text ended: ``eos``, ``length``, ``context`` or ``stop``.
    end: str


class Model:
    """A checkpoint, float or quantized, ready to score and generate text.

    Quantized linears are packed and multiplied by the kernels (``execution="kernels"``), or dequantized for each
    product (``"fake"``). ``kv`` is the precision of the KV cache, ``max_length`` the maximum context length in tokens,
    by default that of the model, but at most 1,048,576. Float weights stay in the checkpoint's dtype.

    Raises :class:`QuantError`, as all methods do.
    """

    def __init__(
        self,
        model: PathOrName,
        *,
        execution: Literal["fake", "kernels"] = "kernels",
        kv: Literal["auto", "16", "8", "4", "fp8"] | int = "auto",
        max_length: int | None = None,
        threads: int | None = None,
        on_event: _OnEvent = None,
        progress: bool = False,
    ) -> None:
        check_types(Model.__init__, locals())
        check_threads(threads)
        if max_length is not None and max_length < 1:
            raise UsageError(f"max_length={max_length} is not a valid number of tokens", "use at least 1")
        self.path = path(model)
        self._threads = threads
        request = {"model": self.path, "execution": execution, "kv": str(plain(kv)), "max_length": max_length}
        listener = Listener(on_event, progress)
        try:
            self._native = _native.Model(as_json(request), listener, code(), python(), threads)
        finally:
            listener.close()
        about: dict[str, Any] = json.loads(self._native.about)
        self._special: dict[str, dict[str, Any]] = about["special_tokens"]
        #: Tokens that end a text, from ``generation_config.json``, ``config.json`` or the tokenizer.
        self.eos_token_ids: tuple[int, ...] = tuple(about["eos_token_ids"])
        #: The maximum context length in tokens.
        self.max_length: int = about["positions"]
        #: Size of the model's vocabulary.
        self.vocab_size: int = about["vocab"]

    def __repr__(self) -> str:
        return f"Model({self.path!r}, max_length={self.max_length})"

    def special_token(self, name: str) -> str | None:
        """Returns the text of the special token ``name``, such as ``bos_token``; None if the tokenizer lacks it."""
        found = self._special.get(name)
        return None if found is None else str(found["text"])

    def special_token_id(self, name: str) -> int | None:
        """Returns the id of the special token ``name``, such as ``bos_token``; None if the tokenizer lacks it."""
        found = self._special.get(name)
        return None if found is None or found["id"] is None else int(found["id"])

    def encode(self, texts: Iterable[str], *, special_tokens: bool = True) -> list[list[int]]:
        """Returns the tokens of each text, with or without the special tokens that the tokenizer adds."""
        check_types(Model.encode, locals())
        request = {"texts": list(texts), "special": special_tokens}
        tokens: list[list[int]] = self._ask("encode", request)
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of tokens, without special tokens."""
        check_types(Model.decode, locals())
        text: str = self._ask("decode", list(tokens))
        return text

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Renders a conversation with the model's chat template, followed by the beginning of the next answer."""
        check_types(Model.chat_prompt, locals())
        text: str = self._ask("chat", list(messages))
        return text

    def log_likelihoods(
        self,
        requests: Iterable[tuple[Sequence[int], Sequence[int]]],
        *,
        on_event: _OnEvent = None,
        progress: bool = False,
    ) -> list[tuple[float, bool]]:
        """Returns, for each continuation after its context, the sum of the natural logarithms of its tokens'
        probabilities, and whether each of its tokens is the most likely one. Contexts and continuations are lists of
        tokens; a context has at least one token."""
        check_types(Model.log_likelihoods, locals())
        scored = [
            {"tokens": [*context, *continuation], "first": len(context)} for context, continuation in requests
        ]
        answer = self._ask("score", scored, on_event, progress)
        return [(float(log_likelihood), bool(is_greedy)) for log_likelihood, is_greedy in answer]

    def generate(
        self,
        prompts: Iterable[str | Sequence[int]],
        *,
        max_new_tokens: int = 256,
        stop: Iterable[str] = (),
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        on_event: _OnEvent = None,
        progress: bool = False,
    ) -> list[Generated]:
        """Generates text after each prompt, one prompt after the other. A prompt is a text or a list of tokens. A
        text ends before the first occurrence of a string in ``stop``.

        The most likely token is taken unless ``do_sample=True`` or one of ``temperature``, ``top_k``, ``top_p``,
        ``min_p`` and ``seed`` is given; ``temperature=0`` also takes the most likely token. Settings that are None, and
        settings without an argument, come from the model's ``generation_config.json``. The same seed, by default 0,
        gives the same text.
        """
        check_types(Model.generate, locals())
        asked = list(prompts)
        texts = self.encode(prompt for prompt in asked if isinstance(prompt, str))
        encoded = iter(texts)
        if max_new_tokens < 1:
            raise UsageError(f"max_new_tokens={max_new_tokens} generates no text", "use at least 1")
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
        given = [name for name, setting in sampling.items() if setting is not None]
        if temperature == 0:
            do_sample, temperature = False, None
        elif do_sample is None:
            do_sample = bool(given)
        elif given and not do_sample:
            raise UsageError(f"{given[0]}= has no effect with do_sample=False", "omit one of them")
        request = {
            "prompts": [next(encoded) if isinstance(prompt, str) else list(prompt) for prompt in asked],
            "stop": list(stop),
            "max_new_tokens": max_new_tokens,
            "do_sample": do_sample,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "seed": seed or 0,
        }
        answer = self._ask("generate", request, on_event, progress)
        return [Generated(one["text"], tuple(one["tokens"]), one["end"]) for one in answer]

    def _ask(self, kind: str, request: object, on_event: _OnEvent = None, progress: bool = False) -> Any:
        listener = Listener(on_event, progress)
        try:
            answer = self._native.ask(
                kind, as_json(request), listener, code(), python(), self._threads
            )
        finally:
            listener.close()
        return json.loads(answer)
