//! Attention on a paged cache of keys and values with 4, 8 or 16 bits: appending and decoding.
//!
//! [`quant_kernels_cpu::attention`] defines the stored values: the grid of each head of a token is bit-identical to
//! that of [`quantize_head`](quant_kernels_cpu::attention::quantize_head). The order within a page is specific to the
//! GPU ([`KvPageLayout`]). [`AppendShape`] plans a launch that quantizes and stores tokens, [`DecodeShape`] one that
//! attends with the last queries of each sequence, and [`MergeShape`] one that merges results on parts of sequences.
//! Planning needs no device and no CUDA.
//!
//! # The definition
//!
//! For a query head `q` (f16 or bf16) and the tokens `t` that it sees, with stored scales `s`, zero points `z` and
//! codes `c`:
//!
//! ```text
//! score_t = scale · Σ q (s_t c_t + z_t) = scale · (s_t Σ q c_t + z_t Σ q)
//! p_t = exp(score_t − max),   out = Σ p_t v̂_t / Σ p_t,   lse = max + ln Σ p_t
//! Σ p_t · v̂_t = Σ h(p_t · s_t)(c_t − centre) + Σ p_t · (z_t + centre · s_t)      centre = 8 or 128, h rounds to f16
//! ```
//!
//! For f16 pages, `k̂` and `v̂` are the stored values, and only `Σ h(p_t) v̂_t` remains. Queries in bf16 are converted
//! to f16 times a power of two for each head, so values that are tiny compared with the head's maximum are lost.
//!
//! Sequences are split by [`SplitRule`], only by their own number of tokens, and results of warps and splits are
//! combined in a fixed order. So results are bit-identical whatever else is in the launch, in whichever order blocks
//! run, and wherever the pages are.
//!
//! # The bound
//!
//! Let `u = 2⁻²⁴`, `d` the features, `o + l` the largest f16 that a code becomes (271 with 4 bits, 1279 with 8; `o` is
//! 256 or 1024), `n` the tokens, `P_t` the exact probabilities, and `T = max(512, n / 32 + 64) / 2 + 64`, a bound of
//! how many numbers one accumulator of a warp adds, including the merges. The sums of tensor cores are assumed to have
//! an error of `2 u` of the added magnitudes per addition, because they may truncate.
//!
//! - The sums of products of f16 values in a score, whose products are exact, have these errors: `Σ q (c + o)` and its
//!   initial value `2 (d + 2) · 2 u (o + l) Σ |q|` together, `Σ q` an error of `(d + 2) · 2 u Σ |q|`; and four
//!   roundings. So `δ = |scale| Σ |q| · (6 d + 32) u · max_t ((o + l) s_t + |z_t|)`, for f16 pages `δ = |scale| (2 d +
//!   16) u · max_t Σ |q k_t|`; bf16 adds `|scale| d · 2⁻³⁹ max |q| · max_t max |k̂_t|`.
//! - Exponentials have an error of `2⁻²²`, and differences of scores are rounded: `ε = 2 δ + 2⁻²¹ + 2⁻²² · max_t
//!   |score_t|`, so each `p_t` is exact up to a factor within `1 ± ε`, and each ratio to their sum up to a factor
//!   within `1 ± (2 ε + 2 T u)`.
//! - `h` has an error of `2⁻¹¹` of `p_t s_t`, or, below the normal f16 range, of `2⁻³¹` of the largest scale; it
//!   affects `c − centre` only.
//! - Sums of `h (c + o)` and the subtracted offset: `4 T u (o + l) Σ P_t s_t`.
//!
//! ```text
//! |out − exact| ≤ (2 ε + 4 T u) Σ P_t |v̂_t| + 2⁻¹¹ Σ P_t s_t |c_t − centre| + (4 T u (o + l) + 2 ε) Σ P_t s_t + 2⁻³¹ n centre max s_t
//! f16:          ≤ (2 ε + 4 T u + 2⁻¹¹) Σ P_t |v̂_t| + 2⁻³² n max |v̂_t|
//! |lse − exact| ≤ ε + (T + 8) u + 2⁻²² (1 + |lse|)
//! ```
//!
//! plus the rounding of the output to f16 or bf16. These are worst cases; actual errors are far smaller.

mod append;
mod decode;
mod layout;
mod merge;

pub use self::append::{AppendArguments, AppendPlan, AppendShape};
pub use self::decode::{DecodeArguments, DecodePlan, DecodeShape, MAX_SPLITS, MIN_SPLIT, SplitRule};
pub use self::layout::{KvPageLayout, MAX_HEAD_DIM, MAX_PAGE_TOKENS, TILE_TOKENS};
pub use self::merge::{MergeArguments, MergePlan, MergeShape};

use quant_kernels_cpu::KernelError;
use quant_kernels_cpu::attention::KvType;

use crate::compile::Source;
pub use crate::float::Float;
use crate::registry::Entry;

const HEADERS: [(&str, &str); 3] = [
    ("ptx.cuh", include_str!("../../cuda/ptx.cuh")),
    ("kv_layout.cuh", include_str!("../../cuda/kv_layout.cuh")),
    ("attention_tile.cuh", include_str!("../../cuda/attention_tile.cuh")),
];
/// The source of `kv_append`.
pub static APPEND_SOURCE: Source =
    Source { name: "kv_append.cu", text: include_str!("../../cuda/kv_append.cu"), headers: &HEADERS };
/// The source of `attention_decode`.
pub static DECODE_SOURCE: Source = Source {
    name: "attention_decode.cu",
    text: include_str!("../../cuda/attention_decode.cu"),
    headers: &HEADERS,
};
/// The source of `attention_merge`.
pub static MERGE_SOURCE: Source = Source {
    name: "attention_merge.cu",
    text: include_str!("../../cuda/attention_merge.cu"),
    headers: &HEADERS,
};

/// The variants that the tests compile for the architectures. Other shapes are planned and compiled in the same way.
pub fn variants() -> Vec<Entry> {
    // A test checks that no shape fails.
    listed().unwrap_or_default()
}

fn listed() -> Result<Vec<Entry>, KernelError> {
    use Float::{Bf16, F16, F32};
    let mut entries = Vec::new();
    for (i, kind) in [KvType::Kv4, KvType::Kv8, KvType::F16].into_iter().enumerate() {
        for (j, head_dim) in [64, 96, 128, 256].into_iter().enumerate() {
            let layout = KvPageLayout::new(kind, head_dim, 64)?;
            // Types affect only the beginning and the end of a kernel.
            for input in [[F16, Bf16], [Bf16, F32], [F32, F16]][(i + j) % 3] {
                entries.push(AppendShape { layout, kv_heads: 1, tokens: 1, input }.plan()?.entry());
            }
            for (query_heads, query, out) in
                [(8, F16, F16), (8, Bf16, Bf16), (16, [F16, Bf16][(i + j) % 2], F32)]
            {
                let shape = DecodeShape {
                    layout,
                    query_heads,
                    kv_heads: 1,
                    sequences: 1,
                    queries: 1,
                    max_tokens: 1,
                    query,
                    out,
                };
                entries.push(shape.plan()?.entry());
            }
        }
    }
    for out in [F16, Bf16, F32] {
        entries.push(MergeShape { parts: 1, rows: 1, head_dim: 1, out }.plan()?.entry());
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_listed_can_be_planned() {
        assert!(listed().is_ok());
        let of = |kernel| variants().iter().filter(|entry| entry.variant.kernel == kernel).count();
        assert_eq!([of("kv_append"), of("attention_decode"), of("attention_merge")], [24, 36, 3]);
    }
}
