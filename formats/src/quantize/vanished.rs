//! Groups of which quantization leaves at most one weight.

use rayon::prelude::*;

use super::{QuantizedTensor, SourceRows};

/// In shorter groups, one weight may well dominate the others.
const MIN_GROUP: usize = 8;
/// The codes that represent zero differ only in the sign bit.
const E4M3_SIGN: u8 = 0x80;

/// Counts the groups in which at most one weight is not rounded to zero, although several are not zero. `rows` are the
/// weights `[n, k]` before rounding.
///
/// ```
/// use quant_formats::checkpoint::Dtype;
/// use quant_formats::quantize::{SourceRows, quantize_rtn, vanished_groups};
///
/// let mut weight = vec![0.02; 64]; // two groups
/// weight[5] = 60000.0;
/// let tensor = quantize_rtn("proj", &weight, [1, 64], "w4a16-g32-sym".parse()?, Dtype::F32, None)?;
/// assert_eq!(vanished_groups(SourceRows::Floats(&weight), &tensor), 1);
/// # Ok::<(), quant_formats::Error>(())
/// ```
pub fn vanished_groups(rows: SourceRows<'_>, tensor: &QuantizedTensor) -> u64 {
    let [n, k] = tensor.shape;
    let size = tensor.scheme.granularity.group_size(k);
    if size < MIN_GROUP || rows.count(k).ok() != Some(n) || tensor.codes.len() != n * k {
        return 0;
    }
    let groups = k / size;
    let (mask, middle) = match tensor.scheme.int_bits() {
        Some(bits) => (u8::MAX, 1 << (bits - 1)),
        None => (if tensor.scheme.bits() == 8 { !E4M3_SIGN } else { 0x7 }, 0),
    };
    let zero = |group: usize| tensor.zeros.as_ref().map_or(middle, |zeros| zeros[group]);
    let row = |values: &mut Vec<f32>, r: usize| {
        let codes = tensor.codes[r * k..(r + 1) * k].chunks_exact(size).enumerate();
        let is_left = |code: u8, zero: u8| code & mask != zero;
        let bare = codes.filter(|(g, codes)| {
            let zero = zero(r * groups + g);
            let left = |codes: &[u8]| codes.iter().filter(|code| is_left(**code, zero)).count();
            // Counting a few codes without branches settles nearly all groups.
            left(&codes[..MIN_GROUP]) < 2 && left(codes) < 2
        });
        let bare: Vec<usize> = bare.map(|(g, _)| g).collect();
        if bare.is_empty() {
            return 0;
        }
        values.resize(k, 0.0);
        rows.load(r, values);
        let lost =
            |g: &usize| values[g * size..(g + 1) * size].iter().filter(|w| **w != 0.0).nth(1).is_some();
        bare.iter().filter(|g| lost(g)).count() as u64
    };
    (0..n).into_par_iter().map_init(Vec::new, row).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Dtype;
    use crate::quantize::quantize_rtn;

    fn weights(n: usize, k: usize) -> [Vec<f32>; 2] {
        let plain: Vec<f32> = (0..n * k).map(|i| (i as f32 * 0.37).sin() * 0.02).collect();
        let mut with_outlier = plain.clone();
        with_outlier[k + 5] = -60000.0;
        [plain, with_outlier]
    }

    #[test]
    fn a_group_with_an_outlier_vanishes() {
        let [n, k] = [3, 256];
        let [plain, with_outlier] = weights(n, k);
        for scheme in [
            "w4a16-g128-sym",
            "w4a16-g128-asym",
            "w8a16-g32-sym",
            "w3a16-g64-sym",
            "w4a16-channel-sym",
            "w8a8-channel-sym",
            "fp8",
            "mxfp4a16",
            "nvfp4a16",
        ] {
            let parsed = scheme.parse().unwrap();
            let count = |weights: &[f32]| {
                let scale = if scheme == "mxfp4a16" { Dtype::F8E8M0 } else { Dtype::F32 };
                let scale = if scheme == "nvfp4a16" { Dtype::F8E4M3 } else { scale };
                let tensor = quantize_rtn("t", weights, [n, k], parsed, scale, None).unwrap();
                vanished_groups(SourceRows::Floats(weights), &tensor)
            };
            assert_eq!(count(&plain), 0, "{scheme}");
            // The global scale of NVFP4 is that of the whole weight.
            let expected = if scheme == "nvfp4a16" { (n * k / 16) as u64 } else { 1 };
            assert_eq!(count(&with_outlier), expected, "{scheme}");
            let mut alone = vec![0.0; n * k];
            alone[9] = 3.0;
            assert_eq!(count(&alone), 0, "{scheme}");
            assert_eq!(count(&vec![0.0; n * k]), 0, "{scheme}");
        }
        let bytes = Dtype::Bf16.narrow(&with_outlier);
        let tensor =
            quantize_rtn("t", &with_outlier, [n, k], "w4a16-g128-sym".parse().unwrap(), Dtype::F32, None);
        assert_eq!(vanished_groups(SourceRows::Bytes(&bytes, Dtype::Bf16), &tensor.unwrap()), 1);
    }
}
