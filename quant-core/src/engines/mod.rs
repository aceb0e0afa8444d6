//! Which engines load what a plan writes, and on how many ranks.
//!
//! [`ENGINES`] is a table: each engine at the version whose sources were read, the day, and the containers that it has a
//! reader for, each with its rules; `docs/formats/engines.md` says what they rest on, and what of it was run. A rule is a
//! function of an [`Outline`]: the linears as engines see them, with queries, keys and values (and gate and up) fused, and
//! split over ranks. Which models an engine has is a table too (`models`), and so is what containers ask of a split
//! (`sharding`). Names of containers and families stand in these tables alone: no rule looks at them.

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

/// What an engine does with the checkpoints of one container.
#[derive(Debug)]
struct Reading {
    /// The container's name.
    container: &'static str,
    /// What holds for linears, on so many ranks.
    loads: fn(&Outline, usize) -> Verdict,
    /// What holds besides where blocks have experts.
    experts: fn(&Outline) -> Verdict,
}

const fn reading(
    container: &'static str,
    loads: fn(&Outline, usize) -> Verdict,
    experts: fn(&Outline) -> Verdict,
) -> Reading {
    Reading { container, loads, experts }
}

/// An engine at one version.
#[derive(Debug)]
#[non_exhaustive]
pub struct Engine {
    /// What it is called, with the way it is run where that matters.
    pub name: &'static str,
    /// The version whose sources were read.
    pub version: &'static str,
    /// The day on which they were read.
    pub read: &'static str,
    /// How it is given a checkpoint in the directory `OUT`.
    pub command: &'static str,
    /// Whether users of either container are likely to mean it, so that they are warned of a "no".
    pub is_common: bool,
    /// Whether it splits linears over ranks.
    tensor_parallel: bool,
    /// The models that it has.
    models: &'static [models::Fact],
    /// The containers that it has a reader for, each with its rules.
    reads: &'static [Reading],
}

impl Engine {
    /// Whether it loads a checkpoint on so many ranks; `None` where it knows only one.
    pub fn loads(&self, outline: &Outline, ranks: usize) -> Option<Verdict> {
        (ranks == 1 || self.tensor_parallel).then(|| {
            let Some(rules) = self.reads.iter().find(|reading| reading.container == outline.container) else {
                return Verdict::No(format!("it does not read the {} format", outline.container));
            };
            models::verdict(self.models, outline, || match outline.experts.is_empty() {
                true => (rules.loads)(outline, ranks),
                false => (rules.loads)(outline, ranks).and((rules.experts)(outline)),
            })
        })
    }

    /// How it is known whether the engine has the model at all.
    pub fn basis(&self, outline: &Outline) -> Basis {
        self.known(outline).basis
    }

    /// The same, with the version of the engine and the day.
    pub fn known(&self, outline: &Outline) -> Known {
        models::known(self.models, outline, (self.version, self.read))
    }
}

const COMPRESSED_TENSORS: &str = "compressed-tensors";
const AWQ: &str = "awq";
const GPTQ: &str = "gptq";
const MODELOPT: &str = "modelopt";

/// The engines whose rules are known.
///
/// ```
/// use quant_core::checkpoint::ModelDirectory;
/// use quant_core::engines::{ENGINES, Outline, Verdict};
/// use quant_core::model::Model;
/// use quant_core::recipe::{Plan, Recipe};
/// # mod tiny { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/support/tiny.rs")); }
/// # let temporary = tempfile::tempdir().unwrap();
/// # let path = temporary.path();
/// # tiny::tiny_llama(path).unwrap();
///
/// let model = Model::open(&ModelDirectory::open(path)?)?;
/// let recipe = Recipe { scheme: "w4a16-g32".parse()?, ..Recipe::preset("awq-w4a16")? };
/// let outline = Outline::new(&Plan::new(&model, &recipe, recipe.containers[0])?, &model);
/// let transformers = ENGINES.iter().find(|engine| engine.name == "transformers").unwrap();
/// assert!(matches!(transformers.loads(&outline, 1), Some(Verdict::Yes | Verdict::With(_))));
/// # Ok::<(), quant_core::Error>(())
/// ```
pub static ENGINES: &[Engine] = &[
    Engine {
        name: "vLLM, CUDA",
        version: "0.33.0",
        read: READ,
        command: "vllm serve OUT",
        is_common: true,
        tensor_parallel: true,
        models: models::VLLM_CUDA,
        reads: &[
            reading(COMPRESSED_TENSORS, vllm::cuda, experts::not_followed),
            reading(AWQ, vllm::cuda_awq, experts::not_followed),
            reading(GPTQ, vllm::cuda_gptq, experts::not_followed),
            reading(MODELOPT, vllm::cuda, experts::not_followed),
        ],
    },
    Engine {
        name: "vLLM, CPU",
        version: "0.33.0",
        read: READ,
        command: "vllm serve OUT",
        is_common: false,
        tensor_parallel: true,
        models: models::VLLM_CPU,
        reads: &[
            reading(COMPRESSED_TENSORS, vllm::cpu, experts::vllm_cpu),
            reading(AWQ, vllm::cpu, experts::vllm_cpu),
            reading(GPTQ, vllm::cpu_gptq, experts::vllm_cpu),
        ],
    },
    Engine {
        name: "SGLang, CUDA",
        version: "0.5.23",
        read: READ,
        command: "python -m sglang.launch_server --model-path OUT",
        is_common: true,
        tensor_parallel: true,
        models: models::SGLANG,
        reads: &[
            reading(COMPRESSED_TENSORS, sglang::cuda, sglang::experts),
            reading(AWQ, sglang::cuda_awq, sglang::experts_of_others),
            reading(GPTQ, sglang::cuda_gptq, sglang::experts_of_others),
            reading(MODELOPT, sglang::cuda, sglang::experts_of_others),
        ],
    },
    Engine {
        name: "transformers",
        version: "5.23.0",
        read: READ,
        command: "AutoModelForCausalLM.from_pretrained(\"OUT\")",
        is_common: true,
        tensor_parallel: false,
        models: models::TRANSFORMERS,
        reads: &[
            reading(COMPRESSED_TENSORS, others::transformers, experts::transformers),
            reading(AWQ, others::transformers_awq, experts::transformers_others),
            reading(GPTQ, others::transformers_gptq, experts::transformers_others),
        ],
    },
    Engine {
        name: "LMDeploy TurboMind",
        version: "0.18.0",
        read: READ,
        command: "lmdeploy serve api_server OUT --backend turbomind",
        is_common: false,
        tensor_parallel: true,
        models: models::TURBOMIND,
        reads: &[
            reading(COMPRESSED_TENSORS, others::turbomind, experts::not_followed),
            reading(AWQ, others::turbomind_awq, experts::not_followed),
            reading(GPTQ, others::turbomind_gptq, experts::not_followed),
        ],
    },
    Engine {
        name: "mlx-lm",
        version: "0.32.2",
        read: READ,
        command: "mlx_lm.generate --model OUT --prompt TEXT",
        is_common: false,
        tensor_parallel: false,
        models: models::MLX,
        reads: &[reading(AWQ, others::mlx, experts::not_followed)],
    },
    Engine {
        name: "llama.cpp, converter",
        version: "0.5.0",
        read: READ,
        command: "convert_hf_to_gguf.py OUT",
        is_common: false,
        tensor_parallel: false,
        models: models::LLAMA_CPP,
        reads: &[
            reading(COMPRESSED_TENSORS, others::llama_cpp, experts::not_followed),
            reading(GPTQ, others::llama_cpp_gptq, experts::not_followed),
            reading(MODELOPT, others::llama_cpp, experts::not_followed),
        ],
    },
];

#[cfg(test)]
#[path = "engines_tests.rs"]
mod tests;
