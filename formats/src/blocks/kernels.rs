//! Blocks in the form that the CPU kernels take: one code per byte, and the scales of groups.
//!
//! Some types keep their two levels of scales ([`SuperScales`]). The others get one float per group, which is exact.

use half::f16;
use quant_kernels_cpu::{FloatFormat, Scales, SuperMins, SuperScales, ViewError, WeightView, e8m0_value};

use super::{
    BlockType, IQ4_NL, IQ4_XS, MXFP4, Q2_K, Q3_K, Q4_0, Q4_K, Q5_0, Q5_K, Q6_K, Q8_0, SUPER, f16_bits, q2_k,
    q3_k, q6_k, scales_6bit,
};

struct Form {
    kind: &'static BlockType,
    bits: u8,
    group: usize,
    grid: Grid,
    /// The byte offsets of all `f16` fields of a block.
    halves: &'static [usize],
    /// Writes the codes of a block, which are zero before, and the parameters of its groups.
    unpack: fn(&[u8], &mut [u8], &mut Groups),
}

/// The meaning of codes and groups.
#[derive(Clone, Copy, PartialEq)]
enum Grid {
    /// Integers with the zero point `2^(bits − 1)`, and a float per group.
    Float,
    /// Codes of this format, and a float per group.
    Codes(FloatFormat),
    /// IQ4 codes with two levels of scales.
    SuperLevels,
    /// Integers with two levels of scales.
    Super,
    /// Integers with two levels of scales, and two levels of minimums.
    SuperMins,
}

#[derive(Default)]
struct Groups {
    floats: [f32; 16],
    factors: [i8; 16],
    mins: [u8; 16],
    d: f16,
    dmin: f16,
}

static FORMS: [Form; 11] = [
    form(&Q4_0, (4, 32), Grid::Float, &[0], |block, codes, groups| {
        groups.floats[0] = f16_bits::get(block, 0);
        nibbles(&block[2..], codes);
    }),
    form(&Q5_0, (5, 32), Grid::Float, &[0], |block, codes, groups| {
        groups.floats[0] = f16_bits::get(block, 0);
        nibbles(&block[6..], codes);
        for (i, code) in codes.iter_mut().enumerate() {
            *code |= (block[2 + i / 8] >> (i % 8) & 1) << 4;
        }
    }),
    form(&Q8_0, (8, 32), Grid::Float, &[0], |block, codes, groups| {
        groups.floats[0] = f16_bits::get(block, 0);
        // From two's complement to unsigned with the zero point 128.
        codes.iter_mut().zip(&block[2..]).for_each(|(code, byte)| *code = byte ^ 0x80);
    }),
    form(&IQ4_NL, (4, 32), Grid::Codes(FloatFormat::Iq4), &[0], |block, codes, groups| {
        groups.floats[0] = f16_bits::get(block, 0);
        nibbles(&block[2..], codes);
    }),
    form(&IQ4_XS, (4, 32), Grid::SuperLevels, &[0], |block, codes, groups| {
        groups.d = half_at(block, 0);
        let high = u16::from_le_bytes([block[2], block[3]]);
        for (j, codes) in codes.chunks_exact_mut(32).enumerate() {
            let factor =
                i32::from(block[4 + j / 2] >> (4 * (j % 2)) & 15) | i32::from(high >> (2 * j) & 3) << 4;
            groups.factors[j] = (factor - 32) as i8;
            nibbles(&block[8 + 16 * j..][..16], codes);
        }
    }),
    form(&Q3_K, (3, 16), Grid::Float, &[q3_k::D], |block, codes, groups| {
        let d = f16_bits::get(block, q3_k::D);
        for (j, scale) in groups.floats.iter_mut().enumerate() {
            *scale = d * f32::from(q3_k::get_scale(&block[q3_k::SCALES..q3_k::D], j));
        }
        for (e, code) in codes.iter_mut().enumerate() {
            *code = q3_k::get_code(block, e);
        }
    }),
    form(&MXFP4, (4, 32), Grid::Codes(FloatFormat::E2m1), &[], |block, codes, groups| {
        groups.floats[0] = e8m0_value(block[0]);
        nibbles(&block[1..], codes);
    }),
    form(&Q2_K, (2, 16), Grid::SuperMins, &[80, 82], |block, codes, groups| {
        [groups.d, groups.dmin] = [80, 82].map(|at| half_at(block, at));
        let of_groups = groups.factors.iter_mut().zip(&mut groups.mins);
        for ((factor, min), byte) in of_groups.zip(&block[..16]) {
            (*factor, *min) = ((byte & 15) as i8, byte >> 4);
        }
        for (e, code) in codes.iter_mut().enumerate() {
            let (byte, shift) = q2_k::place(e);
            *code = block[16 + byte] >> shift & 3;
        }
    }),
    form(&Q4_K, (4, 32), Grid::SuperMins, &[0, 2], |block, codes, groups| {
        six_bit(block, groups);
        for (j, codes) in codes.chunks_exact_mut(32).enumerate() {
            let low = &block[16 + 32 * (j / 2)..];
            codes.iter_mut().zip(low).for_each(|(code, byte)| *code = byte >> (4 * (j % 2)) & 15);
        }
    }),
    form(&Q5_K, (5, 32), Grid::SuperMins, &[0, 2], |block, codes, groups| {
        six_bit(block, groups);
        let (high, low) = block[16..].split_at(32);
        for (j, codes) in codes.chunks_exact_mut(32).enumerate() {
            for (l, code) in codes.iter_mut().enumerate() {
                *code = low[32 * (j / 2) + l] >> (4 * (j % 2)) & 15 | (high[l] >> j & 1) << 4;
            }
        }
    }),
    form(&Q6_K, (6, 16), Grid::Super, &[208], |block, codes, groups| {
        groups.d = half_at(block, 208);
        groups.factors.iter_mut().zip(&block[192..]).for_each(|(factor, byte)| *factor = *byte as i8);
        for (e, code) in codes.iter_mut().enumerate() {
            *code = q6_k::get_code(block, e);
        }
    }),
];

const fn form(
    kind: &'static BlockType,
    (bits, group): (u8, usize),
    grid: Grid,
    halves: &'static [usize],
    unpack: fn(&[u8], &mut [u8], &mut Groups),
) -> Form {
    Form { kind, bits, group, grid, halves, unpack }
}

fn half_at(block: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([block[at], block[at + 1]])
}

/// Unpacks 32 codes: byte `j` holds element `j` in its low nibble and `j + 16` in its high nibble.
fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    for (i, code) in codes.iter_mut().enumerate() {
        *code = bytes[i % 16] >> (4 * (i / 16)) & 15;
    }
}

fn six_bit(block: &[u8], groups: &mut Groups) {
    [groups.d, groups.dmin] = [0, 2].map(|at| half_at(block, at));
    for j in 0..8 {
        let (scale, min) = scales_6bit::get(&block[4..16], j);
        (groups.factors[j], groups.mins[j]) = (scale as i8, min);
    }
}

impl BlockType {
    fn form(&self) -> Option<&'static Form> {
        FORMS.iter().find(|form| form.kind == self)
    }

    /// Whether the CPU kernels multiply weights of this type in blocks; see [`with_view`](Self::with_view).
    pub fn has_kernel(&self) -> bool {
        self.form().is_some()
    }

    /// Whether all scales in these blocks are certain to give finite weights; `false` for types without a kernel.
    pub fn has_finite_scales(&self, bytes: &[u8]) -> bool {
        let Some(form) = self.form() else { return false };
        bytes.chunks_exact(self.bytes).all(|block| match form.grid {
            // Six times the scale must not overflow.
            Grid::Codes(FloatFormat::E2m1) => block[0] < 253,
            _ => form.halves.iter().all(|&at| half_at(block, at).is_finite()),
        })
    }

    /// Passes the weight `[n, k]` in these rows of blocks to a function in the form that the kernels take; `None` if
    /// they have none for this type. The weights are those of [`decode`](Self::decode), bit for bit, except that zeros
    /// of MXFP4 keep their sign. Allocates a byte per weight, and the scales.
    ///
    /// # Errors
    /// When the length of `bytes` does not match the shape.
    pub fn with_view<T>(
        &self,
        [n, k]: [usize; 2],
        bytes: &[u8],
        take: impl FnOnce(&WeightView<'_>) -> T,
    ) -> Result<Option<T>, ViewError> {
        let Some(form) = self.form() else { return Ok(None) };
        let expected = self.row_bytes(k).and_then(|row| row.checked_mul(n));
        if expected != Some(bytes.len()) {
            let expected = expected.unwrap_or(usize::MAX);
            return Err(ViewError::Length { what: "the blocks", expected, got: bytes.len() });
        }
        let blocks = bytes.len() / self.bytes;
        let groups = self.elements / form.group;
        let mut codes = vec![0; n * k];
        let (mut floats, mut factors, mut mins) = (Vec::new(), Vec::new(), Vec::new());
        let (mut of_scales, mut of_mins) = (Vec::new(), Vec::new());
        match form.grid {
            Grid::Float | Grid::Codes(_) => floats.reserve_exact(blocks * groups),
            Grid::Super | Grid::SuperMins | Grid::SuperLevels => factors.reserve_exact(blocks * groups),
        }
        for (block, codes) in bytes.chunks_exact(self.bytes).zip(codes.chunks_exact_mut(self.elements)) {
            let mut of = Groups::default();
            (form.unpack)(block, codes, &mut of);
            match form.grid {
                Grid::Float | Grid::Codes(_) => floats.extend_from_slice(&of.floats[..groups]),
                Grid::Super | Grid::SuperMins | Grid::SuperLevels => {
                    factors.extend_from_slice(&of.factors[..groups]);
                    of_scales.push(of.d);
                }
            }
            if form.grid == Grid::SuperMins {
                mins.extend_from_slice(&of.mins[..groups]);
                of_mins.push(of.dmin);
            }
        }
        let minimums = SuperMins { groups: &mins, blocks: &of_mins };
        let minimums = (form.grid == Grid::SuperMins).then_some(minimums);
        let scales = SuperScales { groups: &factors, blocks: &of_scales, mins: minimums };
        let view = match form.grid {
            Grid::Float => WeightView::new([n, k], form.bits, form.group, &codes, &floats, None),
            Grid::Codes(format) => WeightView::float([n, k], format, form.group, &codes, &floats),
            Grid::SuperLevels => {
                let (format, scales) = (FloatFormat::Iq4, Scales::Super(scales));
                WeightView::float_with_scales([n, k], format, form.group, &codes, scales)
            }
            Grid::Super | Grid::SuperMins => {
                let scales = Scales::Super(scales);
                WeightView::with_scales([n, k], form.bits, form.group, &codes, scales, None)
            }
        };
        Ok(Some(take(&view?)))
    }
}

const _: () = assert!(SUPER == quant_kernels_cpu::SUPER_BLOCK);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use quant_kernels_cpu::reference;

    use super::super::BLOCK_TYPES;
    use super::super::iq4::LEVELS;
    use super::*;

    proptest! {
        #[test]
        fn weights_are_those_that_are_decoded(seed: u64, form in 0..FORMS.len()) {
            let (kind, form) = (FORMS[form].kind, &FORMS[form]);
            let (n, k) = (3, 512);
            let mut state = seed | 1;
            let mut bytes: Vec<u8> = (0..n * kind.row_bytes(k).unwrap()).map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 32) as u8
            }).collect();
            // Any bytes are valid, except scales that are not finite.
            for block in bytes.chunks_exact_mut(kind.bytes) {
                form.halves.iter().for_each(|at| block[at + 1] &= 0xbb);
                if form.kind == &MXFP4 {
                    block[0] = block[0].min(252);
                }
            }
            prop_assert!(kind.has_kernel() && kind.has_finite_scales(&bytes));
            let mut expected = vec![f32::NAN; n * k];
            for (row, out) in bytes.chunks_exact(bytes.len() / n).zip(expected.chunks_exact_mut(k)) {
                kind.decode(row, out);
            }
            let mut got = vec![f32::NAN; n * k];
            kind.with_view([n, k], &bytes, |view| reference::dequantize_rows(view, 0..n, &mut got)).unwrap();
            // The sum turns negative zeros into positive ones.
            let plus = if form.kind == &MXFP4 { 0.0 } else { -0.0 };
            let bits = |v: &[f32]| v.iter().map(|x| (x + plus).to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&got), bits(&expected), "{:?}", kind);
        }
    }

    #[test]
    fn the_levels_of_iq4_are_those_of_the_kernels() {
        for (code, level) in LEVELS.iter().enumerate() {
            assert_eq!(FloatFormat::Iq4.value(code as u8), f32::from(*level));
        }
    }

    #[test]
    fn scales_that_are_not_finite_are_found() {
        for form in &FORMS {
            let mut bytes = vec![0; 2 * form.kind.bytes];
            assert!(form.kind.has_finite_scales(&bytes), "{:?}", form.kind);
            for &at in form.halves {
                for bad in [f16::NAN, f16::INFINITY, f16::NEG_INFINITY] {
                    bytes[form.kind.bytes + at..][..2].copy_from_slice(&bad.to_le_bytes());
                    assert!(!form.kind.has_finite_scales(&bytes), "{:?} {at}", form.kind);
                }
                bytes.fill(0);
            }
        }
        let mut bytes = [0; 17];
        bytes[0] = 253;
        assert!(!MXFP4.has_finite_scales(&bytes));
    }

    #[test]
    fn other_types_and_lengths_have_no_view() {
        let without: Vec<&str> =
            BLOCK_TYPES.iter().filter(|kind| !kind.has_kernel()).map(|kind| kind.name).collect();
        let floats = ["F32", "F16", "BF16"];
        let code_books = ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"];
        let others = ["TQ1_0", "TQ2_0", "NVFP4"];
        assert_eq!(without, [&floats[..], &["Q4_1", "Q5_1"], &code_books, &others].concat());
        assert!(super::super::F16.with_view([1, 2], &[0; 4], |_| ()).unwrap().is_none());
        for bytes in [0, 143, 145, 288] {
            assert!(Q4_K.with_view([1, 256], &vec![0; bytes], |_| ()).is_err());
        }
        assert!(Q4_K.with_view([1, 255], &[0; 144], |_| ()).is_err());
    }
}
