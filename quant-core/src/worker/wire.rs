//! Questions and answers as bytes. All integers are little-endian; a list is its length followed by its items.

use std::borrow::Cow;

use serde_json::{Value, json};

use super::frame::Frame;
use super::{Answer, Chat, ChatForm, Content, Encoded, Fault, Loadable, Question, RenderedText};
use crate::system::{path_bytes, path_of_bytes};

/// The version of the protocol, which must be the same on both sides.
const VERSION: u64 = 1;

trait FrameWriter<'a> {
    fn number(&mut self, value: u64);
    fn text(&mut self, text: &str);
    fn large(&mut self, bytes: &'a [u8]);
}

impl<'a> FrameWriter<'a> for Frame<'a> {
    fn number(&mut self, value: u64) {
        self.put(&value.to_le_bytes());
    }

    fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.put(text.as_bytes());
    }

    fn large(&mut self, bytes: &'a [u8]) {
        self.number(bytes.len() as u64);
        self.borrow(bytes);
    }
}

/// Takes values from a message; `None` if the message does not contain one.
struct FrameReader<'a>(&'a [u8]);

impl<'a> FrameReader<'a> {
    fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn number(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.bytes(8)?.try_into().ok()?))
    }

    fn len(&mut self) -> Option<usize> {
        usize::try_from(self.number()?).ok()
    }

    fn text(&mut self) -> Option<&'a str> {
        let len = self.len()?;
        std::str::from_utf8(self.bytes(len)?).ok()
    }

    fn flag(&mut self) -> Option<bool> {
        match self.number()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    fn optional(&mut self) -> Option<Option<u64>> {
        Some(if self.flag()? { Some(self.number()?) } else { None })
    }

    fn words(&mut self) -> Option<Vec<u32>> {
        let len = self.len()?;
        let bytes = self.bytes(len.checked_mul(4)?)?;
        Some(bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    /// A list of items that have at least one byte each, so that a false length is detected early.
    fn list<T>(&mut self, mut item: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let len = self.len()?;
        if len > self.0.len() {
            return None;
        }
        (0..len).map(|_| item(self)).collect()
    }

    /// The value, if the message ends after it.
    fn whole<T>(self, value: T) -> Option<T> {
        self.0.is_empty().then_some(value)
    }
}

/// Writes the first message: the file to load, and the number of threads for processing it.
pub(super) fn write_load(loadable: &Loadable, threads: usize) -> Frame<'_> {
    let mut frame = Frame::default();
    frame.number(VERSION);
    frame.number(threads as u64);
    frame.large(path_bytes(&loadable.path));
    match &loadable.content {
        Content::Tokenizer(json) => {
            frame.number(0);
            frame.large(json);
        }
        Content::Template { source, tokens } => {
            frame.number(1);
            frame.large(source.as_bytes());
            frame.number(tokens.len() as u64);
            for (name, token) in tokens {
                frame.text(name);
                frame.text(token);
            }
        }
    }
    frame
}

pub(super) fn read_load(bytes: &[u8]) -> Option<(Loadable, usize)> {
    let mut take = FrameReader(bytes);
    if take.number()? != VERSION {
        return None;
    }
    let threads = take.len()?;
    let len = take.len()?;
    let path = path_of_bytes(take.bytes(len)?);
    let content = match take.number()? {
        0 => {
            let len = take.len()?;
            Content::Tokenizer(take.bytes(len)?.to_vec())
        }
        1 => Content::Template {
            source: take.text()?.to_owned(),
            tokens: take.list(|t| Some((t.text()?.to_owned(), t.text()?.to_owned())))?,
        },
        _ => return None,
    };
    take.whole((Loadable { path, content }, threads))
}

pub(super) fn write_question<'a>(question: &'a Question<'_>) -> Frame<'a> {
    let mut frame = Frame::default();
    match question {
        Question::Encode { texts, special, places } => {
            frame.number(0);
            frame.number(u64::from(*special));
            frame.number(u64::from(*places));
            frame.number(texts.len() as u64);
            texts.iter().for_each(|text| frame.large(text.as_bytes()));
        }
        Question::Decode { tokens } => {
            frame.number(1);
            frame.number(tokens.len() as u64);
            tokens.iter().for_each(|tokens| put_words(&mut frame, tokens));
        }
        Question::LargestToken => frame.number(2),
        Question::TokenId(token) => {
            frame.number(3);
            frame.text(token);
        }
        Question::Render { chats, form } => {
            frame.number(4);
            frame.number(match form {
                ChatForm::Whole => 0,
                ChatForm::Marked => 1,
                ChatForm::Prompt => 2,
            });
            frame.number(chats.len() as u64);
            for chat in chats {
                frame.text(&json!([chat.messages, chat.tools]).to_string());
            }
        }
    }
    frame
}

pub(super) fn read_question(bytes: &[u8]) -> Option<Question<'_>> {
    let mut take = FrameReader(bytes);
    let question = match take.number()? {
        0 => {
            let (special, places) = (take.flag()?, take.flag()?);
            Question::Encode { special, places, texts: take.list(FrameReader::text)? }
        }
        1 => Question::Decode { tokens: take.list(|t| t.words().map(Cow::Owned))? },
        2 => Question::LargestToken,
        3 => Question::TokenId(take.text()?),
        4 => {
            let form = match take.number()? {
                0 => ChatForm::Whole,
                1 => ChatForm::Marked,
                2 => ChatForm::Prompt,
                _ => return None,
            };
            Question::Render { form, chats: take.list(|t| chat(t.text()?).map(Cow::Owned))? }
        }
        _ => return None,
    };
    take.whole(question)
}

fn chat(json: &str) -> Option<Chat> {
    match serde_json::from_str(json).ok()? {
        Value::Array(parts) => match <[Value; 2]>::try_from(parts).ok()? {
            [Value::Array(messages), tools] => Some(Chat { messages, tools }),
            _ => None,
        },
        _ => None,
    }
}

fn put_words(frame: &mut Frame<'_>, words: &[u32]) {
    frame.number(words.len() as u64);
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    frame.put(&bytes);
}

fn put_optional(frame: &mut Frame<'_>, value: Option<u64>) {
    frame.number(u64::from(value.is_some()));
    value.into_iter().for_each(|value| frame.number(value));
}

fn put_fault(frame: &mut Frame<'_>, fault: &Fault) {
    put_optional(frame, fault.line.map(|line| line as u64));
    frame.text(&fault.reason);
    frame.text(fault.remedy.marked());
}

fn take_fault(take: &mut FrameReader<'_>) -> Option<Fault> {
    let line = take.optional()?;
    let line = line.map(usize::try_from).transpose().ok()?;
    Some(Fault { line, reason: take.text()?.to_owned(), remedy: take.text()?.into() })
}

pub(super) fn write_answer(answer: &Result<Answer, Fault>) -> Frame<'_> {
    let mut frame = Frame::default();
    match answer {
        Ok(Answer::Encoded(all)) => {
            frame.number(0);
            frame.number(all.len() as u64);
            for Encoded { ids, places } in all {
                put_words(&mut frame, ids);
                put_words(&mut frame, places.as_flattened());
            }
        }
        Ok(Answer::Decoded(texts)) => {
            frame.number(1);
            frame.number(texts.len() as u64);
            texts.iter().for_each(|text| frame.text(text));
        }
        Ok(Answer::LargestToken(token)) => {
            frame.number(2);
            put_optional(&mut frame, token.map(u64::from));
        }
        Ok(Answer::TokenId(token)) => {
            frame.number(3);
            put_optional(&mut frame, token.map(u64::from));
        }
        Ok(Answer::Rendered(all)) => {
            frame.number(4);
            frame.number(all.len() as u64);
            for rendered in all {
                match rendered {
                    Ok(RenderedText { text, assistant }) => {
                        frame.number(0);
                        frame.large(text.as_bytes());
                        frame.number(assistant.len() as u64);
                        for span in assistant {
                            frame.number(span.start as u64);
                            frame.number(span.end as u64);
                        }
                    }
                    Err(fault) => {
                        frame.number(1);
                        put_fault(&mut frame, fault);
                    }
                }
            }
        }
        Err(fault) => {
            frame.number(5);
            put_fault(&mut frame, fault);
        }
    }
    frame
}

pub(super) fn read_answer(bytes: &[u8]) -> Option<Result<Answer, Fault>> {
    let mut take = FrameReader(bytes);
    let token = |value: Option<u64>| value.map(u32::try_from).transpose().ok();
    let answer = match take.number()? {
        0 => Ok(Answer::Encoded(take.list(|t| {
            let (ids, places) = (t.words()?, t.words()?);
            let (places, rest) = places.as_chunks::<2>();
            rest.is_empty().then(|| Encoded { ids, places: places.to_vec() })
        })?)),
        1 => Ok(Answer::Decoded(take.list(|t| Some(t.text()?.to_owned()))?)),
        2 => Ok(Answer::LargestToken(token(take.optional()?)?)),
        3 => Ok(Answer::TokenId(token(take.optional()?)?)),
        4 => Ok(Answer::Rendered(take.list(|t| match t.number()? {
            0 => {
                let text = t.text()?.to_owned();
                let assistant = t.list(|t| Some(t.len()?..t.len()?))?;
                Some(Ok(RenderedText { text, assistant }))
            }
            1 => Some(Err(take_fault(t)?)),
            _ => None,
        })?)),
        5 => Err(take_fault(&mut take)?),
        _ => return None,
    };
    take.whole(answer)
}

/// The longest message accepted as the answer to a question, in bytes. No tokenizer produces as many tokens per byte.
/// The output of a template is limited by the worker itself.
pub(super) fn longest_answer(question: &Question<'_>) -> u64 {
    const SLACK: u64 = 1 << 20;
    const TOKENS_PER_BYTE: u64 = 16;
    const BYTES_PER_TOKEN: u64 = 4096;
    const MAX_RENDERED_BYTES: u64 = 17 << 20;
    let each: u64 = match question {
        Question::Encode { texts, places, .. } => {
            let bytes: u64 = texts.iter().map(|t| t.len() as u64).sum();
            bytes * TOKENS_PER_BYTE * if *places { 12 } else { 4 } + 64 * texts.len() as u64
        }
        Question::Decode { tokens } => tokens.iter().map(|t| t.len() as u64 * BYTES_PER_TOKEN + 64).sum(),
        Question::LargestToken | Question::TokenId(_) => 0,
        Question::Render { chats, .. } => chats.len() as u64 * MAX_RENDERED_BYTES,
    };
    SLACK + each
}
