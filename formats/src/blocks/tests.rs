//! Properties of every block type.

use proptest::prelude::*;

use super::*;

/// A bound for the error of a weight, relative to the largest magnitude in the row.
fn coarseness(kind: &BlockType) -> f32 {
    match kind.name {
        "F32" => 0.0,
        "F16" => 1.0 / 2048.0,
        "BF16" => 1.0 / 256.0,
        "Q8_0" => 0.006,
        "Q6_K" => 0.07,
        "Q5_0" | "Q5_1" | "Q5_K" => 0.12,
        "Q4_0" | "Q4_1" | "Q4_K" | "IQ4_NL" | "IQ4_XS" => 0.25,
        "MXFP4" => 0.26,
        "NVFP4" => 0.35,
        "TQ1_0" | "TQ2_0" => 0.501,
        "Q3_K" => 0.6,
        "IQ3_S" | "IQ3_XXS" => 0.7,
        "Q2_K" | "IQ2_XXS" | "IQ2_XS" | "IQ2_S" => 1.0,
        other => panic!("no bound for {other}"),
    }
}

fn round_trip(kind: &BlockType, row: &[f32], importance: Option<&[f32]>) -> (Vec<u8>, Vec<f32>) {
    let mut bytes = vec![0xa5; kind.row_bytes(row.len()).unwrap()];
    kind.encode(row, importance, &mut bytes);
    let mut back = vec![f32::NAN; row.len()];
    kind.decode(&bytes, &mut back);
    (bytes, back)
}

/// Seeded values with this scale and some zeros.
fn values(seed: u64, scale: f32, len: usize) -> Vec<f32> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| if next() > 0.9 { 0.0 } else { next() * next() * scale }).collect()
}

#[test]
fn ids_and_names_are_distinct_and_blocks_divide_each_other() {
    for (i, kind) in BLOCK_TYPES.iter().enumerate() {
        assert!(BLOCK_TYPES[..i].iter().all(|other| other.id != kind.id && other.name != kind.name));
        assert_eq!(block_type(&kind.name.to_lowercase()), Some(*kind));
        assert_eq!(block_type_of(kind.id), Some(*kind));
        assert_eq!(unread_type(kind.id), None);
        if let Some(fallback) = kind.fallback {
            assert!(kind.elements.is_multiple_of(fallback.elements));
        }
    }
}

#[test]
fn rows_of_zeros_stay_zero() {
    for kind in BLOCK_TYPES {
        for importance in [None, Some(&[1.0; 512][..])] {
            let (_, back) = round_trip(kind, &[0.0; 512], importance);
            assert!(back.iter().all(|v| *v == 0.0), "{kind:?}");
        }
    }
}

#[test]
fn a_row_that_is_not_a_multiple_of_the_block_size_has_no_bytes() {
    assert_eq!(Q4_K.row_bytes(255), None);
    assert_eq!(Q4_K.row_bytes(768), Some(3 * 144));
    assert_eq!(Q4_0.row_bytes(48), None);
    assert_eq!(F16.row_bytes(3), Some(6));
}

proptest! {
    #[test]
    fn decoded_values_are_near(seed: u64, exponent in -4_i32..6, weighed: bool) {
        let row = values(seed, (exponent as f32).exp2(), 512);
        let importance: Vec<f32> = values(seed ^ 77, 1.0, 512).iter().map(|v| v.abs() + 0.01).collect();
        for kind in BLOCK_TYPES {
            let (_, back) = round_trip(kind, &row, weighed.then_some(&importance));
            if weighed {
                // Elements with a small importance may have large errors.
                prop_assert!(back.iter().all(|v| v.is_finite()), "{kind:?}");
                continue;
            }
            let max = row.iter().fold(0.0_f32, |max, v| max.max(v.abs()));
            for (a, b) in row.iter().zip(&back) {
                let bound = coarseness(kind) * max + 1e-7;
                prop_assert!((a - b).abs() <= bound, "{kind:?}: {a} became {b}, largest {max}");
            }
        }
    }

    #[test]
    fn any_bits_encode_and_any_bytes_decode(seed: u64, weighed: bool) {
        let mut state = seed | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u32
        };
        let row: Vec<f32> = (0..256).map(|_| f32::from_bits(next())).collect();
        let importance: Vec<f32> = (0..256).map(|_| f32::from_bits(next()).abs()).collect();
        for kind in BLOCK_TYPES {
            round_trip(kind, &row, weighed.then_some(&importance));
            kind.encode_refined(&row, weighed.then_some(&importance), &mut vec![0; kind.row_bytes(256).unwrap()]);
            let bytes: Vec<u8> = (0..kind.row_bytes(256).unwrap()).map(|_| next() as u8).collect();
            kind.decode(&bytes, &mut [0.0; 256]);
        }
    }
}
