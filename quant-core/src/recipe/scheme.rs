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
    /// Bits of one code: 2, 3, 4 or 8.
    pub bits: u8,
    /// What shares a scale.
    pub granularity: Granularity,
    /// Whether the grid is symmetric about zero (no stored zero point).
    pub symmetric: bool,
}

impl WeightScheme {
    /// The widths this version can quantize to.
    pub const BITS: [u8; 4] = [2, 3, 4, 8];

    /// The largest unsigned code, `2^bits − 1`.
    pub fn max_code(&self) -> u8 {
        u8::MAX >> (8 - self.bits)
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

    /// What the text leaves out comes from the default.
    fn from_str(text: &str) -> Result<Self> {
        let request: SchemeRequest = text.parse()?;
        Ok(request.with_default_symmetry(Self::default().symmetric))
    }
}

impl fmt::Display for WeightScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        SchemeRequest::from(*self).fmt(f)
    }
}

/// A scheme as it is asked for: symmetry may be left to the container, since engines prefer
/// symmetric grids in one and know only asymmetric ones in another.
///
/// Written as a [`WeightScheme`] is, without `-sym` or `-asym` where nothing was said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SchemeRequest {
    /// Bits of one code: 2, 3, 4 or 8.
    pub bits: u8,
    /// What shares a scale.
    pub granularity: Granularity,
    /// Whether the grid is symmetric, if that was said.
    pub symmetric: Option<bool>,
}

impl SchemeRequest {
    /// Parses `text` such as `w3a16`, `w4a16-g64`, `w8a16-channel-asym`; what it leaves out comes
    /// from `self`.
    ///
    /// # Errors
    /// When a part is not understood; the message lists what is.
    pub fn refine(self, text: &str) -> Result<Self> {
        let unknown = |part: &str| {
            Error::usage(
                format!("scheme `{text}`: `{part}` is not understood"),
                "a scheme is w2a16, w3a16, w4a16 or w8a16, then optionally -g32, -g64, -g128 … or -channel, then \
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
            .filter(|b| WeightScheme::BITS.contains(b))
            .ok_or_else(|| unknown(head))?;
        let (mut symmetry, mut granularity) = (false, false);
        for part in parts {
            let said = if matches!(part, "sym" | "asym") { &mut symmetry } else { &mut granularity };
            if std::mem::replace(said, true) {
                return Err(unknown(part));
            }
            match part {
                "sym" => scheme.symmetric = Some(true),
                "asym" => scheme.symmetric = Some(false),
                "channel" => scheme.granularity = Granularity::Channel,
                _ => {
                    let size = part.strip_prefix('g').and_then(|s| s.parse().ok()).filter(|s| *s >= 1);
                    scheme.granularity = Granularity::Group(size.ok_or_else(|| unknown(part))?);
                }
            }
        }
        Ok(scheme)
    }

    /// The scheme, symmetric or not as given where nothing was said.
    pub fn with_default_symmetry(self, symmetric: bool) -> WeightScheme {
        let Self { bits, granularity, .. } = self;
        WeightScheme { bits, granularity, symmetric: self.symmetric.unwrap_or(symmetric) }
    }
}

impl Default for SchemeRequest {
    /// `w4a16-g128`, symmetry left open.
    fn default() -> Self {
        Self { symmetric: None, ..WeightScheme::default().into() }
    }
}

impl From<WeightScheme> for SchemeRequest {
    fn from(scheme: WeightScheme) -> Self {
        let WeightScheme { bits, granularity, symmetric } = scheme;
        Self { bits, granularity, symmetric: Some(symmetric) }
    }
}

impl FromStr for SchemeRequest {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::default().refine(text)
    }
}

impl fmt::Display for SchemeRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "w{}a16-", self.bits)?;
        match self.granularity {
            Granularity::Group(size) => write!(f, "g{size}")?,
            Granularity::Channel => f.write_str("channel")?,
        }
        f.write_str(match self.symmetric {
            None => "",
            Some(true) => "-sym",
            Some(false) => "-asym",
        })
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
        let base: SchemeRequest = "w4a16-g64-asym".parse().unwrap();
        assert_eq!(base.refine("w8a16-channel").unwrap().to_string(), "w8a16-channel-asym");
    }

    #[test]
    fn symmetry_may_be_left_open() {
        let open: SchemeRequest = "w4a16-g64".parse().unwrap();
        assert_eq!(open.to_string(), "w4a16-g64");
        assert_eq!(open.refine("w8a16-sym").unwrap().to_string(), "w8a16-g64-sym");
        assert_eq!(open.with_default_symmetry(false).to_string(), "w4a16-g64-asym");
        let said: SchemeRequest = "w4a16-g64-sym".parse().unwrap();
        assert_eq!(said.with_default_symmetry(false).to_string(), "w4a16-g64-sym");
        assert_eq!("w4a16".parse::<WeightScheme>().unwrap().to_string(), "w4a16-g128-sym");
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
