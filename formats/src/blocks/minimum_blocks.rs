//! Super-blocks whose parts have a scale and a minimum: Q2_K, Q4_K and Q5_K.

use half::f16;

use super::SUPER;
use super::search::{
    LANES, Lanes, Offsets, by_largest, load, nearest, positive, square_sums, weigh_lanes, with_minimum,
};
use crate::vector::vectorized;

/// How the reference search finds scales and minimums.
pub(super) struct MinimumBlocks {
    /// The search without an importance matrix.
    pub(super) plain: Offsets,
    /// Whether weights without an importance matrix are the magnitudes plus their root mean square in the part, instead
    /// of the magnitudes alone.
    pub(super) rms: bool,
    /// The mean square of a block times this is the `σ²` of weights with an importance matrix.
    pub(super) sigma2: f32,
    /// The largest scale and minimum of a part.
    pub(super) top: u8,
}

pub(super) struct MinimumBlock<'a, const PARTS: usize> {
    pub(super) d: f16,
    pub(super) dmin: f16,
    pub(super) scales: [u8; PARTS],
    pub(super) minimums: [u8; PARTS],
    /// All codes, one per byte.
    pub(super) codes: &'a [u8],
}

impl MinimumBlocks {
    /// Finds the blocks of a row, which have `PARTS` parts of `N` elements. `put` writes each into its `bytes` bytes,
    /// which are zero before the call.
    pub(super) fn encode<const N: usize, const PARTS: usize>(
        &self,
        row: &[f32],
        importance: Option<&[f32]>,
        (out, bytes): (&mut [u8], usize),
        put: impl Fn(&MinimumBlock<'_, PARTS>, &mut [u8]),
    ) {
        const BATCH: usize = SUPER * LANES;
        out.fill(0);
        for (i, (x, out)) in row.chunks(BATCH).zip(out.chunks_mut(bytes * LANES)).enumerate() {
            let importance = importance.map(|importance| &importance[BATCH * i..][..x.len()]);
            vectorized(
                #[inline(always)]
                || {
                    self.batch::<N, PARTS>(x, importance, |b, block| {
                        put(block, &mut out[bytes * b..][..bytes])
                    });
                },
            );
        }
    }

    #[inline(always)]
    fn batch<const N: usize, const PARTS: usize>(
        &self,
        row: &[f32],
        importance: Option<&[f32]>,
        mut take: impl FnMut(usize, &MinimumBlock<'_, PARTS>),
    ) {
        let top = self.plain.top;
        // One entry per part, with one block per lane.
        let (mut scales, mut minimums, mut weights) =
            ([[0.0; LANES]; PARTS], [[0.0; LANES]; PARTS], [[0.0; LANES]; PARTS]);
        let mut codes = [0_u8; SUPER * LANES];
        let sums = if importance.is_some() { square_sums(row) } else { [0.0; LANES] };
        for (g, (values, codes)) in row.chunks(N * LANES).zip(codes.chunks_mut(N * LANES)).enumerate() {
            let x = load::<N>(values);
            let place = |lane: usize| ((LANES * g + lane) / PARTS, lane % PARTS);
            let found = match importance {
                Some(importance) => {
                    let importance = load::<N>(&importance[N * LANES * g..][..values.len()]);
                    let sigma2: Lanes =
                        std::array::from_fn(|i| self.sigma2 * (sums[place(i).0] / SUPER as f32));
                    with_minimum(Offsets::weighted(top), &x, &weigh_lanes(&importance, &sigma2, &x))
                }
                None => with_minimum(self.plain, &x, &self.plain_weights(&x)),
            };
            let parts = values.chunks_exact(N).zip(codes.chunks_exact_mut(N));
            for (lane, (values, codes)) in parts.enumerate() {
                let (block, part) = place(lane);
                scales[part][block] = found.scale[lane];
                minimums[part][block] = found.minimum[lane];
                weights[part][block] = found.weight[lane];
                found.codes(lane, values, codes);
            }
        }
        let (mut of_scales, mut of_minimums) = ([[0; LANES]; PARTS], [[0; LANES]; PARTS]);
        let units =
            [(&scales, &mut of_scales), (&minimums, &mut of_minimums)].map(
                |(values, codes)| match importance {
                    Some(_) => positive(i32::from(self.top), values, &weights, codes),
                    None => by_largest(i32::from(self.top), values, codes),
                },
            );
        for (b, (x, codes)) in row.chunks_exact(SUPER).zip(codes.chunks_exact_mut(SUPER)).enumerate() {
            let [d, dmin] = units.map(|unit| f16::from_f32(unit[b]));
            let scales = std::array::from_fn(|j| of_scales[j][b]);
            let minimums = std::array::from_fn(|j| of_minimums[j][b]);
            for (j, (x, codes)) in x.chunks_exact(N).zip(codes.chunks_exact_mut(N)).enumerate() {
                let scale = d.to_f32() * f32::from(scales[j]);
                round_again(scale, dmin.to_f32() * f32::from(minimums[j]), top, x, codes);
            }
            take(b, &MinimumBlock { d, dmin, scales, minimums, codes });
        }
    }

    #[inline(always)]
    fn plain_weights<const N: usize>(&self, x: &[Lanes; N]) -> [Lanes; N] {
        let mut rms = [0.0; LANES];
        if self.rms {
            for x in x {
                for i in 0..LANES {
                    rms[i] += x[i] * x[i];
                }
            }
            rms.iter_mut().for_each(|sum| *sum = (*sum / N as f32).sqrt());
        }
        let mut weights = [[0.0; LANES]; N];
        for e in 0..N {
            for i in 0..LANES {
                weights[e][i] = rms[i] + x[e][i].abs();
            }
        }
        weights
    }
}

/// Recomputes the codes with the stored scale, unless it is 0.
#[inline(always)]
fn round_again(scale: f32, minimum: f32, top: i32, x: &[f32], codes: &mut [u8]) {
    if scale == 0.0 {
        return;
    }
    for (code, x) in codes.iter_mut().zip(x) {
        *code = nearest((x + minimum) / scale).max(0).min(top) as u8;
    }
}
