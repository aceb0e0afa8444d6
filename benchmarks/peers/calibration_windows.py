"""Recomputes the token windows that `quant quantize --calibration FILE` samples.

The rule is that of quant-core/src/calibrate/windows.rs for plain text. `quant_report.json` contains the SHA-256 of the
tokens, so a caller can check that both are equal.
"""

import hashlib
import json
from pathlib import Path

from tokenizers import Tokenizer

MASK = (1 << 64) - 1


def documents(path):
    """Returns the `text` of each line of a `.jsonl` file, or any other file as one text."""
    text = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").decode()
    if Path(path).suffix.lower() != ".jsonl":
        return [text]
    # splitlines() would also split at other line separators, which JSON may contain unescaped.
    return [json.loads(line)["text"] for line in text.split("\n") if line.strip()]


def split_mix_64(seed):
    """Steele, Lea and Flood's generator of 64-bit numbers."""
    while True:
        seed = (seed + 0x9E3779B97F4A7C15) & MASK
        z = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        yield z ^ (z >> 31)


def select(windows, count, seed):
    """Draws `count` of the windows without replacement, and keeps them in order."""
    if count >= len(windows):
        return windows
    indices, random = list(range(len(windows))), split_mix_64(seed)
    for i in range(count):
        j = i + ((next(random) * (len(indices) - i)) >> 64)
        indices[i], indices[j] = indices[j], indices[i]
    return [windows[i] for i in sorted(indices[:count])]


def sample(tokenizer_file, text_file, samples, length, seed):
    """Returns windows of token ids, a list of lists."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    stream = []
    for document in documents(text_file):
        stream.extend(tokenizer.encode(document).ids)
    windows = [stream[i:i + length] for i in range(0, len(stream) - length + 1, length)]
    assert len(windows) >= samples, f"the text has {len(windows)} windows, but {samples} are needed"
    return select(windows, samples, seed)


def sha256(windows):
    """The digest that `quant` records: every token as a little-endian u32."""
    return hashlib.sha256(b"".join(t.to_bytes(4, "little") for w in windows for t in w)).hexdigest()
