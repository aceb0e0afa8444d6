//! The linear layer: one product for every kind of weight.

mod blocks;
mod body;
#[cfg_attr(not(feature = "cuda"), path = "without_cuda.rs")]
mod cuda;
mod parts;
mod product;
mod rows;
mod stored;

use std::sync::Arc;

use candle_core::{Module, Tensor};
use quant_kernels_cpu::Isa;
use quant_kernels_cpu::candle::{Fused, QuantizedLinear, Runner};

pub use blocks::BlockWeight;
pub use body::WeightBody;
pub(super) use body::kernel_error;
pub use cuda::{CudaLinear, CudaRunner};
pub use parts::FloatProducts;
use product::Product;
pub use product::multiply;
pub(super) use product::{ProductTiles, TileBuffers};
pub use rows::WeightRows;
pub use stored::StoredWeight;

use crate::quantize::InputGrid;
use crate::{Error, Result};

/// Returns the name of the code path that multiplies quantized weights on this CPU: an instruction set, or `dense`.
pub fn kernels() -> &'static str {
    match Isa::detect() {
        Isa::Scalar => "dense",
        isa => isa.name(),
    }
}

/// `y = x Ŵᵀ (+ b)` with a weight in any [`WeightBody`].
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Arc<WeightBody>,
    bias: Option<Tensor>,
}

impl Linear {
    /// Creates a linear with weight `[n, k]` and bias `[n]`.
    pub fn new(weight: Arc<WeightBody>, bias: Option<Tensor>) -> Self {
        Self { weight, bias }
    }

    /// Returns the weight.
    pub fn weight(&self) -> &Arc<WeightBody> {
        &self.weight
    }

    /// Returns the bias `[n]`, if there is one.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Returns a linear with a different weight and the same bias.
    pub fn with_weight(&self, weight: WeightBody) -> Self {
        Self { weight: Arc::new(weight), bias: self.bias.clone() }
    }

    /// Returns the linear with its weight packed for the kernels, if it is quantized.
    ///
    /// # Errors
    /// As [`WeightBody::packed`].
    pub fn packed(&self, runner: &Runner) -> Result<Self> {
        Ok(self.weight.packed(runner)?.map_or_else(|| self.clone(), |weight| self.with_weight(weight)))
    }

    /// Returns the linear with its weight on a GPU, if it is quantized in codes; unchanged otherwise.
    ///
    /// # Errors
    /// As [`WeightBody::on_cuda`].
    pub fn on_cuda(&self, runner: &CudaRunner) -> Result<Self> {
        Ok(self.weight.on_cuda(runner)?.map_or_else(|| self.clone(), |weight| self.with_weight(weight)))
    }

    pub(super) fn grid(&self) -> Result<Option<InputGrid>> {
        Ok(match &*self.weight {
            WeightBody::Quantized(tensor) => tensor.input_grid()?,
            WeightBody::Packed { grid, .. } | WeightBody::Cuda { grid, .. } => *grid,
            WeightBody::F32 { .. } | WeightBody::Stored(_) | WeightBody::Blocks(_) => None,
        })
    }

    pub(super) fn rounded(&self, x: &Tensor) -> Result<Tensor> {
        let Some(grid) = self.grid()? else { return Ok(x.clone()) };
        let mut values = x.flatten_all()?.to_vec1::<f32>()?;
        grid.round(&mut values, self.weight.shape()[1]);
        Ok(Tensor::from_vec(values, x.shape(), x.device())?)
    }

    /// Returns whether [`forward_each`](Self::forward_each) can multiply the same input by both linears in one call.
    pub fn shares_input_with(&self, other: &Self) -> bool {
        match (&*self.weight, &*other.weight) {
            (WeightBody::Packed { linear: a, grid }, WeightBody::Packed { linear: b, grid: other }) => {
                grid == other && a.shares_input_with(b)
            }
            _ => false,
        }
    }

    /// Multiplies the same `x` `[batch, positions, k]` by linears that can run [in one call](Self::shares_input_with).
    /// If some linears are not packed, all run separately.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), and when packed linears cannot run in one call.
    pub fn forward_each(linears: &[&Self], x: &Tensor) -> Result<Vec<Tensor>> {
        let packed = linears.iter().filter_map(|linear| match &*linear.weight {
            WeightBody::Packed { linear, .. } => Some(linear),
            _ => None,
        });
        let packed: Vec<_> = packed.collect();
        if packed.len() != linears.len() {
            return linears.iter().map(|linear| linear.forward(x)).collect();
        }
        let Some(first) = linears.first() else { return Ok(Vec::new()) };
        let products = QuantizedLinear::forward_each(&packed, &first.rounded(x)?)?;
        products.into_iter().zip(linears).map(|(y, linear)| linear.with_bias(y)).collect()
    }

    /// Whether the kernels can compute a norm or gate while packing this linear's input rows.
    pub(super) fn takes_fused(&self) -> bool {
        matches!(&*self.weight, WeightBody::Packed { grid: None, .. })
    }

    /// Multiplies rows that the kernels compute by linears that [share their input](Self::shares_input_with).
    pub(super) fn forward_fused(linears: &[&Self], from: Fused<'_>) -> Result<Vec<Tensor>> {
        let packed = linears.iter().map(|linear| match &*linear.weight {
            WeightBody::Packed { linear, grid: None } => Ok(linear),
            _ => Err(Error::Internal("a linear is not packed".into())),
        });
        let products = QuantizedLinear::forward_fused(&packed.collect::<Result<Vec<_>>>()?, from)?;
        products.into_iter().zip(linears).map(|(y, linear)| linear.with_bias(y)).collect()
    }

    /// Returns `x Ŵᵀ + b` for `x` `[batch, positions, k]`, rounded to the input's grid first if there is one.
    ///
    /// # Errors
    /// When the width of `x` does not match, the weight cannot be read, or a GPU fails.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.with_bias(self.product(x)?)
    }

    pub(super) fn product(&self, x: &Tensor) -> Result<Tensor> {
        Ok(match &*self.weight {
            WeightBody::Packed { linear, .. } => linear.forward(&self.rounded(x)?)?,
            // As a candle operation, its error would become plain text.
            WeightBody::Cuda { linear, .. } => {
                let values = self.rounded(x)?.flatten_all()?.to_vec1::<f32>()?;
                let mut dims = x.dims().to_vec();
                if let Some(last) = dims.last_mut() {
                    *last = linear.n();
                }
                let mut out = vec![0.0; dims.iter().product()];
                linear.multiply(&values, &mut out).map_err(|e| cuda::failed(&e))?;
                Tensor::from_vec(out, dims, x.device())?
            }
            _ => self.rounded(x)?.contiguous()?.apply_op1_no_bwd(&Product(self.weight.read()?))?,
        })
    }

    fn with_bias(&self, y: Tensor) -> Result<Tensor> {
        Ok(match &self.bias {
            Some(bias) => y.broadcast_add(bias)?,
            None => y,
        })
    }
}
