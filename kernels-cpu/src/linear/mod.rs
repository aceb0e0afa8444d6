//! Linear layers on packed weights.
//!
//! # Whole numbers
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
//! same bits but that of `avx512bf16`: there a value of `x` is two bf16, `2⁻¹⁶` off at most, and pairs of products
//! are added in `f32`. All are within `(2⁻¹⁶ + (k + 4) · 2⁻²³) Σ |ŵ| |x|` of the exact result, `|ŵ|` with `|q − c| +
//! |c − z|` in place of `|q − z|`; split values take subnormals for zero.

mod dispatch;
mod float_tile;
mod tile;

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

pub(crate) use self::dispatch::MAX_ROWS;
use self::dispatch::Path;
use self::float_tile::FLOAT_STEP;
use self::tile::Tile;
use crate::activation::{RowLayout, strip, strips};
use crate::layout::{LINE, PANEL_ROWS, STEP};
use crate::parallel::Disjoint;
use crate::{FloatRows, Int8Rows, IsaToken, KernelError, Layout, Parallel, WeightView};

/// Bytes of activations that stay in the second cache while panels pass.
const BLOCK: usize = 1024 << 10;
/// Panels that one piece of work takes, at most.
const CHUNK: usize = 4;

/// Packed weights, wherever they are.
#[derive(Debug, Clone, Copy)]
pub struct PackedView<'a> {
    layout: Layout,
    bytes: &'a [u8],
}

impl<'a> PackedView<'a> {
    /// Bytes that [`Layout::pack`] wrote, in memory or in a mapped file. Kernels read fastest where they begin
    /// at a multiple of [`LINE`].
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

    /// `out = x · Wᵀ + bias` on whole numbers: `x` is `[m, k]`, `out` `[m, n]` row-major and overwritten, `bias`
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
        if x.zero != 0 && !self.layout.has_sums() {
            return Err(KernelError::Scheme("a zero of activations without sums in the layout"));
        }
        let rows = Rows {
            m: x.m,
            layout: x.layout,
            step_bytes: STEP,
            activations: Bytes::of(&x.codes),
            sums: Bytes::of(&x.sums),
            eights: Some(&x.eights),
            scales: Some(&x.scales),
            rest: false,
            zero: x.zero,
        };
        self.run(Path::whole(token, &self.layout, x.zero), &rows, bias, out, parallel)
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
        let rows = Rows {
            m: x.m,
            layout: x.layout,
            step_bytes: FLOAT_STEP,
            activations: Bytes::of(&x.words),
            sums: Bytes::of(&x.sums),
            eights: None,
            scales: None,
            rest: !x.exact_in_bf16,
            zero: 0,
        };
        self.run(Path::float(x.token, &self.layout), &rows, bias, out, parallel)
    }

    /// Some rows as floats again, `[rows.len(), k]` row-major: the values of
    /// [`reference::dequantize_rows`](crate::reference::dequantize_rows).
    ///
    /// # Errors
    /// When rows leave the matrix, or `out` has another length.
    pub fn dequantize_rows(&self, rows: Range<usize>, out: &mut [f32]) -> Result<(), KernelError> {
        self.layout.dequantize(self.bytes, rows, out)
    }

    fn run(
        &self,
        path: Path,
        x: &Rows<'_>,
        bias: Option<&[f32]>,
        out: &mut [f32],
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        let (layout, m) = (&self.layout, x.m);
        if x.layout != Some(RowLayout::of(layout)) {
            let got = x.layout.map_or(0, |l| l.group_size());
            return Err(KernelError::Mismatch {
                what: "groups of the activations",
                expected: layout.group_size(),
                got,
            });
        }
        if let Some(bias) = bias {
            KernelError::length("bias", layout.n(), bias.len())?;
        }
        let expected = m.checked_mul(layout.n()).ok_or(KernelError::TooLarge("the output"))?;
        KernelError::length("output", expected, out.len())?;
        if m == 0 {
            return Ok(());
        }
        x.check(layout)?;
        // Strips whose activations stay in the second cache while panels pass.
        let strip_bytes = MAX_ROWS * layout.padded_k() / STEP * x.step_bytes;
        let block = (BLOCK / strip_bytes.max(1)).clamp(1, strips(m));
        // Blocks of like size, for each reads all weights: none for what is left over.
        let blocks = ((strips(m) + block / 2) / block).max(1);
        let block = strips(m).div_ceil(blocks);
        let blocks = strips(m).div_ceil(block);
        // As many pieces as keep the threads busy to the end.
        let chunk = layout
            .panels()
            .div_ceil(parallel.threads().max(1).saturating_mul(4))
            .next_multiple_of(4)
            .min(CHUNK);
        let chunks = layout.panels().div_ceil(chunk);
        let out = Disjoint::new(out);
        parallel.for_each(blocks * chunks, &|piece| {
            if piece >= blocks * chunks {
                return;
            }
            let (b, c) = (piece / chunks, piece % chunks);
            let strips = b * block..((b + 1) * block).min(strips(m));
            let panels = c * chunk..((c + 1) * chunk).min(layout.panels());
            // SAFETY: lengths were checked above; pieces are disjoint in strips or panels, and so in what
            // they write, if each is asked for once, as `Parallel` demands; the token proves the instructions.
            unsafe { self.part(path, x, strips, panels, bias, &out) };
        });
        Ok(())
    }

    /// Some strips of rows times some panels.
    ///
    /// # Safety
    /// The ranges must be within `x` and the layout, `out` valid for `m · n` values of which nobody else
    /// writes these, and the processor must have the path's instructions.
    unsafe fn part(
        &self,
        path: Path,
        x: &Rows<'_>,
        strips: Range<usize>,
        panels: Range<usize>,
        bias: Option<&[f32]>,
        out: &Disjoint<'_, f32>,
    ) {
        let layout = &self.layout;
        let (n, groups, steps) = (layout.n(), layout.groups(), layout.padded_k() / STEP);
        let wide = path.panels(path.rows(strip(x.m, strips.start).len()));
        let mut panel = panels.start;
        while panel < panels.end {
            let taken = if panels.end - panel >= wide { wide } else { 1 };
            for s in strips.clone() {
                let rows = strip(x.m, s);
                let mut row = rows.start;
                while row < rows.end {
                    let count = path.rows(rows.end - row);
                    // A lower tile may be made for another number of panels.
                    let width = if path.panels(count) == taken { taken } else { 1 };
                    for first in (0..taken).step_by(width) {
                        let column = (panel + first) * PANEL_ROWS;
                        // SAFETY: every offset is that of an element within the slices, whose lengths
                        // follow from the layout; the caller vouches for `out`.
                        unsafe {
                            let at = rows.start * steps + row - rows.start;
                            let sums_at = rows.start * groups + row - rows.start;
                            let tile = Tile {
                                layout,
                                weights: self.bytes.as_ptr().add((panel + first) * layout.panel_bytes()),
                                strip: rows.len(),
                                activations: x.activations.at.add(at * x.step_bytes),
                                sums: x.sums.at.add(4 * sums_at),
                                eights: x.eights.map_or(core::ptr::null(), |e| e.as_ptr().add(sums_at)),
                                scales: x.scales.map_or(core::ptr::null(), |s| s.as_ptr().add(row)),
                                zero: x.zero,
                                rest: x.rest,
                                bias: bias.map_or(core::ptr::null(), |b| b.as_ptr().add(column)),
                                out: out.pointer().add(row * n + column),
                                stride: n,
                                columns: n - column,
                            };
                            path.tile(count, width)(&tile);
                        }
                    }
                    row += count;
                }
            }
            panel += taken;
        }
    }
}

/// A slice of any type, as bytes.
#[derive(Clone, Copy)]
struct Bytes<'a> {
    at: *const u8,
    len: usize,
    of: PhantomData<&'a [u8]>,
}

impl<'a> Bytes<'a> {
    fn of<T>(slice: &'a [T]) -> Self {
        Self { at: slice.as_ptr().cast(), len: size_of_val(slice), of: PhantomData }
    }
}

/// Rows of either kind.
struct Rows<'a> {
    m: usize,
    layout: Option<RowLayout>,
    /// Bytes of a step of a row.
    step_bytes: usize,
    activations: Bytes<'a>,
    /// Of four bytes each.
    sums: Bytes<'a>,
    eights: Option<&'a [i32]>,
    scales: Option<&'a [f32]>,
    rest: bool,
    zero: i32,
}
// SAFETY: threads only read what the pointers point to, and the rows outlive the call.
unsafe impl Sync for Rows<'_> {}

impl Rows<'_> {
    /// Whether everything is as long as so many rows are: what kernels read is not checked again.
    fn check(&self, layout: &Layout) -> Result<(), KernelError> {
        let of = |each: usize, bytes: usize| self.m.checked_mul(each)?.checked_mul(bytes);
        let length = |what, expected: Option<usize>, got| match expected {
            Some(expected) => KernelError::length(what, expected, got),
            None => Err(KernelError::TooLarge(what)),
        };
        let groups = layout.groups();
        let steps = of(layout.padded_k() / STEP, self.step_bytes);
        length("bytes of activations", steps, self.activations.len)?;
        length("bytes of sums", of(groups, 4), self.sums.len)?;
        self.eights.map_or(Ok(()), |eights| length("sums", of(groups, 1), eights.len()))?;
        self.scales.map_or(Ok(()), |scales| length("scales", Some(self.m), scales.len()))
    }
}

/// A cache line.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; LINE]);

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
