"""Prints the results of llama.cpp's own `llama-perplexity` for a text, as one line of JSON.

llama.cpp's converter turns the model into a GGUF file with f32 weights; the program then tokenizes the text itself and
cuts and scores it, with a cache in f32. `perplexities` are the numbers that it prints along the way, one per chunk over
all chunks so far; `token_standard_error` is the number after `+/-`; `tokens` are its own tokens of the chunks.

llama.cpp recognizes the pre-tokenizer of a BPE vocabulary by a hash, which it knows for published models. For any other
model, --pre-tokenizer names one of llama.cpp's own.

The program drops one newline at the end of a file, and does not parse special tokens in a text. Its processing of
backslash escapes is switched off.
"""

import argparse
import contextlib
import json
import logging
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy


def convert(llama_cpp, model_dir, pre_tokenizer, out):
    """Runs llama.cpp's converter, and names the pre-tokenizer, which it cannot recognize in this model."""
    source = llama_cpp / "source"
    for path in (source / "gguf-py", source):
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))
    import convert_hf_to_gguf
    from conversion.base import TextModel
    from conversion.deepseek import DeepseekV32Model

    argv = ["convert_hf_to_gguf", str(model_dir), "--outtype", "f32", "--outfile", str(out)]
    # For these families, the converter expects blocks for multi-token prediction unless an option disables them.
    if json.loads((model_dir / "config.json").read_text())["model_type"].startswith(("qwen3_5", "qwen3_next", "deepseek_v32", "glm_moe_dsa")):
        argv.append("--no-mtp")
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        stack.enter_context(mock.patch.object(sys, "argv", argv))
        stack.enter_context(mock.patch.object(TextModel, "get_vocab_base_pre",
                                              lambda _model, _tokenizer: pre_tokenizer))
        # It requires an option that transformers drops if tokenizer.json already adds a BOS token.
        stack.enter_context(mock.patch.object(DeepseekV32Model, "set_vocab", TextModel._set_vocab_gpt2))
        # The converter would set up logging for the whole process.
        stack.enter_context(mock.patch.object(logging, "basicConfig"))
        convert_hf_to_gguf.main()


def read_tokens(file, length, chunks):
    """Tokens from the header of the program's logits file, i32 [chunks, length]."""
    magic, head = file[:8], numpy.frombuffer(file[8:20], dtype="<i4")
    if magic != b"_logits_" or (head[0], head[2]) != (length, chunks):
        raise SystemExit(f"error: unexpected header of the logits file: {magic} {head}")
    return numpy.frombuffer(file[20:20 + 4 * length * chunks], dtype="<i4").reshape(chunks, length)


# The program sometimes ends before it has written its last lines.
ATTEMPTS = 3


def measure(llama_cpp, gguf, text, length, chunks, directory):
    logits = directory / "logits"
    command = [llama_cpp / "bin/llama-perplexity", "--model", gguf, "--file", text, "--no-escape",
               "--ctx-size", length, "--batch-size", length, "--ubatch-size", length,
               "--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off",
               "--kl-divergence-base", logits]
    command += ["--chunks", chunks] if chunks else []
    for _ in range(ATTEMPTS):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        output = done.stdout + done.stderr
        # It exits with 0 even after most failures, so its output is checked.
        final = re.search(r"Final estimate: PPL = ([0-9.]+) \+/- ([0-9.]+)", output)
        running = [float(value) for value in re.findall(r"\[\d+\]([0-9.]+),", output)]
        if final:
            break
    if done.returncode != 0 or not final or not running:
        raise SystemExit(f"error: llama-perplexity ({done.returncode}): {output[-1500:]}")
    tokens = read_tokens(logits.read_bytes(), length, len(running))
    return {"perplexity": float(final[1]), "token_standard_error": float(final[2]),
            "windows": len(running), "perplexities": running, "tokens": tokens.tolist()}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_cpp", metavar="LLAMA_CPP_DIR", type=Path,
                        help="what setup_llama_cpp.sh made")
    parser.add_argument("model", metavar="MODEL_DIR", type=Path)
    parser.add_argument("--text", type=Path, required=True, metavar="FILE")
    parser.add_argument("--length", type=int, required=True, metavar="L", help="tokens in a chunk")
    parser.add_argument("--windows", type=int, metavar="N", help="at most N chunks (default: all)")
    parser.add_argument("--pre-tokenizer", default="smollm", metavar="NAME",
                        help="default: %(default)s, single digits and the rules of GPT-2")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        gguf = directory / "model.gguf"
        convert(arguments.llama_cpp, arguments.model, arguments.pre_tokenizer, gguf)
        print(json.dumps(measure(arguments.llama_cpp, gguf, arguments.text, arguments.length,
                                 arguments.windows, directory)))


if __name__ == "__main__":
    main()
