//! The tiles of a head equal the columns of the decoder's own logits.

use super::*;
use rand::{RngExt, SeedableRng, rngs::StdRng};

fn random(len: usize, seed: u64) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..len).map(|_| rng.random_range(-1.0..1.0)).collect()
}

/// A head for 300 tokens in this dtype, with a bias and this transform.
fn parts(dtype: Dtype, transform: LogitsTransform) -> HeadParts {
    let weight = Arc::new(dtype.narrow(&random(300 * 40, 1)));
    HeadParts { shape: [300, 40], dtype, weight, bias: Some(random(300, 2)), transform }
}

/// All logits by definition.
fn definition(parts: &HeadParts, inputs: &[f32]) -> Vec<f64> {
    let [n, k] = parts.shape;
    let mut weight = vec![0.0; n * k];
    parts.dtype.widen(&parts.weight, &mut weight);
    let row = |x: &[f32]| -> Vec<f64> {
        (0..n)
            .map(|o| {
                let dot: f64 =
                    x.iter().zip(&weight[o * k..]).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                let scaled =
                    (dot + f64::from(parts.bias.as_ref().unwrap()[o])) * f64::from(parts.transform.scale);
                parts
                    .transform
                    .softcap
                    .map_or(scaled, |cap| f64::from(cap) * (scaled / f64::from(cap)).tanh())
            })
            .collect()
    };
    inputs.chunks(k).flat_map(row).collect()
}

#[test]
fn tiles_are_the_columns_of_all_logits() {
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        for transform in [LogitsTransform::IDENTITY, LogitsTransform { scale: 0.7, softcap: Some(3.0) }] {
            let parts = parts(dtype, transform);
            let head = Head::from_parts(parts.clone()).unwrap();
            assert_eq!(head.to_parts().unwrap(), parts);
            let inputs = head.inputs(random(9 * 40, 3)).unwrap();
            let exact = definition(&parts, &inputs);
            let (at, mut buffers, mut out) =
                (head.at(&inputs).unwrap(), HeadBuffers::default(), vec![f32::NAN; 5]);
            for columns in [0..256, 256..300, 17..18] {
                at.logits(columns.clone(), &mut buffers, &mut out).unwrap();
                assert_eq!(out.len(), 9 * columns.len());
                for (row, found) in out.chunks(columns.len()).enumerate() {
                    for (column, found) in columns.clone().zip(found) {
                        approx::assert_abs_diff_eq!(
                            f64::from(*found),
                            exact[row * 300 + column],
                            epsilon = 2e-5
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_decoders_head_gives_its_logits() {
    let linear = |bias| {
        let weight = Arc::new(WeightBody::F32 { shape: [70, 12], values: random(70 * 12, 4) });
        Linear::new(weight, bias)
    };
    let bias = Tensor::from_vec(random(70, 5), 70, &Device::Cpu).unwrap();
    for linear in [linear(None), linear(Some(bias))] {
        let head = Head::new(&linear, LogitsTransform::IDENTITY).unwrap();
        let inputs = random(6 * 12, 6);
        let x = Tensor::from_slice(&inputs, (1, 6, 12), &Device::Cpu).unwrap();
        let whole = linear.forward(&x).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let (mut tile, mut all) = (Vec::new(), Vec::new());
        head.at(&inputs).unwrap().logits(0..70, &mut HeadBuffers::default(), &mut tile).unwrap();
        head.all_logits(&inputs, &mut all).unwrap();
        assert_eq!(all, whole);
        for (a, b) in tile.iter().zip(&whole) {
            approx::assert_abs_diff_eq!(a, b, epsilon = 1e-5);
        }
        // A head that is written and read back gives bit-identical logits.
        let again = Head::from_parts(head.to_parts().unwrap()).unwrap();
        let mut same = Vec::new();
        again.at(&inputs).unwrap().logits(0..70, &mut HeadBuffers::default(), &mut same).unwrap();
        assert_eq!(same, tile);
    }
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let good = parts(Dtype::F16, LogitsTransform::IDENTITY);
    for bad in [
        HeadParts { shape: [301, 40], ..good.clone() },
        HeadParts { shape: [usize::MAX, 40], ..good.clone() },
        HeadParts { dtype: Dtype::F32, ..good.clone() },
        HeadParts { dtype: Dtype::I16, ..good.clone() },
        HeadParts { bias: Some(vec![0.0; 299]), ..good.clone() },
    ] {
        assert!(matches!(Head::from_parts(bad), Err(Error::Internal(_))));
    }
    assert!(Head::from_parts(good).is_ok());
}
