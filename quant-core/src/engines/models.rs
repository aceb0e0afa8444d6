//! Which models an engine has: facts as data, one line for each engine and set of models, with how it is known.
//!
//! A model is a family (`llama`), or a class of vision-language models (`LlavaForConditionalGeneration`), whatever its
//! text model. What no line names was not checked, and the verdict says so.

use super::Verdict::{self, No, Unsure, Yes};
use super::outline::Outline;

/// How it is known that an engine has a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Basis {
    /// A checkpoint of it was loaded, and its numbers compared.
    Run,
    /// The engine's sources were read.
    Read,
    /// Nobody looked.
    NotChecked,
}

impl Basis {
    /// `run`, `read`, `not checked`.
    pub fn word(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Read => "read",
            Self::NotChecked => "not checked",
        }
    }
}

/// Whether an engine has a model.
#[derive(Debug, Clone, Copy)]
pub(super) enum Has {
    /// It does, and these are the rules that its other models do not have.
    With(fn(&Outline) -> Verdict),
    /// It does.
    Yes,
    /// It does not: the reason.
    No(&'static str),
    /// Its sources do not tell: what is not known.
    Unsure(&'static str),
}

/// What is known of an engine and some models.
#[derive(Debug)]
pub(super) struct Fact {
    pub(super) models: &'static [&'static str],
    pub(super) has: Has,
    pub(super) basis: Basis,
}

const fn fact(models: &'static [&'static str], has: Has, basis: Basis) -> Fact {
    Fact { models, has, basis }
}

/// The decoders whose blocks are Llama's but for a detail.
const LLAMAS: &[&str] = &["llama", "mistral", "qwen2", "qwen3"];
const OPT: &[&str] = &["opt"];
/// What engines do with experts is a matter of rules, and not of models.
const EXPERTS: &[&str] = &["mixtral", "qwen3_moe"];
/// Families with experts of which transformers has run compressed-tensors checkpoints, and no other engine any.
const OTHER_EXPERTS: &[&str] = &[
    "qwen2_moe",
    "olmoe",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v2",
    "deepseek_v3",
    "minimax_m2",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
    "qwen3_5_moe_text",
    "lfm2_moe",
];
/// Families of which transformers has run compressed-tensors checkpoints, and no other engine any.
const OTHER_DENSE: &[&str] = &[
    "smollm3",
    "granite",
    "ministral3",
    "seed_oss",
    "ernie4_5",
    "hunyuan_v1_dense",
    "gemma2",
    "gemma3_text",
    "olmo2",
    "olmo3",
    "exaone4",
    "glm",
    "glm4",
    "phi3",
    "phi",
    "cohere",
    "cohere2",
    "starcoder2",
    "gpt_neox",
    "lfm2",
    "nemotron_h",
    "falcon_h1",
    "qwen3_5_text",
    "qwen3_next",
];
const VISION_LANGUAGE: &[&str] = &[
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "LlavaForConditionalGeneration",
];

/// Those whose other readers were not looked at.
const OTHER_VISION_LANGUAGE: &[&str] = &[
    "Gemma3ForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
];

/// Engines that read experts of gpt-oss under names of their own.
const GPT_OSS: &[&str] = &["gpt_oss"];
const EXPERTS_BY_OTHER_NAMES: Has =
    Has::No("it reads experts of gpt-oss by names of its own, which this version does not write");

pub(super) const VLLM_CUDA: &[Fact] = &[
    fact(GPT_OSS, EXPERTS_BY_OTHER_NAMES, Basis::Read),
    fact(EXPERTS, Has::Yes, Basis::NotChecked),
    fact(LLAMAS, Has::Yes, Basis::Read),
    fact(OPT, Has::With(head_of_opt), Basis::Read),
    // Classes, and what becomes of names in either layout.
    fact(VISION_LANGUAGE, Has::Yes, Basis::Read),
];

pub(super) const VLLM_CPU: &[Fact] = &[
    fact(GPT_OSS, EXPERTS_BY_OTHER_NAMES, Basis::Read),
    fact(EXPERTS, Has::Yes, Basis::NotChecked),
    // Version 0.32.0, docs/formats/engines.md.
    fact(&["llama"], Has::Yes, Basis::Run),
    fact(&["mistral", "qwen2", "qwen3"], Has::Yes, Basis::Read),
    fact(OPT, Has::With(head_of_opt), Basis::Read),
    fact(VISION_LANGUAGE, Has::Yes, Basis::Read),
];

pub(super) const SGLANG: &[Fact] = &[
    fact(EXPERTS, Has::Yes, Basis::NotChecked),
    fact(LLAMAS, Has::Yes, Basis::Read),
    fact(OPT, Has::With(super::sglang::opt), Basis::Read),
];

pub(super) const TRANSFORMERS: &[Fact] = &[
    fact(
        &["gpt_oss", "granitemoe", "Qwen3VLMoeForConditionalGeneration"],
        Has::No("it does not read experts of this model one by one"),
        Basis::Read,
    ),
    fact(LLAMAS, Has::Yes, Basis::Run),
    fact(OPT, Has::Yes, Basis::Run),
    fact(EXPERTS, Has::Yes, Basis::Run),
    fact(OTHER_EXPERTS, Has::Yes, Basis::Run),
    fact(&["gemma4_text", "Gemma4ForConditionalGeneration"], Has::With(gemma4_without_experts), Basis::Run),
    fact(OTHER_DENSE, Has::With(compressed_tensors_alone), Basis::Run),
    fact(VISION_LANGUAGE, Has::Yes, Basis::Run),
    fact(OTHER_VISION_LANGUAGE, Has::Yes, Basis::Run),
];

pub(super) const TURBOMIND: &[Fact] = &[
    fact(EXPERTS, Has::Yes, Basis::NotChecked),
    fact(&["llama", "qwen2", "qwen3"], Has::Yes, Basis::Read),
    fact(&["mistral"], Has::No("Mistral is not among its models"), Basis::Read),
    fact(OPT, Has::No("OPT is not among its models"), Basis::Read),
];

pub(super) const MLX: &[Fact] = &[
    fact(EXPERTS, Has::Yes, Basis::NotChecked),
    fact(LLAMAS, Has::Yes, Basis::Read),
    fact(OPT, Has::Unsure("whether OPT is among its models"), Basis::NotChecked),
];

pub(super) const LLAMA_CPP: &[Fact] = &[
    fact(EXPERTS, Has::Yes, Basis::NotChecked),
    fact(&["llama"], Has::Yes, Basis::Run),
    fact(&["mistral", "qwen2", "qwen3"], Has::Yes, Basis::Read),
    fact(OPT, Has::No("OPT is not among the models that it converts"), Basis::Read),
];

/// The line that names the model of a checkpoint.
fn find<'a>(facts: &'a [Fact], outline: &Outline) -> Option<&'a Fact> {
    let model = outline.wrapper.unwrap_or(outline.family);
    facts.iter().find(|fact| fact.models.contains(&model))
}

/// How it is known whether the engine has the model.
pub(super) fn basis(facts: &[Fact], outline: &Outline) -> Basis {
    find(facts, outline).map_or(Basis::NotChecked, |fact| fact.basis)
}

/// What the engine's models say of a checkpoint, and where they do not decide, what its rules for linears do.
pub(super) fn verdict(facts: &[Fact], outline: &Outline, rules: impl FnOnce() -> Verdict) -> Verdict {
    match find(facts, outline).map(|fact| fact.has) {
        Some(Has::Yes) => rules(),
        Some(Has::With(own)) => own(outline).and(rules()),
        Some(Has::No(reason)) => No(reason.into()),
        Some(Has::Unsure(what)) => Unsure(what.into()),
        None => {
            let model = outline.wrapper.unwrap_or(outline.family);
            rules().and(Unsure(format!("how it runs {model} was not checked")))
        }
    }
}

/// OPT's head and embedding are made without a quantization in the sources that were seen, which are
/// older than this version.
fn head_of_opt(outline: &Outline) -> Verdict {
    match outline.head.is_some() || outline.embedding.is_some() {
        true => Unsure("whether its OPT reads a quantized head or embedding".into()),
        false => Yes,
    }
}

/// Experts of Gemma 4 are written one by one, and its class has them in one tensor.
fn gemma4_without_experts(outline: &Outline) -> Verdict {
    match outline.experts.is_empty() {
        true if outline.wrapper.is_some() => Yes,
        true => compressed_tensors_alone(outline),
        false => No("it does not read experts of this model one by one".into()),
    }
}

/// A family that was run in one format says nothing of the others.
fn compressed_tensors_alone(outline: &Outline) -> Verdict {
    match outline.container {
        "compressed-tensors" => Yes,
        other => Unsure(format!("how it runs {} in the {other} format was not checked", outline.family)),
    }
}
