"""Conversations as transformers renders and tokenizes them: MODEL CHATS.jsonl OUT.json

Writes, for every line, the text of `apply_chat_template`, its tokens, and which of them are the assistant's: by
transformers' own mask if the template has generation blocks; otherwise, what each answer adds to the text before it,
which ends with the generation prompt.
"""

import argparse
import json
from pathlib import Path

from transformers import PreTrainedTokenizerFast


def load(model):
    settings = json.loads((model / "tokenizer_config.json").read_text())
    text = lambda token: token if isinstance(token, str) else token["content"]
    tokens = {name: text(settings[name]) for name in ("bos_token", "eos_token")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"), **tokens)
    tokenizer.chat_template = (model / "chat_template.jinja").read_text()
    return tokenizer


def spans(tokenizer, messages, options):
    """The character spans that the assistant wrote."""
    found = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before = tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True, **options)
            upto = tokenizer.apply_chat_template(messages[:i + 1], **options)
            assert upto.startswith(before)
            found.append((len(before), len(upto)))
    return found


def line(tokenizer, chat):
    messages = chat["messages"]
    options = {"tools": chat.get("tools"), "tokenize": False}
    text = tokenizer.apply_chat_template(messages, **options)
    if "endgeneration" in tokenizer.chat_template:
        out = tokenizer.apply_chat_template(messages, tools=chat.get("tools"), return_dict=True,
                                            return_assistant_tokens_mask=True)
        ids, mask = out["input_ids"], out["assistant_masks"]
    else:
        out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = out["input_ids"]
        written = spans(tokenizer, messages, options)
        mask = [int(any(start < end_ and begin < end for begin, end_ in written))
                for start, end in out["offset_mapping"]]
    return {"text": text, "tokens": list(ids), "assistant": [bool(m) for m in mask]}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("chats", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    tokenizer = load(arguments.model)
    chats = [json.loads(text) for text in arguments.chats.read_text().splitlines()]
    arguments.out.write_text(json.dumps([line(tokenizer, chat) for chat in chats]))


if __name__ == "__main__":
    main()
