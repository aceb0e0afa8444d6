//! Which engines load the result of a plan, and on how many ranks.
//!
//! [`ENGINES`] lists each engine with the version whose sources were read, the date, and the formats that it can read,
//! each with its rules. For the evidence, see `docs/formats/engines.md`. A rule is a function of an [`Outline`]: the
//! linears as engines see them, with queries, keys and values (and gate and up) fused, and split over ranks. Names of
//! formats and families occur only in tables; rules do not compare names.

mod experts;
mod families;
mod models;
mod others;
mod outline;
mod sglang;
mod sharding;
mod vllm;

use crate::format::loaders::{self, Loader};

pub use models::{Basis, Known};
pub use outline::{FusedLayer, FusedPart, LayerKind, Outline};

/// The numbers of tensor-parallel ranks that are checked.
pub const RANKS: [usize; 4] = [1, 2, 4, 8];

/// Whether an engine loads a checkpoint. Variants are ordered from best to worst.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Compatibility {
    /// It loads and runs on the engine's fast path.
    Yes,
    /// It loads, with a caveat: a slower kernel, or a required option.
    With(String),
    /// Unknown: the sources do not answer the question.
    Unsure(String),
    /// It fails to load, or gives different results.
    No(String),
}

impl Compatibility {
    /// `yes`, `yes, but`, `unsure`, `no`.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Yes => "yes",
            Self::With(_) => "yes, but",
            Self::Unsure(_) => "unsure",
            Self::No(_) => "no",
        }
    }

    /// The reason; `None` for [`Yes`](Self::Yes).
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Yes => None,
            Self::With(reason) | Self::Unsure(reason) | Self::No(reason) => Some(reason),
        }
    }

    /// The worse of the two, or the first if both are equally bad.
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

#[derive(Debug)]
struct Reading {
    container: &'static str,
    /// The rule for linears, given the number of ranks.
    loads: fn(&Outline, usize) -> Compatibility,
    /// The additional rule for models with experts.
    experts: fn(&Outline) -> Compatibility,
    /// The Python packages that the format needs in addition to the engine.
    packages: Option<&'static str>,
}

impl Reading {
    const fn with_packages(self, packages: &'static str) -> Reading {
        Reading { packages: Some(packages), ..self }
    }
}

const fn reading(
    container: &'static str,
    loads: fn(&Outline, usize) -> Compatibility,
    experts: fn(&Outline) -> Compatibility,
) -> Reading {
    Reading { container, loads, experts, packages: None }
}

/// An engine at one version.
#[derive(Debug)]
#[non_exhaustive]
pub struct Engine {
    /// Its name, with the device or tool if that matters.
    pub name: &'static str,
    /// The program, with the version whose sources were read and the date.
    pub loader: Loader,
    /// The version that was run, if that is not the one whose sources were read.
    pub run: Option<&'static str>,
    /// The command or call that loads a checkpoint from the directory `OUT`.
    pub command: &'static str,
    /// Whether the engine is so common that `quant quantize` prints a note if it would not load the result.
    pub is_common: bool,
    tensor_parallel: bool,
    models: &'static [models::Fact],
    reads: &'static [Reading],
}

impl Engine {
    /// Returns the version that was run; if none was, that whose sources were read.
    pub fn version(&self) -> &'static str {
        self.run.unwrap_or(self.loader.version)
    }

    fn reading(&self, outline: &Outline) -> Option<&'static Reading> {
        self.reads.iter().find(|reading| reading.container == outline.container)
    }

    /// Returns the Python packages that must be installed in addition to the engine, separated by spaces.
    pub(crate) fn packages(&self, outline: &Outline) -> Option<&'static str> {
        self.reading(outline)?.packages
    }

    /// Returns whether the engine loads a checkpoint on `ranks` ranks; `None` if `ranks` is greater than 1 and the
    /// engine has no tensor parallelism.
    pub fn loads(&self, outline: &Outline, ranks: usize) -> Option<Compatibility> {
        (ranks == 1 || self.tensor_parallel).then(|| {
            let Some(rules) = self.reading(outline) else {
                return Compatibility::No(format!("it does not support the {} format", outline.container));
            };
            models::verdict(self.models, outline, || match outline.experts.is_empty() {
                true => (rules.loads)(outline, ranks),
                false => match ((rules.loads)(outline, ranks), (rules.experts)(outline)) {
                    (Compatibility::With(linears), Compatibility::With(experts)) if linears != experts => {
                        Compatibility::With(format!("{linears}; {experts}"))
                    }
                    (linears, experts) => linears.and(experts),
                },
            })
        })
    }

    /// Returns the evidence for whether the engine supports the model.
    pub fn basis(&self, outline: &Outline) -> Basis {
        self.known(outline).basis
    }

    /// Returns the evidence for whether the engine supports the model, with the engine's version and the date.
    pub fn known(&self, outline: &Outline) -> Known {
        models::known(self.models, outline, (self.loader.version, self.loader.read))
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
/// use quant_core::engines::{Compatibility, ENGINES, Outline};
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
/// assert!(matches!(transformers.loads(&outline, 1), Some(Compatibility::Yes | Compatibility::With(_))));
/// # Ok::<(), quant_core::Error>(())
/// ```
pub static ENGINES: &[Engine] = &[
    Engine {
        name: "vLLM, CUDA",
        loader: loaders::VLLM,
        run: None,
        command: "vllm serve OUT",
        is_common: true,
        tensor_parallel: true,
        models: models::VLLM_CUDA,
        reads: &[
            reading(COMPRESSED_TENSORS, vllm::cuda, experts::vllm_cuda),
            reading(AWQ, vllm::cuda_awq, experts::vllm_cuda),
            reading(GPTQ, vllm::cuda_gptq, experts::vllm_cuda_gptq),
            reading(MODELOPT, vllm::cuda, experts::vllm_cuda),
        ],
    },
    Engine {
        name: "vLLM, CPU",
        loader: loaders::VLLM,
        run: Some(models::CPU_BUILD),
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
        loader: loaders::SGLANG,
        run: None,
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
        loader: loaders::TRANSFORMERS,
        run: None,
        command: "AutoModelForCausalLM.from_pretrained(\"OUT\")",
        is_common: true,
        tensor_parallel: false,
        models: models::TRANSFORMERS,
        reads: &[
            reading(COMPRESSED_TENSORS, others::transformers, experts::transformers)
                .with_packages("compressed-tensors"),
            reading(AWQ, others::transformers_awq, experts::transformers_others).with_packages("gptqmodel"),
            reading(GPTQ, others::transformers_gptq, experts::transformers_others)
                .with_packages("gptqmodel optimum"),
        ],
    },
    Engine {
        name: "LMDeploy TurboMind",
        loader: loaders::LMDEPLOY,
        run: None,
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
        loader: loaders::MLX,
        run: None,
        command: "mlx_lm.generate --model OUT --prompt TEXT",
        is_common: false,
        tensor_parallel: false,
        models: models::MLX,
        reads: &[reading(AWQ, others::mlx, experts::not_followed)],
    },
    Engine {
        name: "ONNX Runtime GenAI",
        loader: loaders::ORT_GENAI,
        run: None,
        command: "python -m onnxruntime_genai.models.builder -i OUT -o ONNX -p int4 -e cpu \
                  --extra_options nodes_to_exclude=/lm_head/MatMul",
        is_common: false,
        tensor_parallel: false,
        models: models::ORT_GENAI,
        reads: &[
            reading(AWQ, others::ort_genai, experts::not_followed),
            reading(GPTQ, others::ort_genai, experts::not_followed),
        ],
    },
    Engine {
        name: "llama.cpp, converter",
        loader: loaders::LLAMA_CPP,
        run: None,
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
