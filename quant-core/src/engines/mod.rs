//! Which engines load what a plan writes, and on how many ranks.
//!
//! Each engine is a file of rules that were read from its sources at one version, on the day
//! [`READ`]; `docs/formats/engines.md` says what they rest on, and what of it was run. A rule
//! looks at an [`Outline`]: the linears as engines see them, with queries, keys and values (and gate
//! and up) fused, and split over ranks (`sharding`). Which models an engine has is a table (`models`).

mod experts;
mod families;
mod models;
mod others;
mod outline;
mod sglang;
mod sharding;
mod vllm;

pub use models::{Basis, Known};
pub use outline::{FusedLayer, LayerKind, Outline, Part};

/// The day on which the engines' sources were read.
pub const READ: &str = "2026-11-22";
/// Numbers of tensor-parallel ranks that are looked at.
pub const RANKS: [usize; 4] = [1, 2, 4, 8];

/// Whether an engine loads a checkpoint, from best to worst.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// On its fast path.
    Yes,
    /// Loads, with a remark: a slower kernel, or an option that it needs.
    With(String),
    /// The sources do not tell.
    Unsure(String),
    /// Fails to load, or computes something else.
    No(String),
}

impl Verdict {
    /// `yes`, `yes, but`, `unsure`, `no`.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Yes => "yes",
            Self::With(_) => "yes, but",
            Self::Unsure(_) => "unsure",
            Self::No(_) => "no",
        }
    }

    /// The reason, where it is not a plain yes.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Yes => None,
            Self::With(reason) | Self::Unsure(reason) | Self::No(reason) => Some(reason),
        }
    }

    /// The worse of the two; of equally bad ones the first.
    fn and(self, other: Self) -> Self {
        let rank = |v: &Self| match v {
            Self::Yes => 0,
            Self::With(_) => 1,
            Self::Unsure(_) => 2,
            Self::No(_) => 3,
        };
        if rank(&other) > rank(&self) { other } else { self }
    }
}

/// An engine at one version.
#[derive(Debug)]
pub struct Engine {
    /// What it is called, with the way it is run where that matters.
    pub name: &'static str,
    /// The version whose sources were read.
    pub version: &'static str,
    /// How it is given a checkpoint in the directory `OUT`.
    pub command: &'static str,
    /// Whether users of either container are likely to mean it, so that they are warned of a "no".
    pub is_common: bool,
    /// Whether it splits linears over ranks.
    tensor_parallel: bool,
    /// The models that it has.
    models: &'static [models::Fact],
    /// The containers that it has a reader for; `loads` looks at these.
    reads: &'static [&'static str],
    loads: fn(&Outline, usize) -> Verdict,
    /// What holds besides where blocks have experts.
    experts: fn(&Outline) -> Verdict,
}

impl Engine {
    /// Whether it loads a checkpoint on so many ranks; `None` where it knows only one.
    pub fn loads(&self, outline: &Outline, ranks: usize) -> Option<Verdict> {
        (ranks == 1 || self.tensor_parallel).then(|| match self.reads.contains(&outline.container) {
            true => models::verdict(self.models, outline, || match outline.experts.is_empty() {
                true => (self.loads)(outline, ranks),
                false => (self.loads)(outline, ranks).and((self.experts)(outline)),
            }),
            false => Verdict::No(format!("it does not read the {} format", outline.container)),
        })
    }
}

impl Engine {
    /// How it is known whether the engine has the model at all.
    pub fn basis(&self, outline: &Outline) -> Basis {
        self.known(outline).basis
    }

    /// The same, with the version of the engine and the day.
    pub fn known(&self, outline: &Outline) -> Known {
        models::known(self.models, outline, (self.version, READ))
    }
}

/// What most engines read.
const USUAL: &[&str] = &["compressed-tensors", "awq", "gptq"];
/// The same, and ModelOpt's layout of NVFP4.
const WITH_MODELOPT: &[&str] = &["compressed-tensors", "awq", "gptq", "modelopt"];

/// The engines whose rules are known.
pub static ENGINES: &[Engine] = &[
    Engine {
        name: "vLLM, CUDA",
        version: "0.33.0",
        command: "vllm serve OUT",
        is_common: true,
        tensor_parallel: true,
        reads: WITH_MODELOPT,
        models: models::VLLM_CUDA,
        loads: vllm::cuda,
        experts: experts::not_followed,
    },
    Engine {
        name: "vLLM, CPU",
        version: "0.33.0",
        command: "vllm serve OUT",
        is_common: false,
        tensor_parallel: true,
        reads: USUAL,
        models: models::VLLM_CPU,
        loads: vllm::cpu,
        experts: experts::vllm_cpu,
    },
    Engine {
        name: "SGLang, CUDA",
        version: "0.5.23",
        command: "python -m sglang.launch_server --model-path OUT",
        is_common: true,
        tensor_parallel: true,
        reads: WITH_MODELOPT,
        models: models::SGLANG,
        loads: sglang::cuda,
        experts: sglang::experts,
    },
    Engine {
        name: "transformers",
        version: "5.23.0",
        command: "AutoModelForCausalLM.from_pretrained(\"OUT\")",
        is_common: true,
        tensor_parallel: false,
        reads: USUAL,
        models: models::TRANSFORMERS,
        loads: others::transformers,
        experts: experts::transformers,
    },
    Engine {
        name: "LMDeploy TurboMind",
        version: "0.18.0",
        command: "lmdeploy serve api_server OUT --backend turbomind",
        is_common: false,
        tensor_parallel: true,
        reads: USUAL,
        models: models::TURBOMIND,
        loads: others::turbomind,
        experts: experts::not_followed,
    },
    Engine {
        name: "mlx-lm",
        version: "0.32.2",
        command: "mlx_lm.generate --model OUT --prompt TEXT",
        is_common: false,
        tensor_parallel: false,
        reads: &["awq"],
        models: models::MLX,
        loads: others::mlx,
        experts: experts::not_followed,
    },
    Engine {
        name: "llama.cpp, converter",
        version: "0.5.0",
        command: "convert_hf_to_gguf.py OUT",
        is_common: false,
        tensor_parallel: false,
        reads: &["compressed-tensors", "gptq", "modelopt"],
        models: models::LLAMA_CPP,
        loads: others::llama_cpp,
        experts: experts::not_followed,
    },
];

#[cfg(test)]
#[path = "engines_tests.rs"]
mod tests;
