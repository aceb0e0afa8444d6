//! The tensors of one linear, and their bytes.
//!
//! For a module `X` with weight `[n, k]`, `b` bits and groups of `g` (`g = k` per channel), all transposed:
//!
//! | tensor | type | shape | holds |
//! |---|---|---|---|
//! | `X.qweight` | I32 | `[k·b/32, n]` | codes of each output, packed along the inputs (columns) |
//! | `X.qzeros` | I32 | `[k/g, n·b/32]` | zero points of each group minus one, packed along the outputs |
//! | `X.scales` | F16 | `[k/g, n]` | scales |
//! | `X.g_idx` | I32 | `[k]` | the group of every input |
//!
//! Codes and zero points are a dense little-endian bit stream ([`bits`](crate::format::bits)).
//!
//! A zero point of 0 minus one does not fit. As in gptqmodel, the one is subtracted from whole words, with a borrow
//! from the next zero point, and added back in the same way. At 3 bits, where zero points straddle words, each is
//! decremented modulo 8. Implementations that add one to each zero point (llama.cpp's converter) get `2^b`. So if the
//! codes of such a group allow it, codes and zero point are stored one higher, which gives the same weights in all
//! implementations.

use std::borrow::Cow;

use super::METHOD;
use crate::allocate;
use crate::checkpoint::{Dtype, TensorSpec};
use crate::error::Indivisible;
use crate::format::bits::{pack_rows, transpose, transpose_words, unpack_rows};
use crate::quantize::QuantizedTensor;
use crate::scheme::{ActivationScheme, LinearScheme};
use crate::{Error, Result};

pub(super) fn codes_name(module: &str) -> String {
    format!("{module}.qweight")
}

pub(super) fn zeros_name(module: &str) -> String {
    format!("{module}.qzeros")
}

pub(super) fn scales_name(module: &str) -> String {
    format!("{module}.scales")
}

pub(super) fn index_name(module: &str) -> String {
    format!("{module}.g_idx")
}

pub(super) fn layout(
    module: &str,
    [n, k]: [usize; 2],
    scheme: LinearScheme,
    scale_dtype: Dtype,
) -> Result<Vec<TensorSpec>> {
    let unusable = |what: String| {
        Error::usage(
            format!("`{module}.weight`: {what}"),
            "leave it float with ‹ignore›, or write ‹format=compressed-tensors›",
        )
    };
    if scheme.activations != ActivationScheme::Float {
        return Err(unusable(format!(
            "the {METHOD} format cannot describe quantized activations, which {scheme} has"
        )));
    }
    let Some(bits @ (2 | 3 | 4 | 8)) = scheme.int_bits() else {
        let got = scheme.described_bits();
        return Err(unusable(format!("the {METHOD} format supports 2, 3, 4 or 8 bits, not {got}")));
    };
    let bits = usize::from(bits);
    if scale_dtype != Dtype::F16 {
        return Err(unusable(format!("the {METHOD} format stores scales as F16, not {scale_dtype}")));
    }
    // No tensor below takes more than 8 bytes per weight, and the group index is an int32.
    if n.checked_mul(k).is_none_or(|elements| elements > isize::MAX as usize / 8) || i32::try_from(k).is_err()
    {
        return Err(unusable(format!("a weight of shape [{n}, {k}] is too large for the {METHOD} format")));
    }
    for (size, what) in [(k, "inputs"), (n, "outputs")] {
        if !(size * bits).is_multiple_of(32) {
            return Err(unusable(format!(
                "the {METHOD} format packs whole 32-bit words, but {size} {what} of {bits} bits do not fill \
                whole words"
            )));
        }
    }
    let group_size = scheme.granularity.group_size(k);
    if group_size == 0 || !k.is_multiple_of(group_size) {
        let tensor = format!("{module}.weight");
        return Err(Error::GroupSizeDoesNotDivide(vec![Indivisible { tensor, columns: k, group_size }]));
    }
    let groups = k / group_size;
    Ok(vec![
        TensorSpec::new(codes_name(module), Dtype::I32, [k * bits / 32, n]),
        TensorSpec::new(zeros_name(module), Dtype::I32, [groups, n * bits / 32]),
        TensorSpec::new(scales_name(module), Dtype::F16, [groups, n]),
        TensorSpec::new(index_name(module), Dtype::I32, [k]),
    ])
}

pub(super) fn pack(module: &str, tensor: &QuantizedTensor) -> Result<Vec<(TensorSpec, Vec<u8>)>> {
    let [n, k] = tensor.shape;
    let bits = tensor.scheme.bits();
    let specs = layout(module, tensor.shape, tensor.scheme, tensor.scale_dtype)?;
    tensor.require_storable(module)?;
    if n == 0 || k == 0 {
        let empty = |spec: TensorSpec| {
            let len = spec.info.byte_len() as usize;
            (spec, vec![0; len])
        };
        return Ok(specs.into_iter().map(empty).collect());
    }
    let groups = tensor.scales.len() / n;
    let (codes, zeros) = match &tensor.zeros {
        Some(zeros) => avoid_zero_points_of_0(tensor, zeros, k / groups),
        None => (Cow::Borrowed(&tensor.codes[..]), vec![1 << (bits - 1); n * groups]),
    };
    let codes = pack_rows(&codes, k, bits);
    let codes = transpose_words(&codes, n, codes.len() / 4 / n)?;
    let index = group_index(k, k / groups).flat_map(i32::to_le_bytes).collect();
    let bytes = [
        codes,
        pack_zeros(transpose(&zeros, n, groups)?, n, bits),
        tensor.scale_dtype.narrow(&transpose(&tensor.scales, n, groups)?),
        index,
    ];
    Ok(specs.into_iter().zip(bytes).collect())
}

/// In groups with a zero point of 0, codes and zero point are raised by one if the codes allow it.
fn avoid_zero_points_of_0<'t>(
    tensor: &'t QuantizedTensor,
    zeros: &[u8],
    group_size: usize,
) -> (Cow<'t, [u8]>, Vec<u8>) {
    let mut codes = Cow::Borrowed(&tensor.codes[..]);
    let mut raised = zeros.to_vec();
    for (group, zero) in raised.iter_mut().enumerate().filter(|(_, zero)| **zero == 0) {
        let of_group = group * group_size..(group + 1) * group_size;
        if !tensor.codes[of_group.clone()].contains(&tensor.scheme.max_code()) {
            *zero = 1;
            codes.to_mut()[of_group].iter_mut().for_each(|code| *code += 1);
        }
    }
    (codes, raised)
}

/// A word in which every zero point is one.
fn ones(bits: u8) -> u32 {
    (0..32 / u32::from(bits)).fold(0, |word, i| word | 1 << (i * u32::from(bits)))
}

/// Packs zero points `[groups, n]`, each minus one; see the table above.
fn pack_zeros(mut zeros: Vec<u8>, n: usize, bits: u8) -> Vec<u8> {
    if bits == 3 {
        zeros.iter_mut().for_each(|z| *z = z.wrapping_sub(1) & 7);
        return pack_rows(&zeros, n, bits);
    }
    let words = pack_rows(&zeros, n, bits);
    let words = words.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    words.flat_map(|word| word.wrapping_sub(ones(bits)).to_le_bytes()).collect()
}

pub(super) fn group_index(k: usize, group_size: usize) -> impl Iterator<Item = i32> {
    (0..k).map(move |i| (i / group_size.max(1)) as i32)
}

/// Unpacks codes `[n, k]` from the bytes of words `[k·bits/32, n]`; the caller checked their number.
pub(super) fn unpack_codes(bytes: &[u8], [n, k]: [usize; 2], bits: u8) -> Result<Vec<u8>> {
    let mut codes = allocate::zeros(n * k, "the codes of a weight")?;
    if !codes.is_empty() {
        let rows = transpose_words(bytes, bytes.len() / 4 / n, n)?;
        unpack_rows(&rows, k, bits, &mut codes).map_err(inconsistent)?;
    }
    Ok(codes)
}

/// Unpacks zero points `[n, groups]` from the bytes of words `[groups, n·bits/32]`. With `less_one`, adds the one that
/// was subtracted when they were packed.
pub(super) fn unpack_zeros(
    bytes: &[u8],
    n: usize,
    groups: usize,
    bits: u8,
    less_one: bool,
) -> Result<Vec<u8>> {
    let mut zeros = allocate::zeros(n * groups, "the zero points of a weight")?;
    if zeros.is_empty() {
        return Ok(zeros);
    }
    let mask = u8::MAX >> (8 - bits);
    if less_one && bits != 3 {
        let words = bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let words = words.flat_map(|word| word.wrapping_add(ones(bits)).to_le_bytes());
        let words = allocate::collected(bytes.len(), words, "the zero points of a weight")?;
        unpack_rows(&words, n, bits, &mut zeros).map_err(inconsistent)?;
    } else {
        unpack_rows(bytes, n, bits, &mut zeros).map_err(inconsistent)?;
        zeros.iter_mut().for_each(|z| *z = z.wrapping_add(u8::from(less_one)) & mask);
    }
    transpose(&zeros, groups, n)
}

fn inconsistent(error: impl std::fmt::Display) -> Error {
    Error::Internal(format!("packed words: {error}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::quantize::quantize_rtn;
    use crate::scheme::{Granularity, WeightFormat};

    fn words(bytes: &[u8]) -> Vec<u32> {
        bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }

    fn tensor(scheme: &str, [n, k]: [usize; 2], codes: Vec<u8>, zeros: Option<Vec<u8>>) -> QuantizedTensor {
        let scheme: LinearScheme = scheme.parse().unwrap();
        let groups = n * k / scheme.granularity.group_size(k);
        QuantizedTensor {
            shape: [n, k],
            scheme,
            codes,
            scales: (1..=groups).map(|i| i as f32).collect(),
            scale_dtype: Dtype::F16,
            zeros,
            levels: None,
            global: None,
            input: None,
            input_order: None,
        }
    }

    #[test]
    fn words_by_hand() {
        let codes: Vec<u8> = (0..8).flat_map(|o| (0..16).map(move |i| (o + i) % 16)).collect();
        let zeros: Vec<u8> = (0..8).flat_map(|o| [o, 15 - o]).collect();
        let parts = pack("x", &tensor("w4a16-g8-asym", [8, 16], codes, Some(zeros))).unwrap();
        let codes = words(&parts[0].1);
        // Inputs 0 to 7 of outputs 0 to 7, then inputs 8 to 15. The first eight codes of output 0 are one higher,
        // because the zero point of their group was 0.
        assert_eq!(codes[..3], [0x8765_4321, 0x8765_4321, 0x9876_5432]);
        assert_eq!(codes[8], 0xfedc_ba98);
        assert_eq!(words(&parts[1].1), [0x6543_2100, 0x789a_bcde]);
        let scales: Vec<f32> =
            parts[2].1.chunks_exact(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
        assert_eq!(scales[..8], [1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0]);
        assert_eq!(words(&parts[3].1), [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]);
    }

    #[test]
    fn symmetric_zeros_are_the_middle_less_one() {
        for (scheme, word) in
            [("w2a16-g32", 0x5555_5555), ("w4a16-g32", 0x7777_7777), ("w8a16-g32", 0x7f7f_7f7f)]
        {
            let parts = pack("x", &tensor(scheme, [16, 32], vec![0; 16 * 32], None)).unwrap();
            assert!(words(&parts[1].1).iter().all(|w| *w == word), "{scheme}");
        }
        let parts = pack("x", &tensor("w3a16-g32", [32, 32], vec![0; 32 * 32], None)).unwrap();
        assert_eq!(words(&parts[1].1), [0xdb6d_b6db, 0xb6db_6db6, 0x6db6_db6d]);
    }

    #[test]
    fn shapes() {
        let weights: Vec<f32> = (0..32 * 96).map(|i| (i as f32 * 0.37).sin()).collect();
        let tensor =
            quantize_rtn("x", &weights, [32, 96], "w3a16-g48-asym".parse().unwrap(), Dtype::F16, None)
                .unwrap();
        let parts = pack("x", &tensor).unwrap();
        let shapes: Vec<_> = parts.iter().map(|(s, _)| (s.name.as_str(), s.info.shape.clone())).collect();
        let expected = [
            ("x.qweight", vec![9, 32]),
            ("x.qzeros", vec![2, 3]),
            ("x.scales", vec![2, 32]),
            ("x.g_idx", vec![96]),
        ];
        assert_eq!(shapes, expected);
        assert!(parts.iter().all(|(s, b)| s.info.byte_len() == b.len() as u64));
    }

    #[test]
    fn what_the_format_cannot_hold() {
        let message = |shape, scheme: &str, dtype| {
            layout("x", shape, scheme.parse().unwrap(), dtype).unwrap_err().to_string()
        };
        assert!(message([32, 64], "w4a16-g32", Dtype::Bf16).contains("scales as F16, not BF16"));
        assert!(message([12, 64], "w4a16-g32", Dtype::F16).contains("12 outputs of 4 bits"));
        assert!(message([32, 80], "w3a16-g16", Dtype::F16).contains("80 inputs of 3 bits"));
        assert!(message([32, 64], "w4a16-g48", Dtype::F16).contains("does not divide"));
        assert!(message([usize::MAX / 2, 64], "w4a16-g32", Dtype::F16).contains("too large"));
    }

    #[test]
    fn a_zero_of_0_borrows_where_it_has_no_room() {
        let mut codes = vec![3; 8 * 16];
        codes[8 + 2] = 15;
        let mut zeros = vec![8; 16];
        (zeros[0], zeros[1]) = (0, 0);
        let parts = pack("x", &tensor("w4a16-g8-asym", [8, 16], codes, Some(zeros))).unwrap();
        assert_eq!(words(&parts[1].1), [0x7777_7770, 0x8888_8880_u32.wrapping_sub(0x1111_1111)]);
        let back = unpack_zeros(&parts[1].1, 8, 2, 4, true).unwrap();
        assert_eq!(back[..4], [1, 0, 8, 8]);
        let zeros: Vec<u8> = (0..32).map(|i| i % 8).collect();
        let full = tensor("w3a16-g32-asym", [32, 32], vec![7; 32 * 32], Some(zeros.clone()));
        let parts = pack("x", &full).unwrap();
        assert_eq!(unpack_zeros(&parts[1].1, 32, 1, 3, true).unwrap(), zeros);
    }

    proptest! {
        #[test]
        fn any_codes_and_zeros_come_back(
            n in 1_usize..4, groups in 1_usize..4, which in 0_usize..4, seed: u64,
        ) {
            let (n, k) = (32 * n, 32 * groups);
            let bits = [2, 3, 4, 8][which];
            let mask = u8::MAX >> (8 - bits);
            let noise = |i: usize| (seed.rotate_left(i as u32 % 64) as u8 ^ (i * 7) as u8) & mask;
            let scheme = LinearScheme::weight_only(WeightFormat::int(bits, false), Granularity::Group(32));
            let (codes, zeros): (Vec<u8>, Vec<u8>) =
                ((0..n * k).map(noise).collect(), (0..n * groups).map(|i| noise(i + 3).max(1)).collect());
            let tensor = tensor(&scheme.to_string(), [n, k], codes.clone(), Some(zeros.clone()));
            let parts = pack("x", &tensor).unwrap();
            prop_assert_eq!(unpack_codes(&parts[0].1, [n, k], bits).unwrap(), codes);
            prop_assert_eq!(unpack_zeros(&parts[1].1, n, groups, bits, true).unwrap(), zeros.clone());
            let less: Vec<u8> = zeros.iter().map(|z| z - 1).collect();
            prop_assert_eq!(unpack_zeros(&parts[1].1, n, groups, bits, false).unwrap(), less);
        }
    }
}
