//! Runs a call, in the four steps that the module documentation of [`experts`](super) lists.

use core::mem::MaybeUninit;
use core::ops::Range;

use super::plan::Buffer;
use super::{ExpertWeight, Experts, ExpertsPlan, ExpertsWorkspace, Routing, routing};
use crate::activation::segments::{Extent, Segment};
use crate::activation::source::{Gathered, Plain, Source};
use crate::activation::{Element, RowLayout, dispatch, sealed::Kind};
use crate::layout::PANEL_ROWS;
use crate::linear::{ActivationRows, Out, Path};
use crate::parallel::Disjoint;
use crate::{KernelError, Parallel, Serial};

/// The maximum number of results per part of a product: few enough to stay in the L1 cache until they are used.
const RESULTS: usize = 8192;
/// Pieces of work per thread: many, so that threads do not wait long for the last piece.
const PIECES_PER_THREAD: usize = 16;
/// Pieces of work per thread for few rows. Their speed is limited by memory bandwidth, which is highest for long
/// sequential reads, so pieces are larger.
const FEW_PIECES_PER_THREAD: usize = 4;
/// The minimum and maximum number of panels per piece. With few rows the kernel processes four panels at once; pieces
/// of more than sixteen are not faster.
const CHUNK: [usize; 2] = [4, 16];
/// The maximum number of panels per piece for few rows.
const FEW_CHUNK: usize = 64;
/// Maximum bytes of weights per piece, so that they stay in the L2 cache while several groups of rows are multiplied
/// with them.
const WEIGHTS: usize = 512 << 10;
/// The maximum number of rows per expert, or on average over experts that have rows, that counts as few.
const FEW_ROWS: usize = 4;
/// Up to this number of values, preparing rows on one thread is faster than waking other threads.
const FEW: usize = 1 << 15;

/// An expert that has rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Active {
    expert: u32,
    /// The rows that its gate and up read, and those that its `down` reads.
    rows: [Segment; 2],
    /// The index of its first strip or tile among those of all experts, for both kinds of rows.
    units: [usize; 2],
    /// The index of its first piece of gate and up among those of all experts.
    first: usize,
    /// The number of strips or tiles per piece, and the number of blocks of this size.
    block: usize,
    blocks: usize,
    /// The number of panels per piece, and the number of chunks of this size.
    chunk: usize,
    chunks: usize,
}

impl Experts<'_> {
    /// Computes `out[t] = Σ_e w[t, e] · down_e(act(gate_e(x[t]), up_e(x[t])))`, in order of experts. `x` is
    /// `[tokens, hidden]`; `out` has the same shape and is overwritten. A token without experts gets zeros. Allocates
    /// nothing.
    ///
    /// # Errors
    /// When the plan, the routing, the workspace or a length does not match. `out` is then unchanged.
    pub fn run<E: Element>(
        &self,
        plan: &ExpertsPlan,
        x: &[E],
        routing: &Routing<'_>,
        workspace: &mut ExpertsWorkspace,
        out: &mut [f32],
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        self.check(plan, x, routing, out.len())?;
        workspace.require(plan)?;
        let ExpertsWorkspace { rows, active, inner, buffers, .. } = workspace;
        let Some([read, between]) = buffers else {
            return Err(KernelError::Scheme("the workspace was not reserved for this plan"));
        };
        rows.sort(routing, self.count())?;
        let in_bf16 = E::KIND == Kind::Bf16;
        let buffer_len = if E::KIND == Kind::F32 { 0 } else { self.hidden };
        active.clear();
        let (mut extents, mut units) = ([Extent::default(); 2], [0; 2]);
        for expert in 0..self.count() {
            let m = rows.of(expert).len();
            if m == 0 {
                continue;
            }
            let own = self.get(expert);
            let [gate, down] = [own.gate, own.down].map(|of| RowLayout::of(of.weight.layout()));
            let segments = [
                read.add(&mut extents[0], m, gate, in_bf16, buffer_len),
                between.add(&mut extents[1], m, down, false, 0),
            ];
            let [Some(first), Some(second)] = segments else {
                return Err(KernelError::TooLarge("the number of expert rows"));
            };
            let (expert, rows) = (expert as u32, [first, second]);
            active.push(Active { expert, rows, units, first: 0, block: 0, blocks: 0, chunk: 0, chunks: 0 });
            units[0] += first.units(read.in_strips(first.layout));
            units[1] += second.units(between.in_strips(second.layout));
        }
        // The plan may have been made for other experts of the same shape, which need less memory.
        let room = [read.room(), between.room()];
        if room.iter().zip(&extents).any(|(room, extent)| !room.holds(extent)) {
            return Err(KernelError::Scheme(
                "the plan was made for experts that need less memory: make one for these experts",
            ));
        }
        let gathered = Gathered::new(plan.token, x, self.hidden, &rows.tokens);
        make(active, 0, units[0], read, in_bf16, &gathered, parallel);
        let inner = &mut inner[..rows.len() * self.inner];
        self.gate_up(plan, active, read, inner, parallel);
        let plain = Plain::new(plan.token, inner, self.inner)?;
        make(active, 1, units[1], between, false, &plain, parallel);
        self.down(plan, active, between, rows, out, parallel);
        Ok(())
    }

    fn check<E: Element>(
        &self,
        plan: &ExpertsPlan,
        x: &[E],
        routing: &Routing<'_>,
        out: usize,
    ) -> Result<(), KernelError> {
        for (what, expected, got) in [
            ("the number of experts must match the plan: expected", plan.shape[0], self.count()),
            ("the number of input features must match the plan: expected", plan.shape[1], self.hidden),
            ("the intermediate size must match the plan: expected", plan.shape[2], self.inner),
        ] {
            if expected != got {
                return Err(KernelError::Mismatch { what, expected, got });
            }
        }
        if plan.kind != E::KIND {
            return Err(KernelError::Scheme("the type of the activations differs from the plan's"));
        }
        self.require(plan.rows)?;
        let tokens = x.len() / self.hidden;
        KernelError::length("activations", tokens * self.hidden, x.len())?;
        for (what, max, got) in [
            ("the number of tokens exceeds the plan: expected at most", plan.tokens, tokens),
            ("the number of experts per token exceeds the plan: expected at most", plan.top_k, routing.top_k),
        ] {
            if got > max {
                return Err(KernelError::Mismatch { what, expected: max, got });
            }
        }
        let slots = tokens * routing.top_k;
        KernelError::length("expert numbers", slots, routing.experts.len())?;
        KernelError::length("expert weights", slots, routing.weights.len())?;
        KernelError::length("output", x.len(), out)
    }

    fn gate_up(
        &self,
        plan: &ExpertsPlan,
        active: &mut [Active],
        read: &Buffer,
        inner: &mut [f32],
        parallel: &dyn Parallel,
    ) {
        let (token, width) = (plan.token, self.inner);
        let panels = width.div_ceil(PANEL_ROWS);
        let all: usize = active.iter().map(|own| own.rows[0].m).sum();
        let shares = if all <= FEW_ROWS * active.len() { FEW_PIECES_PER_THREAD } else { PIECES_PER_THREAD };
        let share = (all * panels).div_ceil(parallel.threads().max(1).saturating_mul(shares));
        let mut pieces = 0;
        for own in active.iter_mut() {
            let rows = read.rows(token, &own.rows[0]);
            let bytes = self.get(own.expert as usize).gate.weight.layout().panel_bytes();
            own.cut(&rows, panels, share, 2 * bytes);
            own.first = pieces;
            pieces += own.blocks * own.chunks;
        }
        let (active, inner) = (&*active, Disjoint::new(inner));
        parallel.for_each(pieces, &|piece| {
            let own = last(active, |own| own.first <= piece).filter(|_| piece < pieces);
            let Some(own) = own else { return };
            let piece = piece - own.first;
            let (b, c) = (piece / own.chunks, piece % own.chunks);
            let rows = read.rows(token, &own.rows[0]);
            let units = b * own.block..((b + 1) * own.block).min(rows.strips());
            let panels = c * own.chunk..((c + 1) * own.chunk).min(panels);
            let expert = self.get(own.expert as usize);
            let [gate, up] = [expert.gate, expert.up].map(|of| (of, read.path(token, of.weight.layout())));
            let mut results = [const { MaybeUninit::<f32>::uninit() }; RESULTS];
            let mut others = [const { MaybeUninit::<f32>::uninit() }; RESULTS];
            each_part(&rows, units, panels, |units, panels, at| {
                let columns = panels.start * PANEL_ROWS..(panels.end * PANEL_ROWS).min(width);
                let part = Part { rows: &rows, units, panels };
                // SAFETY: `each_part` yields parts of the rows and panels that fit into the results; the rows were
                // prepared for the experts' layouts; `Experts::new` checked the shapes of weights and biases; the
                // `IsaToken` proves that the processor has the instructions.
                let (gates, ups) =
                    unsafe { (part.multiply(gate, &mut results), part.multiply(up, &mut others)) };
                for (r, (gates, ups)) in gates.zip(ups).enumerate() {
                    let row = (own.rows[0].row + at.start + r) * width;
                    // SAFETY: pieces and their parts are disjoint in rows or columns, and `Parallel` calls each piece
                    // at most once.
                    let to = unsafe { inner.part(row + columns.start..row + columns.end) };
                    plan.gate.apply(token, gates, ups, to);
                }
            });
        });
    }

    /// Multiplies `down` and adds the results to the output. Each piece computes some columns of all experts.
    fn down(
        &self,
        plan: &ExpertsPlan,
        active: &[Active],
        between: &Buffer,
        routed: &routing::SortedRows,
        out: &mut [f32],
        parallel: &dyn Parallel,
    ) {
        let (token, width) = (plan.token, self.hidden);
        let panels = width.div_ceil(PANEL_ROWS);
        let few = active.iter().map(|own| own.rows[1].m).sum::<usize>() <= FEW_ROWS * active.len();
        let (shares, max) =
            if few { (FEW_PIECES_PER_THREAD / 2, FEW_CHUNK) } else { (PIECES_PER_THREAD / 2, CHUNK[1]) };
        let chunk = panels.div_ceil(parallel.threads().max(1).saturating_mul(shares));
        let chunk = chunk.next_multiple_of(CHUNK[0]).min(max);
        let (all, pieces) = (out.len() / width, panels.div_ceil(chunk));
        let out = Disjoint::new(out);
        parallel.for_each(pieces, &|piece| {
            let panels = (piece * chunk).min(panels)..((piece + 1) * chunk).min(panels);
            let columns = panels.start * PANEL_ROWS..(panels.end * PANEL_ROWS).min(width);
            for row in (0..all).map(|of| of * width) {
                // SAFETY: pieces are disjoint in columns, `Parallel` calls each at most once, and this reference ends
                // here.
                unsafe { out.part(row + columns.start..row + columns.end) }.fill(0.0);
            }
            let mut results = [const { MaybeUninit::<f32>::uninit() }; RESULTS];
            for own in active {
                let rows = between.rows(token, &own.rows[1]);
                let of = self.get(own.expert as usize).down;
                let down = (of, between.path(token, of.weight.layout()));
                each_part(&rows, 0..rows.strips(), panels.clone(), |units, panels, at| {
                    let columns = panels.start * PANEL_ROWS..(panels.end * PANEL_ROWS).min(width);
                    let part = Part { rows: &rows, units, panels };
                    // SAFETY: `each_part` yields parts of the rows and panels that fit into the results; the rows were
                    // prepared for the experts' layouts; `Experts::new` checked the shapes of weights and biases; the
                    // `IsaToken` proves that the processor has the instructions.
                    let products = unsafe { part.multiply(down, &mut results) };
                    for (r, y) in products.enumerate() {
                        let row = own.rows[1].row + at.start + r;
                        let first = routed.tokens[row] as usize * width;
                        // SAFETY: pieces are disjoint in columns, `Parallel` calls each at most once, and this
                        // reference ends with the loop body.
                        let sum = unsafe { out.part(first + columns.start..first + columns.end) };
                        dispatch::add_weighted(token, sum, routed.weights[row], y);
                    }
                });
            }
        });
    }
}

impl Active {
    /// Divides the product of the expert's rows with `panels` panels of `bytes` bytes each into pieces of about `share`
    /// products of a row and a panel.
    fn cut(&mut self, rows: &ActivationRows<'_>, panels: usize, share: usize, bytes: usize) {
        let (m, units, [max, _]) = (rows.m(), rows.strips(), rows.max_units());
        // If several groups of rows read the weights, the weights of a piece should stay in the L2 cache.
        let widest = match units > max {
            true => (WEIGHTS / bytes.max(1) / CHUNK[0] * CHUNK[0]).clamp(CHUNK[0], CHUNK[1]),
            false if m <= FEW_ROWS => FEW_CHUNK,
            false => CHUNK[1],
        };
        self.chunk = (share / m.max(1)).next_multiple_of(CHUNK[0]).clamp(CHUNK[0], widest);
        self.chunks = panels.div_ceil(self.chunk);
        // Each block of rows reads all weights. So use only as many blocks as the work needs, and of similar size.
        let each = self.chunk * m.div_ceil(units);
        let block = (2 * share).div_ceil(each).max(max);
        self.block = units.div_ceil(units.div_ceil(block));
        self.blocks = units.div_ceil(self.block);
    }
}

/// Returns the last expert for which `holds` is true. The experts for which it is true must come first.
fn last(active: &[Active], holds: impl Fn(&Active) -> bool) -> Option<&Active> {
    active.partition_point(holds).checked_sub(1).map(|at| &active[at])
}

/// Quantizes or packs the rows of all experts, in `units` strips or tiles; `at` is 0 for rows that gate and up read,
/// and 1 for those that `down` reads.
fn make(
    active: &[Active],
    at: usize,
    units: usize,
    buffer: &mut Buffer,
    in_bf16: bool,
    source: &dyn Source,
    parallel: &dyn Parallel,
) {
    let memory = buffer.memory(in_bf16);
    let values: usize = active.iter().map(|own| own.rows[at].m * own.rows[at].layout.k()).sum();
    let parallel = if values <= FEW { &Serial } else { parallel };
    parallel.for_each(units, &|unit| {
        let own = last(active, |own| own.units[at] <= unit).filter(|_| unit < units);
        let Some(own) = own else { return };
        // SAFETY: `run` checked that there is room for all segments, which are contiguous and disjoint; `Parallel`
        // calls each unit at most once.
        unsafe { memory.unit(&own.rows[at], unit - own.units[at], source) };
    });
}

/// Divides the product of some strips or tiles with some panels into parts whose results fit into `RESULTS`. Calls
/// `each` with the units, panels and rows of each part.
fn each_part(
    rows: &ActivationRows<'_>,
    units: Range<usize>,
    panels: Range<usize>,
    mut each: impl FnMut(Range<usize>, Range<usize>, Range<usize>),
) {
    let [max, of_unit] = rows.max_units();
    let max = max.min(units.len()).max(1);
    let wide = (RESULTS / (max * of_unit * PANEL_ROWS).max(1)).max(1);
    let wide = if wide > CHUNK[0] { wide / CHUNK[0] * CHUNK[0] } else { wide };
    for unit in units.clone().step_by(max) {
        let own = unit..(unit + max).min(units.end);
        let at = rows.rows_of(own.clone());
        for panel in panels.clone().step_by(wide) {
            each(own.clone(), panel..(panel + wide).min(panels.end), at.clone());
        }
    }
}

/// Some strips or tiles of rows and some panels.
struct Part<'a> {
    rows: &'a ActivationRows<'a>,
    units: Range<usize>,
    panels: Range<usize>,
}

impl Part<'_> {
    /// Computes the product with the weights of an expert, and returns it row by row.
    ///
    /// # Safety
    /// The path must be one for this layout and kind of rows. The rows must be prepared for the layout of the weights;
    /// units must be within the rows, and panels within the layout. A bias must have one value per output feature. The
    /// processor must have the path's instructions.
    unsafe fn multiply<'r>(
        &self,
        (of, path): (ExpertWeight<'_>, Path),
        results: &'r mut [MaybeUninit<f32>; RESULTS],
    ) -> impl Iterator<Item = &'r [f32]> {
        let (rows, column) = (self.rows.rows_of(self.units.clone()), self.panels.start * PANEL_ROWS);
        let stride = self.panels.len() * PANEL_ROWS;
        let columns = stride.min(of.weight.layout().n() - column);
        assert!(rows.len() * stride <= RESULTS);
        let at = results.as_mut_ptr().cast::<f32>();
        let out = Out { at, row: rows.start, column, stride };
        // SAFETY: the results have room for these rows and columns, as asserted above, and are borrowed mutably; the
        // safety contract of this function covers the rest.
        unsafe { of.weight.part(path, self.rows, self.units.clone(), self.panels.clone(), of.bias, out) };
        // SAFETY: the product wrote these columns of every row, within the results, which stay borrowed for `'r`.
        (0..rows.len()).map(move |r| unsafe { core::slice::from_raw_parts(at.add(r * stride), columns) })
    }
}
