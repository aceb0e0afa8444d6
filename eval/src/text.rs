//! A text cut into windows by a [`Profile`], with the hashes that identify it.

use std::ops::Range;
use std::path::Path;

use quant_formats::digest::sha256_hex;
use quant_formats::wording::counted;
use quant_formats::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::profile::ProfileRequest;
use crate::{EncodedText, Profile, Tokenizer, wikitext};

/// Maximum number of tokens over all windows of `hf-stride`. With a small stride, windows multiply the tokens of a
/// text.
const MAX_READ: usize = 1 << 28;
const DOCUMENTS_PER_BATCH: usize = 256;

/// Consecutive tokens, the last of which are scored, each given the tokens before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Window {
    /// The tokens that the model reads, followed by one token that is only predicted.
    pub tokens: Vec<u32>,
    /// Index of the first scored token; at least 1.
    pub first: usize,
}

impl Window {
    /// The tokens that the model reads.
    pub fn input(&self) -> &[u32] {
        &self.tokens[..self.tokens.len() - 1]
    }

    /// Number of scored tokens.
    pub fn scored(&self) -> usize {
        self.tokens.len() - self.first
    }
}

/// The token before a text's own tokens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct BosPolicy {
    /// Where the token is inserted.
    pub policy: Bos,
    /// The token, if any.
    pub token: Option<u32>,
}

/// The position of a BOS token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Bos {
    /// The tokenizer adds no such token.
    None,
    /// At the start of the text, where the tokenizer adds it; later windows do not begin with it.
    Text,
    /// At the start of every window, where it replaces the window's first token.
    Windows,
    /// Before every document; it is not scored.
    Documents,
}

/// Windows to score.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct EvaluationText {
    /// The windows, in the order of the text.
    pub windows: Vec<Window>,
    /// The rule they were cut by.
    pub profile: Profile,
    /// The rule's name, with the prefix `wt2-` if the windows are all those of WikiText-2.
    pub id: String,
    /// The token before the text's own tokens.
    pub bos: BosPolicy,
    /// Warnings about anything unusual, one line each.
    pub warnings: Vec<String>,
    /// Facts about the windows that the user may not expect, one line each.
    pub notes: Vec<String>,
    /// Bytes of the text that the scored tokens cover.
    pub scored_bytes: u64,
    /// Words of the documents, if the rule counts them and no window was left out.
    pub words: Option<u64>,
    /// SHA-256 of the text, with documents joined by `\n\n`.
    pub text_sha256: String,
    /// Bytes of the joined text.
    pub text_bytes: u64,
    /// SHA-256 of all windows.
    pub tokens_sha256: String,
    /// SHA-256 of `tokenizer.json`.
    pub tokenizer_sha256: String,
}

impl EvaluationText {
    /// Tokenizes and cuts documents. `windows` limits how many windows are kept, from the start. `origin` names the
    /// documents in messages.
    ///
    /// # Errors
    /// [`Error::Usage`] if WikiText-2 is requested and this is a different text. [`Error::InputFile`] if the text is
    /// too short or too long for the rule, or the rule needs a token that the tokenizer's configuration does not name.
    /// Errors of the tokenizer.
    pub fn new(
        tokenizer: &dyn Tokenizer,
        documents: &[String],
        request: ProfileRequest,
        windows: Option<usize>,
        origin: &Path,
    ) -> Result<Self> {
        let profile = request.profile;
        // As the rows of WikiText.
        let joined = documents.join("\n\n");
        let scored = match request.wikitext {
            true => wikitext::as_scored(&joined, profile).ok_or_else(|| {
                Error::usage(
                    format!(
                        "{} is not the raw test split of WikiText-2, which wt2 profiles require",
                        origin.display()
                    ),
                    format!("use ‹profile={}›, which applies the same rule to any text", profile.name()),
                )
            })?,
            false => joined.into(),
        };
        let text_sha256 = sha256_hex(scored.as_bytes());
        let cut = match profile {
            Profile::LmEvalRolling { window } => rolling(tokenizer, documents, window)?,
            _ => of_stream(tokenizer, &scored, profile, windows, origin)?,
        };
        let Cut { windows: mut all, bytes, words, bos, warnings, tokens } = cut;
        if all.is_empty() {
            let window = profile.window();
            let lacks = match profile {
                Profile::LlamaCpp { .. } => {
                    format!("fewer than the 2 windows of {window} that llama.cpp profiles need")
                }
                Profile::Gptq { .. } => format!("fewer than one window of {window}"),
                _ => "too few to score one".into(),
            };
            return Err(Error::InputFile {
                path: origin.to_owned(),
                line: None,
                reason: format!("has {}, {lacks}", counted(tokens, "token")),
                remedy: "give a longer text, or a shorter ‹window›".into(),
            });
        }
        let wanted = windows.unwrap_or(all.len()).max(1);
        let notes = match all.len() < wanted {
            true => {
                let has = counted(all.len(), "window");
                vec![format!("{} has only {has} of {}; all are scored", origin.display(), profile.window())]
            }
            false => Vec::new(),
        };
        let wanted = wanted.min(all.len());
        let whole = all.len() == wanted;
        all.truncate(wanted);
        Ok(Self {
            id: if whole { wikitext::profile_id(profile, &text_sha256) } else { profile.name() },
            scored_bytes: bytes[..wanted].iter().sum(),
            words: words.filter(|_| whole),
            tokens_sha256: tokens_sha256(&all),
            windows: all,
            profile,
            bos,
            warnings,
            notes,
            text_sha256,
            text_bytes: scored.len() as u64,
            tokenizer_sha256: tokenizer.sha256().to_owned(),
        })
    }

    /// Creates a text of windows that an engine has cut itself by the rule of `profile`. Numbers of bytes and words,
    /// and hashes of text and tokenizer, are unknown; the fields can be set. Without bytes,
    /// [`Scores::bits_per_byte`](crate::Scores::bits_per_byte) is absent.
    ///
    /// # Errors
    /// [`Error::Usage`] when there is no window, or one has no token to score or no token before those it scores.
    pub fn of_windows(windows: Vec<Window>, profile: Profile) -> Result<Self> {
        let empty = windows.iter().position(|w| w.first == 0 || w.first >= w.tokens.len());
        if windows.is_empty() || empty.is_some() {
            let which = empty.map_or("there is no window".into(), |i| format!("window {i} scores no token"));
            return Err(Error::usage(
                format!("the text cannot be scored: {which}"),
                "give windows with at least one token before the first scored one",
            ));
        }
        Ok(Self {
            id: profile.name(),
            scored_bytes: 0,
            words: None,
            tokens_sha256: tokens_sha256(&windows),
            windows,
            profile,
            bos: BosPolicy { policy: Bos::None, token: None },
            warnings: Vec::new(),
            notes: Vec::new(),
            text_sha256: String::new(),
            text_bytes: 0,
            tokenizer_sha256: String::new(),
        })
    }

    /// Length of the longest window input.
    pub fn longest_input(&self) -> usize {
        self.windows.iter().map(|w| w.input().len()).max().unwrap_or(0)
    }

    /// Number of scored tokens.
    pub fn tokens_scored(&self) -> usize {
        self.windows.iter().map(Window::scored).sum()
    }

    /// The largest token id in all windows.
    pub fn largest_token(&self) -> Option<u32> {
        self.windows.iter().flat_map(|w| &w.tokens).copied().max()
    }
}

fn tokens_sha256(windows: &[Window]) -> String {
    let numbers = windows.iter().flat_map(|w| w.tokens.iter().copied().chain([w.first as u32]));
    sha256_hex(numbers.flat_map(u32::to_le_bytes).collect::<Vec<u8>>())
}

struct Cut {
    windows: Vec<Window>,
    /// Bytes of text that each window's scored tokens cover.
    bytes: Vec<u64>,
    words: Option<u64>,
    bos: BosPolicy,
    warnings: Vec<String>,
    tokens: usize,
}

/// Tokens, each with the number of bytes by which it extends the text that the tokens before it cover.
struct Tokens {
    ids: Vec<u32>,
    bytes: Vec<u64>,
    /// Whether the first token is not part of the text.
    begins_with_special: bool,
}

impl Tokens {
    /// Tokenizes texts, each separately.
    fn of_each(tokenizer: &dyn Tokenizer, texts: &[&str]) -> Result<Vec<Self>> {
        let alone = tokenizer.encode(&[""])?.into_iter().flatten().map(|(id, _)| id).collect::<Vec<u32>>();
        let each = tokenizer.encode(texts)?;
        if each.len() != texts.len() {
            return Err(Error::usage(
                format!("the tokenizer returned tokens for {} texts instead of {}", each.len(), texts.len()),
                "return one list of tokens for each text",
            ));
        }
        for (text, tokens) in texts.iter().zip(&each) {
            let outside = |place: &Range<usize>| place.start > place.end || place.end > text.len();
            if let Some((id, place)) = tokens.iter().find(|(_, place)| outside(place)) {
                return Err(Error::usage(
                    format!(
                        "the tokenizer places token {id} at bytes {} to {} of a text of {} bytes",
                        place.start,
                        place.end,
                        text.len()
                    ),
                    "return the range of bytes in the text for each token",
                ));
            }
        }
        Ok(each.into_iter().map(|placed| Self::of(placed, &alone)).collect())
    }

    /// `alone` holds the tokens of an empty text, which shows whether the tokenizer adds a first token.
    fn of(placed: EncodedText, alone: &[u32]) -> Self {
        let begins_with_special = placed.first().map(|(id, _)| id) == alone.first() && !alone.is_empty();
        let mut bytes = Vec::with_capacity(placed.len());
        let mut ids = Vec::with_capacity(placed.len());
        let mut end = 0;
        for (id, place) in placed {
            ids.push(id);
            bytes.push(place.end.saturating_sub(end) as u64);
            end = end.max(place.end);
        }
        Self { ids, bytes, begins_with_special }
    }

    fn window(&self, tokens: Range<usize>, scored: Range<usize>) -> (Window, u64) {
        let window = Window {
            tokens: self.ids[tokens.start..scored.end].to_vec(),
            first: scored.start - tokens.start,
        };
        (window, self.bytes[scored].iter().sum())
    }
}

fn of_stream(
    tokenizer: &dyn Tokenizer,
    text: &str,
    profile: Profile,
    wanted: Option<usize>,
    origin: &Path,
) -> Result<Cut> {
    let tokenized = Tokens::of_each(tokenizer, &[text])?.into_iter().next();
    let tokens =
        tokenized.ok_or_else(|| Error::Internal("the tokenizer returned no tokens for a text".into()))?;
    let count = tokens.ids.len();
    let bos = tokens.begins_with_special.then(|| tokens.ids[0]);
    let mut warnings = Vec::new();
    if bos.is_none() && tokenizer.adds_bos() == Some(true) {
        warnings.push(
            "tokenizer_config.json requests a BOS token (add_bos_token), but tokenizer.json adds none: the \
            text is scored without one"
                .to_owned(),
        );
    }
    if bos.is_some() && tokens.ids.get(1) == bos.as_ref() {
        warnings.push(
            "the text begins with the token that the tokenizer adds before it, so this token occurs twice"
                .to_owned(),
        );
    }
    let policy = match (bos, profile) {
        (None, _) => Bos::None,
        (Some(_), Profile::LlamaCpp { .. }) => Bos::Windows,
        (Some(_), _) => Bos::Text,
    };
    let cut: Vec<(Window, u64)> = match profile {
        Profile::Gptq { window } => (0..count / window)
            .map(|i| i * window)
            .map(|at| tokens.window(at..at + window, at + 1..at + window))
            .collect(),
        // llama.cpp requires at least two windows.
        Profile::LlamaCpp { window } if count < 2 * window => Vec::new(),
        Profile::LlamaCpp { window } => (0..count / window)
            .map(|i| {
                let at = i * window;
                let (mut cut, bytes) = tokens.window(at..at + window, at + window / 2 + 1..at + window);
                if let Some(bos) = bos {
                    cut.tokens[0] = bos;
                }
                (cut, bytes)
            })
            .collect(),
        Profile::HfStride { window, stride } => {
            // One window more than requested, to find out whether the text has more.
            let max = wanted.map_or(usize::MAX, |n| n.saturating_add(1));
            let tokens_read = (count / stride).min(max).saturating_mul(window.min(count));
            if tokens_read > MAX_READ {
                return Err(Error::InputFile {
                    path: origin.to_owned(),
                    line: None,
                    reason: format!(
                        "has {count} tokens, of which windows of {window} with a stride of {stride} would \
                        read {tokens_read} in total; the limit is {MAX_READ}"
                    ),
                    remedy: "give a shorter text, fewer ‹windows›, or a larger stride".into(),
                });
            }
            let mut cut = Vec::new();
            let (mut begin, mut scored) = (0, 1);
            while scored < count && cut.len() < max {
                let end = (begin + window).min(count);
                // The first token of a window has no context.
                if scored.max(begin + 1) < end {
                    cut.push(tokens.window(begin..end, scored.max(begin + 1)..end));
                }
                scored = end;
                begin += stride;
            }
            cut
        }
        Profile::LmEvalRolling { .. } => Vec::new(),
    };
    let (windows, bytes) = cut.into_iter().unzip();
    Ok(Cut { windows, bytes, words: None, bos: BosPolicy { policy, token: bos }, warnings, tokens: count })
}

fn rolling(tokenizer: &dyn Tokenizer, documents: &[String], window: usize) -> Result<Cut> {
    let prefix = tokenizer.document_prefix()?;
    let (mut windows, mut bytes) = (Vec::new(), Vec::new());
    let (mut words, mut count, mut bytes_without_tokens) = (0, 0, 0);
    let mut warnings = Vec::new();
    for some in documents.chunks(DOCUMENTS_PER_BATCH) {
        let texts: Vec<&str> = some.iter().map(String::as_str).collect();
        let tokenized = Tokens::of_each(tokenizer, &texts)?;
        for (document, tokens) in texts.into_iter().zip(tokenized) {
            words += word_count(document);
            if tokens.ids.is_empty() {
                bytes_without_tokens += document.len() as u64;
            }
            count += tokens.ids.len();
            if tokens.begins_with_special && tokens.ids[0] == prefix && warnings.is_empty() {
                warnings.push(
                    "the tokenizer adds the prefix token, too, so it occurs twice, and the second \
                    occurrence is scored, as in lm-evaluation-harness"
                        .to_owned(),
                );
            }
            let mut predicted = 0;
            // Including bytes that no token covers.
            let mut rest = document.len() as u64;
            while predicted < tokens.ids.len() {
                let end = (predicted + window).min(tokens.ids.len());
                let scored = match end == tokens.ids.len() {
                    true => rest,
                    false => tokens.bytes[predicted..end].iter().sum(),
                };
                rest -= scored;
                if predicted == 0 {
                    let mut ids = Vec::with_capacity(end + 1);
                    ids.push(prefix);
                    ids.extend_from_slice(&tokens.ids[..end]);
                    windows.push(Window { tokens: ids, first: 1 });
                } else {
                    let begin = end - window - 1;
                    windows
                        .push(Window { tokens: tokens.ids[begin..end].to_vec(), first: predicted - begin });
                }
                bytes.push(scored);
                predicted = end;
            }
        }
    }
    if let Some(last) = bytes.last_mut() {
        *last += bytes_without_tokens;
    }
    let bos = BosPolicy { policy: Bos::Documents, token: Some(prefix) };
    Ok(Cut { windows, bytes, words: Some(words), bos, warnings, tokens: count })
}

/// As `len(re.split(r"\s+", text))` in Python.
fn word_count(text: &str) -> u64 {
    let mut words = 1;
    let mut inside = false;
    for c in text.chars() {
        let space = c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c);
        words += u64::from(space && !inside);
        inside = space;
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(ids: Vec<u32>) -> Tokens {
        let bytes = vec![1; ids.len()];
        Tokens { ids, bytes, begins_with_special: false }
    }

    #[test]
    fn words_are_counted_as_python_splits() {
        for (text, words) in
            [("", 1), ("a", 1), ("a b", 2), (" a", 2), ("a  \n b\t", 3), ("\u{a0}a\u{1f}b", 3)]
        {
            assert_eq!(word_count(text), words, "{text:?}");
        }
    }

    #[test]
    fn a_window_ends_with_its_last_scored_token() {
        let tokens = stream((0..10).collect());
        let (window, bytes) = tokens.window(2..8, 5..8);
        assert_eq!(window, Window { tokens: (2..8).collect(), first: 3 });
        assert_eq!((window.input(), window.scored(), bytes), (&[2, 3, 4, 5, 6][..], 3, 3));
    }
}
