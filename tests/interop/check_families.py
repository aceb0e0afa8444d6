"""Compares each model family with transformers: float and quantized logits, from whole windows and from a cache.

A tiny random model of each family is run on windows that are shorter, and on windows that are longer, than its
attention windows and than the lengths at which its rotation changes. quant's logits may differ from transformers' result
in double precision by 2e-6 of the largest logit, or by twice as much as transformers' own logits in single precision.
Since the largest of many errors varies randomly, it is taken over several windows of each length. Checkpoints quantized
to 4 bits, by plain rounding, AWQ and GPTQ, must load without a missing or unexpected key, and give quant's logits; the
families of IN_COLUMNS also in the AWQ and GPTQ formats, which gptqmodel reads.
"""

import datetime
import json
import math
import random
import re
import shutil

import make_tiny
import numpy
import reference_model
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

TOLERANCE = 2e-6
# Both programs use the same dequantized weights, so only the order of sums differs.
QUANTIZED_TOLERANCE = 1e-5
# If quant's largest error exceeds the tolerance, its maximum ratio to transformers' largest error in single precision.
RATIO = 2
# Families with a larger ratio, because of a single token that is so ill-conditioned that changing the embeddings by
# 6e-8 moves its logits by 5e-6.
RATIOS = {"llama-yarn": 4}
# The same for quantized models: the states of delta nets amplify differences.
QUANTIZED_RATIOS = {"qwen3_next-unnormalized": 4}
LENGTHS = [24, 112]
# Windows of each length for float models.
WINDOWS = 3
OPTIONS = ["--group-size", "32"]
SAMPLES = ["--samples", "4", "--seq-len", "128"]
METHODS = {"rtn": ["--method", "rtn"], "awq": SAMPLES, "gptq": ["--method", "gptq", *SAMPLES]}
# The formats that gptqmodel reads, and the families whose quantized checkpoints it reads in them.
FORMATS = {"format-awq": ["--format", "awq", *SAMPLES], "format-gptq": ["--method", "gptq", "--format", "gptq", *SAMPLES]}
IN_COLUMNS = [
    "llama-yarn", "smollm3", "granite", "ministral3", "seed_oss", "ernie4_5", "hunyuan-dense", "gemma2", "gemma3", "gemma4",
    "olmo2", "olmo3", "exaone4", "glm", "glm4", "phi3", "phi", "cohere", "cohere2", "internlm3", "lfm2", "falcon_h1",
    "nemotron_h", "granitemoehybrid"]
# gptqmodel multiplies in half precision.
COLUMNS_TOLERANCE = 1e-2
# Checked on every change; the other families take turns by the day.
ALWAYS = ["gemma3", "phi3"]
PER_DAY = 6
# Families whose quantized checkpoints transformers cannot read. An independent implementation dequantizes the weights,
# and transformers runs the resulting float model.
THROUGH_FLOATS = ["gpt_oss", "gpt_oss-mxfp4", "gpt_oss-floats", "granitemoe", "gemma4-experts", "gpt2", "gpt2-scaled",
                  "gpt2-bare", "granitemoehybrid-experts", "mistral4", *make_tiny.BUILT_AS_LLAMA]
# Models whose published checkpoints are quantized. Their values are computed from codes and scales without quant.
STORED_QUANTIZED = ["gpt_oss-mxfp4", "deepseek_v3-fp8"]

# Mistakes that an implementation could make, expressed as a different configuration, or by setting the tensors whose
# names have the given ending to zero; the logits must then differ.
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
TRAPS = {
    "a window one longer": ("gemma2", {"sliding_window": make_tiny.WINDOW + 1}),
    "no soft cap of scores": ("gemma2", {"attn_logit_softcapping": None}),
    "no soft cap of logits": ("gemma2", {"final_logit_softcapping": None}),
    "another scale of scores": ("gemma3", {"query_pre_attn_scalar": 40}),
    "one rotation for all layers": ("gemma3", {"rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 5000.0} for kind in (make_tiny.FULL, make_tiny.SLIDING)}}),
    "gates before norms": ("falcon_h1", {"mamba_norm_before_gate": False}),
    "norms before gates": ("falcon_h1-gate-first", {"mamba_norm_before_gate": True}),
    "keys not scaled": ("falcon_h1", {"key_multiplier": 1.0}),
    "steps with other bounds": ("falcon_h1", {"time_step_limit": [0.9, 1.5]}),
    "parts of state spaces scaled alike": ("falcon_h1", {"ssm_multipliers": [1.0] * 5}),
    "no residual multiplier": ("granite", {"residual_multiplier": 1.0}),
    "scores divided by the root of the width": ("granite", {"attention_multiplier": 24 ** -0.5}),
    "all layers rotated": ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}),
    "halves for neighbors": ("ernie4_5", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "twice as many channels rotated": ("glm4", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "no logit scale": ("cohere", {"logit_scale": 1.0}),
    "a part for a proportion": ("gemma4", {"rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.0, "rope_theta": 50000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}}}),
    "twice as many channels rotated, after a gate": ("qwen3_5", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}),
    "another base of a part": ("qwen3_next", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}}),
    "weights of experts that add up to 1": ("qwen2_moe", {"norm_topk_prob": True}),
    "weights of experts that do not add up to 1": ("qwen3_next-experts", {"norm_topk_prob": False}),
    "windows of the last layers": ("qwen2_moe", {"layer_types": [make_tiny.FULL, make_tiny.FULL, make_tiny.FULL,
                                                                 make_tiny.SLIDING]}),
    "all experts as one group": ("glm4_moe", {"n_group": 1, "topk_group": 1}),
    "weights of experts not scaled": ("glm4_moe", {"routed_scaling_factor": 1.0}),
    "no norms of heads": ("glm4_moe", {"use_qk_norm": False}),
    "latent attention rotated by halves": ("deepseek_v3", {"rope_interleave": False}),
    "scores not scaled by mscale": ("deepseek_v3", {"rope_parameters": make_tiny.yarn(
        attention_factor=(0.1 * numpy.log(4) + 1) / (0.07 * numpy.log(4) + 1))}),
    "weights of groups not scaled": ("deepseek_v2", {"routed_scaling_factor": 1.0}),
    "DeepSeek-V3.2's experts as one group": ("deepseek_v32", {"n_group": 1, "topk_group": 1}),
    "weights of GLM-5's experts not scaled": ("glm_moe_dsa", {"routed_scaling_factor": 1.0}),
    "no groups": ("deepseek_v2", {"topk_method": "greedy"}),
    "windows in the other layers": ("gpt_oss", {"layer_types": [make_tiny.FULL, make_tiny.SLIDING] * 2}),
    "gates and ups clamped at 7": ("gpt_oss", {"swiglu_limit": 7.0}),
    "another sigmoid": ("gpt_oss", {"swiglu_alpha": 1.0}),
    "yarn truncated": ("gpt_oss", {"rope_parameters": make_tiny.yarn(truncate=True)}),
    "norms in parallel": ("gpt_neox-sequential", {"use_parallel_residual": True}),
    "no correction of scores": ("deepseek_v3", {}, ".e_score_correction_bias"),
    "no bias of experts": ("lfm2_moe", {}, ".expert_bias"),
    "weights of LFM2's experts not scaled": ("lfm2_moe", {"routed_scaling_factor": 1.0}),
    "no sinks": ("gpt_oss", {}, ".sinks"),
    "no correction of MiniMax's scores": ("minimax_m2", {}, ".e_score_correction_bias"),
    "no correction of Ernie's scores": ("ernie4_5_moe", {}, ".e_score_correction_bias"),
    "no yarn": ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "longrope without its factor of attention": ("phi3", {"rope_parameters": make_tiny.FAMILIES["phi3"]["rope_parameters"] | {
        "attention_factor": 1.0}}),
    "short factors of longrope for long ones": ("phi3", {"rope_parameters": make_tiny.FAMILIES["phi3"]["rope_parameters"] | {
        "long_factor": make_tiny.FAMILIES["phi3"]["rope_parameters"]["short_factor"]}}),
    "queries not scaled by position": ("ministral3", {"rope_parameters": make_tiny.FAMILIES["ministral3"]["rope_parameters"] | {
        "llama_4_scaling_beta": 0.0}}),
    "embeddings of Granite not scaled": ("granite", {"embedding_multiplier": 1.0}),
    "logits of Granite not scaled": ("granite", {"logits_scaling": 1.0}),
    "a fixed factor of the base left out": ("hunyuan-dense", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0}}),
    "all channels rotated in Phi": ("phi", {"partial_rotary_factor": 1.0, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}),
    "scores not divided by the layer": ("gpt2-scaled", {"scale_attn_by_inverse_layer_idx": False}),
    "a GELU with a tangent": ("gpt2-scaled", {"activation_function": "gelu_new"}),
    "a different number of slopes and heads": ("bloom", {"n_head": 8}),
    "attention of Granite 4 rotated": ("granitemoehybrid", {"position_embedding_type": "rope"}),
    "no factor of Granite 4's residual stream": ("granitemoehybrid", {"residual_multiplier": 1.0}),
    "no norms of single heads": ("cohere-norms", {"use_qk_norm": False}),
    "weights of Nemotron's experts not scaled": ("nemotron_h-experts", {"routed_scaling_factor": 1.0}),
    "Nemotron's experts as one group": ("nemotron_h-experts", {"n_group": 1, "topk_group": 1}),
    "weights of latent experts that add up to 1": ("nemotron_h-latent", {"norm_topk_prob": True}),
    "no correction of Nemotron's scores": ("nemotron_h-latent", {}, ".e_score_correction_bias"),
    "weights of Hy3's experts not scaled": ("hy_v3", {"router_scaling_factor": 1.0}),
    "no correction of Hy3's scores": ("hy_v3", {}, ".expert_bias"),
    "experts of Phi weighted by all": ("phimoe", {"router_jitter_noise": 1.0}),
    "longrope's own factor of attention in Phi": ("phimoe-longrope", {
        "rope_parameters": make_tiny.FAMILIES["phimoe-longrope"]["rope_parameters"] | {"short_mscale": 1.1, "long_mscale": 1.1}}),
    "no chunks": ("llama4", {"attention_chunk_size": 512}),
    "chunks one longer": ("llama4", {"attention_chunk_size": make_tiny.WINDOW + 1}),
    "no norms of Llama 4's heads": ("llama4", {"use_qk_norm": False}),
    "all layers of Llama 4 rotated": ("llama4", {"no_rope_layers": [1, 1, 1, 1]}),
    "queries of Llama 4 not scaled by position": ("llama4", {"attn_temperature_tuning": False}),
    "positions of Llama 4 counted from 0": ("llama4", {"floor_scale": 21}),
    "experts and the shared one added": ("cohere2_moe", {"shared_expert_combination_strategy": "sum"}),
    "layers in front not rotated": ("cohere2_moe", {"prefix_dense_sliding_window_pattern": 5}),
    "sigmoids of experts that add up to 1": ("cohere2_moe-sigmoid", {"norm_topk_prob": True}),
    "experts by their sigmoids": ("cohere2_moe", {"expert_selection_fn": "sigmoid"}),
    "queries of latent attention not scaled by position": ("mistral4", {
        "rope_parameters": make_tiny.FAMILIES["mistral4"]["rope_parameters"] | {"llama_4_scaling_beta": 0.0}}),
    "Mistral 4's experts as one group": ("mistral4", {"n_group": 1, "topk_group": 1}),
    "weights of Mistral 4's experts not scaled": ("mistral4", {"routed_scaling_factor": 1.0}),
    "an epsilon that is larger": ("internlm3", {"rms_norm_eps": 1e-2}),
    "frequencies that do not depend on the length": ("internlm3", {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
}


def scaled(part, change):
    """Returns a function that changes the tensors whose names contain `part`."""
    return lambda name, tensor: change(tensor).contiguous() if part in name else tensor


def halves_swapped(rows):
    """Returns a function that swaps the two halves of every run of `2 * rows` rows."""
    return lambda tensor: tensor.unflatten(0, (-1, 2, rows)).flip(1).flatten(0, 2)


def queries_first(tensor):
    """Reorders rows that are grouped by key head: first all queries, then all keys, then all values."""
    groups = tensor.unflatten(0, (2, 4, -1))
    parts = [groups[:, :2].flatten(0, 2), groups[:, 2].flatten(0, 1), groups[:, 3].flatten(0, 1)]
    return torch.cat(parts)


def gates_before_values(tensor):
    """For every key head of Qwen3-Next, moves the rows of gates before those of values."""
    keys, values = (make_tiny.HYBRID[f"linear_{kind}_head_dim"] for kind in ("key", "value"))
    parts = tensor.unflatten(0, (2, -1)).split([2 * keys, 2 * values, 2 * values], dim=1)
    return torch.cat([parts[0], parts[2], parts[1]], dim=1).flatten(0, 1)


# Further mistakes, expressed as different weights under the same configuration.
WEIGHT_TRAPS = {
    "norms multiply by what is stored": ("qwen3_5", scaled("layernorm.weight", lambda w: w - 1)),
    "norms of Gemma multiply by what is stored": ("gemma3", scaled("layernorm.weight", lambda w: w - 1)),
    "gates before ups, not alternating": ("gpt_oss", scaled(
        "experts.gate_up_proj", lambda w: w.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2))),
    "norms of whole projections as norms of heads": ("olmo2", scaled("q_norm", lambda w: w[:24].repeat(len(w) // 24))),
    "no biases of experts": ("gpt_oss", scaled("experts.down_proj_bias", torch.zeros_like)),
    "no bias of the router": ("gpt_oss", scaled("router.bias", torch.zeros_like)),
    "no shared expert in DeepSeek": ("deepseek_v3", scaled("shared_experts.down_proj", torch.zeros_like)),
    "queries of heads together, then keys, in GPT-NeoX": ("gpt_neox", scaled(
        "query_key_value.weight", lambda w: w.unflatten(0, (4, 3, -1)).transpose(0, 1).flatten(0, 2))),
    "norms of heads multiply by what is stored": ("qwen3_5", scaled("q_norm.weight", lambda w: w - 1)),
    "norms after delta nets multiply by 1 more": ("qwen3_5", scaled("linear_attn.norm", lambda w: w + 1)),
    "gates before queries": ("qwen3_5", scaled("q_proj.weight", halves_swapped(make_tiny.HEAD))),
    "states do not decay": ("qwen3_5", scaled("A_log", lambda w: w - 20)),
    "steps without their bias": ("qwen3_5", scaled("dt_bias", torch.zeros_like)),
    "norms of Gemma 4 multiply by 1 more": ("gemma4", scaled("layernorm.weight", lambda w: w + 1)),
    "inputs of blocks in another order": ("gemma4-small", scaled(
        "embed_tokens_per_layer", lambda w: w.unflatten(1, (6, -1)).flip(1).flatten(1))),
    "rows of inputs not scaled": ("gemma4-small", scaled("embed_tokens_per_layer", lambda w: w / 32 ** 0.5)),
    "projected inputs without their norm": ("gemma4-small", scaled("per_layer_projection_norm", torch.ones_like)),
    "inputs added without their norm": ("gemma4-inputs", scaled("post_per_layer_input_norm", torch.ones_like)),
    "routers without their scale": ("gemma4-experts", scaled("router.scale", torch.ones_like)),
    "experts without scales of their own": ("gemma4-experts", scaled("per_expert_scale", torch.ones_like)),
    "outputs of blocks not scaled": ("gemma4", scaled("layer_scalar", torch.ones_like)),
    "the first third for the second": ("lfm2", scaled("conv.in_proj", lambda w: w.unflatten(0, (3, -1))[[1, 0, 2]].flatten(0, 1))),
    "steps of state spaces without their bias": ("nemotron_h", scaled("dt_bias", torch.zeros_like)),
    "inputs of state spaces left out": ("nemotron_h", scaled("mixer.D", torch.zeros_like)),
    "heads of state spaces in other groups": ("nemotron_h", scaled(
        "in_proj", lambda w: torch.cat([w[:192], w[192:224].roll(16, 0), w[224:]]))),
    "weights of gated norms left out": ("falcon_h1", scaled("mamba.norm", torch.ones_like)),
    "short convolutions reversed": ("lfm2", scaled("conv.conv", lambda w: w.flip(-1))),
    "short convolutions without biases": ("lfm2-bias", scaled("conv.conv.bias", torch.zeros_like)),
    "convolutions reversed": ("qwen3_5", scaled("conv1d", lambda w: w.flip(-1))),
    "convolutions of a token alone": ("qwen3_next", scaled("conv1d", lambda w: w * torch.eye(4)[3])),
    "gates of shared experts that are always a half": ("qwen3_5_moe", scaled("shared_expert_gate", lambda w: 0 * w)),
    "ups before gates": ("qwen3_5_moe-published", scaled("gate_up_proj", lambda w: w.unflatten(1, (2, -1)).flip(1).flatten(1, 2))),
    "`a` before `b`": ("qwen3_next", scaled("in_proj_ba", halves_swapped(2))),
    "gates before values": ("qwen3_next", scaled("in_proj_qkvz", gates_before_values)),
    "outputs first": ("gpt2", scaled("attn.c_proj.weight", lambda w: w.t())),
    "keys before queries": ("gpt2", scaled("c_attn", lambda w: w.unflatten(-1, (3, -1))[..., [1, 0, 2], :].flatten(-2))),
    "positions one off": ("gpt2", scaled("wpe", lambda w: w.roll(1, 0))),
    "embeddings not normed": ("bloom", scaled("word_embeddings_layernorm.weight", torch.ones_like)),
    "no bias of the norm of embeddings": ("bloom", scaled("word_embeddings_layernorm.bias", torch.zeros_like)),
    "all queries before all keys": ("internlm2", scaled("wqkv", queries_first)),
    "ups before gates, by names": ("internlm2", scaled("feed_forward.w1", lambda w: w.roll(1, 0))),
    "one norm for all heads": ("cohere-norms", scaled("q_norm", lambda w: w[:1].expand_as(w))),
    "experts' latents in another order": ("nemotron_h-latent", scaled("fc1_latent_proj.weight", lambda w: w.flip(0))),
    "gates of Granite 4 after ups": ("granitemoehybrid-experts", scaled(
        "shared_mlp.input_linear", lambda w: w.unflatten(0, (2, -1)).flip(0).flatten(0, 1))),
    "ups of Llama 4 before gates": ("llama4", scaled(
        "experts.gate_up_proj", lambda w: w.unflatten(-1, (2, -1)).flip(-2).flatten(-2))),
    "experts of Llama 4 that read what is not scaled": ("llama4", scaled("feed_forward.router", torch.zeros_like)),
    "no shared expert": ("nemotron_h-experts", scaled("shared_experts.down_proj", torch.zeros_like)),
}


def with_keys_of_their_own(tensors):
    """Adds key and value weights to the blocks that should reuse the keys and values of block 1."""
    made = {name: tensor for name, tensor in tensors.items()
            if name.startswith("model.layers.1.self_attn.") and name.split(".")[4] in ("k_proj", "v_proj", "k_norm")}
    return tensors | {name.replace(".1.", f".{layer}.", 1): tensor for layer in (2, 3) for name, tensor in made.items()}


def norms_swapped(tensors):
    """Swaps the norms of the experts and of the MLP."""
    pair = ("pre_feedforward_layernorm.", "pre_feedforward_layernorm_2.")
    other = {name.replace(a, b): name for name in tensors for a, b in [pair, pair[::-1]] if a in name}
    return {name: tensors[other.get(name, name)] for name in tensors}


TENSOR_TRAPS = {
    "keys of each block's own": ("gemma4-shared", {"num_kv_shared_layers": 0}, with_keys_of_their_own),
    "experts behind the norm of the MLP": ("gemma4-experts", {}, norms_swapped),
}


def chosen(which):
    """The families of this run: all of them (`all`), one by name, or those that are due today."""
    names = list(make_tiny.FAMILIES)
    if which == "all":
        return names
    if which in names:
        return [which]
    return ALWAYS + due([name for name in names if name not in ALWAYS], PER_DAY)


def due(names, count):
    """The `count` names whose turn it is today."""
    day = datetime.datetime.now(datetime.timezone.utc).date().toordinal()
    return [names[(count * day + i) % len(names)] for i in range(min(count, len(names)))]


def run_all(check, which, only):
    # Threads cost more than they save in such small models.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run_chosen(check, which, only)
    finally:
        torch.set_num_threads(threads)


def run_chosen(check, which, only):
    for name in chosen(which):
        if only in f"family {name}":
            Family(check, name).run()
    for title, (name, changes, *zeroed) in TRAPS.items() if which == "all" else ():
        if only in f"family trap: {title}":
            check.step(f"family trap: {title}", lambda: Family(check, name).trap(changes, *zeroed))
    for title, (name, change) in WEIGHT_TRAPS.items() if which == "all" else ():
        if only in f"family trap: {title}":
            check.step(f"family trap: {title}", lambda: Family(check, name).trap({}, change=change))
    for title, (name, changes, whole) in TENSOR_TRAPS.items() if which == "all" else ():
        if only in f"family trap: {title}":
            check.step(f"family trap: {title}", lambda: Family(check, name).trap(changes, whole=whole))


def relative(found, expected):
    """The largest difference, relative to the largest expected value; infinite if a value is not finite."""
    difference = float(numpy.abs(found - expected).max() / numpy.abs(expected).max())
    return difference if math.isfinite(difference) else math.inf


class Errors:
    """The largest difference from the exact logits, relative to the largest exact logit."""

    def __init__(self):
        self.largest = 0.0

    def add(self, found, exact):
        self.largest = max(self.largest, relative(found, exact))

    def within(self, others, tolerance, ratio=RATIO):
        """Whether the errors are at most the tolerance, or `ratio` times the errors `others`."""
        return math.isfinite(others.largest) and self.largest <= max(tolerance, ratio * others.largest)

    def __str__(self):
        return f"{self.largest:.1e}"


def float_errors(check, model, reference, windows):
    """The errors of quant's and of transformers' logits in single precision, from whole windows and from a cache, with
    respect to transformers' logits of `reference` in double precision."""
    single, double = reference_model.load(reference), reference_model.load(reference).double()
    ours, theirs = Errors(), Errors()
    for window in windows:
        for compute, command in [(reference_model.logits, "logits"), (reference_model.decoded_logits, "decoded")]:
            exact = compute(double, window, torch.float64).numpy()
            ours.add(logits_of(check, model, command, window), exact)
            theirs.add(compute(single, window).numpy(), exact)
    return ours, theirs


def logits_of(check, model, command, window):
    """quant's logits of a window."""
    tokens, out = check.scratch / "family.json", check.scratch / "family.safetensors"
    tokens.write_text(json.dumps([window]))
    check.program("interop-dump", command, model, tokens, out)
    return load_file(out)["logits"][0]


def random_tokens(length, seed=0, end=make_tiny.VOCABULARY):
    """Random tokens, without any that a model may treat as padding."""
    generator = random.Random(length + 1000 * seed)
    return [generator.randrange(2, end) for _ in range(length)]


class Family:
    def __init__(self, check, name):
        self.check, self.name = check, name

    def run(self):
        model = self.check.model(self.name)
        self.check.step(f"family {self.name} float", lambda: self.float_logits(model))
        if self.name == "gpt_oss-mxfp4":
            self.check.step(f"family {self.name} bits", lambda: self.mxfp4_bits(model))
        for method, options in METHODS.items():
            self.check.step(f"family {self.name} {method}", lambda: self.quantized_logits(model, method, options))
        for method, options in FORMATS.items() if self.name in IN_COLUMNS else ():
            self.check.step(f"family {self.name} {method}", lambda: self.columns_logits(model, method, options))

    def float_logits(self, model):
        """Compares whole windows and a cache, short and long, with transformers' result in double precision."""
        windows = [random_tokens(length, seed) for length in LENGTHS for seed in range(WINDOWS)]
        ours, theirs = float_errors(self.check, model, self.reference(model), windows)
        return f"{ours} (transformers {theirs})", ours.within(theirs, TOLERANCE, RATIOS.get(self.name, RATIO))

    def columns_logits(self, model, method, options):
        out = self.check.scratch / f"{self.name}-{method}"
        self.check.program("quant", "quantize", model, "-o", out, "--quiet", *OPTIONS, *options)
        window = random_tokens(LENGTHS[-1])
        theirs = reference_model.logits(reference_model.load(out), window).numpy()
        apart = relative(logits_of(self.check, out, "logits", window), theirs)
        return f"{apart:.1e}", apart <= COLUMNS_TOLERANCE

    def quantized_logits(self, model, method, options):
        out = self.check.scratch / f"{self.name}-{method}"
        again = ["--requantize"] if self.name in STORED_QUANTIZED else []
        self.check.program("quant", "quantize", model, "-o", out, "--quiet", *OPTIONS, *options, *again)
        window = random_tokens(LENGTHS[-1])
        model = reference_model.load(self.as_floats(out) if self.name in THROUGH_FLOATS else out)
        theirs = reference_model.logits(model, window).numpy()
        # The first forward pass replaced the packed weights by floats.
        with torch.inference_mode():
            model.double()
        exact = reference_model.logits(model, window, torch.float64).numpy()
        errors = Errors(), Errors()
        for error, logits in zip(errors, (logits_of(self.check, out, "logits", window), theirs)):
            error.add(logits, exact)
        ours, theirs = errors
        return f"{ours} (transformers {theirs})", ours.within(
            theirs, QUANTIZED_TOLERANCE, QUANTIZED_RATIOS.get(self.name, RATIO))

    def reference(self, model):
        """The model that transformers runs. If the model is stored quantized, this is a model with the same values
        as floats; for InternLM2, it is an equivalent Llama."""
        if self.name == "gpt_oss-mxfp4":
            return self.check.model("gpt_oss-floats")
        if self.name in make_tiny.BUILT_AS_LLAMA:
            return self.as_llama(model)
        if self.name != "deepseek_v3-fp8":
            return model
        floats = self.check.scratch / f"{model.name}-floats"
        shutil.rmtree(floats, ignore_errors=True)
        shutil.copytree(model, floats)
        make_tiny.edit_config(floats / "config.json", lambda config: config.pop("quantization_config"))
        stored = load_torch(model / "model.safetensors")
        for name in [name for name in stored if name.endswith("_scale_inv")]:
            scales, weight = stored.pop(name), name.removesuffix("_scale_inv")
            rows, columns = stored[weight].shape
            spread = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
            stored[weight] = stored[weight].float() * spread
        save_file({name: tensor.numpy() for name, tensor in stored.items()}, floats / "model.safetensors",
                  metadata={"format": "pt"})
        return floats

    def as_llama(self, model):
        """Converts InternLM2, whose code is not in transformers, to an equivalent Llama."""
        llama = self.check.scratch / f"{model.name}-llama"
        shutil.rmtree(llama, ignore_errors=True)
        llama.mkdir()
        config = json.loads((model / "config.json").read_text())
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        width, repeat = config["hidden_size"] // heads, heads // kv_heads
        stored = {name: tensor for path in model.glob("*.safetensors") for name, tensor in load_file(path).items()}
        config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": config.pop("bias"),
                   "head_dim": width}
        (llama / "config.json").write_text(json.dumps(config))
        group = numpy.arange((repeat + 2) * width)
        at = {"q": group < repeat * width, "v": group >= (repeat + 1) * width}
        at["k"] = ~(at["q"] | at["v"])
        names = {"attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj",
                 "feed_forward.w3": "mlp.up_proj", "attention_norm": "input_layernorm",
                 "ffn_norm": "post_attention_layernorm", "model.tok_embeddings": "model.embed_tokens", "output": "lm_head"}
        tensors = {}
        for name, tensor in stored.items():
            module, _, kind = name.rpartition(".")
            if module.endswith("attention.wqkv"):
                for letter, rows in at.items():
                    tensors[f"{module.replace('attention.wqkv', f'self_attn.{letter}_proj')}.{kind}"] = (
                        tensor[numpy.tile(rows, kv_heads)])
                continue
            inside = re.fullmatch(r"(model\.layers\.\d+\.)(.*)", module)
            module = inside[1] + names[inside[2]] if inside else names.get(module, module)
            tensors[f"{module}.{kind}"] = tensor
        save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
        return llama

    def as_floats(self, model):
        """Writes a float checkpoint with joined experts from a packed one, dequantized by the independent
        implementation."""
        floats, read = self.check.scratch / f"{model.name}-floats", self.check.scratch / "packed.safetensors"
        shutil.rmtree(floats, ignore_errors=True)
        floats.mkdir()
        self.check.script("independent_pack", model, "--out", read)
        tensors = {name: tensor.float().numpy() for path in model.glob("*.safetensors")
                   for name, tensor in load_torch(path).items()}
        packed = {name for name in tensors if name.endswith((".weight_packed", ".weight_scale", ".weight_shape"))}
        tensors = {name: tensor for name, tensor in tensors.items() if name not in packed} | load_file(read)
        config = json.loads((model / "config.json").read_text())
        del config["quantization_config"]
        (floats / "config.json").write_text(json.dumps(config))
        if config["model_type"] in ("gpt2", "internlm2"):
            if config["model_type"] == "gpt2":
                # The rows of packed weights are outputs.
                packed = load_file(read)
                tensors |= {name: numpy.ascontiguousarray(weight.T) for name, weight in packed.items()}
            save_file(tensors, floats / "model.safetensors", metadata={"format": "pt"})
            return self.as_llama(floats) if config["model_type"] == "internlm2" else floats
        if config["model_type"] == "mistral4":
            self.join_experts(tensors)
            save_file(tensors, floats / "model.safetensors", metadata={"format": "pt"})
            return floats
        is_granite = config["model_type"] in ("granitemoe", "granitemoehybrid")
        is_gemma = config["model_type"] == "gemma4_text"
        linears = ("gate_proj", "up_proj", "down_proj")
        count = config["num_experts" if is_gemma else "num_local_experts"]
        for layer in range(config["num_hidden_layers"]):
            mlp = f"model.layers.{layer}.{'block_sparse_moe.' if is_granite else '' if is_gemma else 'mlp.'}"

            def take(linear, what):
                names = [f"{mlp}experts.{e}.{linear}.{what}" for e in range(count)]
                return numpy.stack([tensors.pop(name) for name in names])

            if is_gemma:
                gate, up, down = (take(linear, "weight") for linear in linears)
                tensors[f"{mlp}experts.gate_up_proj"] = numpy.concatenate([gate, up], axis=1)
                tensors[f"{mlp}experts.down_proj"] = down
                continue

            if is_granite:
                gate, up, down = (take(linear, "weight") for linear in linears)
                tensors[f"{mlp}input_linear.weight"] = numpy.concatenate([gate, up], axis=1)
                tensors[f"{mlp}output_linear.weight"] = down
                continue
            for what, suffix in [("weight", ""), ("bias", "_bias")]:
                gate, up, down = (take(linear, what) for linear in linears)
                both = numpy.stack([gate, up], axis=2).reshape(gate.shape[0], -1, *gate.shape[2:])
                columns = (lambda array: array.swapaxes(1, 2)) if what == "weight" else (lambda array: array)
                tensors[f"{mlp}experts.gate_up_proj{suffix}"] = numpy.ascontiguousarray(columns(both))
                tensors[f"{mlp}experts.down_proj{suffix}"] = numpy.ascontiguousarray(columns(down))
        save_file(tensors, floats / "model.safetensors", metadata={"format": "pt"})
        return floats

    @staticmethod
    def join_experts(tensors):
        """Joins the experts of each block in two tensors, gates first."""
        for prefix in sorted({name.split(".experts.")[0] for name in tensors if re.search(r"\.experts\.\d", name)}):
            count = len([name for name in tensors if re.fullmatch(re.escape(prefix) + r"\.experts\.\d+\.down_proj\.weight", name)])
            gate, up, down = (numpy.stack([tensors.pop(f"{prefix}.experts.{e}.{linear}.weight") for e in range(count)])
                              for linear in ("gate_proj", "up_proj", "down_proj"))
            for linear, weight in [("gate_up_proj", numpy.concatenate([gate, up], axis=1)), ("down_proj", down)]:
                tensors[f"{prefix}.experts.{linear}"] = numpy.ascontiguousarray(weight)

    def mxfp4_bits(self, model):
        """Compares every expert's weight with transformers' dequantization of codes and scales."""
        out = self.check.scratch / "weights.safetensors"
        self.check.program("interop-dump", "weights", model, out)
        ours, stored, different = load_file(out), load_torch(model / "model.safetensors"), []
        for name in [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]:
            values = convert_moe_packed_tensors(
                stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32).transpose(1, 2)
            experts, _, linear = name.rpartition(".")
            linears = {"down_proj": values} if linear == "down_proj" else {
                "gate_proj": values[:, 0::2], "up_proj": values[:, 1::2]}
            different += [f"{experts}.{e}.{linear}" for linear, values in linears.items() for e in range(len(values))
                          if not numpy.array_equal(ours[f"{experts}.{e}.{linear}.weight"], values[e].numpy())]
        return different or "equal", not different

    def trap(self, changes, zeroed=None, change=None, whole=None):
        """Checks that a mistake is detected: with it, quant's logits must differ from transformers' logits of the right
        model."""
        model = self.check.model(self.name)
        wrong = self.check.scratch / "trap"
        shutil.rmtree(wrong, ignore_errors=True)
        shutil.copytree(model, wrong)
        make_tiny.edit_config(wrong / "config.json", lambda config: config.update(changes))
        if change:
            path = wrong / "model.safetensors"
            tensors = {name: change(name, tensor) for name, tensor in load_torch(path).items()}
            save_torch(tensors, path, metadata={"format": "pt"})
        if whole:
            path = wrong / "model.safetensors"
            tensors = {name: tensor.clone() for name, tensor in whole(load_torch(path)).items()}
            save_torch(tensors, path, metadata={"format": "pt"})
        if zeroed:
            tensors = load_file(wrong / "model.safetensors")
            tensors |= {name: 0 * tensor if name.endswith(zeroed) else tensor for name, tensor in tensors.items()}
            # A sink of 0 still takes part in the softmax; minus infinity would not.
            tensors |= {name: tensor - 1e4 for name, tensor in tensors.items() if zeroed == ".sinks" == name[-6:]}
            save_file(tensors, wrong / "model.safetensors", metadata={"format": "pt"})
        window = random_tokens(LENGTHS[-1])
        theirs = reference_model.logits(reference_model.load(self.reference(model)), window).numpy()
        apart = relative(logits_of(self.check, wrong, "logits", window), theirs)
        return f"{apart:.1e} of the largest logit", apart > 100 * TOLERANCE
