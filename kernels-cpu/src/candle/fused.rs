//! RMSNorm and gated SiLU, computed while rows are packed for linear layers.

use candle_core::{CpuStorage, DType, Device, Error, Result, Shape, Storage, Tensor, bail};

use super::{Activations, CallMemory, QuantizedLinear, part};
use crate::{
    Element, FloatRows, GateUp, Int8Rows, IsaToken, KernelError, Parallel, Product, RmsNorm, RowLayout,
    multiply_each, multiply_float_each,
};

/// An operation that computes the input rows of linear layers. Tensors are `f32` on the CPU.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Fused<'a> {
    /// `x / √(mean x² + eps) · weight`.
    RmsNorm {
        /// `[.., k]`.
        x: &'a Tensor,
        /// γ, `[k]`.
        weight: &'a [f32],
        /// Positive and finite.
        eps: f32,
    },
    /// `silu(gate) · up`.
    SiluMul {
        /// `[.., k]`.
        gate: &'a Tensor,
        /// `[.., k]`, the shape of the gate.
        up: &'a Tensor,
    },
}

/// Input rows, or the operands from which the kernels compute them.
pub(super) enum Values<'a, E: Element> {
    Plain(&'a [E]),
    Norm(&'a [E], RmsNorm<'a>),
    Gate(GateUp<'a, E>),
}

impl QuantizedLinear {
    /// Computes input rows and multiplies them by the weights of several layers. The kernels compute the rows while
    /// packing them, without an intermediate tensor. Results are bit-identical to [`rms_norm`](crate::rms_norm) or
    /// [`silu_mul`](crate::silu_mul) followed by [`forward_each`](Self::forward_each).
    ///
    /// # Errors
    /// When two layers cannot [share their input](Self::shares_input_with), an input is not `f32` in main memory or has
    /// the wrong width, gate and up differ in shape, or the weight or `eps` of the norm is invalid.
    pub fn forward_fused(linears: &[&Self], from: Fused<'_>) -> Result<Vec<Tensor>> {
        let Some(first) = Self::first_of(linears)? else { return Ok(Vec::new()) };
        let (x, up) = match from {
            Fused::RmsNorm { x, .. } => (x, None),
            Fused::SiluMul { gate, up } => (gate, Some(up)),
        };
        if up.is_some_and(|up| up.dims() != x.dims()) {
            bail!(
                "the gate has shape {:?}, but `up` has shape {:?}",
                x.dims(),
                up.map_or(&[][..], Tensor::dims)
            );
        }
        first.with_rows(x, |x| match (from, up) {
            (Fused::RmsNorm { weight, eps, .. }, _) => {
                Self::products_of(linears, x, |values| Values::Norm(values, RmsNorm { weight, eps }))
            }
            (Fused::SiluMul { up, .. }, _) => first.with_rows(up, |up| {
                Self::products_of(linears, x, |gate| Values::Gate(GateUp::Apart { gate, up: up.values }))
            }),
        })
    }

    /// Returns the first layer, or an error if some of the layers cannot share its input. `None` if there are none.
    pub(super) fn first_of<'a>(linears: &[&'a Self]) -> Result<Option<&'a Self>> {
        let Some(first) = linears.first() else { return Ok(None) };
        if let Some(other) = linears.iter().find(|l| !first.shares_input_with(l)) {
            let [a, b] = [first, other].map(|l| (l.weight.layout().n(), l.weight.layout().k()));
            bail!(
                "the linears of shapes {a:?} and {b:?} cannot share an input: they require different \
                activations or groups"
            );
        }
        Ok(Some(first))
    }

    pub(super) fn with_rows<T>(&self, x: &Tensor, work: impl FnOnce(Lent<'_>) -> Result<T>) -> Result<T> {
        if x.dtype() != DType::F32 || !x.device().is_cpu() {
            bail!("expected an f32 input on the CPU, got {} on {:?}", x.dtype().as_str(), x.device());
        }
        let x = x.contiguous()?;
        let (storage, layout) = x.storage_and_layout();
        let (dims, k) = (x.dims(), self.weight.layout().k());
        let (Storage::Cpu(CpuStorage::F32(values)), Some(&last), Some((start, _))) =
            (&*storage, dims.last(), layout.contiguous_offsets())
        else {
            bail!("the input must have at least one dimension");
        };
        if last != k {
            bail!("quantized-linear: expected an input of shape [.., {k}], got {dims:?}");
        }
        work(Lent { values: part(values, start, x.elem_count())?, dims })
    }

    /// Multiplies rows by the weights of layers that share their input. `made` describes how the rows are computed from
    /// the values of `x`; there is one row per row of `x`.
    pub(super) fn products_of<'x>(
        linears: &[&Self],
        x: Lent<'x>,
        made: impl FnOnce(&'x [f32]) -> Values<'x, f32>,
    ) -> Result<Vec<Tensor>> {
        let Some(first) = linears.first() else { return Ok(Vec::new()) };
        let (dims, k) = (x.dims, first.weight.layout().k());
        let mut outs = Vec::with_capacity(linears.len());
        for linear in linears {
            let results = (x.values.len() / k).checked_mul(linear.weight.layout().n());
            let results = results.filter(|&r| r <= isize::MAX as usize / size_of::<f32>());
            outs.push(vec![0.0; results.ok_or_else(|| Error::wrap(KernelError::TooLarge("the output")))?]);
        }
        let mut products: Vec<Product<'_>> = (linears.iter().zip(&mut outs))
            .map(|(l, out)| Product { weight: l.weight.view(), bias: l.weight.bias(), out })
            .collect();
        let values = made(x.values);
        let run = |rows: &mut CallMemory, parallel: &dyn Parallel| {
            first.multiply_products(&mut rows.float, &mut rows.whole, values, &mut products, parallel)
        };
        first.runner.with_memory(run).map_err(Error::wrap)?;
        let shape = |n: usize| -> Shape {
            dims[..dims.len() - 1].iter().copied().chain([n]).collect::<Vec<_>>().into()
        };
        let results = linears.iter().zip(outs);
        results.map(|(l, out)| Tensor::from_vec(out, shape(l.weight.layout().n()), &Device::Cpu)).collect()
    }

    /// Quantizes or packs rows for this layer, and multiplies them by weights of the same [`RowLayout`].
    pub(super) fn multiply_products<E: Element>(
        &self,
        float: &mut FloatRows,
        whole: &mut Int8Rows,
        x: Values<'_, E>,
        products: &mut [Product<'_>],
        parallel: &dyn Parallel,
    ) -> std::result::Result<(), KernelError> {
        let layout = RowLayout::of(self.weight.layout());
        let by = match self.activations {
            Activations::Float => {
                match x {
                    Values::Plain(x) => float.pack(x, layout, parallel),
                    Values::Norm(x, norm) => float.pack_rms_norm(x, norm, None, layout, parallel),
                    Values::Gate(x) => float.pack_silu_mul(x, layout, parallel),
                }?;
                return multiply_float_each(float, products, parallel);
            }
            Activations::PerToken => None,
            Activations::Static(by) => Some(by),
        };
        match (x, by) {
            (Values::Plain(x), None) => whole.quantize(x, layout, parallel),
            (Values::Plain(x), Some(by)) => whole.quantize_static(x, layout, by, parallel),
            (Values::Norm(x, norm), by) => whole.quantize_rms_norm(x, norm, None, layout, by, parallel),
            (Values::Gate(x), by) => whole.quantize_silu_mul(x, layout, by, parallel),
        }?;
        multiply_each(IsaToken::detect(), whole, products, parallel)
    }
}

/// Row-major values of a tensor, with its dimensions.
#[derive(Clone, Copy)]
pub(super) struct Lent<'a> {
    values: &'a [f32],
    dims: &'a [usize],
}
