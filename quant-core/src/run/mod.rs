//! Complete runs: a model directory goes in, and one or more checkpoints come out, each of which appears only when it
//! is complete and verified.
//!
//! [`quantize`] is the entry point. The calling program describes the job ([`QuantizeRequest`]) and provides its own
//! parts ([`Host`]): an observer, a cancel token, workers for tokenizers, and the models and texts that it knows by
//! name ([`Catalog`]). The command line and the Python package are two such programs.
//!
//! ```
//! use quant_core::calibrate::Corpus;
//! use quant_core::run::{Host, Nothing, QuantizeRequest, RecipeSettings, Text, quantize};
//! use quant_core::{CancelToken, Silent};
//! # mod tiny { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/support/tiny.rs")); }
//! # let temporary = tempfile::tempdir().unwrap();
//! # let path = temporary.path().join("model");
//! # std::fs::create_dir(&path).unwrap();
//! # tiny::tiny_llama(&path).unwrap();
//! # let out = temporary.path().join("out");
//!
//! // AWQ, calibrated on the given text.
//! let text = (0..4000).map(|i| format!("w{} ", i * i % 61)).collect::<String>();
//! let settings = RecipeSettings {
//!     method: Some("awq".into()),
//!     scheme: Some("w4a16-g32".into()),
//!     format: vec!["awq".into()],
//!     samples: Some(4),
//!     seq_len: Some(64),
//!     ..RecipeSettings::default()
//! };
//! let calibration = Some(Text::Given(Corpus::Texts(vec![text]), "numbers".into()));
//! let request = QuantizeRequest { settings, calibration, ..QuantizeRequest::new(&path, &out) };
//! let cancel = CancelToken::new();
//! let done = quantize(&request, &Host::new(&Silent, &cancel, &Nothing))?;
//! assert!(out.join("model.safetensors").is_file());
//! println!("{}", done.summary_json()?);
//! # Ok::<(), quant_core::Error>(())
//! ```

pub mod files;
mod floats;
mod gguf;
mod gguf_settings;
mod host;
mod memory;
mod misplaced;
mod model_card;
mod outputs;
mod quantize;
mod settings;
mod steps;
mod summary;
mod texts;

pub use crate::system::available_memory;
pub use crate::wording::bytes;
pub use floats::{FloatTensor, FloatsDone, FloatsReport};
pub use gguf::{GgufDone, GgufNeeds, GgufPlanned, bits_per_weight, plan_gguf, plan_gguf_with};
pub use gguf_settings::GgufSettings;
pub use host::{Catalog, Host, Nothing, Opened, open, open_with, prepared};
pub use memory::{MemoryBudget, residence};
pub use outputs::write;
pub(crate) use outputs::{refuse_existing, write_filled};
pub use quantize::{Done, QuantizeJob, QuantizeRequest, Quantized, is_gguf_name, quantize};
pub(crate) use quantize::{report_notes, warn_of_length, windows};
pub use settings::RecipeSettings;
pub(crate) use settings::{SettingFile, recipe_text};
pub use steps::{StepTime, StepTimes};
pub use summary::{
    Calibration, FloatsSummary, FullBatchLinears, GgufSummary, MIN_EXPERT_TOKENS, OutputSummary,
    QuantizeSummary, Replaced, Summary, UndersampledExpert, UndersampledLinears, Worst,
};
pub use texts::{BUILTIN, Documents, HELDOUT, Text, calibration, documents};
