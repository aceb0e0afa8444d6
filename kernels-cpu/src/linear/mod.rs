//! Linear layers on packed weights.
//!
//! # Integers
//!
//! `y = s_x · Σ_g s_g (Σ_{k∈g} q·a − z Σ_{k∈g} a) + b`.
//!
//! Weights of 4 or 8 bits with a scale for every group or row, or progressive ones; activations of 8 bits per
//! token or static (W4A8, W8A8, QServe's W4A8). Sums of a group are exact in `i32`; a group's sum becomes a
//! float, rounded once, and joins the total by a fused multiply-add, group by group; at the end the total is
//! multiplied by the scale of the activations, and a bias is added in the same rounding. That order is the
//! definition: all instruction sets, splits and thread counts give its bits.
//!
//! # Floats
//!
//! `y = Σ_g s_g (Σ_{k∈g} (q − c)·x + (c − z) Σ_{k∈g} x) + b` (W4A16, W8A16), with `c` the zero of a symmetric grid, else
//! 8 or 128, the middle of the 4 or 8 bits that codes are stored in: each
//! group's products are added in order of `k` by fused multiply-adds, and so are groups. All paths give the
//! same bits but `avx512bf16` and `amx`: there a value of `x` is the sum of several bf16
//! ([`Bf16Parts`](crate::Bf16Parts), two by default, `2⁻¹⁶` off at most), and their products are added in `f32` in an
//! order of their own. All are within `(2⁻¹⁶ + (k + 4) · 2⁻²³) Σ |ŵ| |x|` of the exact result, `|ŵ|` with `|q − c| +
//! |c − z|` in place of `|q − z|`; with one part `2⁻⁸` stands for `2⁻¹⁶`, with three `2⁻²⁴`. Split values take subnormals
//! for zero.
//!
//! On every path a row's result depends on the row, the weights and the path alone, not on the number of rows.

mod ahead;
mod dispatch;
mod float_tile;
mod product;
mod rows;
mod tile;
mod tiled;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

pub(crate) use self::dispatch::{MAX_ROWS, ONE_STRIP, Path};
pub use self::product::{Product, multiply_each, multiply_float_each};
pub(crate) use self::rows::Rows;
pub(crate) use self::tile::Out;
pub(crate) use self::tiled::{TILED_ROWS, UNTILED_GROUP};
use crate::layout::{LINE, Line, PANEL_ROWS};
use crate::parallel::Disjoint;
use crate::{FloatRows, Int8Rows, IsaToken, KernelError, Layout, Parallel, WeightView};

/// Packed weights, wherever they are.
///
/// ```
/// use quant_kernels_cpu::{FloatRows, IsaToken, Layout, PackedView, RowLayout, Serial, WeightView};
///
/// // Packed into memory of the caller's own, which may be kept in a file with the id of its layout.
/// let view = WeightView::new([1, 8], 4, 8, &[9; 8], &[0.5], None)?;
/// let layout = Layout::of(&view, false)?;
/// let mut bytes = vec![0; layout.bytes()];
/// layout.pack(&view, 0..layout.panels(), &mut bytes)?;
///
/// let packed = PackedView::new(layout, layout.id(), &bytes)?;
/// let mut rows = FloatRows::new(IsaToken::detect());
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
    /// Bytes that [`Layout::pack`] wrote, in memory or in a mapped file; those of a file that others may have written
    /// are [checked](Self::check) once. Kernels read fastest where they begin at a multiple of [`LINE`].
    ///
    /// # Errors
    /// When `id` is not that of the layout, or the length is another.
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

    /// Some rows, output features that is, as a matrix of their own, which is multiplied with the same activations:
    /// its results are those columns of the whole, to the bit. `rows` begin at a multiple of [`PANEL_ROWS`] and end
    /// at one, or where the matrix does. Nothing is copied.
    ///
    /// # Errors
    /// When there are no such rows, none at all, or they begin or end within a panel.
    pub fn rows(&self, rows: Range<usize>) -> Result<Self, KernelError> {
        let n = self.layout.n();
        if rows.start >= rows.end || rows.end > n {
            return Err(KernelError::Mismatch { what: "rows", expected: n, got: rows.end });
        }
        for end in [rows.start, rows.end].into_iter().filter(|&end| end != n) {
            if !end.is_multiple_of(PANEL_ROWS) {
                let what = "rows that begin or end within a panel";
                return Err(KernelError::Mismatch { what, expected: PANEL_ROWS, got: end });
            }
        }
        let (layout, at) = (self.layout.of_rows(rows.len()), rows.start / PANEL_ROWS);
        let bytes = &self.bytes[at * layout.panel_bytes()..][..layout.bytes()];
        Ok(Self { layout, bytes })
    }

    /// `out = x · Wᵀ + bias` on integers: `x` is `[m, k]`, `out` `[m, n]` row-major and overwritten, `bias`
    /// `[n]`.
    ///
    /// # Errors
    /// When `x` was made for other groups, a length is wrong, or `x` has a zero and the layout no sums.
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

    /// The same on floats, by the instructions that `x` was packed for.
    ///
    /// # Errors
    /// When `x` was made for other groups, or a length is wrong.
    pub fn multiply_float(
        &self,
        x: &FloatRows,
        bias: Option<&[f32]>,
        out: &mut [f32],
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        multiply_float_each(x, &mut [Product { weight: *self, bias, out }], parallel)
    }

    /// Some rows as floats again, `[rows.len(), k]` row-major: the values of
    /// [`reference::dequantize_rows`](crate::reference::dequantize_rows).
    ///
    /// # Errors
    /// When rows leave the matrix, or `out` has another length.
    pub fn dequantize_rows(&self, rows: Range<usize>, out: &mut [f32]) -> Result<(), KernelError> {
        self.layout.dequantize(self.bytes, rows, out)
    }
}

/// So many lines of zeros, which the system makes where they are first touched: by the threads that pack.
fn zeros(count: usize) -> Result<Vec<Line>, KernelError> {
    let memory = std::alloc::Layout::array::<Line>(count);
    let memory = memory.map_err(|_| KernelError::TooLarge("the packed weights"))?;
    if count == 0 {
        return Ok(Vec::new());
    }
    // SAFETY: the size is not zero.
    let at = unsafe { std::alloc::alloc_zeroed(memory) }.cast::<Line>();
    if at.is_null() {
        return Err(KernelError::Memory("the packed weights"));
    }
    // SAFETY: from the allocator of vectors, with this layout; zeros are lines.
    Ok(unsafe { Vec::from_raw_parts(at, count, count) })
}

/// Packed weights of our own, aligned.
///
/// ```
/// use quant_kernels_cpu::{FloatRows, IsaToken, PackedLinear, RowLayout, Serial, WeightView};
///
/// let view = WeightView::new([1, 8], 4, 8, &[9; 8], &[0.5], None)?;
/// let weight = PackedLinear::pack(&view, Some(&[1.0]), false, &Serial)?; // with its bias
/// let mut rows = FloatRows::new(IsaToken::detect()); // once; its memory is used again
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

impl PackedLinear {
    /// Packs a view; `sums` where activations may have a zero.
    ///
    /// # Errors
    /// As [`Layout::pack`], and when the bias is not `[n]` or memory is short.
    pub fn pack(
        view: &WeightView<'_>,
        bias: Option<&[f32]>,
        sums: bool,
        parallel: &dyn Parallel,
    ) -> Result<Self, KernelError> {
        let layout = Layout::of(view, sums)?;
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
            // SAFETY: each panel is asked for once; lines are bytes without gaps.
            let bytes = unsafe {
                let lines = out.part(panel * panel_lines..(panel + 1) * panel_lines);
                core::slice::from_raw_parts_mut(lines.as_mut_ptr().cast::<u8>(), layout.panel_bytes())
            };
            if let Err(error) = layout.pack_panels(view, panel..panel + 1, bytes) {
                *refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            }
        });
        if let Some(error) = refused.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(error);
        }
        Ok(Self { layout, lines, bias: bias.map(|_| own) })
    }

    /// The weights, to multiply with and to write to a file.
    pub fn view(&self) -> PackedView<'_> {
        let (at, bytes) = (self.lines.as_ptr().cast(), self.lines.len() * LINE);
        // SAFETY: lines are bytes without gaps, and borrowed as long as the view.
        PackedView { layout: self.layout, bytes: unsafe { core::slice::from_raw_parts(at, bytes) } }
    }

    /// The layout.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The bias that it was packed with.
    pub fn bias(&self) -> Option<&[f32]> {
        self.bias.as_deref()
    }

    /// `out = x · Wᵀ + bias` on the widest instructions there are.
    ///
    /// # Errors
    /// As [`PackedView::multiply`].
    pub fn multiply(
        &self,
        x: &Int8Rows,
        out: &mut [f32],
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        self.view().multiply(IsaToken::detect(), x, self.bias.as_deref(), out, parallel)
    }

    /// The same on floats, by the instructions that these were packed for.
    ///
    /// # Errors
    /// As [`PackedView::multiply_float`].
    pub fn multiply_float(
        &self,
        x: &FloatRows,
        out: &mut [f32],
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        self.view().multiply_float(x, self.bias.as_deref(), out, parallel)
    }
}
