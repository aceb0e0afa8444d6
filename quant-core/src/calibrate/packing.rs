//! Packs documents of different lengths into windows of one length.
//!
//! # The rule
//!
//! 1. A document longer than a window is cut into pieces of a window's length and a shorter last piece. Any other
//!    document is one piece.
//! 2. Pieces are placed in descending order of length, pieces of equal length in document order. Each piece is put into
//!    the window in which it leaves the least room (the first such window), or opens a new window (best-fit
//!    decreasing).
//! 3. The pieces of a window are sorted in document order, and windows by their first piece. The unused end of a window
//!    is filled with token 0, to which no other token attends.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::TokenUse;
use crate::names::unknown;
use crate::{Error, Result};

/// How documents are packed into windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Packing {
    /// `documents` for conversations, `stream` for plain text.
    #[default]
    Auto,
    /// Windows are cut from the concatenation of all documents; attention crosses document borders.
    Stream,
    /// Windows contain whole documents; only documents longer than a window are cut. Attention stays within a document,
    /// and positions start at 0 in each.
    Documents,
}

/// Which tokens the statistics of calibration include.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Mask {
    /// All tokens.
    #[default]
    None,
    /// Tokens written by the assistant of a conversation; prompts are only context.
    Prompts,
}

impl FromStr for Packing {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "stream" => Ok(Self::Stream),
            "documents" => Ok(Self::Documents),
            _ => Err(unknown("packing", text, "packings", &["auto", "stream", "documents"])),
        }
    }
}

impl FromStr for Mask {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "none" => Ok(Self::None),
            "prompts" => Ok(Self::Prompts),
            _ => Err(unknown("mask", text, "masks", &["none", "prompts"])),
        }
    }
}

impl fmt::Display for Packing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Stream => "stream",
            Self::Documents => "documents",
        })
    }
}

impl fmt::Display for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Prompts => "prompts",
        })
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Document {
    pub(super) tokens: Vec<u32>,
    /// The role of each token; `None` if all count.
    pub(super) uses: Option<Vec<TokenUse>>,
}

impl Document {
    fn uses(&self, at: usize) -> TokenUse {
        self.uses.as_ref().map_or(TokenUse::Counted, |u| u[at])
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Packed {
    pub(super) tokens: Vec<u32>,
    pub(super) uses: Vec<TokenUse>,
    pub(super) starts: Vec<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Piece {
    document: usize,
    from: usize,
    len: usize,
}

/// An incomplete window at the end is dropped.
pub(super) fn stream(documents: Vec<Document>, length: usize) -> (Vec<u32>, Option<Vec<TokenUse>>) {
    let mut uses = documents.iter().any(|d| d.uses.is_some()).then(Vec::new);
    let mut tokens = Vec::new();
    for document in documents {
        if let Some(uses) = &mut uses {
            uses.extend((0..document.tokens.len()).map(|i| document.uses(i)));
        }
        tokens.extend(document.tokens);
    }
    let whole = tokens.len() - tokens.len() % length;
    tokens.truncate(whole);
    if let Some(uses) = &mut uses {
        uses.truncate(whole);
    }
    (tokens, uses)
}

pub(super) fn pack(documents: &[Document], length: usize) -> Packed {
    let mut packed = Packed::default();
    for window in bins(documents, length) {
        let mut start = 0;
        for Piece { document, from, len } in window {
            let document = &documents[document];
            packed.tokens.extend_from_slice(&document.tokens[from..from + len]);
            packed.uses.extend((from..from + len).map(|i| document.uses(i)));
            packed.starts.extend(std::iter::repeat_n(start as u32, len));
            start += len;
        }
        // Each padding token is a segment of its own, so it takes part in no attention but its own.
        packed.tokens.extend(std::iter::repeat_n(0, length - start));
        packed.uses.extend(std::iter::repeat_n(TokenUse::Padding, length - start));
        packed.starts.extend(start as u32..length as u32);
    }
    packed
}

fn bins(documents: &[Document], length: usize) -> Vec<Vec<Piece>> {
    let mut pieces: Vec<Piece> = Vec::new();
    for (document, tokens) in documents.iter().map(|d| d.tokens.len()).enumerate() {
        let cuts = (0..tokens).step_by(length);
        pieces.extend(cuts.map(|from| Piece { document, from, len: length.min(tokens - from) }));
    }
    pieces.sort_by_key(|p| std::cmp::Reverse(p.len));
    let mut bins: Vec<Vec<Piece>> = Vec::new();
    // The free room of each window, with the window's index.
    let mut open: BTreeSet<(usize, usize)> = BTreeSet::new();
    for piece in pieces {
        let (room, bin) = match open.range((piece.len, 0)..).next().copied() {
            Some(found) => {
                open.remove(&found);
                found
            }
            None => {
                bins.push(Vec::new());
                (length, bins.len() - 1)
            }
        };
        bins[bin].push(piece);
        if room > piece.len {
            open.insert((room - piece.len, bin));
        }
    }
    bins.iter_mut().for_each(|b| b.sort_unstable());
    bins.sort_unstable();
    bins
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn document(tokens: std::ops::Range<u32>) -> Document {
        Document { tokens: tokens.collect(), uses: None }
    }

    #[test]
    fn whole_documents_share_a_window() {
        let documents = [document(10..16), document(20..23), document(30..55), document(60..64)];
        let packed = pack(&documents, 10);
        let windows: Vec<&[u32]> = packed.tokens.chunks(10).collect();
        assert_eq!(windows[0], [10, 11, 12, 13, 14, 15, 60, 61, 62, 63]);
        assert_eq!(windows[1], [20, 21, 22, 50, 51, 52, 53, 54, 0, 0]);
        assert_eq!(windows[2..], [(30..40).collect::<Vec<u32>>(), (40..50).collect()]);
        assert_eq!(packed.starts[..20], [0, 0, 0, 0, 0, 0, 6, 6, 6, 6, 0, 0, 0, 3, 3, 3, 3, 3, 8, 9]);
        assert_eq!(packed.uses.iter().filter(|u| **u == TokenUse::Padding).count(), 2);
        assert_eq!(packed.uses.iter().position(|u| *u == TokenUse::Padding), Some(18));
    }

    proptest! {
        #[test]
        fn nothing_is_lost_or_doubled(lengths in prop::collection::vec(0_usize..70, 0..40), length in 1_usize..33) {
            let mut next = 1;
            let documents: Vec<Document> = lengths
                .iter()
                .map(|&len| {
                    let document = document(next..next + len as u32);
                    next += len as u32;
                    document
                })
                .collect();
            let packed = pack(&documents, length);
            let real: BTreeSet<u32> = packed.tokens.iter().copied().filter(|t| *t != 0).collect();
            prop_assert_eq!(real.len(), next as usize - 1);
            let padding = packed.uses.iter().filter(|u| **u == TokenUse::Padding).count();
            prop_assert_eq!(real.len() + padding, packed.tokens.len());
            prop_assert_eq!(packed.tokens.len() % length, 0);
            for (row, &token) in packed.tokens.iter().enumerate() {
                let place = row % length;
                let start = packed.starts[row] as usize;
                prop_assert!(start <= place);
                if start < place && token != 0 {
                    prop_assert_eq!(packed.tokens[row - 1], token - 1);
                }
            }
            // No two windows have so much free space that their pieces would fit into one.
            let room: Vec<usize> = packed.uses.chunks(length)
                .map(|w| w.iter().filter(|u| **u == TokenUse::Padding).count()).collect();
            prop_assert!(room.iter().filter(|r| 2 * **r > length).count() <= 1);
        }
    }
}
