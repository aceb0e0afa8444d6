//! Lossless conversion of MXFP4 weights to NVFP4: the codes stay, and every group of 32 becomes two of 16 with the same
//! scale.
//!
//! E4M3 represents powers of two from 2⁻⁹ to 2⁸. With a power of two as global scale, a tensor can be converted if the
//! exponents of its scales are at most 17 apart. Groups whose codes are all 0 do not matter.

use quant_kernels_cpu::FloatFormat;

use super::QuantizedTensor;
use super::shared::SMALLEST_SCALE;
use crate::checkpoint::Dtype;
use crate::scheme::{Granularity, LinearScheme, MX_GROUP, NV_GROUP, ScaleFormat};

/// The exponents of the smallest and largest powers of two in E4M3.
const E4M3_EXPONENTS: [i32; 2] = [-9, 8];
/// The smallest exponent of a multiplier, such that it and its inverse are normal.
const SMALLEST_MULTIPLIER: i32 = -120;

/// The smallest and the largest exponent of the scales of a tensor, or of several tensors that share a global scale.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ScaleExponents(Option<[i32; 2]>);

impl ScaleExponents {
    /// Returns the exponents of an MXFP4 weight. Groups whose codes are all zero do not count.
    pub fn of(tensor: &QuantizedTensor) -> Self {
        let groups = tensor.codes.chunks_exact(MX_GROUP).zip(&tensor.scales);
        let used = groups.filter(|(codes, _)| codes.iter().any(|code| code & 7 != 0));
        used.fold(Self::default(), |all, (_, scale)| all.and(Self(Some([exponent(*scale); 2]))))
    }

    /// Returns the union of two ranges.
    pub fn and(self, other: Self) -> Self {
        Self(match (self.0, other.0) {
            (Some([a, b]), Some([c, d])) => Some([a.min(c), b.max(d)]),
            (one, other) => one.or(other),
        })
    }

    /// The exponent of the multiplier with which all these scales are exact in E4M3.
    fn multiplier(self) -> Result<i32, String> {
        let [smallest, largest] = self.0.unwrap_or([SMALLEST_MULTIPLIER; 2]);
        let multiplier = (largest - E4M3_EXPONENTS[1]).max(SMALLEST_MULTIPLIER);
        if smallest - multiplier < E4M3_EXPONENTS[0] {
            return Err(format!(
                "its scales range from 2^{smallest} to 2^{largest}, but NVFP4 scales can differ by a factor \
                of at most 2^17"
            ));
        }
        match multiplier < 0 {
            true => Ok(multiplier),
            false => Err(format!("its largest scale is 2^{largest}, which exceeds the range of NVFP4")),
        }
    }
}

fn exponent(scale: f32) -> i32 {
    match (scale.to_bits() >> 23) as i32 {
        0 => -127,
        biased => biased - 127,
    }
}

fn power(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

impl LinearScheme {
    /// The NVFP4 scheme of these weights, if they are MXFP4.
    pub fn as_nvfp4(self) -> Option<Self> {
        let is_mxfp4 =
            self.float_format() == Some(FloatFormat::E2m1) && self.fixed_scales() == Some(ScaleFormat::E8m0);
        is_mxfp4.then_some(Self { granularity: Granularity::Group(NV_GROUP), ..self })
    }
}

impl QuantizedTensor {
    /// Converts the weights to NVFP4. `exponents` are those of all tensors that share the global scale.
    ///
    /// # Errors
    /// When it is not MXFP4, or its scales are too far apart or too large.
    pub fn into_nvfp4(self, exponents: ScaleExponents) -> Result<Self, String> {
        let scheme = self.scheme.as_nvfp4().ok_or_else(|| format!("its weights are {}", self.scheme))?;
        let global = power(-exponents.multiplier()?);
        let groups = self.codes.chunks_exact(MX_GROUP).zip(&self.scales);
        let scales = groups.flat_map(|(codes, scale)| {
            let used = codes.iter().any(|code| code & 7 != 0);
            [if used { *scale } else { SMALLEST_SCALE / global }; MX_GROUP / NV_GROUP]
        });
        let scales = scales.collect();
        Ok(Self { scheme, scales, scale_dtype: Dtype::F8E4M3, global: Some(global), ..self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A group with these scale exponents per row, and a row of zeros.
    fn rows(exponents: &[i32]) -> QuantizedTensor {
        let n = exponents.len() + 1;
        let codes: Vec<u8> = (0..n * MX_GROUP)
            .map(|i| if i / MX_GROUP == n - 1 { 8 * (i % 2) as u8 } else { i as u8 % 16 })
            .collect();
        let value = |e: &i32| if *e == -127 { f32::from_bits(1 << 22) } else { power(*e) };
        let scales = exponents.iter().map(value).chain([f32::from_bits(1 << 22)]).collect();
        QuantizedTensor {
            shape: [n, MX_GROUP],
            scheme: "wf4a16-g32-mx".parse().unwrap(),
            codes,
            scales,
            scale_dtype: Dtype::F8E8M0,
            zeros: None,
            levels: None,
            global: None,
            input: None,
            input_order: None,
        }
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|x| x.to_bits()).collect()
    }

    #[test]
    fn weights_stay_what_they_are() {
        for exponents in [&[0_i32][..], &[-17, 0], &[-9, -5, 7], &[-110, -120, -127], &[-127], &[], &[-10, 7]]
        {
            let tensor = rows(exponents);
            let expected = tensor.dequantize().unwrap();
            let own = ScaleExponents::of(&tensor);
            let nvfp4 = tensor.into_nvfp4(own).unwrap();
            assert_eq!(nvfp4.scheme.to_string(), "wf4a16-g16-nv");
            assert_eq!(bits(&nvfp4.dequantize().unwrap()), bits(&expected), "{exponents:?}");
            let codes = nvfp4.scale_codes().expect("all are E4M3 below the global scale");
            assert!(codes.iter().all(|c| *c < 0x7f && FloatFormat::E4m3.value(*c).log2().fract() == 0.0));
            let global = nvfp4.global.unwrap();
            assert!(global > 1.0 && global.log2().fract() == 0.0 && (1.0 / global).is_normal());
        }
    }

    #[test]
    fn what_shares_a_scale_has_that_of_all() {
        let (large, small) = (rows(&[-3]), rows(&[-20]));
        let both = ScaleExponents::of(&large).and(ScaleExponents::of(&small));
        let expected = [&large, &small].map(|tensor| bits(&tensor.dequantize().unwrap()));
        let nvfp4 = [large, small].map(|tensor| tensor.into_nvfp4(both).unwrap());
        assert_eq!(nvfp4[0].global, nvfp4[1].global);
        for (tensor, expected) in nvfp4.iter().zip(expected) {
            assert_eq!(bits(&tensor.dequantize().unwrap()), expected);
        }
    }

    #[test]
    fn scales_too_far_apart_are_refused() {
        for (exponents, phrase) in [
            (&[-18, 0][..], "from 2^-18 to 2^0"),
            (&[-127, -109], "from 2^-127 to 2^-109"),
            (&[8], "its largest scale is 2^8"),
            (&[-100, 100], "2^100"),
        ] {
            let tensor = rows(exponents);
            let own = ScaleExponents::of(&tensor);
            let error = tensor.into_nvfp4(own).unwrap_err();
            assert!(error.contains(phrase), "{error}");
        }
        let mut other = rows(&[0]);
        other.scheme = "wf4a16-g16-nv".parse().unwrap();
        assert!(other.into_nvfp4(ScaleExponents::default()).is_err());
    }
}
