//! Instruction sets, detected once, and tokens that prove that the processor has them.
//!
//! `QUANT_ISA` forces a path: `scalar`; on x86-64 `avx2`, `avxvnni`, `avx512vnni`, `avx512bf16` or `amx`; on AArch64
//! `neon`, `neondot` or `neoni8mm`; on any processor `amxemulated`, or `f32` for the widest path that does not split
//! floats into bf16. Surrounding whitespace and case are ignored. For an unknown name, or a path that the processor
//! lacks, [`Isa::detect_checked`] returns an error; a program should call it when it starts. [`Isa::detect`] then
//! returns a path that the processor has.
//!
//! The default is the fastest path of the processor: the widest, unless the table in `preference` says otherwise.

#[cfg(target_arch = "x86_64")]
mod amx;
mod preference;

#[cfg(target_arch = "aarch64")]
use std::arch::is_aarch64_feature_detected;
use std::sync::LazyLock;

use crate::KernelError;

/// A path through the kernels. Products are bit-identical on all paths, except products with floats on paths that
/// [split them into bf16](Self::splits_floats).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Isa {
    /// Portable code. The other paths are tested against it.
    Scalar,
    /// AVX2, FMA and F16C: products added in pairs in 16 bits (`vpmaddubsw`).
    Avx2,
    /// AVX2 with `vpdpbusd` on 256 bits.
    AvxVnni,
    /// AVX-512 F, BW, VL and VNNI: `vpdpbusd` on 512 bits.
    Avx512Vnni,
    /// AVX-512 with BF16: `vdpbf16ps` for float activations.
    Avx512Bf16,
    /// AVX-512 with BF16 and AMX: products of tiles of 8-bit integers and of bf16. Linux only, and only if the system
    /// permits this process to use tiles.
    Amx,
    /// AArch64's Advanced SIMD: products in 16 bits, added in pairs.
    Neon,
    /// Advanced SIMD with `sdot` (dotprod).
    NeonDotprod,
    /// Advanced SIMD with `usdot` (i8mm).
    NeonI8mm,
    /// [`Amx`](Self::Amx) with a bit-exact emulation of the tile unit in portable code, for tests on any processor. It
    /// is slow, and used only if it is named explicitly.
    AmxEmulated,
}

impl Isa {
    /// All paths except the emulated one, from the narrowest to the widest for each architecture.
    pub const ALL: [Self; 9] = [
        Self::Scalar,
        Self::Avx2,
        Self::AvxVnni,
        Self::Avx512Vnni,
        Self::Avx512Bf16,
        Self::Amx,
        Self::Neon,
        Self::NeonDotprod,
        Self::NeonI8mm,
    ];

    /// The name in `QUANT_ISA`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::AvxVnni => "avxvnni",
            Self::Avx512Vnni => "avx512vnni",
            Self::Avx512Bf16 => "avx512bf16",
            Self::Amx => "amx",
            Self::Neon => "neon",
            Self::NeonDotprod => "neondot",
            Self::NeonI8mm => "neoni8mm",
            Self::AmxEmulated => "amxemulated",
        }
    }

    /// Whether this processor has the path and the system permits it. The emulated path is always available.
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar | Self::AmxEmulated => true,
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
            #[cfg(target_arch = "x86_64")]
            Self::Amx => Self::Avx512Bf16.is_available() && amx::is_usable(),
            // Vector loads assume little-endian memory.
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Self::Neon => is_aarch64_feature_detected!("neon"),
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Self::NeonDotprod => Self::Neon.is_available() && is_aarch64_feature_detected!("dotprod"),
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Self::NeonI8mm => Self::NeonDotprod.is_available() && is_aarch64_feature_detected!("i8mm"),
            #[allow(unreachable_patterns, reason = "there may be none left")]
            _ => false,
        }
    }

    /// All paths that this processor has, the narrowest first, without the emulated one.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// The available paths and the emulated one. For tests of linear layers; other kernels run portable code on the
    /// emulated path.
    pub fn runnable() -> impl Iterator<Item = Self> {
        Self::available().chain([Self::AmxEmulated])
    }

    /// Whether the path splits float activations into several bf16. Its float products differ from those of other
    /// paths, within the documented bound.
    pub fn splits_floats(self) -> bool {
        matches!(self, Self::Avx512Bf16 | Self::Amx | Self::AmxEmulated)
    }

    /// The path that is used if `QUANT_ISA` is not set: the fastest one known for this processor.
    pub fn fastest() -> Self {
        preference::fastest()
    }

    /// Returns the path that `QUANT_ISA` names, or the fastest path of this processor if it is not set; detected once.
    /// If [`detect_checked`](Self::detect_checked) would fail, returns the fastest path instead of an unknown one.
    /// Instead of a path that this processor lacks, it returns the widest narrower one, or the fastest if only the
    /// scalar path is narrower.
    pub fn detect() -> Self {
        *FOUND.as_ref().unwrap_or_else(|(instead, _)| instead)
    }

    /// Returns the path of [`detect`](Self::detect), or an error for an invalid `QUANT_ISA`, for programs that check it
    /// when they start.
    ///
    /// # Errors
    /// [`KernelError::IsaName`] when `QUANT_ISA` is an unknown name, or names a path that this processor lacks.
    pub fn detect_checked() -> Result<Self, KernelError> {
        FOUND.as_ref().copied().map_err(|(_, error)| error.clone())
    }

    /// Whether dense bf16 products may use `vdpbf16ps`: the processor must have the instruction. If `QUANT_ISA` names a
    /// path, it must be that of the instruction, otherwise the instruction must not be known to be slow.
    pub(crate) fn dense_bf16() -> bool {
        let unnamed =
            std::env::var_os("QUANT_ISA").is_none_or(|name| name.to_string_lossy().trim().is_empty());
        let chosen = match unnamed {
            true => !preference::is_slow(Self::Avx512Bf16),
            false => Self::detect() == Self::Avx512Bf16,
        };
        chosen && Self::Avx512Bf16.is_available()
    }

    fn named(value: &str) -> Result<Self, (Self, KernelError)> {
        let name = value.trim();
        let fastest = preference::fastest();
        if name.is_empty() {
            return Ok(fastest);
        }
        if name.eq_ignore_ascii_case("f32") {
            let exact = Self::available().filter(|isa| !isa.splits_floats());
            return Ok(exact.last().unwrap_or(Self::Scalar));
        }
        let found = Self::ALL.into_iter().chain([Self::AmxEmulated]);
        match found.into_iter().find(|isa| name.eq_ignore_ascii_case(isa.name())) {
            Some(isa) if isa.is_available() => Ok(isa),
            found => {
                let names: Vec<_> = Self::available().map(Self::name).collect();
                let (value, known) = (name.to_owned(), names.join(", "));
                let narrower = |max: Self| Self::available().filter(|isa| *isa <= max).last();
                // On AArch64, only the portable path is narrower than a path of x86-64; use the fastest instead.
                let instead = found.and_then(narrower).filter(|isa| *isa != Self::Scalar).unwrap_or(fastest);
                Err((instead, KernelError::IsaName { value, known }))
            }
        }
    }

    /// Returns an [`IsaToken`], the proof that the processor has this path.
    ///
    /// # Errors
    /// [`KernelError::Isa`] when it is not available.
    pub fn token(self) -> Result<IsaToken, KernelError> {
        if self.is_available() { Ok(IsaToken(self)) } else { Err(KernelError::Isa(self.name())) }
    }
}

static FOUND: LazyLock<Result<Isa, (Isa, KernelError)>> = LazyLock::new(|| {
    let value = std::env::var_os("QUANT_ISA").unwrap_or_default();
    Isa::named(&value.to_string_lossy())
});

/// A token that proves that the processor has an instruction set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IsaToken(Isa);

impl IsaToken {
    /// Returns the token for the path of [`Isa::detect`].
    pub fn detect() -> Self {
        Self(Isa::detect())
    }

    /// The path.
    pub fn isa(self) -> Isa {
        self.0
    }

    /// Whether linear layers can run on a tile unit, real or emulated.
    pub(crate) fn has_tiles(self) -> bool {
        matches!(self.0, Isa::Amx | Isa::AmxEmulated)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tests skip paths that a processor lacks; `QUANT_EXPECTED_ISAS` lists the paths that must be available.
    #[test]
    fn expected_paths_are_there() {
        let names: Vec<_> = Isa::available().map(Isa::name).collect();
        assert!(names.contains(&"scalar") && Isa::detect().is_available());
        assert_eq!(Isa::detect_checked(), Ok(Isa::detect()));
        if let Ok(expected) = std::env::var("QUANT_EXPECTED_ISAS") {
            assert_eq!(names.join(","), expected);
        }
    }

    #[test]
    fn names_are_taken_as_people_write_them() {
        let fastest = preference::fastest();
        for isa in Isa::runnable() {
            for name in [isa.name().to_owned(), format!(" {}\n", isa.name()), isa.name().to_uppercase()] {
                assert_eq!(Isa::named(&name), Ok(isa));
            }
        }
        assert_eq!([Isa::named(""), Isa::named("  ")], [Ok(fastest), Ok(fastest)]);
        assert!(Isa::named("F32").is_ok_and(|isa| !isa.splits_floats()));
        assert!(Isa::named("f32").is_ok_and(|isa| fastest == Isa::Scalar || isa != Isa::Scalar));
    }

    /// Unknown names and unavailable paths are reported, and never replaced by the slow portable path.
    #[test]
    fn other_names_are_errors() {
        let fastest = preference::fastest();
        for name in ["avx512", "avx-2", "auto", "no", "\u{fffd}"] {
            let (instead, error) = Isa::named(name).unwrap_err();
            assert_eq!((instead, error.code()), (fastest, 6));
            let text = error.to_string();
            assert!(
                text.contains("QUANT_ISA") && text.contains(name) && text.contains(fastest.name()),
                "{text}"
            );
            assert!(text.contains("f32") && text.contains("scalar"), "{text}");
        }
        for isa in Isa::ALL.into_iter().filter(|isa| !isa.is_available()) {
            let (instead, error) = Isa::named(isa.name()).unwrap_err();
            assert!(instead.is_available() && (instead <= isa || instead == fastest), "{isa:?}");
            assert!(instead != Isa::Scalar || fastest == Isa::Scalar);
            assert!(error.to_string().contains(isa.name()));
        }
    }
}
