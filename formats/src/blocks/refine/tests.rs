//! Compares the search with the reference's, and its fields with the decoded values of their bytes.

use super::super::grid::{Fields, Steps};
use super::super::{BLOCK_TYPES, BlockType};
use crate::random::SplitMix64;

/// Types, with the maximum error relative to the reference's, on rows with heavy tails.
const MAX_SHARE_OF_REFERENCE: [(&str, f64); 16] = [
    ("Q8_0", 1.0),
    ("Q4_0", 0.97),
    ("Q4_1", 0.97),
    ("Q5_0", 0.97),
    ("Q5_1", 0.97),
    ("Q2_K", 0.97),
    ("Q3_K", 0.98),
    ("Q4_K", 0.97),
    ("Q5_K", 0.97),
    ("Q6_K", 1.0),
    ("IQ4_NL", 0.98),
    ("IQ4_XS", 0.98),
    ("TQ1_0", 0.5),
    ("TQ2_0", 0.5),
    ("MXFP4", 0.97),
    ("NVFP4", 0.97),
];

fn uniform(random: &mut SplitMix64) -> f32 {
    (random.next_u64() >> 40) as f32 / (1 << 24) as f32
}

/// Approximately normal numbers, some of them larger.
fn heavy(random: &mut SplitMix64, len: usize) -> Vec<f32> {
    let mut value = || {
        let normal: f32 = (0..12).map(|_| uniform(random)).sum::<f32>() - 6.0;
        normal / (0.2 + uniform(random)).sqrt()
    };
    (0..len).map(|_| value() * 0.02).collect()
}

fn importances(random: &mut SplitMix64, len: usize) -> Vec<f32> {
    (0..len).map(|_| (4.0 * (uniform(random) + uniform(random) - 1.0)).exp()).collect()
}

/// The objective that the search minimizes.
fn error(kind: &BlockType, row: &[f32], importance: Option<&[f32]>, bytes: &[u8]) -> f64 {
    let mut back = vec![0.0; row.len()];
    kind.decode(bytes, &mut back);
    let sigma2 = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / row.len() as f64;
    let each = row.iter().zip(&back).enumerate().map(|(i, (x, b))| {
        let (x, b) = (f64::from(*x), f64::from(*b));
        importance.map_or(1.0, |im| f64::from(im[i])) * (sigma2 + x * x).powf(0.25) * (x - b).powi(2)
    });
    each.sum()
}

fn errors(kind: &BlockType, row: &[f32], importance: Option<&[f32]>) -> [f64; 2] {
    let mut bytes = vec![0xa5; kind.row_bytes(row.len()).unwrap()];
    kind.encode_refined(row, importance, &mut bytes);
    let ours = error(kind, row, importance, &bytes);
    kind.encode(row, importance, &mut bytes);
    [ours, error(kind, row, importance, &bytes)]
}

#[test]
fn every_type_with_blocks_leaves_less_error_than_the_reference() {
    let blocks: Vec<&str> =
        BLOCK_TYPES.iter().filter(|kind| kind.grid.is_some()).map(|kind| kind.name).collect();
    assert_eq!(blocks.len(), MAX_SHARE_OF_REFERENCE.len());
    for (name, share) in MAX_SHARE_OF_REFERENCE {
        let kind = super::super::block_type(name).unwrap();
        let mut random = SplitMix64(7);
        for weighted in [true, false] {
            let (mut ours, mut theirs) = (0.0, 0.0);
            for _ in 0..12 {
                let row = heavy(&mut random, 1024);
                let importance = importances(&mut random, 1024);
                let [a, b] = errors(kind, &row, weighted.then_some(&importance));
                ours += a;
                theirs += b;
            }
            assert!(ours <= share * theirs, "{name}, weighted {weighted}: {ours:e} of {theirs:e}");
        }
    }
}

#[test]
fn rows_at_the_ends_of_the_range_are_finite_and_no_worse() {
    let mut random = SplitMix64(11);
    let plain = heavy(&mut random, 256);
    let scaled = |by: f32| plain.iter().map(|x| x * by).collect::<Vec<f32>>();
    let mut spike = vec![0.0; 256];
    spike[77] = -3.0;
    let rows = [
        ("positive", plain.iter().map(|x| x.abs() + 0.01).collect()),
        ("negative", plain.iter().map(|x| -x.abs() - 0.01).collect()),
        ("alike", vec![-2.5; 256]),
        ("a spike", spike),
        ("large", scaled(1e5)),
        ("small", scaled(1e-3)),
    ];
    let gaps: Vec<f32> = (0..256).map(|i| if i < 96 || i % 2 == 0 { 0.0 } else { 1.0 }).collect();
    for kind in BLOCK_TYPES.iter().filter(|kind| !kind.is_float()) {
        for (what, row) in &rows {
            for importance in [None, Some(&gaps[..])] {
                let [ours, theirs] = errors(kind, row, importance);
                let scale: f64 = row.iter().map(|x| f64::from(*x).powi(2)).sum();
                assert!(ours <= 1.01 * theirs + 1e-6 * scale, "{kind:?}, {what}: {ours:e} of {theirs:e}");
            }
        }
        for by in [1e-38, 1e-43] {
            let mut bytes = vec![0; kind.row_bytes(256).unwrap()];
            kind.encode_refined(&scaled(by), None, &mut bytes);
            let mut back = [f32::NAN; 256];
            kind.decode(&bytes, &mut back);
            assert!(back.iter().all(|v| *v == 0.0), "{kind:?}, {by:e}");
        }
    }
}

#[test]
fn values_whose_scale_overflows_are_not_finite() {
    for kind in BLOCK_TYPES.iter() {
        let Some(grid) = kind.grid else { continue };
        for limit in grid.limits().into_iter().filter(|limit| limit.is_finite()) {
            let back = |value: f32| {
                let mut row = vec![0.01; 256];
                row[70] = value;
                let mut bytes = vec![0; kind.row_bytes(256).unwrap()];
                kind.encode_refined(&row, None, &mut bytes);
                let mut back = [0.0; 256];
                kind.decode(&bytes, &mut back);
                back
            };
            let is_finite = |row: &[f32]| row.iter().all(|v| v.is_finite());
            for part in [0.001, 0.05, 0.5, 0.7, 0.99, 1.01, 3.0] {
                let row = back(part * limit);
                // Near the limit, it depends on the levels that the search prefers.
                assert!(is_finite(&row) || part > 0.4, "{kind:?}, {part} of {limit}");
                let off = (row[70] / (part * limit) - 1.0).abs();
                assert!(!is_finite(&row) || off < 0.2 && part < 1.0, "{kind:?}, {part} of {limit}: {off}");
            }
        }
    }
}

#[test]
fn bytes_of_any_fields_decode_to_what_rounding_returns() {
    let mut random = SplitMix64(13);
    for kind in BLOCK_TYPES.iter() {
        let Some(grid) = kind.grid else { continue };
        let [low, high] = grid.factors;
        for _ in 0..20 {
            let mut fields = Fields { d: 0.5, dmin: 0.25, ..Fields::ZERO };
            let mut any = || low + (random.next_u64() % (high - low + 1) as u64) as i32;
            fields.factors.iter_mut().for_each(|f| *f = any());
            if matches!(grid.steps, Steps::Minimum { .. }) {
                fields.minimums.iter_mut().for_each(|m| *m = any());
            }
            let mut expected = vec![0.0; kind.elements];
            for (e, stored) in expected.iter_mut().enumerate() {
                let part = grid.part(&fields, e / grid.part);
                (fields.codes[e], *stored) = grid.round(part, 200.0 * (uniform(&mut random) - 0.5));
            }
            let mut bytes = vec![0xa5; kind.bytes];
            (grid.pack)(&fields, &mut bytes);
            let mut back = vec![f32::NAN; kind.elements];
            kind.decode(&bytes, &mut back);
            assert_eq!(back, expected, "{kind:?}");
        }
    }
}
