//! The errors of the pipeline.
//!
//! Every variant says what happened and where (file, tensor, field, line). [`Error::remedy`] says what to do about it,
//! and [`Error::category`] gives the program's exit code. Messages and remedies [mark](crate::wording) settings and
//! commands: `‹ignore›`.

mod limits;
mod remedy;
mod subject;

use std::io::ErrorKind;
use std::path::PathBuf;

use crate::checkpoint::{HeaderError, printable};
use crate::wording::{Remedy, about_file, counted};
use limits::{memory_limit, too_large};

pub use limits::ThreadMemory;

/// A result with this crate's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of failure, which determines a program's exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Category {
    /// The request itself cannot be fulfilled: exit code 2.
    Usage,
    /// An input file is missing, damaged, malicious or unsupported: exit code 4.
    Input,
    /// Disk, memory, permission, network: exit code 5.
    Environment,
    /// Non-finite or degenerate numbers: exit code 6.
    Numeric,
    /// A bug in this program: exit code 70.
    Internal,
    /// Stopped by the user; completed work is kept: exit code 75.
    Interrupted,
}

impl Category {
    /// The machine-readable name: `usage`, `input`, `environment`, `numeric`, `internal` or `interrupted`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Usage => "usage",
            Self::Input => "input",
            Self::Environment => "environment",
            Self::Numeric => "numeric",
            Self::Internal => "internal",
            Self::Interrupted => "interrupted",
        }
    }

    /// The exit code for this kind of failure.
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

/// A linear whose input width is not a multiple of its group size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Indivisible {
    /// The weight's name in the checkpoint.
    pub tensor: String,
    /// The linear's input width `k`.
    pub columns: usize,
    /// The group size, which does not divide `columns`.
    pub group_size: usize,
}

/// A failure of the pipeline.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The request is invalid, or names something that does not exist.
    #[error("{message}")]
    Usage {
        /// The problem with the request.
        message: String,
        /// The request to make instead.
        remedy: Remedy,
    },
    /// A pattern of the settings `ignore` or `override` that matches no linear.
    #[error("‹{option}› `{pattern}` matches no linear of the model")]
    PatternMatchesNothing {
        /// The setting that carried the pattern.
        option: &'static str,
        /// The pattern as given.
        pattern: String,
        /// Similar names.
        nearest: Vec<String>,
    },
    /// The group size does not divide the input width of some linears.
    #[error("the group size does not divide the input width of {}:{}", counted(.0.len(), "tensor"), list_indivisible(.0))]
    GroupSizeDoesNotDivide(Vec<Indivisible>),
    /// The target exists, and the request does not allow replacing it.
    #[error("{} exists already", path.display())]
    OutputExists {
        /// The target.
        path: PathBuf,
    },
    /// The target is the model's own directory, lies inside it, or contains it.
    #[error("the output {} overlaps the input {}", output.display(), input.display())]
    OutputIsInput {
        /// The target.
        output: PathBuf,
        /// The model directory.
        input: PathBuf,
    },

    /// A tensor of the input is not the one that an interrupted run read.
    #[error("tensor `{tensor}` has changed since the run was interrupted")]
    InputChanged {
        /// The tensor.
        tensor: String,
    },

    /// A checkpoint has no quantized linear of this name.
    #[error("the checkpoint has no quantized linear `{linear}`{}", if *is_float { ": its weight is float" } else { "" })]
    MissingLinear {
        /// The name.
        linear: String,
        /// Whether the checkpoint has a float weight of that name.
        is_float: bool,
        /// The name of a quantized linear that was probably meant.
        nearest: Option<String>,
    },

    /// The path is not a directory with a safetensors checkpoint.
    #[error("{} {}", path.display(), no_checkpoint(reason))]
    NoCheckpoint {
        /// The path that was searched.
        path: PathBuf,
        /// The reason, for example the missing file.
        reason: String,
        /// What to do, if there is more specific advice than which files a model consists of.
        remedy: Option<Remedy>,
    },
    /// The directory's weights are only in pickle files, which can execute code when they are read.
    #[error("{} contains only pickle weights ({}), which are not read", path.display(), files.join(", "))]
    PickleOnly {
        /// The model directory.
        path: PathBuf,
        /// The names of the first few pickle files.
        files: Vec<String>,
    },
    /// A safetensors file violates the format.
    #[error("{}: {source}", path.display())]
    Safetensors {
        /// The shard.
        path: PathBuf,
        /// The rule that it violates.
        source: Box<HeaderError>,
    },
    /// `model.safetensors.index.json` is malformed, or inconsistent with the shards.
    #[error("{}", about_file(path, None, reason))]
    Index {
        /// The index file.
        path: PathBuf,
        /// The reason, including the field.
        reason: String,
    },
    /// The checkpoint lacks a tensor that the configuration implies.
    #[error("{}: tensor `{tensor}` is missing", path.display())]
    MissingTensor {
        /// The model directory or shard.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
    },
    /// A tensor does not have the shape that the configuration or another tensor implies.
    #[error("{}: tensor `{tensor}` has shape {got:?}, expected {expected:?}", path.display())]
    TensorShape {
        /// The shard.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// The shape that the configuration or another tensor implies.
        expected: Vec<usize>,
        /// The shape in the file.
        got: Vec<usize>,
    },
    /// The checkpoint has weights of experts that the configuration does not describe.
    #[error("{} does not describe {} of experts, such as `{tensor}`", path.display(), counted(*count, "tensor"))]
    UnknownExperts {
        /// The configuration.
        path: PathBuf,
        /// One of the tensors.
        tensor: String,
        /// The number of such tensors.
        count: usize,
    },
    /// A tensor has an unsupported dtype.
    #[error("{}: tensor `{tensor}` has type {got}, expected {expected}", path.display())]
    TensorDtype {
        /// The shard.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// The accepted dtypes.
        expected: String,
        /// The dtype in the file.
        got: String,
    },
    /// A field of `config.json` is missing, malformed or out of range.
    #[error("{}: `{field}` {reason}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The key.
        field: String,
        /// The reason, as the end of a sentence that begins with the key.
        reason: String,
        /// What to do, if that is not to correct the file.
        remedy: Option<Remedy>,
    },
    /// The model's architecture is not supported.
    #[error("{}: architecture `{}` is not supported{}", path.display(), printable(found), list_differences(nearest, differences))]
    UnknownArchitecture {
        /// The file that names the architecture.
        path: PathBuf,
        /// The architecture as named there.
        found: String,
        /// The most similar supported architecture, if one is similar.
        nearest: Option<&'static str>,
        /// The differences from that architecture, or the reasons why none is similar; one line each.
        differences: Vec<String>,
        /// The supported architectures.
        known: Vec<&'static str>,
    },
    /// A checkpoint uses the tensor names of two layouts.
    #[error("{}: `{one}` and `{other}` are two layouts of the same weights, and only one of them may be present", path.display())]
    AmbiguousNames {
        /// The model directory.
        path: PathBuf,
        /// A tensor name of the first layout.
        one: String,
        /// A tensor name of the second layout.
        other: String,
    },
    /// The input is already quantized.
    #[error("{} is already quantized ({method})", path.display())]
    AlreadyQuantized {
        /// The model directory.
        path: PathBuf,
        /// The `quant_method` in the model's configuration.
        method: String,
    },
    /// A quantized checkpoint that this version cannot read.
    #[error("{}", about_file(path, None, reason))]
    UnsupportedQuantization {
        /// The file that specifies it.
        path: PathBuf,
        /// The unsupported feature or invalid value, including its key or tensor.
        reason: String,
    },
    /// A quantized weight cannot be written in another format without changing it.
    #[error("{}: `{module}` cannot be repacked without loss: {reason}", path.display())]
    NotRepackable {
        /// The file that holds it.
        path: PathBuf,
        /// The linear.
        module: String,
        /// The property of the weight that the format cannot represent.
        reason: String,
    },
    /// A tokenizer file is missing, unusable, or does not match the model.
    #[error("{}", about_file(path, None, reason))]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// A text for calibration or evaluation is missing, malformed or too short.
    #[error("{}", about_file(path, *line, reason))]
    Text {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1, if known.
        line: Option<usize>,
        /// The reason, including counts.
        reason: String,
    },
    /// An unusable input file of a stage: a chat template, a conversation to render, an evaluation, a policy.
    #[error("{}", about_file(path, *line, reason))]
    InputFile {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1, if known.
        line: Option<usize>,
        /// The reason.
        reason: String,
        /// The remedy.
        remedy: Remedy,
    },

    /// The operating system reported an error for a file operation.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The operation: `read`, `create`, `write`, `sync`, `rename` …
        action: &'static str,
        /// The path on which the operation failed.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// Something that is not present locally cannot be fetched.
    #[error("{what} is not available: {reason}")]
    Unavailable {
        /// The requested object.
        what: String,
        /// The reason why it is not available.
        reason: String,
        /// The alternative.
        remedy: Remedy,
    },
    /// Memory allocation failed.
    #[error("not enough memory for {what}{}", bytes.map(|b| format!(": {b} bytes")).unwrap_or_default())]
    Memory {
        /// The purpose of the memory.
        what: String,
        /// The size in bytes, if known.
        bytes: Option<u64>,
    },
    /// A run needs more memory than it may use, even if everything that can be moved to files is moved.
    #[error(
        "the run needs at least {} MiB of memory{}, but {}",
        needed.div_ceil(1 << 20),
        threads.map(|t| format!(" with {}", counted(t.count, "thread"))).unwrap_or_default(),
        memory_limit(*budget, *available)
    )]
    MemoryBudget {
        /// The smallest budget in bytes that suffices.
        needed: u64,
        /// The budget in bytes, if one was set.
        budget: Option<u64>,
        /// The available memory in bytes, if that is the limit.
        available: Option<u64>,
        /// The threads, if `needed` depends on their number.
        threads: Option<ThreadMemory>,
    },
    /// An input tensor has the same name as an output tensor of a different linear.
    #[error("{}: tensor `{tensor}` already has the name of an output tensor of `{module}`", path.display())]
    NameTaken {
        /// The shard that holds it.
        path: PathBuf,
        /// The name.
        tensor: String,
        /// The linear to be quantized whose output tensor has this name.
        module: String,
    },
    /// A recipe file cannot be used.
    #[error("{}", about_file(path, None, reason))]
    Recipe {
        /// The file.
        path: PathBuf,
        /// The reason, including the line or the key.
        reason: String,
        /// The action that the user can take.
        remedy: Remedy,
    },
    /// The named text is neither a file nor a known set.
    #[error("{name} is neither an existing file nor a known text set")]
    UnknownText {
        /// The name.
        name: String,
        /// The known sets.
        known: Vec<String>,
    },
    /// The disk has too little space.
    #[error("{} needs {needed} bytes, but only {free} are free", path.display())]
    DiskFull {
        /// The file or directory that does not fit.
        path: PathBuf,
        /// Bytes needed.
        needed: u64,
        /// Bytes available; 0 if unknown.
        free: u64,
    },
    /// A file would be larger than the process or the file system allows.
    #[error("{} {}", path.display(), too_large(*needed, *limit))]
    FileTooLarge {
        /// The file.
        path: PathBuf,
        /// The size of the file in bytes, if known.
        needed: Option<u64>,
        /// The limit of the process in bytes; `None` if it is that of the file system.
        limit: Option<u64>,
    },
    /// Another process works on the same output.
    #[error("{} is being written by another process ({holder})", path.display())]
    Locked {
        /// The job directory, journal or cache.
        path: PathBuf,
        /// A description of the process that holds the lock.
        holder: String,
    },
    /// The data read back differs from what was written.
    #[error("{}", about_file(path, None, reason))]
    Verification {
        /// The file that was read back.
        path: PathBuf,
        /// The difference.
        reason: String,
    },

    /// A weight holds NaN or infinity.
    #[error("{}: tensor `{tensor}` contains {}, the first at index {first_index}", path.display(), counted(*count as usize, "non-finite value"))]
    NonFinite {
        /// The shard.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// Number of non-finite values.
        count: u64,
        /// Index of the first non-finite value, in row-major order.
        first_index: u64,
    },
    /// A computation overflowed or gave NaN.
    #[error("tensor `{tensor}`: {reason}")]
    Numeric {
        /// The affected tensor or module.
        tensor: String,
        /// A description of the failure.
        reason: String,
    },

    /// Values that are computed from the calibration text overflow.
    #[error("tensor `{tensor}`: {what} becomes NaN or infinite on the calibration text")]
    Calibration {
        /// The affected tensor or module.
        tensor: String,
        /// A description of the values that overflow.
        what: String,
    },

    /// A model's output for a text is not finite.
    #[error("the model does not produce valid logits: {reason}")]
    Logits {
        /// A description of the failure.
        reason: String,
    },

    /// An engine that runs a model reported an error that is not an [`Error`] itself.
    #[error("the engine failed: {0}")]
    Engine(#[source] Box<dyn std::error::Error + Send + Sync>),

    /// Keys or values exceed the range of the KV cache.
    #[error("keys and values{}: {reason}", block.map(|b| format!(" of block {b}")).unwrap_or_default())]
    Cache {
        /// The index of the block, if known.
        block: Option<usize>,
        /// A description of the failure.
        reason: String,
    },

    /// The kernels do not support a weight.
    #[error("the kernels cannot use this weight: {0}")]
    Kernel(quant_kernels_cpu::KernelError),
    /// An unexpected failure of the tensor library.
    #[error("tensor computation failed: {0}")]
    Tensor(Box<dyn std::error::Error + Send + Sync>),
    /// An internal inconsistency: a bug.
    #[error("internal error: {0}")]
    Internal(String),
    /// Stopped on request.
    #[error("interrupted")]
    Interrupted,
}

impl From<quant_kernels_cpu::KernelError> for Error {
    /// A slice of a wrong length is [`Error::Usage`], anything else [`Error::Kernel`].
    fn from(error: quant_kernels_cpu::KernelError) -> Self {
        match error {
            quant_kernels_cpu::KernelError::Length { .. } => {
                Self::usage(error.to_string(), "pass slices whose lengths fit the shape of the weight")
            }
            error => Self::Kernel(error),
        }
    }
}

#[cfg(feature = "candle")]
impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        Self::Tensor(Box::new(error))
    }
}

/// Lists linears; names that differ only in numbers share a line.
fn list_indivisible(offenders: &[Indivisible]) -> String {
    let mut kinds: Vec<(String, &Indivisible, usize)> = Vec::new();
    for offender in offenders {
        let digits = |part: &str| part.bytes().all(|b| b.is_ascii_digit());
        let parts: Vec<&str> =
            offender.tensor.split('.').map(|part| if digits(part) { "*" } else { part }).collect();
        let kind = parts.join(".");
        let alike = |known: &&mut (String, &Indivisible, usize)| {
            known.0 == kind
                && known.1.columns == offender.columns
                && known.1.group_size == offender.group_size
        };
        match kinds.iter_mut().find(alike) {
            Some(known) => known.2 += 1,
            None => kinds.push((kind, offender, 1)),
        }
    }
    let line = |(kind, one, number): (String, &Indivisible, usize)| {
        let (name, times) = match number {
            1 => (one.tensor.clone(), String::new()),
            _ => (kind, format!("{number} × ")),
        };
        format!("\n  {times}{name}: width {}, group size {}", one.columns, one.group_size)
    };
    kinds.into_iter().map(line).collect()
}

fn no_checkpoint(reason: &str) -> String {
    match reason {
        "it does not exist" => "does not exist".to_owned(),
        _ => format!("does not contain a checkpoint: {reason}"),
    }
}

fn list_differences(nearest: &Option<&'static str>, differences: &[String]) -> String {
    let near = nearest.map(|name| format!("; the nearest supported one is `{name}`")).unwrap_or_default();
    let lines: String = differences.iter().map(|line| format!("\n  {line}")).collect();
    let colon = match nearest {
        _ if differences.is_empty() => "",
        Some(_) => "; differences:",
        None => ":",
    };
    format!("{near}{colon}{lines}")
}

impl Error {
    /// Creates a usage error: what is wrong with the request, and what to request instead.
    pub fn usage(message: impl Into<String>, remedy: impl Into<Remedy>) -> Self {
        Self::Usage { message: message.into(), remedy: remedy.into() }
    }

    /// Creates an operating-system error on a path. If a file became too large, this is [`Error::FileTooLarge`].
    pub fn io(action: &'static str, path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        let path = path.into();
        match source.kind() {
            ErrorKind::FileTooLarge => Self::file_too_large(path, 0),
            _ => Self::Io { action, path, source },
        }
    }

    /// Returns the category, which determines the exit code.
    pub fn category(&self) -> Category {
        match self {
            Self::Usage { .. }
            | Self::Recipe { .. }
            | Self::PatternMatchesNothing { .. }
            | Self::MissingLinear { .. }
            | Self::GroupSizeDoesNotDivide(_)
            | Self::Kernel(_)
            | Self::OutputExists { .. }
            | Self::InputChanged { .. }
            | Self::OutputIsInput { .. } => Category::Usage,
            Self::NoCheckpoint { .. }
            | Self::PickleOnly { .. }
            | Self::Safetensors { .. }
            | Self::Index { .. }
            | Self::MissingTensor { .. }
            | Self::TensorShape { .. }
            | Self::UnknownExperts { .. }
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
            | Self::MemoryBudget { .. }
            | Self::DiskFull { .. }
            | Self::FileTooLarge { .. }
            | Self::Locked { .. }
            | Self::Engine(_)
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

    /// Adds the block's index to an [`Error::Cache`] without one; returns all other errors unchanged.
    pub fn in_block(self, index: usize) -> Self {
        match self {
            Self::Cache { block: None, reason } => Self::Cache { block: Some(index), reason },
            other => other,
        }
    }
}
