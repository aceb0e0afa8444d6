//! Linear layers on packed weights.
//!
//! # Integers
//!
//! `y = s_x · Σ_g s_g (Σ_{k∈g} q·a − z Σ_{k∈g} a) + b`.
//!
//! Activations have 8 bits, quantized per token or static. Sums of integers are exact in `i32`. They are converted to
//! floats and combined in a fixed order, which is part of the definition
//! ([`reference::int8_linear`](crate::reference::int8_linear)), so results are bit-identical for all instruction sets,
//! divisions of work and thread counts.
//!
//! Super-blocks ([`SuperScales`](crate::SuperScales)) have an integer scale `s_g` and minimum `m_g` per group, and a
//! float scale `d_b` and minimum `e_b` per super-block: `y = s_x · Σ_b (d_b Σ_{g∈b} s_g Σ_{k∈g} (q − z)·a − e_b Σ_{g∈b}
//! m_g Σ_{k∈g} a) + b`.
//!
//! # Floats
//!
//! `y = Σ_g s_g (Σ_{k∈g} (q − c)·x + (c − z) Σ_{k∈g} x) + b`, with `c` the zero point that all groups share, if there
//! is one, otherwise the middle of the range of codes. Results are bit-identical on all paths that multiply in `f32`.
//! On the others ([`Isa::splits_floats`](crate::Isa::splits_floats)), a value of `x` is the sum of several bf16
//! ([`Bf16Parts`](crate::Bf16Parts)), and products are added in a different order. All are within
//! `(2⁻¹⁶ + (k + 4) · 2⁻²³) Σ |ŵ| |x|` of the exact result, where `|ŵ| = |s_g| (|q − c| + |c − z|)`; with one part
//! `2⁻⁸` replaces `2⁻¹⁶`, with three `2⁻²⁴`. Split values treat subnormals as zero.
//!
//! On every path a row's result depends only on the row, the weights and the path, not on the number of rows.

mod dispatch;
#[cfg(target_arch = "x86_64")]
mod expanded;
mod float_tile;
mod prefetcher;
mod product;
mod rows;
mod super_tile;
mod tile;
mod tiled;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use half::bf16;

pub(crate) use self::dispatch::{MAX_ROWS, ONE_STRIP, Path};
pub use self::product::{Product, multiply_each, multiply_float_each};
pub(crate) use self::rows::ActivationRows;
pub(crate) use self::tile::Out;
pub(crate) use self::tiled::{TILED_ROWS, UNTILED_GROUP};
use crate::layout::{LINE, Line, PANEL_ROWS};
use crate::parallel::Disjoint;
use crate::{FloatRows, Int8Rows, IsaToken, KernelError, Layout, Parallel, WeightView};

/// Packed weights in borrowed memory.
///
/// ```
/// use quant_kernels_cpu::{FloatRows, Layout, PackedView, RowLayout, Serial, WeightView};
///
/// // Packed into memory of the caller, which may write it to a file together with the id of its layout.
/// let view = WeightView::new([1, 8], 4, 8, &[9; 8], &[0.5], None)?;
/// let layout = Layout::of(&view, false)?;
/// let mut bytes = vec![0; layout.bytes()];
/// layout.pack(&view, 0..layout.panels(), &mut bytes)?;
///
/// let packed = PackedView::new(layout, layout.id(), &bytes)?;
/// let mut rows = FloatRows::default();
/// rows.pack(&[2.0f32; 8], RowLayout::of(&layout), &Serial)?;
/// let mut out = [0.0];
/// packed.multiply_float(&rows, Some(&[1.0]), &mut out, &Serial)?;
/// assert_eq!(out, [9.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct PackedView<'a> {
    layout: Layout,
    bytes: &'a [u8],
}

impl<'a> PackedView<'a> {
    /// Creates a view of bytes that [`Layout::pack`] wrote, in memory or in a mapped file. Bytes of an untrusted file
    /// should be [checked](Self::check) once. Kernels read fastest if they are aligned to [`LINE`].
    ///
    /// # Errors
    /// When `id` is not that of the layout, or the length is wrong.
    pub fn new(layout: Layout, id: u64, bytes: &'a [u8]) -> Result<Self, KernelError> {
        if id != layout.id() {
            return Err(KernelError::LayoutId { expected: layout.id(), got: id });
        }
        KernelError::length("packed weights", layout.bytes(), bytes.len())?;
        Ok(Self { layout, bytes })
    }

    /// The layout.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The bytes.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// A range of rows (output features) as a separate matrix, which is multiplied by the same activations. Its product
    /// is bit-identical to these columns of the whole product. `rows` must start at a multiple of [`PANEL_ROWS`], and
    /// end at one or at the end of the matrix.
    ///
    /// # Errors
    /// When `rows` is empty or out of range, or starts or ends within a panel.
    pub fn rows(&self, rows: Range<usize>) -> Result<Self, KernelError> {
        let n = self.layout.n();
        KernelError::rows(&rows, n)?;
        if rows.is_empty() {
            return Err(KernelError::Mismatch {
                what: "the number of rows must be at least",
                expected: 1,
                got: 0,
            });
        }
        for end in [rows.start, rows.end].into_iter().filter(|&end| end != n) {
            if !end.is_multiple_of(PANEL_ROWS) {
                let what = "rows must begin and end at the end of the matrix or at a multiple of";
                return Err(KernelError::Mismatch { what, expected: PANEL_ROWS, got: end });
            }
        }
        let (layout, at) = (self.layout.of_rows(rows.len()), rows.start / PANEL_ROWS);
        let bytes = &self.bytes[at * layout.panel_bytes()..][..layout.bytes()];
        Ok(Self { layout, bytes })
    }

    /// Computes `out = x · Wᵀ + bias` on integers: `x` is `[m, k]`, `out` is `[m, n]`, row-major and overwritten,
    /// `bias` is `[n]`.
    ///
    /// # Errors
    /// When `x` was quantized for a different [`RowLayout`](crate::RowLayout), a length is wrong, `x` has a zero point
    /// and the weights have no sums, or the weights are FP8 (E4M3) or bf16.
    pub fn multiply(
        &self,
        token: IsaToken,
        x: &Int8Rows,
        bias: Option<&[f32]>,
        out: &mut [f32],
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        multiply_each(token, x, &mut [Product { weight: *self, bias, out }], parallel)
    }

    /// Computes `out = x · Wᵀ + bias` on floats, with the instructions that `x` was packed for.
    ///
    /// # Errors
    /// When `x` was packed for a different [`RowLayout`](crate::RowLayout), or a length is wrong.
    pub fn multiply_float(
        &self,
        x: &FloatRows,
        bias: Option<&[f32]>,
        out: &mut [f32],
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        multiply_float_each(x, &mut [Product { weight: *self, bias, out }], parallel)
    }

    /// Dequantizes a range of rows into `out`, `[rows.len(), k]`, row-major: the values of
    /// [`reference::dequantize_rows`](crate::reference::dequantize_rows).
    ///
    /// # Errors
    /// When `rows` is out of range, or `out` has the wrong length.
    pub fn dequantize_rows(&self, rows: Range<usize>, out: &mut [f32]) -> Result<(), KernelError> {
        self.layout.dequantize(self.bytes, rows, out)
    }
}

/// Allocates `count` zeroed lines.
fn zeros(count: usize) -> Result<Vec<Line>, KernelError> {
    let memory = std::alloc::Layout::array::<Line>(count);
    let memory = memory.map_err(|_| KernelError::TooLarge("the packed matrix"))?;
    if count == 0 {
        return Ok(Vec::new());
    }
    // SAFETY: the size of the allocation is not zero, as checked above.
    let at = unsafe { std::alloc::alloc_zeroed(memory) }.cast::<Line>();
    if at.is_null() {
        return Err(KernelError::Memory("the packed matrix"));
    }
    // SAFETY: allocated by the global allocator with the layout of `Vec<Line>` and this capacity; zeroed bytes are
    // valid lines.
    Ok(unsafe { Vec::from_raw_parts(at, count, count) })
}

/// Packed weights in owned, aligned memory.
///
/// ```
/// use quant_kernels_cpu::{FloatRows, PackedLinear, RowLayout, Serial, WeightView};
///
/// let view = WeightView::new([1, 8], 4, 8, &[9; 8], &[0.5], None)?;
/// let weight = PackedLinear::pack(&view, Some(&[1.0]), false, &Serial)?; // with its bias
/// let mut rows = FloatRows::default(); // create it once: it reuses its memory
/// rows.pack(&[2.0f32; 8], RowLayout::of(weight.layout()), &Serial)?;
/// let mut out = [0.0];
/// weight.multiply_float(&rows, &mut out, &Serial)?;
/// assert_eq!(out, [9.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct PackedLinear {
    layout: Layout,
    lines: Vec<Line>,
    bias: Option<Vec<f32>>,
}

type PackPanels<'a> = dyn Fn(Range<usize>, &mut [u8]) -> Result<(), KernelError> + Sync + 'a;

impl PackedLinear {
    /// Packs a view. `sums` must be set if activations may have a zero point.
    ///
    /// # Errors
    /// See [`Layout::of`] and [`Layout::pack`]; also when the bias is not `[n]`, or an allocation fails.
    pub fn pack(
        view: &WeightView<'_>,
        bias: Option<&[f32]>,
        sums: bool,
        parallel: &dyn Parallel,
    ) -> Result<Self, KernelError> {
        let layout = Layout::of(view, sums)?;
        Self::packed_by(layout, bias, parallel, &|panels, out| layout.pack_panels(view, panels, out))
    }

    fn packed_by(
        layout: Layout,
        bias: Option<&[f32]>,
        parallel: &dyn Parallel,
        pack: &PackPanels<'_>,
    ) -> Result<Self, KernelError> {
        if let Some(bias) = bias {
            KernelError::length("bias", layout.n(), bias.len())?;
        }
        let mut lines = zeros(layout.bytes() / LINE)?;
        let mut own = Vec::new();
        if let Some(bias) = bias {
            own.try_reserve_exact(bias.len()).map_err(|_| KernelError::Memory("the bias"))?;
            own.extend_from_slice(bias);
        }
        let panel_lines = layout.panel_bytes() / LINE;
        let (out, refused) = (Disjoint::new(&mut lines), Mutex::new(None));
        parallel.for_each(layout.panels(), &|panel| {
            // SAFETY: panels are disjoint, and `Parallel` calls each at most once; a line is bytes without padding.
            let bytes = unsafe {
                let lines = out.part(panel * panel_lines..(panel + 1) * panel_lines);
                core::slice::from_raw_parts_mut(lines.as_mut_ptr().cast::<u8>(), layout.panel_bytes())
            };
            if let Err(error) = pack(panel..panel + 1, bytes) {
                *refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            }
        });
        if let Some(error) = refused.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(error);
        }
        Ok(Self { layout, lines, bias: bias.map(|_| own) })
    }

    /// Packs dense weights of bf16, `[n, k]` row-major: output heads and layers that are not quantized. They are
    /// multiplied by float activations with [`multiply_float`](Self::multiply_float): `y = Σ_k w·x + b`, within
    /// `(2⁻¹⁶ + (k + 4) · 2⁻²³) Σ |w| |x|` of the exact result, without the first term if activations are bf16 or the
    /// path does not split them. Paths that multiply bf16 treat subnormal weights, activations and sums as zero.
    ///
    /// # Errors
    /// When the matrix is empty or too large, a length is wrong, or an allocation fails.
    ///
    /// ```
    /// use half::bf16;
    /// use quant_kernels_cpu::{FloatRows, PackedLinear, RowLayout, Serial};
    ///
    /// let weight = [1.0, 2.0, 3.0, -1.0, 0.5, 0.0].map(bf16::from_f32); // [2, 3]
    /// let packed = PackedLinear::pack_bf16([2, 3], &weight, None, &Serial)?;
    /// let mut rows = FloatRows::default();
    /// rows.pack(&[1.0f32, 1.0, 2.0], RowLayout::of(packed.layout()), &Serial)?;
    /// let mut out = [0.0; 2];
    /// packed.multiply_float(&rows, &mut out, &Serial)?;
    /// assert_eq!(out, [9.0, -0.5]);
    /// # Ok::<(), quant_kernels_cpu::KernelError>(())
    /// ```
    pub fn pack_bf16(
        shape: [usize; 2],
        weight: &[bf16],
        bias: Option<&[f32]>,
        parallel: &dyn Parallel,
    ) -> Result<Self, KernelError> {
        let layout = Layout::bf16(shape)?;
        let expected = shape[0].checked_mul(shape[1]).ok_or(KernelError::TooLarge("the matrix"))?;
        KernelError::length("weights", expected, weight.len())?;
        Self::packed_by(layout, bias, parallel, &|panels, out| layout.pack_bf16(weight, panels, out))
    }

    /// The weights, for products and for writing to a file.
    pub fn view(&self) -> PackedView<'_> {
        let (at, bytes) = (self.lines.as_ptr().cast(), self.lines.len() * LINE);
        // SAFETY: a line is bytes without padding; the view borrows `self` for its lifetime.
        PackedView { layout: self.layout, bytes: unsafe { core::slice::from_raw_parts(at, bytes) } }
    }

    /// The layout.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The bias, if the weights were packed with one.
    pub fn bias(&self) -> Option<&[f32]> {
        self.bias.as_deref()
    }

    /// Computes `out = x · Wᵀ + bias` on the default instruction set.
    ///
    /// # Errors
    /// See [`PackedView::multiply`].
    pub fn multiply(
        &self,
        x: &Int8Rows,
        out: &mut [f32],
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        self.view().multiply(IsaToken::detect(), x, self.bias.as_deref(), out, parallel)
    }

    /// Computes `out = x · Wᵀ + bias` on floats, with the instructions that `x` was packed for.
    ///
    /// # Errors
    /// See [`PackedView::multiply_float`].
    pub fn multiply_float(
        &self,
        x: &FloatRows,
        out: &mut [f32],
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        self.view().multiply_float(x, self.bias.as_deref(), out, parallel)
    }
}
