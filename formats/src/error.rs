//! What can go wrong on the path, so that a person can act on it.
//!
//! Every variant says what happened and where (file, tensor, field, line); [`Error::remedy`] says
//! what to do next (both name settings and commands as `quant-core`'s `wording` marks them: `‹ignore›`), and [`Error::category`] which exit code a program should end with.

mod remedy;
mod subject;

use std::path::PathBuf;

use crate::checkpoint::{HeaderError, printable};

/// The result of every fallible function of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of failure, which decides a program's exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Category {
    /// The request itself cannot be fulfilled: 2.
    Usage,
    /// A file that was given is broken, hostile or unsupported: 4.
    Input,
    /// Disk, memory, permission, network: 5.
    Environment,
    /// Non-finite or degenerate numbers: 6.
    Numeric,
    /// A bug of ours: 70.
    Internal,
    /// Stopped by the user; what was finished is kept: 75.
    Interrupted,
}

impl Category {
    /// The exit code of a program that ends with such a failure.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Usage => 2,
            Self::Input => 4,
            Self::Environment => 5,
            Self::Numeric => 6,
            Self::Internal => 70,
            Self::Interrupted => 75,
        }
    }
}

/// A linear whose input width is not a multiple of the group size asked for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Indivisible {
    /// The weight's name in the checkpoint.
    pub tensor: String,
    /// Its input width `k`.
    pub columns: usize,
    /// The group size that does not divide it.
    pub group_size: usize,
}

/// A failure of the pipeline.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The request makes no sense, or asks for what does not exist.
    #[error("{message}")]
    Usage {
        /// What is wrong with the request.
        message: String,
        /// What to ask for instead.
        remedy: String,
    },
    /// A pattern of the settings `ignore` or `override` matched no tensor.
    #[error("‹{option}› `{pattern}` matches no linear of the model")]
    PatternMatchesNothing {
        /// The setting that carried the pattern.
        option: &'static str,
        /// The pattern as given.
        pattern: String,
        /// Names that resemble it.
        nearest: Vec<String>,
    },
    /// The group size does not divide the input width of some linears.
    #[error("the group size does not divide the input width of {} tensor(s):{}", .0.len(), list_indivisible(.0))]
    GroupSizeDoesNotDivide(Vec<Indivisible>),
    /// The target exists and replacing it was not asked for.
    #[error("{} exists already", path.display())]
    OutputExists {
        /// The target.
        path: PathBuf,
    },
    /// The target is the model's own directory, or lies inside it (or around it).
    #[error("the output {} overlaps the input {}", output.display(), input.display())]
    OutputIsInput {
        /// The target.
        output: PathBuf,
        /// The model directory.
        input: PathBuf,
    },

    /// The directory holds no safetensors checkpoint.
    #[error("{} holds no checkpoint: {reason}", path.display())]
    NoCheckpoint {
        /// The directory that was searched.
        path: PathBuf,
        /// What is missing.
        reason: String,
    },
    /// The directory holds only pickle files, which run code when they are read.
    #[error("{} holds its weights only as pickle ({})", path.display(), files.join(", "))]
    PickleOnly {
        /// The model directory.
        path: PathBuf,
        /// The pickle files found.
        files: Vec<String>,
    },
    /// A safetensors file breaks the format's rules.
    #[error("{}: {source}", path.display())]
    Safetensors {
        /// The shard.
        path: PathBuf,
        /// The rule it breaks.
        source: Box<HeaderError>,
    },
    /// `model.safetensors.index.json` is broken, or disagrees with the shards.
    #[error("{}: {reason}", path.display())]
    Index {
        /// The index file.
        path: PathBuf,
        /// What is wrong, with the field.
        reason: String,
    },
    /// The checkpoint lacks a tensor that the configuration promises.
    #[error("{}: tensor `{tensor}` is missing", path.display())]
    MissingTensor {
        /// The model directory or shard.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
    },
    /// A tensor's shape disagrees with the configuration.
    #[error("{}: tensor `{tensor}` has shape {got:?}, config.json implies {expected:?}", path.display())]
    TensorShape {
        /// The shard.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// The shape that the configuration implies.
        expected: Vec<usize>,
        /// The shape in the file.
        got: Vec<usize>,
    },
    /// A tensor's element type cannot be used where it stands.
    #[error("{}: tensor `{tensor}` is {got}, expected {expected}", path.display())]
    TensorDtype {
        /// The shard.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// What would be accepted.
        expected: String,
        /// What the file holds.
        got: String,
    },
    /// A field of `config.json` is missing, malformed or absurd.
    #[error("{}: `{field}` {reason}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The key.
        field: String,
        /// What is wrong with it, ending the sentence that the key begins.
        reason: String,
    },
    /// The model's family is not one we know.
    #[error("{}: architecture `{}` is not supported{}", path.display(), printable(found), list_differences(nearest, differences))]
    UnknownArchitecture {
        /// The file.
        path: PathBuf,
        /// What it names.
        found: String,
        /// The nearest architecture that is supported, if one is near.
        nearest: Option<&'static str>,
        /// What of the model is not supported, each fit for a line.
        differences: Vec<String>,
        /// The families this version knows.
        known: Vec<&'static str>,
    },
    /// A checkpoint holds a model's tensors under names of two layouts.
    #[error("{}: holds both `{one}` and `{other}`, which name the same part of the model in two layouts", path.display())]
    AmbiguousNames {
        /// The model directory.
        path: PathBuf,
        /// A tensor of one layout.
        one: String,
        /// A tensor of another.
        other: String,
    },
    /// The input is quantized already.
    #[error("{} is already quantized ({method})", path.display())]
    AlreadyQuantized {
        /// The model directory.
        path: PathBuf,
        /// Its `quant_method`.
        method: String,
    },
    /// A quantized checkpoint that this version cannot read.
    #[error("{}: {reason}", path.display())]
    UnsupportedQuantization {
        /// The file that says so.
        path: PathBuf,
        /// What is not supported, with the key.
        reason: String,
    },
    /// A quantized weight cannot be written in another container without changing it.
    #[error("{}: `{module}` cannot be repacked without loss: {reason}", path.display())]
    NotRepackable {
        /// The file that holds it.
        path: PathBuf,
        /// The linear.
        module: String,
        /// What the container cannot hold.
        reason: String,
    },
    /// `tokenizer.json` is missing or unusable, or does not fit the model.
    #[error("{}: {reason}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A text for calibration or evaluation is missing, malformed or too short.
    #[error("{}{}: {reason}", path.display(), line.map(|l| format!(":{l}")).unwrap_or_default())]
    Text {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1, where one can be named.
        line: Option<usize>,
        /// What is wrong, with counts.
        reason: String,
    },
    /// A file that a stage reads cannot be used: a chat template, a conversation that it is to render, an
    /// evaluation, a policy.
    #[error("{}{}: {reason}", path.display(), line.map(|l| format!(":{l}")).unwrap_or_default())]
    InputFile {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1, where one can be named.
        line: Option<usize>,
        /// What is wrong.
        reason: String,
        /// What to do about it.
        remedy: String,
    },

    /// The operating system refused an operation on a file.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was attempted: `read`, `create`, `write`, `sync`, `rename` …
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Something that is not here cannot be fetched.
    #[error("{what} is not available: {reason}")]
    Unavailable {
        /// What was wanted.
        what: String,
        /// Why it cannot be had.
        reason: String,
        /// How to do without.
        remedy: String,
    },
    /// Memory that is needed cannot be had.
    #[error("there is too little memory for {what}{}", bytes.map(|b| format!(": {b} bytes")).unwrap_or_default())]
    Memory {
        /// What it is for.
        what: String,
        /// How much of it, where that is known.
        bytes: Option<u64>,
    },
    /// A tensor of the input has the name of one that would be written for another.
    #[error("{}: tensor `{tensor}` has the same name as a tensor written for `{module}`", path.display())]
    NameTaken {
        /// The shard that holds it.
        path: PathBuf,
        /// The name.
        tensor: String,
        /// The tensor that is to be quantized.
        module: String,
    },
    /// A recipe file cannot be used.
    #[error("{}: {reason}", path.display())]
    Recipe {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, with the line or the key.
        reason: String,
        /// What to do.
        remedy: String,
    },
    /// A text was named that is neither a file nor a set.
    #[error("{name} is neither a file nor a set of texts")]
    UnknownText {
        /// The name.
        name: String,
        /// The sets there are.
        known: Vec<String>,
    },
    /// The disk has too little room.
    #[error("{} needs {needed} bytes, {free} are free", path.display())]
    DiskFull {
        /// Where it was to be written.
        path: PathBuf,
        /// Bytes that would be written.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// Another process works on the same output.
    #[error("{} is being written by another process ({holder})", path.display())]
    Locked {
        /// The job directory.
        path: PathBuf,
        /// Who holds it.
        holder: String,
    },
    /// What was written does not read back as it was meant.
    #[error("{}: {reason}", path.display())]
    Verification {
        /// The file that was read back.
        path: PathBuf,
        /// The difference.
        reason: String,
    },

    /// A weight holds NaN or infinity.
    #[error("{}: tensor `{tensor}` holds {count} non-finite value(s), the first at index {first_index}", path.display())]
    NonFinite {
        /// The shard.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// How many.
        count: u64,
        /// The first one's position in row-major order.
        first_index: u64,
    },
    /// Arithmetic left the range of the numbers that hold it.
    #[error("tensor `{tensor}`: {reason}")]
    Numeric {
        /// The tensor or module concerned.
        tensor: String,
        /// What happened.
        reason: String,
    },

    /// The float model itself leaves the range of its numbers on the calibration text.
    #[error("tensor `{tensor}`: the calibration text drives {what} to NaN or infinity")]
    Calibration {
        /// The tensor or module concerned.
        tensor: String,
        /// What of it.
        what: String,
    },

    /// What a model computes of a text is not finite.
    #[error("the model computes no usable logits: {reason}")]
    Logits {
        /// What happened.
        reason: String,
    },

    /// Keys or values leave the range of the cache that they are put in.
    #[error("keys and values{}: {reason}", block.map(|b| format!(" of block {b}")).unwrap_or_default())]
    Cache {
        /// The block.
        block: Option<usize>,
        /// What happened.
        reason: String,
    },

    /// The tensor library failed where it should not.
    #[error("tensor computation failed: {0}")]
    Tensor(Box<dyn std::error::Error + Send + Sync>),
    /// A state that our own code should have made impossible.
    #[error("internal error: {0}")]
    Internal(String),
    /// Stopped on request.
    #[error("interrupted")]
    Interrupted,
}

#[cfg(feature = "candle")]
impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        Self::Tensor(Box::new(error))
    }
}

fn list_indivisible(offenders: &[Indivisible]) -> String {
    offenders
        .iter()
        .map(|o| format!("\n  {}: width {}, group size {}", o.tensor, o.columns, o.group_size))
        .collect()
}

fn list_differences(nearest: &Option<&'static str>, differences: &[String]) -> String {
    let near = nearest.map(|name| format!("; the nearest supported one is `{name}`")).unwrap_or_default();
    let lines: String = differences.iter().map(|line| format!("\n  {line}")).collect();
    let colon = if differences.is_empty() { "" } else { "; differences that are not supported:" };
    format!("{near}{colon}{lines}")
}

impl Error {
    /// A usage error: what is wrong with the request, and what to ask for instead.
    pub fn usage(message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Usage { message: message.into(), remedy: remedy.into() }
    }

    /// An operating-system error on a path.
    pub fn io(action: &'static str, path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::Io { action, path: path.into(), source }
    }

    /// Which exit code a program should end with.
    pub fn category(&self) -> Category {
        match self {
            Self::Usage { .. }
            | Self::Recipe { .. }
            | Self::PatternMatchesNothing { .. }
            | Self::GroupSizeDoesNotDivide(_)
            | Self::OutputExists { .. }
            | Self::OutputIsInput { .. } => Category::Usage,
            Self::NoCheckpoint { .. }
            | Self::PickleOnly { .. }
            | Self::Safetensors { .. }
            | Self::Index { .. }
            | Self::MissingTensor { .. }
            | Self::TensorShape { .. }
            | Self::TensorDtype { .. }
            | Self::Config { .. }
            | Self::UnknownArchitecture { .. }
            | Self::AmbiguousNames { .. }
            | Self::AlreadyQuantized { .. }
            | Self::NameTaken { .. }
            | Self::UnsupportedQuantization { .. }
            | Self::NotRepackable { .. }
            | Self::Tokenizer { .. }
            | Self::Text { .. }
            | Self::InputFile { .. }
            | Self::UnknownText { .. } => Category::Input,
            Self::Io { .. }
            | Self::Unavailable { .. }
            | Self::Memory { .. }
            | Self::DiskFull { .. }
            | Self::Locked { .. }
            | Self::Verification { .. } => Category::Environment,
            Self::NonFinite { .. }
            | Self::Numeric { .. }
            | Self::Calibration { .. }
            | Self::Logits { .. }
            | Self::Cache { .. } => Category::Numeric,
            Self::Tensor(_) | Self::Internal(_) => Category::Internal,
            Self::Interrupted => Category::Interrupted,
        }
    }

    /// The same, with the block that a cache's refusal concerns.
    pub fn in_block(self, index: usize) -> Self {
        match self {
            Self::Cache { block: None, reason } => Self::Cache { block: Some(index), reason },
            other => other,
        }
    }
}
