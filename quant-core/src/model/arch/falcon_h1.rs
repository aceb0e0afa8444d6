//! Falcon-H1: attention and a Mamba 2 mixer in parallel in every layer, and constant multipliers on many values.
//!
//! A multiplier before a linear without bias is applied after it here, so that the norm's channels reach all linears
//! unscaled.

use super::decoder::{Decoder, Defaults};
use super::mamba::{GatedNorm, Mamba2, scaled, state_space};
use super::parts::linear;
use super::{Activation, Architecture, BlockGraph, Blocks, EmbeddingScale, Family, GraphBuilder, NodeId, Op};
use crate::Result;
use crate::checkpoint::ConfigFields;
use crate::model::rope::Rope;

#[derive(Debug, Clone, Copy)]
pub(super) struct FalconH1;

#[derive(Debug, Clone, Copy)]
struct Multipliers {
    attention_in: f32,
    attention_out: f32,
    key: f32,
    ssm_out: f32,
    gate: f32,
    down: f32,
}

impl Family for FalconH1 {
    fn name(&self) -> &'static str {
        "falcon_h1"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["FalconH1ForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let defaults = Defaults { kv_heads: Some(8), norm_eps: 1e-5, ..Defaults::new(self.name()) };
        let d = Decoder::read(config, defaults)?;
        for key in ["attention_bias", "mlp_bias", "mamba_proj_bias"] {
            d.refuse(key, "biases are not supported in this family")?;
        }
        let factor = |key: &str| Ok::<f32, crate::Error>(d.factor(key)?.unwrap_or(1.0) as f32);
        let [gate, down] = factors(config, "mlp_multipliers")?;
        let multipliers = Multipliers {
            attention_in: factor("attention_in_multiplier")?,
            attention_out: factor("attention_out_multiplier")?,
            key: factor("key_multiplier")?,
            ssm_out: factor("ssm_out_multiplier")?,
            gate,
            down,
        };
        let ssm_in = factor("ssm_in_multiplier")?;
        let mamba = mamba(&d, ssm_in)?;
        let rope = d.rope()?;
        let mut architecture =
            d.architecture(|_| d.block(d.attention(Some(rope.clone()), [false; 2]), d.mlp(false)))?;
        architecture.blocks = Blocks::uniform(d.layers, graph(&d, &mamba, &rope, multipliers));
        architecture.final_norm = Some(d.norm.op("model.final_layernorm", d.hidden));
        architecture.embedding_scale = d.factor("embedding_multiplier")?.map(EmbeddingScale::Exact);
        architecture.logits.scale = factor("lm_head_multiplier")?;
        architecture.fused = &[
            ("self_attn.qkv_proj", &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
            ("feed_forward.gate_up_proj", &["feed_forward.gate_proj", "feed_forward.up_proj"]),
        ];
        if multipliers.attention_in != 1.0 {
            architecture.multiplied_inputs = vec!["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
        }
        if ssm_in != 1.0 {
            architecture.multiplied_inputs.push("mamba.in_proj");
        }
        Ok(architecture)
    }
}

/// Reads a list of positive factors; all are 1 if it is missing.
fn factors<const N: usize>(config: &ConfigFields<'_>, key: &str) -> Result<[f32; N]> {
    let Some(value) = config.get(key) else { return Ok([1.0; N]) };
    let numbers = value.as_array().filter(|list| list.len() == N).and_then(|list| {
        let number =
            |v: &serde_json::Value| v.as_f64().map(|v| v as f32).filter(|v| *v > 0.0 && v.is_normal());
        list.iter().map(number).collect::<Option<Vec<f32>>>()
    });
    match numbers.and_then(|numbers| <[f32; N]>::try_from(numbers).ok()) {
        Some(numbers) => Ok(numbers),
        None => Err(config.error(key, format!("must be a list of {N} positive numbers"))),
    }
}

/// Reads the mixer; `outer` is the multiplier of its input.
fn mamba(d: &Decoder<'_>, outer: f32) -> Result<Mamba2> {
    const WIDTH: &str = "mamba_d_ssm";
    let config = d.config;
    let width = match config.has(WIDTH) {
        true => config.optional_positive(WIDTH)?,
        false => Some(1024),
    };
    let expand = config.optional_positive("mamba_expand")?.unwrap_or(2);
    let width = width.unwrap_or_else(|| expand.saturating_mul(d.hidden));
    let heads = config.optional_positive("mamba_n_heads")?.unwrap_or(128);
    let head_dim = match config.get("mamba_d_head").and_then(serde_json::Value::as_str) {
        // `auto` means `width / heads`.
        Some("auto") => None,
        _ => config.optional_positive("mamba_d_head")?,
    };
    let space = state_space(
        config,
        [
            ("mamba_n_heads", Some(heads)),
            (WIDTH, Some(width)),
            ("mamba_n_groups", Some(1)),
            ("mamba_d_state", Some(256)),
        ],
    )?;
    if width % heads != 0 || head_dim.is_some_and(|head_dim| Some(width) != heads.checked_mul(head_dim)) {
        let reason = match head_dim {
            Some(head_dim) => {
                format!("is {width}, but must be the total width of {heads} heads of width {head_dim}")
            }
            None => format!("is {width}, which is not a multiple of the number of heads, {heads}"),
        };
        return Err(config.error(WIDTH, reason));
    }
    let space = super::StateSpace { head_dim: width / heads, ..space };
    let norm = d.flag("mamba_rms_norm", false)?.then_some(GatedNorm {
        weight: "mamba.norm.weight",
        groups: space.groups,
        eps: d.norm.eps,
        before_gate: d.flag("mamba_norm_before_gate", true)?,
    });
    Ok(Mamba2 {
        space,
        kernel: config.optional_positive("mamba_d_conv")?.unwrap_or(4),
        conv_bias: d.flag("mamba_conv_bias", true)?,
        bias: [false, d.flag("projectors_bias", false)?],
        module: "mamba",
        norm,
        scales: factors::<5>(config, "ssm_multipliers")?.map(|scale| scale * outer),
    })
}

fn graph(d: &Decoder<'_>, mamba: &Mamba2, rope: &Rope, by: Multipliers) -> BlockGraph {
    let hidden = d.hidden;
    let mut g = GraphBuilder::default();
    let input = g.add(Op::Input { width: hidden }, &[]);
    let x = g.add(d.norm.op("input_layernorm", hidden), &[input]);
    let mixed = mamba.add(&mut g, x, hidden);
    let mixed = scaled(&mut g, mixed, by.ssm_out);
    let attended = attention(&mut g, d, x, rope, by);
    let attended = scaled(&mut g, attended, by.attention_out);
    // The two outputs are added before they join the residual stream, so that a search can observe their sum.
    let both = g.add(Op::Add, &[mixed, attended]);
    let attended_stream = g.add(Op::Add, &[input, both]);
    let x = g.add(d.norm.op("pre_ff_layernorm", hidden), &[attended_stream]);
    let [gate, up] = ["gate", "up"].map(|name| {
        g.add(linear(&format!("feed_forward.{name}_proj"), [d.intermediate, hidden], false), &[x])
    });
    let gate = scaled(&mut g, gate, by.gate);
    let product = g.add(Op::Gated(Activation::Silu), &[gate, up]);
    let out = g.add(linear("feed_forward.down_proj", [hidden, d.intermediate], false), &[product]);
    let out = scaled(&mut g, out, by.down);
    g.add(Op::Add, &[attended_stream, out]);
    g.finish()
}

fn attention(g: &mut GraphBuilder, d: &Decoder<'_>, x: NodeId, rope: &Rope, by: Multipliers) -> NodeId {
    let shape = d.shape;
    let [q_width, kv_width] = [shape.heads(), shape.kv_heads].map(|heads| heads * shape.head_dim);
    let values = [
        ("q", q_width, by.attention_in),
        ("k", kv_width, by.attention_in * by.key),
        ("v", kv_width, by.attention_in),
    ];
    let [q, k, v] = values.map(|(letter, width, scale)| {
        let value = g.add(linear(&format!("self_attn.{letter}_proj"), [width, d.hidden], false), &[x]);
        scaled(g, value, scale)
    });
    let [q, k] = [q, k].map(|value| g.add(Op::Rope(rope.clone()), &[value]));
    let attended = g.add(Op::Attention(shape), &[q, k, v]);
    g.add(linear("self_attn.o_proj", [d.hidden, q_width], false), &[attended])
}
