//! candle's `QMatMul`.

use std::borrow::Cow;

use anyhow::{Context, Result};
use candle_core::quantized::{GgmlDType, QMatMul, QStorage, QTensor};
use candle_core::{Device, Module, Tensor};

use crate::Case;
use crate::data::{BASE, repeated, weights};

/// The version of candle that this program was built with, and whether it was built with AVX2.
pub fn version() -> String {
    let lock = include_str!("../../../Cargo.lock").split_once("name = \"candle-core\"\nversion = \"");
    let version = lock.and_then(|(_, rest)| rest.split('"').next()).unwrap_or("?");
    let built = if cfg!(target_feature = "avx2") { "for this processor" } else { "for any processor" };
    format!("{version}, built {built}")
}

pub const CONTESTANTS: [(&str, GgmlDType); 3] =
    [("Q4_0", GgmlDType::Q4_0), ("Q4_K", GgmlDType::Q4K), ("Q8_0", GgmlDType::Q8_0)];

/// The weights of a contestant.
pub struct Linear {
    bytes: usize,
    copies: Vec<QMatMul>,
    x: Option<Tensor>,
    out: Option<Tensor>,
    k: usize,
}

impl Linear {
    pub fn new(name: &str, [n, k]: [usize; 2], rotate: usize) -> Result<Self> {
        let found = CONTESTANTS.iter().find(|c| c.0 == name);
        let (_, dtype) = *found.with_context(|| format!("unknown contestant {name}"))?;
        let base = QTensor::quantize(&Tensor::from_vec(weights(k), (BASE, k), &Device::Cpu)?, dtype)?;
        let bytes = repeated(&base.data()?, n);
        let copies = rotate.div_ceil(bytes.len()).max(1);
        let copy = || {
            let storage = QStorage::from_data(Cow::Borrowed(&bytes), &Device::Cpu, dtype)?;
            QMatMul::from_qtensor(QTensor::new(storage, (n, k))?)
        };
        let copies = (0..copies).map(|_| copy()).collect::<candle_core::Result<_>>()?;
        Ok(Self { bytes: bytes.len(), copies, x: None, out: None, k })
    }
}

impl Case for Linear {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn copies(&self) -> usize {
        self.copies.len()
    }

    fn note(&self) -> String {
        String::new()
    }

    fn tokens(&mut self, x: &[f32], m: usize) -> Result<()> {
        self.x = Some(Tensor::from_slice(x, (m, self.k), &Device::Cpu)?);
        Ok(())
    }

    fn pass(&mut self, copies: usize) -> Result<()> {
        let x = self.x.as_ref().context("no tokens yet")?;
        for weights in &self.copies[..copies] {
            self.out = Some(weights.forward(x)?);
        }
        Ok(())
    }

    fn out(&self) -> Result<Vec<f32>> {
        Ok(self.out.as_ref().context("nothing was multiplied")?.flatten_all()?.to_vec1()?)
    }
}
