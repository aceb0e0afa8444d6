//! The product of one strip and one panel on `avx512bf16`, in 24 accumulators.

use core::arch::x86_64::{
    __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_set1_epi32, _mm512_setzero_ps,
    _mm512_storeu_ps,
};
use core::mem::transmute;

use super::{Bf16Token, LEFT_ROWS, RIGHT_ROWS, Tile};

const LANES: usize = 16;

pub(super) fn multiply(_: Bf16Token, strip: &[u32], panel: &[u32]) -> Tile {
    // SAFETY: the `Bf16Token` proves that the processor has the features that the function is compiled for.
    unsafe { tile(strip, panel) }
}

#[target_feature(enable = "avx512f,avx512bf16")]
fn tile(strip: &[u32], panel: &[u32]) -> Tile {
    let mut sums = [[_mm512_setzero_ps(); RIGHT_ROWS / LANES]; LEFT_ROWS];
    for (left, right) in strip.chunks_exact(LEFT_ROWS).zip(panel.chunks_exact(RIGHT_ROWS)) {
        let right = [pairs(&right[..LANES]), pairs(&right[LANES..])];
        for (sums, &left) in sums.iter_mut().zip(left) {
            let left = as_bf16(_mm512_set1_epi32(left as i32));
            sums[0] = _mm512_dpbf16_ps(sums[0], left, right[0]);
            sums[1] = _mm512_dpbf16_ps(sums[1], left, right[1]);
        }
    }
    let mut out = [[0.0; RIGHT_ROWS]; LEFT_ROWS];
    for (row, sums) in out.iter_mut().zip(sums) {
        for (part, sum) in row.chunks_exact_mut(LANES).zip(sums) {
            // SAFETY: the slice is as long as the register, and the store is unaligned.
            unsafe { _mm512_storeu_ps(part.as_mut_ptr(), sum) };
        }
    }
    out
}

#[target_feature(enable = "avx512f,avx512bf16")]
fn pairs(words: &[u32]) -> __m512bh {
    assert_eq!(words.len(), LANES);
    // SAFETY: the slice has as many words as the register, and the load is unaligned.
    as_bf16(unsafe { _mm512_loadu_si512(words.as_ptr().cast()) })
}

fn as_bf16(register: __m512i) -> __m512bh {
    // SAFETY: both types are the same 512 bits, and every bit pattern is valid for either.
    unsafe { transmute::<__m512i, __m512bh>(register) }
}
