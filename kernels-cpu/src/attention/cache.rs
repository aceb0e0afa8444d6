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
        // SAFETY: lines are bytes without gaps, and borrowed as long.
        unsafe { core::slice::from_raw_parts(lines.as_ptr().cast(), size_of_val(lines)) }
    }

    fn bytes_mut(lines: &mut [Self]) -> &mut [u8] {
        // SAFETY: lines are bytes without gaps, and any bytes are a line; borrowed as long.
        unsafe { core::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), size_of_val(lines)) }
    }
}

/// Memory that calls use and leave for the next.
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
/// Keys are stored as they are given: rotary embedding comes before.
///
/// ```
/// use quant_kernels_cpu::Serial;
/// use quant_kernels_cpu::attention::{Heads, KvCache, KvLayout, KvType, Workspace};
///
/// // Two query heads that share one head of keys and values, 16 wide.
/// let heads = Heads { query: 2, kv: 1, scale: 0.25 };
/// let mut cache = KvCache::new(KvLayout::new(KvType::Kv8, 16)?, heads, 1024)?;
/// cache.append(&[0.5; 16], &[2.0; 16], &Serial)?;
/// cache.append(&[0.5; 16], &[4.0; 16], &Serial)?;
///
/// // The keys are alike, so the output is the mean of the values.
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
    /// Of every 64 tokens per page for each key-value head.
    lines: Vec<Line>,
    /// Pages of each key-value head.
    lists: Vec<Vec<u32>>,
}

impl KvCache {
    /// A cache for at most `max_tokens`. Memory grows with the tokens, up to [`max_bytes`](Self::max_bytes).
    ///
    /// # Errors
    /// When the heads do not fit each other, or so many tokens no machine.
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

    /// Tokens that it holds.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Bytes of its pages.
    pub fn bytes(&self) -> usize {
        self.lines.len() * LINE
    }

    /// Bytes that its pages take at most.
    pub fn max_bytes(&self) -> usize {
        self.max_tokens.div_ceil(PAGE_TOKENS) * self.heads.kv * self.layout.page_bytes()
    }

    /// The layout of its pages.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Its heads.
    pub fn heads(&self) -> Heads {
        self.heads
    }

    /// Its pages, to attend to with lists of the caller's own.
    pub fn pages(&self) -> KvPages<'_> {
        KvPages::of(self.layout, Line::bytes(&self.lines))
    }

    /// The pages of a key-value head, all tokens seen; none of a head that is not there.
    pub fn list(&self, head: usize) -> PageList<'_> {
        match self.lists.get(head) {
            Some(pages) => PageList::all(pages, self.tokens),
            None => PageList::all(&[], 0),
        }
    }

    /// Appends tokens: `keys` and `values` are `[m, heads.kv, head_dim]`.
    ///
    /// # Errors
    /// When lengths are wrong or no whole tokens, a value is beyond ±65504, or the tokens are more than was
    /// agreed or memory holds. Nothing is changed then.
    pub fn append(
        &mut self,
        keys: &[f32],
        values: &[f32],
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        let (d, kv) = (self.layout.head_dim(), self.heads.kv);
        let m = keys.len() / (kv * d);
        KernelError::length("keys", m * kv * d, keys.len())?;
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
        // SAFETY: the pages of a head are its own.
        unsafe {
            layout.write_all(Line::bytes_mut(&mut self.lines), kv, m, &place, keys, values, parallel)?;
        }
        self.tokens = after;
        Ok(())
    }

    /// Room for so many pages of every head.
    fn grow(&mut self, blocks: usize) -> Result<(), KernelError> {
        let kv = self.heads.kv;
        let (there, page_lines) = (self.lists[0].len(), self.layout.page_bytes() / LINE);
        if blocks <= there {
            return Ok(());
        }
        let lines = blocks * kv * page_lines;
        let none = |_| KernelError::Memory("the cache");
        if lines > self.lines.capacity() {
            // Half as much again, but not more than was agreed.
            let most = self.max_bytes() / LINE;
            let wanted = lines.max(self.lines.len() + self.lines.len() / 2).min(most);
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

    /// The last token's queries: `q` and `out` are `[heads.query, head_dim]`, `lse` `[heads.query]`; all tokens
    /// are seen, and of none there are zeros and minus infinity.
    ///
    /// # Errors
    /// When a length is wrong, or memory is short.
    pub fn decode(
        &self,
        q: &[f32],
        out: &mut [f32],
        lse: &mut [f32],
        workspace: &mut Workspace,
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        KernelError::length("queries", self.heads.query * self.layout.head_dim(), q.len())?;
        self.attend(1, q, out, lse, workspace, parallel)
    }

    /// The queries of the last `m` tokens, which were appended before: `q` and `out` are
    /// `[m, heads.query, head_dim]`, `lse` `[m, heads.query]`; no query sees a token after its own.
    ///
    /// # Errors
    /// When a length is wrong, there are more queries than tokens, or memory is short.
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
            return Err(KernelError::Mismatch { what: "queries", expected: self.tokens, got: m });
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

    /// Forgets all tokens but the first; memory stays for the next.
    ///
    /// # Errors
    /// When there are not so many.
    pub fn truncate(&mut self, tokens: usize) -> Result<(), KernelError> {
        if tokens > self.tokens {
            return Err(KernelError::Mismatch { what: "tokens", expected: self.tokens, got: tokens });
        }
        self.tokens = tokens;
        Ok(())
    }

    /// Forgets all tokens; memory stays for the next.
    pub fn clear(&mut self) {
        self.tokens = 0;
    }
}
