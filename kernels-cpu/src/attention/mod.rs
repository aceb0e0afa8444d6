//! Attention on a cache of keys and values: appended token by token, read page by page.
//!
//! Keys and values are quantized when they are appended ([`quantize_head`]), stored in pages of 64 tokens
//! ([`KvLayout`], [`KvLayout::append`]), and read through lists of pages ([`KvPages::attend`]); [`KvCache`] does all
//! three for one sequence. Decoding (one query) and prefill (many) use the same kernel.
//!
//! # The definition
//!
//! For a query head `q` and the tokens `t` that it sees, with stored scales `s`, zeros `z` and codes `c`:
//!
//! ```text
//! q ≈ s_q · a                              8 bits, by its largest magnitude (quantize_query)
//! I_t = Σ a · c_t,  A = Σ a                exact integers
//! score_t = f · (s_t · I_t + z_t · A)      f = s_q · scale; three roundings
//! p_t = exp(score_t − max)                 relative error at most 2⁻²²
//! out = Σ p_t · v̂_t / Σ p_t,   lse = max + ln Σ p_t
//! Σ p_t · v̂_t = Σ (p_t · s_t)(c_t − centre) + Σ p_t · (z_t + centre · s_t)      centre = 8 or 128
//! ```
//!
//! For f16 pages, scores are `scale · Σ q · k` with `f32` multiply-adds in order of features, and values are multiplied
//! as stored.
//!
//! Tokens are divided along the list into chunks of 1024, each with its own maximum; a chunk's sums run over its tokens
//! in order, and chunks are merged in order. This order is fixed, so results do not depend on the division of work or
//! the number of threads. Results are bit-identical on all instruction sets except `avx512bf16`, which rounds `p_t ·
//! s_t` to bf16; maxima, totals and log-sum-exps are the same there too.
//!
//! # The bound
//!
//! Compared with exact attention of `s_q · a` on the contents of the cache: let `B = max_t |f| (|s_t I_t| + |z_t A|)`,
//! for f16 `B = max_t |scale| Σ |q · k|`, `n` the number of tokens, and `P_t` the exact probabilities.
//!
//! - The error of a score is `δ ≤ 2⁻²² B` (f16: `(d + 2) · 2⁻²⁴ B`); that of its distance from the largest score is
//!   `2δ` plus one rounding, below `2⁻²³ B`.
//! - So each `p_t` has a relative error of at most `ε = 2δ + 2⁻²³ B + 2⁻²²`, plus an absolute error of `e⁻⁸⁷` for those
//!   that are practically zero; and each ratio of a `p_t` to their sum a relative error of at most `2ε`.
//! - Sums of at most 1024 values in a chunk, merging of chunks, and a division: `(1024 + 3 · ⌈n / 1024⌉ + 8) · 2⁻²⁴`.
//!
//! Together, `|out − exact|` is at most
//! `(2ε + 2 (1040 + 3 ⌈n / 1024⌉) · 2⁻²⁴ [+ 2⁻⁸]) Σ P_t (|s_t| |c_t − centre| + |z_t + centre · s_t|)`, where the term
//! in brackets applies to `avx512bf16` only; and `|lse − exact|` at most `2ε + (1040 + 3 ⌈n / 1024⌉) · 2⁻²⁴ + 2⁻²³
//! |lse|`. These bounds assume that no `p_t · s_t` that contributes to the result is below `10⁻³⁸`.

mod append;
mod attend;
mod cache;
mod dispatch;
mod exp;
mod grid;
mod kernel;
mod layout;
mod list;
mod merge;
mod prefetcher;
mod query;

pub use self::attend::{KvPages, MAX_HEADS};
pub use self::cache::{KvCache, Workspace};
pub use self::grid::{HeadGrid, MAX_MAGNITUDE, dequantize_head, quantize_head};
pub use self::layout::{KvLayout, KvType, MAX_HEAD_DIM, PAGE_TOKENS};
pub use self::list::{Heads, PageList};
pub use self::merge::merge;
pub use self::query::{MAX_QUERY, quantize_query};
