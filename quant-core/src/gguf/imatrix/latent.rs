//! The inputs of the matrices of latent attention, by which llama.cpp multiplies per head: queries by `attn_k_b`, and
//! by `attn_v_b` the latent vectors, which each head has weighted by its attention.
//!
//! quant multiplies the latent vectors before attention instead, so the latter occur only here.

use super::{ImportanceEntry, SquareSum, placed};
use crate::calibrate::{AttentionStatistic, InputRows, Statistic, StatisticsPass};
use crate::gguf::families::GgufFamily;
use crate::gguf::layout;
use crate::model::{Architecture, NodeId, Op};
use crate::{Error, Result};

/// The sums of squares for one block.
pub(super) struct LatentInputs {
    /// The names of the matrices of keys and of values in the file.
    names: [String; 2],
    /// The weight of the checkpoint that contains both.
    weight: String,
    attention: NodeId,
    /// The latent vectors.
    latent: NodeId,
    queries: QuerySquares,
    attended: Vec<SquareSum>,
}

/// The sums of squares of the unrotated channels of queries, which come first in each head.
struct QuerySquares {
    head_dim: usize,
    heads: Vec<SquareSum>,
}

impl AttentionStatistic for QuerySquares {
    fn take(&mut self, queries: &InputRows<'_>, _keys: &InputRows<'_>) -> Result<()> {
        for (_, row) in queries.counted() {
            for (sum, head) in self.heads.iter_mut().zip(row.chunks_exact(self.head_dim)) {
                sum.add(head);
            }
        }
        Ok(())
    }
}

impl LatentInputs {
    /// The sums before any token; `None` if the block has no latent attention.
    pub(super) fn of(a: &Architecture, family: &GgufFamily, layer: usize) -> Result<Option<Self>> {
        let graph = a.graph(layer);
        let Some([plain, _]) = layout::latent(graph) else { return Ok(None) };
        let attention = graph.nodes().iter().enumerate().find_map(|(id, node)| match node.op {
            Op::Attention(shape) => Some((id, shape)),
            _ => None,
        });
        let Some((attention, shape)) = attention else { return Ok(None) };
        for (id, name, [_, rank], _) in graph.linears() {
            let node = &graph.nodes()[id];
            let per_head = placed(a, family, layer, &node.op)?.into_iter().filter(|p| p.is_per_head());
            let names: Vec<String> = per_head.map(|placed| placed.name(layer)).collect();
            let Ok(names) = <[String; 2]>::try_from(names) else { continue };
            let heads = |width| vec![SquareSum::new(width); shape.heads()];
            return Ok(Some(Self {
                names,
                weight: format!("{}.weight", a.in_block(layer, name)),
                attention,
                latent: node.inputs[0],
                queries: QuerySquares { head_dim: shape.head_dim, heads: heads(plain) },
                attended: heads(rank),
            }));
        }
        Ok(None)
    }

    pub(super) fn watch<'a>(&'a mut self, pass: &mut StatisticsPass<'a>) -> Result<()> {
        pass.gather_attention(self.attention, &mut self.queries);
        let heads = self.attended.iter_mut().map(|sum| sum as &mut dyn Statistic);
        pass.gather_attended(self.attention, self.latent, heads.collect())
    }

    /// The entries of both matrices.
    ///
    /// # Errors
    /// [`Error::Calibration`] if a sum is not finite in `f32`.
    pub(super) fn entries(self) -> Result<[(String, ImportanceEntry); 2]> {
        let entry = |heads: Vec<SquareSum>| {
            let mut entry = ImportanceEntry::empty();
            for sum in heads {
                sum.check(&self.weight)?;
                entry.push(&sum, |column| column);
            }
            Ok::<_, Error>(entry)
        };
        let [keys, values] = self.names;
        Ok([(keys, entry(self.queries.heads)?), (values, entry(self.attended)?)])
    }
}
