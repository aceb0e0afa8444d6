"""Prints the results of lm-evaluation-harness for the documents of a file, as one line of JSON.

Only the model is loaded by reference_model.py, which refuses a load that is not perfect. A .jsonl file contains one
document per line, in `text`; any other file is one document.

Empty modules stand in for packages that the harness imports but does not use here.
"""

import argparse
import contextlib
import importlib.machinery
import io
import json
import logging
import sys
import types
from pathlib import Path

import reference_model

STAND_INS = ["datasets", "sacrebleu"]


@contextlib.contextmanager
def stand_ins():
    """Empty modules from which any attribute can be read, as annotations and subclasses need."""
    for name in STAND_INS:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__getattr__ = lambda attribute: type(attribute, (), {})
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in STAND_INS:
            del sys.modules[name]


with stand_ins():
    from lm_eval.api.task import PerplexityTask
    from lm_eval.models.huggingface import HFLM


class Documents(PerplexityTask):
    """A perplexity task over given documents."""

    VERSION = 0

    def download(self, *_arguments, **_options):
        """The documents are already in memory."""

    def has_validation_docs(self):
        return False

    def has_test_docs(self):
        return False


def read_documents(file):
    content = file.read_bytes().decode("utf-8")
    if file.suffix != ".jsonl":
        return [content]
    return [json.loads(line)["text"] for line in content.split("\n") if line.strip()]


def measure(model_dir, documents, length):
    model = HFLM(pretrained=reference_model.load(model_dir), tokenizer=str(model_dir),
                 max_length=length, batch_size=1)
    task = Documents()
    requests = [task.construct_requests(document, "") for document in documents]
    with contextlib.redirect_stderr(io.StringIO()):
        likelihoods = model.loglikelihood_rolling(requests, disable_tqdm=True)
    results = [task.process_results(document, (likelihood,))
               for document, likelihood in zip(documents, likelihoods, strict=True)]
    scores = {name: aggregate([result[name] for result in results])
              for name, aggregate in task.aggregation().items()}
    return scores | {"nll": -sum(likelihoods), "document_nll": [-value for value in likelihoods]}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL_DIR", type=Path)
    parser.add_argument("--text", type=Path, required=True, metavar="FILE")
    parser.add_argument("--length", type=int, required=True, metavar="L",
                        help="the harness's max_length")
    arguments = parser.parse_args()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with reference_model.stop_on_error():
        # Stdout is for the result.
        with contextlib.redirect_stdout(sys.stderr):
            result = measure(arguments.model, read_documents(arguments.text), arguments.length)
        print(json.dumps(result))


if __name__ == "__main__":
    main()
