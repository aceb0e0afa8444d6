"""Writes the results of vLLM on a CPU for token windows, as JSON: the log-probability of every token except each window's
first.

Run with the Python of setup_vllm.sh. Models are loaded in bfloat16, in one process, because a start takes longer than a
small model; for vision-language models only the language model is run. For a model in the directory NAME, OUT contains
NAME.json, or NAME.error with the reason why it does not load. No model is run after an error, because the engine leaves
state behind. If the engine's compiled code crashes the process, neither file is written.
"""

import argparse
import gc
import json
import os
from pathlib import Path

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
               "VLLM_LOGGING_LEVEL": "WARNING"}

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory  # noqa: E402


def scored(path, windows, dtype):
    options = {}
    if "vision_config" in json.loads((path / "config.json").read_text()):
        options = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    model = LLM(model=str(path), skip_tokenizer_init=True, dtype=dtype, max_model_len=512, enforce_eager=True,
                enable_prefix_caching=False, **options)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    outputs = model.generate([{"prompt_token_ids": window} for window in windows], sampling, use_tqdm=False)
    return [[at[token].logprob for at, token in zip(output.prompt_logprobs[1:], window[1:], strict=True)]
            for output, window in zip(outputs, windows, strict=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", metavar="TOKENS.json", type=Path)
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument("models", metavar="MODEL_DIR", type=Path, nargs="+")
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()

    windows = json.loads(arguments.tokens.read_text())
    for path in arguments.models:
        try:
            found = scored(path, windows, arguments.dtype)
            (arguments.out / f"{path.name}.json").write_text(json.dumps(found))
        except Exception as error:  # whatever the engine raises: it does not load
            lines = [line for line in str(error).splitlines() if line.strip()] or ["no message"]
            # After a failed validation, the first line counts the errors, and the second is the first error.
            (arguments.out / f"{path.name}.error").write_text(f"{type(error).__name__}: {' '.join(lines[:2])}"[:400])
            return
        cleanup_dist_env_and_memory()
        gc.collect()


if __name__ == "__main__":
    main()
