"""Mistakes that an implementation of a family could make. With each, the logits must differ: see check_families.py."""

import contextlib
from unittest import mock

import make_tiny
import numpy
import torch
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.qwen3_5 import modeling_qwen3_5

# Mistakes that are expressed as a different configuration, or by setting the tensors whose names have the given ending
# to zero.
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
FALCON_MLP = make_tiny.FALCON["mlp_multipliers"]
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
    "embeddings of Falcon not scaled": ("falcon_h1", {"embedding_multiplier": 1.0}),
    "logits of Falcon not scaled": ("falcon_h1", {"lm_head_multiplier": 1.0}),
    "inputs of Falcon's attention not scaled": ("falcon_h1", {"attention_in_multiplier": 1.0}),
    "outputs of Falcon's attention not scaled": ("falcon_h1", {"attention_out_multiplier": 1.0}),
    "inputs of Falcon's state spaces not scaled": ("falcon_h1-plain", {"ssm_in_multiplier": 1.0}),
    "outputs of Falcon's state spaces not scaled": ("falcon_h1", {"ssm_out_multiplier": 1.0}),
    "gates of Falcon's MLP not scaled": ("falcon_h1", {"mlp_multipliers": [1.0, FALCON_MLP[1]]}),
    "outputs of Falcon's MLP not scaled": ("falcon_h1", {"mlp_multipliers": [FALCON_MLP[0], 1.0]}),
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
    "yarn without its factor of attention": ("llama-yarn", {"rope_parameters": make_tiny.yarn(attention_factor=1.0)}),
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


def embeddings_divided(tensors):
    """Divides the embeddings by the root of their width, but not the head that has the same weights."""
    name = "model.embed_tokens.weight"
    width = tensors[name].shape[1]
    return tensors | {"lm_head.weight": tensors[name], name: tensors[name] / width ** 0.5}


def under_names_of_qwen3(tensors):
    """Names HunYuan's norms of queries and keys as Qwen3 does, which applies them before the rotation."""
    return {name.replace("query_layernorm", "q_norm").replace("key_layernorm", "k_norm"): tensor
            for name, tensor in tensors.items()}


def key_heads_repeated(tensors):
    """Gives each value head a key head of its own: that of its number modulo the number of key heads."""
    keys = 2 * make_tiny.HYBRID["linear_key_head_dim"]

    def repeat(tensor):
        queries, keys_, values = tensor.split([keys, keys, len(tensor) - 2 * keys])
        return torch.cat([queries, queries, keys_, keys_, values])

    return {name: repeat(tensor) if "in_proj_qkv" in name or "conv1d" in name else tensor
            for name, tensor in tensors.items()}


UNTIED = {"tie_word_embeddings": False}
# HunYuan's base, which includes the fixed factor.
AS_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_parameters": {
    "rope_type": "default", "rope_theta": 10000.0 * 50.0 ** (make_tiny.HEAD / (make_tiny.HEAD - 2))}}
# Mistakes that are expressed as a different configuration with different tensors.
TENSOR_TRAPS = {
    "keys of each block's own": ("gemma4-shared", {"num_kv_shared_layers": 0}, with_keys_of_their_own),
    "experts behind the norm of the MLP": ("gemma4-experts", {}, norms_swapped),
    "embeddings of Gemma not scaled": ("gemma2", UNTIED, embeddings_divided),
    "embeddings of Gemma 4 not scaled": ("gemma4", UNTIED, embeddings_divided),
    "embeddings of Gemma scaled by what is not rounded": ("gemma2-bf16", {}, lambda tensors: {
        name: tensor.float() for name, tensor in tensors.items()}),
    "norms of HunYuan's heads before the rotation": ("hunyuan-dense", AS_QWEN3, under_names_of_qwen3),
    "value heads with other key heads": ("qwen3_5", {"linear_num_key_heads": 4}, key_heads_repeated),
}


@contextlib.contextmanager
def states_read_by_larger_queries():
    """Does not divide the queries of delta nets by the root of their width. Outputs are linear in queries."""
    compute = modeling_qwen3_5.torch_chunk_gated_delta_rule

    def mistaken(query, *arguments, **options):
        out, state = compute(query, *arguments, **options)
        return out * query.shape[-1] ** 0.5, state

    with mock.patch.object(modeling_qwen3_5, "torch_chunk_gated_delta_rule", mistaken):
        yield


def queries_and_keys_as_they_are():
    """Does not normalize the queries and keys of delta nets, but makes them shorter, because states would overflow."""
    return mock.patch.object(modeling_qwen3_5, "l2norm", lambda x, **_: x / 4)


def values_as_they_are():
    """Does not normalize values, the only ones whose norm has no weight in this model."""
    norm = modeling_gemma4.Gemma4RMSNorm.forward
    return mock.patch.object(modeling_gemma4.Gemma4RMSNorm, "forward", lambda module, x: (
        norm(module, x) if module.with_scale else x))


# Mistakes that transformers is made to make, because no configuration or weight expresses them.
REFERENCE_TRAPS = {
    "queries of delta nets not scaled": ("qwen3_5-interval", states_read_by_larger_queries),
    "queries and keys of delta nets not normed": ("qwen3_5", queries_and_keys_as_they_are),
    "values of Gemma 4 not normed": ("gemma4", values_as_they_are),
}
