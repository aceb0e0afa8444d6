//! Attention on a paged cache of keys and values of 4, 8 or 16 bits: appended to, and decoded from.
//!
//! What is stored is defined by [`quant_kernels_cpu::attention`]: the grid of a head of a token is that of
//! [`quantize_head`](quant_kernels_cpu::attention::quantize_head), bit for bit. Where it lies in a page is the GPU's own
//! ([`KvPageLayout`]).

mod layout;

pub use self::layout::{KvPageLayout, MAX_HEAD_DIM, MAX_PAGE_TOKENS, TILE_TOKENS};
