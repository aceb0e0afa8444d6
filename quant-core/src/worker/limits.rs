//! The resource limits of a worker process, which depend on the questions asked.
//!
//! The limits grow with the text and leave a wide margin, so legitimate texts do not reach them. The memory limit is
//! also bounded by the memory of the machine and by the limit of this process.

use std::time::Duration;

use super::Loadable;
use super::{Content, Question};
use crate::system::{ProcessLimits, WorkerProcess};

/// Limits of a worker process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Base limit on address space, in bytes.
    pub memory: u64,
    /// Additional bytes for each byte of the loaded file.
    pub memory_of_loaded_byte: u64,
    /// Additional bytes for each byte of the longest question.
    pub memory_of_asked_byte: u64,
    /// Base limit on processor time.
    pub time: Duration,
    /// Additional time for each byte of the loaded file and of every question.
    pub time_of_byte: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            memory: 2 << 30,
            memory_of_loaded_byte: 32,
            memory_of_asked_byte: 256,
            time: Duration::from_secs(10),
            time_of_byte: Duration::from_micros(20),
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Granted {
    limits: Limits,
    loaded: u64,
    longest: u64,
    time: Duration,
    /// A limit on address space derived from the machine's memory.
    max: Option<u64>,
    /// The limit on address space of this process.
    inherited: Option<u64>,
    set: Option<(u64, u64)>,
}

impl Granted {
    /// The limits of a process that loads a file; `stacks` is the total size of its thread stacks in bytes.
    pub(super) fn for_loading(limits: Limits, loadable: &Loadable, stacks: u64) -> Self {
        let loaded = match &loadable.content {
            Content::Tokenizer(json) => json.len(),
            Content::Template { source, .. } => source.len(),
        } as u64;
        let limits = Limits { memory: limits.memory.saturating_add(stacks), ..limits };
        let (machine, inherited) = ProcessLimits::of_this_process();
        let machine = machine.map(|bytes| (bytes / 4 * 3).max(limits.memory / 2));
        let time = limits.time.saturating_add(of_bytes(limits.time_of_byte, loaded));
        Self { limits, loaded, longest: 0, time, max: machine, inherited, set: None }
    }

    pub(super) fn add(&mut self, question: &Question<'_>) {
        let (bytes, repeated) = match question {
            Question::Encode { texts, .. } => (texts.iter().map(|t| t.len() as u64).sum(), 1),
            Question::Decode { tokens } => (tokens.iter().map(|t| 4 * t.len() as u64).sum(), 1),
            Question::LargestToken => (0, 1),
            Question::TokenId(token) => (token.len() as u64, 1),
            Question::Render { chats, .. } => {
                let bytes = |value: &serde_json::Value| value.to_string().len() as u64;
                let of_chat = |c: &super::Chat| c.messages.iter().map(bytes).sum::<u64>() + bytes(&c.tools);
                // Finding the assistant's text can render a conversation twice per answer.
                let messages = chats.iter().map(|c| c.messages.len() as u64).max().unwrap_or(0);
                (chats.iter().map(|c| of_chat(c)).sum(), 2 + messages / 8)
            }
        };
        const PER_QUESTION: Duration = Duration::from_millis(10);
        self.longest = self.longest.max(bytes);
        let time = of_bytes(self.limits.time_of_byte, bytes.saturating_mul(repeated));
        self.time = self.time.saturating_add(time).saturating_add(PER_QUESTION);
    }

    /// The limit on address space in bytes. The flag is true if it is the configured limit, and false if the machine's
    /// memory or an inherited limit is lower.
    pub(super) fn memory(&self) -> (u64, bool) {
        let Limits { memory, memory_of_loaded_byte, memory_of_asked_byte, .. } = self.limits;
        let loaded = self.loaded.saturating_mul(memory_of_loaded_byte);
        let asked = self.longest.saturating_mul(memory_of_asked_byte);
        let ours = memory.saturating_add(loaded).saturating_add(asked);
        let min = [self.max, self.inherited].into_iter().flatten().min().unwrap_or(u64::MAX);
        (ours.min(min), ours <= min)
    }

    pub(super) fn seconds(&self) -> u64 {
        self.time.as_secs() + 1
    }

    /// Sets the limits of the process if they have changed.
    pub(super) fn set(&mut self, process: &WorkerProcess) {
        let (memory, seconds) = (self.memory().0, self.seconds());
        if self.set != Some((memory, seconds)) {
            process.limit(ProcessLimits { memory, seconds, is_first: self.set.is_none() });
            self.set = Some((memory, seconds));
        }
    }
}

fn of_bytes(each: Duration, bytes: u64) -> Duration {
    let nanos = each.as_nanos().saturating_mul(u128::from(bytes));
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}
