//! The MLP of a Llama block on candle's `QMatMul`, with packed weights.
//!
//! ```text
//! cargo run --release -p quant-candle --example mlp -- OUT model.layers.0.mlp
//! ```
use candle_core::quantized::QMatMul;
use candle_core::{DType, Device, Module, Tensor};
use quant_candle::{Checkpoint, Rayon, Runner};

/// An MLP. Only `load` knows that the weights are quantized.
pub struct Mlp {
    gate: QMatMul,
    up: QMatMul,
    down: QMatMul,
}

impl Mlp {
    /// Loads the MLP `module` of a block.
    pub fn load(checkpoint: &Checkpoint, module: &str) -> candle_core::Result<Self> {
        let linear = |name: &str| checkpoint.qmatmul(&format!("{module}.{name}_proj"));
        Ok(Self { gate: linear("gate")?, up: linear("up")?, down: linear("down")? })
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.down.forward(&(self.gate.forward(x)?.silu()? * self.up.forward(x)?)?)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let [path, module] = [1, 2].map(|i| std::env::args().nth(i).expect("CHECKPOINT MLP"));
    let checkpoint = Checkpoint::open(path.as_ref(), &Runner::new(Rayon))?;
    let mlp = Mlp::load(&checkpoint, &module)?;
    let config = checkpoint.quantized().config();
    let hidden = config.get("hidden_size").and_then(|size| size.as_u64()).ok_or("no hidden_size")?;
    println!("{}", mlp.forward(&Tensor::ones((1, hidden as usize), DType::F32, &Device::Cpu)?)?);
    Ok(())
}
