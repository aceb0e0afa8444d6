"""Times the perplexity of a model in transformers in float32, on the `gptq-L` windows that `quant eval` scores too.

    eval_transformers.py MODEL TEXT WINDOW WINDOWS THREADS

Prints one JSON object: the seconds of the forward passes and the cross-entropy, without loading; the mean negative
log-likelihood; the number of scored tokens; and the versions.
"""

import json
import os
import sys
import time

model, text, window, windows, threads = sys.argv[1:3] + [int(n) for n in sys.argv[3:]]
for name in ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"]:
    os.environ[name] = str(threads)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch  # noqa: E402
import transformers  # noqa: E402

torch.set_num_threads(threads)
transformers.utils.logging.disable_progress_bar()
tokenizer = transformers.AutoTokenizer.from_pretrained(model)
decoder = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
decoder.eval()
with open(text, encoding="utf-8") as file:
    tokens = tokenizer(file.read(), return_tensors="pt").input_ids[0]
total, scored, seconds = 0.0, 0, 0.0
with torch.inference_mode():
    for start in range(0, window * windows, window):
        ids = tokens[start : start + window]
        begun = time.perf_counter()
        logits = decoder(ids[None, :-1]).logits[0]
        total += torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum").item()
        seconds += time.perf_counter() - begun
        scored += len(ids) - 1
versions = {"torch": torch.__version__, "transformers": transformers.__version__}
print(json.dumps({"seconds": seconds, "nll": total / scored, "scored": scored, "versions": versions}))
