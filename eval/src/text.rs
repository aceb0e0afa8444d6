//! A text cut into windows by a [`Profile`], with what identifies it.

use std::ops::Range;
use std::path::Path;

use quant_core::calibrate::{TextTokenizer, TokenizerSettings};
use quant_core::digest::sha256_hex;
use quant_core::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::profile::ProfileRequest;
use crate::{Profile, wikitext};

/// A stride far below its windows makes many times a text's tokens; so many are held at most.
const MOST_READ: usize = 1 << 28;
/// Documents that are tokenized together.
const DOCUMENTS_AT_ONCE: usize = 256;

/// Tokens of which the last ones are scored, each given those before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Window {
    /// What the model reads, and at the end one token that it need not.
    pub tokens: Vec<u32>,
    /// The first that is scored; at least 1.
    pub first: usize,
}

impl Window {
    /// What the model reads.
    pub fn input(&self) -> &[u32] {
        &self.tokens[..self.tokens.len() - 1]
    }

    /// How many tokens are scored.
    pub fn scored(&self) -> usize {
        self.tokens.len() - self.first
    }
}

/// What stands before a text's own tokens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct BosPolicy {
    /// Where it stands.
    pub policy: Bos,
    /// Which token it is, if any.
    pub token: Option<u32>,
}

/// Where a token for the beginning of a text stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bos {
    /// Nowhere: the tokenizer adds none.
    None,
    /// At the start of the text, as the tokenizer adds it, and not of the windows after the first.
    Text,
    /// At the start of every window, in place of the token there.
    Windows,
    /// Before every document, not scored.
    Documents,
}

/// Windows to score.
#[derive(Debug, Clone)]
pub struct EvaluationText {
    /// In order; windows of equal length stand side by side.
    pub windows: Vec<Window>,
    /// The rule they were cut by.
    pub profile: Profile,
    /// The rule's name, with that of the text where it is a known one.
    pub id: String,
    /// What stands before the text's own tokens.
    pub bos: BosPolicy,
    /// What is odd about it, each fit for a line of text.
    pub warnings: Vec<String>,
    /// Bytes of the text that the scored tokens stand for.
    pub scored_bytes: u64,
    /// Words of the documents, where the rule counts them.
    pub words: Option<u64>,
    /// SHA-256 of the text, of documents joined by an empty line.
    pub text_sha256: String,
    /// Bytes of the same.
    pub text_bytes: u64,
    /// SHA-256 of all windows: of each its tokens and the number of the first that is scored, as
    /// little-endian 32-bit integers.
    pub tokens_sha256: String,
    /// SHA-256 of `tokenizer.json`.
    pub tokenizer_sha256: String,
}

/// The tokenizer of a model with what its authors say of it.
#[derive(Debug)]
pub struct Tokenization<'a> {
    /// `tokenizer.json`.
    pub tokenizer: &'a TextTokenizer,
    /// `tokenizer_config.json`.
    pub settings: &'a TokenizerSettings,
    /// SHA-256 of the former.
    pub sha256: String,
}

impl EvaluationText {
    /// Tokenizes and cuts documents; `windows` limits how many are kept, from the start. `origin` names
    /// them in messages.
    ///
    /// # Errors
    /// When the text does not fill one window, or fewer than `windows`; when WikiText-2 is asked for
    /// and this is another text; when the rule needs a token that the tokenizer does not name.
    pub fn new(
        tokenization: &Tokenization<'_>,
        documents: &[String],
        request: ProfileRequest,
        windows: Option<usize>,
        origin: &Path,
    ) -> Result<Self> {
        let profile = request.profile;
        // Documents of a set are joined as the rows of WikiText are.
        let joined = documents.join("\n\n");
        let scored = match request.wikitext {
            true => wikitext::as_scored(&joined, profile).ok_or_else(|| {
                Error::usage(
                    format!(
                        "{} is not WikiText-2's raw test split, which wt2 profiles are of",
                        origin.display()
                    ),
                    format!("ask for the same rule on any text: ‹profile={}›", profile.name()),
                )
            })?,
            false => joined.into(),
        };
        let text_sha256 = sha256_hex(scored.as_bytes());
        let cut = match profile {
            Profile::LmEvalRolling { window } => rolling(tokenization, documents, window)?,
            _ => of_stream(tokenization, &scored, profile, windows, origin)?,
        };
        let Cut { windows: mut all, bytes, words, bos, warnings, tokens } = cut;
        let wanted = windows.unwrap_or(all.len()).max(1);
        if all.len() < wanted {
            let (have, window) = (all.len(), profile.window());
            let needed = match profile {
                Profile::LlamaCpp { .. } if wanted < 2 => {
                    "llama.cpp scores none of a text of less than 2".into()
                }
                _ => format!("{wanted} are needed"),
            };
            return Err(Error::Text {
                path: origin.to_owned(),
                line: None,
                reason: format!("gives {tokens} tokens, that is {have} windows of {window}; {needed}"),
            });
        }
        let whole = all.len() == wanted;
        all.truncate(wanted);
        Ok(Self {
            // What stands in the literature is of the whole text.
            id: if whole { wikitext::profile_id(profile, &text_sha256) } else { profile.name() },
            scored_bytes: bytes[..wanted].iter().sum(),
            // Words are of whole documents.
            words: words.filter(|_| whole),
            tokens_sha256: tokens_sha256(&all),
            windows: all,
            profile,
            bos,
            warnings,
            text_sha256,
            text_bytes: scored.len() as u64,
            tokenizer_sha256: tokenization.sha256.clone(),
        })
    }

    /// The longest input of a window.
    pub fn longest_input(&self) -> usize {
        self.windows.iter().map(|w| w.input().len()).max().unwrap_or(0)
    }

    /// All scored tokens.
    pub fn tokens_scored(&self) -> usize {
        self.windows.iter().map(Window::scored).sum()
    }

    /// The largest token of all windows.
    pub fn largest_token(&self) -> Option<u32> {
        self.windows.iter().flat_map(|w| &w.tokens).copied().max()
    }
}

fn tokens_sha256(windows: &[Window]) -> String {
    let numbers = windows.iter().flat_map(|w| w.tokens.iter().copied().chain([w.first as u32]));
    sha256_hex(numbers.flat_map(u32::to_le_bytes).collect::<Vec<u8>>())
}

/// Windows of a text.
struct Cut {
    windows: Vec<Window>,
    /// Bytes of text that each window's scored tokens stand for.
    bytes: Vec<u64>,
    words: Option<u64>,
    bos: BosPolicy,
    warnings: Vec<String>,
    /// Tokens of the text.
    tokens: usize,
}

/// Tokens with the bytes of text that each adds to those before it.
struct Tokens {
    ids: Vec<u32>,
    bytes: Vec<u64>,
    /// Whether the first is not one of the text's own.
    begins_with_special: bool,
}

impl Tokens {
    /// The tokens of texts, each by itself.
    fn of_each(tokenizer: &TextTokenizer, texts: &[&str]) -> Result<Vec<Self>> {
        let alone = tokenizer.encode("")?;
        let each = tokenizer.encode_all_with_places(texts)?.into_iter();
        Ok(each.map(|placed| Self::of(placed, &alone)).collect())
    }

    /// From tokens with their places, and those that an empty text has.
    fn of(placed: Vec<(u32, Range<usize>)>, alone: &[u32]) -> Self {
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

/// The rules that cut one stream of tokens.
fn of_stream(
    tokenization: &Tokenization<'_>,
    text: &str,
    profile: Profile,
    wanted: Option<usize>,
    origin: &Path,
) -> Result<Cut> {
    let tokenized = Tokens::of_each(tokenization.tokenizer, &[text])?.into_iter().next();
    let tokens = tokenized.ok_or_else(|| Error::Internal("a text was not tokenized".into()))?;
    let count = tokens.ids.len();
    let bos = tokens.begins_with_special.then(|| tokens.ids[0]);
    let mut warnings = Vec::new();
    if bos.is_none() && tokenization.settings.adds_bos() == Some(true) {
        warnings.push(
            "tokenizer_config.json asks for a first token (add_bos_token), but tokenizer.json adds none: the \
             text is scored without"
                .to_owned(),
        );
    }
    if bos.is_some() && tokens.ids.get(1) == bos.as_ref() {
        warnings.push(
            "the text begins with the token that the tokenizer adds at its start: it is there twice"
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
        // Fewer than two windows are refused there.
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
            // One more than is wanted, so that it is known whether there are more.
            let most = wanted.map_or(usize::MAX, |n| n.saturating_add(1));
            let tokens_read = (count / stride).min(most).saturating_mul(window.min(count));
            if tokens_read > MOST_READ {
                return Err(Error::Text {
                    path: origin.to_owned(),
                    line: None,
                    reason: format!(
                        "gives {count} tokens, which windows of {window} every {stride} make {tokens_read} to read; \
                         at most {MOST_READ} are"
                    ),
                });
            }
            let mut cut = Vec::new();
            let (mut begin, mut scored) = (0, 1);
            while scored < count && cut.len() < most {
                let end = (begin + window).min(count);
                // A window's first token has nothing before it.
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

/// The rule that scores documents one by one.
fn rolling(tokenization: &Tokenization<'_>, documents: &[String], window: usize) -> Result<Cut> {
    let prefix = prefix(tokenization)?;
    let (mut windows, mut bytes) = (Vec::new(), Vec::new());
    let (mut words, mut count, mut bytes_without_tokens) = (0, 0, 0);
    let mut warnings = Vec::new();
    for some in documents.chunks(DOCUMENTS_AT_ONCE) {
        let texts: Vec<&str> = some.iter().map(String::as_str).collect();
        let tokenized = Tokens::of_each(tokenization.tokenizer, &texts)?;
        for (document, tokens) in texts.into_iter().zip(tokenized) {
            words += word_count(document);
            if tokens.ids.is_empty() {
                bytes_without_tokens += document.len() as u64;
            }
            count += tokens.ids.len();
            if tokens.begins_with_special && tokens.ids[0] == prefix && warnings.is_empty() {
                warnings.push(
                "the tokenizer adds the prefix itself: as in lm-evaluation-harness it stands there twice, and the \
                 second is scored"
                    .to_owned(),
            );
            }
            let mut predicted = 0;
            // All of a document counts, also what no token stands for.
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
                    // The model reads `window` tokens, of which it need not read the last.
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

/// Parts between runs of white space, empty ones at the ends included, as Python's
/// `re.split(r"\s+", text)` gives.
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

/// The token before a document: that for the beginning of a text, or else for its end.
fn prefix(tokenization: &Tokenization<'_>) -> Result<u32> {
    let special = tokenization.settings.special_tokens()?;
    let named = ["bos_token", "eos_token"].iter().find_map(|n| special.iter().find(|(name, _)| name == n));
    let fault = |reason: String| Error::InputFile {
        path: tokenization.settings.path().to_owned(),
        line: None,
        reason,
        remedy: "put the tokenizer_config.json that belongs to the model beside it, with a `bos_token` or \
                 `eos_token` of its vocabulary, or choose another ‹profile›"
            .into(),
    };
    if tokenization.settings.fields().is_empty() {
        return Err(fault("is missing: it names the token that lmeval-rolling puts before documents".into()));
    }
    let (name, token) = named.ok_or_else(|| {
        fault(
            "names neither `bos_token` nor `eos_token`, one of which lmeval-rolling puts before documents"
                .into(),
        )
    })?;
    tokenization
        .tokenizer
        .token_id(token)?
        .ok_or_else(|| fault(format!("names a `{name}` that tokenizer.json does not have")))
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
