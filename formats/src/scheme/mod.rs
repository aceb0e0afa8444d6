//! Numeric formats of linears, and their short names.

mod cache;
mod float;
mod kv;
mod request;

use std::fmt;
use std::str::FromStr;

pub use cache::CachePart;
pub use float::{BLOCK, FLOAT_SCHEMES, MX_GROUP, NV_GROUP};
pub use kv::KvScheme;
pub use quant_kernels_cpu::FloatFormat;
pub use request::{SchemeRequest, WeightRequest};

use crate::checkpoint::Dtype;
use crate::{Error, Result};

/// The key of `config.json` that describes how keys and values are cached.
pub const KV_CONFIG_KEY: &str = "kv_cache_quantization";

/// Which weights share one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Granularity {
    /// Runs of this many input features; must divide the input width.
    Group(usize),
    /// The whole row: one scale per output channel.
    Channel,
    /// Blocks of [`BLOCK`] rows and columns; those at the edges may be smaller.
    Block,
    /// The whole weight.
    Tensor,
}

impl Granularity {
    /// The group size for rows of width `columns`: the longest runs of equal length in which all weights of a row have
    /// one scale. In memory, a scale is stored for every row and group, so a scale that several of them share is
    /// repeated.
    pub fn group_size(self, columns: usize) -> usize {
        match self {
            Self::Group(size) => size,
            Self::Channel | Self::Tensor => columns,
            Self::Block => float::common_divisor(BLOCK, columns),
        }
    }
}

/// How the inputs of a linear are quantized before the multiplication.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ActivationScheme {
    /// Inputs stay float (`a16`).
    Float,
    /// Int8 with a dynamic scale per token (`a8`).
    Token,
    /// Int8 with one calibrated scale for all tokens (`a8`, `-static`).
    Static {
        /// Whether the zero point is the midpoint of the grid; otherwise it is calibrated (`-static-asym`).
        symmetric: bool,
    },
    /// E4M3 with a dynamic scale per token (`af8`).
    Fp8Token,
    /// E4M3 with one calibrated scale for all tokens (`af8`, `-static`).
    Fp8Static,
    /// E4M3 with a dynamic scale per token and 128 inputs (`af8` of `-b128`).
    Fp8Group,
    /// E4M3 with a dynamic power of two per token and 32 inputs (`af8` of `-mx`).
    Mxfp8,
    /// E2M1 with a dynamic E4M3 scale per token and 16 inputs, and one calibrated F32 scale for all tokens (`af4`).
    Nvfp4,
}

impl ActivationScheme {
    /// Whether a scale is calibrated.
    pub fn is_static(self) -> bool {
        matches!(self, Self::Static { .. } | Self::Fp8Static | Self::Nvfp4)
    }

    /// Whether inputs are rounded to floating-point numbers.
    pub fn is_float(self) -> bool {
        matches!(self, Self::Fp8Token | Self::Fp8Static | Self::Fp8Group | Self::Mxfp8 | Self::Nvfp4)
    }

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
    /// Returns the format of scales stored in this dtype.
    ///
    /// # Errors
    /// [`Error::Usage`] for other dtypes.
    pub fn of(dtype: Dtype) -> Result<Self> {
        match dtype {
            Dtype::F16 => Ok(Self::F16),
            Dtype::Bf16 => Ok(Self::Bf16),
            Dtype::F32 => Ok(Self::F32),
            Dtype::F8E8M0 => Ok(Self::E8m0),
            Dtype::F8E4M3 => Ok(Self::E4m3),
            _ => Err(Error::usage(
                format!("{dtype} is not a type for scales"),
                "store scales as F16, BF16 or F32",
            )),
        }
    }

    /// The dtype in which scales of this format are stored.
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

/// The number format of a weight's codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum WeightFormat {
    /// Integers, times a scale.
    Int {
        /// Bits per code: one of [`WeightFormat::INT_BITS`].
        bits: u8,
        /// Whether the grid is symmetric about zero (no stored zero point).
        symmetric: bool,
        /// Whether 4-bit groups are relative to int8 values, with the float scale per row: QServe's progressive
        /// quantization.
        two_level: bool,
    },
    /// Floating-point numbers, times a scale. Always symmetric.
    Float(FloatFormat),
}

impl WeightFormat {
    /// The integer bit widths that this version can quantize to.
    pub const INT_BITS: [u8; 7] = [2, 3, 4, 5, 6, 7, 8];

    /// Integers with one level of scales.
    pub const fn int(bits: u8, symmetric: bool) -> Self {
        Self::Int { bits, symmetric, two_level: false }
    }
}

/// The quantization of a linear: the format of its weight, and the grid of its input.
///
/// It is written as `w4a16-g128-sym`: bits of the weight (`f8` is E4M3, `f4` E2M1); bits of the activations;
/// granularity (`g32`, `g64`, `g128` … or `channel`; for floating-point weights also `b128` and `tensor`); symmetry for
/// integers (`sym` or `asym`); `progressive` if scales have two levels; the kind of scales for floating-point groups
/// (`nv` or `mx`); and for 8-bit activations `-static` or `-static-asym` if their scale is not computed per token.
///
/// ```
/// use quant_formats::scheme::{Granularity, LinearScheme};
///
/// let scheme: LinearScheme = "w4a16-g128-asym".parse()?;
/// assert_eq!((scheme.bits(), scheme.is_symmetric()), (4, false));
/// assert_eq!(scheme.granularity, Granularity::Group(128));
/// assert_eq!(scheme.to_string(), "w4a16-g128-asym");
/// assert!("w4a16-g0".parse::<LinearScheme>().is_err());
/// # Ok::<(), quant_formats::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinearScheme {
    /// The format of the weight's codes.
    pub weight: WeightFormat,
    /// Which weights share a scale.
    pub granularity: Granularity,
    /// The quantization of the input.
    pub activations: ActivationScheme,
}

impl LinearScheme {
    /// Creates a scheme with weights of this format and float activations.
    pub const fn weight_only(weight: WeightFormat, granularity: Granularity) -> Self {
        Self { weight, granularity, activations: ActivationScheme::Float }
    }

    /// Bits per code of the weight.
    pub fn bits(&self) -> u8 {
        match self.weight {
            WeightFormat::Int { bits, .. } => bits,
            WeightFormat::Float(format) => format.bits(),
        }
    }

    /// Bits per code, if codes are integers.
    pub fn int_bits(&self) -> Option<u8> {
        match self.weight {
            WeightFormat::Int { bits, .. } => Some(bits),
            WeightFormat::Float(_) => None,
        }
    }

    /// The bits per code for messages: `4`, or `FP8` if codes are floating-point numbers.
    pub(crate) fn described_bits(&self) -> String {
        self.int_bits().map_or_else(|| format!("FP{}", self.bits()), |bits| bits.to_string())
    }

    /// The format of the codes, if they are floating-point numbers.
    pub fn float_format(&self) -> Option<FloatFormat> {
        match self.weight {
            WeightFormat::Int { .. } => None,
            WeightFormat::Float(format) => Some(format),
        }
    }

    /// Whether no zero points are stored.
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

    /// Returns the scheme with a symmetric or asymmetric integer grid. Floating-point schemes are unchanged.
    #[must_use]
    pub fn with_symmetry(mut self, is_symmetric: bool) -> Self {
        if let WeightFormat::Int { symmetric, .. } = &mut self.weight {
            *symmetric = is_symmetric;
        }
        self
    }

    /// Returns the scheme with one level of scales.
    #[must_use]
    pub fn flattened(mut self) -> Self {
        if let WeightFormat::Int { two_level, .. } = &mut self.weight {
            *two_level = false;
        }
        self
    }

    /// Whether engines expect one byte per weight, instead of packed words: 8-bit integers on both sides, and one
    /// symmetric scale per row.
    pub fn is_stored_as_bytes(&self) -> bool {
        let is_w8a8 = self.int_bits() == Some(8) && self.activations != ActivationScheme::Float;
        is_w8a8 && self.granularity == Granularity::Channel && self.is_symmetric()
    }

    /// Whether a scale of the input is calibrated.
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

    /// Parses a name; omitted parts come from [`LinearScheme::default`], as in [`SchemeRequest::refine`].
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

#[cfg(test)]
mod tests;
