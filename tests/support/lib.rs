//! Code that tests of several crates share.
//!
//! Large models and real texts are not part of the repository. If they exist, they are in `../shared/data`, next to the
//! checkout. A test that needs them calls [`shared_data`] and returns early without them:
//!
//! ```no_run
//! let Some(data) = quant_tests::shared_data() else { return };
//! let model = data.join("models/stories260k");
//! ```
#![forbid(unsafe_code)]

pub mod files;
pub mod models;
pub mod opt;
pub mod program;
pub mod refusal;

use std::io::Write;
use std::panic::Location;
use std::path::{Path, PathBuf};

/// The environment variable that names the file in which skipped tests are recorded.
pub const SKIP_LOG: &str = "QUANT_SKIP_LOG";

/// The workspace's root directory.
pub fn workspace_root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}

/// The model directory that ships with the repository: Llama type, 6.8 million parameters, f16.
pub fn demo_model() -> PathBuf {
    workspace_root().join("calibration-data/demo-model")
}

/// Real models (`models/`) and texts (`text/`) next to the checkout.
#[track_caller]
pub fn shared_data() -> Option<PathBuf> {
    let dir = workspace_root().join("../shared/data");
    if dir.is_dir() {
        return Some(dir);
    }
    skip("no real models and texts in ../shared/data");
    None
}

/// Records that the calling test skips something: one line on stderr, and one in the file that `QUANT_SKIP_LOG` names.
///
/// # Panics
/// When that file cannot be written.
#[track_caller]
pub fn skip(why: &str) {
    let line = skip_line(why, Location::caller());
    eprint!("{line}");
    if let Some(log) = std::env::var_os(SKIP_LOG) {
        // A single write in append mode, because tests of several processes share the file.
        let file = std::fs::OpenOptions::new().append(true).create(true).open(&log);
        let noted = file.and_then(|mut file| file.write_all(line.as_bytes()));
        assert!(noted.is_ok(), "cannot record the skip in {}", Path::new(&log).display());
    }
}

fn skip_line(why: &str, location: &Location<'_>) -> String {
    format!("SKIPPED: {why} ({}:{})\n", location.file(), location.line())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demo_model_is_where_it_should_be() {
        for file in ["config.json", "model.safetensors", "tokenizer.json"] {
            assert!(demo_model().join(file).is_file(), "{file}");
        }
    }

    #[test]
    fn a_skip_names_its_test() {
        let line = skip_line("no GPU", Location::caller());
        assert!(line.starts_with("SKIPPED: no GPU (") && line.ends_with(")\n"), "{line}");
        assert!(line.contains("lib.rs"));
    }
}
