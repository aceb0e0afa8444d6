//! Instruction sets, found once, and tokens that prove them.
//!
//! `QUANT_ISA` forces a path: `scalar`, on x86-64 `avx2`, `avxvnni`, `avx512vnni`, `avx512bf16`, on AArch64 `neon`,
//! `neondot`, `neoni8mm`, or `f32`, the widest that rounds no float to bf16; blanks around a name and capitals do not
//! matter. A name that is none, or that the processor lacks, is an error of [`Isa::detect_checked`], which a program
//! should ask when it starts. [`Isa::detect`] cannot fail, and never takes a slow path for a slip of the pen: of what the
//! processor lacks it takes the widest that is not wider, and for what is no name the widest there is.

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

    /// The widest that this processor has, or the one that `QUANT_ISA` names; found once. What
    /// [`detect_checked`](Self::detect_checked) refuses gives the widest, or of the paths of a name that the
    /// processor lacks the widest that is not wider.
    pub fn detect() -> Self {
        *FOUND.as_ref().unwrap_or_else(|(instead, _)| instead)
    }

    /// The same, for programs that tell a wrong `QUANT_ISA` when they start.
    ///
    /// # Errors
    /// [`KernelError::IsaName`] when `QUANT_ISA` names a path that is none, or that this processor lacks.
    pub fn detect_checked() -> Result<Self, KernelError> {
        FOUND.as_ref().copied().map_err(|(_, error)| error.clone())
    }

    /// What a value of `QUANT_ISA` means here; if it cannot be had, what is taken instead, and the error.
    fn named(value: &str) -> Result<Self, (Self, KernelError)> {
        let name = value.trim();
        let widest = |most: Self| Self::available().filter(|isa| *isa <= most).last().unwrap_or(Self::Scalar);
        let Some(last) = Self::available().last().filter(|_| !name.is_empty()) else {
            return Ok(widest(Self::NeonI8mm));
        };
        if name.eq_ignore_ascii_case("f32") {
            let exact = Self::available().filter(|isa| *isa != Self::Avx512Bf16);
            return Ok(exact.last().unwrap_or(Self::Scalar));
        }
        match Self::ALL.into_iter().find(|isa| name.eq_ignore_ascii_case(isa.name())) {
            Some(isa) if isa.is_available() => Ok(isa),
            found => {
                let names: Vec<_> = Self::available().map(Self::name).collect();
                let (value, known) = (name.to_owned(), names.join(", "));
                // Another kind of processor's name says nothing about this one's.
                let instead = found.map_or(last, widest);
                let instead = if instead == Self::Scalar { last } else { instead };
                Err((instead, KernelError::IsaName { value, known }))
            }
        }
    }

    /// Proof that the processor has it.
    ///
    /// # Errors
    /// [`KernelError::Isa`] when it has not.
    pub fn token(self) -> Result<IsaToken, KernelError> {
        if self.is_available() { Ok(IsaToken(self)) } else { Err(KernelError::Isa(self.name())) }
    }
}

/// What `QUANT_ISA` says.
static FOUND: LazyLock<Result<Isa, (Isa, KernelError)>> = LazyLock::new(|| {
    let value = std::env::var_os("QUANT_ISA").unwrap_or_default();
    Isa::named(&value.to_string_lossy())
});

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
        // A run that is to force a path must not take another.
        assert_eq!(Isa::detect_checked(), Ok(Isa::detect()));
        if let Ok(expected) = std::env::var("QUANT_EXPECTED_ISAS") {
            assert_eq!(names.join(","), expected);
        }
    }

    #[test]
    fn names_are_taken_as_people_write_them() {
        let widest = Isa::available().last().unwrap();
        for isa in Isa::available() {
            for name in [isa.name().to_owned(), format!(" {}\n", isa.name()), isa.name().to_uppercase()] {
                assert_eq!(Isa::named(&name), Ok(isa));
            }
        }
        assert_eq!([Isa::named(""), Isa::named("  ")], [Ok(widest), Ok(widest)]);
        assert_ne!(Isa::named("F32"), Ok(Isa::Avx512Bf16));
        assert!(Isa::named("f32").is_ok_and(|isa| widest == Isa::Scalar || isa != Isa::Scalar));
    }

    /// What cannot be had is told, and nothing slow is taken for it.
    #[test]
    fn other_names_are_errors() {
        let widest = Isa::available().last().unwrap();
        for name in ["avx512", "avx-2", "auto", "no", "\u{fffd}"] {
            let (instead, error) = Isa::named(name).unwrap_err();
            assert_eq!((instead, error.code()), (widest, 6));
            let text = error.to_string();
            assert!(
                text.contains("QUANT_ISA") && text.contains(name) && text.contains(widest.name()),
                "{text}"
            );
            assert!(text.contains("f32") && text.contains("scalar"), "{text}");
        }
        for isa in Isa::ALL.into_iter().filter(|isa| !isa.is_available()) {
            let (instead, error) = Isa::named(isa.name()).unwrap_err();
            assert!(instead.is_available() && (instead <= isa || instead == widest), "{isa:?}");
            assert!(instead != Isa::Scalar || widest == Isa::Scalar);
            assert!(error.to_string().contains(isa.name()));
        }
    }
}
