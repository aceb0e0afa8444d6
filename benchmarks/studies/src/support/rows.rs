//! The real models with their texts: the rows of every quality table.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use xtask::plant;
use xtask::support::shell::{self, root, target_dir};

use super::venv::interop_python;

/// A row of the tables.
pub struct Row {
    /// The model's name.
    pub name: &'static str,
    calibration: &'static str,
    /// The file of the evaluation text.
    pub evaluation: &'static str,
    /// Tokens per window.
    pub window: usize,
    /// The group size, or `channel`.
    pub group: &'static str,
    /// Options that the group size needs on this model.
    options: &'static [&'static str],
}

const BOOKS: (&str, &str, &str) = ("books-7m", "books_calib.txt", "books_valid.txt");
const WIKI: (&str, &str, &str) = ("books-7m", "c4_calib.txt", "wiki.test.raw");
const STORIES: (&str, &str, &str) = ("tinystories-656k", "tinystories_calib.jsonl", "tinystories_valid.txt");
const SMALL: (&str, &str, &str) = ("stories260k", "tinystories_calib.jsonl", "tinystories_valid.txt");

const fn row(
    (name, calibration, evaluation): (&'static str, &'static str, &'static str),
    window: usize,
    group: &'static str,
    options: &'static [&'static str],
) -> Row {
    Row { name, calibration, evaluation, window, group, options }
}

/// The rows for which results are reported.
pub const ROWS: [Row; 9] = [
    row(BOOKS, 512, "32", &[]),
    row(BOOKS, 512, "64", &[]),
    row(BOOKS, 512, "128", &[]),
    row(WIKI, 512, "128", &[]),
    row(STORIES, 512, "32", &[]),
    row(STORIES, 512, "64", &[]),
    row(STORIES, 512, "128", &[]),
    row(SMALL, 256, "channel", &[]),
    // No common group size divides the 172 columns of `down_proj`.
    row(SMALL, 256, "64", &["--override", "down_proj=BITS-channel"]),
];

/// Rows of models that are trained here with widths that are multiples of 256, on their calibration text only.
pub const TRAINED: [Row; 2] = [
    row(("calib-llama", "books_calib.txt", "books_valid.txt"), 128, "channel", &[]),
    row(("calib-qwen3", "c4_calib.txt", "wiki.test.raw"), 128, "channel", &[]),
];

/// The first row of each model and text, for uses where the group size does not matter.
pub fn texts() -> Vec<&'static Row> {
    let mut rows: Vec<&Row> = Vec::new();
    for row in &ROWS {
        if !rows.iter().any(|known| (known.name, known.evaluation) == (row.name, row.evaluation)) {
            rows.push(row);
        }
    }
    rows
}

/// `quant quantize`, without scheme, method or calibration.
pub fn quantize(quant: &Path, model: &Path, out: &Path) -> Command {
    let mut command = Command::new(quant);
    command.arg("quantize").arg(model).arg("-o").arg(out).arg("--quiet");
    command
}

impl Row {
    /// Returns the model's directory or, with planted outliers, that of a copy, which is created on first use.
    pub fn model(&self, data: &Path, planted: bool) -> Result<PathBuf> {
        match planted {
            false => Ok(data.join("models").join(self.name)),
            true => self.planted(data, "planted", [4, 0]),
        }
    }

    /// Returns the directory of a model of [`TRAINED`], which is trained on first use.
    pub fn trained(&self, data: &Path) -> Result<PathBuf> {
        let out = target_dir().join("trained").join(self.name);
        if !out.is_dir() {
            std::fs::create_dir_all(target_dir().join("trained"))?;
            let mut command = Command::new(interop_python()?);
            command.arg(root().join("benchmarks/peers/train_models.py")).arg(self.name);
            command.arg(data.join("models").join(BOOKS.0)).arg(self.calibration(data)).arg(&out);
            shell::run(&mut command)?;
        }
        Ok(out)
    }

    /// Returns the directory of a copy of the model with outliers in keys, which is created on first use.
    pub fn with_outlying_keys(&self, data: &Path) -> Result<PathBuf> {
        self.planted(data, "planted-keys", [0, 2])
    }

    fn planted(&self, data: &Path, folder: &str, [channels, keys]: [usize; 2]) -> Result<PathBuf> {
        let model = data.join("models").join(self.name);
        let out = target_dir().join(folder).join(self.name);
        if !out.is_dir() {
            std::fs::create_dir_all(target_dir().join(folder))?;
            let (factor, key_factor, seed) = (32, 32, 0);
            plant::plant(&plant::Args { model, out: out.clone(), channels, factor, keys, key_factor, seed })?;
        }
        Ok(out)
    }

    /// The calibration text.
    pub fn calibration(&self, data: &Path) -> PathBuf {
        data.join("text").join(self.calibration)
    }

    /// Name suffixes of linears that are quantized per channel whatever the group size is.
    pub fn per_channel(&self) -> impl Iterator<Item = &'static str> {
        self.options.iter().filter_map(|o| o.strip_suffix("=BITS-channel"))
    }

    /// `quant quantize` of the row's model to `bits` bits in its groups, without method or calibration.
    pub fn quantize(&self, quant: &Path, model: &Path, bits: u32, out: &Path) -> Command {
        let scheme = format!("w{bits}a16");
        let mut command = quantize(quant, model, out);
        command.args(["--scheme", &scheme, "--group-size", self.group]);
        command.args(self.options.iter().map(|o| o.replace("BITS", &scheme)));
        command
    }
}
