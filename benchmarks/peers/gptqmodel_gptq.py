"""Times GPTQ by gptqmodel on the calibration tokens of `quant`.

Uses gptqmodel's defaults: group-aware order, damping 0.05, and linear layers in sequence on the activations of the
quantized model. There are two exceptions: the element type is the requested one, and finished layers are not moved to
disk. Options as in peer.py.
"""

import os

import peer

args = peer.arguments(__doc__, ["gptq"])
# The worker pool of gptqmodel does not start with fewer than two workers.
os.environ["GPTQMODEL_CPU_WORKERS"] = str(max(2, args.threads))

import torch  # noqa: E402
from gptqmodel import GPTQModel, QuantizeConfig  # noqa: E402


def config():
    """The requested bits, groups and settings, and otherwise gptqmodel's defaults."""
    assert args.group_size != "channel" and not args.channel, "the group-aware order requires groups"
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
