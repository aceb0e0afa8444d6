//! Complete runs: a model directory goes in, and one or more checkpoints come out, each of which appears only when it
//! is complete and verified.
//!
//! [`quantize`] is the entry point. The calling program describes the job ([`QuantizeRequest`]) and provides its own
//! parts ([`Host`]): an observer, a cancel token, workers for tokenizers, and the models and texts that it knows by
//! name ([`Catalog`]). The command line and the Python package are two such programs.
//!
//! ```no_run
//! use quant_core::run::{Host, Nothing, QuantizeRequest, RecipeSettings, quantize};
//! use quant_core::{CancelToken, Silent};
//!
//! # fn main() -> quant_core::Result<()> {
//! let settings = RecipeSettings { method: Some("rtn".into()), ..RecipeSettings::default() };
//! let request = QuantizeRequest { settings, ..QuantizeRequest::new("model", "out") };
//! let cancel = CancelToken::new();
//! let done = quantize(&request, &Host::new(&Silent, &cancel, &Nothing))?;
//! println!("{}", done.summary_json()?);
//! # Ok(())
//! # }
//! ```

pub mod files;
mod gguf;
mod gguf_settings;
mod host;
mod memory;
mod model_card;
mod outputs;
mod quantize;
mod settings;
mod steps;
mod summary;
mod texts;

pub use gguf::{GgufDone, bits_per_weight, plan_gguf};
pub use gguf_settings::GgufSettings;
pub use host::{Catalog, Host, Nothing, Opened, open, prepared};
pub use memory::{MemoryBudget, available_memory, residence};
pub use outputs::write;
pub use quantize::{Done, QuantizeJob, QuantizeRequest, Quantized, quantize};
pub use settings::RecipeSettings;
pub use steps::{StepTime, StepTimes};
pub use summary::{
    Calibration, FullBatchLinears, GgufSummary, MIN_EXPERT_TOKENS, Output, QuantizeSummary, Replaced,
    Summary, UndersampledLinears, Worst, bytes,
};
pub use texts::{BUILTIN, HELDOUT, Text, calibration, documents};
