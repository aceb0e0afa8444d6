//! Llama 1, 2, 3 and families that differ from it in one detail: Mistral's sliding window, the biases of Qwen2, the
//! query and key norms of Qwen3.

use super::decoder::{Decoder, Defaults};
use super::parts::HeadNorms;
use super::windows::Windows;
use super::{Architecture, Family};
use crate::Result;
use crate::checkpoint::ConfigFields;

#[derive(Debug, Clone, Copy)]
pub(super) struct Llama;

#[derive(Debug, Clone, Copy)]
pub(super) struct Mistral;

#[derive(Debug, Clone, Copy)]
pub(super) struct Qwen2;

#[derive(Debug, Clone, Copy)]
pub(super) struct Qwen3;

impl Family for Llama {
    fn name(&self) -> &'static str {
        "llama"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["LlamaForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let d = Decoder::read(config, Defaults { smoothing: 0.85, ..Defaults::new(self.name()) })?;
        let bias = d.flag("attention_bias", false)?;
        let block = d.block(d.attention(Some(d.rope()?), [bias; 2]), d.mlp(d.flag("mlp_bias", false)?));
        d.architecture(|_| block.clone())
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
        let d = Decoder::read(config, Defaults { kv_heads: Some(8), ..Defaults::new(self.name()) })?;
        let windows = Windows::read(config, true)?;
        d.with_windows(&windows, [false; 2], None)
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
        let d = Decoder::read(config, Defaults { kv_heads: Some(32), ..Defaults::new(self.name()) })?;
        let windows = Windows::read(config, d.flag("use_sliding_window", false)?)?;
        d.with_windows(&windows, [true, false], None)
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
        let (kv_heads, head_dim) = (Some(32), Some(128));
        let d = Decoder::read(config, Defaults { kv_heads, head_dim, ..Defaults::new(self.name()) })?;
        let bias = d.flag("attention_bias", false)?;
        let windows = Windows::read(config, d.flag("use_sliding_window", false)?)?;
        d.with_windows(&windows, [bias; 2], Some(HeadNorms::DEFAULT))
    }
}

impl Decoder<'_> {
    fn with_windows(
        &self,
        windows: &Windows,
        bias: [bool; 2],
        head_norms: Option<HeadNorms>,
    ) -> Result<Architecture> {
        let mut attention = self.attention(Some(self.rope()?), bias);
        attention.head_norms = head_norms;
        let block = self.block(attention, self.mlp(false));
        self.architecture(|layer| windows.apply(&block, layer))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::BlockGraph;
    use super::*;

    /// A block with 8 query heads of width 8.
    fn block(family: &dyn Family, changes: Value) -> BlockGraph {
        let mut config = json!({
            "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_hidden_layers": 1,
            "vocab_size": 100, "num_key_value_heads": 2, "head_dim": 8,
        });
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        let path = std::path::Path::new("config.json");
        let architecture = family.describe(&ConfigFields::new(path, config.as_object().unwrap())).unwrap();
        architecture.graph(0).clone()
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
        let all = json!({ "num_key_value_heads": 8 });
        assert_eq!(groups(&block(&Llama, all)), expected(1));
        let biased = json!({ "attention_bias": true, "mlp_bias": true });
        assert_eq!(groups(&block(&Llama, biased)), expected(4));
        // Norms of queries and keys do not start a fold group and are not part of one.
        let windows = json!({ "use_sliding_window": true, "sliding_window": 16 });
        assert_eq!(groups(&block(&Qwen3, windows)), expected(4));
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
            (types([true; 4]), false, "`sliding_window` is not set"),
            (r#"{ "layer_types": ["full_attention"] }"#.into(), true, "1 entries for 4 blocks"),
            (types([true; 4]).replacen("sliding_a", "linear_a", 1), true, "`linear_attention`"),
        ] {
            let message = windows(&text, on).unwrap_err();
            assert!(message.contains("`layer_types`") && message.contains(part), "{message}");
        }
    }

    #[test]
    fn clipping_leaves_queries_and_keys_alone() {
        for family in [&Llama as &dyn Family, &Qwen3] {
            let graph = block(family, json!({}));
            let spared: Vec<_> = graph
                .linears()
                .filter(|(id, ..)| graph.feeds_queries_or_keys(*id))
                .map(|(_, name, ..)| name)
                .collect();
            assert_eq!(spared, ["self_attn.q_proj", "self_attn.k_proj"]);
        }
    }
}
