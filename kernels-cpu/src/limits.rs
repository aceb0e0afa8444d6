//! What a machine can do at most: how fast it reads memory, and how fast it multiplies what is in registers.
//!
//! Kernels are judged by these, measured in the same run: machines are shared, and a number of another day
//! says little.
#![allow(unsafe_code, reason = "loops compiled for instructions that a token proves")]

use core::hint::black_box;
use std::time::Instant;

use crate::parallel::Parallel;
use crate::simd::Lanes;
use crate::simd::scalar::Scalar;
use crate::{Isa, IsaToken, PANEL_ROWS, STEP};

/// A limit that was reached.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemoryLimit {
    /// Bytes a second, of all threads together.
    pub bytes_per_second: f64,
    /// Streams of a thread that reached it.
    pub streams: usize,
}

/// Reads `memory` once in each of several patterns, and the best of `rounds`: each thread its own part, in
/// 1 to 16 streams side by side. What is to be the limit of memory must be larger than all caches; a thread's last
/// kilobyte may not be read and is counted.
pub fn read_limit(token: IsaToken, memory: &[u64], rounds: usize, parallel: &dyn Parallel) -> MemoryLimit {
    let threads = parallel.threads().max(1);
    let part = (memory.len() / threads).max(1);
    let mut best = MemoryLimit { bytes_per_second: 0.0, streams: 1 };
    for _ in 0..rounds {
        for streams in [1, 2, 4, 8, 16] {
            let started = Instant::now();
            parallel.for_each(threads, &|t| {
                let part = memory.get(t * part..(t + 1) * part).unwrap_or_default();
                black_box(read(token, part, streams));
            });
            let bytes_per_second = (8 * part * threads) as f64 / started.elapsed().as_secs_f64();
            if bytes_per_second > best.bytes_per_second {
                best = MemoryLimit { bytes_per_second, streams };
            }
        }
    }
    best
}

/// Operations a second (a multiplication and an addition are two) of whole numbers in registers.
pub fn dot_limit(token: IsaToken, rounds: usize, parallel: &dyn Parallel) -> f64 {
    const STEPS: usize = 200_000;
    let threads = parallel.threads().max(1);
    let operations = (2 * PANEL_ROWS * STEP * CHAINS * STEPS * threads) as f64;
    (0..rounds)
        .map(|_| {
            let started = Instant::now();
            parallel.for_each(threads, &|_| {
                black_box(dots(token, black_box(STEPS)));
            });
            operations / started.elapsed().as_secs_f64()
        })
        .fold(0.0, f64::max)
}

/// Sums in flight: enough to hide what one takes.
const CHAINS: usize = 12;

/// Adds up words, so that they are read.
#[inline(always)]
fn sum(words: &[u64], streams: usize) -> u64 {
    const LINE: usize = 8;
    let each = words.len() / streams / LINE * LINE;
    let mut sums = [0_u64; LINE];
    let mut at = 0;
    while at < each {
        for s in 0..streams {
            let line = &words[s * each + at..s * each + at + LINE];
            sums.iter_mut().zip(line).for_each(|(sum, w)| *sum = sum.wrapping_add(*w));
        }
        at += LINE;
    }
    sums.iter().fold(0, |a, &b| a.wrapping_add(b))
}

#[inline(always)]
unsafe fn dot<L: Lanes>(steps: usize) -> i32 {
    let (codes, x) = black_box(([1_u8; 64], [1_i8; 8]));
    // SAFETY: the caller has the instructions; the arrays are as long as what is read of them.
    unsafe {
        let (codes, x) = (L::codes4(codes.as_ptr()), L::activations(x.as_ptr()));
        let mut sums = [L::splat(0); CHAINS];
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = L::dot4(*sum, codes, x);
            }
        }
        let mut out = [0.0; PANEL_ROWS];
        let all = sums.into_iter().reduce(|a, b| L::add(a, b));
        L::store_f32(out.as_mut_ptr(), L::to_f32(all.unwrap_or(L::splat(0))));
        out[0] as i32
    }
}

macro_rules! compiled {
    ($sum:ident, $dot:ident, $lanes:ty, $features:literal) => {
        #[target_feature(enable = $features)]
        unsafe fn $sum(words: &[u64], streams: usize) -> u64 {
            sum(words, streams)
        }
        #[target_feature(enable = $features)]
        unsafe fn $dot(steps: usize) -> i32 {
            // SAFETY: compiled for the instructions that the lanes ask for.
            unsafe { dot::<$lanes>(steps) }
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use crate::simd::{avx2::Avx2, avx2::AvxVnni, avx512::Avx512Vnni};

    compiled!(sum_avx2, dot_avx2, Avx2, "avx2,fma,f16c");
    compiled!(sum_avxvnni, dot_avxvnni, AvxVnni, "avx2,fma,f16c,avxvnni");
    compiled!(sum_avx512, dot_avx512, Avx512Vnni, "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni");

    pub(super) fn read(token: IsaToken, words: &[u64], streams: usize) -> u64 {
        // SAFETY: the token proves the instructions.
        unsafe {
            match token.isa() {
                Isa::Avx2 => sum_avx2(words, streams),
                Isa::AvxVnni => sum_avxvnni(words, streams),
                Isa::Avx512Vnni | Isa::Avx512Bf16 => sum_avx512(words, streams),
                _ => sum(words, streams),
            }
        }
    }

    pub(super) fn dots(token: IsaToken, steps: usize) -> i32 {
        // SAFETY: the token proves the instructions.
        unsafe {
            match token.isa() {
                Isa::Avx2 => dot_avx2(steps),
                Isa::AvxVnni => dot_avxvnni(steps),
                Isa::Avx512Vnni | Isa::Avx512Bf16 => dot_avx512(steps),
                _ => dot::<Scalar>(steps),
            }
        }
    }
}
#[cfg(target_arch = "x86_64")]
use x86::{dots, read};

#[cfg(target_arch = "aarch64")]
mod arm {
    use super::*;
    use crate::simd::neon::{Neon, NeonDotprod, NeonI8mm};

    compiled!(sum_neon, dot_neon, Neon, "neon");
    compiled!(sum_neondot, dot_neondot, NeonDotprod, "neon,dotprod");
    compiled!(sum_neoni8mm, dot_neoni8mm, NeonI8mm, "neon,dotprod,i8mm");

    pub(super) fn read(token: IsaToken, words: &[u64], streams: usize) -> u64 {
        // SAFETY: the token proves the instructions.
        unsafe {
            match token.isa() {
                Isa::Neon => sum_neon(words, streams),
                Isa::NeonDotprod => sum_neondot(words, streams),
                Isa::NeonI8mm => sum_neoni8mm(words, streams),
                _ => sum(words, streams),
            }
        }
    }

    pub(super) fn dots(token: IsaToken, steps: usize) -> i32 {
        // SAFETY: the token proves the instructions.
        unsafe {
            match token.isa() {
                Isa::Neon => dot_neon(steps),
                Isa::NeonDotprod => dot_neondot(steps),
                Isa::NeonI8mm => dot_neoni8mm(steps),
                _ => dot::<Scalar>(steps),
            }
        }
    }
}
#[cfg(target_arch = "aarch64")]
use arm::{dots, read};

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn read(_: IsaToken, words: &[u64], streams: usize) -> u64 {
    sum(words, streams)
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn dots(_: IsaToken, steps: usize) -> i32 {
    // SAFETY: portable.
    unsafe { dot::<Scalar>(steps) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Serial;

    #[test]
    fn all_words_are_read() {
        let words: Vec<u64> = (0..8 * 48).collect();
        for isa in Isa::available() {
            let token = isa.token().unwrap();
            for streams in [1, 2, 4, 8, 16] {
                assert_eq!(read(token, &words, streams), words.iter().sum::<u64>(), "{isa:?}");
            }
            assert!(dot_limit(token, 1, &Serial) > 0.0);
            assert!(read_limit(token, &words, 1, &Serial).bytes_per_second > 0.0);
        }
    }
}
