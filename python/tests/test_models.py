"""A model in memory: tokens, likelihoods, text."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import fewbits
import pytest

TEXT = "The mill stood by the river, and nobody knew who owned it. It rained in the morning, and the road was wet."


@pytest.fixture(scope="module")
def packed(rtn: Path) -> fewbits.Model:
    return fewbits.Model(rtn)


def test_texts_become_tokens_and_texts_again(packed: fewbits.Model) -> None:
    [with_special, other] = packed.encode([TEXT, "other"])
    [without] = packed.encode([TEXT], special_tokens=False)
    assert other and with_special[-len(without) :] == without and packed.decode(without) == TEXT
    assert max(without) < packed.vocab_size and packed.max_length == 512
    assert packed.special_token_id("no_such_token") is None is packed.special_token("no_such_token")


def test_likelihoods_add_up_and_name_the_greedy_token(packed: fewbits.Model) -> None:
    [tokens] = packed.encode([TEXT])
    single = [(tokens[:i], tokens[i : i + 1]) for i in range(1, len(tokens))]
    each = packed.log_likelihoods(single)
    [whole] = packed.log_likelihoods([(tokens[:1], tokens[1:])])
    assert math.isclose(whole[0], sum(value for value, _ in each), rel_tol=1e-5)
    assert all(value < 0 for value, _ in each) and whole[1] == all(greedy for _, greedy in each)
    [written] = packed.generate([tokens], max_new_tokens=4)
    assert len(written.tokens) == 4 and written.end == "length"
    other = (written.tokens[0] + 1) % packed.vocab_size
    answers = packed.log_likelihoods([(tokens, written.tokens), (tokens, [other])])
    assert answers[0][1] and not answers[1][1]


def test_the_evaluator_measures_the_same(rtn: Path, packed: fewbits.Model) -> None:
    rows = [" ".join([TEXT] * 12)]
    result = fewbits.evaluate(rtn, text=rows, window=64, windows=4, execution="kernels").to_dict()
    [tokens] = packed.encode(rows)
    windows = [tokens[i : i + 64] for i in range(0, 256, 64)]
    scored = packed.log_likelihoods([(window[:1], window[1:]) for window in windows])
    total = -sum(value for value, _ in scored)
    assert math.isclose(total / (4 * 63), result["nll"]["mean"], rel_tol=1e-6)


def test_kernels_give_what_the_floats_give(model: Path, rtn: Path, packed: fewbits.Model) -> None:
    [tokens] = packed.encode([TEXT])
    request = [(tokens[:5], tokens[5:])]
    kernels, fake, original = (
        one.log_likelihoods(request)[0][0]
        for one in (packed, fewbits.Model(rtn, execution="fake"), fewbits.Model(model))
    )
    # The two executions differ by the rounding of activations and sums, but use the same weights.
    assert math.isclose(kernels, fake, rel_tol=1e-3) and abs(original - fake) > abs(kernels - fake)


def test_threads_and_batches_change_nothing(rtn: Path, packed: fewbits.Model) -> None:
    [tokens] = packed.encode([TEXT])
    requests = [(tokens[:3], tokens[3:]), (tokens[:9], tokens[9:12]), (tokens[:4], tokens[4:])]
    alone = [packed.log_likelihoods([request])[0] for request in requests]
    together = fewbits.Model(rtn, threads=1).log_likelihoods(requests)
    for (a, a_greedy), (b, b_greedy) in zip(alone, together, strict=True):
        assert math.isclose(a, b, rel_tol=1e-5) and a_greedy == b_greedy


def test_texts_stop_where_they_should(packed: fewbits.Model) -> None:
    [long] = packed.generate([TEXT], max_new_tokens=30)
    word = long.text.split()[3]
    [short] = packed.generate([TEXT], max_new_tokens=30, stop=[word])
    assert short.end == "stop" and word not in short.text and long.text.startswith(short.text)
    drawn = [packed.generate([TEXT], max_new_tokens=8, do_sample=True, top_k=20, seed=n)[0].text for n in (1, 2, 1)]
    assert drawn[0] == drawn[2] != drawn[1]
    # A sampling setting alone also samples, and a temperature of 0 does not.
    assert packed.generate([TEXT], max_new_tokens=8, top_k=20, seed=1)[0].text == drawn[0]
    greedy = [packed.generate([TEXT], max_new_tokens=8, **given)[0].text for given in ({}, {"temperature": 0, "seed": 1})]
    assert greedy[0] == greedy[1]


def test_conversations_are_rendered_by_the_model_s_template(rtn: Path, tmp_path: Path) -> None:
    chatty = tmp_path / "chatty"
    shutil.copytree(rtn, chatty)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}> {% endif %}"
    (chatty / "chat_template.jinja").write_text(template)
    talker = fewbits.Model(chatty)
    assert talker.chat_prompt([{"role": "user", "content": "How far?"}]) == "user: How far?\n> "
    with pytest.raises(fewbits.UsageError):
        talker.chat_prompt([])
    with pytest.raises(fewbits.QuantError):
        fewbits.Model(rtn).chat_prompt([{"role": "user", "content": "How far?"}])


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda m: m.log_likelihoods([([1], [])]), fewbits.UsageError, "request 0: there must be at least one token"),
        (lambda m: m.log_likelihoods([([1], [2]), ([], [1])]), fewbits.UsageError, "request 1: there must be at least one token"),
        (lambda m: m.log_likelihoods([([1] * 512, [1, 1])]), fewbits.UsageError, "has 513 tokens"),
        (lambda m: m.log_likelihoods([([1], [m.vocab_size])]), fewbits.UsageError, "token 4096 is not in"),
        (lambda m: m.generate(["a"], max_new_tokens=0), fewbits.UsageError, "max_new_tokens=0"),
        (lambda m: m.generate(["a"], do_sample=True, top_p=2.0), fewbits.UsageError, "top_p"),
        (lambda m: m.generate(["a"], do_sample=False, seed=3), fewbits.UsageError, "seed= has no effect with do_sample"),
        (lambda m: m.generate([[m.vocab_size]]), fewbits.QuantError, "4096"),
        (lambda m: m.generate([[]]), fewbits.UsageError, "the prompt is empty"),
    ],
)
def test_what_cannot_be_is_refused(packed: fewbits.Model, ask: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        ask(packed)


def test_models_that_cannot_be_loaded(rtn: Path, tmp_path: Path) -> None:
    for arguments, message in [
        ({"max_length": 513}, "max_length=513"),
        ({"max_length": 0}, "max_length=0"),
        ({"execution": "guess"}, "execution"),
        ({"kv": 5}, "kv"),
        ({"threads": 0}, "threads=0"),
    ]:
        with pytest.raises(fewbits.UsageError, match=message):
            fewbits.Model(rtn, **arguments)  # type: ignore[arg-type]
    with pytest.raises(fewbits.InputError):
        fewbits.Model(tmp_path)


def test_a_callback_stops_generation(packed: fewbits.Model) -> None:
    class Enough(Exception):
        pass

    def on_event(event: fewbits.Event) -> None:
        if isinstance(event, fewbits.UnitDone):
            raise Enough

    with pytest.raises(Enough):
        packed.generate([TEXT] * 50, max_new_tokens=20, on_event=on_event)
    assert packed.generate([TEXT], max_new_tokens=1)[0].tokens


def test_a_sampling_default_of_the_model_is_used_only_when_asked(rtn: Path, tmp_path: Path) -> None:
    drawing = tmp_path / "drawing"
    shutil.copytree(rtn, drawing)
    settings = json.loads((drawing / "generation_config.json").read_text())
    (drawing / "generation_config.json").write_text(json.dumps({**settings, "do_sample": True, "top_k": 1}))
    model = fewbits.Model(drawing)
    greedy = model.generate([TEXT], max_new_tokens=8)[0].tokens
    assert greedy == fewbits.Model(rtn).generate([TEXT], max_new_tokens=8)[0].tokens
    assert model.generate([TEXT], max_new_tokens=8, do_sample=True, seed=3)[0].tokens == greedy
