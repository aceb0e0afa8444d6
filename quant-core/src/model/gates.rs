//! Gated products other than an activation times a value.

use candle_core::{D, Device, Tensor};

use super::tensor_values::with_values;
use crate::{Error, Result};

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `g σ(alpha g) (u + 1)`, elementwise, with `g = min(gate, limit)` and `u` clamped to `−limit..=limit`; NaN stays NaN.
pub(super) fn clamped(alpha: f32, limit: f32, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    if gate.dims() != up.dims() {
        return Err(Error::Internal(format!("gate {:?} and up {:?} differ", gate.dims(), up.dims())));
    }
    // `f32::min` would turn NaN into the limit.
    let at_most = |x: f32| if x > limit { limit } else { x };
    let values = with_values(gate, |gate| {
        with_values(up, |up| {
            let pairs = gate.iter().zip(up);
            Ok(pairs
                .map(|(&gate, &up)| {
                    let (g, u) = (at_most(gate), at_most(up));
                    let u = if u < -limit { -limit } else { u };
                    g * sigmoid(alpha * g) * (u + 1.0)
                })
                .collect::<Vec<f32>>())
        })
    })?;
    Ok(Tensor::from_vec(values, gate.dims(), &Device::Cpu)?)
}

/// `x` `[…, width]` times the sigmoid of a gate `[…, 1]`.
pub(super) fn by_token(x: &Tensor, gate: &Tensor) -> Result<Tensor> {
    let width = x.dim(D::Minus1)?.max(1);
    let values = with_values(gate, |gate| {
        with_values(x, |x| {
            if gate.len() * width != x.len() {
                return Err(Error::Internal(format!("got {} gates for {} values", gate.len(), x.len())));
            }
            let rows = x.chunks_exact(width).zip(gate);
            Ok(rows
                .flat_map(|(row, g)| {
                    let factor = sigmoid(*g);
                    row.iter().map(move |x| x * factor)
                })
                .collect::<Vec<f32>>())
        })
    })?;
    Ok(Tensor::from_vec(values, x.dims(), &Device::Cpu)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(values: &[f32], rows: usize) -> Tensor {
        Tensor::from_slice(values, (1, rows, values.len() / rows), &Device::Cpu).unwrap()
    }

    fn flat(tensor: &Tensor) -> Vec<f32> {
        tensor.flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn gates_scale_whole_tokens() {
        let x = tensor(&[1.0, 2.0, 3.0, 4.0], 2);
        let y = flat(&by_token(&x, &tensor(&[0.0, 100.0], 2)).unwrap());
        assert_eq!(y, [0.5, 1.0, 3.0, 4.0]);
        assert!(by_token(&x, &tensor(&[0.0], 1)).is_err());
    }

    #[test]
    fn both_sides_are_clamped() {
        let (gate, up) = ([1.0, 9.0, -9.0, 0.5, f32::NAN], [0.5, 20.0, -20.0, -20.0, 1.0]);
        let found = flat(&clamped(1.702, 7.0, &tensor(&gate, 1), &tensor(&up, 1)).unwrap());
        let exact = |g: f64, u: f64| g / (1.0 + (-1.702 * g).exp()) * (u + 1.0);
        let expected = [exact(1.0, 0.5), exact(7.0, 7.0), exact(-9.0, -7.0), exact(0.5, -7.0)];
        for (found, expected) in found.iter().zip(expected) {
            approx::assert_relative_eq!(f64::from(*found), expected, max_relative = 1e-6);
        }
        assert!(found[4].is_nan());
        assert!(clamped(1.702, 7.0, &tensor(&gate, 1), &tensor(&up[..4], 1)).is_err());
    }
}
