//! Compares blocks encoded by GPTQ with plain rounding and with the definition.

use half::f16;

use super::{Factor, Hessian, encode_blocks};
use crate::blocks::{BLOCK_TYPES, Q4_0, Q4_K, Q6_K};
use crate::random::SplitMix64;

/// This is not a multiple of the number of rows in a tile.
const ROWS: usize = 37;
const COLUMNS: usize = 768;

fn values(random: &mut SplitMix64, len: usize) -> Vec<f32> {
    let mut uniform = || (random.next_u64() >> 40) as f32 / (1 << 24) as f32;
    (0..len).map(|_| (0..6).map(|_| uniform()).sum::<f32>() - 3.0).collect()
}

/// Each channel is strongly correlated with the one before.
fn correlated(random: &mut SplitMix64, k: usize) -> Hessian {
    let mut hessian = Hessian::new(k).unwrap();
    for _ in 0..2 * k {
        let mut row = values(random, k);
        for c in 1..k {
            row[c] += 0.9 * row[c - 1];
        }
        hessian.add(&row);
    }
    hessian.finish();
    hessian
}

fn factor(hessian: &Hessian) -> Factor {
    Factor::new(hessian, (0..hessian.channels()).collect(), 0.01).unwrap()
}

fn importance(hessian: &Hessian) -> Vec<f32> {
    hessian.diagonal().iter().map(|d| *d as f32).collect()
}

/// `tr(E H Eᵀ)` for the errors `E` of a tensor.
fn output_error(rows: &[f32], back: &[f32], hessian: &Hessian) -> f64 {
    let k = hessian.channels();
    let mut sum = 0.0;
    for (row, back) in rows.chunks_exact(k).zip(back.chunks_exact(k)) {
        let e: Vec<f64> = row.iter().zip(back).map(|(a, b)| f64::from(*a) - f64::from(*b)).collect();
        for i in 0..k {
            sum += e[i] * (0..k).map(|j| hessian.at(i, j) * e[j]).sum::<f64>();
        }
    }
    sum
}

#[test]
fn outputs_are_nearer_than_with_plain_rounding() {
    let mut random = SplitMix64(3);
    let hessian = correlated(&mut random, COLUMNS);
    let (factor, importance) = (factor(&hessian), importance(&hessian));
    let rows = values(&mut random, 4 * COLUMNS);
    for kind in BLOCK_TYPES.iter().filter(|kind| !kind.is_float()) {
        let row_bytes = kind.row_bytes(COLUMNS).unwrap();
        let mut bytes = vec![0; 4 * row_bytes];
        let mut back = vec![0.0; rows.len()];
        let mut decode = |bytes: &[u8]| {
            for (bytes, back) in bytes.chunks_exact(row_bytes).zip(back.chunks_exact_mut(COLUMNS)) {
                kind.decode(bytes, back);
            }
            output_error(&rows, &back, &hessian)
        };
        for (row, out) in rows.chunks_exact(COLUMNS).zip(bytes.chunks_exact_mut(row_bytes)) {
            kind.encode_refined(row, Some(&importance), out);
        }
        let plain = decode(&bytes);
        encode_blocks(&rows, COLUMNS, kind, &importance, &factor, &mut bytes);
        let moved = decode(&bytes);
        // Types with code books are rounded a block at a time, so errors are compensated only in later blocks.
        let share = if kind.name.starts_with("IQ2") || kind.name.starts_with("IQ3") { 1.0 } else { 0.6 };
        assert!(moved < share * plain, "{kind:?}: {moved:e} of {plain:e}");
    }
}

#[test]
fn inputs_that_know_nothing_of_each_other_leave_the_search_as_it_is() {
    let mut random = SplitMix64(5);
    let mut hessian = Hessian::new(512).unwrap();
    for c in 0..512 {
        let mut row = vec![0.0; 512];
        row[c] = 0.5 + (c % 7) as f32;
        hessian.add(&row);
    }
    hessian.finish();
    let (factor, importance) = (factor(&hessian), importance(&hessian));
    let rows = values(&mut random, 3 * 512);
    for kind in [&Q4_0, &Q4_K, &Q6_K] {
        let row_bytes = kind.row_bytes(512).unwrap();
        let mut bytes = vec![0; 3 * row_bytes];
        encode_blocks(&rows, 512, kind, &importance, &factor, &mut bytes);
        let mut expected = Vec::new();
        for (b, x) in rows.chunks_exact(kind.elements).enumerate() {
            let first = b * kind.elements % 512;
            let mut block = kind.fit_scales(x, &importance[first..][..kind.elements]).unwrap();
            x.iter().enumerate().for_each(|(e, v)| {
                block.choose(e, *v);
            });
            let mut out = vec![0; kind.bytes];
            block.write(&mut out);
            expected.extend(out);
        }
        assert!(bytes == expected, "{kind:?}");
    }
}

/// Errors are propagated here as in the definition, in double precision; every code must then be the nearest one.
#[test]
fn codes_are_nearest_to_the_weights_updated_for_earlier_columns() {
    let mut random = SplitMix64(9);
    let hessian = correlated(&mut random, COLUMNS);
    let (factor, importance) = (factor(&hessian), importance(&hessian));
    let rows = values(&mut random, ROWS * COLUMNS);
    let row_bytes = Q4_0.row_bytes(COLUMNS).unwrap();
    let mut bytes = vec![0; ROWS * row_bytes];
    encode_blocks(&rows, COLUMNS, &Q4_0, &importance, &factor, &mut bytes);
    let mut moved = 0.0_f64;
    for (row, bytes) in rows.chunks_exact(COLUMNS).zip(bytes.chunks_exact(row_bytes)) {
        let mut back = vec![0.0; COLUMNS];
        Q4_0.decode(bytes, &mut back);
        let mut now: Vec<f64> = row.iter().map(|v| f64::from(*v)).collect();
        for c in 0..COLUMNS {
            let block = &bytes[c / 32 * 18..];
            let d = f64::from(f16::from_le_bytes([block[0], block[1]]).to_f32());
            let stored = f64::from(back[c]);
            let error = now[c] - stored;
            let [low, high] = [-8.0 * d, 7.0 * d];
            let saturated = (stored == low || stored == high) && error.signum() == stored.signum();
            assert!(saturated || error.abs() <= 0.501 * d.abs(), "column {c}: {} is {stored}", now[c]);
            let ratios = factor.ratios().row(c, c + 1..COLUMNS);
            for (later, ratio) in now[c + 1..].iter_mut().zip(ratios) {
                *later -= error * f64::from(*ratio);
            }
            moved = moved.max((now[c] - f64::from(row[c])).abs());
        }
    }
    assert!(moved > 0.1, "nothing moved: {moved}");
}
