//! Families with state-space operations or short convolutions.

use super::table::{ATTENTION, CORRECTION, LLAMA, PLAIN, PRE};
use super::{GgufFamily, How, Mixer, Multipliers, RoutingKeys};
use crate::model::Activation;

type Names = &'static [(&'static str, &'static str)];

const LFM2_ATTENTION: Names = &[
    ("operator_norm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.out_proj", "attn_output"),
    ("self_attn.q_layernorm", "attn_q_norm"),
    ("self_attn.k_layernorm", "attn_k_norm"),
    ("conv.in_proj", "shortconv.in_proj"),
    ("conv.out_proj", "shortconv.out_proj"),
    ("ffn_norm", "ffn_norm"),
];
const LFM2_MLP: Names =
    &[("feed_forward.w1", "ffn_gate"), ("feed_forward.w3", "ffn_up"), ("feed_forward.w2", "ffn_down")];
const LFM2_KERNEL: (&str, How) = ("conv.conv.weight", How::Named("shortconv.conv.weight"));

pub(super) const LFM2: GgufFamily = GgufFamily {
    family: "lfm2",
    arch: "lfm2",
    class: "Lfm2ForCausalLM",
    modules: &[LFM2_ATTENTION, LFM2_MLP],
    tensors: &[LFM2_KERNEL],
    mixer: Some(Mixer::ShortConvolution),
    heads_as_wide: true,
    final_norm: "token_embd_norm",
    ..PLAIN
};

pub(super) const LFM2_MOE: GgufFamily = GgufFamily {
    family: "lfm2_moe",
    arch: "lfm2moe",
    class: "Lfm2MoeForCausalLM",
    modules: &[LFM2_ATTENTION, LFM2_MLP, &[("feed_forward.gate", "ffn_gate_inp")]],
    tensors: &[LFM2_KERNEL, ("feed_forward.expert_bias", How::Named("exp_probs_b.bias"))],
    experts: Some((
        "feed_forward.experts",
        &[("w1", "ffn_gate_exps"), ("w3", "ffn_up_exps"), ("w2", "ffn_down_exps")],
    )),
    dense_first: true,
    routing: RoutingKeys::Sigmoid,
    ..LFM2
};

/// Mamba 2, whose module is `mamba` or `mixer`.
macro_rules! state_space {
    ($module:literal) => {
        [
            (concat!($module, ".conv1d.weight"), How::Named("ssm_conv1d.weight")),
            (concat!($module, ".conv1d.bias"), How::Named("ssm_conv1d.bias")),
            (concat!($module, ".dt_bias"), How::Named("ssm_dt.bias")),
            (concat!($module, ".A_log"), How::DecayColumn("ssm_a")),
            (concat!($module, ".D"), How::Column("ssm_d")),
            (concat!($module, ".norm.weight"), How::Groups("ssm_norm.weight")),
        ]
    };
}

const MAMBA: [(&str, How); 6] = state_space!("mamba");
const MIXER: [(&str, How); 6] = state_space!("mixer");
const MAMBA_LINEARS: Names = &[("mamba.in_proj", "ssm_in"), ("mamba.out_proj", "ssm_out")];

/// Granite 4 without state-space operations, which is Granite 3 with gate and up in one linear.
pub(super) const GRANITE: GgufFamily = GgufFamily {
    family: "granitemoehybrid",
    arch: "granite",
    class: "GraniteMoeHybridForCausalLM",
    modules: &[PRE, ATTENTION, &[("shared_mlp.output_linear", "ffn_down")]],
    tensors: &[("shared_mlp.input_linear.weight", How::Halves(["ffn_gate.weight", "ffn_up.weight"]))],
    biases: &["attn_q", "attn_k", "attn_v", "attn_output"],
    multipliers: Multipliers::All,
    favours_values_of_80_layers: false,
    ..LLAMA
};

pub(super) const GRANITE_HYBRID: GgufFamily = GgufFamily {
    arch: "granitehybrid",
    modules: &[PRE, ATTENTION, MAMBA_LINEARS, &[("shared_mlp.output_linear", "ffn_down")]],
    tensors: &[
        MAMBA[0],
        MAMBA[1],
        MAMBA[2],
        MAMBA[3],
        MAMBA[4],
        MAMBA[5],
        ("shared_mlp.input_linear.weight", How::Halves(["ffn_gate.weight", "ffn_up.weight"])),
    ],
    mixer: Some(Mixer::StateSpace { expand: Some(2), norm: true }),
    may_lack_rope: true,
    ..GRANITE
};

pub(super) const GRANITE_HYBRID_MOE: GgufFamily = GgufFamily {
    modules: &[
        PRE,
        ATTENTION,
        MAMBA_LINEARS,
        &[("shared_mlp.output_linear", "ffn_down_shexp"), ("block_sparse_moe.router.layer", "ffn_gate_inp")],
    ],
    tensors: &[
        MAMBA[0],
        MAMBA[1],
        MAMBA[2],
        MAMBA[3],
        MAMBA[4],
        MAMBA[5],
        ("shared_mlp.input_linear.weight", How::Halves(["ffn_gate_shexp.weight", "ffn_up_shexp.weight"])),
    ],
    experts: Some((
        "block_sparse_moe.experts",
        &[("gate_proj", "ffn_gate_exps"), ("up_proj", "ffn_up_exps"), ("down_proj", "ffn_down_exps")],
    )),
    ..GRANITE_HYBRID
};

const NEMOTRON_LINEARS: Names = &[
    ("norm", "attn_norm"),
    ("mixer.in_proj", "ssm_in"),
    ("mixer.out_proj", "ssm_out"),
    ("mixer.q_proj", "attn_q"),
    ("mixer.k_proj", "attn_k"),
    ("mixer.v_proj", "attn_v"),
    ("mixer.o_proj", "attn_output"),
];

pub(super) const NEMOTRON_H: GgufFamily = GgufFamily {
    family: "nemotron_h",
    arch: "nemotron_h",
    class: "NemotronHForCausalLM",
    modules: &[NEMOTRON_LINEARS, &[("mixer.up_proj", "ffn_up"), ("mixer.down_proj", "ffn_down")]],
    tensors: &MIXER,
    biases: &["ffn_up", "ffn_down"],
    activation: Activation::ReluSquared,
    unrotated: Some(1),
    // Without a rotation, the order of channels in a head makes no difference. This is the converter's.
    pairs_neighbours: true,
    mixer: Some(Mixer::StateSpace { expand: None, norm: true }),
    has_single_operations: true,
    // llama.cpp requires the key of layer norms, and uses its value for all norms.
    layer_norms: true,
    ..PLAIN
};

pub(super) const NEMOTRON_H_MOE: GgufFamily = GgufFamily {
    arch: "nemotron_h_moe",
    modules: &[
        NEMOTRON_LINEARS,
        &[
            ("mixer.gate", "ffn_gate_inp"),
            ("mixer.fc1_latent_proj", "ffn_latent_down"),
            ("mixer.fc2_latent_proj", "ffn_latent_up"),
            ("mixer.shared_experts.up_proj", "ffn_up_shexp"),
            ("mixer.shared_experts.down_proj", "ffn_down_shexp"),
        ],
    ],
    tensors: &[
        MIXER[0],
        MIXER[1],
        MIXER[2],
        MIXER[3],
        MIXER[4],
        MIXER[5],
        ("mixer.gate.e_score_correction_bias", CORRECTION.1),
    ],
    experts: Some(("mixer.experts", &[("up_proj", "ffn_up_exps"), ("down_proj", "ffn_down_exps")])),
    biases: &[],
    routing: RoutingKeys::OneShared,
    ..NEMOTRON_H
};

pub(super) const FALCON_H1: GgufFamily = GgufFamily {
    family: "falcon_h1",
    arch: "falcon-h1",
    class: "FalconH1ForCausalLM",
    modules: &[
        &[
            ("input_layernorm", "attn_norm"),
            ("feed_forward.gate_proj", "ffn_gate"),
            ("feed_forward.up_proj", "ffn_up"),
            ("feed_forward.down_proj", "ffn_down"),
        ],
        ATTENTION,
        MAMBA_LINEARS,
    ],
    tensors: &[
        MAMBA[0],
        MAMBA[1],
        MAMBA[2],
        MAMBA[3],
        MAMBA[4],
        MAMBA[5],
        // Unlike in all other architectures, the name has no suffix.
        ("pre_ff_layernorm.weight", How::Named("ffn_norm")),
    ],
    mixer: Some(Mixer::StateSpace { expand: None, norm: false }),
    folds_factors: true,
    ..PLAIN
};
