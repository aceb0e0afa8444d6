//! The weights of a quantized checkpoint as float tensors.

use std::sync::Arc;

use candle_core::{DType, Device, Error, Result, Shape, Tensor};
use candle_nn::Init;
use candle_nn::var_builder::SimpleBackend;
use quant_formats::format::QuantizedCheckpoint;

pub(crate) struct Floats(pub(crate) Arc<QuantizedCheckpoint>);

impl Floats {
    /// The quantized linear that a tensor is the weight of.
    fn linear<'a>(&self, name: &'a str) -> Option<&'a str> {
        name.strip_suffix(".weight").filter(|linear| self.0.linear(linear).is_some())
    }

    fn read(&self, name: &str) -> Result<Tensor> {
        let (values, shape) = match self.linear(name) {
            Some(linear) => {
                let weight = self.0.read(linear).map_err(Error::wrap)?;
                (weight.dequantize().map_err(Error::wrap)?, weight.shape.to_vec())
            }
            None => {
                let source = self.0.source();
                let shape = source.require(name).map_err(Error::wrap)?.shape.clone();
                (source.read_f32(name).map_err(Error::wrap)?, shape)
            }
        };
        Tensor::from_vec(values, shape, &Device::Cpu)
    }
}

impl SimpleBackend for Floats {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let tensor = self.get_unchecked(name, dtype, device)?;
        if tensor.shape() != &shape {
            return Err(Error::UnexpectedShape {
                msg: format!("shape mismatch for {name}"),
                expected: shape,
                got: tensor.shape().clone(),
            });
        }
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        self.read(name)?.to_dtype(dtype)?.to_device(device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.linear(name).is_some() || self.0.source().info(name).is_some()
    }
}
