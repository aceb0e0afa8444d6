//! A reference implementation of GPTQ as in the paper: one row and one column at a time, in `f64`, with the textbook
//! chain of factorizations.

use super::super::grid::{Extent, Grid, GridRule};
use super::{ActOrder, Hessian};

/// `U` with `H⁻¹ = Uᵀ U`, upper triangular, `[k, k]`, of a damped Hessian `[k, k]`.
pub(super) fn chain(h: &[f64], k: usize) -> Vec<f64> {
    let lower = cholesky(h, k);
    let mut inverse = vec![0.0; k * k];
    for c in 0..k {
        let mut x = vec![0.0; k];
        x[c] = 1.0;
        for i in 0..k {
            let sum: f64 = (0..i).map(|j| lower[i * k + j] * x[j]).sum();
            x[i] = (x[i] - sum) / lower[i * k + i];
        }
        for i in (0..k).rev() {
            let sum: f64 = (i + 1..k).map(|j| lower[j * k + i] * x[j]).sum();
            x[i] = (x[i] - sum) / lower[i * k + i];
        }
        for i in 0..k {
            inverse[i * k + c] = x[i];
        }
    }
    let lower = cholesky(&inverse, k);
    let mut upper = vec![0.0; k * k];
    for i in 0..k {
        for j in 0..=i {
            upper[j * k + i] = lower[i * k + j];
        }
    }
    upper
}

fn cholesky(a: &[f64], k: usize) -> Vec<f64> {
    let mut l = vec![0.0; k * k];
    for i in 0..k {
        for j in 0..=i {
            let sum: f64 = (0..j).map(|m| l[i * k + m] * l[j * k + m]).sum();
            let rest = a[i * k + j] - sum;
            l[i * k + j] = if i == j { rest.sqrt() } else { rest / l[j * k + j] };
        }
    }
    assert!(l.iter().all(|v| v.is_finite()), "not positive definite");
    l
}

pub(super) fn damped(hessian: &Hessian, columns: &[usize], damping: f64) -> Vec<f64> {
    let k = columns.len();
    let diagonal = hessian.diagonal();
    let live: Vec<f64> = diagonal.iter().copied().filter(|d| *d > 0.0).collect();
    let mean = if live.is_empty() { 1.0 } else { live.iter().sum::<f64>() / live.len() as f64 };
    let mut h = vec![0.0; k * k];
    for i in 0..k {
        for j in 0..k {
            h[i * k + j] = hessian.at(columns[i], columns[j]);
        }
        if diagonal[columns[i]] == 0.0 {
            h[i * k + i] = mean;
        }
        h[i * k + i] += damping * mean;
    }
    h
}

pub(super) struct Row<'a> {
    pub(super) weights: &'a [f32],
    pub(super) rule: GridRule,
    pub(super) group_size: usize,
    pub(super) order: ActOrder,
    pub(super) columns: &'a [usize],
    /// [`chain`] of [`damped`].
    pub(super) upper: &'a [f64],
}

#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) codes: Vec<u8>,
    pub(super) scales: Vec<f32>,
    pub(super) zeros: Vec<u8>,
    pub(super) loss: f64,
    /// The largest distance of a prescribed code from the weight that it rounds, in steps beyond one half.
    pub(super) beyond: f64,
    /// The largest relative deviation of a prescribed scale from the one computed here.
    pub(super) scale_off: f64,
}

impl Row<'_> {
    /// Quantizes the row. If the other solver's codes and grids are `prescribed`, uses them, so that both solvers have
    /// the same intermediate weights, and records how far the codes are from the nearest ones.
    pub(super) fn quantize(&self, prescribed: Option<(&[u8], &[f32], &[u8])>) -> Outcome {
        let (k, size) = (self.weights.len(), self.group_size);
        let mut w: Vec<f64> = self.columns.iter().map(|&c| f64::from(self.weights[c])).collect();
        let mut out = Outcome {
            codes: vec![0; k],
            scales: vec![0.0; k / size],
            zeros: vec![0; k / size],
            ..Outcome::default()
        };
        let mut grids: Vec<Option<Grid>> = vec![None; k / size];
        let fit = |values: &[f32]| self.rule.fit(Extent::of(values).unwrap()).unwrap();
        if self.order == ActOrder::StaticGroups {
            for (grid, group) in grids.iter_mut().zip(self.weights.chunks_exact(size)) {
                *grid = Some(fit(group));
            }
        }
        for c in 0..k {
            let group = self.columns[c] / size;
            let grid = *grids[group].get_or_insert_with(|| {
                let current: Vec<f32> = w[c..c + size].iter().map(|w| *w as f32).collect();
                fit(&current)
            });
            let (mut scale, mut zero, mut code) = (grid.scale(), grid.zero(), grid.code(w[c] as f32));
            if let Some((codes, scales, zeros)) = prescribed {
                out.scale_off = out.scale_off.max((f64::from(scales[group] / scale) - 1.0).abs());
                (scale, zero, code) = (scales[group], zeros[group], codes[self.columns[c]]);
                let steps = w[c] / f64::from(scale) + f64::from(zero);
                let distance = steps.clamp(0.0, f64::from(self.rule.max_code())) - f64::from(code);
                out.beyond = out.beyond.max(distance.abs() - 0.5);
            }
            (out.scales[group], out.zeros[group], out.codes[self.columns[c]]) = (scale, zero, code);
            let value = (f64::from(code) - f64::from(zero)) * f64::from(scale);
            let pivot = self.upper[c * k + c];
            let error = (w[c] - value) / pivot;
            out.loss += error * error / 2.0;
            let row = &self.upper[c * k..(c + 1) * k];
            w.iter_mut().zip(row).skip(c).for_each(|(w, u)| *w -= error * u);
        }
        out
    }
}
