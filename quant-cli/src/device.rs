//! The device that computes quantized linears.

/// The values of `--device`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Device {
    /// The processor.
    #[default]
    Cpu,
    /// The first NVIDIA GPU.
    Cuda,
}
