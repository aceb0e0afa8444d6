//! Selects the fastest path of a processor.
//!
//! Usually it is the widest. The table [`SLOW_PATHS`] lists processors on which an instruction exists but is slow;
//! `quant bench kernels` warns if a row is wrong. Only the default path depends on this: `QUANT_ISA` and
//! [`Isa::token`](super::Isa::token) accept any path that the processor has.

use super::Isa;

#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "there is a row for x86-64 only"))]
struct SlowPath {
    /// The vendor as CPUID spells it.
    vendor: &'static str,
    /// Whether this processor is affected. Checks features instead of family and model, for which virtual machines may
    /// report arbitrary numbers.
    applies: fn() -> bool,
    /// The path that is not used by default.
    slow: Isa,
}

#[cfg(target_arch = "x86_64")]
const SLOW_PATHS: [SlowPath; 1] = [
    // Intel's server cores since Sapphire Rapids, identified by AVX512-FP16: `vdpbf16ps` on 512 bits reaches half the
    // operations per second of f32 FMA (benchmarks/record/kernels, 2026-11-24). If tiles are available they are
    // preferred to both.
    SlowPath {
        vendor: "GenuineIntel",
        applies: || is_x86_feature_detected!("avx512fp16"),
        slow: Isa::Avx512Bf16,
    },
    // There is no row for AMD, whose `vdpbf16ps` reaches twice the operations per second of f32 FMA
    // (benchmarks/record/kernels, 2026-11-23), nor for Intel's Cooper Lake, which was not measured.
];
#[cfg(not(target_arch = "x86_64"))]
const SLOW_PATHS: [SlowPath; 0] = [];

pub(super) fn fastest() -> Isa {
    Isa::available().filter(|&isa| !is_slow(isa)).last().unwrap_or(Isa::Scalar)
}

/// Whether the table lists this path for the processor.
pub(super) fn is_slow(isa: Isa) -> bool {
    let vendor = vendor();
    SLOW_PATHS.iter().any(|k| k.slow == isa && k.vendor.as_bytes() == vendor && (k.applies)())
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, unused_unsafe, reason = "CPUID is unsafe to call before Rust 1.94")]
fn vendor() -> [u8; 12] {
    // SAFETY: every x86-64 processor has CPUID and its leaf 0.
    let leaf = unsafe { core::arch::x86_64::__cpuid(0) };
    let mut name = [0; 12];
    for (part, word) in name.chunks_exact_mut(4).zip([leaf.ebx, leaf.edx, leaf.ecx]) {
        part.copy_from_slice(&word.to_le_bytes());
    }
    name
}

#[cfg(not(target_arch = "x86_64"))]
fn vendor() -> [u8; 12] {
    [0; 12]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_path_is_available_and_not_known_to_be_slow() {
        let fastest = fastest();
        assert!(fastest.is_available());
        let widest = Isa::available().last().unwrap();
        assert!(fastest == widest || SLOW_PATHS.iter().any(|k| k.slow == widest), "{fastest:?} {widest:?}");
        #[cfg(target_arch = "x86_64")]
        if vendor() == *b"GenuineIntel" && is_x86_feature_detected!("avx512fp16") {
            assert_ne!(fastest, Isa::Avx512Bf16);
        }
    }
}
