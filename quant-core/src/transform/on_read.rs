//! Weights of experts that are rewritten each time they are read, so that only one expert needs to be in memory.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use rayon::prelude::*;

use super::Rewrite;
use crate::checkpoint::{Dtype, TensorInfo, TensorSource};
use crate::model::{Block, Linear, NodeId, StoredWeight, WeightBody};
use crate::{Error, Result};

/// Rows that a thread rewrites at a time.
const ROWS: usize = 64;

impl Rewrite {
    /// As [`apply`](Self::apply), but experts' weights are read and rewritten when they are used, until they are
    /// released. The result has the same values.
    ///
    /// # Errors
    /// When another weight cannot be read.
    pub(crate) fn apply_on_read(&self, block: &Block) -> Result<Block> {
        let graph = block.graph().clone();
        let mut rewritten = self.applied(block, |node| graph.expert_of(node).is_none())?;
        let of_experts = graph.linears().filter(|(node, ..)| graph.expert_of(*node).is_some());
        for (node, name, ..) in of_experts.filter(|(node, ..)| self.changes(*node)) {
            let linear = block.linear(node);
            let weight = OnRead::new(self.of(node), node, name, linear.weight().clone()).stored()?;
            let bias = self.rewritten_bias(node, linear)?;
            rewritten.replace_linear(node, Linear::new(Arc::new(WeightBody::Stored(weight)), bias));
        }
        Ok(rewritten)
    }

    /// The changes to the weight of one linear.
    fn of(&self, node: NodeId) -> Self {
        fn one<T: Clone>(all: &BTreeMap<NodeId, T>, node: NodeId) -> BTreeMap<NodeId, T> {
            all.get(&node).map(|values| (node, values.clone())).into_iter().collect()
        }
        Self {
            columns: one(&self.columns, node),
            rows: one(&self.rows, node),
            row_order: one(&self.row_order, node),
            column_order: one(&self.column_order, node),
            ..Self::default()
        }
    }
}

/// A checkpoint with one tensor: the rewritten weight.
struct OnRead {
    rewrite: Rewrite,
    node: NodeId,
    name: String,
    info: TensorInfo,
    weight: Arc<WeightBody>,
}

impl OnRead {
    fn new(rewrite: Rewrite, node: NodeId, name: &str, weight: Arc<WeightBody>) -> Self {
        let info = TensorInfo { dtype: Dtype::F32, shape: weight.shape().to_vec() };
        Self { rewrite, node, name: name.to_owned(), info, weight }
    }

    fn stored(self) -> Result<StoredWeight> {
        let (name, shape) = (self.name.clone(), self.weight.shape());
        StoredWeight::new(Arc::new(self), name, shape)
    }
}

impl TensorSource for OnRead {
    fn names(&self) -> Vec<&str> {
        vec![&self.name]
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        (name == self.name).then_some(&self.info)
    }

    /// Reads whole rows. The bytes of the weight before the rewrite are released.
    fn read_range(&self, name: &str, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let [n, k] = self.weight.shape();
        let row = (Dtype::F32.size() * k).max(1);
        let first = usize::try_from(offset).ok().filter(|at| at.is_multiple_of(row)).map(|at| at / row);
        let rows = Some(buffer.len() / row).filter(|rows| rows * row == buffer.len());
        let (Some(first), Some(rows)) = (first, rows) else {
            return Err(Error::Internal(format!("a part of a row of `{name}` was requested")));
        };
        if self.info(name).is_none() || first + rows > n {
            return Err(Error::Internal(format!("rows {first}..{} of `{name}` do not exist", first + rows)));
        }
        let weight = self.weight.read()?;
        let tiles = buffer.par_chunks_mut(ROWS * row).enumerate();
        tiles.try_for_each_init(
            || (Vec::new(), Vec::new()),
            |(scratch, values), (tile, bytes)| {
                let start = first + tile * ROWS;
                let rows = start..start + bytes.len() / row;
                values.resize(rows.len() * k, 0.0);
                self.rewrite.weight_rows(self.node, &weight, rows, scratch, values)?;
                bytes.copy_from_slice(&Dtype::F32.narrow(values));
                Ok::<_, Error>(())
            },
        )?;
        drop(weight);
        if let Some(weight) = self.weight.as_stored() {
            drop(weight.release());
        }
        Ok(())
    }

    fn location(&self, _name: &str) -> PathBuf {
        PathBuf::new()
    }
}
