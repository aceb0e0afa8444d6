"""Times NVFP4 by NVIDIA's Model Optimizer (nvidia-modelopt) on a CPU.

Options as in peer.py. The only method, `max`, is the recipe W4A16_NVFP4_CFG, whose scales depend only on the weights;
it also runs the calibration tokens of `quant`. The result is exported to a Hugging Face checkpoint. Recipes that search
scales (NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG) need triton, and therefore a GPU.
"""

import peer

args = peer.arguments(__doc__, ["max"])

import modelopt.torch.quantization as mtq  # noqa: E402
import torch  # noqa: E402
from modelopt.torch.export import export_hf_checkpoint  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402


def forward(model):
    """Runs the calibration windows."""
    for window in windows:
        model(torch.tensor([window]))


torch.set_num_threads(args.threads)
checkpoint = peer.Checkpoint(args.model)
windows = peer.windows(args)
run = peer.Run(args)
model = AutoModelForCausalLM.from_pretrained(checkpoint.directory, dtype=getattr(torch, args.dtype))
checkpoint.verify(model)
run.done()
with torch.inference_mode():
    model = mtq.quantize(model, mtq.W4A16_NVFP4_CFG, forward)
    run.done()
    export_hf_checkpoint(model, export_dir=args.out)
run.done()
run.finish(["nvidia-modelopt", "transformers", "torch"])
