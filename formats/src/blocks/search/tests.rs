//! The searches in lanes give the bits of the scalar ones.

use proptest::prelude::*;

use super::super::iq4::LEVELS;
use super::super::{BLOCK_TYPES, SUPER};
use super::lanes::{LANES, Lanes, load, squares};
use super::*;
use crate::random::SplitMix64;

fn values(seed: u64, len: usize) -> Vec<f32> {
    let mut random = SplitMix64(seed);
    let mut values = Vec::with_capacity(len * LANES);
    for _ in 0..LANES {
        let kind = random.next_u64() % 12;
        let exponent = (random.next_u64() % 60) as i32 - 40;
        for _ in 0..len {
            let uniform = (random.next_u64() >> 40) as f32 / (1 << 23) as f32 - 1.0;
            let spiky = uniform / (0.05 + ((random.next_u64() >> 40) as f32 / (1 << 24) as f32));
            values.push(match kind {
                0 | 1 => spiky * 0.02,
                2 => spiky * (exponent as f32).exp2(),
                3 => uniform.abs(),
                4 => -uniform.abs(),
                5 => 0.0,
                6 => -2.5,
                7 => (uniform * 8.0).round() / 4.0,
                8 => uniform * 1e-39,
                9 => uniform * 1e30,
                10 if random.next_u64().is_multiple_of(8) => spiky,
                10 => 0.0,
                _ => uniform * if random.next_u64().is_multiple_of(16) { 3e38 } else { 1e-20 },
            });
        }
    }
    values
}

/// Nonnegative weights, of which some are zero.
fn weights(seed: u64, len: usize) -> Vec<f32> {
    let mut random = SplitMix64(seed ^ 0x55aa);
    let zeros = random.next_u64().is_multiple_of(2);
    let mut value = || {
        let uniform = (random.next_u64() >> 40) as f32 / (1 << 24) as f32;
        if zeros && random.next_u64().is_multiple_of(3) { 0.0 } else { (8.0 * uniform - 4.0).exp() }
    };
    (0..len * LANES).map(|_| value()).collect()
}

fn bits(value: f32) -> u32 {
    if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() }
}

fn compare_minimum<const N: usize>(seed: u64, search: Offsets) {
    let (x, w) = (values(seed, N), weights(seed, N));
    let found = with_minimum(search, &load::<N>(&x), &load::<N>(&w));
    for (lane, (x, w)) in x.chunks_exact(N).zip(w.chunks_exact(N)).enumerate() {
        let (mut expected, mut codes) = ([0; N], [0; N]);
        let (scale, minimum) = scalar::with_minimum(search, x, w, &mut expected);
        found.codes(lane, x, &mut codes);
        assert_eq!(bits(found.scale[lane]), bits(scale), "{x:?} {w:?}");
        assert_eq!(bits(found.minimum[lane]), bits(minimum), "{x:?} {w:?}");
        assert_eq!(codes, expected, "{x:?} {w:?}");
        let weight = w.iter().fold(0.0, |sum, w| sum + w);
        assert_eq!(found.weight[lane], weight);
    }
}

fn compare_symmetric<const N: usize>(seed: u64, n: i32, weighted: bool) {
    let (x, w) = (values(seed, N), weights(seed, N));
    let lanes = load::<N>(&x);
    let found = symmetric(n, &lanes, &if weighted { load::<N>(&w) } else { squares(&lanes) });
    let mut descent = [[0.0; LANES]; N];
    let scales = symmetric_by_descent(n, &lanes, &mut descent);
    for (lane, (x, w)) in x.chunks_exact(N).zip(w.chunks_exact(N)).enumerate() {
        let (mut expected, mut codes) = ([0; N], [0; N]);
        let scale = scalar::symmetric(n, x, weighted.then_some(w), &mut expected);
        found.codes(lane, x, &mut codes);
        assert_eq!(bits(found.scale[lane]), bits(scale), "{x:?} {w:?}");
        assert_eq!(codes, expected, "{x:?} {w:?}");
        if N <= 16 {
            let scale = scalar::symmetric_by_descent(n, x, &mut expected);
            assert_eq!(bits(scales[lane]), bits(scale), "{x:?}");
            assert_eq!(descent.map(|codes| codes[lane] as u8), expected, "{x:?}");
        }
    }
}

fn compare_positive<const N: usize>(seed: u64, top: i32) {
    let x: Vec<f32> =
        values(seed, N).iter().map(|x| if seed.is_multiple_of(4) { *x } else { x.abs() }).collect();
    let w = weights(seed, N);
    let mut codes = [[0; LANES]; N];
    let scales = positive(top, &load::<N>(&x), &load::<N>(&w), &mut codes);
    for (lane, (x, w)) in x.chunks_exact(N).zip(w.chunks_exact(N)).enumerate() {
        let mut expected = [0; N];
        let scale = scalar::positive(top, x, w, &mut expected);
        assert_eq!(bits(scales[lane]), bits(scale), "{x:?} {w:?}");
        assert_eq!(codes.map(|codes| codes[lane]), expected, "{x:?} {w:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn lanes_are_independent(seed: u64, weighted: bool) {
        let plain = |top, absolute| Offsets { top, first: -0.5, step: 0.1, steps: 15, absolute };
        compare_minimum::<32>(seed, if weighted { Offsets::weighted(15) } else { plain(31, false) });
        compare_minimum::<16>(seed, if weighted { Offsets::weighted(3) } else { plain(3, true) });
        compare_symmetric::<32>(seed, 8, weighted);
        compare_symmetric::<16>(seed, if weighted { 4 } else { 32 }, weighted);
        compare_positive::<8>(seed, 63);
        compare_positive::<16>(seed, 15);
    }

    #[test]
    fn scales_of_levels_are_those_of_the_scalar_search(seed: u64) {
        let (x, w) = (values(seed, 32), weights(seed, 32));
        let scales: Lanes = level_scales(&load::<32>(&x), &load::<32>(&w));
        for (lane, (x, w)) in x.chunks_exact(32).zip(w.chunks_exact(32)).enumerate() {
            prop_assert_eq!(bits(scales[lane]), bits(scalar::level_scale(x, w)), "{:?} {:?}", x, w);
        }
    }

    #[test]
    fn codes_of_levels_are_those_of_the_scalar_search(bits: u32) {
        let x = f32::from_bits(bits);
        prop_assert_eq!(level_code(x), scalar::code(x), "{}", x);
    }

    /// Blocks whose weights do not depend on other blocks get the same bytes whether they are encoded alone or within a
    /// row.
    #[test]
    fn blocks_do_not_depend_on_others(seed: u64, weighted: bool) {
        let mut random = SplitMix64(seed);
        let blocks = 1 + (random.next_u64() % 35) as usize;
        let x: Vec<f32> = (0..blocks).flat_map(|_| values(random.next_u64(), SUPER / LANES)).collect();
        let im: Vec<f32> = (0..blocks).flat_map(|_| weights(random.next_u64(), SUPER / LANES)).collect();
        let of_whole_rows = ["Q4_0", "Q4_1", "Q5_0", "Q5_1"];
        for kind in BLOCK_TYPES.iter().filter(|kind| !weighted || !of_whole_rows.contains(&kind.name)) {
            let of = |x: &[f32], im: &[f32]| {
                let mut bytes = vec![0xa5; kind.row_bytes(x.len()).unwrap()];
                kind.encode(x, weighted.then_some(im), &mut bytes);
                bytes
            };
            let alone = x.chunks_exact(SUPER).zip(im.chunks_exact(SUPER)).flat_map(|(x, im)| of(x, im));
            prop_assert_eq!(of(&x, &im), alone.collect::<Vec<u8>>(), "{:?}", kind);
        }
    }
}

#[test]
fn values_near_the_middle_of_two_levels_round_like_their_distances() {
    for pair in LEVELS.windows(2) {
        let middle = (f32::from(pair[0]) + f32::from(pair[1])) / 2.0;
        let mut x = middle;
        (0..300).for_each(|_| x = x.next_down());
        for _ in 0..600 {
            assert_eq!(level_code(x), scalar::code(x), "{x}");
            x = x.next_up();
        }
    }
}
