//! `--kv`: the precision of the KV cache.

use quant_core::model::{KvScheme, Model};

/// The values of the option.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum KvBits {
    /// The setting in the model's config.json.
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
    /// FP8, with the scales of the model, or with a scale of 1 if the model has none.
    Fp8,
}

impl KvBits {
    /// Returns the KV scheme that this option selects for a model; `None` means floats.
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
