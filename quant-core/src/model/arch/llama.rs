//! Llama 1, 2, 3 and the families that share their block but for a detail: Mistral's sliding window,
//! the biases of Qwen2, the query and key norms of Qwen3.

use super::{Architecture, BlockGraph, Family, GraphBuilder, Op, Positions};
use crate::Result;
use crate::checkpoint::ConfigFields;
use crate::model::rope::RopeScaling;

/// The family of `LlamaForCausalLM`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Llama;

/// The family of `MistralForCausalLM`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mistral;

/// The family of `Qwen2ForCausalLM`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Qwen2;

/// The family of `Qwen3ForCausalLM`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Qwen3;

/// Where a family departs from the others.
struct Details {
    family: &'static str,
    /// Key and value heads where the configuration is silent; `None` means as many as query heads.
    kv_heads: Option<usize>,
    /// Width of a head where the configuration is silent; `None` means the hidden size's share.
    head_dim: Option<usize>,
    /// SmoothQuant's exponent.
    smoothing: f32,
    block: BlockDetails,
}

/// Where a family's block departs from the others.
#[derive(Debug, Clone, Copy, Default)]
struct BlockDetails {
    qkv_bias: bool,
    o_bias: bool,
    mlp_bias: bool,
    /// Whether every head of queries and keys is normed before it is turned.
    head_norms: bool,
    /// Positions that a query sees, its own included.
    window: Option<usize>,
}

impl Family for Llama {
    fn name(&self) -> &'static str {
        "llama"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["LlamaForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let attention_bias = config.optional_bool("attention_bias")?.unwrap_or(false);
        let mlp_bias = config.optional_bool("mlp_bias")?.unwrap_or(false);
        let block =
            BlockDetails { qkv_bias: attention_bias, o_bias: attention_bias, mlp_bias, ..Default::default() };
        describe(
            config,
            &Details { family: self.name(), kv_heads: None, head_dim: None, smoothing: 0.85, block },
        )
    }
}

impl Family for Mistral {
    fn name(&self) -> &'static str {
        "mistral"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["MistralForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let window = sliding_window(config, true)?;
        let block = BlockDetails { window, ..Default::default() };
        describe(
            config,
            &Details { family: self.name(), kv_heads: Some(8), head_dim: None, smoothing: 0.8, block },
        )
    }
}

impl Family for Qwen2 {
    fn name(&self) -> &'static str {
        "qwen2"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["Qwen2ForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let block = BlockDetails {
            qkv_bias: true,
            window: sliding_window(config, config.optional_bool("use_sliding_window")?.unwrap_or(false))?,
            ..Default::default()
        };
        describe(
            config,
            &Details { family: self.name(), kv_heads: Some(32), head_dim: None, smoothing: 0.8, block },
        )
    }
}

impl Family for Qwen3 {
    fn name(&self) -> &'static str {
        "qwen3"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["Qwen3ForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let attention_bias = config.optional_bool("attention_bias")?.unwrap_or(false);
        let block = BlockDetails {
            qkv_bias: attention_bias,
            o_bias: attention_bias,
            head_norms: true,
            window: sliding_window(config, config.optional_bool("use_sliding_window")?.unwrap_or(false))?,
            ..Default::default()
        };
        describe(
            config,
            &Details { family: self.name(), kv_heads: Some(32), head_dim: Some(128), smoothing: 0.8, block },
        )
    }
}

/// The sliding window of all blocks, if there is one. `on`: whether the family's configuration has
/// it switched on.
///
/// Readers take a missing `sliding_window` for that of the first release, and `null` for none.
/// `layer_types` says of every block whether it slides; without it, all do, but for the first
/// `max_window_layers` of families that know the key. Only all blocks or none can be had here.
fn sliding_window(config: &ConfigFields<'_>, on: bool) -> Result<Option<usize>> {
    const SLIDING: &str = "sliding_attention";
    const FULL: &str = "full_attention";
    let window = match config.map().contains_key("sliding_window") {
        true => config.optional_positive("sliding_window")?,
        false => Some(4096),
    };
    let window = window.filter(|_| on);
    let layers = config.require_positive("num_hidden_layers")?;
    let some = |key: &str| {
        config.error(key, "asks for a sliding window in some blocks only, which is not supported")
    };
    if let Some(types) = config.optional_str_list("layer_types")? {
        if types.len() != layers {
            return Err(
                config.error("layer_types", format!("has {} entries for {layers} blocks", types.len()))
            );
        }
        if let Some(other) = types.iter().find(|t| **t != SLIDING && **t != FULL) {
            return Err(config.error("layer_types", format!("holds `{other}`, which is not known")));
        }
        return match (types.iter().filter(|t| **t == SLIDING).count(), window) {
            (0, _) => Ok(None),
            (_, None) => Err(config.error("layer_types", "asks for a sliding window, and there is none")),
            (n, Some(window)) if n == layers => Ok(Some(window)),
            _ => Err(some("layer_types")),
        };
    }
    let first = match config.map().contains_key("use_sliding_window") {
        true => config.optional_usize("max_window_layers")?.unwrap_or(28),
        false => 0,
    };
    match window {
        None => Ok(None),
        Some(_) if first >= layers => Ok(None),
        Some(window) if first == 0 => Ok(Some(window)),
        Some(_) => Err(some("max_window_layers")),
    }
}

/// The architecture that a configuration of such a family implies.
fn describe(config: &ConfigFields<'_>, details: &Details) -> Result<Architecture> {
    let hidden = config.require_positive("hidden_size")?;
    let intermediate = config.require_positive("intermediate_size")?;
    let heads = config.require_positive("num_attention_heads")?;
    let kv_heads = match config.optional_positive("num_key_value_heads")? {
        Some(kv_heads) => kv_heads,
        // `null` means all of them in every family; only a missing key has a family's own default.
        None if config.map().contains_key("num_key_value_heads") => heads,
        None => details.kv_heads.unwrap_or(heads),
    };
    if heads % kv_heads != 0 {
        return Err(config.error(
            "num_key_value_heads",
            format!("is {kv_heads}, which does not divide the {heads} heads"),
        ));
    }
    let head_dim = match config.optional_positive("head_dim")?.or(details.head_dim) {
        Some(width) => width,
        None if hidden % heads == 0 => hidden / heads,
        None => {
            return Err(config.error(
                "num_attention_heads",
                format!("is {heads}, which does not divide hidden_size {hidden}, and head_dim is not given"),
            ));
        }
    };
    if head_dim % 2 != 0 {
        return Err(config.error("head_dim", format!("is {head_dim}; rotary embedding needs it even")));
    }
    let activation = config.optional_str("hidden_act")?.unwrap_or("silu");
    if activation != "silu" {
        return Err(config.error("hidden_act", format!("is `{activation}`; this family uses `silu`")));
    }
    let norm_eps = config.optional_f64("rms_norm_eps")?.unwrap_or(1e-6);
    if !(0.0..1.0).contains(&norm_eps) {
        return Err(
            config.error("rms_norm_eps", format!("is {norm_eps}; expected 0 or a small positive number"))
        );
    }
    let (theta, scaling) = RopeScaling::from_config(config)?;
    Ok(Architecture {
        family: details.family,
        hidden,
        vocab: config.require_positive("vocab_size")?,
        layers: config.require_positive("num_hidden_layers")?,
        heads,
        kv_heads,
        head_dim,
        max_positions: config.optional_positive("max_position_embeddings")?.unwrap_or(2048),
        norm_eps,
        smoothing: details.smoothing,
        positions: Positions::Rotary { theta, scaling },
        tied: config.optional_bool("tie_word_embeddings")?.unwrap_or(false),
        embedding: "model.embed_tokens.weight".into(),
        final_norm: Some(Op::RmsNorm { name: "model.norm".into(), width: hidden }),
        head: "lm_head".into(),
        block_prefix: "model.layers.{}.",
        base: "",
        fused: &[
            ("self_attn.qkv_proj", &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
            ("mlp.gate_up_proj", &["mlp.gate_proj", "mlp.up_proj"]),
        ],
        block: block(hidden, intermediate, heads, kv_heads, head_dim, details.block),
    })
}

fn block(
    hidden: usize,
    intermediate: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    details: BlockDetails,
) -> BlockGraph {
    let BlockDetails { qkv_bias, o_bias, mlp_bias, head_norms, window } = details;
    let linear =
        |name: &str, shape: [usize; 2], bias: bool| Op::Linear { name: name.to_owned(), shape, bias };
    let norm = |name: &str, width: usize| Op::RmsNorm { name: name.to_owned(), width };
    let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);

    let mut g = GraphBuilder::default();
    let input = g.add(Op::Input, &[]);

    let x = g.add(norm("input_layernorm", hidden), &[input]);
    let mut q = g.add(linear("self_attn.q_proj", [q_width, hidden], qkv_bias), &[x]);
    let mut k = g.add(linear("self_attn.k_proj", [kv_width, hidden], qkv_bias), &[x]);
    let v = g.add(linear("self_attn.v_proj", [kv_width, hidden], qkv_bias), &[x]);
    if head_norms {
        q = g.add(norm("self_attn.q_norm", head_dim), &[q]);
        k = g.add(norm("self_attn.k_norm", head_dim), &[k]);
    }
    let q = g.add(Op::Rope, &[q]);
    let k = g.add(Op::Rope, &[k]);
    let attended = g.add(Op::Attention { repeat: heads / kv_heads, head_dim, window }, &[q, k, v]);
    let o = g.add(linear("self_attn.o_proj", [hidden, q_width], o_bias), &[attended]);
    let middle = g.add(Op::Add, &[input, o]);

    let x = g.add(norm("post_attention_layernorm", hidden), &[middle]);
    let gate = g.add(linear("mlp.gate_proj", [intermediate, hidden], mlp_bias), &[x]);
    let up = g.add(linear("mlp.up_proj", [intermediate, hidden], mlp_bias), &[x]);
    let product = g.add(Op::GatedSilu, &[gate, up]);
    let down = g.add(linear("mlp.down_proj", [hidden, intermediate], mlp_bias), &[product]);
    g.add(Op::Add, &[middle, down]);
    g.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names of a fold group: producer, consumers, inspected, repeat.
    fn groups(graph: &BlockGraph) -> Vec<(String, Vec<String>, String, usize)> {
        let name = |id| graph.name(id).to_owned();
        let of = |g: &super::super::FoldGroup| {
            (name(g.producer), g.consumers.iter().map(|&c| name(c)).collect(), name(g.inspected), g.repeat)
        };
        graph.fold_groups().iter().map(of).collect()
    }

    #[test]
    fn balance_lists_follow_from_the_graph() {
        let s = |t: &str| t.to_owned();
        let qkv = vec![s("self_attn.q_proj"), s("self_attn.k_proj"), s("self_attn.v_proj")];
        let expected = |repeat| {
            vec![
                (s("input_layernorm"), qkv.clone(), s("self_attn.o_proj"), 1),
                (s("self_attn.v_proj"), vec![s("self_attn.o_proj")], s("self_attn.o_proj"), repeat),
                (
                    s("post_attention_layernorm"),
                    vec![s("mlp.gate_proj"), s("mlp.up_proj")],
                    s("mlp.down_proj"),
                    1,
                ),
                (s("mlp.up_proj"), vec![s("mlp.down_proj")], s("mlp.down_proj"), 1),
            ]
        };
        let plain = BlockDetails::default();
        let biased = BlockDetails { qkv_bias: true, o_bias: true, mlp_bias: true, ..plain };
        let normed = BlockDetails { head_norms: true, window: Some(16), ..plain };
        assert_eq!(groups(&block(64, 96, 8, 8, 8, plain)), expected(1));
        assert_eq!(groups(&block(64, 96, 8, 2, 8, biased)), expected(4));
        // Norms of heads neither scale nor let a scale through.
        assert_eq!(groups(&block(64, 96, 8, 2, 8, normed)), expected(4));
    }

    #[test]
    fn sliding_windows() {
        let window = |text: &str, on: bool| {
            let mut map = serde_json::from_str::<serde_json::Map<_, _>>(text).unwrap();
            map.insert("num_hidden_layers".into(), 2.into());
            let path = std::path::Path::new("config.json");
            sliding_window(&ConfigFields::new(path, &map), on).map_err(|e| e.to_string())
        };
        assert_eq!(window("{}", true), Ok(Some(4096)));
        assert_eq!(window("{}", false), Ok(None));
        assert_eq!(window(r#"{ "sliding_window": null }"#, true), Ok(None));
        assert_eq!(window(r#"{ "sliding_window": 16 }"#, true), Ok(Some(16)));
        let qwen = |first: usize| {
            format!(r#"{{ "use_sliding_window": true, "sliding_window": 16, "max_window_layers": {first} }}"#)
        };
        assert_eq!(window(&qwen(0), true), Ok(Some(16)));
        assert_eq!(window(&qwen(2), true), Ok(None));
        assert!(window(&qwen(1), true).unwrap_err().contains("`max_window_layers`"));
        let types = |types: &str| format!(r#"{{ "sliding_window": 16, "layer_types": {types} }}"#);
        assert_eq!(window(&types(r#"["full_attention", "full_attention"]"#), true), Ok(None));
        assert_eq!(window(&types(r#"["sliding_attention", "sliding_attention"]"#), true), Ok(Some(16)));
        for (text, on, says) in [
            (r#"["sliding_attention", "sliding_attention"]"#, false, "there is none"),
            (r#"["sliding_attention", "full_attention"]"#, true, "some blocks only"),
            (r#"["full_attention"]"#, true, "1 entries for 2 blocks"),
            (r#"["full_attention", "linear_attention"]"#, true, "`linear_attention`"),
        ] {
            let said = window(&types(text), on).unwrap_err();
            assert!(said.contains("`layer_types`") && said.contains(says), "{said}");
        }
    }

    #[test]
    fn clipping_leaves_queries_and_keys_alone() {
        for head_norms in [false, true] {
            let graph = block(64, 96, 8, 2, 8, BlockDetails { head_norms, ..BlockDetails::default() });
            let spared: Vec<_> = graph
                .linears()
                .filter(|(id, ..)| graph.feeds_queries_or_keys(*id))
                .map(|(_, name, ..)| name)
                .collect();
            assert_eq!(spared, ["self_attn.q_proj", "self_attn.k_proj"]);
        }
    }
}
