//! Dequantizes the weights of a view, for layers that are multiplied as floats and for measuring errors.

use std::ops::Range;

use crate::{KernelError, Scales, WeightView, reference};

/// Dequantizes a range of rows. The values are bit-identical to those of
/// [`reference::dequantize_rows`](crate::reference::dequantize_rows).
///
/// `out` is `[rows.len(), k]`, row-major. Allocates nothing and spawns no threads; callers may give each of their
/// threads its own rows.
///
/// # Errors
/// When `rows` is out of range or `out` has the wrong length.
pub fn dequantize_rows(
    weight: &WeightView<'_>,
    rows: Range<usize>,
    out: &mut [f32],
) -> Result<(), KernelError> {
    KernelError::rows(&rows, weight.n())?;
    KernelError::length("output", rows.len() * weight.k(), out.len())?;
    // The scale and the zero point are read once per group.
    let size = weight.group_size();
    let zeros = weight.zeros(rows.clone());
    let zero_point = 1 << (weight.bits() - 1);
    let scales = match weight.scales(rows.clone()) {
        Scales::Float(scales) => scales,
        // These scales are rare, and each value is read once, so the portable reference is fast enough.
        Scales::Progressive { .. } | Scales::E4m3 { .. } | Scales::Super(_) => {
            reference::dequantize_rows(weight, rows, out);
            return Ok(());
        }
    };
    let groups = out.chunks_exact_mut(size).zip(weight.codes(rows.clone()).chunks_exact(size));
    if let Some(format) = weight.float_format() {
        let values = format.values();
        for ((out, codes), &scale) in groups.zip(scales) {
            for (out, &code) in out.iter_mut().zip(codes) {
                *out = values[usize::from(code)] * scale;
            }
        }
        return Ok(());
    }
    for (i, ((out, codes), &scale)) in groups.zip(scales).enumerate() {
        let zero = i32::from(zeros.map_or(zero_point, |zeros| zeros[i]));
        // The difference is exact in `f32`, so the product is the only rounding, as in the reference.
        for (out, &code) in out.iter_mut().zip(codes) {
            *out = (i32::from(code) - zero) as f32 * scale;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::FloatFormat;

    /// A matrix of any shape, with arbitrary codes, zero points and scales.
    #[derive(Debug)]
    struct Matrix {
        shape: [usize; 2],
        bits: u8,
        group_size: usize,
        codes: Vec<u8>,
        scales: Vec<f32>,
        zeros: Option<Vec<u8>>,
    }

    impl Matrix {
        fn view(&self) -> WeightView<'_> {
            let zeros = self.zeros.as_deref();
            WeightView::new(self.shape, self.bits, self.group_size, &self.codes, &self.scales, zeros).unwrap()
        }
    }

    fn matrix() -> impl Strategy<Value = Matrix> {
        (0usize..6, 1usize..40, 0usize..5, 2u8..=8, any::<bool>()).prop_flat_map(
            |(n, group_size, groups, bits, asymmetric)| {
                let (codes, scales) = (n * groups * group_size, n * groups);
                let code = 0..=u8::MAX >> (8 - bits);
                (
                    prop::collection::vec(code.clone(), codes),
                    prop::collection::vec(any::<f32>().prop_filter("finite", |s| s.is_finite()), scales),
                    prop::collection::vec(code, scales),
                )
                    .prop_map(move |(codes, scales, zeros)| Matrix {
                        shape: [n, groups * group_size],
                        bits,
                        group_size,
                        codes,
                        scales,
                        zeros: asymmetric.then_some(zeros),
                    })
            },
        )
    }

    proptest! {
        #[test]
        fn equals_the_reference(matrix in matrix(), cut in 0usize..6, end in 0usize..6) {
            let view = matrix.view();
            let end = end.min(view.n());
            let rows = cut.min(end)..end;
            let mut expected = vec![f32::NAN; rows.len() * view.k()];
            let mut got = expected.clone();
            reference::dequantize_rows(&view, rows.clone(), &mut expected);
            dequantize_rows(&view, rows, &mut got).unwrap();
            let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&got), bits(&expected));
        }
    }

    #[test]
    fn by_hand() {
        let codes = [0, 15, 8, 7, 1, 2, 3, 4];
        let scales = [0.5, 2.0, 1.0, -1.0];
        let mut out = [0.0; 8];
        let symmetric = WeightView::new([2, 4], 4, 2, &codes, &scales, None).unwrap();
        dequantize_rows(&symmetric, 0..2, &mut out).unwrap();
        assert_eq!(out, [-4.0, 3.5, 0.0, -2.0, -7.0, -6.0, 5.0, 4.0]);
        let zeros = [0, 8, 1, 4];
        let asymmetric = WeightView::new([2, 4], 4, 2, &codes, &scales, Some(&zeros)).unwrap();
        dequantize_rows(&asymmetric, 1..2, &mut out[..4]).unwrap();
        assert_eq!(out[..4], [0.0, 1.0, 1.0, 0.0]);
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let view = WeightView::new([1, 2], 4, 2, &[1, 2], &[1.0], None).unwrap();
        let code = |rows, len| dequantize_rows(&view, rows, &mut vec![0.0; len]).map_err(|e| e.code());
        assert_eq!(
            [code(0..1, 3), code(0..1, 2), code(0..2, 4), code(2..2, 0)],
            [Err(1), Ok(()), Err(4), Err(4)]
        );
        #[allow(clippy::reversed_empty_ranges, reason = "it is what is tested")]
        let backwards = code(1..0, 0);
        assert_eq!(backwards, Err(4));
        assert_eq!([code(1..1, 0), code(0..1, 0)], [Ok(()), Err(1)]);
    }

    #[test]
    fn floating_point_codes() {
        let codes = [0x38, 0xb8, 0x7e, 0x01, 0x00, 0xc0];
        let view = WeightView::float([2, 3], FloatFormat::E4m3, 3, &codes, &[2.0, 0.5]).unwrap();
        let (mut out, mut reference) = ([0.0; 6], [0.0; 6]);
        dequantize_rows(&view, 0..2, &mut out).unwrap();
        assert_eq!(out, [2.0, -2.0, 896.0, 0.0009765625, 0.0, -1.0]);
        reference::dequantize_rows(&view, 0..2, &mut reference);
        assert_eq!(out, reference);
        assert!(WeightView::float([2, 3], FloatFormat::E4m3, 3, &codes[1..], &[2.0, 0.5]).is_err());
    }
}
