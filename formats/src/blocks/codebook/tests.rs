//! Bits of IQ2 and IQ3 blocks, and the candidates of code books.

use proptest::prelude::*;

use super::super::{IQ2_XXS, SUPER};
use super::points::Points;
use super::*;
use crate::random::SplitMix64;

#[test]
fn every_bit_of_a_block_is_part_of_a_field() {
    let mut random = SplitMix64(3);
    for (kind, form) in &FORMS {
        for _ in 0..50 {
            let block: Vec<u8> = (2..kind.bytes).map(|_| random.next_u64() as u8).collect();
            let mut fields = Fields::ZERO;
            (form.unpack)(&block, &mut fields);
            let mut packed = vec![0xa5; block.len()];
            (form.pack)(&fields, &mut packed);
            assert_eq!(packed, block, "{kind:?}");
        }
    }
}

#[test]
fn fields_have_their_places() {
    let mut block = vec![0; 66];
    block[..2].copy_from_slice(&half::f16::from_f32(2.0).to_le_bytes());
    // The second group has point 1, which is level 1 (bit pattern 2 is level 2 of the first element), and the
    // signs 0000001, so the eighth sign is negative too; factor 3.
    block[3] = 1;
    block[6..10].copy_from_slice(&(1_u32 << 7 | 3 << 28).to_le_bytes());
    let mut out = [0.0; SUPER];
    IQ2_XXS.decode(&block, &mut out);
    let scale = 2.0 * 3.5 * 0.25;
    assert_eq!(out[..8], [8.0 * scale; 8]);
    assert_eq!(out[8..16], [-43.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, -8.0].map(|m| m * scale));
    // The other parts have factor 0.
    assert_eq!(out[32..], [8.0 * 2.0 * 0.5 * 0.25; 224]);
}

#[test]
fn candidates_are_the_nearest_points() {
    let mut random = SplitMix64(8);
    for (_, form) in &FORMS {
        let points: &Points = form.points;
        let book = points.book;
        let (n, top) = (book.elements(), u64::from(book.top()));
        let distance = |index: u16, levels: &[u8]| -> i32 {
            let point = book.points[usize::from(index)];
            (0..n).map(|i| (book.level(point, i) as i32 - i32::from(levels[i])).pow(2)).sum()
        };
        for _ in 0..300 {
            let levels: Vec<u8> = (0..n).map(|_| (random.next_u64() % (top + 1)) as u8).collect();
            let found = points.candidates(&levels);
            let mut all: Vec<u16> = (0..book.points.len() as u16).collect();
            all.sort_by_key(|index| distance(*index, &levels));
            assert_eq!(found, &all[..found.len()]);
            match points.index(&levels) {
                Some(index) => assert_eq!((found, distance(index, &levels)), (&[index][..], 0)),
                None => {
                    assert!(distance(found[0], &levels) > 0);
                    let last = found[found.len() - 1];
                    let next = all.get(found.len());
                    assert!(next.is_none_or(|next| distance(*next, &levels) > distance(last, &levels)));
                }
            }
        }
    }
}

#[test]
fn refined_blocks_have_less_error() {
    let mut random = SplitMix64(11);
    let mut uniform = || (random.next_u64() >> 40) as f32 / (1 << 23) as f32 - 1.0;
    let row: Vec<f32> = (0..4 * SUPER).map(|_| uniform() * uniform() * uniform() * 0.1).collect();
    let importance: Vec<f32> = (0..row.len()).map(|_| (2.0 * uniform()).exp()).collect();
    for (kind, _) in &FORMS {
        let mut bytes = vec![0; kind.row_bytes(row.len()).unwrap()];
        let mut error = |refined: bool| {
            match refined {
                true => kind.encode_refined(&row, Some(&importance), &mut bytes),
                false => kind.encode(&row, Some(&importance), &mut bytes),
            }
            let mut back = vec![0.0; row.len()];
            kind.decode(&bytes, &mut back);
            let errors = row.iter().zip(&back).zip(&importance).map(|((x, b), im)| im * (x - b).powi(2));
            errors.sum::<f32>()
        };
        let [reference, refined] = [false, true].map(&mut error);
        assert!(refined < 0.99 * reference, "{kind:?}: {refined} of {reference}");
    }
}

proptest! {
    /// Zeros have the smallest magnitude of their super-block, and do not affect the other values. Each bit of `zeros` is
    /// a part of 32 elements.
    #[test]
    fn zeros_in_a_row_affect_nothing_else(
        seed: u64,
        zeros in prop::array::uniform3(prop_oneof![Just(u8::MAX), any::<u8>()]),
    ) {
        let mut random = SplitMix64(seed);
        let mut uniform = || (random.next_u64() >> 40) as f32 / (1 << 23) as f32 - 1.0;
        // The first part has the largest scale. It is zero only if the whole super-block is.
        let loudness = |e: usize| if e % SUPER < 32 { 8.0 } else { 1.0 };
        let row: Vec<f32> = (0..3 * SUPER).map(|e| uniform() * uniform() * loudness(e)).collect();
        let is_zero_block = |e: usize| zeros[e / SUPER] == u8::MAX;
        let is_zero = |e: usize| {
            is_zero_block(e) || e % SUPER >= 32 && zeros[e / SUPER] >> (e % SUPER / 32) & 1 == 1
        };
        let partly: Vec<f32> =
            row.iter().enumerate().map(|(e, x)| if is_zero(e) { 0.0 } else { *x }).collect();
        let stored = |row: &[f32], refined: bool| {
            let mut bytes = vec![0xa5; IQ3_S.row_bytes(row.len()).unwrap()];
            match refined {
                true => IQ3_S.encode_refined(row, None, &mut bytes),
                false => IQ3_S.encode(row, None, &mut bytes),
            }
            let mut back = vec![f32::NAN; row.len()];
            IQ3_S.decode(&bytes, &mut back);
            (bytes, back)
        };
        let (_, expected) = stored(&row, false);
        for refined in [false, true] {
            let (bytes, back) = stored(&partly, refined);
            for (e, value) in back.into_iter().enumerate() {
                let block = &bytes[e / SUPER * IQ3_S.bytes..][..IQ3_S.bytes];
                let smallest = f16_bits::get(block, 0);
                if is_zero_block(e) {
                    prop_assert!(value == 0.0 && block.iter().all(|byte| *byte == 0), "element {e}");
                } else if is_zero(e) {
                    prop_assert!(smallest > 0.0 && value.abs() == smallest, "element {e} became {value}");
                } else if !refined {
                    prop_assert_eq!(value, expected[e], "element {}", e);
                }
            }
        }
    }
}
