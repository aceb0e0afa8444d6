"""Models of lm-evaluation-harness with packed weights, without torch.

lm-evaluation-harness 0.4.13 does not discover plug-ins, so import this module first::

    import fewbits.lm_eval
    lm_eval.simple_evaluate(model="fewbits", model_args="pretrained=OUT", tasks=["hellaswag"])

Later versions find ``--model fewbits`` through the entry point ``lm_eval.models``. Texts are split into tokens,
windows and continuations as in the harness's ``hf`` model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fewbits import Model
from fewbits._call import needs

with needs("fewbits.lm_eval", "lm-evaluation-harness", "lm-eval"):
    from lm_eval import utils  # type: ignore[import-untyped,import-not-found,unused-ignore]
    from lm_eval.api.model import TemplateLM  # type: ignore[import-untyped,import-not-found,unused-ignore]
    from lm_eval.api.registry import register_model  # type: ignore[import-untyped,import-not-found,unused-ignore]

__all__ = ["FewbitsLM"]

#: The generation settings that a task may use; others are rejected.
_SETTINGS = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@register_model("fewbits")
class FewbitsLM(TemplateLM):  # type: ignore[misc,unused-ignore]
    """A checkpoint as a model of the harness.

    ``pretrained`` is its directory or GGUF file. ``execution``, ``kv``, ``max_length`` and ``threads`` are as in
    :class:`fewbits.Model`; ``add_bos_token``, ``prefix_token_id`` and ``max_gen_toks`` as in the harness's ``hf``
    model. ``batch_size`` and ``max_batch_size`` have no effect, because requests of equal length run together;
    ``device`` may only be ``cpu``.
    """

    backend = "causal"

    def __init__(
        self,
        pretrained: str,
        execution: str = "kernels",
        kv: str | int = "auto",
        max_length: int | None = None,
        threads: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        if device not in (None, "cpu"):
            raise ValueError(f"device={device!r}: this model runs only on the CPU; omit device")
        self.model = Model(
            pretrained,
            execution=execution,  # type: ignore[arg-type]
            kv=kv,  # type: ignore[arg-type]
            max_length=max_length,
            threads=threads,
        )
        self.max_length = self.model.max_length
        self.max_gen_toks = max_gen_toks
        self.add_bos_token = add_bos_token
        self.batch_size = 1
        bos, eos = (self.model.special_token_id(name) for name in ("bos_token", "eos_token"))
        if eos is None and self.model.eos_token_ids:
            eos = self.model.eos_token_ids[0]
        if prefix_token_id is None:
            prefix_token_id = bos if bos is not None else eos
        if eos is None or prefix_token_id is None:
            raise ValueError(
                f"{pretrained} has no token that ends a text: set `eos_token` in its tokenizer_config.json, "
                "or `eos_token_id` in its generation_config.json"
            )
        self._eos, self._prefix = eos, prefix_token_id
        self._prefix_text = self.model.special_token("bos_token" if prefix_token_id == bos else "eos_token")

    @property
    def eot_token_id(self) -> int:
        return self._eos

    @property
    def prefix_token_id(self) -> int:
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        return self.model.path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self._encode([string], add_special_tokens)[0]

    def _encode(self, texts: Sequence[str], special: bool | None = None) -> list[list[int]]:
        """Tokenizes many texts at once. By default, no special tokens are added to a text that already begins with the
        prefix token."""
        flags = [self._adds_special(text) if special is None else special for text in texts]
        found: list[list[int]] = [[] for _ in texts]
        for flag in (True, False):
            some = [number for number, one in enumerate(flags) if one is flag]
            encoded = self.model.encode((texts[number] for number in some), special_tokens=flag)
            for number, tokens in zip(some, encoded, strict=True):
                found[number] = tokens
        return found

    def _adds_special(self, text: str) -> bool:
        if self._prefix_text is not None and text.startswith(self._prefix_text):
            return False
        return True if self.add_bos_token is None else self.add_bos_token

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        # The same rule as in TemplateLM's method.
        pairs = [request.args for request in requests]
        moved = [
            (context.rstrip(), context[len(context.rstrip()) :] + continuation) if context else (context, continuation)
            for context, continuation in pairs
        ]
        contexts = self._encode([context for context, _ in moved])
        wholes = self._encode([context + continuation for context, continuation in moved])
        empty = [number for number, (context, _) in enumerate(pairs) if not context]
        alone = dict(zip(empty, self._encode([pairs[n][1] for n in empty], False), strict=True))
        tokens: list[tuple[tuple[str, str], list[int], list[int]]] = []
        for number, pair in enumerate(pairs):
            if number in alone:
                continuation = alone[number]
                if continuation and continuation[0] == self.prefix_token_id:
                    split = continuation[:1], continuation[1:]
                else:
                    split = [self.prefix_token_id], continuation
            else:
                split = contexts[number], wholes[number][len(contexts[number]) :]
            tokens.append((pair, *split))
        return self._loglikelihood_tokens(tokens, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        scored = []
        for _name, context, continuation in requests:
            # The model predicts the last token but does not read it, so one more token fits than the context length.
            kept = [*context, *continuation][-(self.max_length + 1) :]
            # One token remains as the context of the rest.
            count = min(len(continuation), len(kept) - 1)
            scored.append((kept[: len(kept) - count], kept[len(kept) - count :]))
        # An empty continuation has probability 1.
        asked = [(context, continuation) for context, continuation in scored if continuation]
        answers = iter(self.model.log_likelihoods(asked, progress=not disable_tqdm))
        results = [next(answers) if continuation else (0.0, True) for _, continuation in scored]
        for (name, *_rest), result in zip(requests, results, strict=True):
            if name is not None:
                self.cache_hook.add_partial("loglikelihood", name, result)
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        texts = [request.args[0] for request in requests]
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for number, tokens in enumerate(self._encode(texts)):
            rolling = utils.get_rolling_token_windows(
                token_list=tokens,
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(utils.make_disjoint_window, rolling):
                windows.append((None, context, continuation))
                owners.append(number)
        totals = [0.0] * len(texts)
        for number, (value, _greedy) in zip(
            owners, self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm), strict=True
        ):
            totals[number] += value
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        results: list[str] = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        for numbers in groups.values():
            settings = dict(requests[numbers[0]].args[1])
            stop = settings.pop("until", None) or []
            stop = [stop] if isinstance(stop, str) else list(stop)
            # The first one that is set counts.
            lengths = [settings.pop(name, None) for name in _LENGTHS]
            length = next((int(value) for value in lengths if value is not None), self.max_gen_toks)
            given = {name: settings.pop(name) for name in _SETTINGS if name in settings}
            if settings:
                raise ValueError(f"unknown generation settings: {', '.join(sorted(settings))}")
            temperature = given.pop("temperature", None)
            sample = bool(given.pop("do_sample", bool(temperature)))
            if not temperature:
                sample = sample and temperature is None
            if not sample:
                given = {name: value for name, value in given.items() if name == "repetition_penalty"}
            room = self.max_length - length
            if room <= 0:
                raise ValueError(
                    f"{length} new tokens leave no room for a prompt in a context of {self.max_length} tokens"
                )
            prompts = [tokens[-room:] for tokens in self._encode([requests[n].args[0] for n in numbers])]
            written = self.model.generate(
                prompts,
                max_new_tokens=length,
                stop=[text for text in stop if text],
                do_sample=sample,
                temperature=temperature if sample else None,
                progress=not disable_tqdm,
                **given,
            )
            for number, one in zip(numbers, written, strict=True):
                results[number] = one.text
                self.cache_hook.add_partial("generate_until", requests[number].args, one.text)
        return results

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if not add_generation_prompt:
            raise ValueError("continuing a prefilled answer is not supported")
        return self.model.chat_prompt(chat_history)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        # The harness only stores this text with the results; `apply_chat_template` renders the template.
        return "the model's own" if chat_template else None
