"""GPTQ by gptqmodel on the calibration tokens of `quant`, timed.

Its own defaults throughout: order by groups, damping 0.05, one linear after the other on what the quantized model
makes of the text; but in the element type that is asked for, where it would take bfloat16, and without moving
finished layers to the disk, which a model that fits in memory does not need. Options as in peer.py.
"""

import os

import peer

args = peer.arguments(__doc__, ["gptq"])
# Its worker pool does not start with fewer than two workers.
os.environ["GPTQMODEL_CPU_WORKERS"] = str(max(2, args.threads))

import torch  # noqa: E402
from gptqmodel import GPTQModel, QuantizeConfig  # noqa: E402


def config():
    """The grids, and its defaults."""
    assert args.group_size != "channel" and not args.channel, "its order by groups needs groups"
    settings = {name: float(value) for name, value in args.settings.items()}
    return QuantizeConfig(
        bits=args.bits, group_size=int(args.group_size), sym=True, offload_to_disk=False, **settings)


torch.set_num_threads(args.threads)
checkpoint = peer.Checkpoint(args.model)
windows = [{"input_ids": w, "attention_mask": [1] * len(w)} for w in peer.windows(args)]
run = peer.Run(args)
model = GPTQModel.load(
    str(checkpoint.directory), config(), dtype=getattr(torch, args.dtype), device="cpu")
checkpoint.verify(model.model)
run.done()
model.quantize(windows, batch_size=1)
run.done()
model.save(str(args.out))
run.done()
run.finish(["gptqmodel", "transformers", "torch"])
