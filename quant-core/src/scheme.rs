//! Numeric formats of linears, and the short names they are asked for by.

use std::fmt;
use std::str::FromStr;

use crate::{Error, Result};

/// The key of `config.json` that says how keys and values are cached.
pub const KV_CONFIG_KEY: &str = "kv_cache_quantization";

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

/// What becomes of the inputs of a linear before they are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ActivationScheme {
    /// They stay float (`a16`).
    Float,
    /// Integers of 8 bits with a scale for every token, found when the token comes (`a8`).
    Token,
    /// Integers of 8 bits with one scale for all tokens, found on a calibration text (`a8`, `-static`).
    Static {
        /// Whether zero is the middle of the grid; otherwise it is where the text has it (`-static-asym`).
        symmetric: bool,
    },
}

/// How a linear is quantized: the integer grid of its weight, and that of its input.
///
/// Written `w4a16-g128-sym`: bits of the weight, bits of the activations, granularity (`g32`, `g64`,
/// `g128` … or `channel`), symmetry (`sym` or `asym`), `progressive` where scales have two levels; with
/// activations of 8 bits, `-static` or `-static-asym` where their scale is not found a token at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinearScheme {
    /// Bits of one code of the weight: 2, 3, 4 or 8.
    pub bits: u8,
    /// Which weights share a scale.
    pub granularity: Granularity,
    /// Whether the weight's grid is symmetric about zero (no stored zero point).
    pub symmetric: bool,
    /// Whether groups of 4 bits stand on integers of 8 bits, whose scale is the row's: QServe's progressive
    /// quantization.
    pub progressive: bool,
    /// What becomes of the input.
    pub activations: ActivationScheme,
}

impl LinearScheme {
    /// The widths this version can quantize to.
    pub const BITS: [u8; 4] = [2, 3, 4, 8];

    /// The largest unsigned code, `2^bits − 1`.
    pub fn max_code(&self) -> u8 {
        u8::MAX >> (8 - self.bits)
    }

    /// The same with one level of scales: what is left of a progressive scheme in a container that knows only those.
    pub fn flattened(self) -> Self {
        Self { progressive: false, ..self }
    }

    /// Whether engines take it as bytes, one a weight, and not as packed words: 8 bits on both sides, and a symmetric
    /// scale a row.
    pub fn is_stored_as_bytes(&self) -> bool {
        let is_w8a8 = self.bits == 8 && self.activations != ActivationScheme::Float;
        is_w8a8 && self.granularity == Granularity::Channel && self.symmetric
    }

    /// Whether the input's scale is found on a calibration text.
    pub fn has_static_activations(&self) -> bool {
        matches!(self.activations, ActivationScheme::Static { .. })
    }
}

impl Default for LinearScheme {
    /// `w4a16-g128-sym`.
    fn default() -> Self {
        let (granularity, activations) = (Granularity::Group(128), ActivationScheme::Float);
        Self { bits: 4, granularity, symmetric: true, progressive: false, activations }
    }
}

impl FromStr for LinearScheme {
    type Err = Error;

    /// What the text leaves out comes from the default.
    fn from_str(text: &str) -> Result<Self> {
        let request: SchemeRequest = text.parse()?;
        Ok(request.with_default_symmetry(Self::default().symmetric))
    }
}

impl fmt::Display for LinearScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        SchemeRequest::from(*self).fmt(f)
    }
}

/// A scheme as it is asked for: symmetry may be left to the container, since engines prefer
/// symmetric grids in one and know only asymmetric ones in another.
///
/// Written as a [`LinearScheme`] is, without `-sym` or `-asym` where nothing was said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SchemeRequest {
    /// Bits of one code of the weight: 2, 3, 4 or 8.
    pub bits: u8,
    /// Which weights share a scale.
    pub granularity: Granularity,
    /// Whether the weight's grid is symmetric, if that was said.
    pub symmetric: Option<bool>,
    /// Whether scales have two levels.
    pub progressive: bool,
    /// What becomes of the input.
    pub activations: ActivationScheme,
}

impl SchemeRequest {
    /// Parses `text` such as `w3a16`, `w4a16-g64`, `w8a8-channel-sym-static`; what it leaves out comes
    /// from `self`, but for `w8a8`, which means a scale a row unless `self` is `w8a8` itself: integer
    /// products are taken over whole rows by the engines that know it. Two levels of scales have to be asked for.
    ///
    /// # Errors
    /// When a part is not understood; the message lists what is.
    pub fn refine(self, text: &str) -> Result<Self> {
        let unknown = |part: &str| {
            Error::usage(
                format!("scheme `{text}`: `{part}` is not understood"),
                "a scheme is w2, w3, w4 or w8, then a16 or a8 (and kv4 or kv8 for the whole model's cache), then optionally -g32, -g64, -g128 … or -channel, \
                 then -sym or -asym, then -progressive for w4 in groups, and after a8 -static or -static-asym; for \
                 example w4a16-g64-asym, w8a8, w4a8-g128-progressive",
            )
        };
        let mut parts = text.split('-');
        let head = parts.next().unwrap_or_default();
        let (bits, activations) =
            head.strip_prefix('w').and_then(|r| r.split_once('a')).ok_or_else(|| unknown(head))?;
        let bits =
            bits.parse().ok().filter(|b| LinearScheme::BITS.contains(b)).ok_or_else(|| unknown(head))?;
        let activations = match activations {
            "16" => ActivationScheme::Float,
            "8" => ActivationScheme::Token,
            _ => return Err(unknown(head)),
        };
        let mut scheme = Self { bits, activations, progressive: false, ..self };
        if scheme.is_w8a8() && !self.is_w8a8() {
            scheme.granularity = Granularity::Channel;
        }
        let (mut symmetry, mut granularity, mut progressive) = (false, false, false);
        while let Some(part) = parts.next() {
            if part == "static" && activations != ActivationScheme::Float {
                let symmetric = match parts.next() {
                    None | Some("sym") => true,
                    Some("asym") => false,
                    Some(other) => return Err(unknown(other)),
                };
                scheme.activations = ActivationScheme::Static { symmetric };
                if let Some(more) = parts.next() {
                    return Err(unknown(more));
                }
                break;
            }
            let said = match part {
                "sym" | "asym" => &mut symmetry,
                "progressive" if bits == 4 => &mut progressive,
                _ => &mut granularity,
            };
            if std::mem::replace(said, true) {
                return Err(unknown(part));
            }
            match part {
                "progressive" if bits == 4 => scheme.progressive = true,
                "sym" => scheme.symmetric = Some(true),
                "asym" => scheme.symmetric = Some(false),
                "channel" => scheme.granularity = Granularity::Channel,
                _ => {
                    let size = part.strip_prefix('g').and_then(|s| s.parse().ok()).filter(|s| *s >= 1);
                    scheme.granularity = Granularity::Group(size.ok_or_else(|| unknown(part))?);
                }
            }
        }
        scheme.check()?;
        Ok(scheme)
    }

    /// Fails when its parts contradict each other.
    ///
    /// # Errors
    /// [`Error::Usage`] for two levels of scales where a row has one scale.
    pub fn check(&self) -> Result<()> {
        if self.progressive && self.granularity == Granularity::Channel {
            return Err(Error::usage(
                format!("scheme `{self}`: a scale a row has one level"),
                "leave -progressive away (preset qoq-w4a8kv4-channel is QoQ so), or choose groups, such as \
                 -g128-progressive",
            ));
        }
        Ok(())
    }

    fn is_w8a8(self) -> bool {
        self.bits == 8 && self.activations != ActivationScheme::Float
    }

    /// The scheme, symmetric or not as given where nothing was said.
    pub fn with_default_symmetry(self, symmetric: bool) -> LinearScheme {
        let Self { bits, granularity, progressive, activations, .. } = self;
        let symmetric = self.symmetric.unwrap_or(symmetric);
        LinearScheme { bits, granularity, symmetric, progressive, activations }
    }
}

impl Default for SchemeRequest {
    /// `w4a16-g128`, symmetry left open.
    fn default() -> Self {
        Self { symmetric: None, ..LinearScheme::default().into() }
    }
}

impl From<LinearScheme> for SchemeRequest {
    fn from(scheme: LinearScheme) -> Self {
        let LinearScheme { bits, granularity, symmetric, progressive, activations } = scheme;
        Self { bits, granularity, symmetric: Some(symmetric), progressive, activations }
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
        let activations = if self.activations == ActivationScheme::Float { 16 } else { 8 };
        write!(f, "w{}a{activations}-", self.bits)?;
        match self.granularity {
            Granularity::Group(size) => write!(f, "g{size}")?,
            Granularity::Channel => f.write_str("channel")?,
        }
        f.write_str(match self.symmetric {
            None => "",
            Some(true) => "-sym",
            Some(false) => "-asym",
        })?;
        f.write_str(if self.progressive { "-progressive" } else { "" })?;
        f.write_str(match self.activations {
            ActivationScheme::Float | ActivationScheme::Token => "",
            ActivationScheme::Static { symmetric: true } => "-static",
            ActivationScheme::Static { symmetric: false } => "-static-asym",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back_as_they_are_written() {
        for text in [
            "w4a16-g128-sym",
            "w3a16-channel-asym",
            "w8a16-g32-sym",
            "w8a8-channel-sym",
            "w4a8-g128-asym",
            "w8a8-channel-sym-static",
            "w8a8-channel-sym-static-asym",
            "w4a8-g128-sym-progressive",
            "w4a8-g64-asym-progressive-static-asym",
        ] {
            assert_eq!(text.parse::<LinearScheme>().unwrap().to_string(), text);
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
        assert_eq!("w4a16".parse::<LinearScheme>().unwrap().to_string(), "w4a16-g128-sym");
    }

    #[test]
    fn activations_of_8_bits() {
        let scheme = |text: &str| text.parse::<LinearScheme>().unwrap();
        assert_eq!(scheme("w8a8").to_string(), "w8a8-channel-sym");
        assert_eq!(scheme("w4a8").to_string(), "w4a8-g128-sym");
        assert_eq!(scheme("w8a8-g64-static-sym").to_string(), "w8a8-g64-sym-static");
        assert_eq!(scheme("w8a8-static-asym").activations, ActivationScheme::Static { symmetric: false });
        // Of the scheme that it refines, only granularity and symmetry are left.
        let base: SchemeRequest = "w8a8-g64-static".parse().unwrap();
        assert_eq!(base.refine("w8a8").unwrap().to_string(), "w8a8-g64");
        assert_eq!(base.refine("w8a16").unwrap().to_string(), "w8a16-g64");
    }

    #[test]
    fn what_is_not_understood_or_said_twice_is_refused() {
        for text in [
            "",
            "w5a16",
            "w4a4",
            "w4a16-static",
            "w8a8-static-channel",
            "w8a8-static-sym-asym",
            "w8a8-static-static",
            "w8",
            "4a16",
            "w4a16-",
            "w4a16-g0",
            "w4a16-gx",
            "w4a16-g64-channel",
            "w4a16-sym-asym",
            "w8a8-g128-progressive",
            "w4a8-channel-progressive",
            "w4a8-progressive-progressive",
        ] {
            assert!(text.parse::<LinearScheme>().is_err(), "{text}");
        }
    }
}
