//! One file per command.

mod ablation;
pub mod bench;
pub mod chat;
pub mod compare;
pub mod completions;
pub mod demo;
pub mod eval;
mod eval_table;
pub mod gate;
pub mod generate;
pub mod gguf;
pub mod inspect;
pub mod job;
pub mod plan;
pub mod quantize;
mod reference;
mod shards;

use std::path::PathBuf;
use std::sync::Arc;

use quant_core::run::Host;
use quant_core::wording::Wording;
use quant_core::worker::TextWorkers;
use quant_core::{CancelToken, Result};

use crate::cli::Command;
use crate::progress::Progress;

/// The state that every command shares.
pub struct Session {
    /// Shows progress and notes.
    pub progress: Progress,
    /// Cancelled by signals.
    pub cancel: CancelToken,
    /// Runs the tokenizers and chat templates of models.
    pub text_workers: Arc<dyn TextWorkers>,
    /// The file that contains this code, if it is not the executable.
    pub code: Option<PathBuf>,
    /// How model cards spell settings and commands.
    pub wording: &'static dyn Wording,
}

impl Session {
    /// Returns this session in the form that the library takes.
    pub fn host(&self) -> Host<'_> {
        let mut host = Host::new(&self.progress, &self.cancel, self);
        host.text_workers = self.text_workers.clone();
        host.code = self.code.as_deref();
        host.wording = self.wording;
        host
    }
}

/// Runs a command and returns its exit code.
pub fn run(command: &Command, session: &Session) -> Result<u8> {
    let done = match command {
        Command::Gate(args) => return gate::run(args, session),
        Command::Demo(args) => demo::run(args, session),
        Command::Plan(args) => plan::run(args, session),
        Command::Quantize(args) => quantize::run(args, session),
        Command::Job(args) => job::run(args, session),
        Command::Merge(args) => job::merge(args, session),
        Command::Eval(args) => eval::run(args, session),
        Command::Compare(args) => compare::run(args),
        Command::Inspect(args) => inspect::run(args, session),
        Command::Generate(args) => generate::run(args, session),
        Command::Chat(args) => chat::run(args, session),
        Command::Bench(args) => bench::run(args, session),
        Command::Completions(args) => completions::run(args),
    };
    done.map(|()| 0)
}
