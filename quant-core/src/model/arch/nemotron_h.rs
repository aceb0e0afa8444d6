//! Nemotron-H: every layer is a single operation after a norm: a Mamba 2 mixer, attention without rotation, an MLP
//! without a gate, or experts without gates. The experts may read and write a vector narrower than the hidden states.

use super::decoder::{Decoder, Defaults};
use super::deepseek::corrected_sigmoid;
use super::mamba::{GatedNorm, Mamba2, state_space};
use super::parts::linear;
use super::{Activation, Architecture, BlockGraph, Blocks, Family, GraphBuilder, NodeId, Op, RoutingRule};
use crate::Result;
use crate::checkpoint::ConfigFields;

#[derive(Debug, Clone, Copy)]
pub(super) struct NemotronH;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Mamba,
    Attention,
    Mlp,
    Experts,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Experts {
    routing: RoutingRule,
    intermediate: usize,
    shared: usize,
    /// Input and output features of the experts, if they differ from the hidden size.
    latent: Option<usize>,
}

impl Experts {
    fn read(d: &Decoder<'_>) -> Result<Self> {
        const SHARED: &str = "n_shared_experts";
        let config = d.config;
        if let Some(other) = config.optional_usize(SHARED)?.filter(|shared| *shared != 1) {
            let reason = format!(
                "is {other}; only 1 is supported, because implementations disagree about \
                other values"
            );
            return Err(config.unsupported_setting(SHARED, reason));
        }
        Ok(Self {
            routing: corrected_sigmoid(d, "mixer.gate", 1.0, [1, 1])?,
            intermediate: config.require_positive("moe_intermediate_size")?,
            shared: config.require_positive("moe_shared_expert_intermediate_size")?,
            latent: config.optional_positive("moe_latent_size")?,
        })
    }

    /// Returns the sum of all outputs. `bias` applies to all linears except those of the routed experts.
    fn add(&self, g: &mut GraphBuilder, x: NodeId, hidden: usize, bias: bool) -> NodeId {
        let Self { routing, intermediate, shared, latent } = *self;
        let router = Op::Linear {
            name: "mixer.gate".into(),
            shape: [routing.experts, hidden],
            bias: false,
            stays_float: true,
        };
        let logits = g.add(router, &[x]);
        let weights = g.add(Op::Route(routing), &[logits]);
        let width = latent.unwrap_or(hidden);
        let input = match latent {
            Some(width) => g.add(linear("mixer.fc1_latent_proj", [width, hidden], bias), &[x]),
            None => x,
        };
        let mut terms = vec![weights];
        for expert in 0..routing.experts {
            let name = |linear: &str| format!("mixer.experts.{expert}.{linear}");
            let rows = g.add(Op::ExpertInput { expert, routing }, &[input, weights]);
            terms.push(plain(g, rows, [&name("up_proj"), &name("down_proj")], [intermediate, width], false));
        }
        let mut routed = g.add(Op::Experts { name: "mixer.experts".into() }, &terms);
        if latent.is_some() {
            routed = g.add(linear("mixer.fc2_latent_proj", [hidden, width], bias), &[routed]);
        }
        let names = ["mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"];
        let shared = plain(g, x, names, [shared, hidden], bias);
        g.add(Op::Add, &[routed, shared])
    }
}

/// Adds two linears with ReLU² between them; `[intermediate, width]` are their features.
fn plain(
    g: &mut GraphBuilder,
    x: NodeId,
    [up, down]: [&str; 2],
    [intermediate, width]: [usize; 2],
    bias: bool,
) -> NodeId {
    let up = g.add(linear(up, [intermediate, width], bias), &[x]);
    let squared = g.add(Op::Activation(Activation::ReluSquared), &[up]);
    g.add(linear(down, [width, intermediate], bias), &[squared])
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
            return Err(config
                .error(LAYERS, format!("is {layers}, but the configuration lists {} layers", kinds.len())));
        }
        // Newer configurations do not have the number of layers; it is the length of the list.
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
        d.refuse("attention_bias", "biases in attention are not supported")?;
        if let Some(window) = config.optional_usize("sliding_window")? {
            return Err(config.error(
                "sliding_window",
                format!("is {window}; this family does not support sliding windows"),
            ));
        }
        if let Some(other) = config.optional_str("mamba_hidden_act")?.filter(|act| *act != "silu") {
            let reason = format!("is `{}`; this family supports only `silu`", other.escape_default());
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
        let experts = match kinds.contains(&Kind::Experts) {
            true => Some(Experts::read(&d)?),
            false => None,
        };
        let mut architecture = d.architecture(|_| d.block(d.attention(None, [false; 2]), d.mlp(false)))?;
        architecture.blocks = Blocks::new(
            d.layers,
            |layer| kinds[layer],
            |kind| graph(&d, *kind, (&mamba, experts.as_ref()), mlp_bias),
        );
        architecture.embedding = "backbone.embeddings.weight".into();
        architecture.final_norm = Some(d.norm.op("backbone.norm_f", d.hidden));
        architecture.block_prefix = "backbone.layers.{}.";
        architecture.further_module = experts.map(|_| "mtp.");
        architecture.fused = &[("mixer.qkv_proj", &["mixer.q_proj", "mixer.k_proj", "mixer.v_proj"])];
        Ok(architecture)
    }
}

fn kinds(config: &ConfigFields<'_>) -> Result<Vec<Kind>> {
    const LISTS: [&str; 2] = ["layers_block_type", "layer_types"];
    const PATTERN: &str = "hybrid_override_pattern";
    let unknown = |key: &str, what: &str| {
        config.error(key, format!("contains an unknown entry, `{}`", what.escape_default()))
    };
    for key in LISTS {
        let Some(types) = config.optional_str_list(key)? else { continue };
        let kind = |name: &&str| match *name {
            "linear_attention" | "mamba" => Ok(Kind::Mamba),
            "full_attention" | "attention" => Ok(Kind::Attention),
            "mlp" => Ok(Kind::Mlp),
            "moe" => Ok(Kind::Experts),
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
        'E' => Ok(Kind::Experts),
        other => Err(unknown(PATTERN, &other.to_string())),
    };
    pattern.chars().map(kind).collect()
}

fn graph(
    d: &Decoder<'_>,
    kind: Kind,
    (mamba, experts): (&Mamba2, Option<&Experts>),
    mlp_bias: bool,
) -> BlockGraph {
    let mut g = GraphBuilder::default();
    let input = g.add(Op::Input { width: d.hidden }, &[]);
    let x = g.add(d.norm.op("norm", d.hidden), &[input]);
    let out = match kind {
        Kind::Mamba => mamba.add(&mut g, x, d.hidden),
        Kind::Attention => attention(&mut g, d, x),
        Kind::Experts if let Some(experts) = experts => experts.add(&mut g, x, d.hidden, mlp_bias),
        Kind::Mlp | Kind::Experts => {
            plain(&mut g, x, ["mixer.up_proj", "mixer.down_proj"], [d.intermediate, d.hidden], mlp_bias)
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
