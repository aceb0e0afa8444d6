//! The third stage of the path: text becomes token windows, and the inputs of linears are observed.
//!
//! ```text
//! file or set ─► documents ─► tokens ─► windows ─► hidden states ─► statistics
//! ```

mod observe;
mod text;
mod tokenizer;
mod windows;

pub use observe::{AbsMean, BatchTap, HiddenStates, SampledRows, gram};
pub use text::{read_documents, read_json_lines};
pub use tokenizer::{TextTokenizer, guard_panics, panic_is_handled};
pub use windows::{Sampling, TokenWindows};
