//! Attention on lists of pages.

use super::dispatch::Path;
use super::kernel::{CHUNK, CHUNK_PAGES, Mass, TILE_ROWS, Tile};
use super::layout::{KvLayout, MAX_HEAD_DIM, PAGE_TOKENS};
use super::list::{Heads, PageList};
use super::query::{MAX_QUERY, largest, quantize};
use crate::parallel::Disjoint;
use crate::{IsaToken, KernelError, Parallel};

/// Maximum number of query rows per block of one key-value head. A chunk stays in the L2 cache while the rows of a
/// block read it.
const BLOCK_ROWS: usize = 64;
/// The maximum number of query heads.
pub const MAX_HEADS: usize = 1 << 16;

/// The pages of a cache, in borrowed memory.
#[derive(Debug, Clone, Copy)]
pub struct KvPages<'a> {
    layout: KvLayout,
    bytes: &'a [u8],
}

pub(super) type Lists<'a, 'l> = dyn Fn(usize) -> PageList<'l> + Sync + 'a;

/// Offsets of the parts of the workspace, in words.
struct Room {
    rows: usize,
    sums: usize,
    totals: usize,
    masses: usize,
    parts: usize,
    words: usize,
}

impl<'a> KvPages<'a> {
    /// Creates a view of contiguous pages, numbered from 0. Kernels read fastest if the bytes are aligned to
    /// [`LINE`](crate::LINE).
    ///
    /// # Errors
    /// When `id` is not that of the layout, or `bytes` are not whole pages.
    pub fn new(layout: KvLayout, id: u64, bytes: &'a [u8]) -> Result<Self, KernelError> {
        if id != layout.id() {
            return Err(KernelError::LayoutId { expected: layout.id(), got: id });
        }
        KernelError::parts("pages", layout.page_bytes(), bytes.len())?;
        Ok(Self { layout, bytes })
    }

    pub(super) fn of(layout: KvLayout, bytes: &'a [u8]) -> Self {
        Self { layout, bytes }
    }

    /// The layout.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// The number of words that [`attend`](Self::attend) needs for `queries` queries on lists of at most `tokens`
    /// tokens.
    ///
    /// # Errors
    /// When the number overflows, or `heads` is invalid.
    pub fn workspace(
        layout: &KvLayout,
        heads: Heads,
        queries: usize,
        tokens: usize,
    ) -> Result<usize, KernelError> {
        Ok(room(layout, heads, queries, tokens.div_ceil(CHUNK))?.words)
    }

    /// Computes the attention of queries `q` `[m, heads.query, head_dim]`, with one page list per key-value head. `out`
    /// has the shape of `q`; `lse` `[m, heads.query]` receives the logarithm of the sum of `exp(score)`, with which
    /// results on parts of a sequence can be [merged](super::merge). A query that sees no token gets zeros and minus
    /// infinity. A query head that is not finite, or whose magnitude is beyond the bounds of [`MAX_QUERY`], gets NaN.
    ///
    /// # Errors
    /// When a length, `heads` or a list is invalid, or the workspace is too short.
    #[allow(clippy::too_many_arguments, reason = "nothing here is kept between calls")]
    pub fn attend(
        &self,
        token: IsaToken,
        heads: Heads,
        lists: &[PageList<'_>],
        q: &[f32],
        out: &mut [f32],
        lse: &mut [f32],
        workspace: &mut [u32],
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        KernelError::length("page lists", heads.kv, lists.len())?;
        self.attend_to(token, heads, &|head| lists[head], q, out, lse, workspace, parallel)
    }

    /// Computes attention as [`attend`](Self::attend) does; `lists` returns the list of each key-value head.
    #[allow(clippy::too_many_arguments, reason = "nothing here is kept between calls")]
    pub(super) fn attend_to(
        &self,
        token: IsaToken,
        heads: Heads,
        lists: &Lists<'_, '_>,
        q: &[f32],
        out: &mut [f32],
        lse: &mut [f32],
        workspace: &mut [u32],
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        let layout = &self.layout;
        check_heads(heads)?;
        let d = layout.head_dim();
        let width = heads.query.checked_mul(d).ok_or(KernelError::TooLarge("the number of heads"))?;
        let m = KernelError::parts("queries", width, q.len())?;
        KernelError::length("output", q.len(), out.len())?;
        KernelError::length("log-sum-exp", m * heads.query, lse.len())?;
        let there = self.bytes.len() / layout.page_bytes();
        for list in (0..heads.kv).map(lists) {
            let needed = list.tokens.div_ceil(PAGE_TOKENS);
            if list.first > list.tokens {
                let (expected, got) = (list.tokens, list.first);
                let what = "the number of hidden tokens in a list must be at most its number of tokens,";
                return Err(KernelError::Mismatch { what, expected, got });
            }
            if list.pages.len() < needed {
                let (expected, got) = (needed, list.pages.len());
                return Err(KernelError::Mismatch {
                    what: "the number of pages in a list must be at least",
                    expected,
                    got,
                });
            }
            if let Some(&page) = list.pages[..needed].iter().find(|&&page| page as usize >= there) {
                let (expected, got) = (there, page as usize);
                let what = "page numbers must be less than the number of pages,";
                return Err(KernelError::Mismatch { what, expected, got });
            }
        }
        let chunks = (0..heads.kv).map(|head| lists(head).chunks()).max().unwrap_or(0);
        let room = room(layout, heads, m, chunks)?;
        if workspace.len() < room.words {
            let (expected, got) = (room.words, workspace.len());
            return Err(KernelError::Length { what: "workspace", expected, got });
        }
        if m == 0 {
            return Ok(());
        }
        let workspace = &mut workspace[..room.words];
        let call = Call {
            path: Path::of(token, layout.bits()),
            pages: *self,
            heads,
            lists,
            m,
            q,
            room: &room,
            out: Disjoint::new(out),
            lse: Disjoint::new(lse),
            workspace: Disjoint::new(workspace),
        };
        call.run(chunks, parallel);
        Ok(())
    }
}

fn check_heads(heads: Heads) -> Result<(), KernelError> {
    if heads.kv == 0 {
        let what = "the number of key-value heads must be at least";
        return Err(KernelError::Mismatch { what, expected: 1, got: 0 });
    }
    if heads.query == 0 || !heads.query.is_multiple_of(heads.kv) {
        let (expected, got) = (heads.kv, heads.query);
        return Err(KernelError::Mismatch {
            what: "the number of query heads must be a positive multiple of",
            expected,
            got,
        });
    }
    if heads.query > MAX_HEADS {
        return Err(KernelError::TooLarge("the number of heads"));
    }
    if !heads.scale.is_finite() {
        return Err(KernelError::Scheme("the scale of attention scores must be finite"));
    }
    Ok(())
}

/// Whether each chunk is a separate piece of work, with its results kept in the workspace.
fn is_split(heads: Heads, m: usize, chunks: usize) -> bool {
    chunks > 1 && m * (heads.query / heads.kv) <= BLOCK_ROWS
}

fn room(layout: &KvLayout, heads: Heads, m: usize, chunks: usize) -> Result<Room, KernelError> {
    check_heads(heads)?;
    let count = || {
        let rows = m.checked_mul(heads.query)?;
        let words = layout.head_dim();
        let codes = if layout.bits() == 16 { 0 } else { rows.checked_mul(words / 4)? };
        let sums = codes.checked_add(rows)?;
        let totals = sums.checked_add(rows)?;
        let masses = totals.checked_add(rows)?;
        let parts = if is_split(heads, m, chunks) { rows.checked_mul(chunks)? } else { 0 };
        let parts_at = masses.checked_add(parts.checked_mul(2)?)?;
        let words = parts_at.checked_add(parts.checked_mul(words)?)?;
        isize::try_from(words.checked_mul(4)?).ok()?;
        Some(Room { rows, sums, totals, masses, parts: parts_at, words })
    };
    count().ok_or(KernelError::TooLarge("the workspace"))
}

struct Call<'a, 'l> {
    path: Path,
    pages: KvPages<'a>,
    heads: Heads,
    lists: &'a Lists<'a, 'l>,
    m: usize,
    q: &'a [f32],
    room: &'a Room,
    out: Disjoint<'a, f32>,
    lse: Disjoint<'a, f32>,
    /// The codes of queries `[rows][head_dim]` (unless pages are f16), then the factors, the sums of codes and the
    /// totals, with one word per row in each. If chunks are pieces of work, the masses of all chunks and rows follow,
    /// and then their partial results.
    workspace: Disjoint<'a, u32>,
}

impl<'l> Call<'_, 'l> {
    fn run(&self, chunks: usize, parallel: &dyn Parallel) {
        parallel.for_each(self.m, &|i| {
            if i < self.m {
                // SAFETY: queries have disjoint rows, and `Parallel` calls each at most once.
                unsafe { self.quantize(i) };
            }
        });
        let rows = self.head_rows();
        if !is_split(self.heads, self.m, chunks) {
            let blocks = rows.div_ceil(BLOCK_ROWS);
            let pieces = self.heads.kv * blocks;
            parallel.for_each(pieces, &|piece| {
                if piece < pieces {
                    // The last blocks see the most tokens and take longest, so they start first.
                    let (block, head) = (blocks - 1 - piece / self.heads.kv, piece % self.heads.kv);
                    // SAFETY: pieces have disjoint rows, and `Parallel` calls each at most once.
                    unsafe { self.block(head, block * BLOCK_ROWS..((block + 1) * BLOCK_ROWS).min(rows)) };
                }
            });
            return;
        }
        let pieces = chunks * self.heads.kv;
        parallel.for_each(pieces, &|piece| {
            if piece < pieces {
                // SAFETY: pieces differ in head or chunk, and `Parallel` calls each at most once; the workspace has
                // room for all chunks, since `room` was computed with the same split.
                unsafe { self.chunk(piece % self.heads.kv, piece / self.heads.kv) };
            }
        });
        parallel.for_each(self.heads.kv, &|head| {
            if head < self.heads.kv {
                // SAFETY: pieces have disjoint rows, and `Parallel` has finished all chunks.
                unsafe { self.join(head) };
            }
        });
    }

    /// Query rows per key-value head.
    fn head_rows(&self) -> usize {
        self.m * self.group()
    }

    fn group(&self) -> usize {
        self.heads.query / self.heads.kv
    }

    /// The index of row `r` of a head among all rows.
    fn row(&self, head: usize, r: usize) -> usize {
        r / self.group() * self.heads.query + head * self.group() + r % self.group()
    }

    /// A pointer to the workspace at word `at`.
    ///
    /// # Safety
    /// `at` must be within the workspace.
    unsafe fn word(&self, at: usize) -> *mut u32 {
        // SAFETY: the caller guarantees that `at` is within the workspace.
        unsafe { self.workspace.pointer().add(at) }
    }

    /// # Safety
    /// `row` must be below the number of rows.
    unsafe fn factor(&self, row: usize) -> *mut f32 {
        // SAFETY: the factors, one per row, are stored immediately before the sums.
        unsafe { self.word(self.room.sums - self.room.rows + row).cast() }
    }

    /// Computes the codes, factors and sums of one query's heads. The factor of a row whose scores might overflow is
    /// NaN.
    ///
    /// # Safety
    /// `i` must be less than the number of queries, and no other thread may access its rows.
    unsafe fn quantize(&self, i: usize) {
        let d = self.pages.layout.head_dim();
        let quantized = self.pages.layout.bits() != 16;
        for row in i * self.heads.query..(i + 1) * self.heads.query {
            let q = &self.q[row * d..][..d];
            // SAFETY: `row` is below the number of rows, for which `room` reserved codes, factors and sums; the caller
            // guarantees that no other thread accesses them.
            unsafe {
                let (factor, sum) = if quantized {
                    let codes = core::slice::from_raw_parts_mut(self.word(row * d / 4).cast::<i8>(), d);
                    let (scale, sum) = quantize(q, codes);
                    (scale * self.heads.scale, sum as f32)
                } else {
                    let largest = largest(q);
                    let fits = largest * self.heads.scale.abs().max(1.0) <= MAX_QUERY;
                    (if fits { self.heads.scale } else { f32::NAN }, 0.0)
                };
                self.factor(row).write(if factor.abs() <= MAX_QUERY { factor } else { f32::NAN });
                self.word(self.room.sums + row).cast::<f32>().write(sum);
            }
        }
    }

    /// Computes the attention of some rows of a head to one chunk of its list.
    ///
    /// # Safety
    /// `rows` must be 1 to [`TILE_ROWS`] rows of the head, whose queries are quantized, and `out` must be valid for as
    /// many rows, which no other thread may access.
    unsafe fn tile(
        &self,
        head: usize,
        rows: core::ops::Range<usize>,
        chunk: usize,
        next: &[u32],
        is_first: bool,
        out: *mut f32,
    ) -> [Mass; TILE_ROWS] {
        let (list, layout) = ((self.lists)(head), self.pages.layout);
        let begin = chunk * CHUNK;
        let pages = list.tokens.div_ceil(PAGE_TOKENS).min((chunk + 1) * CHUNK_PAGES);
        let bytes = self.pages.bytes.as_ptr();
        let mut tile = Tile {
            layout,
            bytes,
            pages: &list.pages[chunk * CHUNK_PAGES..pages],
            next,
            is_first,
            first: list.first.saturating_sub(begin).min(CHUNK),
            seen: [0; TILE_ROWS],
            q: [core::ptr::null(); TILE_ROWS],
            factor: [0.0; TILE_ROWS],
            sum: [0.0; TILE_ROWS],
            out,
        };
        let d = layout.head_dim();
        for (t, r) in rows.clone().enumerate() {
            let row = self.row(head, r);
            tile.seen[t] = list.seen_by(r / self.group()).saturating_sub(begin).min(CHUNK);
            // SAFETY: `row` is below the number of rows; codes, factors and sums were written before this piece of work
            // began.
            unsafe {
                tile.q[t] = match layout.bits() {
                    16 => self.q.as_ptr().add(row * d).cast(),
                    _ => self.word(row * d / 4).cast::<u8>().cast_const(),
                };
                let factor = *self.factor(row);
                // Compute with 0; `finish` sets the result of such a row to NaN.
                tile.factor[t] = if factor.is_nan() { 0.0 } else { factor };
                tile.sum[t] = *self.word(self.room.sums + row).cast::<f32>();
            }
        }
        // SAFETY: the `IsaToken` of `path` proves that the processor has the instructions; `attend_to` checked page
        // numbers and lengths; the caller guarantees that `out` is valid for these rows.
        unsafe { (self.path.attend[rows.len() - 1])(&tile) }
    }

    /// Computes the attention of some rows to all tokens that they see, chunk after chunk.
    ///
    /// # Safety
    /// The head must have these rows, and no other thread may access them.
    unsafe fn block(&self, head: usize, rows: core::ops::Range<usize>) {
        let d = self.pages.layout.head_dim();
        let list = (self.lists)(head);
        let mut part = [0.0_f32; TILE_ROWS * MAX_HEAD_DIM];
        // SAFETY: the caller guarantees that the rows exist and that no other thread accesses them; `part` has room for
        // a tile.
        unsafe {
            for r in rows.clone() {
                let row = self.row(head, r);
                self.store(row, Mass::NONE);
            }
            let last = list.seen_by((rows.end - 1) / self.group());
            for chunk in list.first / CHUNK..last.div_ceil(CHUNK) {
                for first in rows.clone().step_by(TILE_ROWS) {
                    let tile = first..(first + TILE_ROWS).min(rows.end);
                    if list.seen_by((tile.end - 1) / self.group()) <= chunk * CHUNK {
                        continue;
                    }
                    let next = list.pages.get((chunk + 1) * CHUNK_PAGES..).unwrap_or_default();
                    let is_first = first == rows.start;
                    let masses = self.tile(head, tile.clone(), chunk, next, is_first, part.as_mut_ptr());
                    for (t, r) in tile.enumerate() {
                        let row = self.row(head, r);
                        let out = self.out.pointer().add(row * d);
                        let mass = self.load(row);
                        let part = part.as_ptr().add(t * d);
                        self.store(row, (self.path.join)(d, out, mass, part, masses[t]));
                    }
                }
            }
            for r in rows {
                self.finish(self.row(head, r));
            }
        }
    }

    /// Computes the attention of all rows of a head to one chunk.
    ///
    /// # Safety
    /// The head must exist; no other thread may access the results of this chunk and head; the workspace must have room
    /// for chunks.
    unsafe fn chunk(&self, head: usize, chunk: usize) {
        if chunk >= (self.lists)(head).chunks() {
            return;
        }
        let (rows, d) = (self.head_rows(), self.pages.layout.head_dim());
        let begin = (chunk * self.heads.kv + head) * rows;
        // Prefetch the chunk that this thread will probably process next.
        let next = (chunk * self.heads.kv + head + 1) % (self.heads.kv * (self.lists)(head).chunks());
        let list = (self.lists)(next % self.heads.kv);
        let next = list.pages.get(next / self.heads.kv * CHUNK_PAGES..).unwrap_or_default();
        // SAFETY: chunk, head and rows are in range, so their offsets are within the workspace, in which the caller
        // guarantees room for chunks.
        unsafe {
            for first in (0..rows).step_by(TILE_ROWS) {
                let tile = first..(first + TILE_ROWS).min(rows);
                let out = self.word(self.room.parts + (begin + first) * d).cast::<f32>();
                let masses = self.tile(head, tile.clone(), chunk, next, first == 0, out);
                for (t, r) in tile.enumerate() {
                    self.word(self.room.masses + 2 * (begin + r)).cast::<Mass>().write_unaligned(masses[t]);
                }
            }
        }
    }

    /// Merges the results of all chunks of a head, in order.
    ///
    /// # Safety
    /// The head must exist, no other thread may access its rows, and all chunks must be finished.
    unsafe fn join(&self, head: usize) {
        let (rows, d) = (self.head_rows(), self.pages.layout.head_dim());
        for r in 0..rows {
            let row = self.row(head, r);
            let mut mass = Mass::NONE;
            // SAFETY: chunks, head and rows are in range, so their offsets are within the workspace; the caller
            // guarantees that chunks are finished and that no other thread accesses these rows.
            unsafe {
                for chunk in 0..(self.lists)(head).chunks() {
                    let at = (chunk * self.heads.kv + head) * rows + r;
                    let other = self.word(self.room.masses + 2 * at).cast::<Mass>().read_unaligned();
                    let part = self.word(self.room.parts + at * d).cast::<f32>();
                    let out = self.out.pointer().add(row * d);
                    mass = (self.path.join)(d, out, mass, part, other);
                }
                self.store(row, mass);
                self.finish(row);
            }
        }
    }

    /// # Safety
    /// `row` must be below the number of rows, and no other thread may access it.
    unsafe fn load(&self, row: usize) -> Mass {
        // SAFETY: the caller guarantees that the row is in range and that no other thread accesses it.
        unsafe {
            let total = *self.word(self.room.totals + row).cast::<f32>();
            Mass { max: *self.lse.pointer().add(row), total }
        }
    }

    /// # Safety
    /// See [`load`](Self::load).
    unsafe fn store(&self, row: usize, mass: Mass) {
        // SAFETY: the caller guarantees that the row is in range and that no other thread accesses it.
        unsafe {
            self.lse.pointer().add(row).write(mass.max);
            self.word(self.room.totals + row).cast::<f32>().write(mass.total);
        }
    }

    /// Divides a row by its total, and stores its log-sum-exp.
    ///
    /// # Safety
    /// See [`load`](Self::load).
    unsafe fn finish(&self, row: usize) {
        let d = self.pages.layout.head_dim();
        // SAFETY: the caller guarantees that the row is in range and that no other thread accesses it.
        let (mass, out, lse, factor) = unsafe {
            let out = core::slice::from_raw_parts_mut(self.out.pointer().add(row * d), d);
            (self.load(row), out, self.lse.pointer().add(row), *self.factor(row))
        };
        let result = if factor.is_nan() {
            out.fill(f32::NAN);
            f32::NAN
        } else if mass.total == 0.0 {
            out.fill(0.0);
            f32::NEG_INFINITY
        } else {
            let inverse = 1.0 / mass.total;
            out.iter_mut().for_each(|v| *v *= inverse);
            (f64::from(mass.max) + f64::from(mass.total).ln()) as f32
        };
        // SAFETY: the caller guarantees that the row is in range and that no other thread accesses it.
        unsafe { lse.write(result) };
    }
}
