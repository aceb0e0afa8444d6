//! A call: rows are made, gate and up multiplied, their product made rows again, and `down` multiplied and added up.

use core::mem::MaybeUninit;
use core::ops::Range;

use super::plan::Buffer;
use super::{ExpertWeight, Experts, ExpertsPlan, ExpertsWorkspace, Routing, routing};
use crate::activation::segments::{Extent, Segment};
use crate::activation::source::{Gathered, Plain, Source};
use crate::activation::{Element, RowLayout, dispatch, sealed::Kind};
use crate::layout::PANEL_ROWS;
use crate::linear::{Out, Path, Rows};
use crate::parallel::Disjoint;
use crate::{KernelError, Parallel, Serial};

/// Results of a part of a product, which stay in the first cache until they are used.
const RESULTS: usize = 8192;
/// Pieces of work that each thread gets: the last one's end is waited for.
const SHARES: usize = 16;
/// The same of few rows: they wait for memory, which is read best from beginning to end, and a piece begins somewhere else
/// than the one before it has ended.
const FEW_SHARES: usize = 4;
/// Panels of a piece, at least and at most: few rows take four at once, and of more than so many each costs no less.
const CHUNK: [usize; 2] = [4, 16];
/// Panels of a piece of few rows, at most.
const FEW_CHUNK: usize = 64;
/// Bytes of weights that stay in the L2 cache while rows pass.
const WEIGHTS: usize = 512 << 10;
/// Rows of an expert that are few, on the average.
const FEW_ROWS: usize = 4;
/// Values that one thread makes rows of by itself sooner than others have heard of them.
const FEW: usize = 1 << 15;

/// An expert that has rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Active {
    expert: u32,
    /// Its rows as it reads them, and as `down` does.
    rows: [Segment; 2],
    /// The numbers of its first strips or tiles among those of all.
    units: [usize; 2],
    /// The number of its first piece of gate and up.
    first: usize,
    /// Strips or tiles of a piece, and blocks of these.
    block: usize,
    blocks: usize,
    /// Panels of a piece, and chunks of these.
    chunk: usize,
    chunks: usize,
}

impl Experts<'_> {
    /// `out[t] = Σ_e w[t, e] · down_e(act(gate_e(x[t]), up_e(x[t])))`, in order of experts. `x` is `[tokens, hidden]`,
    /// `out` the same and overwritten; a token without experts gets zeros. Nothing is allocated.
    ///
    /// # Errors
    /// When the plan is that of other experts or activations, there are more tokens or slots than it says, a length is
    /// wrong, an expert does not exist, or the workspace was not reserved for it; `out` is then as it was.
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
            return Err(KernelError::Scheme("a workspace that was not reserved"));
        };
        rows.sort(routing, self.count())?;
        let in_bf16 = E::KIND == Kind::Bf16;
        let lent = if E::KIND == Kind::F32 { 0 } else { self.hidden };
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
                read.add(&mut extents[0], m, gate, in_bf16, lent),
                between.add(&mut extents[1], m, down, false, 0),
            ];
            let [Some(first), Some(second)] = segments else {
                return Err(KernelError::TooLarge("the rows of experts"));
            };
            let (expert, rows) = (expert as u32, [first, second]);
            active.push(Active { expert, rows, units, first: 0, block: 0, blocks: 0, chunk: 0, chunks: 0 });
            units[0] += first.units(read.in_strips());
            units[1] += second.units(between.in_strips());
        }
        // A plan of other experts of the same shape may have said less.
        let room = [read.room(), between.room()];
        if room.iter().zip(&extents).any(|(room, extent)| !room.holds(extent)) {
            let got = plan.workspace_bytes();
            return Err(KernelError::Length { what: "the workspace", expected: usize::MAX, got });
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

    /// Whether everything is as long as the plan and the shapes say.
    fn check<E: Element>(
        &self,
        plan: &ExpertsPlan,
        x: &[E],
        routing: &Routing<'_>,
        out: usize,
    ) -> Result<(), KernelError> {
        for (what, expected, got) in [
            ("experts of the plan", plan.shape[0], self.count()),
            ("features of the plan", plan.shape[1], self.hidden),
            ("features between linears of the plan", plan.shape[2], self.inner),
        ] {
            if expected != got {
                return Err(KernelError::Mismatch { what, expected, got });
            }
        }
        if plan.kind != E::KIND {
            return Err(KernelError::Scheme("activations of another type than the plan's"));
        }
        self.require(plan.rows)?;
        let tokens = x.len() / self.hidden;
        KernelError::length("activations", tokens * self.hidden, x.len())?;
        for (what, most, got) in
            [("tokens", plan.tokens, tokens), ("experts of a token", plan.top_k, routing.top_k)]
        {
            if got > most {
                return Err(KernelError::Mismatch { what, expected: most, got });
            }
        }
        let slots = tokens * routing.top_k;
        KernelError::length("numbers of experts", slots, routing.experts.len())?;
        KernelError::length("weights of experts", slots, routing.weights.len())?;
        KernelError::length("output", x.len(), out)
    }

    /// What experts make of gate and up, `[rows, inner]`.
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
        let shares = if all <= FEW_ROWS * active.len() { FEW_SHARES } else { SHARES };
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
                // SAFETY: `each_part` gives parts of the rows and panels, no larger than the results; the rows were made
                // for the experts' layouts, of whose weights and biases `Experts::new` checked the shapes; the token
                // proves the instructions.
                let (gates, ups) =
                    unsafe { (part.multiply(gate, &mut results), part.multiply(up, &mut others)) };
                for (r, (gates, ups)) in gates.zip(ups).enumerate() {
                    let row = (own.rows[0].row + at.start + r) * width;
                    // SAFETY: pieces and their parts are disjoint in rows or columns, and each is asked for once.
                    let to = unsafe { inner.part(row + columns.start..row + columns.end) };
                    plan.gate.apply(token, gates, ups, to);
                }
            });
        });
    }

    /// Multiplies `down`, and adds up: each piece has some columns of all experts.
    fn down(
        &self,
        plan: &ExpertsPlan,
        active: &[Active],
        between: &Buffer,
        routed: &routing::Rows,
        out: &mut [f32],
        parallel: &dyn Parallel,
    ) {
        let (token, width) = (plan.token, self.hidden);
        let panels = width.div_ceil(PANEL_ROWS);
        let few = active.iter().map(|own| own.rows[1].m).sum::<usize>() <= FEW_ROWS * active.len();
        let (shares, most) = if few { (FEW_SHARES / 2, FEW_CHUNK) } else { (SHARES / 2, CHUNK[1]) };
        let chunk = panels.div_ceil(parallel.threads().max(1).saturating_mul(shares));
        let chunk = chunk.next_multiple_of(CHUNK[0]).min(most);
        let (all, pieces) = (out.len() / width, panels.div_ceil(chunk));
        let out = Disjoint::new(out);
        parallel.for_each(pieces, &|piece| {
            let panels = (piece * chunk).min(panels)..((piece + 1) * chunk).min(panels);
            let columns = panels.start * PANEL_ROWS..(panels.end * PANEL_ROWS).min(width);
            for row in (0..all).map(|of| of * width) {
                // SAFETY: pieces are disjoint in columns, each is asked for once, and this reference ends here.
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
                    // SAFETY: as in `gate_up`.
                    let products = unsafe { part.multiply(down, &mut results) };
                    for (r, y) in products.enumerate() {
                        let row = own.rows[1].row + at.start + r;
                        let first = routed.tokens[row] as usize * width;
                        // SAFETY: pieces are disjoint in columns, each is asked for once, and this reference ends with the loop's body.
                        let sum = unsafe { out.part(first + columns.start..first + columns.end) };
                        dispatch::add_weighted(token, sum, routed.weights[row], y);
                    }
                });
            }
        });
    }
}

impl Active {
    /// Cuts the product of its rows with so many panels, each of so many bytes, into pieces of about `share` products of
    /// a row and a panel.
    fn cut(&mut self, rows: &Rows<'_>, panels: usize, share: usize, bytes: usize) {
        let (m, units, [most, _]) = (rows.m(), rows.strips(), rows.most_units());
        // Rows that pass in several turns find their weights in the L2 cache.
        let widest = match units > most {
            true => (WEIGHTS / bytes.max(1) / CHUNK[0] * CHUNK[0]).clamp(CHUNK[0], CHUNK[1]),
            false if m <= FEW_ROWS => FEW_CHUNK,
            false => CHUNK[1],
        };
        self.chunk = (share / m.max(1)).next_multiple_of(CHUNK[0]).clamp(CHUNK[0], widest);
        self.chunks = panels.div_ceil(self.chunk);
        // Each block reads all weights: of like size, and only as many as it takes to share the work.
        let each = self.chunk * m.div_ceil(units);
        let block = (2 * share).div_ceil(each).max(most);
        self.block = units.div_ceil(units.div_ceil(block));
        self.blocks = units.div_ceil(self.block);
    }
}

/// The last expert of which something holds that holds of the first ones only.
fn last(active: &[Active], holds: impl Fn(&Active) -> bool) -> Option<&Active> {
    active.partition_point(holds).checked_sub(1).map(|at| &active[at])
}

/// Makes the rows of all experts, which are `units` strips or tiles; `at` is 0 of those that experts read, and 1 of those
/// that `down` does.
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
        // SAFETY: `run` has seen to it that there is room for all segments, which follow on each other; each unit is asked
        // for once, as `Parallel` demands.
        unsafe { memory.unit(&own.rows[at], unit - own.units[at], source) };
    });
}

/// Cuts strips or tiles times panels into parts whose results have room; `each` gets their units, panels and rows.
fn each_part(
    rows: &Rows<'_>,
    units: Range<usize>,
    panels: Range<usize>,
    mut each: impl FnMut(Range<usize>, Range<usize>, Range<usize>),
) {
    let [most, of_unit] = rows.most_units();
    let most = most.min(units.len()).max(1);
    let wide = (RESULTS / (most * of_unit * PANEL_ROWS).max(1)).max(1);
    let wide = if wide > CHUNK[0] { wide / CHUNK[0] * CHUNK[0] } else { wide };
    for unit in units.clone().step_by(most) {
        let own = unit..(unit + most).min(units.end);
        let at = rows.rows_of(own.clone());
        for panel in panels.clone().step_by(wide) {
            each(own.clone(), panel..(panel + wide).min(panels.end), at.clone());
        }
    }
}

/// Some strips or tiles of rows, and some panels.
struct Part<'a> {
    rows: &'a Rows<'a>,
    units: Range<usize>,
    panels: Range<usize>,
}

impl Part<'_> {
    /// Their product with the weights of an expert, row by row, of as many columns as there are.
    ///
    /// # Safety
    /// The rows must be made for the layout of the weights, units and panels within both, a bias as long as the weights
    /// have rows, and the processor have the path's instructions.
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
        // SAFETY: the results have room for these rows and columns, and are borrowed; the safety contract of this function
        // covers the rest.
        unsafe { of.weight.part(path, self.rows, self.units.clone(), self.panels.clone(), of.bias, out) };
        // SAFETY: the product wrote these columns of every row, within the results, which stay borrowed.
        (0..rows.len()).map(move |r| unsafe { core::slice::from_raw_parts(at.add(r * stride), columns) })
    }
}
