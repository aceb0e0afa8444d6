"""Small tokenizers of every kind, trained on the built-in corpus, as the files of a model directory.

The expressions are those of published tokenizers, so quant has to recognize them.
"""

import json
import struct
import unicodedata
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "calibration-data/corpus"

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = [r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
         r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"]
LLAMA_3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
QWEN_2 = LLAMA_3.replace("{1,3}", "")
DIGITS = "digits"
# The steps before bytes are mapped, whether pieces of the vocabulary are taken whole, and whether text becomes NFC. The
# name is llama.cpp's. `None`: GPT-2's expression.
BYTE_LEVEL = {
    "gpt-2": ([None], False, False),
    "smollm": ([DIGITS, None], False, False),
    "llama-bpe": ([LLAMA_3], True, False),
    "smaug-bpe": ([LLAMA_3], False, False),
    "qwen2": ([QWEN_2], False, True),
    "qwen35": ([CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + SPACES],
               False, True),
    "tekken": (["|".join([*CASED, r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", SPACES])], True, False),
    "gpt-4o": (["|".join([*(case + CONTRACTIONS + "?" for case in CASED), r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
                          SPACES])], False, False),
    "deepseek-v3": ([r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
                     r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^""" + "\r\n"
                     + r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[" + "\r\n" + r"]*|\s*[" + "\r\n"
                     + r"]+|\s+(?!\S)|\s+"], False, False),
    "deepseek-coder": (["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", DIGITS], False, False),
    "seed-coder": ([CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + SPACES], False, False),
}
# Without NFC, which the published tokenizer has.
UNCOMPOSED = "qwen2-uncomposed"
BYTE_LEVEL[UNCOMPOSED] = BYTE_LEVEL["qwen2"][:2] + (False,)

# Texts that pre-tokenizers split differently.
HARD = [
    "", " ", "  ", "   leading", "trailing  ", "\n", "\n\n", "\n\n\n\n", "a\n\n b\n \nc", "\t\tx\t y", " \n \r\n z",
    "I've told HE'LL they'Re 'D'ou l'eau don't DON'T", "CamelCaseWord iPhone HTTPServer aB Ab", "1 12 123 1234 12345 1234567",
    "3.14 1,000,000 0x1F v2.0.1 50%", "x=y+1; foo(bar)[i] -> {a: b} // c\n#!/bin/sh", "...!!!???---===___",
    "naïve café Ünïcödé Straße ÀÉÎ", "Привет, мир! Съешь ещё", "你好,世界。今天天气很好", "日本語のテキスト カタカナ",
    "한국어 문장입니다", "العربية والأرقام ١٢٣", "हिन्दी में पाठ है", "ภาษาไทยไม่มีช่องว่าง", "កាន់តែពិសេស",
    "🚀🦙 😶\u200d🌫️ ✅ 👩‍👩‍👧", "a\u00a0b\u3000c\u2003d", "½ ² Ⅷ ① ٣", "e\u0301 A\u030a o\u0308 n\u0303", "\ufeffbom \u200b zero",
    "https://example.org/a?b=c&d=%20#e", "“quoted” ‘single’ — dash…", "\x01\x7f control", "end.\n\nNext  paragraph\n",
]


def corpus():
    """Texts to train on: all of the built-in corpus, and hard texts often enough to leave traces."""
    texts = [path.read_text() for path in sorted(CORPUS.glob("*.txt"))]
    return texts + [unicodedata.normalize("NFC", text) for text in HARD] * 20


def texts():
    """Texts to compare: hard ones, and parts of the held-out texts and of the corpus."""
    heldout = [path.read_text()[:4000] for path in sorted((ROOT / "calibration-data/heldout").glob("*.txt"))]
    return HARD + heldout + [path.read_text()[-1500:] for path in sorted(CORPUS.glob("*.txt"))]


def byte_level(name, size=640):
    """A byte-level BPE with the pre-tokenizer of this name."""
    steps, whole, composes = BYTE_LEVEL[name]
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole))
    if composes:
        tokenizer.normalizer = normalizers.NFC()
    parts = []
    for step in steps:
        if step == DIGITS:
            parts.append(pre_tokenizers.Digits(individual_digits=True))
        elif step is not None:
            parts.append(pre_tokenizers.Split(Regex(step), "isolated"))
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=None in steps))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts) if len(parts) > 1 else parts[0]
    tokenizer.decoder = decoders.ByteLevel()
    train(tokenizer, size, ["<|bos|>", "<|eos|>"], pre_tokenizers.ByteLevel.alphabet())
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    return tokenizer


def train(tokenizer, size, special, alphabet):
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=sorted(alphabet),
                                  show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)


def bytes_of_fallback():
    return [f"<0x{byte:02X}>" for byte in range(256)]


def spaced(prefix=False, size=900):
    """A BPE with `▁` for spaces and byte fallback, like those of Gemma (no space at the start) and Llama 2 (with one)."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|channel>", "<|turn>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    # For training only: words do not reach across a space or a newline.
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁*[^▁\n]*|\n"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special + bytes_of_fallback(), limit_alphabet=120,
                                  show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    data = json.loads(tokenizer.to_str())
    steps = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    if prefix:
        steps.insert(0, {"type": "Prepend", "prepend": "▁"})
    data["normalizer"] = {"type": "Sequence", "normalizers": steps} if prefix else steps[0]
    data["pre_tokenizer"] = None
    # The tokens of bytes are not added tokens.
    data["added_tokens"] = [token for token in data["added_tokens"] if not token["content"].startswith("<0x")]
    # Runs of newlines are tokens without merges, as in Gemma's vocabulary.
    for run in ("\n\n", "\n\n\n", "\n\n\n\n"):
        data["added_tokens"].append({"id": len(data["model"]["vocab"]), "content": run, "single_word": False, "lstrip": False,
                                     "rstrip": False, "normalized": False, "special": False})
        data["model"]["vocab"][run] = len(data["model"]["vocab"])
    end = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    data["decoder"] = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}, *end]}
    data["post_processor"] = begins_with("<bos>", 2)
    return data


def begins_with(token, id):
    sequence = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = sequence + [{"SpecialToken": {"id": token, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": sequence, "pair": pair,
            "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]}}}


def train_sentencepiece(kind, out, size=900):
    """`tokenizer.model` from SentencePiece itself: `bpe` or `unigram`."""
    import sentencepiece
    text = [line for text in corpus() for line in text.splitlines() if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text), model_prefix=str(out / "spm"), vocab_size=size, model_type=kind, byte_fallback=True,
        character_coverage=0.995, normalization_rule_name="identity", remove_extra_whitespaces=False, num_threads=1,
        minloglevel=2, unk_id=0, bos_id=1, eos_id=2)
    (out / "spm.model").rename(out / "tokenizer.model")
    (out / "spm.vocab").unlink()


def from_sentencepiece(out):
    """Writes the `tokenizer.json` of a `tokenizer.model` with BPE, as transformers converts Llama 2's. The merges are
    all pairs of pieces whose concatenation is a piece, by decreasing score of that piece."""
    import sentencepiece
    model = sentencepiece.SentencePieceProcessor(model_file=str(out / "tokenizer.model"))
    pieces = [model.id_to_piece(i) for i in range(model.get_piece_size())]
    ids = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for i, piece in enumerate(pieces):
        if model.is_byte(i) or model.is_control(i) or model.is_unknown(i):
            continue
        local = [(piece[:at], piece[at:]) for at in range(1, len(piece)) if piece[:at] in ids and piece[at:] in ids]
        merges += [(-model.get_score(i), i, *sorted(((ids[a], ids[b]) for a, b in [pair])), pair) for pair in local]
    merges.sort(key=lambda merge: merge[:3])
    data = spaced_frame(ids, [list(merge[-1]) for merge in merges])
    (out / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False))


def spaced_frame(ids, merges):
    """A `tokenizer.json` like Llama 2's."""
    added = [{"id": ids[token], "content": token, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True} for token in ("<unk>", "<s>", "</s>")]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": None, "post_processor": begins_with("<s>", ids["<s>"]),
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
                  "vocab": ids, "merges": merges},
    }


def bytes_as_sentencepiece():
    """A `tokenizer.model` whose pieces are single bytes, for random models whose converter insists on one."""
    def field(number, data):
        return bytes([number << 3 | 2, *varint(len(data))]) + data

    def varint(value):
        out = []
        while value > 127:
            out.append(value & 127 | 128)
            value >>= 7
        return [*out, value]

    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((byte, 6) for byte in bytes_of_fallback())]
    message = b"".join(field(1, field(1, text.encode()) + b"\x15" + struct.pack("<f", 0.0) + bytes([3 << 3, kind]))
                       for text, kind in pieces)
    # BPE with byte fallback.
    return message + field(2, bytes([3 << 3, 2]) + bytes([0x98, 0x02, 1]))
