//! Llama 1, 2, 3 and the families that share their block but for a detail: Mistral's sliding window,
//! the biases of Qwen2, the query and key norms of Qwen3.

use super::experts::GatedExperts;
use super::{Architecture, AttentionShape, BlockGraph, Blocks, Family, GraphBuilder, Op};
use crate::Result;
use crate::checkpoint::ConfigFields;
use crate::model::rope::{Rope, RopeScaling};

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
pub(super) struct Details {
    pub(super) family: &'static str,
    /// Key and value heads where the configuration is silent; `None` means as many as query heads.
    pub(super) kv_heads: Option<usize>,
    /// Width of a head where the configuration is silent; `None` means the hidden size's share.
    pub(super) head_dim: Option<usize>,
    /// Base of the rotary frequencies where the configuration is silent.
    pub(super) theta: f64,
    /// Added to the mean square where the configuration is silent.
    pub(super) norm_eps: f64,
    /// SmoothQuant's exponent.
    pub(super) smoothing: f32,
    /// What all blocks have in common.
    pub(super) block: BlockDetails,
    pub(super) windows: Windows,
    /// The experts, and which layers have them in place of an MLP.
    pub(super) experts: Option<(GatedExperts, Vec<bool>)>,
}

impl Details {
    /// Those of most families.
    pub(super) fn new(family: &'static str) -> Self {
        Self {
            family,
            kv_heads: None,
            head_dim: None,
            theta: 10_000.0,
            norm_eps: 1e-6,
            smoothing: 0.8,
            block: BlockDetails::default(),
            windows: Windows::Never,
            experts: None,
        }
    }
}

/// Where a family's block departs from the others.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct BlockDetails {
    pub(super) qkv_bias: bool,
    pub(super) o_bias: bool,
    pub(super) mlp_bias: bool,
    /// Whether every head of queries and keys is normalized before it is rotated.
    pub(super) head_norms: bool,
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
        describe(config, &Details { smoothing: 0.85, block, ..Details::new(self.name()) })
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
        let windows = Windows::read(config, true)?;
        describe(config, &Details { kv_heads: Some(8), windows, ..Details::new(self.name()) })
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
        let block = BlockDetails { qkv_bias: true, ..Default::default() };
        let windows = Windows::read(config, config.optional_bool("use_sliding_window")?.unwrap_or(false))?;
        describe(config, &Details { kv_heads: Some(32), block, windows, ..Details::new(self.name()) })
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
            ..Default::default()
        };
        let windows = Windows::read(config, config.optional_bool("use_sliding_window")?.unwrap_or(false))?;
        let (kv_heads, head_dim) = (Some(32), Some(128));
        describe(config, &Details { kv_heads, head_dim, block, windows, ..Details::new(self.name()) })
    }
}

/// What `layer_types` says of a block with a window.
const SLIDING: &str = "sliding_attention";
/// What it says of one without.
const FULL: &str = "full_attention";

/// Which blocks slide a window over the keys, and how long it is.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Windows {
    /// Every query sees all positions before it.
    Never,
    /// Blocks from this one on.
    From { first: usize, window: usize },
    /// Those for which the list says so.
    Listed { slides: Vec<bool>, window: usize },
}

impl Windows {
    /// Reads them. `on`: whether the family's configuration has sliding windows switched on.
    ///
    /// Readers take a missing `sliding_window` for that of the first release, and `null` for none.
    /// `layer_types` says of each block whether it slides; without it, all do, but for the first
    /// `max_window_layers` of families that know the key.
    pub(super) fn read(config: &ConfigFields<'_>, on: bool) -> Result<Self> {
        let window = Self::length(config, on)?;
        let layers = Blocks::layers(config)?;
        if let Some(types) = config.optional_str_list("layer_types")? {
            if types.len() != layers {
                return Err(
                    config.error("layer_types", format!("has {} entries for {layers} blocks", types.len()))
                );
            }
            if let Some(other) = types.iter().find(|t| **t != SLIDING && **t != FULL) {
                return Err(config.error("layer_types", format!("holds `{other}`, which is not known")));
            }
            let slides: Vec<bool> = types.iter().map(|t| *t == SLIDING).collect();
            return match window {
                _ if !slides.contains(&true) => Ok(Self::Never),
                None => Err(config.error("layer_types", "asks for a sliding window, but none is configured")),
                Some(window) => Ok(Self::Listed { slides, window }),
            };
        }
        let first = match config.map().contains_key("use_sliding_window") {
            true => config.optional_usize("max_window_layers")?.unwrap_or(28),
            false => 0,
        };
        Ok(window.map_or(Self::Never, |window| Self::From { first, window }))
    }

    /// Reads those of a family whose blocks all slide, or none: it knows neither `layer_types` nor
    /// `max_window_layers`.
    pub(super) fn uniform(config: &ConfigFields<'_>, on: bool) -> Result<Self> {
        let window = Self::length(config, on)?;
        let wanted = if window.is_some() { SLIDING } else { FULL };
        if config.optional_str_list("layer_types")?.is_some_and(|types| types.iter().any(|t| *t != wanted)) {
            return Err(config.error(
                "layer_types",
                format!("asks for more than `{wanted}`, but all blocks of this family are alike"),
            ));
        }
        Ok(window.map_or(Self::Never, |window| Self::From { first: 0, window }))
    }

    /// Positions that a window has, where windows are `on`.
    fn length(config: &ConfigFields<'_>, on: bool) -> Result<Option<usize>> {
        let window = match config.map().contains_key("sliding_window") {
            true => config.optional_positive("sliding_window")?,
            false => Some(4096),
        };
        Ok(window.filter(|_| on))
    }

    /// Positions that a query sees in a block, its own included.
    fn of(&self, layer: usize) -> Option<usize> {
        match self {
            Self::Never => None,
            Self::From { first, window } => (layer >= *first).then_some(*window),
            Self::Listed { slides, window } => slides.get(layer)?.then_some(*window),
        }
    }
}

/// The architecture that a configuration of such a family implies.
pub(super) fn describe(config: &ConfigFields<'_>, details: &Details) -> Result<Architecture> {
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
    let norm_eps = config.optional_f64("rms_norm_eps")?.unwrap_or(details.norm_eps);
    if !(0.0..1.0).contains(&norm_eps) {
        return Err(
            config.error("rms_norm_eps", format!("is {norm_eps}; expected 0 or a small positive number"))
        );
    }
    let (theta, scaling) = RopeScaling::from_config(config, details.theta)?;
    let sizes = Sizes {
        hidden,
        intermediate,
        attention: AttentionShape { kv_heads, repeat: heads / kv_heads, head_dim, window: None },
        rope: Rope { head_dim, theta, scaling },
        norm_eps,
    };
    let layers = Blocks::layers(config)?;
    let experts = details.experts.as_ref();
    let kind = |layer: usize| {
        let experts = experts.filter(|(_, layers)| layers.get(layer) == Some(&true));
        (details.windows.of(layer), experts.map(|(experts, _)| *experts))
    };
    let graph = |(window, experts): &(Option<usize>, Option<GatedExperts>)| {
        let attention = AttentionShape { window: *window, ..sizes.attention };
        block(&Sizes { attention, ..sizes }, details.block, experts.as_ref())
    };
    Ok(Architecture {
        family: details.family,
        hidden,
        vocab: config.require_positive("vocab_size")?,
        layers,
        max_positions: config.optional_positive("max_position_embeddings")?.unwrap_or(2048),
        smoothing: details.smoothing,
        learned_positions: None,
        tied: config.optional_bool("tie_word_embeddings")?.unwrap_or(false),
        embedding: "model.embed_tokens.weight".into(),
        final_norm: Some(Op::RmsNorm { name: "model.norm".into(), width: hidden, eps: norm_eps }),
        head: "lm_head".into(),
        block_prefix: "model.layers.{}.",
        base: "",
        fused: &[
            ("self_attn.qkv_proj", &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
            ("mlp.gate_up_proj", &["mlp.gate_proj", "mlp.up_proj"]),
        ],
        blocks: Blocks::new(layers, kind, graph),
    })
}

/// The sizes of a block.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    hidden: usize,
    intermediate: usize,
    attention: AttentionShape,
    rope: Rope,
    norm_eps: f64,
}

fn block(sizes: &Sizes, details: BlockDetails, experts: Option<&GatedExperts>) -> BlockGraph {
    let Sizes { hidden, intermediate, attention, rope, norm_eps: eps } = *sizes;
    let BlockDetails { qkv_bias, o_bias, mlp_bias, head_norms } = details;
    let linear = |name: &str, shape: [usize; 2], bias: bool| Op::Linear {
        name: name.to_owned(),
        shape,
        bias,
        stays_float: false,
    };
    let norm = |name: &str, width: usize| Op::RmsNorm { name: name.to_owned(), width, eps };
    let head_dim = attention.head_dim;
    let (q_width, kv_width) = (attention.heads() * head_dim, attention.kv_heads * head_dim);

    let mut g = GraphBuilder::default();
    let input = g.add(Op::Input { width: hidden }, &[]);

    let x = g.add(norm("input_layernorm", hidden), &[input]);
    let mut q = g.add(linear("self_attn.q_proj", [q_width, hidden], qkv_bias), &[x]);
    let mut k = g.add(linear("self_attn.k_proj", [kv_width, hidden], qkv_bias), &[x]);
    let v = g.add(linear("self_attn.v_proj", [kv_width, hidden], qkv_bias), &[x]);
    if head_norms {
        q = g.add(norm("self_attn.q_norm", head_dim), &[q]);
        k = g.add(norm("self_attn.k_norm", head_dim), &[k]);
    }
    let q = g.add(Op::Rope(rope), &[q]);
    let k = g.add(Op::Rope(rope), &[k]);
    let attended = g.add(Op::Attention(attention), &[q, k, v]);
    let o = g.add(linear("self_attn.o_proj", [hidden, q_width], o_bias), &[attended]);
    let middle = g.add(Op::Add, &[input, o]);

    let x = g.add(norm("post_attention_layernorm", hidden), &[middle]);
    if let Some(experts) = experts {
        let sum = experts.add(&mut g, x, hidden);
        g.add(Op::Add, &[middle, sum]);
        return g.finish();
    }
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

    /// 8 query heads of 8.
    fn sizes(kv_heads: usize, window: Option<usize>) -> Sizes {
        let rope = Rope { head_dim: 8, theta: 10_000.0, scaling: RopeScaling::None };
        let attention = AttentionShape { kv_heads, repeat: 8 / kv_heads, head_dim: 8, window };
        Sizes { hidden: 64, intermediate: 96, attention, rope, norm_eps: 1e-6 }
    }

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
        let normed = BlockDetails { head_norms: true, ..plain };
        assert_eq!(groups(&block(&sizes(8, None), plain, None)), expected(1));
        assert_eq!(groups(&block(&sizes(2, None), biased, None)), expected(4));
        // Norms of heads neither scale nor let a scale through.
        assert_eq!(groups(&block(&sizes(2, Some(16)), normed, None)), expected(4));
    }

    #[test]
    fn sliding_windows() {
        /// The windows of four blocks.
        fn windows(text: &str, on: bool) -> Result<Vec<Option<usize>>, String> {
            let mut map = serde_json::from_str::<serde_json::Map<_, _>>(text).unwrap();
            map.insert("num_hidden_layers".into(), 4.into());
            let path = std::path::Path::new("config.json");
            let windows = Windows::read(&ConfigFields::new(path, &map), on).map_err(|e| e.to_string())?;
            Ok((0..4).map(|layer| windows.of(layer)).collect())
        }
        let (all, none) = ([Some(16); 4].to_vec(), [None; 4].to_vec());
        assert_eq!(windows("{}", true), Ok([Some(4096); 4].to_vec()));
        assert_eq!(windows("{}", false), Ok(none.clone()));
        assert_eq!(windows(r#"{ "sliding_window": null }"#, true), Ok(none.clone()));
        assert_eq!(windows(r#"{ "sliding_window": 16 }"#, true), Ok(all.clone()));
        let qwen = |first: usize| {
            format!(r#"{{ "use_sliding_window": true, "sliding_window": 16, "max_window_layers": {first} }}"#)
        };
        assert_eq!(windows(&qwen(0), true), Ok(all.clone()));
        assert_eq!(windows(&qwen(4), true), Ok(none.clone()));
        assert_eq!(windows(&qwen(1), true), Ok(vec![None, Some(16), Some(16), Some(16)]));
        let types = |slides: [bool; 4]| {
            let types = slides.map(|s| if s { r#""sliding_attention""# } else { r#""full_attention""# });
            format!(r#"{{ "sliding_window": 16, "layer_types": [{}] }}"#, types.join(","))
        };
        assert_eq!(windows(&types([false; 4]), true), Ok(none));
        assert_eq!(windows(&types([true; 4]), true), Ok(all));
        let mixed = [Some(16), None, Some(16), None].to_vec();
        assert_eq!(windows(&types([true, false, true, false]), true), Ok(mixed));
        for (text, on, part) in [
            (types([true; 4]), false, "none is configured"),
            (r#"{ "layer_types": ["full_attention"] }"#.into(), true, "1 entries for 4 blocks"),
            (types([true; 4]).replacen("sliding_a", "linear_a", 1), true, "`linear_attention`"),
        ] {
            let message = windows(&text, on).unwrap_err();
            assert!(message.contains("`layer_types`") && message.contains(part), "{message}");
        }
    }

    #[test]
    fn clipping_leaves_queries_and_keys_alone() {
        for head_norms in [false, true] {
            let graph = block(&sizes(2, None), BlockDetails { head_norms, ..BlockDetails::default() }, None);
            let spared: Vec<_> = graph
                .linears()
                .filter(|(id, ..)| graph.feeds_queries_or_keys(*id))
                .map(|(_, name, ..)| name)
                .collect();
            assert_eq!(spared, ["self_attn.q_proj", "self_attn.k_proj"]);
        }
    }
}
