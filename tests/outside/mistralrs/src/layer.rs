//! mistral.rs's `QuantMethod` for weights that stay packed: GPTQ, AWQ, compressed-tensors and the other formats of
//! `quant-formats`, on the CPU. mistral.rs itself runs GPTQ and AWQ on CUDA only.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use candle_core::{CpuStorage, CustomOp1, DType, Device, Error, Layout, Result, Shape, Tensor, bail};
use candle_nn::Linear;
use mistralrs_quant::{
    IsqType, QuantMethod, QuantMethodConfig, QuantizeOntoGuard, QuantizedSerde, UnquantLinear,
};
use quant_formats::checkpoint::{Dtype, MemorySource};
use quant_formats::format::QuantizedCheckpoint;
use quant_formats::quantize::{InputGrid, restore_input_order};
use quant_kernels_cpu::{Activations, FloatRows, Int8Rows, IsaToken, PackedLinear, Rayon, RowLayout};
use serde_json::json;

const MODULE: &str = "linear";

/// A linear with packed weights `[n, k]` and its bias.
#[derive(Debug)]
pub struct PackedLayer {
    packed: PackedLinear,
    activations: Activations,
    /// The input of each column, if they are not in the order of the inputs (`desc_act`).
    order: Option<Vec<u32>>,
}

impl PackedLayer {
    /// Reads a linear of a checkpoint.
    pub fn read(checkpoint: &QuantizedCheckpoint, linear: &str) -> Result<Self> {
        let bias = checkpoint.bias(linear).map_err(Error::wrap)?;
        let mut weight = checkpoint.read(linear).map_err(Error::wrap)?;
        let activations = match weight.input_grid().map_err(Error::wrap)? {
            None => Activations::Float,
            Some(InputGrid::Token) => Activations::PerToken,
            Some(InputGrid::Static(by)) => Activations::Static(by),
            Some(grid) => {
                bail!("{linear}: activations are rounded to {grid:?}, which this layer does not do")
            }
        };
        let order = weight.take_input_order();
        let packed = weight.pack(bias.as_deref(), &Rayon).map_err(Error::wrap)?;
        Ok(Self { packed, activations, order })
    }

    fn shape(&self) -> [usize; 2] {
        [self.packed.layout().n(), self.packed.layout().k()]
    }

    fn multiply(
        &self,
        x: &[f32],
        out: &mut [f32],
    ) -> std::result::Result<(), quant_kernels_cpu::KernelError> {
        // Rows keep their memory between calls. They are taken, not borrowed: while this thread waits for others, rayon
        // may run another product on it.
        thread_local! {
            static ROWS: RefCell<Option<(FloatRows, Int8Rows)>> = const { RefCell::new(None) };
        }
        let layout = RowLayout::of(self.packed.layout());
        let rows = ROWS.take();
        let (mut float, mut int8) =
            rows.unwrap_or_else(|| (FloatRows::new(IsaToken::detect()), Int8Rows::default()));
        match self.activations {
            Activations::Float => {
                float.pack(x, layout, &Rayon)?;
                self.packed.multiply_float(&float, out, &Rayon)?;
            }
            Activations::PerToken => {
                int8.quantize(x, layout, &Rayon)?;
                self.packed.multiply(&int8, out, &Rayon)?;
            }
            Activations::Static(by) => {
                int8.quantize_static(x, layout, by, &Rayon)?;
                self.packed.multiply(&int8, out, &Rayon)?;
            }
        }
        ROWS.set(Some((float, int8)));
        Ok(())
    }

    /// The same layer in floats, for what needs them.
    fn in_floats(&self) -> Result<UnquantLinear> {
        let bias = self.packed.bias().map(|bias| Tensor::new(bias, &Device::Cpu)).transpose()?;
        QuantMethod::new(QuantMethodConfig::Unquantized(Linear::new(self.dequantize_w()?, bias)))
    }
}

/// The tensor's bytes, in the order of its elements.
fn bytes(tensor: &Tensor) -> Result<Vec<u8>> {
    let flat = tensor.flatten_all()?;
    Ok(match tensor.dtype() {
        DType::I32 => flat.to_vec1::<i32>()?.into_iter().flat_map(i32::to_le_bytes).collect(),
        DType::F16 => flat.to_vec1::<half::f16>()?.into_iter().flat_map(half::f16::to_le_bytes).collect(),
        other => bail!("expected I32 or F16, got {other:?}"),
    })
}

impl QuantMethod for PackedLayer {
    /// mistral.rs calls it with the tensors of a GPTQ or AWQ checkpoint.
    fn new(method: QuantMethodConfig) -> Result<Self> {
        let QuantMethodConfig::GptqAwq { bits, q_weight, qzeros, scales, g_idx, bias, is_awq, .. } = method
        else {
            bail!("expected the tensors of a GPTQ or AWQ checkpoint");
        };
        // GPTQ packs 32 bits of inputs into a word; AWQ packs outputs.
        let k = if is_awq { q_weight.dim(0)? } else { q_weight.dim(0)? * 32 / bits.max(1) as usize };
        let group_size = k / scales.dim(0)?.max(1);
        // Groups may consist of inputs that are not adjacent.
        let groups = g_idx.as_ref().map(|g_idx| g_idx.to_vec1::<i32>()).transpose()?.unwrap_or_default();
        let desc_act = groups.iter().enumerate().any(|(i, &group)| group as usize != i / group_size);
        let mut source = MemorySource::new();
        let tensors = [
            ("qweight", Some(q_weight)),
            ("qzeros", qzeros),
            ("scales", Some(scales)),
            ("g_idx", g_idx),
            ("bias", bias),
        ];
        for (name, tensor) in tensors {
            let Some(tensor) = tensor else { continue };
            let dtype = if tensor.dtype() == DType::I32 { Dtype::I32 } else { Dtype::F16 };
            let shape = tensor.dims().to_vec();
            source.insert(format!("{MODULE}.{name}"), dtype, shape, bytes(&tensor)?).map_err(Error::wrap)?;
        }
        let settings = match is_awq {
            true => {
                json!({ "quant_method": "awq", "bits": bits, "group_size": group_size, "zero_point": true,
                "version": "gemm" })
            }
            false => json!({ "quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": false,
                "desc_act": desc_act, "checkpoint_format": "gptq" }),
        };
        let opened = QuantizedCheckpoint::new(Arc::new(source), "tensors".as_ref(), &settings);
        Self::read(&opened.map_err(Error::wrap)?, MODULE)
    }

    fn dequantize_w(&self) -> Result<Tensor> {
        let [n, k] = self.shape();
        let mut weight = vec![0.0; n * k];
        self.packed.view().dequantize_rows(0..n, &mut weight).map_err(Error::wrap)?;
        if let Some(order) = &self.order {
            restore_input_order(&mut weight, order);
        }
        Tensor::from_vec(weight, (n, k), &Device::Cpu)
    }

    fn forward(&self, a: &Tensor) -> Result<Tensor> {
        let a = match &self.order {
            Some(order) => {
                let order = Tensor::new(order.as_slice(), &Device::Cpu)?;
                a.index_select(&order, a.rank() - 1)?
            }
            None => a.contiguous()?,
        };
        a.apply_op1_no_bwd(&Product(self))
    }

    fn quantized_act_type(&self) -> Option<DType> {
        Some(DType::F32)
    }

    fn dtype_and_device(&self) -> (DType, Device) {
        (DType::F32, Device::Cpu)
    }

    fn add_delta_w(&self, delta: &Tensor) -> Result<Arc<dyn QuantMethod>> {
        self.in_floats()?.add_delta_w(delta)
    }

    fn apply_isq(
        self: Arc<Self>,
        dtype: Option<IsqType>,
        device: Device,
        n_quantized: &AtomicUsize,
        imatrix_weight: Option<Vec<f32>>,
        guard: QuantizeOntoGuard,
    ) -> Result<Arc<dyn QuantMethod>> {
        Arc::new(self.in_floats()?).apply_isq(dtype, device, n_quantized, imatrix_weight, guard)
    }

    fn unquant_weight_bias(&self) -> Option<(Tensor, Option<Tensor>)> {
        self.in_floats().ok()?.unquant_weight_bias()
    }
}

impl QuantizedSerde for PackedLayer {
    fn name(&self) -> &'static str {
        "packed"
    }
}

/// The product with a layer's weight, as an operation of candle.
struct Product<'a>(&'a PackedLayer);

impl CustomOp1 for Product<'_> {
    fn name(&self) -> &'static str {
        "packed-linear"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let ([n, k], dims) = (self.0.shape(), layout.dims());
        let (CpuStorage::F32(x), Some((start, end))) = (storage, layout.contiguous_offsets()) else {
            bail!("expected contiguous f32 input");
        };
        if dims.last() != Some(&k) {
            bail!("expected input [.., {k}], got {dims:?}");
        }
        let mut out = vec![0.0; (end - start) / k * n];
        self.0.multiply(&x[start..end], &mut out).map_err(Error::wrap)?;
        Ok((CpuStorage::F32(out), Shape::from([&dims[..dims.len() - 1], &[n]].concat())))
    }
}
