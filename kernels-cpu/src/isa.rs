//! Instruction sets, found once, and tokens that prove them.
//!
//! `QUANT_ISA` forces a path: `scalar`, on x86-64 `avx2`, `avxvnni`, `avx512vnni`, `avx512bf16`, on AArch64 `neon`,
//! `neondot`, `neoni8mm`, or `f32`, the widest that rounds no float to bf16. A name that the processor lacks, or that
//! is none, takes the portable path.

#[cfg(target_arch = "aarch64")]
use std::arch::is_aarch64_feature_detected;
use std::sync::LazyLock;

use crate::KernelError;

/// A path through the kernels. Whole numbers give the same bits on all; floats do on all but `avx512bf16`, which
/// splits them into two bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Isa {
    /// Portable code, the definition of every result.
    Scalar,
    /// AVX2, FMA and F16C: pair sums in 16 bits (`vpmaddubsw`).
    Avx2,
    /// The same with `vpdpbusd` on 256 bits.
    AvxVnni,
    /// AVX-512 F, BW, VL and VNNI: `vpdpbusd` on 512 bits.
    Avx512Vnni,
    /// The same and BF16: `vdpbf16ps` for float activations.
    Avx512Bf16,
    /// AArch64's Advanced SIMD: products in 16 bits, added in pairs.
    Neon,
    /// The same with `sdot` (dotprod).
    NeonDotprod,
    /// The same with `usdot` (i8mm).
    NeonI8mm,
}

impl Isa {
    /// From the plainest to the widest of each kind of processor.
    pub const ALL: [Self; 8] = [
        Self::Scalar,
        Self::Avx2,
        Self::AvxVnni,
        Self::Avx512Vnni,
        Self::Avx512Bf16,
        Self::Neon,
        Self::NeonDotprod,
        Self::NeonI8mm,
    ];

    /// Its name, as `QUANT_ISA` takes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::AvxVnni => "avxvnni",
            Self::Avx512Vnni => "avx512vnni",
            Self::Avx512Bf16 => "avx512bf16",
            Self::Neon => "neon",
            Self::NeonDotprod => "neondot",
            Self::NeonI8mm => "neoni8mm",
        }
    }

    /// Whether this processor has it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => Self::Avx2.is_available() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => Self::Avx512Vnni.is_available() && is_x86_feature_detected!("avx512bf16"),
            // Vectors are read as memory has them.
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Self::Neon => is_aarch64_feature_detected!("neon"),
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Self::NeonDotprod => Self::Neon.is_available() && is_aarch64_feature_detected!("dotprod"),
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Self::NeonI8mm => Self::NeonDotprod.is_available() && is_aarch64_feature_detected!("i8mm"),
            // Of another kind of processor.
            #[allow(unreachable_patterns, reason = "there may be none left")]
            _ => false,
        }
    }

    /// All that this processor has.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// The widest that this processor has, or the one that `QUANT_ISA` names; found once.
    pub fn detect() -> Self {
        static FOUND: LazyLock<Isa> = LazyLock::new(|| {
            let widest = Isa::available().last().unwrap_or(Isa::Scalar);
            match std::env::var_os("QUANT_ISA").filter(|name| !name.is_empty()) {
                None => widest,
                Some(name) if name == "f32" => {
                    Isa::available().filter(|isa| *isa != Isa::Avx512Bf16).last().unwrap_or(Isa::Scalar)
                }
                Some(name) => Isa::available().find(|isa| name == isa.name()).unwrap_or(Isa::Scalar),
            }
        });
        *FOUND
    }

    /// Proof that the processor has it.
    ///
    /// # Errors
    /// [`KernelError::Isa`] when it has not.
    pub fn token(self) -> Result<IsaToken, KernelError> {
        if self.is_available() { Ok(IsaToken(self)) } else { Err(KernelError::Isa(self.name())) }
    }
}

/// Proof that the processor has an instruction set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IsaToken(Isa);

impl IsaToken {
    /// That of [`Isa::detect`].
    pub fn detect() -> Self {
        Self(Isa::detect())
    }

    /// Which.
    pub fn isa(self) -> Isa {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Paths that a processor lacks are not tested on it; `QUANT_EXPECTED_ISAS` says that these must be there.
    #[test]
    fn expected_paths_are_there() {
        let names: Vec<_> = Isa::available().map(Isa::name).collect();
        assert!(names.contains(&"scalar") && Isa::detect().is_available());
        if let Ok(expected) = std::env::var("QUANT_EXPECTED_ISAS") {
            assert_eq!(names.join(","), expected);
        }
    }
}
