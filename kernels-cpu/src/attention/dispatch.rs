//! Selects the kernel for an instruction set.

#[cfg(target_arch = "aarch64")]
use self::arm::{neon, neon_join, neondot, neondot_join, neoni8mm, neoni8mm_join};
#[cfg(target_arch = "x86_64")]
use self::x86::{
    avx2, avx2_join, avx512bf16, avx512bf16_join, avx512vnni, avx512vnni_join, avxvnni, avxvnni_join,
};
use super::kernel::{self, Mass, TILE_ROWS, Tile};
use crate::simd::scalar::Scalar;
use crate::{Isa, IsaToken};

type AttendFn = unsafe fn(&Tile<'_>) -> [Mass; TILE_ROWS];
type JoinFn = unsafe fn(usize, *mut f32, Mass, *const f32, Mass) -> Mass;

/// The kernels of an instruction set for a code width.
#[derive(Clone, Copy)]
pub(super) struct Path {
    /// Indexed by the number of rows of a tile minus one.
    pub(super) attend: [AttendFn; TILE_ROWS],
    pub(super) join: JoinFn,
}

impl Path {
    pub(super) fn of(token: IsaToken, bits: usize) -> Self {
        match bits {
            4 => Self::choose::<4>(token.isa()),
            8 => Self::choose::<8>(token.isa()),
            _ => Self::choose::<16>(token.isa()),
        }
    }

    fn choose<const BITS: usize>(isa: Isa) -> Self {
        macro_rules! path {
            ($attend:ident, $join:ident) => {
                Self {
                    attend: [$attend::<BITS, 1>, $attend::<BITS, 2>, $attend::<BITS, 3>, $attend::<BITS, 4>],
                    join: $join,
                }
            };
        }
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => path!(avx2, avx2_join),
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => path!(avxvnni, avxvnni_join),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => path!(avx512vnni, avx512vnni_join),
            // Attention does not use the tile unit, and this path is faster here than the bf16 path.
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => path!(avx512vnni, avx512vnni_join),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => path!(avx512bf16, avx512bf16_join),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => path!(neon, neon_join),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDotprod => path!(neondot, neondot_join),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm => path!(neoni8mm, neoni8mm_join),
            _ => path!(scalar, scalar_join),
        }
    }
}

macro_rules! compiled {
    ($attend:ident, $join:ident, $lanes:ty $(, $features:literal)?) => {
        /// # Safety
        /// See [`kernel::attend`].
        $(#[target_feature(enable = $features)])?
        pub(super) unsafe fn $attend<const BITS: usize, const MR: usize>(t: &Tile<'_>) -> [Mass; TILE_ROWS] {
            // SAFETY: compiled with the features that the lanes require; the caller guarantees these and the contract
            // of `attend`.
            unsafe { kernel::attend::<$lanes, BITS, MR>(t) }
        }

        /// # Safety
        /// See [`kernel::join`].
        $(#[target_feature(enable = $features)])?
        pub(super) unsafe fn $join(d: usize, out: *mut f32, mass: Mass, part: *const f32, other: Mass) -> Mass {
            // SAFETY: compiled with the features that the lanes require; the caller guarantees these and the contract
            // of `join`.
            unsafe { kernel::join::<$lanes>(d, out, mass, part, other) }
        }
    };
}

compiled!(scalar, scalar_join, Scalar);

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use crate::simd::{avx2::Avx2, avx2::AvxVnni, avx512::Avx512Bf16, avx512::Avx512Vnni};

    compiled!(avx2, avx2_join, Avx2, "avx2,fma,f16c");
    compiled!(avxvnni, avxvnni_join, AvxVnni, "avx2,fma,f16c,avxvnni");
    compiled!(avx512vnni, avx512vnni_join, Avx512Vnni, "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni");
    compiled!(
        avx512bf16,
        avx512bf16_join,
        Avx512Bf16,
        "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16"
    );
}

#[cfg(target_arch = "aarch64")]
mod arm {
    use super::*;
    use crate::simd::neon::{Neon, NeonDotprod, NeonI8mm};

    compiled!(neon, neon_join, Neon, "neon");
    compiled!(neondot, neondot_join, NeonDotprod, "neon,dotprod");
    compiled!(neoni8mm, neoni8mm_join, NeonI8mm, "neon,dotprod,i8mm");
}
