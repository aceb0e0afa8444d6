//! The plan of a call, with its memory requirement, and the memory itself.

use super::routing::SortedRows;
use super::run::Active;
use super::{ExpertGate, ExpertRows, Experts};
use crate::activation::segments::{Extent, Segment};
use crate::activation::source::Source;
use crate::activation::tiles::{TILE_ROWS, Tiling};
use crate::activation::{Element, Int8Memory, RowLayout, float::FloatMemory, resize, sealed::Kind};
use crate::layout::LINE;
use crate::linear::{self, Path};
use crate::{FloatRows, Int8Rows, IsaToken, KernelError, Layout};

/// The parameters of a call, and the maximum memory that it needs for any routing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertsPlan {
    pub(super) token: IsaToken,
    pub(super) rows: ExpertRows,
    pub(super) gate: ExpertGate,
    pub(super) tokens: usize,
    pub(super) top_k: usize,
    pub(super) kind: Kind,
    /// The number of experts, features per token, and the intermediate size.
    pub(super) shape: [usize; 3],
    /// The sizes of the buffers for the rows that gate and up read, and for those that `down` reads.
    extents: [Extent; 2],
}

impl ExpertsPlan {
    /// Creates a plan for up to `tokens` tokens of activations of type `E`, each routed to up to `top_k` experts.
    ///
    /// # Errors
    /// When some expert does not support the rows, the gate's limit is negative or NaN, or a size overflows.
    pub fn new<E: Element>(
        experts: &Experts<'_>,
        token: IsaToken,
        rows: ExpertRows,
        gate: ExpertGate,
        tokens: usize,
        top_k: usize,
    ) -> Result<Self, KernelError> {
        experts.require(rows)?;
        if let ExpertGate::Clamped { limit, .. } = gate
            && (limit.is_nan() || limit < 0.0)
        {
            return Err(KernelError::Scheme("the gate limit must not be negative or NaN"));
        }
        let too_large = KernelError::TooLarge("the number of expert rows");
        let all = tokens.checked_mul(top_k).filter(|&all| u32::try_from(all).is_ok());
        let all = all.ok_or(too_large.clone())?;
        let shape = [experts.count(), experts.hidden(), experts.inner()];
        all.checked_mul(shape[2]).ok_or(too_large.clone())?;
        let mut plan =
            Self { token, rows, gate, tokens, top_k, kind: E::KIND, shape, extents: [Extent::default(); 2] };
        let [mut read, mut between] = plan.buffers();
        let buffer_len = if E::KIND == Kind::F32 { 0 } else { shape[1] };
        for expert in 0..shape[0] {
            let expert = experts.get(expert);
            for (at, buffer, of, buffer_len) in
                [(0, &mut read, expert.gate, buffer_len), (1, &mut between, expert.down, 0)]
            {
                let layout = RowLayout::of(of.weight.layout());
                let bound = buffer.bound(all, shape[0], layout, buffer_len).ok_or(too_large.clone())?;
                plan.extents[at] = plan.extents[at].max(bound);
            }
        }
        plan.bytes().ok_or(too_large)?;
        Ok(plan)
    }

    /// Whether the plan is for exactly `tokens` tokens and `top_k` slots, with activations of type `E`.
    #[cfg(feature = "candle")]
    pub(crate) fn is_of<E: Element>(&self, tokens: usize, top_k: usize) -> bool {
        self.kind == E::KIND && self.tokens == tokens && self.top_k == top_k
    }

    /// The maximum number of tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The maximum number of experts per token.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// At least this many bytes are held by an [`ExpertsWorkspace`] after [`reserve`](ExpertsWorkspace::reserve).
    pub fn workspace_bytes(&self) -> usize {
        self.bytes().unwrap_or(usize::MAX)
    }

    fn bytes(&self) -> Option<usize> {
        let rows = self.max_rows();
        let [count, _, inner] = self.shape;
        let words = rows.checked_mul(2)?.checked_add(count + 1)?.checked_add(rows.checked_mul(inner)?)?;
        let mut bytes = words.checked_mul(4)?;
        bytes = bytes.checked_add(self.max_active().checked_mul(size_of::<Active>())?)?;
        for extent in self.extents {
            bytes = bytes.checked_add(self.buffer_bytes(&extent)?)?;
        }
        Some(bytes)
    }

    fn buffer_bytes(&self, extent: &Extent) -> Option<usize> {
        let Extent { rows, codes, sums, tiles, tile_sums, computed } = *extent;
        let (code, extra) = match self.rows {
            // Int8 rows store `sums` and `eights` of equal length, and a scale per row.
            ExpertRows::Int8 => (1, sums.checked_mul(2)?.checked_add(rows)?.checked_add(tile_sums)?),
            ExpertRows::Float(_) => (4, sums.max(tile_sums)),
        };
        let words = extra.checked_add(computed)?.checked_mul(4)?;
        codes.checked_mul(code)?.checked_add(tiles.checked_mul(LINE)?)?.checked_add(words)
    }

    fn max_rows(&self) -> usize {
        self.tokens * self.top_k
    }

    /// The maximum number of experts that have rows.
    fn max_active(&self) -> usize {
        self.shape[0].min(self.max_rows())
    }

    fn buffers(&self) -> [Buffer; 2] {
        [(); 2].map(|()| match self.rows {
            ExpertRows::Int8 => Buffer::Int8(Int8Rows::new(self.token)),
            ExpertRows::Float(parts) => Buffer::Float(FloatRows::in_parts(self.token, parts)),
        })
    }
}

/// The memory of a call, reused by later calls.
#[derive(Debug, Default)]
pub struct ExpertsWorkspace {
    /// The plan for which the workspace was last reserved.
    plan: Option<ExpertsPlan>,
    pub(super) rows: SortedRows,
    pub(super) active: Vec<Active>,
    /// The results of gate and up, `[rows, inner]`.
    pub(super) inner: Vec<f32>,
    /// Rows that gate and up read, and rows that `down` reads.
    pub(super) buffers: Option<[Buffer; 2]>,
}

impl ExpertsWorkspace {
    /// Allocates the memory for calls of this plan. Memory of earlier plans is reused.
    ///
    /// # Errors
    /// When memory allocation fails; the workspace is then unusable until a later call of this function succeeds.
    pub fn reserve(&mut self, plan: &ExpertsPlan) -> Result<(), KernelError> {
        if self.plan.as_ref() == Some(plan) {
            return Ok(());
        }
        self.plan = None;
        let rows = plan.max_rows();
        reserve(&mut self.rows.tokens, rows)?;
        reserve(&mut self.rows.weights, rows)?;
        reserve(&mut self.rows.starts, plan.shape[0] + 1)?;
        reserve(&mut self.active, plan.max_active())?;
        let inner = (rows * plan.shape[2]).max(self.inner.len());
        resize(&mut self.inner, Some(inner))?;
        let mut buffers = self.buffers.take();
        buffers = buffers.filter(|[buffer, _]| buffer.is_for(plan.token, plan.rows));
        let buffers = self.buffers.insert(buffers.unwrap_or_else(|| plan.buffers()));
        for (buffer, extent) in buffers.iter_mut().zip(&plan.extents) {
            buffer.reserve(extent)?;
        }
        self.plan = Some(*plan);
        Ok(())
    }

    /// Frees the workspace's memory.
    pub fn release(&mut self) {
        *self = Self::default();
    }

    /// Fails unless the workspace was reserved for this plan, or for one with the same instruction set and kind of rows
    /// that needs at least as much memory.
    pub(super) fn require(&self, plan: &ExpertsPlan) -> Result<(), KernelError> {
        let enough = self.plan.as_ref().is_some_and(|own| {
            let same = own.token == plan.token && own.rows == plan.rows;
            let holds = own.extents.iter().zip(&plan.extents).all(|(own, extent)| own.holds(extent));
            let rows = own.max_rows() >= plan.max_rows() && own.max_active() >= plan.max_active();
            let inner = own.max_rows() * own.shape[2] >= plan.max_rows() * plan.shape[2];
            same && holds && rows && inner && own.shape[0] >= plan.shape[0]
        });
        if enough {
            return Ok(());
        }
        let got = self.plan.as_ref().map_or(0, ExpertsPlan::workspace_bytes);
        Err(KernelError::Length { what: "workspace", expected: plan.workspace_bytes(), got })
    }
}

/// Clears the vector and reserves room for `count` values.
fn reserve<T>(values: &mut Vec<T>, count: usize) -> Result<(), KernelError> {
    values.clear();
    values.try_reserve_exact(count).map_err(|_| KernelError::Memory("the expert rows"))
}

#[derive(Debug)]
pub(super) enum Buffer {
    Int8(Int8Rows),
    Float(FloatRows),
}

impl Buffer {
    fn is_for(&self, token: IsaToken, rows: ExpertRows) -> bool {
        match (self, rows) {
            (Self::Int8(own), ExpertRows::Int8) => own.token() == token,
            (Self::Float(own), ExpertRows::Float(parts)) => own.token == token && own.parts() == parts,
            _ => false,
        }
    }

    /// Whether rows are stored in strips; otherwise in tiles only.
    pub(super) fn in_strips(&self, layout: RowLayout) -> bool {
        match self {
            Self::Int8(_) => true,
            Self::Float(rows) => !rows.token.has_tiles() || !layout.is_tiled(),
        }
    }

    fn tiling_of(&self, m: usize, layout: RowLayout, in_bf16: bool) -> Option<Tiling> {
        match self {
            Self::Int8(rows) => rows.tiling_of(m, layout),
            Self::Float(rows) => rows.tiling_of(m, layout, in_bf16),
        }
    }

    /// An upper bound of the memory for `rows` rows of this layout, divided among `count` experts.
    fn bound(&self, rows: usize, count: usize, layout: RowLayout, buffer_len: usize) -> Option<Extent> {
        let tiling = self.tiling_of(TILE_ROWS, layout, false);
        Extent::bound(rows, count, layout, tiling, self.in_strips(layout), buffer_len)
    }

    fn reserve(&mut self, extent: &Extent) -> Result<(), KernelError> {
        let extent = &extent.max(self.room());
        match self {
            Self::Int8(rows) => rows.reserve(extent),
            Self::Float(rows) => rows.reserve(extent),
        }
    }

    pub(super) fn room(&self) -> Extent {
        match self {
            Self::Int8(rows) => rows.room(),
            Self::Float(rows) => rows.room(),
        }
    }

    /// Adds the rows of an expert; `buffer_len` is the width of computed rows.
    pub(super) fn add(
        &self,
        extent: &mut Extent,
        m: usize,
        layout: RowLayout,
        in_bf16: bool,
        buffer_len: usize,
    ) -> Option<Segment> {
        extent.add(m, layout, self.tiling_of(m, layout, in_bf16), self.in_strips(layout), buffer_len)
    }

    /// The buffers, for threads to write rows to; `in_bf16` states whether the input type is bf16.
    pub(super) fn memory(&mut self, in_bf16: bool) -> Memory<'_> {
        match self {
            Self::Int8(rows) => Memory::Int8(rows.memory()),
            Self::Float(rows) => {
                rows.exact_in_bf16 = in_bf16;
                Memory::Float(rows.memory())
            }
        }
    }

    /// The rows of a segment in the form that kernels read.
    pub(super) fn rows(&self, token: IsaToken, all: &Segment) -> linear::ActivationRows<'_> {
        match self {
            Self::Int8(rows) => linear::ActivationRows::int8(rows, token, Some(all)),
            Self::Float(rows) => linear::ActivationRows::float(rows, Some(all)),
        }
    }

    /// The kernel path for a product of these rows with weights of this layout.
    pub(super) fn path(&self, token: IsaToken, layout: &Layout) -> Path {
        match self {
            Self::Int8(_) => Path::whole(token, layout, 0),
            Self::Float(_) => Path::float(token, layout),
        }
    }
}

pub(super) enum Memory<'a> {
    Int8(Int8Memory<'a>),
    Float(FloatMemory<'a>),
}

impl Memory<'_> {
    /// Quantizes or packs strip or tile `i` of a segment.
    ///
    /// # Safety
    /// There must be [room](Buffer::room) for the segment, segments must not overlap, and each unit may be processed
    /// only once.
    pub(super) unsafe fn unit(&self, all: &Segment, i: usize, source: &dyn Source) {
        // SAFETY: both functions have the safety contract of this function.
        unsafe {
            match self {
                Self::Int8(memory) => memory.strip(all, i, source, None),
                Self::Float(memory) => memory.unit(all, i, source),
            }
        }
    }
}
