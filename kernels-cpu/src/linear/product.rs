//! Products of packed weights with activations: argument checks, and the division of work among threads.

use core::ops::Range;

use super::PackedView;
use super::dispatch::{EXPANDED_STRIPS, MAX_ROWS, Path};
#[cfg(target_arch = "x86_64")]
use super::expanded::{self, Expanded};
use super::rows::ActivationRows;
use super::tile::{Out, Tile};
use super::tiled::{self, Tiled};
use crate::activation::{RowLayout, strip, strips};
use crate::layout::{PANEL_ROWS, STEP};
use crate::parallel::Disjoint;
use crate::{FloatFormat, FloatRows, Int8Rows, IsaToken, KernelError, Layout, Parallel};

/// Bytes of activations that stay in the L2 cache while panels are read.
const BLOCK: usize = 1024 << 10;
/// Bytes of activations that stay in the last-level cache.
const SHARED: usize = 8 << 20;
/// Maximum number of panels per piece of work.
const CHUNK: usize = 16;
/// Pieces per thread, if the product is large enough.
const PIECES_PER_THREAD: usize = 16;

/// One of several products with the same activations.
#[derive(Debug)]
pub struct Product<'a> {
    /// The weights `[n, k]`.
    pub weight: PackedView<'a>,
    /// The bias `[n]`, if any.
    pub bias: Option<&'a [f32]>,
    /// `[m, n]` row-major, overwritten.
    pub out: &'a mut [f32],
}

/// Multiplies several weights by the same activations, such as those of queries, keys and values. Threads synchronize
/// less often than in separate products. Results are bit-identical to those of separate products.
///
/// # Errors
/// See [`PackedView::multiply`]; nothing is written on error.
///
/// ```
/// use quant_kernels_cpu::{
///     Int8Rows, IsaToken, PackedLinear, Product, RowLayout, Serial, WeightView, multiply_each,
/// };
///
/// let view = |codes| WeightView::new([1, 8], 4, 8, codes, &[0.5], None);
/// let queries = PackedLinear::pack(&view(&[9; 8])?, None, false, &Serial)?;
/// let keys = PackedLinear::pack(&view(&[10; 8])?, None, false, &Serial)?;
/// let mut rows = Int8Rows::default();
/// rows.quantize(&[1.0f32; 8], RowLayout::of(queries.layout()), &Serial)?;
///
/// let (mut q, mut k) = ([0.0], [0.0]);
/// let mut products = [
///     Product { weight: queries.view(), bias: None, out: &mut q },
///     Product { weight: keys.view(), bias: None, out: &mut k },
/// ];
/// multiply_each(IsaToken::detect(), &rows, &mut products, &Serial)?;
/// assert_eq!((q, k), ([4.0], [8.0]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn multiply_each(
    token: IsaToken,
    x: &Int8Rows,
    products: &mut [Product<'_>],
    parallel: &dyn Parallel,
) -> Result<(), KernelError> {
    if products.iter().any(|p| p.weight.layout.float_format() == Some(FloatFormat::E4m3)) {
        return Err(KernelError::Scheme("FP8 (E4M3) weights cannot be multiplied with int8 activations"));
    }
    if products.iter().any(|p| p.weight.layout.is_bf16()) {
        return Err(KernelError::Scheme("bf16 weights cannot be multiplied with int8 activations"));
    }
    if x.zero != 0 && products.iter().any(|p| !p.weight.layout.has_sums()) {
        return Err(KernelError::Scheme(
            "activations with a zero point need weights that were packed with sums",
        ));
    }
    let rows = ActivationRows::int8(x, token, x.all().as_ref());
    run(&|layout| Path::whole(token, layout, x.zero), &rows, products, parallel)
}

/// Multiplies several weights by the same float activations, with the instructions that `x` was packed for; see
/// [`multiply_each`].
///
/// # Errors
/// See [`PackedView::multiply_float`]; nothing is written on error.
pub fn multiply_float_each(
    x: &FloatRows,
    products: &mut [Product<'_>],
    parallel: &dyn Parallel,
) -> Result<(), KernelError> {
    let rows = ActivationRows::float(x, x.all().as_ref());
    run(&|layout| Path::float(x.token, layout), &rows, products, parallel)
}

/// Maximum number of products per call of `Parallel::for_each`: [`run`] keeps their divisions on the stack.
const MAX_PRODUCTS: usize = 4;

fn run(
    path: &dyn Fn(&Layout) -> Path,
    x: &ActivationRows<'_>,
    products: &mut [Product<'_>],
    parallel: &dyn Parallel,
) -> Result<(), KernelError> {
    products.iter().try_for_each(|product| product.check(x))?;
    if x.m == 0 {
        return Ok(());
    }
    for products in products.chunks_mut(MAX_PRODUCTS) {
        let mut parts = [const { None }; MAX_PRODUCTS];
        let mut pieces = 0;
        for (part, product) in parts.iter_mut().zip(products) {
            let division = Pieces::new(path(&product.weight.layout), x, product, pieces, parallel);
            pieces += division.blocks * division.chunks;
            *part = Some(division);
        }
        parallel.for_each(pieces, &|piece| {
            let own = parts.iter().flatten().rfind(|part| part.first <= piece);
            let Some(own) = own.filter(|_| piece < pieces) else { return };
            let piece = piece - own.first;
            let (b, c) = (piece / own.chunks, piece % own.chunks);
            let panels = own.weight.layout.panels();
            let strips = b * own.block..((b + 1) * own.block).min(x.strips());
            let panels = c * own.chunk..((c + 1) * own.chunk).min(panels);
            // SAFETY: lengths were checked above; pieces write to disjoint products, strips or panels, and `Parallel`
            // calls each at most once; the `IsaToken` proves that the processor has the instructions.
            unsafe {
                let out = Out::whole(own.out.pointer(), own.weight.layout.n());
                own.weight.part(own.path, x, strips, panels, own.bias, out);
            }
        });
    }
    Ok(())
}

impl Product<'_> {
    fn check(&self, x: &ActivationRows<'_>) -> Result<(), KernelError> {
        let layout = &self.weight.layout;
        if x.layout != Some(RowLayout::of(layout)) {
            let (k, group_size) = x.layout.map_or((0, 0), |rows| (rows.k(), rows.group_size()));
            return Err(match k == layout.k() {
                true => KernelError::Mismatch {
                    what: "the activations must be arranged in the groups of the weights: expected group size",
                    expected: layout.group_size(),
                    got: group_size,
                },
                false => KernelError::Mismatch {
                    what: "the activations must have the width of the weights: expected",
                    expected: layout.k(),
                    got: k,
                },
            });
        }
        if let Some(bias) = self.bias {
            KernelError::length("bias", layout.n(), bias.len())?;
        }
        let expected = x.m.checked_mul(layout.n()).ok_or(KernelError::TooLarge("the output"))?;
        KernelError::length("output", expected, self.out.len())?;
        if x.m == 0 { Ok(()) } else { x.check(layout) }
    }
}

/// The division of a product into pieces of work.
struct Pieces<'a> {
    weight: PackedView<'a>,
    path: Path,
    bias: Option<&'a [f32]>,
    out: Disjoint<'a, f32>,
    /// The index of the product's first piece among those of all products.
    first: usize,
    /// Strips per block, and the number of blocks.
    block: usize,
    blocks: usize,
    /// Panels per chunk, and the number of chunks.
    chunk: usize,
    chunks: usize,
}

impl<'a> Pieces<'a> {
    fn new(
        path: Path,
        x: &ActivationRows<'_>,
        product: &'a mut Product<'_>,
        first: usize,
        parallel: &dyn Parallel,
    ) -> Self {
        let layout = &product.weight.layout;
        let (weight, bias) = (product.weight, product.bias);
        let shares = parallel.threads().max(1).saturating_mul(PIECES_PER_THREAD);
        if let Some(rows) = x.tiled {
            // Blocks of at most as many row tiles as a piece keeps sums for; and many panels, since each piece reads
            // the activations of its block.
            let blocks = x.strips().div_ceil(tiled::max_tiles(rows.tiling));
            let block = x.strips().div_ceil(blocks);
            let chunk = (layout.panels() * blocks).div_ceil(shares / 2).next_multiple_of(4).min(tiled::CHUNK);
            let (blocks, chunks) = (x.strips().div_ceil(block), layout.panels().div_ceil(chunk));
            let out = Disjoint::new(product.out);
            return Self { weight, path, bias, out, first, block, blocks, chunk, chunks };
        }
        let strip_bytes = (MAX_ROWS * layout.padded_k() / STEP * x.row_step).max(1);
        // Strips whose activations stay in the L2 cache while panels are read.
        let block = (BLOCK / strip_bytes).clamp(1, strips(x.m));
        // Blocks of similar size, since each reads all weights.
        let blocks = match path.expands(strip(x.m, 0).len()) {
            // Weights are converted once per block. Its activations are read in order, from the last-level cache.
            true => strips(x.m).div_ceil((SHARED / strip_bytes).clamp(1, EXPANDED_STRIPS)),
            false => ((strips(x.m) + block / 2) / block).max(1),
        };
        let block = strips(x.m).div_ceil(blocks);
        let blocks = strips(x.m).div_ceil(block);
        let chunk = layout.panels().div_ceil(shares).next_multiple_of(4).min(CHUNK);
        let chunks = layout.panels().div_ceil(chunk);
        Self { weight, path, bias, out: Disjoint::new(product.out), first, block, blocks, chunk, chunks }
    }
}

impl PackedView<'_> {
    /// Multiplies a range of strips of rows by a range of panels.
    ///
    /// # Safety
    /// `path` must be one for this layout and for the kind of rows in `x`. `x` must have the lengths that the layout
    /// requires, `strips` must be within `x`, and `panels` within the layout. A bias must be `[n]`. `out` must be valid
    /// for these rows and columns, which no other thread may access. The processor must have the path's instructions.
    pub(crate) unsafe fn part(
        &self,
        path: Path,
        x: &ActivationRows<'_>,
        strips: Range<usize>,
        panels: Range<usize>,
        bias: Option<&[f32]>,
        out: Out,
    ) {
        let layout = &self.layout;
        if let (Some(rows), Some((multiply, steps))) = (x.tiled, path.tiled()) {
            let tiled = Tiled {
                layout,
                weights: self.bytes.as_ptr(),
                m: x.m,
                tiling: rows.tiling,
                tiles: rows.tiles.at,
                sums: rows.sums.at,
                scales: x.scales.map_or(core::ptr::null(), <[f32]>::as_ptr),
                zero: x.zero,
                bias: bias.map_or(core::ptr::null(), <[f32]>::as_ptr),
                out,
                steps,
            };
            // SAFETY: lengths follow from the layout and the tiling, and were checked by `Product::check` or, for
            // experts, by `Experts::run`; the caller guarantees the contract of `part`.
            return unsafe { multiply(&tiled, strips, panels) };
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(of) = path.expanded(strip(x.m, strips.start).len()) {
            let product = Expanded {
                layout,
                weights: self.bytes.as_ptr(),
                m: x.m,
                activations: x.activations.at,
                strip_step: x.step_bytes,
                row_step: x.row_step,
                sums: x.sums.at.cast(),
                rest: x.rest,
                bias: bias.map_or(core::ptr::null(), <[f32]>::as_ptr),
                out,
            };
            // SAFETY: lengths follow from the layout, and were checked by `Product::check` or, for experts, by
            // `Experts::run`; the caller guarantees the contract of `part`.
            return unsafe { expanded::multiply(&product, path, of, strips, panels) };
        }
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
                    let width = if path.panels(count) == taken { taken } else { 1 };
                    for first in (0..taken).step_by(width) {
                        let column = (panel + first) * PANEL_ROWS;
                        // SAFETY: every offset is that of an element within the slices, whose lengths follow from the
                        // layout; the caller guarantees that `out` is valid.
                        unsafe {
                            let at = rows.start * steps * x.step_bytes + (row - rows.start) * x.row_step;
                            let sums_at = rows.start * groups + row - rows.start;
                            let tile = Tile {
                                layout,
                                weights: self.bytes.as_ptr().add((panel + first) * layout.panel_bytes()),
                                strip: rows.len(),
                                activations: x.activations.at.add(at),
                                sums: x.sums.at.add(4 * sums_at),
                                eights: x.eights.map_or(core::ptr::null(), |e| e.as_ptr().add(sums_at)),
                                scales: x.scales.map_or(core::ptr::null(), |s| s.as_ptr().add(row)),
                                zero: x.zero,
                                rest: x.rest,
                                bias: bias.map_or(core::ptr::null(), |b| b.as_ptr().add(column)),
                                out: out.of(row, column),
                                stride: out.stride,
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
