//! The tensors of one linear, and their bytes.
//!
//! For a module `X` with weight `[n, k]`:
//!
//! | tensor | type | shape | holds |
//! |---|---|---|---|
//! | `X.qweight` | I8 | `[n, k/2]` | 4-bit codes, in tiles ([`pack_nibbles`]) |
//! | `X.s1_scales` | F16 | `[n]` | row scales |
//! | `X.s2_scales` | I8 | `[k/128, n]` | group scales, 1 to 16, in the order of [`S2Order`]; progressive |
//! | `X.s2_zeros` | I8 | `[k/128, n]` | `−zero · scale` modulo 256, in that order; progressive |
//! | `X.s1_szeros` | F16 | `[n]` | `zero · scale`; one scale per row |
//!
//! and for 8 bits:
//!
//! | tensor | type | shape | holds |
//! |---|---|---|---|
//! | `X.weight` | I8 | `[n, k]` | signed integers |
//! | `X.dequant_scale` | F16 | `[n]` | row scales |

use rayon::prelude::*;

use super::{GROUP, METHOD, TILE};
use crate::allocate;
use crate::checkpoint::{Dtype, TensorSpec};
use crate::quantize::QuantizedTensor;
use crate::scheme::{ActivationScheme, Granularity, LinearScheme, WeightFormat};
use crate::{Error, Result};

/// The difference between an 8-bit code and its signed value.
pub(super) const CODE_OFFSET: u8 = 128;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// 4 bits in groups of 128 with two levels of scales.
    Group,
    /// 4 bits with a scale and a zero point per row.
    Channel,
    /// 8 bits with a scale per row.
    Bytes,
}

impl Kind {
    /// The kind of a scheme; `None` if the format cannot represent it.
    pub(super) fn of(scheme: LinearScheme) -> Option<Self> {
        let WeightFormat::Int { bits, symmetric, two_level } = scheme.weight else { return None };
        match (bits, scheme.granularity, symmetric, two_level, scheme.activations) {
            (4, Granularity::Group(GROUP), false, true, ActivationScheme::Token) => Some(Self::Group),
            (4, Granularity::Channel, false, false, ActivationScheme::Token) => Some(Self::Channel),
            (8, Granularity::Channel, true, false, ActivationScheme::Token) => Some(Self::Bytes),
            _ => None,
        }
    }

    pub(super) fn bits(self) -> u8 {
        match self {
            Self::Group | Self::Channel => 4,
            Self::Bytes => 8,
        }
    }

    /// `group_size` of a configuration.
    pub(super) fn group_size(self) -> i64 {
        match self {
            Self::Group => GROUP as i64,
            Self::Channel | Self::Bytes => -1,
        }
    }

    pub(super) fn scheme(self) -> LinearScheme {
        let (granularity, two_level) = match self {
            Self::Group => (Granularity::Group(GROUP), true),
            Self::Channel | Self::Bytes => (Granularity::Channel, false),
        };
        let weight = WeightFormat::Int { bits: self.bits(), symmetric: self == Self::Bytes, two_level };
        LinearScheme { weight, granularity, activations: ActivationScheme::Token }
    }
}

/// The order in which scales and zero points of 32 adjacent outputs are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum S2Order {
    /// 0, 8, 16, 24, 1, 9, …: the order that QServe's kernels read. It is read and written.
    #[default]
    Kernel,
    /// 0, 8, 1, 9, …, 7, 15, 16, 24, …: the order that deepcompressor's converter writes. It is only read.
    Deepcompressor,
}

impl S2Order {
    pub(super) const ALL: [Self; 2] = [Self::Kernel, Self::Deepcompressor];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Deepcompressor => "deepcompressor",
        }
    }

    pub(super) fn place(self, n: usize) -> usize {
        let within = n % TILE;
        n - within
            + match self {
                Self::Kernel => within % 8 * 4 + within / 8,
                Self::Deepcompressor => within / 16 * 16 + within % 8 * 2 + within / 8 % 2,
            }
    }

    /// Reorders values `[n, groups]` for storage: `[groups, n]`, outputs in this order.
    pub(super) fn store(self, values: &[u8], n: usize, groups: usize) -> Vec<u8> {
        let mut stored = vec![0; values.len()];
        for (g, column) in stored.chunks_exact_mut(n.max(1)).enumerate() {
            for o in 0..n {
                column[self.place(o)] = values[o * groups + g];
            }
        }
        stored
    }

    /// The inverse of [`store`](Self::store).
    ///
    /// # Errors
    /// [`Error::Memory`] when the values cannot be allocated.
    pub(super) fn restore(self, stored: &[u8], n: usize, groups: usize) -> Result<Vec<u8>> {
        let values = (0..n).flat_map(|o| (0..groups).map(move |g| stored[g * n + self.place(o)]));
        allocate::collected(n * groups, values, "the zero points of a weight")
    }
}

pub(super) fn codes_name(module: &str) -> String {
    format!("{module}.qweight")
}

pub(super) fn row_scales_name(module: &str) -> String {
    format!("{module}.s1_scales")
}

pub(super) fn row_zeros_name(module: &str) -> String {
    format!("{module}.s1_szeros")
}

pub(super) fn group_scales_name(module: &str) -> String {
    format!("{module}.s2_scales")
}

pub(super) fn group_zeros_name(module: &str) -> String {
    format!("{module}.s2_zeros")
}

pub(super) fn bytes_name(module: &str) -> String {
    format!("{module}.weight")
}

pub(super) fn byte_scales_name(module: &str) -> String {
    format!("{module}.dequant_scale")
}

pub(super) fn layout(
    module: &str,
    [n, k]: [usize; 2],
    scheme: LinearScheme,
    scale_dtype: Dtype,
) -> Result<Vec<TensorSpec>> {
    let unusable =
        |what: String, remedy: &str| Err(Error::usage(format!("`{module}.weight`: {what}"), remedy));
    let Some(kind) = Kind::of(scheme) else {
        return unusable(
            format!("the {METHOD} format does not support {scheme}"),
            "choose ‹scheme=w4a8-g128-asym-progressive›, w4a8-channel-asym or w8a8-channel-sym, leave it float with \
             ‹ignore›, or write ‹format=compressed-tensors›",
        );
    };
    if scale_dtype != Dtype::F16 {
        return unusable(
            format!("the {METHOD} format stores scales as F16, not {scale_dtype}"),
            "write ‹format=compressed-tensors›",
        );
    }
    const FLOAT: &str = "leave it float with ‹ignore›, or write ‹format=compressed-tensors›";
    if n.checked_mul(k).is_none_or(|elements| elements > isize::MAX as usize / 8) {
        return unusable(format!("a weight of shape [{n}, {k}] exceeds the address space"), FLOAT);
    }
    let step = if kind == Kind::Group { GROUP } else { TILE };
    for (size, step, what) in [(n, TILE, "outputs"), (k, step, "inputs")] {
        if size == 0 || !size.is_multiple_of(step) {
            return unusable(
                format!("the {METHOD} format needs a multiple of {step} {what}, got {size}"),
                FLOAT,
            );
        }
    }
    Ok(match kind {
        Kind::Group => vec![
            TensorSpec::new(codes_name(module), Dtype::I8, [n, k / 2]),
            TensorSpec::new(row_scales_name(module), Dtype::F16, [n]),
            TensorSpec::new(group_scales_name(module), Dtype::I8, [k / GROUP, n]),
            TensorSpec::new(group_zeros_name(module), Dtype::I8, [k / GROUP, n]),
        ],
        Kind::Channel => vec![
            TensorSpec::new(codes_name(module), Dtype::I8, [n, k / 2]),
            TensorSpec::new(row_scales_name(module), Dtype::F16, [n]),
            TensorSpec::new(row_zeros_name(module), Dtype::F16, [n]),
        ],
        Kind::Bytes => vec![
            TensorSpec::new(bytes_name(module), Dtype::I8, [n, k]),
            TensorSpec::new(byte_scales_name(module), Dtype::F16, [n]),
        ],
    })
}

pub(super) fn pack(module: &str, tensor: &QuantizedTensor) -> Result<Vec<(TensorSpec, Vec<u8>)>> {
    let [n, k] = tensor.shape;
    let specs = layout(module, tensor.shape, tensor.scheme, tensor.scale_dtype)?;
    tensor.require_storable(module)?;
    let inconsistent = |what: &str| Error::Internal(format!("quantized `{module}.weight`: {what}"));
    let bytes = match (&tensor.levels, &tensor.zeros) {
        (Some(levels), Some(zeros)) => {
            if let Some(outlier) = outlier(&tensor.codes, &levels.groups, zeros, k / GROUP) {
                return Err(inconsistent(&format!("{outlier}, which exceeds 8 bits")));
            }
            if levels.rows.iter().any(|&s| Dtype::F16.round(s) != s) {
                return Err(inconsistent("a row's scale is not exact in F16"));
            }
            let scaled = zeros.iter().zip(&levels.groups).map(|(z, s)| (z * s).wrapping_neg());
            let [groups, zeros] = [levels.groups.clone(), scaled.collect()]
                .map(|values| S2Order::Kernel.store(&values, n, k / GROUP));
            vec![pack_nibbles(&tensor.codes, n, k), Dtype::F16.narrow(&levels.rows), groups, zeros]
        }
        (None, Some(zeros)) => {
            let scaled: Vec<f32> =
                tensor.scales.iter().zip(zeros).map(|(s, &z)| Dtype::F16.round(s * f32::from(z))).collect();
            if let Some(row) = scaled.iter().position(|z| !z.is_finite()) {
                return Err(Error::Numeric {
                    tensor: format!("{module}.weight"),
                    reason: format!(
                        "row {row}: the {METHOD} format stores the product of the zero point {} and the \
                        scale {} in F16, whose range it exceeds",
                        zeros[row], tensor.scales[row]
                    ),
                });
            }
            vec![
                pack_nibbles(&tensor.codes, n, k),
                Dtype::F16.narrow(&tensor.scales),
                Dtype::F16.narrow(&scaled),
            ]
        }
        (_, None) => {
            let signed = tensor.codes.iter().map(|code| code ^ CODE_OFFSET).collect();
            vec![signed, Dtype::F16.narrow(&tensor.scales)]
        }
    };
    if bytes.len() != specs.len() {
        return Err(inconsistent("the scales do not match the scheme"));
    }
    Ok(specs.into_iter().zip(bytes).collect())
}

/// Describes the first group with a scale outside 1 to 16, or with a code whose integer `(code − zero) · scale` does
/// not fit int8. Codes are `[n, k]`, scales and zero points `[n, groups]`.
pub(super) fn outlier(codes: &[u8], scales: &[u8], zeros: &[u8], groups: usize) -> Option<String> {
    let of_groups = codes.par_chunks_exact(GROUP).zip(scales.par_iter().zip(zeros));
    of_groups.enumerate().find_map_first(|(i, (codes, (&scale, &zero)))| {
        let place = || format!("output {}, group {}", i / groups, i % groups);
        if !(1..=16).contains(&scale) {
            return Some(format!("{} has a scale of {scale}; it must be from 1 to 16", place()));
        }
        let (min, max) = codes.iter().fold((u8::MAX, 0), |(l, m), &c| (c.min(l), c.max(m)));
        let integer = |code: u8| (i32::from(code) - i32::from(zero)) * i32::from(scale);
        let wide = [min, max].into_iter().find(|&c| !(-128..=127).contains(&integer(c)));
        wide.map(|c| format!("{} has a code of {c}, which represents the integer {}", place(), integer(c)))
    })
}

/// Packs 4-bit codes `[n, k]` into the bytes that QServe's kernels load, half as many; `n` and `k` are multiples of 32.
///
/// A tile is 32 outputs by 32 inputs, 512 bytes; tiles are stored row by row. For output `32·nt + 16·p + 8·h + nl` and
/// input `32·kt + 16·kh + 4·kl + kr` of `K` inputs,
///
/// ```text
/// byte   = ((nt · K/32 + kt) · 32 + 4·nl + kl) · 16 + 8·kh + 4·h + kr
/// nibble = p
/// ```
///
/// so that lane `4·nl + kl` of a warp loads the 16 bytes that are its fragment of the operand of `mma.m16n8k32`.
pub(super) fn pack_nibbles(codes: &[u8], n: usize, k: usize) -> Vec<u8> {
    let mut bytes = vec![0; n * k / 2];
    let of_tiles = bytes.par_chunks_exact_mut((TILE * k / 2).max(1));
    of_tiles.zip(codes.par_chunks_exact((TILE * k).max(1))).for_each(|(bytes, codes)| {
        for_quads(k, |row, column, at| {
            let (low, high) = (&codes[row * k + column..], &codes[(row + 16) * k + column..]);
            for kr in 0..4 {
                bytes[at + kr] = low[kr] | high[kr] << 4;
            }
        });
    });
    bytes
}

/// The inverse of [`pack_nibbles`]: codes `[n, k]`.
///
/// # Errors
/// [`Error::Memory`] when they cannot be allocated.
pub(super) fn unpack_nibbles(bytes: &[u8], n: usize, k: usize) -> Result<Vec<u8>> {
    let mut codes = allocate::zeros(n * k, "the codes of a weight")?;
    let of_tiles = codes.par_chunks_exact_mut((TILE * k).max(1));
    of_tiles.zip(bytes.par_chunks_exact((TILE * k / 2).max(1))).for_each(|(codes, bytes)| {
        for_quads(k, |row, column, at| {
            for kr in 0..4 {
                codes[row * k + column + kr] = bytes[at + kr] & 15;
                codes[(row + 16) * k + column + kr] = bytes[at + kr] >> 4;
            }
        });
    });
    Ok(codes)
}

/// Calls `visit` for every four adjacent inputs of outputs 0 to 15 in a row of tiles, with the output, the first input
/// and the offset of the first byte.
fn for_quads(k: usize, mut visit: impl FnMut(usize, usize, usize)) {
    for row in 0..16 {
        let (h, nl) = (row / 8, row % 8);
        for column in (0..k).step_by(4) {
            let (kt, kh, kl) = (column / 32, column / 16 % 2, column / 4 % 4);
            visit(row, column, (kt * 32 + nl * 4 + kl) * 16 + kh * 8 + h * 4);
        }
    }
}

#[cfg(test)]
#[path = "layout_tests.rs"]
mod tests;
