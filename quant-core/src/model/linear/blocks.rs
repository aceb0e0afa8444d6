//! A weight in the blocks of a GGUF file.

use quant_kernels_cpu::{KernelError, PackedLinear, Rayon, WeightView};
use rayon::prelude::*;

use crate::blocks::BlockType;
use crate::checkpoint::TensorSource;
use crate::{Error, Result};

/// A weight `[n, k]` in blocks, as stored in its file. Rows are decoded on use, or packed for the kernels.
#[derive(Debug)]
pub struct BlockWeight {
    name: String,
    shape: [usize; 2],
    kind: &'static BlockType,
    bytes: Vec<u8>,
}

impl BlockWeight {
    /// Reads a tensor of a checkpoint, if it is stored in blocks that the kernels multiply. Also returns `None` if a
    /// scale is not finite; reading the tensor as floats then reports the value.
    ///
    /// # Errors
    /// When it cannot be read, or its shape does not match.
    pub fn read(source: &dyn TensorSource, name: &str, shape: [usize; 2]) -> Result<Option<Self>> {
        let Some(kind) = source.block_type(name).filter(|kind| kind.has_kernel()) else { return Ok(None) };
        let info = source.require(name)?;
        if info.shape != shape {
            return Err(Error::TensorShape {
                path: source.location(name),
                expected: shape.to_vec(),
                got: info.shape.clone(),
                tensor: name.to_owned(),
            });
        }
        let Some(bytes) = source.read_blocks(name)? else { return Ok(None) };
        if kind.row_bytes(shape[1]).and_then(|row| row.checked_mul(shape[0])) != Some(bytes.len()) {
            return Err(Error::Internal(format!("blocks of `{name}` do not form its shape")));
        }
        let finite = bytes.par_chunks((1 << 16) * kind.bytes).all(|part| kind.has_finite_scales(part));
        Ok(finite.then(|| Self { name: name.to_owned(), shape, kind, bytes }))
    }

    /// Returns the shape `[n, k]`.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Returns the type of the blocks.
    pub fn kind(&self) -> &'static BlockType {
        self.kind
    }

    /// Decodes consecutive rows into `out` `[rows, k]`, beginning with row `first`. The caller guarantees that the
    /// weight has these rows.
    pub(super) fn decode(&self, first: usize, out: &mut [f32]) {
        let k = self.shape[1];
        if k == 0 {
            return;
        }
        let row_bytes = (self.bytes.len() / self.shape[0].max(1)).max(1);
        for (out, row) in out.chunks_exact_mut(k).zip(self.bytes.chunks_exact(row_bytes).skip(first)) {
            self.kind.decode(row, out);
        }
    }

    /// Packs the weight for the kernels.
    pub(super) fn pack(&self) -> Result<PackedLinear> {
        let pack = |view: &WeightView<'_>| PackedLinear::pack(view, None, false, &Rayon);
        let fault = |what: &dyn std::fmt::Display| {
            Error::usage(format!("`{}` cannot be packed: {what}", self.name), "evaluate it as floats")
        };
        match self.kind.with_view(self.shape, &self.bytes, pack) {
            Ok(Some(packed)) => packed.map_err(|e: KernelError| fault(&e)),
            Ok(None) => Err(Error::Internal(format!("no kernel for {}", self.kind.name))),
            Err(e) => Err(fault(&e)),
        }
    }
}
