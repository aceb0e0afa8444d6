//! The tensors of one linear, and their bytes.
//!
//! For a module `X` with weight `[n, k]` in groups of `g` (`g = k` per channel), all transposed:
//!
//! | tensor | type | shape | holds |
//! |---|---|---|---|
//! | `X.qweight` | I32 | `[k, n/8]` | codes of eight outputs per word |
//! | `X.qzeros` | I32 | `[k/g, n/8]` | zero points, packed in the same way |
//! | `X.scales` | F16 | `[k/g, n]` | scales |
//!
//! Nibble `j` (bits `4j` to `4j + 3`) of word `c` holds output `8c + ORDER[j]`.

use super::{BITS, METHOD, ROWS_PER_WORD};
use crate::allocate::zeros;
use crate::checkpoint::{Dtype, TensorSpec};
use crate::error::Indivisible;
use crate::quantize::QuantizedTensor;
use crate::scheme::{ActivationScheme, LinearScheme};
use crate::{Error, Result};

/// Index of the output in each nibble of a word, lowest nibble first.
const ORDER: [usize; ROWS_PER_WORD] = [0, 2, 4, 6, 1, 3, 5, 7];

/// The zero point of a symmetric 4-bit grid.
const ZERO_POINT: u8 = 8;

pub(super) fn codes_name(module: &str) -> String {
    format!("{module}.qweight")
}

pub(super) fn zeros_name(module: &str) -> String {
    format!("{module}.qzeros")
}

pub(super) fn scales_name(module: &str) -> String {
    format!("{module}.scales")
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
    if scheme.int_bits() != Some(BITS) {
        let got = scheme.described_bits();
        return Err(unusable(format!("the {METHOD} format supports {BITS}-bit weights only, not {got}")));
    }
    if scale_dtype != Dtype::F16 {
        return Err(unusable(format!("the {METHOD} format stores scales as F16, not {scale_dtype}")));
    }
    if n.checked_mul(k).is_none_or(|elements| elements > isize::MAX as usize / 8) {
        return Err(unusable(format!("a weight of shape [{n}, {k}] exceeds the address space")));
    }
    if !n.is_multiple_of(ROWS_PER_WORD) {
        return Err(unusable(format!(
            "the {METHOD} format needs a multiple of {ROWS_PER_WORD} outputs, got {n}"
        )));
    }
    let group_size = scheme.granularity.group_size(k);
    if group_size == 0 || !k.is_multiple_of(group_size) {
        let tensor = format!("{module}.weight");
        return Err(Error::GroupSizeDoesNotDivide(vec![Indivisible { tensor, columns: k, group_size }]));
    }
    let (groups, words) = (k / group_size, n / ROWS_PER_WORD);
    Ok(vec![
        TensorSpec::new(codes_name(module), Dtype::I32, [k, words]),
        TensorSpec::new(zeros_name(module), Dtype::I32, [groups, words]),
        TensorSpec::new(scales_name(module), Dtype::F16, [groups, n]),
    ])
}

pub(super) fn pack(module: &str, tensor: &QuantizedTensor) -> Result<Vec<(TensorSpec, Vec<u8>)>> {
    let [n, k] = tensor.shape;
    let specs = layout(module, tensor.shape, tensor.scheme, tensor.scale_dtype)?;
    tensor.require_storable(module)?;
    let groups = tensor.scales.len() / n.max(1);
    let zeros = match &tensor.zeros {
        Some(zeros) => pack_transposed(zeros, n, groups),
        None => pack_transposed(&vec![ZERO_POINT; n * groups], n, groups),
    };
    let scales: Vec<f32> = (0..groups)
        .flat_map(|g| (0..n).map(move |o| (o, g)))
        .map(|(o, g)| tensor.scales[o * groups + g])
        .collect();
    let bytes = [pack_transposed(&tensor.codes, n, k), zeros, tensor.scale_dtype.narrow(&scales)];
    Ok(specs.into_iter().zip(bytes).collect())
}

/// Packs codes `[n, columns]` into the little-endian bytes of words `[columns, n/8]`.
fn pack_transposed(codes: &[u8], n: usize, columns: usize) -> Vec<u8> {
    let words = n / ROWS_PER_WORD;
    let mut bytes = vec![0; columns * words * 4];
    // Eight rows in lockstep, so that each column gives one word.
    for (c, rows) in codes.chunks_exact((ROWS_PER_WORD * columns).max(1)).enumerate() {
        let row: [&[u8]; ROWS_PER_WORD] = ORDER.map(|o| &rows[o * columns..(o + 1) * columns]);
        for i in 0..columns {
            let word = row.iter().rev().fold(0_u32, |word, row| word << 4 | u32::from(row[i]));
            let at = (i * words + c) * 4;
            bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
    }
    bytes
}

/// Unpacks codes `[n, columns]` from the bytes of words `[columns, n/8]`.
///
/// # Errors
/// [`Error::Memory`] when the codes cannot be allocated.
pub(super) fn unpack_transposed(bytes: &[u8], n: usize, columns: usize) -> Result<Vec<u8>> {
    let words = n / ROWS_PER_WORD;
    let mut codes = zeros(n * columns, "the codes of a weight")?;
    for (c, rows) in codes.chunks_exact_mut((ROWS_PER_WORD * columns).max(1)).enumerate() {
        for i in 0..columns {
            let at = (i * words + c) * 4;
            let word = u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
            for (j, o) in ORDER.into_iter().enumerate() {
                rows[o * columns + i] = (word >> (4 * j)) as u8 & 15;
            }
        }
    }
    Ok(codes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::quantize::quantize_rtn;

    #[test]
    fn a_word_by_hand() {
        // Output o has code o in its first column and 15 − o in its second.
        let codes: Vec<u8> = (0..8).flat_map(|o| [o, 15 - o]).collect();
        let words: Vec<u32> = pack_transposed(&codes, 8, 2)
            .chunks_exact(4)
            .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect();
        assert_eq!(words, [0x7531_6420, 0x8ace_9bdf]);
    }

    #[test]
    fn tensors_of_a_linear() {
        let weights: Vec<f32> = (0..16 * 64).map(|i| (i as f32 * 0.37).sin()).collect();
        for (scheme, symmetric) in [("w4a16-g32-sym", true), ("w4a16-g32-asym", false)] {
            let tensor =
                quantize_rtn("x", &weights, [16, 64], scheme.parse().unwrap(), Dtype::F16, None).unwrap();
            let parts = pack("x", &tensor).unwrap();
            let shapes: Vec<_> =
                parts.iter().map(|(s, b)| (s.name.as_str(), s.info.shape.clone(), b.len())).collect();
            assert_eq!(
                shapes,
                [
                    ("x.qweight", vec![64, 2], 64 * 2 * 4),
                    ("x.qzeros", vec![2, 2], 2 * 2 * 4),
                    ("x.scales", vec![2, 16], 2 * 16 * 2),
                ]
            );
            assert_eq!(parts[1].1.iter().all(|&b| b == 0x88), symmetric);
            assert_eq!(unpack_transposed(&parts[0].1, 16, 64).unwrap(), tensor.codes);
            let at = (16 + 3) * 2;
            let stored = half::f16::from_le_bytes([parts[2].1[at], parts[2].1[at + 1]]).to_f32();
            assert_eq!(stored, tensor.scales[3 * 2 + 1]);
        }
    }

    #[test]
    fn what_the_format_cannot_hold() {
        let message = |shape, scheme: &str, dtype| {
            layout("x", shape, scheme.parse().unwrap(), dtype).unwrap_err().to_string()
        };
        assert!(message([16, 64], "w3a16-g32", Dtype::F16).contains("4-bit weights only, not 3"));
        assert!(message([16, 64], "w4a16-g32", Dtype::Bf16).contains("scales as F16, not BF16"));
        assert!(message([12, 64], "w4a16-g32", Dtype::F16).contains("a multiple of 8 outputs, got 12"));
        assert!(message([16, 60], "w4a16-g32", Dtype::F16).contains("does not divide"));
        assert!(message([usize::MAX / 2, 64], "w4a16-g32", Dtype::F16).contains("address space"));
    }

    proptest! {
        #[test]
        fn any_codes_come_back(eights in 0_usize..5, columns in 0_usize..40, seed in any::<u64>()) {
            let n = 8 * eights;
            let codes: Vec<u8> =
                (0..n * columns).map(|i| (seed.rotate_left(i as u32 % 64) as u8 ^ i as u8) & 15).collect();
            let bytes = pack_transposed(&codes, n, columns);
            prop_assert_eq!(bytes.len() * 2, codes.len());
            prop_assert_eq!(unpack_transposed(&bytes, n, columns).unwrap(), codes);
        }
    }
}
