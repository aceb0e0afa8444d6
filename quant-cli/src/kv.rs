//! `--kv`: in how many bits keys and values are cached.

use quant_core::model::{KvScheme, Model};

/// What may be asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum KvBits {
    /// What the model's config.json says.
    #[default]
    Auto,
    /// Floats.
    #[value(name = "16")]
    Float,
    /// 8 bits.
    #[value(name = "8")]
    Eight,
    /// 4 bits.
    #[value(name = "4")]
    Four,
    /// FP8, with the scales of the model, or 1 where it has none.
    Fp8,
}

impl KvBits {
    /// The scheme that this means for a model.
    pub fn scheme(self, model: &Model) -> Option<KvScheme> {
        match self {
            Self::Auto => model.kv_scheme(),
            Self::Float => None,
            Self::Eight => Some(KvScheme::Kv8),
            Self::Four => Some(KvScheme::Kv4),
            Self::Fp8 => Some(KvScheme::Kvf8),
        }
    }
}
