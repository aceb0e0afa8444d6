"""Makes a tiny random vision-language model, to compare the text tower of each class with transformers'.

Names are those that transformers saves. A variant with `-modules` has the names of transformers' modules instead, and
one with `-flat` has the fields of the text model at the top level of config.json, like the published Qwen2-VL models.
"""

import argparse
import json
from pathlib import Path

import make_tiny
import torch
from reference_model import module_name
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.utils import logging

TEXT = {"vocab_size": make_tiny.VOCABULARY, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 0,
        "eos_token_id": 1}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = {"rope_parameters": ROPE | {"mrope_section": [4, 6, 6]}}
# Token ids beyond the tokenizer's vocabulary.
QWEN_TOKENS = {"image_token_id": 268, "video_token_id": 269, "vision_start_token_id": 270, "vision_end_token_id": 271}
QWEN2_VISION = {"depth": 2, "embed_dim": 32, "hidden_size": 128, "num_heads": 2, "mlp_ratio": 2}
QWEN2_5_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128,
                  "fullatt_block_indexes": [1]}
QWEN3_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128,
                "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
         "patch_size": 14}
CLIP = TOWER | {"model_type": "clip_vision_model", "projection_dim": 16}
PIXTRAL = TOWER | {"model_type": "pixtral", "head_dim": 16}

QWEN2_VL = {"model_type": "qwen2_vl", "text_config": MROPE, "vision_config": QWEN2_VISION} | QWEN_TOKENS
QWEN2_5_VL = {"model_type": "qwen2_5_vl", "text_config": MROPE, "vision_config": QWEN2_5_VISION} | QWEN_TOKENS
QWEN3_VL = {"model_type": "qwen3_vl", "vision_config": QWEN3_VISION,
            "text_config": {"head_dim": 64, "rope_parameters": ROPE | {"mrope_section": [12, 10, 10],
                                                                      "mrope_interleaved": True}}} | QWEN_TOKENS
QWEN3_5 = {"model_type": "qwen3_5", "vision_config": {key: value for key, value in QWEN3_VISION.items()
                                                      if key != "deepstack_visual_indexes"},
           "text_config": {"head_dim": 64, "layer_types": ["linear_attention", "full_attention"],
                           "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
                           "linear_value_head_dim": 32, "rope_parameters": ROPE | {
                               "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2],
                               "mrope_interleaved": True}}} | QWEN_TOKENS
# In widths for which vLLM has a kernel.
QWEN3_5_WIDE = QWEN3_5 | {"text_config": QWEN3_5["text_config"] | {
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128}}
QWEN3_5_MOE = QWEN3_5 | {"model_type": "qwen3_5_moe", "text_config": QWEN3_5["text_config"] | {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 96}}
QWEN3_VL_MOE = QWEN3_VL | {"model_type": "qwen3_vl_moe", "text_config": QWEN3_VL["text_config"] | {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 96, "mlp_only_layers": [1],
    "num_hidden_layers": 3}}
MISTRAL3 = {"model_type": "mistral3", "vision_config": PIXTRAL, "image_token_index": 268, "tie_word_embeddings": False,
            "text_config": {"model_type": "mistral", "sliding_window": None, "head_dim": 64}}


# Published configurations leave most fields of the text model to the class's defaults.
GEMMA3 = {"model_type": "gemma3", "vision_config": TOWER | {"model_type": "siglip_vision_model"}, "image_token_index": 268,
          "boi_token_index": 269, "eoi_token_index": 270, "mm_tokens_per_image": 4,
          "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 3, "head_dim": 40, "sliding_window": 48,
                          "query_pre_attn_scalar": 24, "sliding_window_pattern": 3}}
MINISTRAL3 = MISTRAL3 | {"text_config": {
    "model_type": "ministral3", "head_dim": 64, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}}}


def llava(text):
    return {"model_type": "llava", "vision_config": CLIP, "image_token_index": 268, "image_seq_length": 4,
            "text_config": text}


GEMMA4 = {"model_type": "gemma4", "audio_config": None, "image_token_id": 268, "boi_token_id": 269, "eoi_token_id": 270,
          "vision_config": {"model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 64,
                            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
                            "patch_size": 4, "position_embedding_size": 16, "pooling_kernel_size": 2},
          "text_config": {"model_type": "gemma4_text", "num_hidden_layers": 3, "head_dim": 40, "sliding_window": 48,
                          "hidden_size_per_layer_input": 0, "global_head_dim": 64, "attention_k_eq_v": True,
                          "num_global_key_value_heads": 1,
                          "layer_types": ["sliding_attention", "full_attention", "full_attention"],
                          "rope_parameters": {
                              "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25,
                                                 "rope_theta": 50000.0},
                              "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}}}}
# Per-layer inputs, and a block that reuses the keys and values of another.
GEMMA4_SMALL = GEMMA4 | {"text_config": GEMMA4["text_config"] | {
    "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": make_tiny.VOCABULARY, "num_kv_shared_layers": 1,
    "attention_k_eq_v": False, "num_global_key_value_heads": None, "use_double_wide_mlp": True}}
LLAMA4 = {"model_type": "llama4", "image_token_index": 268, "boi_token_index": 269, "eoi_token_index": 270,
          "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 32, "intermediate_size": 128,
                            "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
                            "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
          "text_config": {"model_type": "llama4_text", "num_hidden_layers": 3, "head_dim": 32, "num_local_experts": 4,
                          "intermediate_size": 96, "attention_chunk_size": 48, "no_rope_layers": [1, 1, 0],
                          "floor_scale": 20, "attn_scale": 0.3, "rope_parameters": ROPE}}
MISTRAL4 = {"model_type": "mistral4", "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 32,
            "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 32, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 96, "rope_parameters": ROPE | {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
                "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}}
VARIANTS = {
    "gemma4-vl": GEMMA4,
    "gemma4-vl-small": GEMMA4_SMALL,
    "qwen2-vl": QWEN2_VL,
    "qwen2-vl-flat": QWEN2_VL | {"tie_word_embeddings": True},
    "qwen2-vl-modules": QWEN2_VL,
    "qwen2.5-vl": QWEN2_5_VL,
    "qwen2.5-vl-flat": QWEN2_5_VL,
    "qwen3-vl": QWEN3_VL,
    "qwen3-vl-tied": QWEN3_VL | {"tie_word_embeddings": True},
    "qwen3.5": QWEN3_5,
    "qwen3.5-moe": QWEN3_5_MOE,
    # As published: all experts of a block in one tensor.
    "qwen3.5-moe-published": QWEN3_5_MOE,
    "qwen3-vl-moe": QWEN3_VL_MOE,
    # As published: all experts of a block in one tensor, whose rows are inputs.
    "qwen3-vl-moe-published": QWEN3_VL_MOE,
    "mistral3": MISTRAL3,
    "mistral3-modules": MISTRAL3,
    "mistral3-ministral3": MINISTRAL3,
    "gemma3-vl": GEMMA3,
    "gemma3-vl-modules": GEMMA3,
    "llava-llama": llava({"model_type": "llama"}),
    "llava-modules": llava({"model_type": "llama"}),
    "llava-mistral": llava({"model_type": "mistral", "sliding_window": 48}),
    "llava-qwen2": llava({"model_type": "qwen2"}),
    "llama4-vl": LLAMA4,
    "mistral3-mistral4": MISTRAL3 | {"text_config": MISTRAL4},
}
# For check_vllm.py: in widths for which vLLM has kernels, and with the published configuration fields that it requires.
ENGINES = {
    "qwen3.5-128": QWEN3_5_WIDE,
    "qwen3-vl-moe-normed": QWEN3_VL_MOE | {"text_config": QWEN3_VL_MOE["text_config"] | {"norm_topk_prob": True}},
    "gemma3-vl-64": GEMMA3 | {"text_config": GEMMA3["text_config"] | {"head_dim": 64}},
    "gemma4-vl-64": GEMMA4 | {"text_config": GEMMA4["text_config"] | {"head_dim": 64, "final_logit_softcapping": 2.0}},
    # vLLM's YaRN tables end at the original positions times the factor.
    "mistral3-ministral3-512": MISTRAL3 | {"text_config": MINISTRAL3["text_config"] | {
        "rope_parameters": MINISTRAL3["text_config"]["rope_parameters"] | {"original_max_position_embeddings": 512}}},
}
# For check_gguf.py: the features that llama.cpp's graphs support.
LLAMA_CPP = {
    # llama.cpp ignores the epsilon of norms in these two.
    "qwen2-vl-no-eps": QWEN2_VL | {"text_config": MROPE | {"rms_norm_eps": 1e-12}},
    "qwen2.5-vl-no-eps": QWEN2_5_VL | {"text_config": MROPE | {"rms_norm_eps": 1e-12}},
    "qwen3-vl-moe-all": QWEN3_VL_MOE | {"text_config": QWEN3_VL_MOE["text_config"] | {
        "norm_topk_prob": True, "mlp_only_layers": []}},
    "gemma3-vl-sixth": GEMMA3 | {"text_config": {
        "model_type": "gemma3_text", "num_hidden_layers": 6, "head_dim": 32, "sliding_window": 24,
        "query_pre_attn_scalar": 32}},
}


def make_model(variant, seed):
    options = json.loads(json.dumps((VARIANTS | ENGINES | LLAMA_CPP)[variant]))
    text = TEXT | options.pop("text_config")
    config = AutoConfig.for_model(options.pop("model_type"), text_config=text, **options)
    model = AutoModelForImageTextToText.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, scalar in model.named_buffers():
            if name.endswith("layer_scalar"):
                scalar.copy_(0.8 + 0.2 * torch.randn(1, generator=generator))
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(".bias"):
                parameter.copy_(0.3 * noise)
            elif variant == "gemma4-vl-64" and "language_model" in name and name.endswith("q_norm.weight"):
                # Unscaled scores would be so large that rounding to bfloat16 decides which key wins.
                parameter.copy_(0.15 + 0.05 * noise)
            elif variant == "qwen3-vl-moe-normed" and name.endswith("mlp.gate.weight"):
                # Router weights that are so large that rounding to bfloat16 changes few choices.
                parameter.copy_(noise * 6 / parameter.shape[-1] ** 0.5)
            elif parameter.ndim == 1:
                # In Gemma 3, 1 is added to the norm weights. In Qwen3.5 too, except in gated delta nets, where `A_log`
                # is so small that a state holds many tokens.
                outside = ("vision_tower", "visual", "linear_attn")
                centered = variant.startswith(("gemma3", "qwen3.5")) and not any(part in name for part in outside)
                center = 0 if centered else -2.5 if name.endswith("A_log") else 1
                parameter.copy_(center + 0.3 * noise)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
    return model


def use_module_names(directory):
    path = directory / "model.safetensors"
    tensors = {module_name(name): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def transpose_experts(directory):
    path = directory / "model.safetensors"
    tensors = {name: tensor.transpose(1, 2).contiguous() if ".experts." in name and tensor.ndim == 3 else tensor
               for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def flatten(config):
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    config |= {key: value for key, value in text.items() if key != "model_type"}
    config["rope_theta"] = rope["rope_theta"]
    config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT_DIR", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variant", choices=VARIANTS | ENGINES | LLAMA_CPP, default="qwen2-vl")
    arguments = parser.parse_args()
    logging.disable_progress_bar()

    make_model(arguments.variant, arguments.seed).save_pretrained(arguments.out)
    make_tiny.make_tokenizer().save(str(arguments.out / "tokenizer.json"))
    for name in ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"):
        (arguments.out / name).write_text('{"of": "the vision tower"}')
    if arguments.variant.endswith("-modules"):
        use_module_names(arguments.out)
    if arguments.variant in ("qwen3-vl-moe-published", "qwen3-vl-moe-all"):
        transpose_experts(arguments.out)
    if arguments.variant == "qwen3.5-moe-published":
        make_tiny.join_experts(arguments.out)
    if arguments.variant.endswith("-flat"):
        make_tiny.edit_config(arguments.out / "config.json", flatten)


if __name__ == "__main__":
    main()
