//! A cache that owns its pages.

use super::attend::KvPages;
use super::grid::check_values;
use super::layout::{KvLayout, PAGE_TOKENS};
use super::list::{Heads, PageList};
use crate::{IsaToken, KernelError, LINE, Parallel};

/// A cache line.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; LINE]);

impl Line {
    fn bytes(lines: &[Self]) -> &[u8] {
        // SAFETY: a line is bytes without padding; the slice borrows `lines` for its lifetime.
        unsafe { core::slice::from_raw_parts(lines.as_ptr().cast(), size_of_val(lines)) }
    }

    fn bytes_mut(lines: &mut [Self]) -> &mut [u8] {
        // SAFETY: a line is bytes without padding, and any byte values are valid; the slice borrows `lines` mutably for
        // its lifetime.
        unsafe { core::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), size_of_val(lines)) }
    }
}

/// Memory for attention, reused by later calls.
#[derive(Debug, Clone, Default)]
pub struct Workspace {
    words: Vec<u32>,
}

impl Workspace {
    fn words(&mut self, count: usize) -> Result<&mut [u32], KernelError> {
        let missing = count.saturating_sub(self.words.len());
        self.words.try_reserve_exact(missing).map_err(|_| KernelError::Memory("the workspace"))?;
        self.words.resize(self.words.len() + missing, 0);
        Ok(&mut self.words[..count])
    }
}

/// The keys and values of one sequence in one layer.
///
/// Keys are stored as given, so apply rotary embedding first.
///
/// ```
/// use quant_kernels_cpu::Serial;
/// use quant_kernels_cpu::attention::{Heads, KvCache, KvLayout, KvType, Workspace};
///
/// // Two query heads that share one key-value head; each has 16 features.
/// let heads = Heads { query: 2, kv: 1, scale: 0.25 };
/// let mut cache = KvCache::new(KvLayout::new(KvType::Kv8, 16)?, heads, 1024)?;
/// cache.append(&[0.5; 16], &[2.0; 16], &Serial)?;
/// cache.append(&[0.5; 16], &[4.0; 16], &Serial)?;
///
/// // Both keys are equal, so the output is the mean of the values.
/// let (mut out, mut lse) = ([0.0; 32], [0.0; 2]);
/// cache.decode(&[1.0; 32], &mut out, &mut lse, &mut Workspace::default(), &Serial)?;
/// assert!(out.iter().all(|value| (value - 3.0).abs() < 0.05));
/// # Ok::<(), quant_kernels_cpu::KernelError>(())
/// ```
#[derive(Debug, Clone)]
pub struct KvCache {
    layout: KvLayout,
    heads: Heads,
    max_tokens: usize,
    tokens: usize,
    /// The memory of the pages. Every 64 tokens need one page per key-value head.
    lines: Vec<Line>,
    /// The page numbers of each key-value head.
    lists: Vec<Vec<u32>>,
}

impl KvCache {
    /// Creates a cache for at most `max_tokens` tokens. Its memory grows with the number of tokens, up to
    /// [`max_bytes`](Self::max_bytes).
    ///
    /// # Errors
    /// When `heads` is invalid, the size overflows, 2³² pages or more would be needed, or memory allocation fails.
    pub fn new(layout: KvLayout, heads: Heads, max_tokens: usize) -> Result<Self, KernelError> {
        KvPages::workspace(&layout, heads, 1, max_tokens)?;
        let too_large = KernelError::TooLarge("the cache");
        let pages = max_tokens.div_ceil(PAGE_TOKENS).checked_mul(heads.kv);
        let pages = pages.filter(|&pages| u32::try_from(pages).is_ok()).ok_or(too_large.clone())?;
        let bytes = pages.checked_mul(layout.page_bytes());
        bytes.filter(|&bytes| isize::try_from(bytes).is_ok()).ok_or(too_large)?;
        let mut lists = Vec::new();
        lists.try_reserve_exact(heads.kv).map_err(|_| KernelError::Memory("the cache"))?;
        lists.resize_with(heads.kv, Vec::new);
        Ok(Self { layout, heads, max_tokens, tokens: 0, lines: Vec::new(), lists })
    }

    /// The number of stored tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Bytes of the allocated pages.
    pub fn bytes(&self) -> usize {
        self.lines.len() * LINE
    }

    /// Bytes of the pages for the maximum number of tokens.
    pub fn max_bytes(&self) -> usize {
        self.max_tokens.div_ceil(PAGE_TOKENS) * self.heads.kv * self.layout.page_bytes()
    }

    /// The layout of the pages.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// The numbers of heads, and the scale of scores.
    pub fn heads(&self) -> Heads {
        self.heads
    }

    /// The cache's pages, for attention with the caller's own lists.
    pub fn pages(&self) -> KvPages<'_> {
        KvPages::of(self.layout, Line::bytes(&self.lines))
    }

    /// The page list of a key-value head, with all tokens visible; an empty list if there is no such head.
    pub fn list(&self, head: usize) -> PageList<'_> {
        match self.lists.get(head) {
            Some(pages) => PageList::all(pages, self.tokens),
            None => PageList::all(&[], 0),
        }
    }

    /// Appends tokens: `keys` and `values` are `[m, heads.kv, head_dim]`.
    ///
    /// # Errors
    /// When `keys` and `values` differ in length or are not whole tokens, a value is NaN or exceeds 65504 in magnitude,
    /// the tokens exceed `max_tokens`, or memory allocation fails. The tokens of the cache are then unchanged.
    pub fn append(
        &mut self,
        keys: &[f32],
        values: &[f32],
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        let (d, kv) = (self.layout.head_dim(), self.heads.kv);
        let m = KernelError::parts("keys", kv * d, keys.len())?;
        KernelError::length("values", keys.len(), values.len())?;
        let after = self.tokens.checked_add(m).filter(|&after| after <= self.max_tokens);
        let after = after.ok_or(KernelError::TooLarge("the number of tokens"))?;
        check_values(keys)?;
        check_values(values)?;
        self.grow(after.div_ceil(PAGE_TOKENS))?;
        let (layout, tokens, lists) = (self.layout, self.tokens, &self.lists);
        let place = |head: usize, i: usize| {
            (lists[head][(tokens + i) / PAGE_TOKENS] as usize, (tokens + i) % PAGE_TOKENS)
        };
        // SAFETY: `grow` assigns every page to one head only.
        unsafe {
            layout.write_all(Line::bytes_mut(&mut self.lines), kv, m, &place, keys, values, parallel)?;
        }
        self.tokens = after;
        Ok(())
    }

    /// Makes room for `blocks` pages per head.
    fn grow(&mut self, blocks: usize) -> Result<(), KernelError> {
        let kv = self.heads.kv;
        let (there, page_lines) = (self.lists[0].len(), self.layout.page_bytes() / LINE);
        if blocks <= there {
            return Ok(());
        }
        let lines = blocks * kv * page_lines;
        let none = |_| KernelError::Memory("the cache");
        if lines > self.lines.capacity() {
            // Grow by half, up to the maximum.
            let max = self.max_bytes() / LINE;
            let wanted = lines.max(self.lines.len() + self.lines.len() / 2).min(max);
            self.lines.try_reserve_exact(wanted - self.lines.len()).map_err(none)?;
        }
        for list in &mut self.lists {
            list.try_reserve(blocks - there).map_err(none)?;
        }
        self.lines.resize(lines, Line([0; LINE]));
        for (head, list) in self.lists.iter_mut().enumerate() {
            list.extend((there..blocks).map(|block| (block * kv + head) as u32));
        }
        Ok(())
    }

    /// Computes attention for the last token: `q` and `out` are `[heads.query, head_dim]`, `lse` is `[heads.query]`.
    ///
    /// # Errors
    /// When a length is wrong, or memory allocation fails.
    pub fn decode(
        &self,
        q: &[f32],
        out: &mut [f32],
        lse: &mut [f32],
        workspace: &mut Workspace,
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        KernelError::length("query", self.heads.query * self.layout.head_dim(), q.len())?;
        self.attend(1, q, out, lse, workspace, parallel)
    }

    /// Computes causal attention for the last `m` tokens, which must already have been appended: `q` and `out` are `[m,
    /// heads.query, head_dim]`, `lse` is `[m, heads.query]`.
    ///
    /// # Errors
    /// When a length is wrong, there are more queries than tokens, or memory allocation fails.
    pub fn prefill(
        &self,
        q: &[f32],
        out: &mut [f32],
        lse: &mut [f32],
        workspace: &mut Workspace,
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        let m = q.len() / (self.heads.query * self.layout.head_dim());
        if m > self.tokens {
            return Err(KernelError::Mismatch {
                what: "the number of queries must be at most that of the tokens in the cache,",
                expected: self.tokens,
                got: m,
            });
        }
        self.attend(m, q, out, lse, workspace, parallel)
    }

    fn attend(
        &self,
        m: usize,
        q: &[f32],
        out: &mut [f32],
        lse: &mut [f32],
        workspace: &mut Workspace,
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        let words = KvPages::workspace(&self.layout, self.heads, m, self.tokens)?;
        let lists = |head: usize| PageList::causal(&self.lists[head], self.tokens, m);
        let (token, workspace) = (IsaToken::detect(), workspace.words(words)?);
        self.pages().attend_to(token, self.heads, &lists, q, out, lse, workspace, parallel)
    }

    /// Discards all but the first `tokens` tokens; memory is kept for later tokens.
    ///
    /// # Errors
    /// When the cache has fewer tokens.
    pub fn truncate(&mut self, tokens: usize) -> Result<(), KernelError> {
        if tokens > self.tokens {
            return Err(KernelError::Mismatch {
                what: "the number of tokens to keep must be at most that in the cache,",
                expected: self.tokens,
                got: tokens,
            });
        }
        self.tokens = tokens;
        Ok(())
    }

    /// Discards all tokens; memory is kept for later tokens.
    pub fn clear(&mut self) {
        self.tokens = 0;
    }
}
