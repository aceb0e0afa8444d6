//! Nemotron-H: every layer is one thing behind one norm, a Mamba 2 mixer, attention without rotation, or an MLP without
//! gate.

use super::decoder::{Decoder, Defaults};
use super::mamba::{GatedNorm, Mamba2, state_space};
use super::parts::linear;
use super::{Activation, Architecture, BlockGraph, Blocks, Family, GraphBuilder, NodeId, Op};
use crate::Result;
use crate::checkpoint::ConfigFields;

/// The family of `NemotronHForCausalLM`.
#[derive(Debug, Clone, Copy)]
pub(super) struct NemotronH;

/// What a layer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Mamba,
    Attention,
    Mlp,
}

const LAYERS: &str = "num_hidden_layers";

impl Family for NemotronH {
    fn name(&self) -> &'static str {
        "nemotron_h"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["NemotronHForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let kinds = kinds(config)?;
        if let Some(layers) = config.optional_usize(LAYERS)?.filter(|layers| *layers != kinds.len()) {
            return Err(config.error(LAYERS, format!("is {layers}, but {} layers are listed", kinds.len())));
        }
        // The list alone says how many there are in newer files.
        let mut map = config.map().clone();
        map.insert(LAYERS.into(), kinds.len().into());
        let config = &config.with_map(&map);
        let defaults = Defaults {
            kv_heads: Some(8),
            head_dim: Some(128),
            norm_eps_key: "layer_norm_epsilon",
            norm_eps: 1e-5,
            activation_key: "mlp_hidden_act",
            activation: (Activation::ReluSquared, &["relu2"]),
            ..Defaults::new(self.name())
        };
        let d = Decoder::read(config, defaults)?;
        d.refuse("attention_bias", "biases of attention are not supported")?;
        if let Some(window) = config.optional_usize("sliding_window")? {
            return Err(config.error("sliding_window", format!("is {window}: windows are not supported")));
        }
        if let Some(other) = config.optional_str("mamba_hidden_act")?.filter(|act| *act != "silu") {
            let reason = format!("is `{}`; this family uses `silu`", other.escape_default());
            return Err(config.error("mamba_hidden_act", reason));
        }
        let space = state_space(
            config,
            [
                ("mamba_num_heads", Some(128)),
                ("mamba_head_dim", Some(64)),
                ("n_groups", Some(8)),
                ("ssm_state_size", Some(128)),
            ],
        )?;
        let mamba = Mamba2 {
            space,
            kernel: config.optional_positive("conv_kernel")?.unwrap_or(4),
            conv_bias: d.flag("use_conv_bias", true)?,
            bias: [d.flag("use_bias", false)?; 2],
            module: "mixer",
            norm: Some(GatedNorm {
                weight: "mixer.norm.weight",
                groups: space.groups,
                eps: d.norm.eps,
                before_gate: false,
            }),
            scales: [1.0; 5],
        };
        let mlp_bias = d.flag("mlp_bias", false)?;
        let mut architecture = d.architecture(|_| d.block(d.attention(None, [false; 2]), d.mlp(false)))?;
        architecture.blocks =
            Blocks::new(d.layers, |layer| kinds[layer], |kind| graph(&d, *kind, &mamba, mlp_bias));
        architecture.embedding = "backbone.embeddings.weight".into();
        architecture.final_norm = Some(d.norm.op("backbone.norm_f", d.hidden));
        architecture.block_prefix = "backbone.layers.{}.";
        architecture.fused = &[("mixer.qkv_proj", &["mixer.q_proj", "mixer.k_proj", "mixer.v_proj"])];
        Ok(architecture)
    }
}

/// What each layer is: a list of names, older or newer, or a letter for each.
fn kinds(config: &ConfigFields<'_>) -> Result<Vec<Kind>> {
    const LISTS: [&str; 2] = ["layers_block_type", "layer_types"];
    const PATTERN: &str = "hybrid_override_pattern";
    let unknown = |key: &str, what: &str| {
        let what = what.escape_default();
        match what.to_string().as_str() {
            "moe" | "E" => config.error(key, "has layers with experts, which are not supported"),
            _ => config.error(key, format!("holds `{what}`, which is not known")),
        }
    };
    for key in LISTS {
        let Some(types) = config.optional_str_list(key)? else { continue };
        let kind = |name: &&str| match *name {
            "linear_attention" | "mamba" => Ok(Kind::Mamba),
            "full_attention" | "attention" => Ok(Kind::Attention),
            "mlp" => Ok(Kind::Mlp),
            other => Err(unknown(key, other)),
        };
        return types.iter().map(kind).collect();
    }
    let Some(pattern) = config.optional_str(PATTERN)? else {
        return Err(config.error(LISTS[0], "is missing"));
    };
    let kind = |letter: char| match letter {
        'M' => Ok(Kind::Mamba),
        '*' => Ok(Kind::Attention),
        '-' => Ok(Kind::Mlp),
        other => Err(unknown(PATTERN, &other.to_string())),
    };
    pattern.chars().map(kind).collect()
}

/// `x + f(norm(x))`.
fn graph(d: &Decoder<'_>, kind: Kind, mamba: &Mamba2, mlp_bias: bool) -> BlockGraph {
    let mut g = GraphBuilder::default();
    let input = g.add(Op::Input { width: d.hidden }, &[]);
    let x = g.add(d.norm.op("norm", d.hidden), &[input]);
    let out = match kind {
        Kind::Mamba => mamba.add(&mut g, x, d.hidden),
        Kind::Attention => attention(&mut g, d, x),
        Kind::Mlp => {
            let up = g.add(linear("mixer.up_proj", [d.intermediate, d.hidden], mlp_bias), &[x]);
            let squared = g.add(Op::Activation(Activation::ReluSquared), &[up]);
            g.add(linear("mixer.down_proj", [d.hidden, d.intermediate], mlp_bias), &[squared])
        }
    };
    g.add(Op::Add, &[input, out]);
    g.finish()
}

fn attention(g: &mut GraphBuilder, d: &Decoder<'_>, x: NodeId) -> NodeId {
    let shape = d.shape;
    let [q_width, kv_width] = [shape.heads(), shape.kv_heads].map(|heads| heads * shape.head_dim);
    let inputs = [("q", q_width), ("k", kv_width), ("v", kv_width)].map(|(letter, width)| {
        g.add(linear(&format!("mixer.{letter}_proj"), [width, d.hidden], false), &[x])
    });
    let attended = g.add(Op::Attention(shape), &inputs);
    g.add(linear("mixer.o_proj", [d.hidden, q_width], false), &[attended])
}
