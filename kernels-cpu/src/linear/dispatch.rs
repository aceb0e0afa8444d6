//! Selects the tile for an instruction set and a number of rows.

use core::ops::Range;

#[cfg(target_arch = "aarch64")]
use self::arm::{neon_tile, neondot_tile, neoni8mm_tile};
#[cfg(target_arch = "x86_64")]
use self::x86::{avx2_tile, avx512bf16_tile, avx512vnni_tile, avxvnni_tile};
#[cfg(target_arch = "x86_64")]
use super::expanded::{self, ExpandFn, FinishFn, Functions};
use super::tile::Tile;
use super::tiled::{self, BF16, SIGNED, Steps, Tiled, UNSIGNED};
use super::{float_tile, super_tile, tile};
use crate::layout::ScaleType;
use crate::simd::scalar::Scalar;
use crate::simd::tiles::emulated::Emulated;
use crate::simd::{FloatLanes, codes};
use crate::{FloatFormat, Isa, IsaToken, Layout};

/// Maximum number of rows per strip, if there are several strips.
pub(crate) const MAX_ROWS: usize = 12;

/// Up to this many rows form one strip: memory bandwidth limits such products, so they should read the weights only
/// once.
pub(crate) const ONE_STRIP: usize = 16;

/// Maximum number of strips for which weights are converted once, see [`Path::expands`].
pub(super) const EXPANDED_STRIPS: usize = 16;

// Kinds of tiles. With integer activations: a symmetric 4-bit grid or E2M1 codes; any other grid; progressive weights;
// super-blocks. `FLOAT` is for float activations and any weights.
const CENTRED: usize = 0;
const ZEROS: usize = 1;
pub(super) const PROGRESSIVE: usize = 2;
pub(super) const FLOAT: usize = 3;
const SUPER: usize = 4;

type TileFn = unsafe fn(&Tile<'_>);
#[cfg(target_arch = "x86_64")]
type ProductFn = unsafe fn(&expanded::Product<'_>);
type TiledFn = unsafe fn(&Tiled<'_>, Range<usize>, Range<usize>);

/// An instruction set, a code format, and a kind of tile.
#[derive(Clone, Copy)]
pub(crate) struct Path {
    isa: Isa,
    codes: usize,
    kind: usize,
}

fn codes_of(layout: &Layout) -> usize {
    match layout.float_format() {
        None if layout.is_bf16() => codes::BF16,
        None => layout.code_bits(),
        Some(FloatFormat::E2m1) => codes::E2M1,
        Some(FloatFormat::Iq4) => codes::IQ4,
        Some(FloatFormat::E4m3) => codes::E4M3,
    }
}

impl Path {
    pub(crate) fn whole(token: IsaToken, layout: &Layout, zero: i32) -> Self {
        let kind = match layout.zero_point() {
            _ if layout.scales() == ScaleType::Progressive => PROGRESSIVE,
            _ if layout.is_super() => SUPER,
            _ if layout.float_format() == Some(FloatFormat::Iq4) => ZEROS,
            _ if layout.float_format().is_some() => CENTRED,
            Some(tile::CENTRE) if zero == 0 => CENTRED,
            _ => ZEROS,
        };
        Self { isa: token.isa(), codes: codes_of(layout), kind }
    }

    pub(crate) fn float(token: IsaToken, layout: &Layout) -> Self {
        Self { isa: token.isa(), codes: codes_of(layout), kind: FLOAT }
    }

    /// The functions of the tile unit and their helper steps, if the path uses one.
    pub(super) fn tiled(self) -> Option<(TiledFn, Steps)> {
        match (self.codes, self.kind) {
            // Rows for super-blocks and IQ4 are not stored in tiles.
            (_, SUPER) | (5 | 6 | codes::IQ4, _) => None,
            (codes::E2M1, FLOAT) => self.choose_tiled::<{ codes::E2M1 }, FLOAT, BF16>(),
            (codes::E2M1, _) => self.choose_tiled::<{ codes::E2M1 }, ZEROS, SIGNED>(),
            (codes::E4M3, _) => self.choose_tiled::<{ codes::E4M3 }, FLOAT, BF16>(),
            (codes::BF16, _) => self.choose_tiled::<{ codes::BF16 }, FLOAT, BF16>(),
            (4, CENTRED | ZEROS) => self.choose_tiled::<4, ZEROS, SIGNED>(),
            (4, FLOAT) => self.choose_tiled::<4, FLOAT, BF16>(),
            (4, _) => self.choose_tiled::<4, PROGRESSIVE, SIGNED>(),
            (_, FLOAT) => self.choose_tiled::<8, FLOAT, BF16>(),
            (_, PROGRESSIVE) => self.choose_tiled::<8, PROGRESSIVE, UNSIGNED>(),
            _ => self.choose_tiled::<8, ZEROS, UNSIGNED>(),
        }
    }

    fn choose_tiled<const CODES: usize, const KIND: usize, const OF: usize>(
        self,
    ) -> Option<(TiledFn, Steps)> {
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => {
                let steps = Steps {
                    expand: x86::amx_expand::<CODES, KIND>,
                    join: x86::amx_join::<CODES, KIND>,
                    finish: x86::amx_finish::<KIND>,
                };
                Some((x86::amx_tiled::<OF>, steps))
            }
            Isa::AmxEmulated => {
                let steps = Steps {
                    expand: tiled::expand::<Emulated, CODES, KIND>,
                    join: tiled::join::<Scalar, CODES, KIND>,
                    finish: tiled::finish::<Scalar, KIND>,
                };
                Some((tiled::multiply::<Emulated, OF>, steps))
            }
            _ => None,
        }
    }

    /// Whether the weights are converted before the products, for strips of `rows` rows.
    pub(super) fn expands(self, rows: usize) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self.expanded(rows).is_some();
        #[cfg(not(target_arch = "x86_64"))]
        return {
            let _ = rows;
            false
        };
    }

    /// The functions that convert the weights before the products, if this is faster for strips of `rows` rows.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn expanded(self, rows: usize) -> Option<Functions> {
        if self.kind != FLOAT || rows <= expanded::FEW_ROWS {
            return None;
        }
        match self.codes {
            codes::E2M1 => self.choose_expanded::<{ codes::E2M1 }>(),
            codes::IQ4 => self.choose_expanded::<{ codes::IQ4 }>(),
            codes::E4M3 => self.choose_expanded::<{ codes::E4M3 }>(),
            codes::BF16 => self.choose_expanded::<{ codes::BF16 }>(),
            4 => self.choose_expanded::<4>(),
            5 => self.choose_expanded::<5>(),
            6 => self.choose_expanded::<6>(),
            _ => self.choose_expanded::<8>(),
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn choose_expanded<const CODES: usize>(self) -> Option<Functions> {
        let (expand, finish, step_bytes): (ExpandFn, [FinishFn; 2], usize) = match self.isa {
            Isa::Avx2 | Isa::AvxVnni => {
                (x86::avx2_expand::<CODES>, [x86::avx2_finish::<1>, x86::avx2_finish::<2>], 512)
            }
            Isa::Avx512Bf16 => {
                let finish: [FinishFn; 2] = [x86::avx512vnni_finish::<1>, x86::avx512vnni_finish::<2>];
                (x86::avx512bf16_expand::<CODES>, finish, 256)
            }
            Isa::Avx512Vnni | Isa::Amx => {
                let finish: [FinishFn; 2] = [x86::avx512vnni_finish::<1>, x86::avx512vnni_finish::<2>];
                (x86::avx512vnni_expand::<CODES>, finish, 512)
            }
            _ => return None,
        };
        let direct = CODES == codes::BF16 && self.isa == Isa::Avx512Bf16;
        Some(Functions { expand, finish, step_bytes, panels: self.panels(MAX_ROWS), direct })
    }

    #[cfg(target_arch = "x86_64")]
    pub(super) fn product(self, rows: usize, panels: usize, rest: bool) -> ProductFn {
        macro_rules! products {
            ($product:ident, $rest:literal, $panels:literal, [$($rows:literal)*]) => {
                match (rows, panels) {
                    $(($rows, $panels) => return x86::$product::<$rest, $rows, $panels>,)*
                    _ => {}
                }
            };
        }
        match self.isa {
            Isa::Avx2 | Isa::AvxVnni => {
                products!(avx2_product, true, 1, [3 4 5]);
                x86::avx2_product::<true, 6, 1>
            }
            Isa::Avx512Bf16 if rest => {
                products!(avx512bf16_product, true, 1, [5 6 7 8 9 10 11 12]);
                products!(avx512bf16_product, true, 2, [5 6 7 8 9 10 11]);
                x86::avx512bf16_product::<true, 12, 2>
            }
            Isa::Avx512Bf16 => {
                products!(avx512bf16_product, false, 1, [5 6 7 8 9 10 11 12]);
                products!(avx512bf16_product, false, 2, [5 6 7 8 9 10 11]);
                x86::avx512bf16_product::<false, 12, 2>
            }
            _ => {
                products!(avx512vnni_product, true, 1, [5 6 7 8 9 10 11 12]);
                products!(avx512vnni_product, true, 2, [5 6 7 8 9 10 11]);
                x86::avx512vnni_product::<true, 12, 2>
            }
        }
    }

    /// The number of rows that the next tile processes if `left` rows are left.
    pub(super) fn rows(self, left: usize) -> usize {
        match self.isa {
            Isa::Scalar | Isa::AmxEmulated => left.min(2),
            // Sixteen registers hold the sums of six rows, two each.
            Isa::Avx2 | Isa::AvxVnni if self.kind == FLOAT && left > 4 => left.div_ceil(left.div_ceil(6)),
            // Sixteen registers hold the sums of four rows, two each, and their operands.
            Isa::Avx2 | Isa::AvxVnni if left > 4 => left.div_ceil(left.div_ceil(4)),
            // Thirty-two registers hold the sums of four rows, four each, and a step of codes.
            Isa::Neon | Isa::NeonDotprod | Isa::NeonI8mm if left > 4 => left.div_ceil(left.div_ceil(4)),
            // Floats are limited by arithmetic.
            _ if self.kind == FLOAT && left > MAX_ROWS => left.div_ceil(2),
            _ => left,
        }
    }

    /// The number of panels that a tile of `rows` rows processes if enough are left; otherwise it processes one.
    pub(super) fn panels(self, rows: usize) -> usize {
        match (self.isa, rows) {
            (Isa::Avx2 | Isa::AvxVnni, 1 | 2) => 2,
            (Isa::Neon | Isa::NeonDotprod | Isa::NeonI8mm, 1) => 2,
            (Isa::Neon | Isa::NeonDotprod | Isa::NeonI8mm, _) => 1,
            (Isa::Scalar | Isa::AmxEmulated | Isa::Avx2 | Isa::AvxVnni, _) => 1,
            // With few rows the tile waits for memory, and four panels are four streams. Many rows fill the registers.
            (Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::Amx, ..=4) => 4,
            (Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::Amx, ..=MAX_ROWS) => 2,
            (Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::Amx, _) => 1,
        }
    }

    pub(super) fn tile(self, rows: usize, panels: usize) -> TileFn {
        match (self.codes, self.kind) {
            (codes::E2M1, FLOAT) => self.choose::<{ codes::E2M1 }, FLOAT>(rows, panels),
            (codes::E2M1, _) => self.choose::<{ codes::E2M1 }, CENTRED>(rows, panels),
            (codes::IQ4, FLOAT) => self.choose::<{ codes::IQ4 }, FLOAT>(rows, panels),
            (codes::IQ4, SUPER) => self.choose::<{ codes::IQ4 }, SUPER>(rows, panels),
            (codes::IQ4, _) => self.choose::<{ codes::IQ4 }, ZEROS>(rows, panels),
            // Integer activations support neither of these.
            (codes::BF16, _) => self.choose::<{ codes::BF16 }, FLOAT>(rows, panels),
            (codes::E4M3, _) => self.choose::<{ codes::E4M3 }, FLOAT>(rows, panels),
            (4, CENTRED) => self.choose::<4, CENTRED>(rows, panels),
            (4, FLOAT) => self.choose::<4, FLOAT>(rows, panels),
            (4, ZEROS) => self.choose::<4, ZEROS>(rows, panels),
            (4, SUPER) => self.choose::<4, SUPER>(rows, panels),
            (5, FLOAT) => self.choose::<5, FLOAT>(rows, panels),
            (5, _) => self.choose::<5, SUPER>(rows, panels),
            (6, FLOAT) => self.choose::<6, FLOAT>(rows, panels),
            (6, _) => self.choose::<6, SUPER>(rows, panels),
            (4, _) => self.choose::<4, PROGRESSIVE>(rows, panels),
            (_, FLOAT) => self.choose::<8, FLOAT>(rows, panels),
            (_, PROGRESSIVE) => self.choose::<8, PROGRESSIVE>(rows, panels),
            _ => self.choose::<8, ZEROS>(rows, panels),
        }
    }

    fn choose<const CODES: usize, const KIND: usize>(self, rows: usize, panels: usize) -> TileFn {
        macro_rules! tiles {
            ($tile:ident, [$($panels:literal)*], $of:tt) => { $(tiles!(@ $tile, $panels, $of);)* };
            (@ $tile:ident, $panels:literal, [$($rows:literal)*]) => {
                match (rows, panels) {
                    $(($rows, $panels) => return $tile::<CODES, KIND, $rows, $panels>,)*
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
            Isa::Scalar | Isa::AmxEmulated => {}
            // Floats are multiplied by the same instructions on both paths.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::AvxVnni if KIND == FLOAT || self.isa == Isa::Avx2 => {
                tiles!(avx2_tile, [1 2], [1 2]);
                tiles!(avx2_tile, [1], [3 4]);
            }
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => {
                tiles!(avxvnni_tile, [1 2], [1 2]);
                tiles!(avxvnni_tile, [1], [3 4]);
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 if KIND == FLOAT => {
                tiles!(avx512bf16_tile, [1 4], [1 2 3 4]);
            }
            // More rows are multiplied by weights that are converted before.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni | Isa::Amx if KIND == FLOAT => {
                tiles!(avx512vnni_tile, [1 4], [1 2 3 4]);
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::Amx => {
                tiles!(avx512vnni_tile, [1 4], [1 2 3 4]);
                tiles!(avx512vnni_tile, [1 2], [5 6 7 8 9 10 11 12]);
                tiles!(avx512vnni_tile, [1], [13 14 15 16]);
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => tiles_of_neon!(neon_tile),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDotprod => tiles_of_neon!(neondot_tile),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm => tiles_of_neon!(neoni8mm_tile),
            _ => {}
        }
        // Only the portable path is left.
        debug_assert!(matches!(self.isa, Isa::Scalar | Isa::AmxEmulated) && rows <= 2 && panels == 1);
        if rows == 1 { scalar::<CODES, KIND, 1, 1> } else { scalar::<CODES, KIND, 2, 1> }
    }
}

macro_rules! compiled {
    ($name:ident, $lanes:ty $(, $features:literal)?) => {
        /// # Safety
        /// See [`multiply`](tile::multiply).
        $(#[target_feature(enable = $features)])?
        pub(super) unsafe fn $name<const CODES: usize, const KIND: usize, const MR: usize, const NP: usize>(t: &Tile<'_>) {
            // SAFETY: compiled with the features that the lanes require; the caller guarantees these and the contract
            // of the tile.
            unsafe {
                match KIND {
                    FLOAT if <$lanes as FloatLanes>::ORDERED || t.rest => {
                        float_tile::multiply::<$lanes, CODES, true, MR, NP>(t)
                    }
                    FLOAT => float_tile::multiply::<$lanes, CODES, false, MR, NP>(t),
                    CENTRED => tile::multiply::<$lanes, CODES, true, false, MR, NP>(t),
                    ZEROS => tile::multiply::<$lanes, CODES, false, false, MR, NP>(t),
                    SUPER => super_tile::multiply::<$lanes, CODES, MR, NP>(t),
                    _ => tile::multiply::<$lanes, CODES, false, true, MR, NP>(t),
                }
            }
        }
    };
}

compiled!(scalar, Scalar);

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use crate::simd::tiles::amx::Amx;
    use crate::simd::{avx2, avx512};

    compiled!(avx2_tile, avx2::Avx2, "avx2,fma,f16c");
    compiled!(avxvnni_tile, avx2::AvxVnni, "avx2,fma,f16c,avxvnni");
    compiled!(avx512vnni_tile, avx512::Avx512Vnni, "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni");
    compiled!(
        avx512bf16_tile,
        avx512::Avx512Bf16,
        "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16"
    );

    macro_rules! expanded {
        ($lanes:ty, $expand:ident, $product:ident, $features:literal) => {
            /// # Safety
            /// See [`expanded::expand`].
            #[target_feature(enable = $features)]
            pub(super) unsafe fn $expand<const CODES: usize>(
                layout: &Layout,
                weights: *const u8,
                to: expanded::Operands,
            ) {
                // SAFETY: compiled with the features that the lanes require; the caller guarantees
                // the contract of `expanded::expand`.
                unsafe { expanded::expand::<$lanes, CODES>(layout, weights, to) }
            }
            /// # Safety
            /// See [`expanded::product`].
            #[target_feature(enable = $features)]
            pub(super) unsafe fn $product<const REST: bool, const MR: usize, const NP: usize>(
                t: &expanded::Product<'_>,
            ) {
                // SAFETY: compiled with the features that the lanes require; the caller guarantees
                // the contract of `expanded::product`.
                unsafe { expanded::product::<$lanes, REST, MR, NP>(t) }
            }
        };
        ($lanes:ty, $finish:ident, $features:literal) => {
            /// # Safety
            /// See [`expanded::finish`].
            #[target_feature(enable = $features)]
            pub(super) unsafe fn $finish<const NP: usize>(t: &Tile<'_>, totals: *const f32) {
                // SAFETY: compiled with the features that the lanes require; the caller guarantees
                // the contract of `expanded::finish`.
                unsafe { expanded::finish::<$lanes, NP>(t, totals) }
            }
        };
    }
    expanded!(avx2::Avx2, avx2_expand, avx2_product, "avx2,fma,f16c");
    expanded!(avx2::Avx2, avx2_finish, "avx2,fma,f16c");
    expanded!(
        avx512::Avx512Vnni,
        avx512vnni_expand,
        avx512vnni_product,
        "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni"
    );
    expanded!(avx512::Avx512Vnni, avx512vnni_finish, "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni");
    expanded!(
        avx512::Avx512Bf16,
        avx512bf16_expand,
        avx512bf16_product,
        "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16"
    );

    macro_rules! for_amx {
        ($(#[$doc:meta])* $name:ident [$($const:ident),*] ($($arg:ident: $ty:ty),*), $of:expr) => {
            $(#[$doc])*
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16")]
            pub(in crate::linear) unsafe fn $name<$(const $const: usize),*>(t: &Tiled<'_>, $($arg: $ty),*) {
                // SAFETY: compiled with the features that the lanes require; the caller guarantees these, the tile unit
                // and the rest of the contract.
                unsafe { $of(t, $($arg),*) }
            }
        };
    }
    for_amx!(
        /// # Safety
        /// See [`tiled::multiply`].
        amx_tiled[OF](tiles: Range<usize>, panels: Range<usize>), tiled::multiply::<Amx, OF>
    );
    for_amx!(
        /// # Safety
        /// See [`tiled::expand`].
        amx_expand[CODES, KIND](weights: *const u8, count: usize, blocks: Range<usize>, to: *mut u8, to_panel: usize),
        tiled::expand::<Amx, CODES, KIND>
    );
    for_amx!(
        /// # Safety
        /// See [`tiled::join`].
        amx_join[CODES, KIND](panel: *const u8, tile: usize, g: usize, sums: *const u8, totals: *mut f32),
        tiled::join::<avx512::Avx512Vnni, CODES, KIND>
    );
    for_amx!(
        /// # Safety
        /// See [`tiled::finish`].
        amx_finish[KIND](panel: *const u8, number: usize, tile: usize, totals: *const f32),
        tiled::finish::<avx512::Avx512Vnni, KIND>
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
