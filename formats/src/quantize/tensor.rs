//! A quantized linear in logical order, between methods and formats.

use std::path::PathBuf;

use quant_kernels_cpu::{
    PackedLinear, Parallel, Scales, StaticScale, WeightView, dequantize_rows, e8m0_value,
};

use super::grid::smallest_positive;
use super::{InputGrid, Levels};
use crate::checkpoint::{Dtype, require_finite};
use crate::scheme::{ActivationScheme, BLOCK, FloatFormat, Granularity, LinearScheme, WeightFormat};
use crate::{Error, Result, allocate};

/// The largest of these codes, of which only the bits of `mask` count.
fn largest(codes: &[u8], mask: u8) -> u8 {
    codes.iter().fold(0, |max, &code| max.max(code & mask))
}

/// Codes, scales and zero points of a linear's weight `[n, k]`, unpacked.
///
/// `ŵ[o, i] = (codes[o, i] − zeros[o, g]) · scales[o, g]` with `g = i / group_size`. A symmetric scheme stores no zero
/// points; they are `2^(bits − 1)`. For a floating-point format, `ŵ[o, i] = number(codes[o, i]) · scales[o, g]`.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct QuantizedTensor {
    /// `[n, k]`: output and input features.
    pub shape: [usize; 2],
    /// The quantization scheme of the weight and of the input.
    pub scheme: LinearScheme,
    /// `[n, k]` row-major, one unsigned code below `2^bits` per byte.
    pub codes: Vec<u8>,
    /// `[n, k / group_size]` row-major; each value is exact in `scale_dtype`, unless there are `levels` or a `global`
    /// scale.
    pub scales: Vec<f32>,
    /// The dtype of stored scales, if they have one level: F16, BF16, F32, F8_E8M0, or F8_E4M3 with a `global` scale.
    pub scale_dtype: Dtype,
    /// The two levels of a progressive scheme; their products, exact in `f32`, are `scales`.
    pub levels: Option<Levels>,
    /// `[n, k / group_size]` row-major, for asymmetric schemes.
    pub zeros: Option<Vec<u8>>,
    /// NVFP4's global scale, a divisor: `scales` are `f32(s / global)` of E4M3 values `s`.
    pub global: Option<f32>,
    /// The calibrated scale and zero point of the input, for static activations. For NVFP4, `scale` is a divisor.
    pub input: Option<StaticScale>,
    /// The input that each column multiplies, `[k]`, if columns are sorted so that groups are adjacent: GPTQ with
    /// `desc_act`, and compressed-tensors with `actorder: group`. `None` if column `i` multiplies input `i`.
    ///
    /// [`dequantize`](Self::dequantize) returns columns in the order of the inputs. The kernels know no order: take it
    /// with [`take_input_order`](Self::take_input_order), and rearrange the activations.
    pub input_order: Option<Vec<u32>>,
}

impl QuantizedTensor {
    /// Creates a tensor with one level of scales, for readers of other formats. Other fields may be set afterwards.
    /// [`require_storable`](Self::require_storable) checks the result.
    pub fn new(
        shape: [usize; 2],
        scheme: LinearScheme,
        codes: Vec<u8>,
        scales: Vec<f32>,
        scale_dtype: Dtype,
    ) -> Self {
        Self {
            shape,
            scheme,
            codes,
            scales,
            scale_dtype,
            levels: None,
            zeros: None,
            global: None,
            input: None,
            input_order: None,
        }
    }

    /// Takes the order of inputs, so that the weight can be packed. Column `c` of the matrix then multiplies input
    /// `order[c]`: pack the rows `x[order[0]], x[order[1]], …` in place of `x`.
    ///
    /// ```
    /// use quant_formats::checkpoint::Dtype;
    /// use quant_formats::quantize::quantize_rtn;
    /// use quant_kernels_cpu::{FloatRows, RowLayout, Serial};
    ///
    /// # let weight: Vec<f32> = (0..16 * 64).map(|i| (i as f32 * 0.7).sin()).collect();
    /// # let mut weight = quantize_rtn("proj", &weight, [16, 64], "w4a16-g32".parse()?, Dtype::F16, None)?;
    /// # weight.input_order = Some((0..64).rev().collect());
    /// # let expected: f32 = weight.dequantize()?[..64].iter().enumerate().map(|(i, w)| w * i as f32).sum();
    /// // A weight of 16 outputs and 64 inputs, as `QuantizedCheckpoint::read` returns it.
    /// let order = weight.take_input_order();
    /// let packed = weight.pack(None, &Serial)?;
    ///
    /// let x: Vec<f32> = (0..64).map(|i| i as f32).collect();
    /// let x = match &order {
    ///     Some(order) => order.iter().map(|&input| x[input as usize]).collect(),
    ///     None => x,
    /// };
    /// let mut rows = FloatRows::default();
    /// rows.pack(&x, RowLayout::of(packed.layout()), &Serial)?;
    /// let mut out = [0.0; 16];
    /// packed.multiply_float(&rows, &mut out, &Serial)?;
    /// # assert!((out[0] - expected).abs() < 0.01 * expected.abs().max(1.0), "{} {expected}", out[0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn take_input_order(&mut self) -> Option<Vec<u32>> {
        self.input_order.take()
    }

    /// Returns a view of the matrix for the kernels.
    ///
    /// # Errors
    /// [`Error::Usage`] when it has an [order of inputs](Self::input_order); [`Error::Internal`] when the parts are
    /// inconsistent. Code that creates a tensor from a file must call this to check it.
    pub fn view(&self) -> Result<WeightView<'_>> {
        self.view_with(None)
    }

    /// Returns a view with `scale_codes`, the [codes of the scales](Self::scale_codes), in place of the scales if there
    /// is a global scale.
    ///
    /// # Errors
    /// See [`view`](Self::view).
    pub fn view_with<'a>(&'a self, scale_codes: Option<&'a [u8]>) -> Result<WeightView<'a>> {
        if self.input_order.is_some() {
            return Err(Error::usage(
                "the columns of a weight are not in the order of its inputs (desc_act or actorder)",
                "take the order (`take_input_order`) and rearrange the activations by it, or dequantize the weight",
            ));
        }
        self.sorted_view_with(scale_codes)
    }

    /// Returns a view of the columns as they are, and the input of each if they have an
    /// [order](Self::input_order).
    ///
    /// # Errors
    /// When the parts are inconsistent, or the order does not name each input once.
    pub fn sorted_view(&self) -> Result<(WeightView<'_>, Option<&[u32]>)> {
        let order = self.input_order.as_deref();
        let view = self.sorted_view_with(None)?;
        let mut seen = vec![false; order.map_or(0, <[u32]>::len)];
        let mut is_new =
            |input: &u32| seen.get_mut(*input as usize).is_some_and(|seen| !std::mem::replace(seen, true));
        if order.is_some_and(|order| order.len() != view.k() || !order.iter().all(&mut is_new)) {
            return Err(Error::Internal("the order of inputs does not name each input once".into()));
        }
        Ok((view, order))
    }

    fn sorted_view_with<'a>(&'a self, scale_codes: Option<&'a [u8]>) -> Result<WeightView<'a>> {
        let group_size = self.scheme.granularity.group_size(self.shape[1]);
        if self.levels.is_some() != self.scheme.is_progressive() {
            return Err(Error::Internal("the scales do not match the scheme".into()));
        }
        let scales = match &self.levels {
            None => Scales::Float(&self.scales),
            Some(Levels { groups, rows }) => Scales::Progressive { groups, channels: rows },
        };
        let view = match (self.scheme.weight, self.zeros.as_deref()) {
            (WeightFormat::Int { bits, .. }, zeros) => {
                WeightView::with_scales(self.shape, bits, group_size, &self.codes, scales, zeros)
            }
            (WeightFormat::Float(format), None) => {
                let scales = match (scale_codes, self.global) {
                    (Some(groups), Some(global)) => Scales::E4m3 { groups, global },
                    _ => Scales::Float(&self.scales),
                };
                WeightView::float_with_scales(self.shape, format, group_size, &self.codes, scales)
            }
            (WeightFormat::Float(_), Some(_)) => {
                return Err(Error::Internal("floating-point codes cannot have zero points".into()));
            }
        };
        view.map_err(|e| Error::Internal(format!("quantized tensor is inconsistent: {e}")))
    }

    /// Packs the matrix for the kernels, with a bias `[n]` if there is one.
    ///
    /// # Errors
    /// When its parts are inconsistent, or the bias has a wrong length; [`Error::Kernel`] when the kernels do not support
    /// its scheme or shape. An engine can then run the weight in floats.
    pub fn pack(&self, bias: Option<&[f32]>, parallel: &dyn Parallel) -> Result<PackedLinear> {
        let sums = matches!(self.input_grid()?, Some(InputGrid::Static(by)) if by.zero != 0);
        let codes = self.global.and_then(|_| self.scale_codes());
        let packed = PackedLinear::pack(&self.view_with(codes.as_deref())?, bias, sums, parallel);
        Ok(packed?)
    }

    /// Returns the same codes and zero points with one level of scales: the products of the two, rounded to
    /// `scale_dtype`.
    ///
    /// # Errors
    /// The first scale that overflows `scale_dtype`, or whose largest value overflows `f32`.
    pub fn flattened(mut self, scale_dtype: Dtype) -> Result<Self, f32> {
        if self.levels.take().is_none() {
            return Ok(self);
        }
        for scale in &mut self.scales {
            let rounded = match scale_dtype.round(*scale) {
                0.0 => smallest_positive(scale_dtype),
                rounded => rounded,
            };
            if !(rounded * f32::from(self.scheme.max_code())).is_finite() {
                return Err(*scale);
            }
            *scale = rounded;
        }
        Ok(Self { scheme: self.scheme.flattened(), scale_dtype, ..self })
    }

    /// Returns the grid of the input, unless it stays float.
    ///
    /// # Errors
    /// [`Error::Internal`] when the scheme requires a calibrated grid and the tensor has none.
    pub fn input_grid(&self) -> Result<Option<InputGrid>> {
        match (self.scheme.activations, self.input) {
            (ActivationScheme::Float, None) => Ok(None),
            (ActivationScheme::Token, None) => Ok(Some(InputGrid::Token)),
            (ActivationScheme::Fp8Token, None) => Ok(Some(InputGrid::Fp8Token)),
            (ActivationScheme::Fp8Group, None) => Ok(Some(InputGrid::Fp8Group)),
            (ActivationScheme::Mxfp8, None) => Ok(Some(InputGrid::Mxfp8)),
            (ActivationScheme::Fp8Static, Some(StaticScale { scale, zero: 0 })) => {
                Ok(Some(InputGrid::Fp8Static { scale }))
            }
            (ActivationScheme::Nvfp4, Some(StaticScale { scale: global, zero: 0 })) => {
                Ok(Some(InputGrid::Nvfp4 { global }))
            }
            (ActivationScheme::Static { symmetric }, Some(by)) if !symmetric || by.zero == 0 => {
                Ok(Some(InputGrid::Static(by)))
            }
            _ => Err(Error::Internal(format!("the grid of activations does not match {}", self.scheme))),
        }
    }

    /// Checks that a format can write it unchanged.
    ///
    /// # Errors
    /// [`Error::Internal`] when the parts are inconsistent, zero points contradict the scheme, a code is invalid, or a
    /// scale is not exact in its dtype.
    pub fn require_storable(&self, module: &str) -> Result<()> {
        let inconsistent = |what: &str| Error::Internal(format!("quantized `{module}.weight`: {what}"));
        self.view()?;
        self.input_grid()?;
        if self.zeros.is_none() != self.scheme.is_symmetric() {
            return Err(inconsistent("the zero points do not match the symmetry of the scheme"));
        }
        let fits = |codes: &[u8]| largest(codes, u8::MAX) <= self.scheme.max_code();
        if !fits(&self.codes) || !self.zeros.as_deref().is_none_or(fits) {
            return Err(inconsistent("a code exceeds the bits of the scheme"));
        }
        // If a format has NaN, its magnitude is the largest.
        let magnitudes = self.scheme.max_code() >> 1;
        if self.scheme.float_format().is_some_and(|f| !f.is_number(largest(&self.codes, magnitudes))) {
            return Err(inconsistent("a code is NaN"));
        }
        if self.levels.is_none() && !self.scales_are_exact() {
            return Err(inconsistent("a scale is not exact in its stored type"));
        }
        Ok(())
    }

    fn scales_are_exact(&self) -> bool {
        match (self.scale_dtype, self.global) {
            (Dtype::F8E4M3, Some(_)) | (Dtype::F8E8M0, None) => self.scale_codes().is_some(),
            (dtype, None) if dtype.is_weight_float() => self.scales.iter().all(|&s| dtype.holds(s)),
            _ => false,
        }
    }

    /// The one-byte codes of scales: E8M0, or E4M3 with the global scale; `None` if a scale is not representable.
    pub fn scale_codes(&self) -> Option<Vec<u8>> {
        let code = |scale: f32| match self.global {
            None => {
                let code = if scale == e8m0_value(0) { 0 } else { (scale.to_bits() >> 23) as u8 };
                (e8m0_value(code).to_bits() == scale.to_bits()).then_some(code)
            }
            Some(global) => {
                let code = FloatFormat::E4m3.code(scale * global);
                (FloatFormat::E4m3.value(code) / global == scale).then_some(code)
            }
        };
        self.scales.iter().map(|&scale| code(scale)).collect()
    }

    /// Every stored scale, once: one per tensor, `[⌈n / 128⌉, ⌈k / 128⌉]` per block, otherwise `[n, groups]`; `None` if
    /// rows that must share a scale have different ones.
    pub fn stored_scales(&self) -> Option<Vec<f32>> {
        let [n, k] = self.shape;
        let size = self.scheme.granularity.group_size(k);
        let (height, width) = match self.scheme.granularity {
            Granularity::Tensor => (n.max(1), 1),
            Granularity::Block => (BLOCK, BLOCK / size.max(1)),
            _ => return Some(self.scales.clone()),
        };
        let groups = k / size.max(1);
        let mut stored: Vec<f32> = Vec::with_capacity(n.div_ceil(height) * groups.div_ceil(width));
        for row in (0..n).step_by(height) {
            stored.extend(self.scales[row * groups..(row + 1) * groups].iter().step_by(width));
        }
        let across = groups.div_ceil(width);
        let same = |(i, scale): (usize, &f32)| {
            stored[i / groups / height * across + i % groups / width].to_bits() == scale.to_bits()
        };
        let all_same = self.scales.iter().enumerate().all(same);
        if stored.is_empty() && self.scheme.granularity == Granularity::Tensor {
            stored.push(1.0);
        }
        all_same.then_some(stored)
    }

    /// Expands [`stored_scales`](Self::stored_scales), whose number must be right, to a scale for every row and group.
    pub fn spread_scales(stored: &[f32], [n, k]: [usize; 2], granularity: Granularity) -> Vec<f32> {
        let size = granularity.group_size(k).max(1);
        let groups = k / size;
        let (height, width) = match granularity {
            Granularity::Tensor => (n.max(1), 1),
            Granularity::Block => (BLOCK, BLOCK / size),
            _ => return stored.to_vec(),
        };
        let across = groups.div_ceil(width);
        let scale = |i: usize| stored[i / groups / height * across + i % groups / width];
        (0..n * groups).map(scale).collect()
    }

    /// Returns the same matrix in an equivalent scheme: with implicit or stored zero points, with scales in a different
    /// dtype or one level instead of two, or with dynamic activations left float. No weight changes.
    ///
    /// # Errors
    /// When the grid is not equivalent: different bits or groups, a zero point that is not the midpoint, a scale that
    /// is not exact in the dtype.
    pub fn restated(mut self, scheme: LinearScheme, scale_dtype: Dtype) -> Result<Self, String> {
        if self.input_order.is_some() {
            return Err("its groups of inputs are not adjacent (desc_act or actorder)".to_owned());
        }
        let columns = self.shape[1];
        let group_size = |scheme: LinearScheme| scheme.granularity.group_size(columns);
        let left_float = scheme.activations == ActivationScheme::Float
            && self.scheme.activations != ActivationScheme::Float
            && !self.scheme.has_static_activations();
        let same_input = scheme.activations == self.scheme.activations || left_float;
        // Two levels cannot be recovered from one.
        let same_input = same_input && (self.scheme.is_progressive() || !scheme.is_progressive());
        let same_codes =
            scheme.bits() == self.scheme.bits() && scheme.float_format() == self.scheme.float_format();
        if !same_codes || group_size(scheme) != group_size(self.scheme) || !same_input {
            return Err(format!("the weights are {}, which cannot be stored as {scheme}", self.scheme));
        }
        let zero_point = 1 << (scheme.bits() - 1);
        match (&self.zeros, scheme.is_symmetric()) {
            (Some(zeros), true) => {
                if let Some(zero) = zeros.iter().find(|&&z| z != zero_point) {
                    return Err(format!(
                        "it has a zero point of {zero}, but that of a symmetric grid must be {zero_point}"
                    ));
                }
                self.zeros = None;
            }
            (None, false) => self.zeros = Some(vec![zero_point; self.scales.len()]),
            _ => {}
        }
        if !scheme.is_progressive() {
            self.levels = None;
        }
        if self.scheme.fixed_scales().is_some() {
            return match scheme.fixed_scales() == self.scheme.fixed_scales()
                && scale_dtype == self.scale_dtype
            {
                true => Ok(Self { scheme, ..self }),
                false => Err(format!("the scales are {}, not {scale_dtype}", self.scale_dtype)),
            };
        }
        let scales = if self.levels.is_none() { &self.scales[..] } else { &[] };
        if let Some(scale) = scales.iter().find(|&&s| scale_dtype.round(s) != s) {
            return Err(format!(
                "the scale {scale:e} ({}) cannot be represented exactly in {scale_dtype}",
                self.scale_dtype
            ));
        }
        Ok(Self { scheme, scale_dtype, ..self })
    }

    /// Fails unless all weights are finite: a scale can be finite, and its product with a code infinite. `path` and
    /// `tensor` are for the message.
    ///
    /// # Errors
    /// [`Error::NonFinite`] with the number of such weights; otherwise as [`dequantize`](Self::dequantize).
    pub fn require_finite(&self, path: PathBuf, tensor: &str) -> Result<()> {
        let largest = match self.scheme.float_format() {
            Some(format) => format.largest(),
            None => f32::from(self.scheme.max_code()),
        };
        if self.scales.iter().all(|scale| (scale * largest).is_finite()) {
            return Ok(());
        }
        require_finite(path, tensor, &self.dequantize()?)
    }

    /// Returns the whole matrix as `f32`, `[n, k]` row-major, with columns in the order of the inputs.
    ///
    /// # Errors
    /// [`Error::Internal`] when the parts are inconsistent; [`Error::Memory`].
    pub fn dequantize(&self) -> Result<Vec<f32>> {
        // The view checks that there is a code for each weight, so the product of the sizes cannot overflow.
        let (view, order) = self.sorted_view()?;
        let mut out = allocate::zeros(view.n() * view.k(), "a weight in f32")?;
        dequantize_rows(&view, 0..view.n(), &mut out).map_err(|e| Error::Internal(e.to_string()))?;
        if let Some(order) = order {
            restore_input_order(&mut out, order);
        }
        Ok(out)
    }
}

/// Moves the columns of rows `[n, k]` from an [order](QuantizedTensor::input_order) back to that of the inputs.
pub fn restore_input_order(rows: &mut [f32], order: &[u32]) {
    let mut sorted = vec![0.0; order.len()];
    for row in rows.chunks_exact_mut(order.len().max(1)) {
        sorted.copy_from_slice(row);
        for (value, &input) in sorted.iter().zip(order) {
            row[input as usize] = *value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantize::quantize_rtn;

    fn tensor(scheme: &str, scale_dtype: Dtype) -> QuantizedTensor {
        let weights: Vec<f32> = (0..8 * 64).map(|i| (i as f32 * 0.37).sin() * 0.1).collect();
        quantize_rtn("w", &weights, [8, 64], scheme.parse().unwrap(), scale_dtype, None).unwrap()
    }

    #[test]
    fn symmetric_grids_are_stated_with_and_without_zeros() {
        let without = tensor("w4a16-g32-sym", Dtype::F16);
        let asym = "w4a16-g32-asym".parse().unwrap();
        let with = without.clone().restated(asym, Dtype::F16).unwrap();
        assert_eq!(with.zeros.as_deref(), Some(&[8; 16][..]));
        assert_eq!(with.dequantize().unwrap(), without.dequantize().unwrap());
        assert_eq!(with.restated(without.scheme, Dtype::F16).unwrap(), without);
        let channel = tensor("w4a16-g64-sym", Dtype::F16);
        assert!(channel.restated("w4a16-channel-sym".parse().unwrap(), Dtype::F16).is_ok());
    }

    #[test]
    fn shapes_that_do_not_match_the_codes_are_errors() {
        let weight = tensor("w4a16-g32-sym", Dtype::F16);
        let (n, k) = (usize::MAX / 32 + 1, 64);
        for shape in [[n, k], [k, n], [usize::MAX; 2], [8, 96], [0, 64], [8, 0]] {
            for input_order in [None, Some((0..64).collect())] {
                let tensor = QuantizedTensor { shape, input_order, ..weight.clone() };
                let error = tensor.dequantize().unwrap_err();
                assert!(matches!(&error, Error::Internal(_)), "{shape:?}: {error}");
                assert!(error.to_string().contains("inconsistent"), "{shape:?}: {error}");
            }
        }
    }

    #[test]
    fn a_weight_that_the_kernels_refuse_is_distinguished_from_other_errors() {
        let mut weight = tensor("w4a16-g32-sym", Dtype::F16);
        assert!(weight.pack(None, &quant_kernels_cpu::Serial).is_ok());
        weight.codes[3] = 16;
        let error = weight.pack(None, &quant_kernels_cpu::Serial).unwrap_err();
        let Error::Kernel(cause) = &error else { panic!("{error:?}") };
        assert_eq!(error.to_string(), format!("the kernels cannot use this weight: {cause}"));
        assert_eq!(
            (error.category().exit_code(), error.remedy().marked()),
            (2, "dequantize the weight, and multiply by the floats")
        );
    }

    #[test]
    fn what_would_change_a_weight_is_refused() {
        let mut bf16 = tensor("w4a16-g32-sym", Dtype::Bf16);
        let message = |tensor: &QuantizedTensor, scheme: &str, dtype| {
            tensor.clone().restated(scheme.parse().unwrap(), dtype).unwrap_err()
        };
        assert!(message(&bf16, "w8a16-g32-sym", Dtype::Bf16).contains("are w4a16-g32-sym"));
        assert!(message(&bf16, "w4a16-g64-sym", Dtype::Bf16).contains("cannot be stored as w4a16-g64-sym"));
        assert!(bf16.clone().restated(bf16.scheme, Dtype::F16).is_ok(), "eight bits fit into eleven");
        bf16.scales[3] = 2.0_f32.powi(-40);
        assert!(message(&bf16, "w4a16-g32-sym", Dtype::F16).contains("cannot be represented exactly in F16"));
        let asym = tensor("w4a16-g32-asym", Dtype::F16);
        assert!(message(&asym, "w4a16-g32-sym", Dtype::F16).contains("it has a zero point of"));
        assert!(message(&tensor("w4a16-g32-sym", Dtype::F16), "w4a16-g32-sym", Dtype::Bf16).contains("BF16"));
    }
}
