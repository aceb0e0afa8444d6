//! Which models an engine supports: one fact for each engine and set of models, with its evidence.
//!
//! A model is a family (`llama`), or a class of vision-language models (`LlavaForConditionalGeneration`) with any text
//! model. Unless a fact states a version and a date, they are those of the engine's [`loader`](super::Engine::loader).

use super::Compatibility::{self, No, Unsure};
use super::families;
use super::outline::Outline;
use super::{AWQ, COMPRESSED_TENSORS, GPTQ};

/// The evidence that an engine supports a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Basis {
    /// A checkpoint of the model was loaded, and its results were compared.
    Run,
    /// The engine's sources were read.
    Read,
    /// The model was not checked.
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

#[derive(Debug, Clone, Copy)]
pub(super) enum Has {
    /// It does, with an additional rule for this model.
    With(fn(&Outline) -> Compatibility),
    Yes,
    No(&'static str),
    /// Unknown: the question that the sources do not answer.
    Unsure(&'static str),
}

/// The evidence for a statement about an engine, with the version and the date.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Known {
    /// The kind of evidence.
    pub basis: Basis,
    /// The version that was run or read.
    pub version: &'static str,
    /// The date on which it was run or read.
    pub date: &'static str,
}

#[derive(Debug)]
pub(super) struct Fact {
    pub(super) models: &'static [&'static str],
    /// The families of a class's text model; if empty: all.
    pub(super) texts: &'static [&'static str],
    /// The formats; if empty: all.
    pub(super) containers: &'static [&'static str],
    pub(super) has: Has,
    pub(super) basis: Basis,
    /// Version and date, if they differ from those of the engine's entry.
    pub(super) on: Option<(&'static str, &'static str)>,
}

const fn fact(models: &'static [&'static str], has: Has, basis: Basis) -> Fact {
    Fact { models, texts: &[], containers: &[], has, basis, on: None }
}

impl Fact {
    const fn on(self, version: &'static str, date: &'static str) -> Self {
        Self { on: Some((version, date)), ..self }
    }

    const fn around(self, texts: &'static [&'static str]) -> Self {
        Self { texts, ..self }
    }

    const fn within(self, containers: &'static [&'static str]) -> Self {
        Self { containers, ..self }
    }

    fn is_about(&self, outline: &Outline) -> bool {
        let is_among = |list: &[&str], name: &str| list.is_empty() || list.contains(&name);
        self.models.contains(&outline.wrapper.unwrap_or(outline.family))
            && is_among(self.texts, outline.family)
            && is_among(self.containers, outline.container)
    }
}

/// Decoders whose blocks differ from Llama's only in details.
const LLAMAS: &[&str] = &["llama", "mistral", "qwen2", "qwen3"];
const OPT: &[&str] = &["opt"];
const GPT2: &[&str] = &["gpt2"];
const BLOOM: &[&str] = &["bloom"];
const MINISTRAL3: &[&str] = &["ministral3"];
/// The format whose configuration can describe each module separately.
const BY_MODULE: &[&str] = &[COMPRESSED_TENSORS];
/// Families whose configuration class is code that comes with the model, so engines need `--trust-remote-code`.
const REMOTE: &[&str] = &["internlm2"];
/// Families whose attention uses the keys that an indexer selects.
const INDEXED: &[&str] = &["deepseek_v32", "glm_moe_dsa"];
const INDEXED_NOT_CHECKED: Has =
    Has::Unsure("whether it loads quantized models with an indexer was not checked");
/// The rules for experts decide, not the model.
const EXPERTS: &[&str] = &["mixtral", "qwen3_moe"];
/// transformers ran these with compressed-tensors checkpoints only.
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
/// transformers ran these with compressed-tensors checkpoints only.
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
/// transformers ran these at a later date, with compressed-tensors checkpoints only.
const NEWER_DENSE: &[&str] = &["internlm3", "bloom"];
/// Families in which only some models have experts. transformers cannot read their experts if these are stored
/// separately.
const EXPERTS_OR_NONE: &[&str] = &["granitemoehybrid", "gemma4_text"];
const VISION_LANGUAGE: &[&str] = &[
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "LlavaForConditionalGeneration",
];
/// The text model may be Mistral 4.
const MISTRAL3: &[&str] = &["Mistral3ForConditionalGeneration"];
const COHERE2_MOE: &[&str] = &["cohere2_moe"];
const LLAMA4: &[&str] = &["llama4_text", "Llama4ForConditionalGeneration"];
const PHIMOE: &[&str] = &["phimoe"];
const MISTRAL4: &[&str] = &["mistral4"];
/// Published Phi-3.5-MoE models have a different class name from the one that transformers saves.
const BY_PUBLISHED_CLASS: Has = Has::Unsure(
    "it has the class name of the published models, `PhiMoEForCausalLM`, but not the one that transformers \
    saves",
);
const MISTRAL4_ALONE: Has =
    Has::Unsure("it has no Mistral 4 class of this name; what it runs instead was not checked");

/// More classes of vision-language models that transformers ran.
const OTHER_VISION_LANGUAGE: &[&str] = &[
    "Gemma3ForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
];

/// Engines expect different tensor names for the experts of gpt-oss.
const GPT_OSS: &[&str] = &["gpt_oss"];
const EXPERTS_BY_OTHER_NAMES: Has =
    Has::No("it expects tensor names for gpt-oss experts that differ from those that quant writes");
/// vLLM reads an expert's gate and up from one tensor with alternating rows, and skips names that it does not know.
const SKIPS_EXPERTS: Has =
    Has::No("it skips separately stored gpt-oss experts without an error, so results are wrong");

/// The date on which most registries and classes of vLLM 0.33.0 and SGLang 0.5.23 were read.
const REGISTRIES: &str = "2026-11-25";
const VLLM: &str = "0.33.0";
const SGL: &str = "0.5.23";
/// A later date, on which more of the sources were read and more models were run.
const NEWER: &str = "2026-11-26";
/// The date of the latest reading.
const NEWEST: &str = "2026-11-27";
/// The version of vLLM whose CPU build was run.
pub(super) const CPU_BUILD: &str = "0.32.0";

/// Families that vLLM has a class for. The linears of the class can be quantized, their names equal quant's or are
/// mapped from them, and the same linears are fused as in quant.
const IN_VLLM: &[&str] = &[
    "granite",
    "ernie4_5",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "lfm2",
    "nemotron_h",
    "falcon_h1",
    "exaone4",
    "glm4",
    "phi3",
    "cohere",
    "cohere2",
    "qwen3_5_text",
    "qwen3_next",
    "internlm3",
    "qwen2_moe",
    "olmoe",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v2",
    "deepseek_v3",
    "minimax_m2",
    "ernie4_5_moe",
    "lfm2_moe",
    "qwen3_5_moe_text",
    "hy_v3",
    "granitemoehybrid",
];
const BY_TRANSFORMERS_IN_VLLM: &[&str] = &[
    "smollm3",
    "seed_oss",
    "hunyuan_v1_dense",
    "olmo2",
    "olmo3",
    "glm",
    "phi",
    "starcoder2",
    "gpt_neox",
    "hunyuan_v1_moe",
];
/// Classes that contain a text model of one of these families, with mapped names.
const CLASSES_IN_VLLM: &[&str] = &[
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
];

/// vLLM's CPU build ran these: the perplexity of a quantized random model equals that of quant
/// (`benchmarks/record/engines`).
const RUN_ON_CPU: &[&str] = &[
    "granite",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "glm4",
    "cohere",
    "cohere2",
    "exaone4",
    "ernie4_5",
    "falcon_h1",
    "granitemoehybrid",
    "nemotron_h",
    "phi3",
    "lfm2",
];
/// vLLM's CPU build and quant computed the same perplexity of a quantized random model.
const CLASSES_RUN_ON_CPU: &[&str] =
    &["Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration", "Qwen3_5ForConditionalGeneration"];
const RUN_BY_TRANSFORMERS: &[&str] =
    &["smollm3", "olmo2", "olmo3", "starcoder2", "gpt_neox", "phi", "seed_oss", "hunyuan_v1_dense", "glm"];

/// Families for which vLLM's CPU build gave results different from those of transformers and quant, in F32 too.
const DIFFERENT_ON_CPU: &[&str] = &["deepseek_v3", "ernie4_5_moe"];
const MINIMAX: &[&str] = &["minimax_m2"];

pub(super) const VLLM_CUDA: &[Fact] = &[
    fact(INDEXED, INDEXED_NOT_CHECKED, Basis::NotChecked),
    fact(MINIMAX, Has::With(families::experts_by_class), Basis::Read).on(CPU_BUILD, NEWER),
    fact(GPT_OSS, SKIPS_EXPERTS, Basis::Read).on(CPU_BUILD, NEWEST),
    fact(&["granitemoe"], Has::Yes, Basis::Read).on(CPU_BUILD, NEWEST),
    fact(EXPERTS, Has::Yes, Basis::Read).on(VLLM, REGISTRIES),
    fact(LLAMAS, Has::Yes, Basis::Read),
    fact(OPT, Has::With(families::head_of_opt), Basis::Read),
    fact(IN_VLLM, Has::Yes, Basis::Read).on(VLLM, REGISTRIES),
    fact(MINISTRAL3, Has::With(families::position_scale), Basis::Read).on(VLLM, REGISTRIES),
    fact(BLOOM, Has::With(families::parted_by_rows), Basis::Read).within(BY_MODULE).on(VLLM, REGISTRIES),
    fact(BLOOM, Has::No(families::PARTED_BY_ROWS), Basis::Read).on(VLLM, REGISTRIES),
    fact(GPT2, Has::With(families::no_transposed_codes), Basis::Read).within(BY_MODULE).on(VLLM, REGISTRIES),
    fact(GPT2, Has::Yes, Basis::Read).on(VLLM, REGISTRIES),
    fact(REMOTE, Has::With(families::remote_configuration), Basis::Read).on(VLLM, REGISTRIES),
    fact(BY_TRANSFORMERS_IN_VLLM, Has::With(families::by_transformers), Basis::Read).on(VLLM, REGISTRIES),
    // In either layout of tensor names.
    fact(VISION_LANGUAGE, Has::Yes, Basis::Read),
    fact(CLASSES_IN_VLLM, Has::Yes, Basis::Read).on(VLLM, REGISTRIES),
    fact(MISTRAL3, Has::With(families::mistral4_in_mistral3), Basis::Read).around(MISTRAL4),
    fact(MISTRAL3, Has::With(families::position_scale), Basis::Read).around(MINISTRAL3),
    fact(MISTRAL3, Has::Yes, Basis::Read),
    fact(COHERE2_MOE, Has::Yes, Basis::Read).on(CPU_BUILD, NEWER),
    fact(LLAMA4, Has::Yes, Basis::Read).on(CPU_BUILD, NEWER),
    fact(PHIMOE, BY_PUBLISHED_CLASS, Basis::Read).on(CPU_BUILD, NEWER),
    fact(MISTRAL4, MISTRAL4_ALONE, Basis::Read).on(CPU_BUILD, NEWER),
];

pub(super) const VLLM_CPU: &[Fact] = &[
    fact(INDEXED, INDEXED_NOT_CHECKED, Basis::NotChecked),
    fact(MINIMAX, Has::With(families::experts_by_class), Basis::Run).on(CPU_BUILD, NEWER),
    fact(
        DIFFERENT_ON_CPU,
        Has::Unsure("its CPU build gave different results from transformers and quant with random weights"),
        Basis::Run,
    )
    .on(CPU_BUILD, NEWER),
    fact(GPT_OSS, SKIPS_EXPERTS, Basis::Read).on(CPU_BUILD, NEWEST),
    fact(&["granitemoe"], Has::Yes, Basis::Run).on(CPU_BUILD, NEWEST),
    fact(EXPERTS, Has::Yes, Basis::Run).on(CPU_BUILD, NEWER),
    // See docs/formats/engines.md.
    fact(&["llama"], Has::Yes, Basis::Run).on(CPU_BUILD, "2026-11-23"),
    fact(&["mistral", "qwen2", "qwen3"], Has::Yes, Basis::Run).on(CPU_BUILD, REGISTRIES),
    fact(RUN_ON_CPU, Has::Yes, Basis::Run).on(CPU_BUILD, REGISTRIES),
    fact(&["qwen3_5_text", "qwen3_next"], Has::Yes, Basis::Run).on(CPU_BUILD, NEWER),
    fact(&["qwen2_moe", "glm4_moe", "lfm2_moe", "cohere2_moe", "olmoe"], Has::Yes, Basis::Run)
        .on(CPU_BUILD, NEWER),
    fact(&["hy_v3", "llama4_text"], Has::Yes, Basis::Run).on(CPU_BUILD, NEWER),
    fact(RUN_BY_TRANSFORMERS, Has::With(families::by_transformers), Basis::Run).on(CPU_BUILD, REGISTRIES),
    fact(MINISTRAL3, Has::With(families::position_scale), Basis::Run).on(CPU_BUILD, REGISTRIES),
    fact(BLOOM, Has::With(families::parted_by_rows), Basis::Run).within(BY_MODULE).on(CPU_BUILD, REGISTRIES),
    fact(BLOOM, Has::No(families::PARTED_BY_ROWS), Basis::Run).on(CPU_BUILD, REGISTRIES),
    fact(GPT2, Has::With(families::no_transposed_codes), Basis::Run)
        .within(BY_MODULE)
        .on(CPU_BUILD, REGISTRIES),
    fact(GPT2, Has::Yes, Basis::Run).on(CPU_BUILD, REGISTRIES),
    fact(OPT, Has::With(families::head_of_opt), Basis::Run).on(CPU_BUILD, REGISTRIES),
    fact(IN_VLLM, Has::Yes, Basis::Read).on(VLLM, REGISTRIES),
    fact(REMOTE, Has::With(families::remote_configuration), Basis::Read).on(VLLM, REGISTRIES),
    fact(BY_TRANSFORMERS_IN_VLLM, Has::With(families::by_transformers), Basis::Read).on(VLLM, REGISTRIES),
    fact(VISION_LANGUAGE, Has::Yes, Basis::Run).on(CPU_BUILD, NEWER),
    fact(CLASSES_RUN_ON_CPU, Has::Yes, Basis::Run).on(CPU_BUILD, NEWER),
    fact(CLASSES_IN_VLLM, Has::Yes, Basis::Read).on(VLLM, REGISTRIES),
    fact(MISTRAL3, Has::With(families::mistral4_in_mistral3), Basis::Run)
        .around(MISTRAL4)
        .on(CPU_BUILD, NEWER),
    fact(MISTRAL3, Has::With(families::position_scale), Basis::Run).around(MINISTRAL3).on(CPU_BUILD, NEWER),
    fact(MISTRAL3, Has::Yes, Basis::Run).on(CPU_BUILD, NEWER),
    fact(LLAMA4, Has::Yes, Basis::Read).on(CPU_BUILD, NEWER),
    fact(PHIMOE, BY_PUBLISHED_CLASS, Basis::Read).on(CPU_BUILD, NEWER),
    fact(MISTRAL4, MISTRAL4_ALONE, Basis::Read).on(CPU_BUILD, NEWER),
];

/// Families that SGLang has a class for, whose linears can be quantized and have the same names as in quant.
const IN_SGLANG: &[&str] = &[
    "granite",
    "ministral3",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "lfm2",
    "nemotron_h",
    "olmo2",
    "exaone4",
    "glm4",
    "phi3",
    "cohere",
    "cohere2",
    "starcoder2",
    "internlm3",
    "hunyuan_v1_dense",
    "qwen3_next",
    "qwen3_5_text",
    "hy_v3",
    "granitemoehybrid",
];
/// Families with experts that SGLang has a class for. It reads separately stored experts under the same names as in
/// quant, and keeps routers and gates of shared experts float.
const EXPERTS_IN_SGLANG: &[&str] = &[
    "mixtral",
    "qwen3_moe",
    "qwen2_moe",
    "olmoe",
    "glm4_moe",
    "minimax_m2",
    "ernie4_5_moe",
    "lfm2_moe",
    "qwen3_5_moe_text",
    "hunyuan_v1_moe",
    "cohere2_moe",
];
const LATENT_IN_SGLANG: &[&str] = &["deepseek_v2", "deepseek_v3", "glm4_moe_lite"];
/// Classes that contain a text model, and whose module names differ from the tensor names in the file.
const CLASSES_IN_SGLANG: &[&str] = &[
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Llama4ForConditionalGeneration",
];
/// A checkpoint cannot configure linears without names.
const UNNAMED_IN_SGLANG: &[&str] = &["phi", "falcon_h1"];
/// Families that SGLang has no class for under the names in their checkpoints.
const NOT_IN_SGLANG: &[&str] = &["smollm3", "seed_oss", "olmo3", "glm", "gpt_neox", "bloom", "ernie4_5"];

pub(super) const SGLANG: &[Fact] = &[
    fact(INDEXED, INDEXED_NOT_CHECKED, Basis::NotChecked),
    fact(EXPERTS_IN_SGLANG, Has::Yes, Basis::Read).on(SGL, NEWER),
    fact(LATENT_IN_SGLANG, Has::With(super::sglang::latent), Basis::Read).within(BY_MODULE).on(SGL, NEWER),
    fact(LATENT_IN_SGLANG, Has::With(super::sglang::latent_gptq), Basis::Read).within(&[GPTQ]).on(SGL, NEWER),
    fact(LATENT_IN_SGLANG, Has::Yes, Basis::Read).on(SGL, NEWER),
    fact(GPT_OSS, EXPERTS_BY_OTHER_NAMES, Basis::Read).on(SGL, NEWER),
    fact(
        &["granitemoe"],
        Has::Unsure(
            "whether it supports packed Granite experts with the tensor names that quant writes was \
            not checked",
        ),
        Basis::Read,
    )
    .on(SGL, NEWER),
    fact(CLASSES_IN_SGLANG, Has::With(super::sglang::container), Basis::Read).on(SGL, NEWER),
    fact(MISTRAL3, Has::With(families::mistral4_in_mistral3), Basis::Read).around(MISTRAL4).on(SGL, NEWER),
    fact(MISTRAL3, Has::With(super::sglang::container), Basis::Read).on(SGL, NEWER),
    fact(
        &["llama4_text"],
        Has::Unsure("which tensor names its text-only class expects for experts was not checked"),
        Basis::Read,
    )
    .on(SGL, NEWER),
    fact(PHIMOE, BY_PUBLISHED_CLASS, Basis::Read).on(SGL, NEWER),
    fact(MISTRAL4, MISTRAL4_ALONE, Basis::Read).on(SGL, NEWER),
    fact(LLAMAS, Has::Yes, Basis::Read),
    fact(OPT, Has::With(super::sglang::opt), Basis::Read),
    fact(IN_SGLANG, Has::Yes, Basis::Read).on(SGL, REGISTRIES),
    fact(GPT2, Has::With(families::no_transposed_codes), Basis::Read).within(BY_MODULE).on(SGL, REGISTRIES),
    fact(GPT2, Has::Yes, Basis::Read).on(SGL, REGISTRIES),
    fact(REMOTE, Has::With(families::remote_configuration), Basis::Read).on(SGL, REGISTRIES),
    fact(UNNAMED_IN_SGLANG, Has::With(super::sglang::unnamed), Basis::Read).on(SGL, REGISTRIES),
    fact(
        NOT_IN_SGLANG,
        Has::Unsure(
            "it has no class for this family; what it loads through transformers' classes was not checked",
        ),
        Basis::Read,
    )
    .on(SGL, REGISTRIES),
];

/// Families whose checkpoints transformers ran in the AWQ and GPTQ formats.
const IN_COLUMNS: &[&str] = &[
    "smollm3",
    "granite",
    "ministral3",
    "seed_oss",
    "ernie4_5",
    "hunyuan_v1_dense",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "olmo2",
    "olmo3",
    "exaone4",
    "glm",
    "glm4",
    "phi3",
    "phi",
    "cohere",
    "cohere2",
    "internlm3",
    "lfm2",
    "falcon_h1",
    "nemotron_h",
    "granitemoehybrid",
];
/// Families with an activation function between two linears, for which gptqmodel requires a scale in the AWQ format.
const SCALED_ACTIVATIONS: &[&str] = &["starcoder2", "gpt_neox", "bloom"];

/// The version that the interop tests run on every change or every night.
const TRANSFORMERS_5: &str = "5.23.0";

pub(super) const TRANSFORMERS: &[Fact] = &[
    fact(INDEXED, Has::Yes, Basis::Run).on(TRANSFORMERS_5, NEWEST),
    fact(
        &["gpt_oss", "granitemoe", "Qwen3VLMoeForConditionalGeneration"],
        Has::No("it does not support separately stored experts for this model"),
        Basis::Read,
    ),
    fact(
        &["mistral4"],
        Has::No("it does not support separately stored experts for this model"),
        Basis::Read,
    )
    .on(TRANSFORMERS_5, NEWER),
    fact(MISTRAL3, Has::With(families::without_experts), Basis::Run),
    fact(&["phimoe", "cohere2_moe", "llama4_text", "Llama4ForConditionalGeneration"], Has::Yes, Basis::Run).on(TRANSFORMERS_5, NEWER),
    fact(
        GPT2,
        Has::No("its class for this family uses a linear layer that its loaders do not support"),
        Basis::Read,
    )
    .on(TRANSFORMERS_5, REGISTRIES),
    fact(REMOTE, Has::No("it does not include a class for this family"), Basis::Read)
        .on(TRANSFORMERS_5, REGISTRIES),
    fact(LLAMAS, Has::Yes, Basis::Run),
    fact(OPT, Has::Yes, Basis::Run),
    fact(EXPERTS, Has::Yes, Basis::Run),
    fact(OTHER_EXPERTS, Has::Yes, Basis::Run).on(TRANSFORMERS_5, "2026-11-24"),
    fact(&["hy_v3"], Has::Yes, Basis::Run).on(TRANSFORMERS_5, REGISTRIES),
    fact(IN_COLUMNS, Has::Yes, Basis::Run).within(&[AWQ, GPTQ]).on(TRANSFORMERS_5, NEWER),
    fact(
        SCALED_ACTIVATIONS,
        Has::No("in this format it requires scales of the activation function, which the checkpoint does not have"),
        Basis::Run,
    )
    .within(&[AWQ])
    .on(TRANSFORMERS_5, NEWER),
    fact(SCALED_ACTIVATIONS, Has::Yes, Basis::Run).within(&[GPTQ]).on(TRANSFORMERS_5, NEWER),
    fact(&["qwen3_5_text", "qwen3_next"], Has::Yes, Basis::Run).within(&[AWQ]).on(TRANSFORMERS_5, NEWER),
    fact(
        &["qwen3_5_text", "qwen3_next", "Qwen3_5ForConditionalGeneration"],
        Has::No("it treats all linears as quantized in this format, but some linears of this family stay float"),
        Basis::Run,
    )
    .within(&[GPTQ])
    .on(TRANSFORMERS_5, NEWER),
    fact(EXPERTS_OR_NONE, Has::With(families::without_experts), Basis::Run)
        .within(BY_MODULE)
        .on(TRANSFORMERS_5, REGISTRIES),
    fact(EXPERTS_OR_NONE, Has::With(families::other_format_without_experts), Basis::Run)
        .on(TRANSFORMERS_5, REGISTRIES),
    fact(&["Gemma4ForConditionalGeneration"], Has::With(families::without_experts), Basis::Run)
        .on(TRANSFORMERS_5, REGISTRIES),
    fact(OTHER_DENSE, Has::Yes, Basis::Run).within(BY_MODULE).on(TRANSFORMERS_5, "2026-11-24"),
    fact(OTHER_DENSE, Has::With(families::other_format), Basis::Run).on(TRANSFORMERS_5, "2026-11-24"),
    fact(NEWER_DENSE, Has::Yes, Basis::Run).within(BY_MODULE).on(TRANSFORMERS_5, REGISTRIES),
    fact(NEWER_DENSE, Has::With(families::other_format), Basis::Run).on(TRANSFORMERS_5, REGISTRIES),
    fact(VISION_LANGUAGE, Has::Yes, Basis::Run),
    fact(OTHER_VISION_LANGUAGE, Has::Yes, Basis::Run),
];

pub(super) const TURBOMIND: &[Fact] = &[
    fact(EXPERTS, Has::Yes, Basis::NotChecked),
    fact(&["llama", "qwen2", "qwen3"], Has::Yes, Basis::Read),
    fact(&["mistral"], Has::No("it does not support Mistral"), Basis::Read),
    fact(OPT, Has::No("it does not support OPT"), Basis::Read),
];

pub(super) const MLX: &[Fact] = &[
    fact(EXPERTS, Has::Yes, Basis::NotChecked),
    fact(&["llama"], Has::Yes, Basis::Run).on("0.32.2", "2026-11-27"),
    fact(LLAMAS, Has::Yes, Basis::Read),
    fact(OPT, Has::Unsure("whether it supports OPT was not checked"), Basis::NotChecked),
];

pub(super) const ORT_GENAI: &[Fact] = &[
    fact(EXPERTS, Has::Yes, Basis::NotChecked),
    fact(&["llama"], Has::Yes, Basis::Run),
    fact(&["mistral", "qwen2", "qwen3"], Has::Yes, Basis::Read),
    fact(OPT, Has::No("it does not support OPT"), Basis::Read),
];
pub(super) const LLAMA_CPP: &[Fact] = &[
    fact(EXPERTS, Has::Yes, Basis::NotChecked),
    fact(&["llama"], Has::Yes, Basis::Run),
    fact(&["mistral", "qwen2", "qwen3"], Has::Yes, Basis::Read),
    fact(OPT, Has::No("it does not support OPT"), Basis::Read),
];

fn find<'a>(facts: &'a [Fact], outline: &Outline) -> Option<&'a Fact> {
    facts.iter().find(|fact| fact.is_about(outline))
}

/// `engine` is the default version and date.
pub(super) fn known(facts: &[Fact], outline: &Outline, engine: (&'static str, &'static str)) -> Known {
    let fact = find(facts, outline);
    let basis = fact.map_or(Basis::NotChecked, |fact| fact.basis);
    let (version, date) = fact.and_then(|fact| fact.on).unwrap_or(engine);
    Known { basis, version, date }
}

/// Returns the verdict for a checkpoint. If the first fact that applies to it is neither `No` nor `Unsure`, it is
/// combined with the `rules` for linears; without such a fact, the verdict is at best `Unsure`.
pub(super) fn verdict(
    facts: &[Fact],
    outline: &Outline,
    rules: impl FnOnce() -> Compatibility,
) -> Compatibility {
    match find(facts, outline).map(|fact| fact.has) {
        Some(Has::Yes) => rules(),
        Some(Has::With(own)) => own(outline).and(rules()),
        Some(Has::No(reason)) => No(reason.into()),
        Some(Has::Unsure(what)) => Unsure(what.into()).and(rules()),
        None => {
            let model = outline.wrapper.unwrap_or(outline.family);
            rules().and(Unsure(format!("how it runs {model} was not checked")))
        }
    }
}
