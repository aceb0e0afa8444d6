//! `quant chat MODEL`: a conversation on the terminal.

use std::io::{BufRead, IsTerminal};
use std::path::{Path, PathBuf};

use quant_core::calibrate::{ChatTemplate, Conversation};
use quant_core::generate::{End, Generator};
use quant_core::names::suggestion;
use quant_core::{Error, Result};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use serde_json::{Value, json};

use super::Session;
use crate::generation::{self, DecodingOptions};
use crate::inputs;
use crate::output;

/// Default context length, if the model has that many positions.
const DEFAULT_CONTEXT: usize = 8192;
/// Longer lines of standard input are rejected.
const MAX_LINE_BYTES: usize = 1 << 20;
/// Maximum of new tokens per answer, unless the user sets one or the model's own is larger.
const DEFAULT_ANSWER: usize = 1024;

const COMMANDS: &str = "/new           start a new conversation
/system TEXT   start a new conversation with this system message (no TEXT: without one)
/retry         generate the last answer again, with a different seed (without sampling: the same answer)
/help          list these commands
/exit          leave (also Ctrl-D); Ctrl-C stops an answer";

/// The model to talk to.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model directory or GGUF file with a chat template, float or quantized, or org/name or org/name@revision on a hub
    pub model: PathBuf,
    /// System message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Context length in tokens [default: 8192, or the model's number of positions if that is less]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    #[command(flatten)]
    decoding: DecodingOptions,
}

struct Messages {
    messages: Vec<Value>,
}

impl Messages {
    fn new(system: Option<&str>) -> Self {
        let system = system.filter(|text| !text.is_empty());
        Self {
            messages: system.map(|text| json!({ "role": "system", "content": text })).into_iter().collect(),
        }
    }

    fn push(&mut self, role: &str, content: &str) {
        self.messages.push(json!({ "role": role, "content": content }));
    }

    fn pop(&mut self, role: &str) -> bool {
        let is_last = self.messages.last().is_some_and(|message| message["role"] == role);
        if is_last {
            self.messages.pop();
        }
        is_last
    }
}

/// Runs the conversation until the input ends.
pub fn run(args: &Args, session: &Session) -> Result<()> {
    let opened = inputs::open(&args.model, session)?;
    let template = ChatTemplate::open(&opened.directory)?;
    let tokenizer = generation::tokenizer(&opened)?;
    let mut settings = args.decoding.settings(&opened, &tokenizer, session)?;
    if !args.decoding.bounds_answers() && settings.max_new_tokens < DEFAULT_ANSWER {
        settings.max_new_tokens = DEFAULT_ANSWER;
    }
    let positions = opened.model.architecture().max_positions;
    let context = args.context.unwrap_or_else(|| positions.min(DEFAULT_CONTEXT));
    if !(2..=positions).contains(&context) {
        return Err(Error::usage(
            format!(
                "--context is {context}; it must be at least 2 and at most the model's {positions} positions"
            ),
            format!("choose a value from 2 to {positions}"),
        ));
    }
    let decoder = args.decoding.load(&opened, context, session)?;
    let mut generator = Generator::new(&decoder);
    let mut input = Input::new()?;
    let mut talk = Messages::new(args.system.as_deref());
    session.progress.note("type /help for a list of commands");
    while let Some(line) = input.line()? {
        let line = line.trim();
        let (command, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match command {
            "" => continue,
            "/exit" | "/quit" => break,
            "/help" => {
                output::print(&format!("{COMMANDS}\n"))?;
                continue;
            }
            "/new" => {
                talk = Messages::new(args.system.as_deref());
                session.progress.note("[new conversation]");
                continue;
            }
            "/system" => {
                talk = Messages::new(Some(rest.trim()));
                session.progress.note("[new conversation with this system message]");
                continue;
            }
            "/retry" => {
                if !talk.pop("assistant") {
                    output::print_message("no answer to retry");
                    continue;
                }
                settings.seed = settings.seed.wrapping_add(1);
            }
            _ if command.starts_with('/') && !command[1..].contains('/') => {
                let known = ["/new", "/system", "/retry", "/help", "/exit", "/quit"];
                let remedy = suggestion(command, "type /help for a list", &known);
                output::print_message(&format!("unknown command {command}; {remedy}"));
                continue;
            }
            _ => talk.push("user", line),
        }
        let conversation = Conversation::of_messages(&talk.messages).map_err(|reason| {
            Error::usage(format!("the conversation {reason}"), "start a new conversation with /new")
        })?;
        let prompt = template.prompt(&conversation, Path::new("the conversation"))?;
        let tokens = tokenizer.encode_rendered(&prompt)?.into_iter().map(|(token, _)| token).collect();
        let tokens = generation::checked_tokens(&opened, tokens)?;
        if tokens.len() >= context {
            output::print_message(&format!(
                "the conversation has {} tokens, which leaves no room for an answer in a context of {context}; start \
                a new conversation with /new, or restart with a larger --context",
                tokens.len()
            ));
            talk.pop("user");
            continue;
        }
        let mut answer = String::new();
        let mut show = |text: &str| {
            answer.push_str(text);
            output::print_written(text)
        };
        let (stop, cancel) = (args.decoding.stop(), &session.cancel);
        let written =
            generation::write(&mut generator, &tokenizer, &tokens, &settings, stop, cancel, &mut show);
        if !answer.ends_with('\n') {
            output::print("\n")?;
        }
        match written {
            Ok(written) => {
                session.progress.note(&format!("[{}]", written.rates()));
                match written.end {
                    End::MaxNewTokens => session
                        .progress
                        .note("[cut off at the token limit; raise --max-new-tokens for longer answers]"),
                    End::Context => session.progress.note("[cut off: the context is full]"),
                    _ => {}
                }
            }
            // The text so far stays in the conversation.
            Err(Error::Interrupted) if input.is_terminal() => {
                session.cancel.reset();
                session.progress.note("[interrupted]");
            }
            Err(error) => return Err(error),
        }
        talk.push("assistant", answer.trim_end());
    }
    Ok(())
}

enum Input {
    Terminal(Box<DefaultEditor>),
    Lines(usize),
}

impl Input {
    fn new() -> Result<Self> {
        if !(std::io::stdin().is_terminal() && std::io::stdout().is_terminal()) {
            return Ok(Self::Lines(0));
        }
        let editor = DefaultEditor::new().map_err(failed)?;
        Ok(Self::Terminal(Box::new(editor)))
    }

    fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal(_))
    }

    /// Returns the next message, or `None` at the end; on a terminal, Ctrl-C and Ctrl-D end the input.
    fn line(&mut self) -> Result<Option<String>> {
        match self {
            Self::Terminal(editor) => loop {
                match editor.readline("> ") {
                    Ok(line) => {
                        // A full or disabled history must not end the conversation.
                        let _ = editor.add_history_entry(&line);
                        return Ok(Some(line));
                    }
                    Err(ReadlineError::Eof | ReadlineError::Interrupted) => return Ok(None),
                    Err(ReadlineError::Io(error)) if error.kind() == std::io::ErrorKind::InvalidData => {
                        output::print_message("that line is not UTF-8 text and was ignored");
                    }
                    Err(error) => return Err(failed(error)),
                }
            },
            Self::Lines(number) => {
                *number += 1;
                let path = || PathBuf::from("standard input");
                let mut bytes = Vec::new();
                let mut bounded = std::io::Read::take(std::io::stdin().lock(), MAX_LINE_BYTES as u64 + 1);
                bounded.read_until(b'\n', &mut bytes).map_err(|e| Error::io("read", path(), e))?;
                let fault = |reason: &str| Error::InputFile {
                    path: path(),
                    line: Some(*number),
                    reason: reason.into(),
                    remedy: "write one message of UTF-8 text per line, of at most 1 MiB".into(),
                };
                match bytes.len() {
                    0 => Ok(None),
                    len if len > MAX_LINE_BYTES => Err(fault("is too long")),
                    _ => String::from_utf8(bytes).map(Some).map_err(|_| fault("is not UTF-8")),
                }
            }
        }
    }
}

fn failed(error: ReadlineError) -> Error {
    Error::io("read", "the terminal", std::io::Error::other(error))
}
