//! Numeric formats of linears, and the short names they are asked for by.

mod cache;
mod float;

use std::fmt;
use std::str::FromStr;

pub use cache::CachePart;
pub use float::{BLOCK, FLOAT_SCHEMES, MX_GROUP, NV_GROUP};
pub use quant_kernels_cpu::FloatFormat;

use crate::checkpoint::Dtype;
use crate::{Error, Result};

/// The key of `config.json` that says how keys and values are cached.
pub const KV_CONFIG_KEY: &str = "kv_cache_quantization";

/// How many weights of a row share one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Granularity {
    /// Runs of this many input features; must divide the input width.
    Group(usize),
    /// The whole row: one scale an output channel.
    Channel,
    /// Blocks of [`BLOCK`] rows and columns; those at the edges may be smaller.
    Block,
    /// The whole weight.
    Tensor,
}

impl Granularity {
    /// The group size for rows of width `columns`: the longest runs of equal length in which all weights of a row have
    /// one scale. In memory every row and group has a scale of its own, also where several share one.
    pub fn group_size(self, columns: usize) -> usize {
        match self {
            Self::Group(size) => size,
            Self::Channel | Self::Tensor => columns,
            Self::Block => float::common_divisor(BLOCK, columns),
        }
    }
}

/// What becomes of the inputs of a linear before they are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
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
    /// E4M3 with a scale for every token, found when the token comes (`af8`).
    Fp8Token,
    /// E4M3 with one scale for all tokens, found on a calibration text (`af8`, `-static`).
    Fp8Static,
    /// E4M3 with a scale for every token and 128 inputs, found when the token comes (`af8` of `-b128`).
    Fp8Group,
    /// E4M3 with a power of two for every token and 32 inputs, found when the token comes (`af8` of `-mx`).
    Mxfp8,
    /// E2M1 with an E4M3 scale for every token and 16 inputs, found when the token comes, below one F32 for all tokens,
    /// found on a calibration text (`af4`).
    Nvfp4,
}

impl ActivationScheme {
    /// Whether a scale is found on a calibration text.
    pub fn is_static(self) -> bool {
        matches!(self, Self::Static { .. } | Self::Fp8Static | Self::Nvfp4)
    }

    /// Whether inputs are rounded to floating-point numbers.
    pub fn is_float(self) -> bool {
        matches!(self, Self::Fp8Token | Self::Fp8Static | Self::Fp8Group | Self::Mxfp8 | Self::Nvfp4)
    }

    /// What stands after the `a` of a scheme.
    fn name(self) -> &'static str {
        match self {
            Self::Float => "16",
            Self::Token | Self::Static { .. } => "8",
            Self::Fp8Token | Self::Fp8Static | Self::Fp8Group | Self::Mxfp8 => "f8",
            Self::Nvfp4 => "f4",
        }
    }
}

/// The format of a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ScaleFormat {
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// Single precision.
    F32,
    /// Powers of two.
    E8m0,
    /// E4M3, with one F32 scale of the whole tensor.
    E4m3,
}

impl ScaleFormat {
    /// The format of scales that are stored in this type.
    ///
    /// # Errors
    /// [`Error::Usage`] for other types.
    pub fn of(dtype: Dtype) -> Result<Self> {
        match dtype {
            Dtype::F16 => Ok(Self::F16),
            Dtype::Bf16 => Ok(Self::Bf16),
            Dtype::F32 => Ok(Self::F32),
            Dtype::F8E8M0 => Ok(Self::E8m0),
            Dtype::F8E4M3 => Ok(Self::E4m3),
            _ => Err(Error::usage(
                format!("scales cannot be stored as {dtype}"),
                "store them as F16, BF16 or F32",
            )),
        }
    }

    /// The type that scales of this format are stored in.
    pub fn dtype(self) -> Dtype {
        match self {
            Self::F16 => Dtype::F16,
            Self::Bf16 => Dtype::Bf16,
            Self::F32 => Dtype::F32,
            Self::E8m0 => Dtype::F8E8M0,
            Self::E4m3 => Dtype::F8E4M3,
        }
    }
}

/// What the codes of a weight mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum WeightFormat {
    /// Integers, times a scale.
    Int {
        /// Bits of one code: one of [`WeightFormat::INT_BITS`].
        bits: u8,
        /// Whether the grid is symmetric about zero (no stored zero point).
        symmetric: bool,
        /// Whether groups of 4 bits stand on integers of 8 bits, whose scale is the row's: QServe's progressive
        /// quantization.
        two_level: bool,
    },
    /// Floating-point numbers, times a scale. Always symmetric.
    Float(FloatFormat),
}

impl WeightFormat {
    /// The bits of integers that this version can quantize to.
    pub const INT_BITS: [u8; 7] = [2, 3, 4, 5, 6, 7, 8];

    /// Integers with one level of scales.
    pub const fn int(bits: u8, symmetric: bool) -> Self {
        Self::Int { bits, symmetric, two_level: false }
    }
}

/// How a linear is quantized: the format of its weight, and the grid of its input.
///
/// Written `w4a16-g128-sym`: bits of the weight (`f8` is E4M3, `f4` E2M1), bits of the activations, granularity (`g32`,
/// `g64`, `g128` … or `channel`; of floating-point weights also `b128` and `tensor`), of integers symmetry (`sym` or
/// `asym`), `progressive` where scales have two levels; of floating-point groups the kind of scales (`nv` or `mx`); with
/// activations of 8 bits, `-static` or `-static-asym` where their scale is not found per token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinearScheme {
    /// What the codes of the weight mean.
    pub weight: WeightFormat,
    /// Which weights share a scale.
    pub granularity: Granularity,
    /// What becomes of the input.
    pub activations: ActivationScheme,
}

impl LinearScheme {
    /// Weights of this format under float activations.
    pub const fn weight_only(weight: WeightFormat, granularity: Granularity) -> Self {
        Self { weight, granularity, activations: ActivationScheme::Float }
    }

    /// Bits of one code of the weight.
    pub fn bits(&self) -> u8 {
        match self.weight {
            WeightFormat::Int { bits, .. } => bits,
            WeightFormat::Float(format) => format.bits(),
        }
    }

    /// Bits of one code, where codes are integers.
    pub fn int_bits(&self) -> Option<u8> {
        match self.weight {
            WeightFormat::Int { bits, .. } => Some(bits),
            WeightFormat::Float(_) => None,
        }
    }

    /// The format of the codes, where they stand for floating-point numbers.
    pub fn float_format(&self) -> Option<FloatFormat> {
        match self.weight {
            WeightFormat::Int { .. } => None,
            WeightFormat::Float(format) => Some(format),
        }
    }

    /// Whether the weight's grid is symmetric about zero, so that no zero points are stored.
    pub fn is_symmetric(&self) -> bool {
        match self.weight {
            WeightFormat::Int { symmetric, .. } => symmetric,
            WeightFormat::Float(_) => true,
        }
    }

    /// Whether scales have two levels.
    pub fn is_progressive(&self) -> bool {
        matches!(self.weight, WeightFormat::Int { two_level: true, .. })
    }

    /// The largest unsigned code, `2^bits − 1`.
    pub fn max_code(&self) -> u8 {
        u8::MAX >> (8 - self.bits())
    }

    /// The same, with a grid of integers that is symmetric or not. Floating-point numbers stay as they are.
    #[must_use]
    pub fn with_symmetry(mut self, said: bool) -> Self {
        if let WeightFormat::Int { symmetric, .. } = &mut self.weight {
            *symmetric = said;
        }
        self
    }

    /// The same with one level of scales: what is left of a progressive scheme in a container that knows only those.
    #[must_use]
    pub fn flattened(mut self) -> Self {
        if let WeightFormat::Int { two_level, .. } = &mut self.weight {
            *two_level = false;
        }
        self
    }

    /// Whether engines take it as bytes, one per weight, and not as packed words: integers of 8 bits on both sides, and
    /// one symmetric scale per row.
    pub fn is_stored_as_bytes(&self) -> bool {
        let is_w8a8 = self.int_bits() == Some(8) && self.activations != ActivationScheme::Float;
        is_w8a8 && self.granularity == Granularity::Channel && self.is_symmetric()
    }

    /// Whether the input's scale, or one of its two, is found on a calibration text.
    pub fn has_static_activations(&self) -> bool {
        self.activations.is_static()
    }
}

impl Default for LinearScheme {
    /// `w4a16-g128-sym`.
    fn default() -> Self {
        Self::weight_only(WeightFormat::int(4, true), Granularity::Group(128))
    }
}

impl FromStr for LinearScheme {
    type Err = Error;

    /// What the text leaves out comes from the default.
    fn from_str(text: &str) -> Result<Self> {
        let request: SchemeRequest = text.parse()?;
        Ok(request.with_default_symmetry(true))
    }
}

impl fmt::Display for LinearScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        SchemeRequest::from(*self).fmt(f)
    }
}

/// The format of a weight as it is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WeightRequest {
    /// Integers.
    Int {
        /// Bits of one code: one of [`WeightFormat::INT_BITS`].
        bits: u8,
        /// Whether the grid is symmetric, if that was said.
        symmetric: Option<bool>,
        /// Whether scales have two levels.
        two_level: bool,
    },
    /// Floating-point numbers.
    Float(FloatFormat),
}

impl WeightRequest {
    /// The format whose name stands after the `w` of a scheme.
    fn named(name: &str) -> Option<Self> {
        if let Some(format) = FloatFormat::ALL.into_iter().find(|f| f.name() == name) {
            return Some(Self::Float(format));
        }
        let bits = name.parse().ok().filter(|b| WeightFormat::INT_BITS.contains(b))?;
        Some(Self::Int { bits, symmetric: None, two_level: false })
    }
}

/// A scheme as it is asked for: symmetry may be left to the container, since engines prefer
/// symmetric grids in one and know only asymmetric ones in another.
///
/// Written as a [`LinearScheme`] is, without `-sym` or `-asym` where nothing was said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SchemeRequest {
    /// The format of the weight.
    pub weight: WeightRequest,
    /// Which weights share a scale.
    pub granularity: Granularity,
    /// What becomes of the input.
    pub activations: ActivationScheme,
}

/// Inputs that share a scale under FP8 activations, where weights are integers.
const W4AFP8_GROUP: usize = 128;

impl SchemeRequest {
    /// Parses `text` such as `w3a16`, `w4a16-g64`, `w8a8-channel-sym-static`; what it leaves out comes
    /// from `self`, but for `w8a8` and floating-point weights, which have one scale per row unless `self` is such a
    /// scheme itself. Two levels of scales have to be asked for. `fp8`, `nvfp4` and the like are understood too.
    ///
    /// # Errors
    /// When a part is not understood; the message lists what is.
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
            let said = match part {
                "sym" | "asym" => &mut symmetry,
                "progressive" => &mut progressive,
                _ => &mut granularity,
            };
            if std::mem::replace(said, true) {
                return Err(unknown());
            }
            match (part, &mut scheme.weight) {
                ("progressive", WeightRequest::Int { bits: 4, two_level, .. }) => *two_level = true,
                ("sym" | "asym", WeightRequest::Int { symmetric, .. }) => *symmetric = Some(part == "sym"),
                ("channel", _) => scheme.granularity = Granularity::Channel,
                ("b128", WeightRequest::Float(_)) => scheme.granularity = Granularity::Block,
                ("tensor", WeightRequest::Float(_)) => scheme.granularity = Granularity::Tensor,
                _ => {
                    let size = part.strip_prefix('g').and_then(|s| s.parse().ok()).filter(|s| *s >= 1);
                    scheme.granularity = Granularity::Group(size.ok_or_else(unknown)?);
                }
            }
        }
        if let WeightRequest::Float(format) = scheme.weight {
            scheme.settle_float(format, suffix)?;
        }
        scheme.check()?;
        Ok(scheme)
    }

    /// The scheme with the first word of a name, `w4a16`; `None` where it is not understood.
    fn with_head(self, head: &str) -> Option<Self> {
        let (weight, activations) = head.strip_prefix('w')?.split_once('a')?;
        let mut weight = WeightRequest::named(weight)?;
        let activations = match (activations, weight) {
            ("16", _) => ActivationScheme::Float,
            ("8", _) => ActivationScheme::Token,
            (name, WeightRequest::Float(_)) => float::activations(name)?,
            // W4AFP8.
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
            // What floating-point weights have scales of says nothing of integers.
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

    /// Fails when its parts contradict each other, or this version has no such scheme.
    ///
    /// # Errors
    /// [`Error::Usage`] for two levels of scales where a row has one scale, and for floating-point weights with scales or
    /// activations that no scheme of this version has.
    pub fn check(&self) -> Result<()> {
        match self.weight {
            WeightRequest::Int { two_level: true, .. } if self.granularity == Granularity::Channel => {
                Err(Error::usage(
                    format!("scheme `{self}`: one scale per row has one level"),
                    "leave -progressive away (preset qoq-w4a8kv4-channel is QoQ so), or choose groups, such as \
                     -g128-progressive",
                ))
            }
            WeightRequest::Float(format) => self.check_float(format),
            WeightRequest::Int { .. } if self.activations.is_float() && !self.is_w4afp8() => {
                Err(Error::usage(
                    format!(
                        "scheme `{self}`: of integer weights FP8 activations go with 4 bits in groups of 128, symmetric, and \
                     one scale per token"
                    ),
                    "choose w4af8-g128-sym, a16 or a8, or floating-point weights, such as wf8af8-channel",
                ))
            }
            _ => Ok(()),
        }
    }

    /// 4-bit integers under FP8 activations, as the one engine kernel for them takes them.
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

    /// Whether the grid is symmetric, if that was said; floating-point numbers always are.
    pub fn symmetric(&self) -> Option<bool> {
        match self.weight {
            WeightRequest::Int { symmetric, .. } => symmetric,
            WeightRequest::Float(_) => Some(true),
        }
    }

    /// Asks for a symmetric or asymmetric grid.
    ///
    /// # Errors
    /// [`Error::Usage`] for asymmetric floating-point weights.
    pub fn set_symmetric(&mut self, said: bool) -> Result<()> {
        match &mut self.weight {
            WeightRequest::Int { symmetric, .. } => *symmetric = Some(said),
            WeightRequest::Float(_) if said => {}
            WeightRequest::Float(_) => {
                return Err(Error::usage(
                    format!("scheme `{self}`: floating-point weights are always symmetric"),
                    "leave --asymmetric away, or choose integers, such as w8a16",
                ));
            }
        }
        Ok(())
    }

    /// The scheme; where nothing was said of symmetry, integers of some bits are symmetric if `default` says so.
    pub fn resolve(self, default: impl FnOnce(u8) -> bool) -> LinearScheme {
        let weight = match self.weight {
            WeightRequest::Int { bits, symmetric, two_level } => {
                WeightFormat::Int { bits, symmetric: symmetric.unwrap_or_else(|| default(bits)), two_level }
            }
            WeightRequest::Float(format) => WeightFormat::Float(format),
        };
        LinearScheme { weight, granularity: self.granularity, activations: self.activations }
    }

    /// The scheme, symmetric or not as given where nothing was said.
    pub fn with_default_symmetry(self, symmetric: bool) -> LinearScheme {
        self.resolve(|_| symmetric)
    }
}

/// The weights of integers that this version knows, for messages: `w2, w3, w4 or w8`.
fn known_integers() -> String {
    let names: Vec<String> = WeightFormat::INT_BITS.iter().map(|bits| format!("w{bits}")).collect();
    match names.split_last() {
        Some((last, rest)) => format!("{} or {last}", rest.join(", ")),
        None => String::new(),
    }
}

fn not_understood(text: &str, part: &str) -> Error {
    let integers = known_integers();
    Error::usage(
        format!("scheme `{text}`: `{part}` is not understood"),
        format!(
            "a scheme is {integers}, then a16 or a8 (and kv4, kv8 or kvf8 for the whole model's cache), then optionally -g32, -g64, -g128 … or -channel, \
         then -sym or -asym, then -progressive for w4 in groups, and after a8 -static or -static-asym; for \
         example w4a16-g64-asym, w8a8, w4a8-g128-progressive; or one of {}",
            FLOAT_SCHEMES.join(", ")
        ),
    )
}

/// What follows `-static` in a name.
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

#[cfg(test)]
mod tests;
