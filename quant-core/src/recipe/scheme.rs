//! Numeric formats of weights, and the short names they are asked for by.

use std::fmt;
use std::str::FromStr;

use crate::{Error, Result};

/// How many weights of a row share one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Granularity {
    /// Runs of this many input features; must divide the input width.
    Group(usize),
    /// The whole row: one scale an output channel.
    Channel,
}

impl Granularity {
    /// The group size for rows of width `columns`.
    pub fn group_size(self, columns: usize) -> usize {
        match self {
            Self::Group(size) => size,
            Self::Channel => columns,
        }
    }
}

/// The integer grid of a weight.
///
/// Written `w4a16-g128-sym`: bits, activations, granularity (`g32`, `g64`, `g128` … or `channel`),
/// symmetry (`sym` or `asym`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightScheme {
    /// Bits of one code: 3, 4 or 8.
    pub bits: u8,
    /// What shares a scale.
    pub granularity: Granularity,
    /// Whether the grid is symmetric about zero (no stored zero point).
    pub symmetric: bool,
}

impl WeightScheme {
    /// The widths this version can quantize to.
    pub const BITS: [u8; 3] = [3, 4, 8];

    /// The largest unsigned code, `2^bits − 1`.
    pub fn max_code(&self) -> u8 {
        u8::MAX >> (8 - self.bits)
    }

    /// Parses `text` such as `w3a16`, `w4a16-g64`, `w8a16-channel-asym`; what it leaves out comes
    /// from `self`.
    ///
    /// # Errors
    /// When a part is not understood; the message lists what is.
    pub fn refine(self, text: &str) -> Result<Self> {
        let unknown = |part: &str| {
            Error::usage(
                format!("scheme `{text}`: `{part}` is not understood"),
                "a scheme is w3a16, w4a16 or w8a16, then optionally -g32, -g64, -g128 … or -channel, then \
                 -sym or -asym; for example w4a16-g64-asym",
            )
        };
        let mut parts = text.split('-');
        let head = parts.next().unwrap_or_default();
        let mut scheme = self;
        scheme.bits = head
            .strip_prefix('w')
            .and_then(|r| r.strip_suffix("a16"))
            .and_then(|b| b.parse().ok())
            .filter(|b| Self::BITS.contains(b))
            .ok_or_else(|| unknown(head))?;
        let (mut symmetry, mut granularity) = (false, false);
        for part in parts {
            let said = if matches!(part, "sym" | "asym") { &mut symmetry } else { &mut granularity };
            if std::mem::replace(said, true) {
                return Err(unknown(part));
            }
            match part {
                "sym" => scheme.symmetric = true,
                "asym" => scheme.symmetric = false,
                "channel" => scheme.granularity = Granularity::Channel,
                _ => {
                    let size = part.strip_prefix('g').and_then(|s| s.parse().ok()).filter(|s| *s >= 1);
                    scheme.granularity = Granularity::Group(size.ok_or_else(|| unknown(part))?);
                }
            }
        }
        Ok(scheme)
    }
}

impl Default for WeightScheme {
    /// `w4a16-g128-sym`.
    fn default() -> Self {
        Self { bits: 4, granularity: Granularity::Group(128), symmetric: true }
    }
}

impl FromStr for WeightScheme {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::default().refine(text)
    }
}

impl fmt::Display for WeightScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "w{}a16-", self.bits)?;
        match self.granularity {
            Granularity::Group(size) => write!(f, "g{size}")?,
            Granularity::Channel => f.write_str("channel")?,
        }
        f.write_str(if self.symmetric { "-sym" } else { "-asym" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back_as_they_are_written() {
        for text in ["w4a16-g128-sym", "w3a16-channel-asym", "w8a16-g32-sym"] {
            assert_eq!(text.parse::<WeightScheme>().unwrap().to_string(), text);
        }
        let base: WeightScheme = "w4a16-g64-asym".parse().unwrap();
        assert_eq!(base.refine("w8a16-channel").unwrap().to_string(), "w8a16-channel-asym");
    }

    #[test]
    fn what_is_not_understood_or_said_twice_is_refused() {
        for text in [
            "",
            "w5a16",
            "w4a8",
            "4a16",
            "w4a16-",
            "w4a16-g0",
            "w4a16-gx",
            "w4a16-g64-channel",
            "w4a16-sym-asym",
        ] {
            assert!(text.parse::<WeightScheme>().is_err(), "{text}");
        }
    }
}
