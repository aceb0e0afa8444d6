//! The limits of a machine: memory bandwidth, and the peak rate of arithmetic on registers. Benchmarks compare kernels
//! with limits that were measured in the same run.
#![allow(unsafe_code, reason = "loops compiled for instructions that a token proves")]

use core::hint::black_box;
use core::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::parallel::Parallel;
use crate::simd::scalar::Scalar;
use crate::simd::tiles::{Shape, TileUnit, emulated::Emulated};
use crate::simd::{FloatLanes, Lanes};
use crate::{Isa, IsaToken, PANEL_ROWS, STEP};

/// A measured bandwidth limit.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct MemoryLimit {
    /// Bytes per second, summed over threads.
    pub bytes_per_second: f64,
    /// The number of concurrent streams per thread that reached this bandwidth.
    pub streams: usize,
}

/// Measures the read bandwidth of `memory`: the best of `rounds` rounds. Each thread reads its own part, with each of
/// several numbers of concurrent streams. To measure main memory, `memory` must be larger than all caches.
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

/// Measures the peak integer operations per second in registers; a multiplication and an addition count as two.
pub fn dot_limit(token: IsaToken, rounds: usize, parallel: &dyn Parallel) -> f64 {
    limit(rounds, parallel, &|| dots(token, black_box(STEPS)))
}

/// Measures the peak floating-point operations per second in registers, in the type that this path multiplies (`f32` or
/// bf16).
pub fn float_limit(token: IsaToken, rounds: usize, parallel: &dyn Parallel) -> f64 {
    limit(rounds, parallel, &|| floats(token, black_box(STEPS)))
}

/// Measures the peak rates of all paths of this processor except portable code.
pub fn peaks(rounds: usize, parallel: &dyn Parallel) -> Vec<Peak> {
    let paths = Isa::available().filter(|isa| *isa != Isa::Scalar);
    paths
        .filter_map(|isa| {
            let token = isa.token().ok()?;
            let integers = dot_limit(token, rounds, parallel);
            Some(Peak { isa, integers, floats: float_limit(token, rounds, parallel) })
        })
        .collect()
}

/// The peak rates of a path with operands in registers, in operations per second summed over threads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Peak {
    /// The path.
    pub isa: Isa,
    /// The rate for 8-bit integers.
    pub integers: f64,
    /// The rate for `f32`, or for bf16 if the path multiplies bf16. If the path splits `f32` into two bf16, the
    /// products of both count.
    pub floats: f64,
}

impl Peak {
    /// The rate for `f32` activations: half of [`floats`](Self::floats) if the path splits each value into two bf16.
    pub fn floats_of_f32(&self) -> f64 {
        if self.isa.splits_floats() { self.floats / 2.0 } else { self.floats }
    }
}

const STEPS: usize = 50_000;

fn limit(rounds: usize, parallel: &dyn Parallel, run: &(dyn Fn() -> usize + Sync)) -> f64 {
    let threads = parallel.threads().max(1);
    (0..rounds)
        .map(|_| {
            let operations = AtomicUsize::new(0);
            let started = Instant::now();
            parallel.for_each(threads, &|_| {
                operations.fetch_add(run(), Ordering::Relaxed);
            });
            operations.into_inner() as f64 / started.elapsed().as_secs_f64()
        })
        .fold(0.0, f64::max)
}

/// The number of independent sums: enough to hide the latency of one addition.
const CHAINS: usize = 12;

/// Reads the words in `streams` interleaved streams. The remainder that does not fill a line of every stream is
/// skipped.
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

/// # Safety
/// The processor must have the instructions of `L`.
#[inline(always)]
unsafe fn dot<L: Lanes>(steps: usize) -> usize {
    let (codes, x) = black_box(([1_u8; 64], [1_i8; 8]));
    // SAFETY: the caller guarantees that the processor has the instructions of `L`; the arrays hold the 64 codes and
    // the 8 activations that are read.
    unsafe {
        let (codes, x) = (L::codes4(codes.as_ptr()), L::activations(x.as_ptr()));
        let mut sums = [L::splat(0); CHAINS];
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = L::dot4(*sum, codes, x);
            }
        }
        keep::<L, CHAINS>(sums.map(|sum| L::to_f32(sum)));
    }
    2 * PANEL_ROWS * STEP * CHAINS * steps
}

/// # Safety
/// The processor must have the instructions of `L`.
#[inline(always)]
unsafe fn float<L: FloatLanes, const CHAINS: usize>(steps: usize) -> usize {
    let (codes, x) = black_box(([1_u8; 64], [0_u8; 32]));
    // SAFETY: the caller guarantees that the processor has the instructions of `L`; the arrays hold all bytes that are
    // read.
    unsafe {
        let weights = L::weights::<4>(codes.as_ptr(), 0, L::centre(8));
        let mut sums = [L::zero(); CHAINS];
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = L::dot_float::<true>(*sum, weights, x.as_ptr(), 0);
            }
        }
        keep::<L, CHAINS>(sums);
    }
    let features = if L::PARTS == STEP { 1 } else { 4 };
    2 * PANEL_ROWS * features * CHAINS * steps
}

/// # Safety
/// The processor must have the instructions of `L`.
#[inline(always)]
unsafe fn keep<L: Lanes, const CHAINS: usize>(sums: [L::F; CHAINS]) {
    let mut out = [0.0_f32; PANEL_ROWS];
    for sum in sums {
        // SAFETY: the caller guarantees that the processor has the instructions of `L`; the array holds the sixteen
        // values that are written.
        unsafe { L::store_f32(out.as_mut_ptr(), sum) };
        black_box(&out);
    }
}

/// # Safety
/// The processor must have the tile unit `U`.
#[inline(always)]
unsafe fn tiles<U: TileUnit, const BF16: bool>(steps: usize) -> usize {
    // SAFETY: the caller guarantees that the processor has the tile unit `U`.
    unsafe {
        let mut unit = U::configure(Shape { rows: 16, depth: 16 });
        for _ in 0..steps {
            if BF16 {
                unit.add_bf16::<0, 6, 4>();
                unit.add_bf16::<1, 6, 5>();
                unit.add_bf16::<2, 7, 4>();
                unit.add_bf16::<3, 7, 5>();
            } else {
                unit.add_signed::<0, 6, 4>();
                unit.add_signed::<1, 6, 5>();
                unit.add_signed::<2, 7, 4>();
                unit.add_signed::<3, 7, 5>();
            }
        }
    }
    2 * 4 * 16 * 16 * if BF16 { 32 } else { 64 } * steps
}

macro_rules! compiled {
    ($sum:ident, $dot:ident, $float:ident, $lanes:ty, $chains:expr, $features:literal) => {
        /// # Safety
        /// The processor must have these features.
        #[target_feature(enable = $features)]
        unsafe fn $sum(words: &[u64], streams: usize) -> u64 {
            sum(words, streams)
        }
        /// # Safety
        /// The processor must have these features.
        #[target_feature(enable = $features)]
        unsafe fn $dot(steps: usize) -> usize {
            // SAFETY: this function is compiled with the features that the lanes require; the caller guarantees that
            // the processor has them.
            unsafe { dot::<$lanes>(steps) }
        }
        /// # Safety
        /// The processor must have these features.
        #[target_feature(enable = $features)]
        unsafe fn $float(steps: usize) -> usize {
            // SAFETY: this function is compiled with the features that the lanes require; the caller guarantees that
            // the processor has them.
            unsafe { float::<$lanes, { $chains }>(steps) }
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use crate::simd::avx2::{Avx2, AvxVnni};
    use crate::simd::avx512::{Avx512Bf16, Avx512Vnni};
    use crate::simd::tiles::amx::Amx;

    /// Sixteen lanes take two of the sixteen registers of AVX2.
    const FLOAT_CHAINS_AVX2: usize = 6;

    compiled!(sum_avx2, dot_avx2, float_avx2, Avx2, FLOAT_CHAINS_AVX2, "avx2,fma,f16c");
    compiled!(sum_avxvnni, dot_avxvnni, float_avxvnni, AvxVnni, FLOAT_CHAINS_AVX2, "avx2,fma,f16c,avxvnni");
    compiled!(
        sum_avx512,
        dot_avx512,
        float_avx512,
        Avx512Vnni,
        CHAINS,
        "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni"
    );
    /// # Safety
    /// The processor must have these features.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16")]
    unsafe fn float_bf16(steps: usize) -> usize {
        // SAFETY: this function is compiled with the features that the lanes require; the caller guarantees that the
        // processor has them.
        unsafe { float::<Avx512Bf16, CHAINS>(steps) }
    }

    pub(super) fn read(token: IsaToken, words: &[u64], streams: usize) -> u64 {
        // SAFETY: the `IsaToken` proves that the processor has the instructions of the chosen function.
        unsafe {
            match token.isa() {
                Isa::Avx2 => sum_avx2(words, streams),
                Isa::AvxVnni => sum_avxvnni(words, streams),
                Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::Amx => sum_avx512(words, streams),
                _ => sum(words, streams),
            }
        }
    }

    pub(super) fn dots(token: IsaToken, steps: usize) -> usize {
        // SAFETY: the `IsaToken` proves that the processor has the instructions of the chosen function.
        unsafe {
            match token.isa() {
                Isa::Avx2 => dot_avx2(steps),
                Isa::AvxVnni => dot_avxvnni(steps),
                Isa::Avx512Vnni | Isa::Avx512Bf16 => dot_avx512(steps),
                Isa::Amx => tiles::<Amx, false>(steps),
                Isa::AmxEmulated => tiles::<Emulated, false>(steps / 1000),
                _ => dot::<Scalar>(steps),
            }
        }
    }

    pub(super) fn floats(token: IsaToken, steps: usize) -> usize {
        // SAFETY: the `IsaToken` proves that the processor has the instructions of the chosen function.
        unsafe {
            match token.isa() {
                Isa::Avx2 => float_avx2(steps),
                Isa::AvxVnni => float_avxvnni(steps),
                Isa::Avx512Vnni => float_avx512(steps),
                Isa::Avx512Bf16 => float_bf16(steps),
                Isa::Amx => tiles::<Amx, true>(steps),
                Isa::AmxEmulated => tiles::<Emulated, true>(steps / 1000),
                _ => float::<Scalar, CHAINS>(steps),
            }
        }
    }
}
#[cfg(target_arch = "x86_64")]
use x86::{dots, floats, read};

#[cfg(target_arch = "aarch64")]
mod arm {
    use super::*;
    use crate::simd::neon::{Neon, NeonDotprod, NeonI8mm};

    compiled!(sum_neon, dot_neon, float_neon, Neon, CHAINS, "neon");
    compiled!(sum_neondot, dot_neondot, float_neondot, NeonDotprod, CHAINS, "neon,dotprod");
    compiled!(sum_neoni8mm, dot_neoni8mm, float_neoni8mm, NeonI8mm, CHAINS, "neon,dotprod,i8mm");

    pub(super) fn read(token: IsaToken, words: &[u64], streams: usize) -> u64 {
        // SAFETY: the `IsaToken` proves that the processor has the instructions of the chosen function.
        unsafe {
            match token.isa() {
                Isa::Neon => sum_neon(words, streams),
                Isa::NeonDotprod => sum_neondot(words, streams),
                Isa::NeonI8mm => sum_neoni8mm(words, streams),
                _ => sum(words, streams),
            }
        }
    }

    pub(super) fn dots(token: IsaToken, steps: usize) -> usize {
        // SAFETY: the `IsaToken` proves that the processor has the instructions of the chosen function.
        unsafe {
            match token.isa() {
                Isa::Neon => dot_neon(steps),
                Isa::NeonDotprod => dot_neondot(steps),
                Isa::NeonI8mm => dot_neoni8mm(steps),
                Isa::AmxEmulated => tiles::<Emulated, false>(steps / 1000),
                _ => dot::<Scalar>(steps),
            }
        }
    }

    pub(super) fn floats(token: IsaToken, steps: usize) -> usize {
        // SAFETY: the `IsaToken` proves that the processor has the instructions of the chosen function.
        unsafe {
            match token.isa() {
                Isa::Neon => float_neon(steps),
                Isa::NeonDotprod => float_neondot(steps),
                Isa::NeonI8mm => float_neoni8mm(steps),
                Isa::AmxEmulated => tiles::<Emulated, true>(steps / 1000),
                _ => float::<Scalar, CHAINS>(steps),
            }
        }
    }
}
#[cfg(target_arch = "aarch64")]
use arm::{dots, floats, read};

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn read(_: IsaToken, words: &[u64], streams: usize) -> u64 {
    sum(words, streams)
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn dots(token: IsaToken, steps: usize) -> usize {
    // SAFETY: portable code needs no instruction set.
    unsafe {
        match token.isa() {
            Isa::AmxEmulated => tiles::<Emulated, false>(steps / 1000),
            _ => dot::<Scalar>(steps),
        }
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn floats(token: IsaToken, steps: usize) -> usize {
    // SAFETY: portable code needs no instruction set.
    unsafe {
        match token.isa() {
            Isa::AmxEmulated => tiles::<Emulated, true>(steps / 1000),
            _ => float::<Scalar, CHAINS>(steps),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Serial;

    #[test]
    fn all_words_are_read() {
        let words: Vec<u64> = (0..8 * 48).collect();
        for isa in Isa::runnable() {
            let token = isa.token().unwrap();
            for streams in [1, 2, 4, 8, 16] {
                assert_eq!(read(token, &words, streams), words.iter().sum::<u64>(), "{isa:?}");
            }
            assert!(dot_limit(token, 1, &Serial) > 0.0 && float_limit(token, 1, &Serial) > 0.0);
            assert!(read_limit(token, &words, 1, &Serial).bytes_per_second > 0.0);
        }
    }
}
