"""Writes what vLLM on a CPU makes of token windows, as JSON: the log-probability of every token but each window's first.

Run with the Python of setup_vllm.sh. The model is loaded in bfloat16, without a tokenizer; of vision-language models the
language model alone is run.
"""

import argparse
import json
import os
from pathlib import Path

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
               "VLLM_LOGGING_LEVEL": "WARNING"}

from vllm import LLM, SamplingParams  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL_DIR")
    parser.add_argument("tokens", metavar="TOKENS.json", type=Path)
    parser.add_argument("out", metavar="OUT.json", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()

    options = {}
    if "vision_config" in json.loads((Path(arguments.model) / "config.json").read_text()):
        options = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    model = LLM(model=arguments.model, skip_tokenizer_init=True, dtype=arguments.dtype, max_model_len=512,
                enforce_eager=True, enable_prefix_caching=False, **options)
    windows = json.loads(arguments.tokens.read_text())
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    outputs = model.generate([{"prompt_token_ids": window} for window in windows], sampling, use_tqdm=False)
    found = [[at[token].logprob for at, token in zip(output.prompt_logprobs[1:], window[1:], strict=True)]
             for output, window in zip(outputs, windows, strict=True)]
    arguments.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
