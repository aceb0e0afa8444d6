//! Requested schemes: the grammar of their names, and the parts that a name can leave open.

use std::fmt;
use std::str::FromStr;

use super::float::{self, BLOCK, FLOAT_SCHEMES, NV_GROUP};
use super::{ActivationScheme, FloatFormat, Granularity, LinearScheme, WeightFormat};
use crate::names::nearest;
use crate::{Error, Result};

/// The requested format of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WeightRequest {
    /// Integers.
    Int {
        /// Bits per code: one of [`WeightFormat::INT_BITS`].
        bits: u8,
        /// Whether the grid is symmetric, if specified.
        symmetric: Option<bool>,
        /// Whether scales have two levels.
        two_level: bool,
    },
    /// Floating-point numbers.
    Float(FloatFormat),
}

impl WeightRequest {
    fn named(name: &str) -> Option<Self> {
        if let Some(format) = FloatFormat::ALL.into_iter().find(|f| f.name() == name) {
            return Some(Self::Float(format));
        }
        let bits = number(name).and_then(|bits| bits.try_into().ok());
        let bits = bits.filter(|b| WeightFormat::INT_BITS.contains(b))?;
        Some(Self::Int { bits, symmetric: None, two_level: false })
    }
}

/// Parses a number in its canonical form.
fn number(text: &str) -> Option<usize> {
    let number: usize = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

/// A requested scheme. Its symmetry may be left open, because the default depends on the checkpoint format. It is
/// written like a [`LinearScheme`], without `-sym` or `-asym` if the symmetry is left open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SchemeRequest {
    /// The format of the weight.
    pub weight: WeightRequest,
    /// Which weights share a scale.
    pub granularity: Granularity,
    /// The quantization of the input.
    pub activations: ActivationScheme,
}

/// The group size of integer weights with FP8 activations.
const W4AFP8_GROUP: usize = 128;

impl SchemeRequest {
    /// Parses `text` such as `w3a16`, `w4a16-g64`, `w8a8-channel-sym-static`. Aliases such as `fp8` and `nvfp4` are
    /// accepted. The first part is required. Omitted symmetry and granularity come from `self`, except in these cases:
    ///
    /// - `w8a8` has one scale per row, unless `self` is W8A8, too.
    /// - Floating-point weights have one scale per row, unless `self` has the same format; `wf4af4` has groups of 16.
    /// - Other integer weights have groups of 128 if the weights of `self` are floating-point.
    ///
    /// Two levels of scales must be requested explicitly.
    ///
    /// # Errors
    /// When a part is invalid; the message lists the valid ones.
    pub fn refine(self, text: &str) -> Result<Self> {
        let text = float::alias(text).unwrap_or(text);
        let mut parts = text.split('-');
        let head = parts.next().unwrap_or_default();
        let mut scheme = self.with_head(head).ok_or_else(|| not_understood(text, head))?;
        let (mut symmetry, mut granularity, mut progressive) = (false, false, false);
        let mut suffix = None;
        while let Some(part) = parts.next() {
            let unknown = || not_understood(text, part);
            if part == "static" && scheme.activations == ActivationScheme::Fp8Token {
                scheme.activations = ActivationScheme::Fp8Static;
                if let Some(more) = parts.next() {
                    return Err(not_understood(text, more));
                }
                break;
            }
            if part == "static" && scheme.activations != ActivationScheme::Float {
                scheme.activations = static_activations(text, &mut parts)?;
                break;
            }
            if let (Some(group), WeightRequest::Float(_), None) =
                (float::group_of(part), scheme.weight, suffix)
            {
                suffix = Some(part);
                if !granularity {
                    scheme.granularity = Granularity::Group(group);
                }
                continue;
            }
            let is_given = match part {
                "sym" | "asym" => &mut symmetry,
                "progressive" => &mut progressive,
                _ => &mut granularity,
            };
            if std::mem::replace(is_given, true) {
                return Err(unknown());
            }
            match (part, &mut scheme.weight) {
                ("progressive", WeightRequest::Int { bits: 4, two_level, .. }) => *two_level = true,
                ("sym" | "asym", WeightRequest::Int { symmetric, .. }) => *symmetric = Some(part == "sym"),
                ("channel", _) => scheme.granularity = Granularity::Channel,
                ("b128", WeightRequest::Float(_)) => scheme.granularity = Granularity::Block,
                ("tensor", WeightRequest::Float(_)) => scheme.granularity = Granularity::Tensor,
                _ => {
                    let size = part.strip_prefix('g').and_then(number).filter(|s| *s >= 1);
                    scheme.granularity = Granularity::Group(size.ok_or_else(unknown)?);
                }
            }
        }
        if let WeightRequest::Float(format) = scheme.weight {
            scheme.resolve_float(format, suffix)?;
        }
        scheme.check()?;
        Ok(scheme)
    }

    fn with_head(self, head: &str) -> Option<Self> {
        let (weight, activations) = head.strip_prefix('w')?.split_once('a')?;
        let mut weight = WeightRequest::named(weight)?;
        let activations = match (activations, weight) {
            ("16", _) => ActivationScheme::Float,
            ("8", _) => ActivationScheme::Token,
            (name, WeightRequest::Float(_)) => float::activations(name)?,
            ("f8", WeightRequest::Int { bits: 4, .. }) => ActivationScheme::Fp8Token,
            _ => return None,
        };
        if let (WeightRequest::Int { symmetric, .. }, WeightRequest::Int { symmetric: of_base, .. }) =
            (&mut weight, self.weight)
        {
            *symmetric = of_base;
        }
        let mut scheme = Self { weight, activations, ..self };
        let is_other_float = scheme.is_float() && scheme.weight != self.weight;
        if self.is_float() && !scheme.is_float() {
            scheme.granularity = Self::default().granularity;
        }
        if (scheme.is_w8a8() && !self.is_w8a8()) || is_other_float {
            scheme.granularity = Granularity::Channel;
        }
        if activations == ActivationScheme::Nvfp4 {
            scheme.granularity = Granularity::Group(NV_GROUP);
        }
        Some(scheme)
    }

    /// Fails when its parts contradict each other, or this version does not support the scheme.
    ///
    /// # Errors
    /// [`Error::Usage`] for combinations that are not supported.
    pub fn check(&self) -> Result<()> {
        match self.weight {
            WeightRequest::Int { two_level: true, .. } if self.granularity == Granularity::Channel => {
                Err(Error::usage(
                    format!("scheme `{self}`: progressive scales require groups, not one scale per row"),
                    "omit -progressive (as in the preset qoq-w4a8kv4-channel), or choose groups, such as \
                    -g128-progressive",
                ))
            }
            WeightRequest::Float(format) => self.check_float(format),
            WeightRequest::Int { .. } if self.activations.is_float() && !self.is_w4afp8() => {
                Err(Error::usage(
                    format!(
                        "scheme `{self}`: with integer weights, FP8 activations require one scale per token \
                        and symmetric 4-bit weights in groups of 128"
                    ),
                    "choose w4af8-g128-sym, a16 or a8, or floating-point weights, such as wf8af8-channel",
                ))
            }
            _ => Ok(()),
        }
    }

    /// In the form that the only engine kernel for it requires.
    fn is_w4afp8(self) -> bool {
        self.activations == ActivationScheme::Fp8Token
            && self.granularity == Granularity::Group(W4AFP8_GROUP)
            && matches!(
                self.weight,
                WeightRequest::Int { bits: 4, symmetric: None | Some(true), two_level: false }
            )
    }

    fn is_w8a8(self) -> bool {
        matches!(self.weight, WeightRequest::Int { bits: 8, .. })
            && self.activations != ActivationScheme::Float
    }

    fn is_float(self) -> bool {
        matches!(self.weight, WeightRequest::Float(_))
    }

    /// Whether the grid is symmetric, if specified; floating-point grids always are.
    pub fn symmetric(&self) -> Option<bool> {
        match self.weight {
            WeightRequest::Int { symmetric, .. } => symmetric,
            WeightRequest::Float(_) => Some(true),
        }
    }

    /// Requests a symmetric or asymmetric grid.
    ///
    /// # Errors
    /// [`Error::Usage`] for asymmetric floating-point weights.
    pub fn set_symmetric(&mut self, is_symmetric: bool) -> Result<()> {
        match &mut self.weight {
            WeightRequest::Int { symmetric, .. } => *symmetric = Some(is_symmetric),
            WeightRequest::Float(_) if is_symmetric => {}
            WeightRequest::Float(_) => {
                return Err(Error::usage(
                    format!("scheme `{self}`: floating-point weights are always symmetric"),
                    "omit ‹asymmetric›, or choose integer weights, such as w8a16",
                ));
            }
        }
        Ok(())
    }

    /// Resolves the request. If symmetry is left open, `default` decides from the number of bits whether integers are
    /// symmetric.
    pub fn resolve(self, default: impl FnOnce(u8) -> bool) -> LinearScheme {
        let weight = match self.weight {
            WeightRequest::Int { bits, symmetric, two_level } => {
                WeightFormat::Int { bits, symmetric: symmetric.unwrap_or_else(|| default(bits)), two_level }
            }
            WeightRequest::Float(format) => WeightFormat::Float(format),
        };
        LinearScheme { weight, granularity: self.granularity, activations: self.activations }
    }

    /// Resolves the request with this symmetry if it is left open.
    pub fn with_default_symmetry(self, symmetric: bool) -> LinearScheme {
        self.resolve(|_| symmetric)
    }
}

fn known_integers() -> String {
    let names: Vec<String> = WeightFormat::INT_BITS.iter().map(|bits| format!("w{bits}")).collect();
    match names.split_last() {
        Some((last, rest)) => format!("{} or {last}", rest.join(", ")),
        None => String::new(),
    }
}

/// Names that other tools use for some of these schemes.
const FOREIGN: [(&str, &str); 15] = [
    ("int2", "w2a16"),
    ("int3", "w3a16"),
    ("int4", "w4a16"),
    ("int8", "w8a16"),
    ("uint4", "w4a16-asym"),
    ("4bit", "w4a16"),
    ("8bit", "w8a16"),
    ("4", "w4a16"),
    ("8", "w8a16"),
    ("w4", "w4a16"),
    ("w8", "w8a16"),
    ("q4", "w4a16"),
    ("q8", "w8a16"),
    ("nf4", "w4a16"),
    ("fp4", "nvfp4"),
];
const FREQUENT: [&str; 7] =
    ["w4a16-g128", "w4a16", "w8a16", "w8a8", "w4a8", "w3a16", "w4a8-g128-progressive"];
const ALIKE: f64 = 0.8;

/// The scheme that was probably intended.
fn suggestion(text: &str) -> Option<String> {
    let text = text.to_ascii_lowercase();
    // `int4-g128` is `w4a16-g128`: a suffix of the scheme, such as -asym, comes after the group size.
    let (first, rest) = text.split_at(text.find('-').unwrap_or(text.len()));
    if let Some((_, scheme)) = FOREIGN.iter().find(|(name, _)| *name == first) {
        let (weight, suffix) = scheme.split_at(scheme.find('-').unwrap_or(scheme.len()));
        let whole = format!("{weight}{rest}{suffix}");
        let is_valid = whole.parse::<SchemeRequest>().is_ok();
        return Some(if is_valid { whole } else { (*scheme).to_owned() });
    }
    let aliases = float::ALIASES.iter().map(|(name, _)| name);
    let names = FREQUENT.iter().chain(aliases).chain(FLOAT_SCHEMES.iter());
    let likeness = names.map(|name| (strsim::jaro_winkler(&text, name), *name));
    likeness
        .filter(|(alike, _)| *alike >= ALIKE)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, name)| name.to_owned())
}

/// Whether this is llama.cpp's name of a GGUF type, `q4_k_m` or `IQ4_XS`, or a form of it without underscores, `q4km`.
fn is_gguf_type(text: &str) -> bool {
    let text = text.to_ascii_lowercase();
    let rest = text.strip_prefix("iq").or(text.strip_prefix("tq")).or(text.strip_prefix('q'));
    rest.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()) && rest.contains(['_', 'k', 'x']))
}

fn not_understood(text: &str, part: &str) -> Error {
    let message = format!("scheme `{text}`: unknown part `{part}`");
    if is_gguf_type(text) {
        let name = text.to_ascii_uppercase();
        let like = if name.contains('_') { "is" } else { "looks like" };
        return Error::usage(message, format!("{name} {like} a GGUF quantization type: add ‹format=gguf›"));
    }
    let floats = ["bf16", "f16", "f32", "fp16", "fp32", "float16", "bfloat16", "float32"];
    if floats.iter().any(|name| text.eq_ignore_ascii_case(name)) {
        return Error::usage(
            message,
            "to write floats, add ‹format=safetensors›, or ‹format=gguf› for a GGUF file",
        );
    }
    let lower = text.to_ascii_lowercase();
    if lower != text && lower.parse::<SchemeRequest>().is_ok() {
        return Error::usage(message, format!("did you mean {lower}? Names of schemes are in lower case"));
    }
    let meant = suggestion(text).filter(|_| text.starts_with(part));
    let meant = meant.map_or_else(String::new, |name| format!("did you mean {name}?\n  "));
    let integers = known_integers();
    // If the first part is unknown, the whole grammar would not help.
    if text.starts_with(part) {
        return Error::usage(
            message,
            format!(
                "{meant}weights are {integers}, then a16 or a8; common schemes are {}, fp8 and nvfp4; a ‹preset› \
                 names a scheme with its method",
                FREQUENT.join(", ")
            ),
        );
    }
    let suffixes = ["sym", "asym", "channel", "progressive", "static"];
    let meant = nearest(part, suffixes).map_or_else(String::new, |near| format!("did you mean -{near}?\n  "));
    Error::usage(
        message,
        format!(
            "{meant}a scheme consists of {integers}; a16 or a8; optionally kv4, kv8 or kvf8 (for the cache \
            of the whole model); optionally -channel or a group size (-g32, -g64, -g128 …); optionally -sym \
            or -asym; optionally -progressive (w4 in groups) and -static or -static-asym (a8). Examples: \
            w4a16-g64-asym, w8a8, w4a8-g128-progressive. Other schemes: {}",
            FLOAT_SCHEMES.join(", ")
        ),
    )
}

/// Parses the rest of a name after `-static`.
fn static_activations<'a>(text: &str, parts: &mut impl Iterator<Item = &'a str>) -> Result<ActivationScheme> {
    let symmetric = match parts.next() {
        None | Some("sym") => true,
        Some("asym") => false,
        Some(other) => return Err(not_understood(text, other)),
    };
    match parts.next() {
        None => Ok(ActivationScheme::Static { symmetric }),
        Some(more) => Err(not_understood(text, more)),
    }
}

impl Default for SchemeRequest {
    /// `w4a16-g128`, symmetry left open.
    fn default() -> Self {
        let weight = WeightRequest::Int { bits: 4, symmetric: None, two_level: false };
        Self { weight, ..LinearScheme::default().into() }
    }
}

impl From<LinearScheme> for SchemeRequest {
    fn from(scheme: LinearScheme) -> Self {
        let LinearScheme { weight, granularity, activations } = scheme;
        let weight = match weight {
            WeightFormat::Int { bits, symmetric, two_level } => {
                WeightRequest::Int { bits, symmetric: Some(symmetric), two_level }
            }
            WeightFormat::Float(format) => WeightRequest::Float(format),
        };
        Self { weight, granularity, activations }
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
        let activations = self.activations.name();
        match self.weight {
            WeightRequest::Int { bits, .. } => write!(f, "w{bits}a{activations}-")?,
            WeightRequest::Float(format) => write!(f, "w{}a{activations}-", format.name())?,
        }
        match self.granularity {
            Granularity::Group(size) => write!(f, "g{size}")?,
            Granularity::Channel => f.write_str("channel")?,
            Granularity::Block => write!(f, "b{BLOCK}")?,
            Granularity::Tensor => f.write_str("tensor")?,
        }
        if let WeightRequest::Float(format) = self.weight {
            let (scales, activations) = float::ending(format, self.granularity, self.activations);
            return write!(f, "{scales}{activations}");
        }
        if let WeightRequest::Int { symmetric, two_level, .. } = self.weight {
            f.write_str(match symmetric {
                None => "",
                Some(true) => "-sym",
                Some(false) => "-asym",
            })?;
            f.write_str(if two_level { "-progressive" } else { "" })?;
        }
        f.write_str(match self.activations {
            ActivationScheme::Static { symmetric: true } => "-static",
            ActivationScheme::Static { symmetric: false } => "-static-asym",
            _ => "",
        })
    }
}
