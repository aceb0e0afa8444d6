//! Float products as sums of products of bf16, for processors whose tile unit multiplies bf16 several times as fast as
//! vectors multiply `f32`.
//!
//! A number is the sum of up to three bf16 numbers, called its parts: each is the number minus the parts before it,
//! rounded to bf16 (half to even). Of the products of parts, those of `2⁻²⁴` and less relative to the whole are left
//! out: with `x = x₁ + x₂ + x₃` and `w = w₁ + w₂ + w₃`,
//!
//! `x w ≈ (x₁ + x₂ + x₃) w₁ + (x₁ + x₂) w₂ + x₁ w₃`
//!
//! So weights that are stored in bf16 take three products per weight, those with 16 significant bits five, and all
//! others six. Sums are in `f32`. If every operand is zero or between `2⁻¹⁰²` and `2¹²⁷`, the error is bounded by
//!
//! `|y − x wᵀ| ≤ (k + 9) · 2⁻²² Σ |x| |w| + k · 2⁻¹²³`
//!
//! The unit treats subnormal numbers as zero: the last term is for products and sums, and smaller operands lose their
//! last parts. An operand that is not finite, or a result beyond the range of `f32`, gives a result that is not finite.

use std::sync::LazyLock;

use half::bf16;
use quant_kernels_cpu::{
    Bf16Parts, FloatRows, Isa, IsaToken, KernelError, Layout, PackedView, Parallel, RowLayout, Serial,
};

use super::body::kernel_error;
use super::product::{PARTS_M, TILE_N};
use crate::model::BlockGraph;
use crate::vector::vectorized;
use crate::{Error, Result};

/// The environment variable that selects how floats are multiplied.
const VARIABLE: &str = "QUANT_FLOAT_PRODUCTS";
/// Bytes for the parts of a value of the left operand: in three, two and one bf16.
const LEFT_BYTES: u64 = 12;
/// Bytes for the parts of a weight, one of which is packed at a time.
const WEIGHT_BYTES: u64 = 8;
/// The alignment with which the kernels read packed weights fastest.
const ALIGNMENT: usize = 64;

/// How matrices of floats are multiplied: in evaluations, in the forward passes of calibration, and by the head.
/// Attention scores, Hessians and products of up to four tokens are always in `f32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FloatProducts {
    /// In `f32`.
    F32,
    /// As sums of products of bf16 on the tile unit of the detected instruction set, within `2⁻²²` of the magnitude of
    /// the operands, besides the rounding of sums in `f32`.
    Bf16Parts,
}

impl FloatProducts {
    /// Returns the choice that `QUANT_FLOAT_PRODUCTS` names. If it is not set, it is parts on the paths `amx` and
    /// `amxemulated`, and `f32` on all others. Detected once. If [`detect_checked`](Self::detect_checked) would fail,
    /// the variable is ignored.
    pub fn detect() -> Self {
        *FOUND.as_ref().unwrap_or_else(|(instead, _)| instead)
    }

    /// Returns the choice of [`detect`](Self::detect), for programs that check the variable when they start.
    ///
    /// # Errors
    /// [`Error::Usage`] when `QUANT_FLOAT_PRODUCTS` is an unknown name, or requires a tile unit and the instruction set
    /// has none.
    pub fn detect_checked() -> Result<Self> {
        FOUND.as_ref().copied().map_err(|(_, message)| Error::Usage {
            message: message.clone(),
            remedy: "unset it to use the fastest products of this processor".into(),
        })
    }

    /// The name in `QUANT_FLOAT_PRODUCTS` and in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16Parts => "bf16-parts",
        }
    }

    /// The memory for the operands of the largest product in a block with up to this many tokens, on the threads of this
    /// pool.
    pub(crate) fn memory(self, graph: &BlockGraph, tokens: u64) -> u64 {
        if self == Self::F32 {
            return 0;
        }
        let k = graph.linears().map(|(_, _, [_, k], _)| k as u64).max().unwrap_or(0);
        let tile = TILE_N as u64 * (4 + WEIGHT_BYTES) * k + 8 * (TILE_N * PARTS_M) as u64;
        LEFT_BYTES * k * tokens.min(PARTS_M as u64) + tile * rayon::current_num_threads() as u64
    }

    fn named(value: &str, isa: Isa) -> std::result::Result<Self, (Self, String)> {
        let has_tiles = matches!(isa, Isa::Amx | Isa::AmxEmulated);
        let default = if has_tiles { Self::Bf16Parts } else { Self::F32 };
        match value.trim() {
            "" => Ok(default),
            name if name.eq_ignore_ascii_case(Self::F32.name()) => Ok(Self::F32),
            name if !name.eq_ignore_ascii_case(Self::Bf16Parts.name()) => {
                Err((default, format!("{VARIABLE} is {name:?}, but must be f32 or bf16-parts")))
            }
            _ if has_tiles => Ok(Self::Bf16Parts),
            _ => Err((
                default,
                format!(
                    "{VARIABLE} is bf16-parts, which needs a tile unit; the instruction set is {}",
                    isa.name()
                ),
            )),
        }
    }
}

static FOUND: LazyLock<std::result::Result<FloatProducts, (FloatProducts, String)>> = LazyLock::new(|| {
    let value = std::env::var_os(VARIABLE).unwrap_or_default();
    FloatProducts::named(&value.to_string_lossy(), Isa::detect())
});

/// The left operand of a product, `[m, k]`, in parts.
#[derive(Debug)]
pub(super) struct Left {
    k: usize,
    /// In three parts; if needed also in two and in one.
    rows: Vec<FloatRows>,
}

impl Left {
    /// Packs `x` for products with weights that are `exact` in bf16, or with any weights.
    pub(super) fn new(
        token: IsaToken,
        x: &[f32],
        k: usize,
        exact: bool,
        parallel: &dyn Parallel,
    ) -> Result<Self> {
        let layout = RowLayout::of(&Layout::bf16([1, k]).map_err(packing)?);
        let all = [Bf16Parts::Three, Bf16Parts::Two, Bf16Parts::One];
        let parts = if exact { &all[..1] } else { &all[..] };
        let pack = |&parts: &Bf16Parts| {
            let mut rows = FloatRows::in_parts(token, parts);
            rows.pack(x, layout, parallel).map_err(packing)?;
            Ok(rows)
        };
        Ok(Self { k, rows: parts.iter().map(pack).collect::<Result<_>>()? })
    }

    pub(super) fn m(&self) -> usize {
        self.rows.first().map_or(0, FloatRows::m)
    }

    /// `out[m, n] = x · weight[n, k]ᵀ` on this thread, row-major.
    ///
    /// # Panics
    /// When a weight is not [exact](Self::new) although all were said to be, or `weight` is not whole rows.
    pub(super) fn multiply(&self, weight: &[f32], out: &mut [f32], scratch: &mut Scratch) -> Result<()> {
        let n = weight.len() / self.k;
        assert_eq!(n * self.k, weight.len(), "not whole rows");
        let used = scratch.split(weight);
        assert!(used <= self.rows.len(), "a weight is not exact in bf16");
        let layout = Layout::bf16([n, self.k]).map_err(packing)?;
        let Scratch { parts, packed, product } = scratch;
        packed.resize(layout.bytes() + ALIGNMENT, 0);
        let start = packed.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        let packed = &mut packed[start..start + layout.bytes()];
        // The smallest products are added first.
        for part in (0..used).rev() {
            layout.pack_bf16(&parts[part], 0..layout.panels(), packed).map_err(kernel_error)?;
            let view = PackedView::new(layout, layout.id(), packed).map_err(kernel_error)?;
            if part + 1 == used {
                view.multiply_float(&self.rows[part], None, out, &Serial).map_err(kernel_error)?;
                continue;
            }
            product.resize(out.len(), 0.0);
            view.multiply_float(&self.rows[part], None, product, &Serial).map_err(kernel_error)?;
            out.iter_mut().zip(&*product).for_each(|(sum, product)| *sum += product);
        }
        Ok(())
    }
}

/// Buffers of a thread.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    parts: [Vec<bf16>; 3],
    packed: Vec<u8>,
    product: Vec<f32>,
}

impl Scratch {
    /// Splits weights into parts, and returns how many are not all zero, but at least one.
    fn split(&mut self, weight: &[f32]) -> usize {
        let Self { parts: [first, second, third], .. } = self;
        first.resize(weight.len(), bf16::ZERO);
        second.resize(weight.len(), bf16::ZERO);
        third.resize(weight.len(), bf16::ZERO);
        let [mut any_second, mut any_third] = [0; 2];
        vectorized(
            #[inline(always)]
            || {
                for (((w, first), second), third) in
                    weight.iter().zip(first.iter_mut()).zip(second.iter_mut()).zip(third.iter_mut())
                {
                    let [a, b, c] = split(*w);
                    (*first, *second, *third) = (bf16::from_bits(a), bf16::from_bits(b), bf16::from_bits(c));
                    any_second |= b;
                    any_third |= c;
                }
            },
        );
        match () {
            // The sign of a zero does not count.
            () if any_third << 1 != 0 => 3,
            () if any_second << 1 != 0 => 2,
            () => 1,
        }
    }
}

/// The bits of the parts of a number. If it is not finite, or rounds to infinity, so is the first part, and the others
/// are zero.
#[inline(always)]
fn split(value: f32) -> [u16; 3] {
    let first = rounded(value);
    let rest = value - widened(first);
    let rest = if rest.is_finite() { rest } else { 0.0 };
    let second = rounded(rest);
    [first, second, rounded(rest - widened(second))]
}

/// The bits of a value rounded to bf16, half to even. NaN stays NaN.
#[inline(always)]
fn rounded(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if value.is_nan() { 0x7fc0 } else { rounded as u16 }
}

#[inline(always)]
fn widened(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The error of a kernel that packs operands.
fn packing(error: KernelError) -> Error {
    match error {
        KernelError::Memory(what) | KernelError::TooLarge(what) => {
            Error::Memory { what: what.to_owned(), bytes: None }
        }
        error => kernel_error(error),
    }
}
