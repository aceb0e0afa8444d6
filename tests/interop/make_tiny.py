"""Makes a tiny random checkpoint of a family, to compare decoders on what small real models lack.

Norm weights are random too (a reader that forgets them must fail), and all widths divide by 128.
The tokenizer maps every byte to one token and puts <s> first.
"""

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
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
VARIANTS = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "llama3-rope": {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 10000.0}},
    "head-dim": {"head_dim": 64},
    "sharded-bf16": {},
    "linear-rope": {"rope_parameters": LINEAR_ROPE | {"rope_theta": 10000.0}},
    # The windows of the check are longer than this one.
    "mistral": {"model_type": "mistral", "sliding_window": 48},
    # transformers reads a `mistral` with `layer_types` by its class `ministral`.
    "mistral-layer-types": MIXED | {"model_type": "ministral", "head_dim": 32, "layer_types": [SLIDING, FULL, FULL, SLIDING]},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-layer-types": QWEN2_MIXED | {"layer_types": [FULL, SLIDING, FULL, SLIDING]},
    "qwen2-max-window-layers": QWEN2_MIXED | {"max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 64, "attention_bias": True},
    # Experts narrower than the block, a number of them that is no power of two, heads of another width.
    "mixtral": {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3-moe": QWEN3_MOE | {"norm_topk_prob": True},
    "qwen3-moe-mixed": QWEN3_MOE | {"num_hidden_layers": 4, "mlp_only_layers": [1], "decoder_sparse_step": 1,
                                    "attention_bias": True, "tie_word_embeddings": True},
    "opt": OPT,
    "opt-plain": OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False,
                        "tie_word_embeddings": False},
    # As saved by a class without a head: names lack their first part.
    "opt-bare": OPT,
}


def make_model(variant, seed):
    options = {"model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 384,
               "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
               "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1}
    options |= VARIANTS[variant]
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(".bias"):
                parameter.copy_(0.3 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * noise)
            else:
                # transformers holds all experts of a block in one parameter.
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
    return model


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


def save_without_head(model, out):
    """Writes the decoder alone, but says of it what the whole model says."""
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


def edit_config(config_file, edit):
    config = json.loads(config_file.read_text())
    edit(config)
    config_file.write_text(json.dumps(config, indent=2))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT_DIR", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variant", choices=VARIANTS, default="gqa")
    arguments = parser.parse_args()
    logging.disable_progress_bar()

    model = make_model(arguments.variant, arguments.seed)
    if arguments.variant == "sharded-bf16":
        model.to(torch.bfloat16).save_pretrained(arguments.out, max_shard_size="400KB")
    elif arguments.variant == "opt-bare":
        save_without_head(model, arguments.out)
    else:
        model.save_pretrained(arguments.out)
    make_tokenizer().save(str(arguments.out / "tokenizer.json"))
    if arguments.variant == "mistral-layer-types":
        names = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
        edit_config(arguments.out / "config.json", lambda config: config.update(names))
    if arguments.variant == "qwen2-max-window-layers":
        # transformers writes the list that follows from the number: published checkpoints lack it.
        edit_config(arguments.out / "config.json", lambda config: config.pop("layer_types"))
    if arguments.variant == "llama3-rope":
        use_rope_scaling_key(arguments.out / "config.json")


if __name__ == "__main__":
    main()
