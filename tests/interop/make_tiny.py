"""Makes a tiny random checkpoint of a family, to compare decoders on features that small real models lack.

Norm weights are random too, so that an implementation that ignores them must fail. Most tokenizers map every byte to
one token and add <s> at the start.
"""

import argparse
import json
from pathlib import Path

import reference_model  # noqa: F401, which registers a class
import torch
from safetensors.torch import load_file, save_file
from make_tokenizers import bytes_as_sentencepiece
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

VOCABULARY = 272
LLAMA3_ROPE = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
               "original_max_position_embeddings": 64, "rope_type": "llama3"}
LINEAR_ROPE = {"factor": 4.0, "rope_type": "linear"}
OPT = {"model_type": "opt", "ffn_dim": 384, "word_embed_proj_dim": 128, "pad_token_id": 1}
SLIDING, FULL = "sliding_attention", "full_attention"
MIXED = {"num_hidden_layers": 4, "sliding_window": 48}
QWEN2_MIXED = MIXED | {"model_type": "qwen2", "use_sliding_window": True}
QWEN3_MOE = {"model_type": "qwen3_moe", "head_dim": 64, "num_experts": 6, "num_experts_per_tok": 3,
             "moe_intermediate_size": 128}
SMALL_GEMMA = {"sliding_window": 24, "head_dim": 32, "query_pre_attn_scalar": 32,
               "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
# The features that llama.cpp's graphs support for families with experts, latent attention and delta nets.
LLAMA_CPP_GPT_OSS = {"model_type": "gpt_oss", "num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 64,
                     "num_hidden_layers": 4, "head_dim": 32, "sliding_window": 24, "rope_parameters": {
                         "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                         "original_max_position_embeddings": 512, "truncate": True}}
EQUAL_DELTA = {"num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
               "linear_key_head_dim": 32, "linear_value_head_dim": 32,
               "layer_types": ["linear_attention", FULL, "linear_attention", FULL], "rope_parameters": {
                   "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                   "mrope_section": [3, 3, 2], "mrope_interleaved": True}}
EQUAL_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
                 "shared_expert_intermediate_size": 96}
LLAMA_CPP_GEMMA4 = {"model_type": "gemma4_text", "num_hidden_layers": 4, "head_dim": 32, "global_head_dim": 64,
                    "sliding_window": 24, "final_logit_softcapping": 2.0, "tie_word_embeddings": True,
                    "rope_parameters": {
                        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 50000.0},
                        SLIDING: {"rope_type": "default", "rope_theta": 5000.0}}}
FIRST_DENSE = {"num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
               "moe_intermediate_size": 64, "first_k_dense_replace": 1}
MLA = {"num_key_value_heads": 4, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24}
# With enough heads that few keys have the same score.
INDEXED = {"q_lora_rank": 64, "index_topk": 128, "index_n_heads": 16, "index_head_dim": 64}
MLA_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 512}
VARIANTS = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "llama3-rope": {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 10000.0}},
    "head-dim": {"head_dim": 64},
    "sharded-bf16": {},
    "linear-rope": {"rope_parameters": LINEAR_ROPE | {"rope_theta": 10000.0}},
    # Shorter than the windows of the check.
    "mistral": {"model_type": "mistral", "sliding_window": 48},
    # transformers reads a `mistral` with `layer_types` by its class `ministral`.
    "mistral-layer-types": MIXED | {"model_type": "ministral", "head_dim": 32, "layer_types": [SLIDING, FULL, FULL, SLIDING]},
    # The features that llama.cpp's graphs of these families support.
    "smollm3-fourth": {"model_type": "smollm3", "pad_token_id": 0, "num_hidden_layers": 5, "no_rope_layer_interval": 4},
    "seed_oss-plain": {"model_type": "seed_oss", "attention_out_bias": False, "mlp_bias": False},
    "olmo2-plain": {"model_type": "olmo2"},
    # llama.cpp recognizes a Phi-3 vocabulary by the name of the directory.
    "fused": {"model_type": "phi3", "pad_token_id": 0,
              "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}},
    "fused-longrope": {"model_type": "phi3", "pad_token_id": 0, "original_max_position_embeddings": 256, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + 0.1 * i for i in range(16)],
        "long_factor": [1.5 + 0.7 * i for i in range(16)]}},
    "cohere-plain": {"model_type": "cohere", "logit_scale": 0.3},
    "starcoder2-plain": {"model_type": "starcoder2", "sliding_window": None},
    "qwen2_moe-all": {"model_type": "qwen2_moe", "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
                      "shared_expert_intermediate_size": 96},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-layer-types": QWEN2_MIXED | {"layer_types": [FULL, SLIDING, FULL, SLIDING]},
    "qwen2-max-window-layers": QWEN2_MIXED | {"max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 64, "attention_bias": True},
    "qwen3-unbiased": {"model_type": "qwen3", "head_dim": 64},
    # Experts as wide as a super-block of 256; llama.cpp has rules for models with eight of them.
    "mixtral-wide": {"model_type": "mixtral", "hidden_size": 256, "intermediate_size": 512, "num_local_experts": 8,
                     "num_experts_per_tok": 2},
    "qwen3-moe-wide": QWEN3_MOE | {"hidden_size": 256, "moe_intermediate_size": 256, "norm_topk_prob": True},
    # Qwen3's experts are narrower than its dense MLP, and its heads wider than hidden_size / num_attention_heads.
    "mixtral": {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3-moe": QWEN3_MOE | {"norm_topk_prob": True},
    "qwen3-moe-mixed": QWEN3_MOE | {"num_hidden_layers": 4, "mlp_only_layers": [1], "decoder_sparse_step": 1,
                                    "attention_bias": True, "tie_word_embeddings": True},
    # The features that are fixed in llama.cpp's graphs: windows in fixed layers, and scores scaled by the width of
    # heads.
    "gemma2-alternating": SMALL_GEMMA | {"model_type": "gemma2", "num_hidden_layers": 4, "attn_logit_softcapping": 1.5,
                                         "final_logit_softcapping": 2.0, "layer_types": [SLIDING, FULL] * 2},
    "gemma3-sixth": SMALL_GEMMA | {"model_type": "gemma3_text", "num_hidden_layers": 6, "rope_parameters": {
        FULL: {"rope_type": "default", "rope_theta": 50000.0}, SLIDING: {"rope_type": "default", "rope_theta": 5000.0}}},
    "gpt_oss-plain": LLAMA_CPP_GPT_OSS,
    "gpt_oss-codes": LLAMA_CPP_GPT_OSS,
    "qwen3_5-equal": EQUAL_DELTA | {"model_type": "qwen3_5_text"},
    "qwen3_5_moe-equal": EQUAL_DELTA | EQUAL_EXPERTS | {"model_type": "qwen3_5_moe_text"},
    "qwen3_next-equal": EQUAL_DELTA | EQUAL_EXPERTS | {"model_type": "qwen3_next", "norm_topk_prob": True},
    "glm4_moe-first": FIRST_DENSE | {"model_type": "glm4_moe", "head_dim": 32, "use_qk_norm": True, "attention_bias": True,
                                     "norm_topk_prob": True, "routed_scaling_factor": 1.4, "n_group": 1, "topk_group": 1,
                                     "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                                         "partial_rotary_factor": 0.5}},
    "deepseek_v3-mla": FIRST_DENSE | MLA | {"model_type": "deepseek_v3", "q_lora_rank": 64, "n_group": 4, "topk_group": 2,
                                            "routed_scaling_factor": 2.5, "norm_topk_prob": True,
                                            "rope_parameters": MLA_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "deepseek_v2-mla": FIRST_DENSE | MLA | {"model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "greedy",
                                            "norm_topk_prob": False, "routed_scaling_factor": 1.6,
                                            "rope_parameters": MLA_YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    # The matrices of latent attention are as wide as a super-block.
    "deepseek_v3-wide": FIRST_DENSE | MLA | {"model_type": "deepseek_v3", "hidden_size": 256, "intermediate_size": 512,
                                             "moe_intermediate_size": 256, "q_lora_rank": 256, "kv_lora_rank": 256,
                                             "qk_nope_head_dim": 256, "v_head_dim": 64, "n_group": 4, "topk_group": 2},
    "olmoe-plain": {"model_type": "olmoe", "num_key_value_heads": 4, "num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 64,
                    "norm_topk_prob": False},
    "granitemoe-plain": {"model_type": "granitemoe", "num_local_experts": 6, "num_experts_per_tok": 3,
                         "intermediate_size": 64, "embedding_multiplier": 3.0, "attention_multiplier": 0.3,
                         "residual_multiplier": 0.6, "logits_scaling": 2.5},
    "cohere2-fourth": {"model_type": "cohere2", "num_hidden_layers": 4, "sliding_window": 24, "logit_scale": 0.3, "rotary_pct": 1.0},
    "ernie4_5-plain": {"model_type": "ernie4_5"},
    "ernie4_5_moe-plain": {"model_type": "ernie4_5_moe", "moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 64,
                           "moe_num_shared_experts": 2, "num_hidden_layers": 3, "moe_layer_interval": 1},
    "minimax_m2-plain": {"model_type": "minimax_m2", "num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 32,
                         "intermediate_size": 64, "rotary_dim": 16, "rope_parameters": {
                             "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "hunyuan-dense-plain": {"model_type": "hunyuan_v1_dense", "head_dim": 32},
    "olmo3-fourth": {"model_type": "olmo3", "num_hidden_layers": 4, "sliding_window": 24, "rope_parameters": {
        FULL: {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
               "original_max_position_embeddings": 512},
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0}}},
    "gemma4-shared-keys": LLAMA_CPP_GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1,
                                              "hidden_size_per_layer_input": 0, "layer_types": [SLIDING, FULL] * 2},
    "gemma4-own-inputs": LLAMA_CPP_GEMMA4 | {"num_hidden_layers": 6, "hidden_size_per_layer_input": 32,
                                             "num_kv_shared_layers": 3, "vocab_size_per_layer_input": VOCABULARY,
                                             "use_double_wide_mlp": True,
                                             "layer_types": [SLIDING, SLIDING, FULL] * 2},
    "gemma4-with-experts": LLAMA_CPP_GEMMA4 | {"hidden_size_per_layer_input": 0, "layer_types": [SLIDING, FULL] * 2,
                                               "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2,
                                               "moe_intermediate_size": 64},
    "opt": OPT,
    "opt-plain": OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False,
                        "tie_word_embeddings": False},
    # Saved by a class without a head, so tensor names lack their first part.
    "opt-bare": OPT,
}


def yarn(**changes):
    return {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0,
            "original_max_position_embeddings": ORIGINAL} | changes


def rope(**parameters):
    return {"rope_parameters": {"rope_theta": 10000.0} | parameters}


# Small models of each family, with values that make the effect of each feature visible. The check runs windows of 24
# and of 112 tokens. Unless a comment says otherwise, attention windows, and lengths at which a rotation changes, are in
# between.
WINDOW, ORIGINAL = 40, 64
LAYERS = {"num_hidden_layers": 4, "sliding_window": WINDOW}
GEMMA = LAYERS | {"query_pre_attn_scalar": 10, "hidden_activation": "gelu_pytorch_tanh"}
GEMMA4 = LAYERS | {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "global_head_dim": 48,
                   "final_logit_softcapping": 2.0, "layer_types": [SLIDING, FULL, SLIDING, FULL],
                   "rope_parameters": {
                       FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 50000.0},
                       SLIDING: {"rope_type": "default", "rope_theta": 5000.0}}}
ALTERNATING = {"layer_types": [SLIDING, FULL, FULL, SLIDING]}
HEAD = 24
LINEAR = "linear_attention"
# More value heads than key heads, with a different width.
HYBRID = {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
          "linear_value_head_dim": 24, "layer_types": [LINEAR, FULL, LINEAR, LINEAR]} | rope(
              rope_type="default", partial_rotary_factor=0.5, mrope_section=[2, 2, 2], mrope_interleaved=True)
# Several groups of heads, and states wider than heads. transformers applies the lower bound `time_step_min` only when
# it processes whole windows; engines never apply it.
NEMOTRON = {"model_type": "nemotron_h", "num_hidden_layers": 4, "ssm_state_size": 16, "mamba_num_heads": 8,
            "mamba_head_dim": 12, "n_groups": 2, "chunk_size": 32, "time_step_min": 1e-9,
            "layers_block_type": [LINEAR, "mlp", FULL, LINEAR]}
FALCON = {"model_type": "falcon_h1", "mamba_d_ssm": 96, "mamba_n_heads": 8, "mamba_d_head": 12, "mamba_n_groups": 2,
          "mamba_d_state": 16, "mamba_chunk_size": 32,
          "ssm_multipliers": [0.7, 1.2, 0.8, 1.1, 0.9], "ssm_in_multiplier": 0.6, "ssm_out_multiplier": 1.3,
          "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.8, "key_multiplier": 0.6,
          "mlp_multipliers": [0.8, 1.3], "embedding_multiplier": 2.5, "lm_head_multiplier": 0.4}
EXPERTS = {"num_experts_per_tok": 3}
GRANITE_HYBRID = {"model_type": "granitemoehybrid", "num_hidden_layers": 4, "layer_types": [LINEAR, FULL, LINEAR, LINEAR],
                  "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 32,
                  "shared_intermediate_size": 96, "embedding_multiplier": 3.0, "attention_multiplier": 0.3,
                  "residual_multiplier": 0.6, "logits_scaling": 2.5}
SHARED_EXPERT = EXPERTS | {"num_experts": 6, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
DEEPSEEK = EXPERTS | {"n_routed_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 64, "n_group": 4,
                      "topk_group": 2, "first_k_dense_replace": 1}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
          "qk_rope_head_dim": 8, "v_head_dim": 24}
INDEXER = {"index_topk": 128, "index_n_heads": 3, "index_head_dim": 16}
LLAMA4 = {"model_type": "llama4_text", "num_hidden_layers": 4, "num_local_experts": 6, "intermediate_size": 64,
          "attention_chunk_size": WINDOW, "floor_scale": 20, "attn_scale": 0.3}
COHERE2_MOE = EXPERTS | {"model_type": "cohere2_moe", "num_hidden_layers": 5, "num_experts": 6, "intermediate_size": 64,
                         "sliding_window": WINDOW, "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 160,
                         "logit_scale": 0.3, "pad_token_id": 0}
GPT_OSS = EXPERTS | {"model_type": "gpt_oss", "num_local_experts": 4, "intermediate_size": 64,
                     "sliding_window": WINDOW, "swiglu_limit": 1.5, "attention_bias": False}
NEMOTRON_EXPERTS = NEMOTRON | EXPERTS | {
    "layers_block_type": [LINEAR, "moe", FULL, "moe"], "n_routed_experts": 8, "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 96, "routed_scaling_factor": 1.4}
FAMILIES = {
    "llama-yarn": rope(**yarn()),
    "llama-yarn-mscale": rope(**yarn(mscale=0.8, mscale_all_dim=0.4, truncate=False, beta_fast=None)),
    "llama-yarn-attention-factor": rope(**yarn(attention_factor=1.3, original_max_position_embeddings=16)),
    "llama-dynamic": {"max_position_embeddings": ORIGINAL} | rope(rope_type="dynamic", factor=3.0),
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 4, "no_rope_layer_interval": 3, "attention_bias": True},
    "smollm3-windows": LAYERS | {"model_type": "smollm3", "use_sliding_window": True, "no_rope_layer_interval": 2,
                                 "tie_word_embeddings": False, "mlp_bias": True},
    "granite": {"model_type": "granite", "embedding_multiplier": 3.0, "attention_multiplier": 0.3,
                "residual_multiplier": 0.6, "logits_scaling": 2.5, "attention_bias": True, "mlp_bias": True},
    "ministral3": {"model_type": "ministral3", "sliding_window": 100} | rope(
        **yarn(mscale=1.0, mscale_all_dim=1.0), llama_4_scaling_beta=0.7, max_position_embeddings=256),
    "seed_oss": {"model_type": "seed_oss", "attention_out_bias": True, "mlp_bias": True},
    "ernie4_5": {"model_type": "ernie4_5", "use_bias": True},
    "hunyuan-dense": {"model_type": "hunyuan_v1_dense", "attention_bias": True} | rope(
        rope_type="dynamic", factor=1.0, alpha=50.0),
    "gemma2": GEMMA | {"model_type": "gemma2", "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    "gemma2-uncapped": GEMMA | {"model_type": "gemma2", "attn_logit_softcapping": None,
                                "final_logit_softcapping": None, "attention_bias": True},
    # √96, the factor of the embeddings, is rounded to 9.8125.
    "gemma2-bf16": GEMMA | {"model_type": "gemma2"},
    "gemma3": GEMMA | {"model_type": "gemma3_text", "sliding_window_pattern": 3, "rope_parameters": {
        FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
        SLIDING: {"rope_type": "default", "rope_theta": 5000.0}}},
    "gemma4": GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4-values": GEMMA4 | {"attention_bias": True, "final_logit_softcapping": None, "tie_word_embeddings": False},
    # Like E2B and E4B: per-layer inputs, and blocks that reuse the keys and values of an earlier block.
    "gemma4-small": GEMMA4 | {"num_hidden_layers": 6, "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 3,
                              "vocab_size_per_layer_input": VOCABULARY, "use_double_wide_mlp": True,
                              "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL, FULL]},
    "gemma4-inputs": GEMMA4 | {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": VOCABULARY + 10,
                               "attention_k_eq_v": True, "num_global_key_value_heads": 1, "tie_word_embeddings": False},
    "gemma4-shared": GEMMA4 | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 32,
                               "vocab_size_per_layer_input": VOCABULARY, "layer_types": [SLIDING, FULL, FULL, FULL],
                               "final_logit_softcapping": None},
    "gemma4-experts": GEMMA4 | {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2,
                                "moe_intermediate_size": 64, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "nemotron_h": NEMOTRON,
    "nemotron_h-bias": NEMOTRON | {"use_bias": True, "mlp_bias": True, "use_conv_bias": False, "n_groups": 1,
                                   "tie_word_embeddings": True},
    "falcon_h1": FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
    "falcon_h1-gate-first": FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "projectors_bias": True},
    "falcon_h1-plain": FALCON | {"mamba_rms_norm": False, "mamba_conv_bias": False, "tie_word_embeddings": True},
    "lfm2": {"model_type": "lfm2", "num_hidden_layers": 4, "layer_types": ["conv", FULL, "conv", "conv"],
             "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.3},
    "lfm2-bias": {"model_type": "lfm2", "conv_bias": True, "full_attn_idxs": [1], "conv_L_cache": 4,
                  "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False},
    "lfm2_moe": EXPERTS | {"model_type": "lfm2_moe", "num_hidden_layers": 4, "layer_types": ["conv", FULL, "conv", FULL],
                           "num_experts": 6, "moe_intermediate_size": 64, "num_dense_layers": 1,
                           "routed_scaling_factor": 1.5},
    "lfm2_moe-plain": EXPERTS | {"model_type": "lfm2_moe", "layer_types": [FULL, "conv", FULL], "num_experts": 5,
                                 "moe_intermediate_size": 64, "num_dense_layers": 0, "norm_topk_prob": False,
                                 "use_expert_bias": False, "tie_word_embeddings": False},
    "gemma3-older-keys": GEMMA | ALTERNATING | {"model_type": "gemma3_text", "final_logit_softcapping": 3.0},
    "olmo2": {"model_type": "olmo2", "attention_bias": True},
    "olmo3": LAYERS | {"model_type": "olmo3", "rope_parameters": {
        FULL: yarn(rope_theta=500000.0), SLIDING: {"rope_type": "default", "rope_theta": 500000.0}}},
    "exaone4": LAYERS | {"model_type": "exaone4", "sliding_window_pattern": 3},
    "exaone4-full": {"model_type": "exaone4", "sliding_window": None, "layer_types": [FULL, FULL, FULL]},
    "glm": {"model_type": "glm", "num_key_value_heads": 2},
    "glm4": {"model_type": "glm4", "attention_bias": False} | rope(partial_rotary_factor=0.25, rope_type="default"),
    "phi3": {"model_type": "phi3", "original_max_position_embeddings": ORIGINAL, "max_position_embeddings": 256} | rope(
        rope_type="longrope", partial_rotary_factor=0.75,
        short_factor=[1.0 + 0.1 * i for i in range(HEAD * 3 // 8)],
        long_factor=[1.5 + 0.7 * i for i in range(HEAD * 3 // 8)]),
    "phi3-window": {"model_type": "phi3", "sliding_window": WINDOW, "num_key_value_heads": 4},
    "phi": {"model_type": "phi"},
    "phi-norms": {"model_type": "phi", "qk_layernorm": True, "num_key_value_heads": 4},
    "cohere": {"model_type": "cohere", "attention_bias": True, "logit_scale": 0.3},
    "cohere2": LAYERS | {"model_type": "cohere2", "logit_scale": 0.25, "tie_word_embeddings": False},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": WINDOW},
    "qwen3_5": HYBRID | {"model_type": "qwen3_5_text", "attention_bias": True},
    # The norm after a delta net hides factors of the net's output, except from a large epsilon.
    "qwen3_5-interval": HYBRID | {"model_type": "qwen3_5_text", "full_attention_interval": 2, "layer_types": None,
                                  "linear_conv_kernel_dim": 3, "tie_word_embeddings": True, "rms_norm_eps": 1e-2},
    "qwen3_next": HYBRID | {"model_type": "qwen3_next", "mlp_only_layers": [0, 1, 2, 3], "num_experts": 4},
    # The first block has an MLP. Experts are stored singly, as published.
    "qwen3_next-experts": HYBRID | SHARED_EXPERT | {"model_type": "qwen3_next", "mlp_only_layers": [0], "norm_topk_prob": True},
    "qwen3_next-unnormalized": HYBRID | SHARED_EXPERT | {"model_type": "qwen3_next", "decoder_sparse_step": 2,
                                                         "norm_topk_prob": False},
    # Two models: as saved by transformers, and as published, with all experts of a block in one tensor.
    "qwen3_5_moe": HYBRID | SHARED_EXPERT | {"model_type": "qwen3_5_moe_text"},
    "qwen3_5_moe-published": HYBRID | SHARED_EXPERT | {"model_type": "qwen3_5_moe_text", "attention_bias": True},
    "qwen2_moe": EXPERTS | {"model_type": "qwen2_moe", "num_experts": 6, "moe_intermediate_size": 64,
                            "shared_expert_intermediate_size": 96, "mlp_only_layers": [1], "num_hidden_layers": 4,
                            "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 3},
    "qwen2_moe-plain": EXPERTS | {"model_type": "qwen2_moe", "num_experts": 5, "moe_intermediate_size": 64,
                                  "shared_expert_intermediate_size": 32, "decoder_sparse_step": 2, "qkv_bias": False,
                                  "norm_topk_prob": True},
    "olmoe": EXPERTS | {"model_type": "olmoe", "num_experts": 6, "intermediate_size": 64, "norm_topk_prob": True},
    "olmoe-unnormalized": EXPERTS | {"model_type": "olmoe", "num_experts": 6, "intermediate_size": 64,
                                     "attention_bias": True},
    "glm4_moe": DEEPSEEK | {"model_type": "glm4_moe", "use_qk_norm": True, "attention_bias": True,
                            "routed_scaling_factor": 1.4} | rope(rope_type="default", partial_rotary_factor=0.5),
    "glm4_moe-ungrouped": DEEPSEEK | {"model_type": "glm4_moe", "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
                                      "routed_scaling_factor": 0.5},
    "deepseek_v3": DEEPSEEK | LATENT | {"model_type": "deepseek_v3"} | rope(**yarn(mscale=1.0, mscale_all_dim=0.7)),
    # Stored in 8-bit floats. No width is a multiple of 128, so blocks are cut off at the edges.
    "deepseek_v3-fp8": DEEPSEEK | LATENT | {"model_type": "deepseek_v3", "first_k_dense_replace": 2,
                                              "n_shared_experts": 3},
    "deepseek_v3-plain": DEEPSEEK | LATENT | {
        "model_type": "deepseek_v3", "q_lora_rank": None, "rope_interleave": False, "attention_bias": True,
        "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    # Indexers select all keys of the windows: more would differ by ties.
    "deepseek_v32": DEEPSEEK | LATENT | INDEXER | {"model_type": "deepseek_v32"} | rope(
        **yarn(mscale=1.0, mscale_all_dim=0.7)),
    "glm_moe_dsa": DEEPSEEK | LATENT | INDEXER | {
        "model_type": "glm_moe_dsa", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.6,
        "indexer_types": ["full", "shared", "full"]},
    "deepseek_v2": DEEPSEEK | LATENT | {
        "model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0,
        "norm_topk_prob": False} | rope(**yarn(mscale=0.7, mscale_all_dim=0.7)),
    "deepseek_v2-lite": DEEPSEEK | LATENT | {
        "model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False},
    "glm4_moe_lite": DEEPSEEK | LATENT | {"model_type": "glm4_moe_lite", "n_group": 1, "topk_group": 1},
    "gpt_oss": EXPERTS | {"model_type": "gpt_oss", "num_local_experts": 5, "intermediate_size": 64, "num_hidden_layers": 4,
                          "sliding_window": WINDOW, "swiglu_limit": 1.5} | rope(**yarn(truncate=False)),
    # Two models with the same values: as published, and as floats.
    "gpt_oss-mxfp4": GPT_OSS,
    "gpt_oss-floats": GPT_OSS,
    "minimax_m2": EXPERTS | {"model_type": "minimax_m2", "num_local_experts": 6, "intermediate_size": 64} | rope(
        rope_type="default", partial_rotary_factor=0.5),
    "ernie4_5_moe": {"model_type": "ernie4_5_moe", "moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 64,
                     "moe_num_shared_experts": 2, "num_hidden_layers": 4, "moe_layer_interval": 2},
    "granitemoe": EXPERTS | {"model_type": "granitemoe", "num_local_experts": 6, "intermediate_size": 64,
                             "embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.6,
                             "logits_scaling": 2.5, "attention_bias": True},
    "hunyuan-moe": {"model_type": "hunyuan_v1_moe", "num_experts": 5, "moe_topk": 2, "intermediate_size": 64},
    "gpt_neox": {"model_type": "gpt_neox"} | rope(rope_type="default", partial_rotary_factor=0.5),
    "gpt_neox-sequential": {"model_type": "gpt_neox", "use_parallel_residual": False},
    "gpt2": {"model_type": "gpt2", "n_inner": 160},
    "gpt2-scaled": {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False,
                    "activation_function": "gelu", "tie_word_embeddings": False},
    # As published: the names of the decoder's tensors lack their first part, and masks are stored.
    "gpt2-bare": {"model_type": "gpt2", "n_inner": None},
    "bloom": {"model_type": "bloom"},
    # The slopes come from two series; keys and names are as published.
    "bloom-bare": {"model_type": "bloom", "num_attention_heads": 6},
    "internlm3": {"model_type": "internlm3", "attention_bias": True, "mlp_bias": True,
                  "max_position_embeddings": ORIGINAL} | rope(rope_type="dynamic", factor=6.0),
    "internlm3-published": {"model_type": "internlm3", "num_key_value_heads": 1},
    "phimoe": {"model_type": "phimoe", "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 64,
               "router_jitter_noise": 0.4, "attention_bias": True, "lm_head_bias": True},
    # The check's windows are not longer than the original length, beyond which implementations differ.
    "phimoe-longrope": {
        "model_type": "phimoe", "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 64,
        "max_position_embeddings": 512, "original_max_position_embeddings": 128, "sliding_window": WINDOW} | rope(
            rope_type="longrope", short_factor=[1.0 + 0.1 * i for i in range(12)],
            long_factor=[1.5 + 0.7 * i for i in range(12)], short_mscale=1.3, long_mscale=1.3,
            original_max_position_embeddings=128),
    "llama4": LLAMA4 | {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 128, "num_experts_per_tok": 1},
    "llama4-bias": LLAMA4 | {"attention_bias": True, "use_qk_norm": False, "num_experts_per_tok": 2} | rope(**{
        **LLAMA3_ROPE}),
    "cohere2_moe": COHERE2_MOE | {"num_shared_experts": 2},
    "cohere2_moe-sigmoid": COHERE2_MOE | {
        "expert_selection_fn": "sigmoid", "num_shared_experts": 1, "shared_expert_combination_strategy": "sum",
        "rms_norm_eps": 1e-5, "attention_bias": True, "norm_topk_prob": False},
    "mistral4": DEEPSEEK | LATENT | {"model_type": "mistral4", "n_group": 2, "topk_group": 1, "num_experts_per_tok": 3,
                                     "routed_scaling_factor": 1.4} | rope(
        **yarn(mscale=1.0, mscale_all_dim=0.7, llama_4_scaling_beta=0.3)),
    # transformers has no class for it, so it is built from Llama's class and read as such.
    "internlm2": {"model_type": "llama", "attention_bias": True},
    "internlm2-plain": {"model_type": "llama", "num_key_value_heads": 1, "num_hidden_layers": 2},
    "cohere-norms": {"model_type": "cohere", "use_qk_norm": True, "logit_scale": 0.3, "tie_word_embeddings": False},
    "nemotron_h-experts": NEMOTRON_EXPERTS | {"n_group": 4, "topk_group": 2},
    "nemotron_h-latent": NEMOTRON_EXPERTS | {"moe_latent_size": 64, "mlp_bias": True, "norm_topk_prob": False},
    "hy_v3": EXPERTS | {"model_type": "hy_v3", "num_experts": 6, "num_shared_experts": 2, "moe_intermediate_size": 64,
                        "router_scaling_factor": 1.7},
    "granitemoehybrid": GRANITE_HYBRID | {"num_local_experts": 0, "attention_bias": True},
    "granitemoehybrid-rope": GRANITE_HYBRID | {
        "num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_groups": 1, "mamba_proj_bias": True,
        "mamba_conv_bias": False, "tie_word_embeddings": True},
    "granitemoehybrid-experts": GRANITE_HYBRID | EXPERTS | {"num_local_experts": 6, "intermediate_size": 64},
    "hy_v3-layers": EXPERTS | {"model_type": "hy_v3", "num_experts": 5, "moe_intermediate_size": 64,
                               "router_scaling_factor": 0.6, "attention_bias": True,
                               "mlp_layer_types": ["sparse", "dense", "sparse"]},
}
# The features that llama.cpp's graphs of these families support.
LLAMA_CPP_LFM2 = {"num_hidden_layers": 4, "layer_types": ["conv", FULL, "conv", FULL]}
LLAMA_CPP_GRANITE_4 = GRANITE_HYBRID | {"tie_word_embeddings": True, "num_local_experts": 0}
LLAMA_CPP_NEMOTRON = {"head_dim": 32, "mamba_head_dim": 16}
LLAMA_CPP_FALCON = FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "head_dim": 32}
VARIANTS |= {
    "lfm2-tied": LLAMA_CPP_LFM2 | {"model_type": "lfm2", "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.3,
                                   "conv_L_cache": 4},
    "lfm2_moe-corrected": LLAMA_CPP_LFM2 | EXPERTS | {
        "model_type": "lfm2_moe", "num_experts": 6, "moe_intermediate_size": 64, "num_dense_layers": 1},
    "granite_4-hybrid": LLAMA_CPP_GRANITE_4,
    "granite_4-rotated": LLAMA_CPP_GRANITE_4 | {"position_embedding_type": "rope", "attention_bias": True},
    "granite_4-experts": LLAMA_CPP_GRANITE_4 | EXPERTS | {"num_local_experts": 6, "intermediate_size": 64,
                                                          "tie_word_embeddings": False},
    "granite_4-attention": LLAMA_CPP_GRANITE_4 | {"position_embedding_type": "rope", "layer_types": [FULL] * 4},
    "nemotron_h-dense": NEMOTRON | LLAMA_CPP_NEMOTRON | {"mlp_bias": True},
    "nemotron_h-grouped": NEMOTRON_EXPERTS | LLAMA_CPP_NEMOTRON | {"n_group": 4, "topk_group": 2},
    "nemotron_h-narrow": NEMOTRON_EXPERTS | LLAMA_CPP_NEMOTRON | {"moe_latent_size": 64, "norm_topk_prob": False},
    "falcon_h1-normed": LLAMA_CPP_FALCON,
    "exaone4-plain": {"model_type": "exaone4", "sliding_window": None, "layer_types": [FULL] * 2},
    # llama.cpp gives sliding windows only to models of 64 blocks.
    "exaone4-windows": {"model_type": "exaone4", "num_hidden_layers": 64, "hidden_size": 64, "intermediate_size": 96,
                        "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 24,
                        "sliding_window_pattern": 4},
    "hy_v3-first": EXPERTS | {"model_type": "hy_v3", "num_hidden_layers": 3, "head_dim": 32, "num_experts": 6,
                              "num_shared_experts": 2, "moe_intermediate_size": 64, "router_scaling_factor": 1.7,
                              "first_k_dense_replace": 1},
    "deepseek_v32-indexed": FIRST_DENSE | MLA | INDEXED | {
        "model_type": "deepseek_v32", "n_group": 4, "topk_group": 2,
        "rope_parameters": MLA_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "glm_moe_dsa-shared": FIRST_DENSE | MLA | INDEXED | {
        "model_type": "glm_moe_dsa", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.6,
        "indexer_types": ["full", "shared", "full"]},
    "glm-partial": {"model_type": "glm", "head_dim": 32, "pad_token_id": 0},
    "internlm2-unbiased": {"model_type": "llama", "head_dim": 32},
    "gpt_neox-parallel": {"model_type": "gpt_neox"} | rope(rope_type="default", partial_rotary_factor=0.5),
    "gpt_neox-serial": {"model_type": "gpt_neox", "use_parallel_residual": False},
    "bloom-tied": {"model_type": "bloom"},
    "phi-partial": {"model_type": "phi"},
    "gpt2-tied": {"model_type": "gpt2", "n_positions": 512},
    "llama4-second": {"model_type": "llama4_text", "num_hidden_layers": 4, "head_dim": 32, "num_local_experts": 6,
                      "num_experts_per_tok": 1, "intermediate_size": 64, "intermediate_size_mlp": 128,
                      "interleave_moe_layer_step": 2},
    "falcon_h1-tied": LLAMA_CPP_FALCON | {"mamba_rms_norm": False, "tie_word_embeddings": True},
}
# Published names of layers, which llama.cpp's converter expects.
PUBLISHED_LAYERS = {LINEAR: "mamba", FULL: "attention"}
# Variants that are built from another family's class.
BUILT_AS_LLAMA = ("internlm2", "internlm2-plain", "internlm2-128", "internlm2-unbiased")

# Families in widths for which engines have kernels: multiples of 32, and heads of 32 or 64 channels.
WIDE_GEMMA4 = {"hidden_size_per_layer_input": 0, "global_head_dim": 64, "head_dim": 32, "tie_word_embeddings": True,
               "layer_types": [SLIDING, FULL], "sliding_window": 48} | {
                   key: GEMMA4[key] for key in ("model_type", "final_logit_softcapping", "rope_parameters")}
ENGINES = {
    "granite-128": {"model_type": "granite", "embedding_multiplier": 3.0, "attention_multiplier": 0.3,
                    "residual_multiplier": 0.6, "logits_scaling": 2.5},
    # Within the original positions, beyond which vLLM differs.
    "ministral3-128": {"model_type": "ministral3", "head_dim": 32, "sliding_window": None} | rope(
        **yarn(mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=256), llama_4_scaling_beta=0.7,
        max_position_embeddings=512),
    "ernie4_5-128": {"model_type": "ernie4_5", "head_dim": 32},
    "hunyuan-128": {"model_type": "hunyuan_v1_dense", "head_dim": 32},
    "gemma4-128": WIDE_GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "lfm2-128": {"model_type": "lfm2", "layer_types": ["conv", FULL], "block_auto_adjust_ff_dim": False, "conv_dim": 128,
                 "conv_dim_out": 128, "block_dim": 128},
    "olmo3-128": {"model_type": "olmo3", "num_hidden_layers": 4, "sliding_window": 48},
    "exaone4-128": {"model_type": "exaone4", "num_hidden_layers": 4, "sliding_window": 48, "head_dim": 32},
    "glm-128": {"model_type": "glm", "head_dim": 32, "pad_token_id": 0},
    "glm4-128": {"model_type": "glm4", "head_dim": 32, "pad_token_id": 0} | rope(
        partial_rotary_factor=0.5, rope_type="default"),
    "phi3-128": {"model_type": "phi3", "pad_token_id": 0},
    # The check's windows are longer than the original length.
    "qwen3-yarn-128": {"model_type": "qwen3", "head_dim": 64} | rope(**yarn(original_max_position_embeddings=128)),
    "phi3-longrope-128": {"model_type": "phi3", "pad_token_id": 0, "original_max_position_embeddings": 128} | rope(
        rope_type="longrope", short_factor=[1.0 + 0.1 * i for i in range(16)],
        long_factor=[1.5 + 0.7 * i for i in range(16)]),
    "phi-128": {"model_type": "phi"},
    "cohere-128-norms": {"model_type": "cohere", "use_qk_norm": True, "logit_scale": 0.3},
    "cohere2-128": {"model_type": "cohere2", "num_hidden_layers": 4, "sliding_window": 48, "logit_scale": 0.25},
    "gpt_neox-128": {"model_type": "gpt_neox"},
    "gpt2-128": {"model_type": "gpt2"},
    "bloom-128": {"model_type": "bloom"},
    "internlm2-128": {"model_type": "llama", "head_dim": 32},
    "internlm3-128": {"model_type": "internlm3", "head_dim": 32},
    "qwen3_5-128": {"model_type": "qwen3_5_text", "head_dim": 64, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
                    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "layer_types": [LINEAR, FULL]},
    "falcon_h1-128": FALCON | {"mamba_d_ssm": 128, "mamba_n_heads": 32, "mamba_d_head": 4, "mamba_rms_norm": False},
    "nemotron_h-128": NEMOTRON | {"mamba_num_heads": 32, "mamba_head_dim": 4, "head_dim": 32},
    "granitemoehybrid-128": GRANITE_HYBRID | {"num_local_experts": 0, "mamba_n_heads": 32, "shared_intermediate_size": 128},
    "hy_v3-128": EXPERTS | {"model_type": "hy_v3", "head_dim": 32, "num_experts": 6, "moe_intermediate_size": 128,
                            "router_scaling_factor": 1.7, "first_k_dense_replace": 1, "expert_hidden_dim": 128, "route_norm": True,
                            "qk_norm": True},
    "granitemoe-128": EXPERTS | {"model_type": "granitemoe", "num_local_experts": 6, "intermediate_size": 128,
                                 "embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.6,
                                 "logits_scaling": 2.5},
    # vLLM never normalizes the weights of OLMoE's experts.
    "olmoe-128": EXPERTS | {"model_type": "olmoe", "num_experts": 6, "intermediate_size": 128, "norm_topk_prob": False},
    "glm4_moe-128": DEEPSEEK | {"model_type": "glm4_moe", "head_dim": 64, "use_qk_norm": True, "attention_bias": True,
                                "moe_intermediate_size": 128} | rope(rope_type="default", partial_rotary_factor=0.5),
    "minimax_m2-128": EXPERTS | {"model_type": "minimax_m2", "head_dim": 64, "num_local_experts": 6, "intermediate_size": 128,
                                 "rotary_dim": 32, "scoring_func": "sigmoid"} | rope(
        rope_type="default", partial_rotary_factor=0.5),
    "ernie4_5_moe-128": {"model_type": "ernie4_5_moe", "moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 128,
                         "moe_num_shared_experts": 2, "num_hidden_layers": 4, "moe_layer_interval": 2,
                         "moe_layer_start_index": 1, "moe_layer_end_index": 3},
    "lfm2_moe-128": EXPERTS | {"model_type": "lfm2_moe", "layer_types": ["conv", FULL, "conv"], "num_hidden_layers": 3,
                               "num_dense_layers": 1, "num_experts": 6, "moe_intermediate_size": 128,
                               "use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.5},
    "qwen3_next-128": SHARED_EXPERT | {
        "model_type": "qwen3_next", "head_dim": 64, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "layer_types": [LINEAR, FULL],
        "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "norm_topk_prob": True},
    "cohere2_moe-128": COHERE2_MOE | {"head_dim": 32, "num_shared_experts": 2, "intermediate_size": 128,
                                      "prefix_dense_intermediate_size": 256, "num_hidden_layers": 4},
    # vLLM needs chunks in multiples of its block of 128 cached tokens.
    "llama4-128": LLAMA4 | {"head_dim": 64, "attention_chunk_size": 128, "intermediate_size": 128, "intermediate_size_mlp": 256,
                            "interleave_moe_layer_step": 2, "num_experts_per_tok": 1},
    # Latent vectors of the only width that vLLM's CPU kernel for latent attention supports.
    "deepseek_v3-128": DEEPSEEK | {
        "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 512,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid"},
}
# Families whose configurations lack `num_key_value_heads`, and those that lack `intermediate_size`.
WITHOUT_KEY_HEADS, FOUR_TIMES_AS_WIDE = ("gpt_neox", "gpt2", "bloom"), ("gpt2", "bloom")
# For these, transformers derives the head dimension from the hidden size.
WITHOUT_HEAD_DIM = {"lfm2", "lfm2_moe", "phi3", "phi", "cohere2", "starcoder2", "granite", "cohere", "olmo2", "olmo3",
                    "gpt_neox", "gpt2", "bloom", "qwen2_moe", "olmoe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa",
                    "glm4_moe_lite", "ernie4_5_moe", "granitemoe", "granitemoehybrid"}


def family_options(variant):
    options = {"model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 96, "intermediate_size": 160,
               "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HEAD,
               "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    options |= FAMILIES[variant]
    if options["model_type"] in WITHOUT_KEY_HEADS:
        options.pop("num_key_value_heads")
    if options["model_type"] in FOUR_TIMES_AS_WIDE:
        options.pop("intermediate_size")
    if options["model_type"] in WITHOUT_HEAD_DIM:
        options.pop("head_dim")
    else:
        options["head_dim"] = 40 if options["model_type"] in ("gemma2", "gemma3_text", "seed_oss") else HEAD
    return options


def make_model(variant, seed):
    options = {"model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 384,
               "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
               "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1}
    if variant in FAMILIES:
        options = family_options(variant)
    else:
        options |= (VARIANTS | ENGINES)[variant]
        if options["model_type"] in WITHOUT_KEY_HEADS:
            options.pop("num_key_value_heads")
        if options["model_type"] in FOUR_TIMES_AS_WIDE:
            options.pop("intermediate_size")
    # In these families, 1 is added to the norm weights, except in gated delta nets.
    centered = options["model_type"].startswith(("gemma2", "gemma3", "qwen3_5", "qwen3_next"))
    model_type = options.pop("model_type")
    config = AutoConfig.for_model(model_type, **options)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, scalar in model.named_buffers():
            if name.endswith("layer_scalar"):
                scalar.copy_(0.8 + 0.2 * torch.randn(1, generator=generator))
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(".bias"):
                parameter.copy_(0.3 * noise)
            elif name.endswith(".A_log"):
                # Slow decay, so that a state depends on many tokens.
                parameter.copy_(-2.5 + 0.5 * noise)
            elif parameter.ndim == 1 or name.endswith(("q_norm.weight", "k_norm.weight")):
                center = 0.0 if centered and "linear_attn" not in name else 1.0
                parameter.copy_(center + 0.3 * noise)
                # Unscaled scores would be so large that rounding in single precision decides which key wins.
                if model_type == "gemma4_text" and name.endswith("q_norm.weight"):
                    parameter.mul_(0.15)
            elif variant == "hy_v3-128" and name.endswith(".gate.weight"):
                # So large that rounding to bfloat16 changes few choices.
                parameter.copy_(noise * 6 / parameter.shape[-1] ** 0.5)
            else:
                # Includes experts.
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
        # Stored tensors that are not parameters, such as a correction of each expert's score.
        parameters = dict(model.named_parameters())
        for name, buffer in model.state_dict().items():
            if name not in parameters and name != "lm_head.weight":
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
        if variant in ("gpt_oss-mxfp4", "gpt_oss-codes", "gpt_oss-floats"):
            for name, (codes, scales) in mxfp4_experts(model).items():
                parameters[name].copy_(mxfp4_values(codes, scales).transpose(1, 2))
    return model


def mxfp4_experts(model):
    """Codes and scales of all experts' weights, `[experts, out, in / 32, 16]` and `[experts, out, in / 32]`."""
    generator = torch.Generator().manual_seed(4)
    experts = {}
    for name, parameter in model.named_parameters():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            count, inputs, outputs = parameter.shape
            shape = (count, outputs, inputs // 32)
            codes = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            experts[name] = codes, torch.randint(119, 125, shape, dtype=torch.uint8, generator=generator)
    return experts


def mxfp4_values(codes, scales):
    """The values of the codes and scales of `mxfp4_experts`, `[experts, out, in]`."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = torch.cat([magnitudes, -magnitudes])
    pairs = torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], dim=-1)
    values = pairs.flatten(-2) * torch.exp2(scales.float() - 127)[..., None]
    return values.flatten(-2)


def store_as_mxfp4(model, out):
    """Replaces float experts by codes and scales."""
    path = out / "model.safetensors"
    tensors = load_file(path)
    for name, (codes, scales) in mxfp4_experts(model).items():
        del tensors[name]
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    save_file(tensors, path, metadata={"format": "pt"})
    ours = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    edit_config(out / "config.json", lambda config: config.update(ours))


def store_as_fp8(out):
    """Rounds linears of blocks to E4M3, with one scale per 128 x 128 block, as DeepSeek-V3 is published."""
    path, tensors = out / "model.safetensors", {}
    for name, weight in load_file(path).items():
        if not name.startswith("model.layers.") or weight.ndim != 2 or name.endswith(".mlp.gate.weight"):
            tensors[name] = weight
            continue
        rows, columns = (-size % 128 for size in weight.shape)
        padded = torch.nn.functional.pad(weight, (0, columns, 0, rows))
        blocks = padded.reshape(padded.shape[0] // 128, 128, -1, 128)
        scales = blocks.abs().amax(dim=(1, 3)) / 448
        codes = (blocks / scales[:, None, :, None]).reshape(padded.shape)[:weight.shape[0], :weight.shape[1]]
        tensors[name] = codes.to(torch.float8_e4m3fn).contiguous()
        tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, path, metadata={"format": "pt"})
    ours = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
                                    "activation_scheme": "dynamic"}}
    edit_config(out / "config.json", lambda config: config.update(ours))


def join_experts(out):
    """Joins all experts of a block in two tensors: one with gates followed by ups, and one with downs."""
    path, singles = out / "model.safetensors", {}
    tensors = load_file(path)
    for name in [name for name in tensors if ".experts." in name and name.endswith("_proj.weight")]:
        experts, _, rest = name.partition(".experts.")
        expert, linear, _ = rest.split(".")
        singles.setdefault(f"{experts}.experts", {})[linear, int(expert)] = tensors.pop(name)
    for experts, weights in singles.items():
        gate, up, down = (torch.stack([weights[linear, expert] for expert in range(len(weights) // 3)])
                          for linear in ("gate_proj", "up_proj", "down_proj"))
        tensors |= {f"{experts}.gate_up_proj": torch.cat([gate, up], dim=1), f"{experts}.down_proj": down}
    save_file(tensors, path, metadata={"format": "pt"})


def store_as_internlm2(out):
    """Joins queries, keys and values of every key head, and uses InternLM2's names, as its own code expects."""
    path = out / "model.safetensors"
    tensors, config = load_file(path), json.loads((out / "config.json").read_text())
    width = config["head_dim"]
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}."
        for kind in ("weight", "bias") if config["attention_bias"] else ("weight",):
            heads = [list(tensors.pop(f"{block}self_attn.{letter}_proj.{kind}").split(width)) for letter in "qkv"]
            queries, keys, values = heads
            repeat, rows = len(queries) // len(keys), []
            for key, value in zip(keys, values):
                rows += [*queries[:repeat], key, value]
                del queries[:repeat]
            tensors[f"{block}attention.wqkv.{kind}"] = torch.cat(rows)
    names = [("model.embed_tokens.", "model.tok_embeddings."), ("lm_head.", "output."), ("self_attn.o_proj", "attention.wo"),
             ("mlp.gate_proj", "feed_forward.w1"), ("mlp.up_proj", "feed_forward.w3"),
             ("mlp.down_proj", "feed_forward.w2"), ("input_layernorm", "attention_norm"),
             ("post_attention_layernorm", "ffn_norm")]
    renamed = {}
    for name, tensor in tensors.items():
        for theirs, ours in names:
            name = name.replace(theirs, ours)
        renamed[name] = tensor
    save_file(renamed, path, metadata={"format": "pt"})

    def edit(config):
        rope = config.pop("rope_parameters")
        config |= {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2",
                   "bias": config.pop("attention_bias"), "rope_theta": rope["rope_theta"]}
        del config["head_dim"], config["mlp_bias"]

    edit_config(out / "config.json", edit)


def store_without_prefix(out):
    """Uses the names of a model that was saved without its head, with a mask as in older checkpoints, and the published
    keys of Bloom."""
    path = out / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    if "wpe.weight" in tensors:
        tensors["h.0.attn.bias"] = torch.tril(torch.ones(1, 1, 8, 8))
    save_file(tensors, path, metadata={"format": "pt"})

    def edit(config):
        if config["model_type"] == "bloom":
            config |= {"n_embed": config.pop("hidden_size"), "num_attention_heads": config.pop("n_head"), "n_inner": None,
                       "seq_length": 512}

    edit_config(out / "config.json", edit)


def use_published_layers(config):
    """Writes the kinds of layers, and the absence of experts, as the published Granite 4 and Nemotron-H do."""
    if config["model_type"] == "nemotron_h":
        letters = {LINEAR: "M", FULL: "*", "mlp": "-", "moe": "E"}
        kinds = config.pop("layers_block_type", None) or config.pop("layer_types")
        config["hybrid_override_pattern"] = "".join(letters[kind] for kind in kinds)
        if "moe" not in kinds:
            del config["num_experts_per_tok"]
    else:
        config["layer_types"] = [PUBLISHED_LAYERS[kind] for kind in config["layer_types"]]
        if not config["num_local_experts"]:
            config["num_experts_per_tok"] = 0


def use_published_internlm3_keys(config):
    config |= {"architectures": ["InternLM3ForCausalLM"], "qkv_bias": config.pop("attention_bias"),
               "bias": config.pop("mlp_bias")}


def make_tokenizer():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def make_spaced_tokenizer():
    """Like Gemma's: spaces become ▁, and bytes are tokens of their own."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    vocabulary = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "e", "t", "h", "▁t", "he", "▁the", "\n"]
    model = models.BPE(vocab={token: index for index, token in enumerate(vocabulary)},
                       merges=[("▁", "t"), ("h", "e"), ("▁t", "he")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(special)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return tokenizer


def add_what_the_converter_reads(variant, out, tokenizer):
    """Adds what llama.cpp's converters of some families expect: a kind of tokenizer, or tokens with certain texts."""
    settings = {}
    if variant.startswith(("glm4", "glm-", "glm_")):
        tokenizer.add_special_tokens(["[gMASK]", "<|endoftext|>", "<|user|>", "<|observation|>"])
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    elif variant.startswith("fused"):
        # As Phi-4; Phi-3 has SentencePiece.
        settings = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>"}
    elif variant.startswith("ernie4_5"):
        (out / "tokenizer.model").write_bytes(bytes_as_sentencepiece())
    elif variant.startswith("gemma4"):
        names = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "pad")}
        settings = names | {"tokenizer_class": "PreTrainedTokenizerFast"}
    if settings:
        (out / "tokenizer_config.json").write_text(json.dumps(settings))


def save_without_head(model, out):
    """Writes only the decoder, but with the configuration of the whole model."""
    model.model.save_pretrained(out)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(out)


def use_rope_scaling_key(config_file):
    """Writes `rope_theta` and `rope_scaling` as the published Llama 3.2 checkpoints do."""
    def move(config):
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = rope

    edit_config(config_file, move)


def use_older_gemma3_keys(config):
    """Writes RoPE bases and scaling with the keys of the published Gemma 3, from before transformers 5."""
    config.pop("rope_parameters")
    config |= {"rope_theta": 30000.0, "rope_local_base_freq": 4000.0,
               "rope_scaling": {"rope_type": "linear", "factor": 8.0}}


def edit_config(config_file, edit):
    config = json.loads(config_file.read_text())
    edit(config)
    config_file.write_text(json.dumps(config, indent=2))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT_DIR", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variant", choices=VARIANTS | FAMILIES | ENGINES, default="gqa")
    arguments = parser.parse_args()
    logging.disable_progress_bar()

    model = make_model(arguments.variant, arguments.seed)
    if arguments.variant == "sharded-bf16":
        model.to(torch.bfloat16).save_pretrained(arguments.out, max_shard_size="400KB")
    elif arguments.variant == "opt-bare":
        save_without_head(model, arguments.out)
    elif arguments.variant == "gemma2-bf16":
        model.to(torch.bfloat16).save_pretrained(arguments.out)
    else:
        model.save_pretrained(arguments.out)
    if arguments.variant in ("gpt_oss-mxfp4", "gpt_oss-codes"):
        store_as_mxfp4(model, arguments.out)
    if arguments.variant == "deepseek_v3-fp8":
        store_as_fp8(arguments.out)
    if arguments.variant == "qwen3_5_moe-published":
        join_experts(arguments.out)
    if arguments.variant in BUILT_AS_LLAMA:
        store_as_internlm2(arguments.out)
    if arguments.variant == "lfm2-128":
        # transformers interprets the published key as the width and does not write it back; engines read it.
        edit_config(arguments.out / "config.json", lambda config: config.update(block_ff_dim=384))
    if arguments.variant in ("gpt2-bare", "bloom-bare"):
        store_without_prefix(arguments.out)
    if arguments.variant in VARIANTS and arguments.variant.startswith(("granite_4", "nemotron_h")):
        edit_config(arguments.out / "config.json", use_published_layers)
    if arguments.variant == "internlm3-published":
        edit_config(arguments.out / "config.json", use_published_internlm3_keys)
    of_converter = arguments.variant in VARIANTS or arguments.variant == "glm4"
    is_spaced = of_converter and arguments.variant.startswith("gemma4")
    tokenizer = make_spaced_tokenizer() if is_spaced else make_tokenizer()
    if of_converter:
        add_what_the_converter_reads(arguments.variant, arguments.out, tokenizer)
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    if arguments.variant == "mistral-layer-types":
        names = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
        edit_config(arguments.out / "config.json", lambda config: config.update(names))
    if arguments.variant == "qwen2-max-window-layers":
        # transformers writes the list derived from the number; published checkpoints lack it.
        edit_config(arguments.out / "config.json", lambda config: config.pop("layer_types"))
    if arguments.variant == "gemma3-older-keys":
        edit_config(arguments.out / "config.json", use_older_gemma3_keys)
    if arguments.variant == "llama3-rope":
        use_rope_scaling_key(arguments.out / "config.json")


if __name__ == "__main__":
    main()
