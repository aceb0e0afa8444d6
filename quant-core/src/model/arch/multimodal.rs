//! Vision-language models: classes that contain a decoder of a known family, their *text tower*, along with a vision
//! tower and a projector of its features into the residual stream.
//!
//! The text tower is described by its family from the nested `text_config`, and read, calibrated and quantized like
//! that family. Everything else is copied byte for byte.

use serde_json::{Map, Value, json};

use super::{Architecture, FAMILIES, Family, Op};
use crate::checkpoint::{ConfigFields, TensorSource};
use crate::format::WrapperNames;
use crate::{Error, Result};

pub(crate) const TEXT: &str = "text_config";
/// The module path of the text tower in transformers, which may differ from the names in the file.
const MODULES: Layout =
    Layout { base: "model.language_model.", blocks: "model.language_model.layers.{}.", heads: &["lm_head"] };
const TOWER_FIRST: Layout = Layout {
    base: "language_model.model.",
    blocks: "language_model.model.layers.{}.",
    heads: &["language_model.lm_head"],
};
/// The names of a plain text model.
const PLAIN: Layout = Layout { base: BASE, blocks: BLOCKS, heads: &["lm_head"] };

const BASE: &str = "model.";
const BLOCKS: &str = "model.layers.{}.";
/// Modules directly below the base of a text tower.
const PARTS: [&str; 6] = [
    "embed_tokens.",
    "layers.",
    "norm.",
    "embed_tokens_per_layer.",
    "per_layer_model_projection.",
    "per_layer_projection_norm.",
];

/// The model that contains a decoder as its text tower.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wrapper {
    /// The class, as in `architectures`.
    pub class: &'static str,
    /// Name prefix of the text tower, except for the head.
    base: &'static str,
    pub(crate) names: WrapperNames,
}

impl Wrapper {
    /// Returns whether a tensor is outside the text tower and therefore copied.
    fn carries(&self, tensor: &str, head: &str) -> bool {
        !in_tower(tensor, self.base) && !in_module(tensor, head)
    }
}

impl Architecture {
    /// Returns whether a tensor belongs to the model that contains the decoder, but not to the decoder itself.
    pub fn is_carried(&self, tensor: &str) -> bool {
        self.wrapper.as_ref().is_some_and(|wrapper| wrapper.carries(tensor, &self.head))
    }
}

/// Names of a text tower in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Layout {
    base: &'static str,
    /// Name prefix of its blocks, in the form of [`Architecture::block_prefix`].
    blocks: &'static str,
    heads: &'static [&'static str],
}

/// A class of vision-language models.
struct Class {
    name: &'static str,
    model_type: &'static str,
    /// The possible text models; the first is the default if `text_config` does not name one.
    texts: &'static [Text],
    /// Whether files without a `text_config` have its fields at the top level.
    may_be_flat: bool,
    tied: bool,
    /// Possible name layouts, the published one first.
    layouts: &'static [Layout],
}

/// A possible text model of a class.
struct Text {
    /// The value of `text_config.model_type`.
    model_type: &'static str,
    family: &'static str,
    /// The class's values for missing keys that differ from the family's defaults.
    defaults: fn() -> Value,
}

impl Text {
    fn family(&self) -> Option<&'static dyn Family> {
        FAMILIES.iter().copied().find(|family| family.name() == self.family)
    }
}

fn qwen2_vl() -> Value {
    json!({
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80,
        "max_position_embeddings": 32768,
    })
}

/// In this class, the weights of a token's experts always sum to 1.
fn qwen3_vl_moe() -> Value {
    json!({
        "num_key_value_heads": 16, "rope_theta": 5e5, "max_position_embeddings": 128_000, "norm_topk_prob": true,
    })
}

fn qwen3_vl() -> Value {
    json!({ "rope_theta": 5e5, "max_position_embeddings": 128_000 })
}

fn qwen3_5() -> Value {
    json!({ "max_position_embeddings": 32768 })
}

// Published configurations contain only values that differ from the class defaults.
fn llama() -> Value {
    json!({
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "vocab_size": 32000, "max_position_embeddings": 2048,
    })
}

fn mistral() -> Value {
    json!({
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 131_072,
    })
}

fn qwen2() -> Value {
    json!({
        "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 151_936, "max_position_embeddings": 32768,
    })
}

fn ministral3() -> Value {
    json!({
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34, "num_attention_heads": 32,
        "vocab_size": 131_072, "max_position_embeddings": 262_144,
    })
}

// Published configurations omit even the number of heads.
fn gemma3() -> Value {
    json!({
        "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208, "max_position_embeddings": 131_072,
    })
}

fn gemma4() -> Value {
    json!({
        "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8,
        "vocab_size": 262_144, "max_position_embeddings": 131_072,
    })
}

fn mistral4() -> Value {
    json!({
        "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 2048, "num_hidden_layers": 36,
        "num_attention_heads": 32, "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "qk_nope_head_dim": 64, "n_routed_experts": 128, "num_experts_per_tok": 4, "vocab_size": 131_072,
        "max_position_embeddings": 1_048_576,
    })
}

fn llama4() -> Value {
    json!({
        "hidden_size": 5120, "intermediate_size": 8192, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_local_experts": 16, "num_experts_per_tok": 1, "vocab_size": 202_048, "max_position_embeddings": 131_072,
    })
}

const LLAMA: Text = Text { model_type: "llama", family: "llama", defaults: llama };
const MISTRAL: Text = Text { model_type: "mistral", family: "mistral", defaults: mistral };
const MISTRAL4: Text = Text { model_type: "mistral4", family: "mistral4", defaults: mistral4 };
const LLAMA4: Text = Text { model_type: "llama4_text", family: "llama4_text", defaults: llama4 };
const MINISTRAL3: Text = Text { model_type: "ministral3", family: "ministral3", defaults: ministral3 };
const QWEN2: Text = Text { model_type: "qwen2", family: "qwen2", defaults: qwen2 };
const GEMMA3: Text = Text { model_type: "gemma3_text", family: "gemma3_text", defaults: gemma3 };

static CLASSES: &[Class] = &[
    Class {
        name: "Qwen2VLForConditionalGeneration",
        model_type: "qwen2_vl",
        texts: &[Text { model_type: "qwen2_vl_text", family: "qwen2", defaults: qwen2_vl }],
        may_be_flat: true,
        tied: false,
        layouts: &[PLAIN, MODULES],
    },
    Class {
        name: "Qwen2_5_VLForConditionalGeneration",
        model_type: "qwen2_5_vl",
        texts: &[Text { model_type: "qwen2_5_vl_text", family: "qwen2", defaults: qwen2_vl }],
        may_be_flat: true,
        tied: false,
        layouts: &[PLAIN, MODULES],
    },
    Class {
        name: "Qwen3VLForConditionalGeneration",
        model_type: "qwen3_vl",
        texts: &[Text { model_type: "qwen3_vl_text", family: "qwen3", defaults: qwen3_vl }],
        may_be_flat: false,
        tied: false,
        layouts: &[MODULES],
    },
    Class {
        name: "Qwen3_5ForConditionalGeneration",
        model_type: "qwen3_5",
        texts: &[Text { model_type: "qwen3_5_text", family: "qwen3_5_text", defaults: qwen3_5 }],
        may_be_flat: false,
        tied: false,
        layouts: &[MODULES],
    },
    Class {
        name: "Qwen3_5MoeForConditionalGeneration",
        model_type: "qwen3_5_moe",
        texts: &[Text { model_type: "qwen3_5_moe_text", family: "qwen3_5_moe_text", defaults: qwen3_5 }],
        may_be_flat: false,
        tied: false,
        layouts: &[MODULES],
    },
    Class {
        name: "Qwen3VLMoeForConditionalGeneration",
        model_type: "qwen3_vl_moe",
        texts: &[Text { model_type: "qwen3_vl_moe_text", family: "qwen3_moe", defaults: qwen3_vl_moe }],
        may_be_flat: false,
        tied: false,
        layouts: &[MODULES],
    },
    Class {
        name: "Mistral3ForConditionalGeneration",
        model_type: "mistral3",
        texts: &[MISTRAL, MINISTRAL3, MISTRAL4],
        may_be_flat: false,
        tied: true,
        layouts: &[TOWER_FIRST, MODULES],
    },
    Class {
        name: "LlavaForConditionalGeneration",
        model_type: "llava",
        texts: &[LLAMA, MISTRAL, QWEN2],
        may_be_flat: false,
        tied: false,
        layouts: &[TOWER_FIRST, MODULES],
    },
    Class {
        name: "Llama4ForConditionalGeneration",
        model_type: "llama4",
        texts: &[LLAMA4],
        may_be_flat: false,
        tied: false,
        layouts: &[TOWER_FIRST, MODULES],
    },
    Class {
        name: "Gemma3ForConditionalGeneration",
        model_type: "gemma3",
        texts: &[GEMMA3],
        may_be_flat: false,
        tied: true,
        layouts: &[TOWER_FIRST, MODULES],
    },
    Class {
        name: "Gemma4ForConditionalGeneration",
        model_type: "gemma4",
        texts: &[Text { model_type: "gemma4_text", family: "gemma4_text", defaults: gemma4 }],
        may_be_flat: false,
        tied: true,
        layouts: &[MODULES],
    },
];

/// Returns the supported classes and the families of their text models.
pub(super) fn classes() -> impl Iterator<Item = (&'static str, Vec<&'static str>)> {
    CLASSES.iter().map(|class| (class.name, class.texts.iter().map(|text| text.family).collect()))
}

/// Returns the architecture of the text tower of a class, with its names from `tensors`; `None` if `class` is not a
/// known class.
pub(super) fn describe(
    class: &str,
    config: &ConfigFields<'_>,
    tensors: &dyn TensorSource,
) -> Result<Option<Architecture>> {
    let Some(class) = CLASSES.iter().find(|known| known.name == class) else { return Ok(None) };
    if let Some(kind) = config.optional_str("model_type")?.filter(|kind| *kind != class.model_type) {
        return Err(config.error(
            "model_type",
            format!(
                "is `{kind}`, but `architectures` is `{}`, which implies `{}`",
                class.name, class.model_type
            ),
        ));
    }
    let nested = config.optional_object(TEXT)?;
    let (text, map) = match &nested {
        Some(fields) if fields.get(TEXT).is_some() => {
            return Err(fields.error(TEXT, "must not contain another `text_config`"));
        }
        Some(fields) => (text_of(class, fields)?, fields.map()),
        None if class.may_be_flat => (&class.texts[0], config.map()),
        None => return Err(config.error(TEXT, format!("is missing, but `{}` requires it", class.name))),
    };
    let family = text.family().ok_or_else(|| {
        Error::Internal(format!("the text family `{}` of `{}` is not registered", text.family, class.name))
    })?;
    let mut map = with_defaults(map, text);
    let sections = take_sections(&mut map);
    let fields = match &nested {
        Some(_) => config.nested(TEXT, &map),
        None => ConfigFields::new(config.path(), &map),
    };
    let mut architecture = family.describe(&fields)?;
    check_sections(&fields, sections.as_ref(), &architecture)?;

    // Either level may tie the head. Whether the file has a separate head is checked when tensors are loaded.
    let tied_here = |fields: &ConfigFields<'_>| fields.optional_bool("tie_word_embeddings");
    let inside = nested.as_ref().map(tied_here).transpose()?.flatten().unwrap_or(false);
    architecture.tied = tied_here(config)?.unwrap_or(class.tied) || inside;
    rename(&mut architecture, class, config, tensors)?;
    Ok(Some(architecture))
}

fn text_of(class: &'static Class, fields: &ConfigFields<'_>) -> Result<&'static Text> {
    let Some(kind) = fields.optional_str("model_type")? else { return Ok(&class.texts[0]) };
    class.texts.iter().find(|text| text.model_type == kind).ok_or_else(|| {
        let known: Vec<_> = class.texts.iter().map(|text| text.model_type).collect();
        let reason = format!("is `{kind}`; supported text models of {}: {}", class.name, known.join(", "));
        fields.error("model_type", reason)
    })
}

fn with_defaults(map: &Map<String, Value>, text: &Text) -> Map<String, Value> {
    let mut map = map.clone();
    if let Value::Object(defaults) = (text.defaults)() {
        for (key, value) in defaults {
            map.entry(key).or_insert(value);
        }
    }
    map
}

/// Removes the settings of multimodal rotation (mrope) from the rope parameters. A text token has the same position on
/// all three axes, so the remaining plain rotation is equivalent for text.
fn take_sections(map: &mut Map<String, Value>) -> Option<(&'static str, Value)> {
    let mut found = None;
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(Value::Object(rope)) = map.get_mut(key) else { continue };
        for kind in ["rope_type", "type"] {
            if rope.get(kind).and_then(Value::as_str) == Some("mrope") {
                rope.insert(kind.to_owned(), "default".into());
            }
        }
        rope.remove("mrope_interleaved");
        if let Some(sections) = rope.remove("mrope_section") {
            found = Some((key, sections));
        }
    }
    found
}

/// Checks that every frequency of a head belongs to a section. Otherwise no position would define its angle.
fn check_sections(
    fields: &ConfigFields<'_>,
    sections: Option<&(&'static str, Value)>,
    architecture: &Architecture,
) -> Result<()> {
    let Some((key, sections)) = sections else { return Ok(()) };
    let numbers = sections.as_array().map(|list| list.iter().map(Value::as_u64).collect::<Option<Vec<_>>>());
    let sum = numbers.flatten().and_then(|list| list.iter().try_fold(0u64, |sum, n| sum.checked_add(*n)));
    for rotated in architecture.ropes().map(|rope| rope.rotary_dim as u64) {
        if sum != Some(rotated / 2) {
            return Err(fields.error(
                &format!("{key}.mrope_section"),
                format!(
                    "must be a list of integers that add up to half the number of rotated channels, {}",
                    rotated / 2
                ),
            ));
        }
    }
    Ok(())
}

fn in_module(tensor: &str, module: &str) -> bool {
    tensor.strip_prefix(module).is_some_and(|rest| rest.starts_with('.'))
}

fn in_tower(tensor: &str, base: &str) -> bool {
    tensor.strip_prefix(base).is_some_and(|rest| PARTS.iter().any(|part| rest.starts_with(part)))
}

fn rename(
    architecture: &mut Architecture,
    class: &'static Class,
    config: &ConfigFields<'_>,
    tensors: &dyn TensorSource,
) -> Result<()> {
    let names = tensors.names();
    let only = |found: Vec<(&'static str, String)>| match &found[..] {
        [(_, one), (_, other), ..] => Err(Error::AmbiguousNames {
            path: config.path().parent().unwrap_or(config.path()).to_owned(),
            one: one.clone(),
            other: other.clone(),
        }),
        _ => Ok(found.first().map(|(key, _)| *key)),
    };
    let example = |test: &dyn Fn(&str) -> bool| names.iter().find(|name| test(name)).map(|n| (*n).to_owned());
    let bases = class
        .layouts
        .iter()
        .filter_map(|layout| Some((layout.base, example(&|name| in_tower(name, layout.base))?)));
    let base = only(bases.collect())?;
    let layout = class.layouts.iter().find(|layout| Some(layout.base) == base).unwrap_or(&class.layouts[0]);
    let mut heads: Vec<&'static str> =
        class.layouts.iter().flat_map(|layout| layout.heads).copied().collect();
    heads.sort_unstable();
    heads.dedup();
    let heads = heads.iter().filter_map(|head| Some((*head, example(&|name| in_module(name, head))?)));
    let head = only(heads.collect())?.unwrap_or(layout.heads[0]);

    let family = architecture.family;
    let unexpected = || {
        Error::Internal(format!(
            "the tensors of family `{family}` are not named as its vision-language class requires"
        ))
    };
    let rebased = |name: &str| Some(format!("{}{}", layout.base, name.strip_prefix(BASE)?));
    let embedding = rebased(&architecture.embedding).ok_or_else(unexpected)?;
    if architecture.block_prefix != BLOCKS || architecture.learned_positions.is_some() {
        return Err(unexpected());
    }
    if let Some(Op::RmsNorm { name, .. } | Op::LayerNorm { name, .. }) = &mut architecture.final_norm {
        *name = rebased(name).ok_or_else(|| Error::Internal(format!("`{name}` has a name of its own")))?;
    }
    if let Some(inputs) = &mut architecture.per_layer_inputs {
        for name in [&mut inputs.table, &mut inputs.projection] {
            *name = rebased(name).ok_or_else(unexpected)?;
        }
        if let Op::RmsNorm { name, .. } = &mut inputs.norm {
            *name = rebased(name).ok_or_else(unexpected)?;
        }
    }
    architecture.embedding = embedding;
    architecture.block_prefix = layout.blocks;
    architecture.head = head.to_owned();
    // Loaders use the module names of their class, which may differ from the names in the file.
    let renamed = [(layout.base, MODULES.base), (head, MODULES.heads[0])];
    let renamed = renamed.into_iter().filter(|(stored, module)| stored != module).collect();
    let mut wrapper = Wrapper { class: class.name, base: layout.base, names: WrapperNames::default() };
    let outside = names.iter().filter(|name| wrapper.carries(name, head));
    let matrices = outside.filter(|name| tensors.info(name).is_some_and(|info| info.shape.len() > 1));
    let mut roots: Vec<String> = matrices.filter_map(|name| root(name, layout.base, head)).collect();
    roots.sort_unstable();
    roots.dedup();
    wrapper.names = WrapperNames { outside: roots, renamed };
    architecture.wrapper = Some(wrapper);
    architecture.further_module = None;
    Ok(())
}

/// Returns the outermost module that contains the tensor but no part of the text tower.
fn root(tensor: &str, base: &str, head: &str) -> Option<String> {
    let module = tensor.strip_suffix(".weight")?;
    let holds_tower = |outer: &str| [base, head].iter().any(|inner| in_module(inner, outer));
    let ends = module.match_indices('.').map(|(at, _)| at).chain([module.len()]);
    let root = ends.map(|end| &module[..end]).find(|outer| !holds_tower(outer))?;
    Some(root.strip_prefix(BASE).unwrap_or(root).to_owned())
}
