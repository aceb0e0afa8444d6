//! Which tile an instruction set uses for how many rows.

#[cfg(target_arch = "aarch64")]
use self::arm::{neon_tile, neondot_tile, neoni8mm_tile};
#[cfg(target_arch = "x86_64")]
use self::x86::{avx2_tile, avx512bf16_tile, avx512vnni_tile, avxvnni_tile};
use super::tile::Tile;
use super::{float_tile, tile};
use crate::simd::scalar::Scalar;
use crate::{Isa, IsaToken};

/// Rows of a strip of activations, and of the highest tile.
pub(crate) const MAX_ROWS: usize = 12;

type TileFn = unsafe fn(&Tile<'_>);

/// An instruction set, a width of codes, and what activations are.
#[derive(Clone, Copy)]
pub(super) struct Path {
    isa: Isa,
    bits: usize,
    float: bool,
}

impl Path {
    pub(super) fn of(token: IsaToken, bits: usize, float: bool) -> Self {
        Self { isa: token.isa(), bits, float }
    }

    /// How many of so many rows a tile takes.
    pub(super) fn rows(self, left: usize) -> usize {
        match self.isa {
            Isa::Scalar => left.min(2),
            // Sixteen registers hold the sums of four rows, two each, and what they are made of.
            Isa::Avx2 | Isa::AvxVnni if left > 4 => left.div_ceil(left.div_ceil(4)),
            // Thirty-two hold the sums of four rows, four each, and a step of codes.
            Isa::Neon | Isa::NeonDotprod | Isa::NeonI8mm if left > 4 => left.div_ceil(left.div_ceil(4)),
            _ => left,
        }
    }

    /// How many panels a tile of so many rows takes, where there are as many left; else it takes one.
    pub(super) fn panels(self, rows: usize) -> usize {
        match (self.isa, rows) {
            (Isa::Avx2 | Isa::AvxVnni, 1 | 2) => 2,
            (Isa::Neon | Isa::NeonDotprod | Isa::NeonI8mm, 1) => 2,
            (Isa::Neon | Isa::NeonDotprod | Isa::NeonI8mm, _) => 1,
            (Isa::Scalar | Isa::Avx2 | Isa::AvxVnni, _) => 1,
            // Few rows wait for memory: four panels are four streams. Many fill the registers.
            (Isa::Avx512Vnni | Isa::Avx512Bf16, ..=4) => 4,
            (Isa::Avx512Vnni | Isa::Avx512Bf16, _) => 2,
        }
    }

    /// The tile of these rows and panels.
    pub(super) fn tile(self, rows: usize, panels: usize) -> TileFn {
        match (self.bits, self.float) {
            (4, false) => self.choose::<4, false>(rows, panels),
            (4, true) => self.choose::<4, true>(rows, panels),
            (_, false) => self.choose::<8, false>(rows, panels),
            (_, true) => self.choose::<8, true>(rows, panels),
        }
    }

    fn choose<const BITS: usize, const FLOAT: bool>(self, rows: usize, panels: usize) -> TileFn {
        macro_rules! tiles {
            ($tile:ident, [$($panels:literal)*], $of:tt) => { $(tiles!(@ $tile, $panels, $of);)* };
            (@ $tile:ident, $panels:literal, [$($rows:literal)*]) => {
                match (rows, panels) {
                    $(($rows, $panels) => return $tile::<BITS, FLOAT, $rows, $panels>,)*
                    _ => {}
                }
            };
        }
        #[cfg(target_arch = "aarch64")]
        macro_rules! tiles_of_neon {
            ($tile:ident) => {{
                tiles!($tile, [1 2], [1]);
                tiles!($tile, [1], [2 3 4]);
            }};
        }
        match self.isa {
            Isa::Scalar => {}
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                tiles!(avx2_tile, [1 2], [1 2]);
                tiles!(avx2_tile, [1], [3 4]);
            }
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => {
                tiles!(avxvnni_tile, [1 2], [1 2]);
                tiles!(avxvnni_tile, [1], [3 4]);
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 if FLOAT => {
                tiles!(avx512bf16_tile, [1 4], [1 2 3 4]);
                tiles!(avx512bf16_tile, [1 2], [5 6 7 8 9 10 11 12]);
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni | Isa::Avx512Bf16 => {
                tiles!(avx512vnni_tile, [1 4], [1 2 3 4]);
                tiles!(avx512vnni_tile, [1 2], [5 6 7 8 9 10 11 12]);
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => tiles_of_neon!(neon_tile),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDotprod => tiles_of_neon!(neondot_tile),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm => tiles_of_neon!(neoni8mm_tile),
            // Of another kind of processor.
            _ => {}
        }
        // Only the portable path is left: `rows` and `panels` give every other a tile of its own.
        debug_assert!(self.isa == Isa::Scalar && rows <= 2 && panels == 1);
        if rows == 1 { scalar::<BITS, FLOAT, 1, 1> } else { scalar::<BITS, FLOAT, 2, 1> }
    }
}

macro_rules! compiled {
    ($name:ident, $lanes:ty $(, $features:literal)?) => {
        /// # Safety
        /// As [`multiply`](tile::multiply).
        $(#[target_feature(enable = $features)])?
        pub(super) unsafe fn $name<const BITS: usize, const FLOAT: bool, const MR: usize, const NP: usize>(t: &Tile<'_>) {
            // SAFETY: compiled for the instructions that the lanes ask for; the caller vouches for the rest.
            unsafe {
                if FLOAT {
                    float_tile::multiply::<$lanes, BITS, MR, NP>(t);
                } else {
                    tile::multiply::<$lanes, BITS, MR, NP>(t);
                }
            }
        }
    };
}

compiled!(scalar, Scalar);

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use crate::simd::{avx2, avx512};

    compiled!(avx2_tile, avx2::Avx2, "avx2,fma,f16c");
    compiled!(avxvnni_tile, avx2::AvxVnni, "avx2,fma,f16c,avxvnni");
    compiled!(avx512vnni_tile, avx512::Avx512Vnni, "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni");
    compiled!(
        avx512bf16_tile,
        avx512::Avx512Bf16,
        "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16"
    );
}

#[cfg(target_arch = "aarch64")]
mod arm {
    use super::*;
    use crate::simd::neon::{Neon, NeonDotprod, NeonI8mm};

    compiled!(neon_tile, Neon, "neon");
    compiled!(neondot_tile, NeonDotprod, "neon,dotprod");
    compiled!(neoni8mm_tile, NeonI8mm, "neon,dotprod,i8mm");
}
