//! What a run records in its journal so that a resumed run need not calibrate again: vectors, and the hashes of the
//! weights that they were computed from.

use rayon::prelude::*;
use serde_json::{Value, json};

use super::plan::GgufPlan;
use crate::checkpoint::{TensorInfo, TensorSource};
use crate::digest::{bytes_from_hex, hex};
use crate::model::{Block, Model};
use crate::{CancelToken, Error, Result, TensorSink};

const OUTER: &str = "weights outside of blocks";
const PIECE_BYTES: u64 = 8 << 20;

/// Named vectors as a record.
pub(super) fn record<'v>(vectors: impl Iterator<Item = (String, &'v [f32])>) -> Value {
    let (mut names, mut bytes) = (Vec::new(), Vec::new());
    for (name, values) in vectors {
        names.push(json!([name, values.len()]));
        bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    }
    let names = Value::Array(names);
    json!({ "blake3": checksum(&names, &bytes), "names": names, "values": hex(&bytes) })
}

/// The vectors of a record; `None` if it is damaged.
pub(super) fn vectors(record: &Value) -> Option<Vec<(String, Vec<f32>)>> {
    let bytes = bytes_from_hex(record["values"].as_str()?)?;
    if record["blake3"].as_str()? != checksum(&record["names"], &bytes) {
        return None;
    }
    let mut values = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let named = record["names"].as_array()?.iter().map(|named| {
        let [name, len] = named.as_array()?.as_slice() else { return None };
        let len = usize::try_from(len.as_u64()?).ok()?;
        Some((name.as_str()?.to_owned(), values.by_ref().take(len).collect()))
    });
    named.collect()
}

fn checksum(names: &Value, bytes: &[u8]) -> String {
    let mut hash = blake3::Hasher::new();
    hash.update(names.to_string().as_bytes());
    hash.update(bytes);
    hash.finalize().to_hex().to_string()
}

/// Records the hashes of a block's parameters. If an interrupted run did, compares them instead: what it computed from
/// the block and from later ones depends on all of them.
///
/// # Errors
/// [`Error::InputChanged`] if a parameter has changed since; errors of reading and of `sink`.
pub(super) fn check_block(
    sink: &mut dyn TensorSink,
    model: &Model,
    layer: usize,
    block: &Block,
) -> Result<()> {
    let (a, source) = (model.architecture(), model.source());
    let ops = block.graph().nodes().iter().map(|node| &node.op);
    let names = ops.flat_map(|op| {
        op.parameters().into_iter().map(|parameter| a.in_block(layer, &op.tensor_name(&parameter)))
    });
    // A parameter may be missing if the family does not require it.
    let names: Vec<String> = names.filter(|name| source.info(name).is_some()).collect();
    let held = |name: &str| block.stored_weights().find(|weight| weight.name() == name)?.held();
    let hash = |name: &String| match held(name) {
        Some(bytes) => Ok(blake3::hash(&bytes).to_hex().to_string()),
        None => hash_of(source.as_ref(), name, &CancelToken::default()),
    };
    let hashes = names.par_iter().map(hash).collect::<Result<Vec<_>>>()?;
    check(sink, &format!("weights of block {layer}"), &names, &hashes)
}

/// Like [`check_block`], for the tensors outside of blocks, such as the embedding.
pub(super) fn check_outer(
    sink: &mut dyn TensorSink,
    model: &Model,
    plan: &GgufPlan,
    cancel: &CancelToken,
) -> Result<()> {
    let outer = plan.tensors.iter().filter(|tensor| tensor.layer().is_none());
    let names: Vec<String> = outer.flat_map(|tensor| tensor.sources()).map(str::to_owned).collect();
    let hashes = names.par_iter().map(|name| hash_of(model.source().as_ref(), name, cancel));
    check(sink, OUTER, &names, &hashes.collect::<Result<Vec<_>>>()?)
}

/// Compares all blocks with those of the interrupted run.
pub(super) fn check_blocks(sink: &mut dyn TensorSink, model: &Model, cancel: &CancelToken) -> Result<()> {
    let ropes = model.rope(1)?;
    (0..model.architecture().layers).try_for_each(|layer| {
        cancel.check()?;
        check_block(sink, model, layer, &model.stored_block(layer, &ropes)?)
    })
}

fn check(sink: &mut dyn TensorSink, key: &str, names: &[String], hashes: &[String]) -> Result<()> {
    let Some(Value::Array(known)) = sink.recall(key) else {
        return sink.remember(key, &json!(hashes));
    };
    let mut known = known.iter().map(Value::as_str);
    match hashes.iter().position(|hash| known.next().flatten() != Some(hash)) {
        Some(at) => Err(Error::InputChanged { tensor: names[at].clone() }),
        None => Ok(()),
    }
}

fn hash_of(source: &dyn TensorSource, name: &str, cancel: &CancelToken) -> Result<String> {
    let len = source.require(name).map(TensorInfo::byte_len)?;
    let (mut hash, mut piece) = (blake3::Hasher::new(), Vec::new());
    for at in (0..len).step_by(PIECE_BYTES as usize) {
        cancel.check()?;
        piece.resize(PIECE_BYTES.min(len - at) as usize, 0);
        source.read_range(name, at, &mut piece)?;
        hash.update(&piece);
    }
    Ok(hash.finalize().to_hex().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_come_back_unless_they_are_damaged() {
        let all = [("a", vec![1.5_f32, -0.0, f32::MIN_POSITIVE]), ("b", vec![]), ("c 1", vec![1e30])];
        let written = record(all.iter().map(|(name, values)| ((*name).to_owned(), &values[..])));
        let text = written.to_string();
        let found = vectors(&serde_json::from_str(&text).unwrap()).unwrap();
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(found.len(), all.len());
        for ((name, values), (expected, of)) in found.iter().zip(&all) {
            assert_eq!((name.as_str(), bits(values)), (*expected, bits(of)));
        }
        for (from, to) in
            [("\"c 1\"", "\"c 2\""), ("0000c03f", "0000c13f"), ("\"a\",3", "\"a\",2"), ("00", "0g")]
        {
            let damaged = text.replacen(from, to, 1);
            assert_ne!(damaged, text, "{from}");
            assert_eq!(vectors(&serde_json::from_str(&damaged).unwrap()), None, "{from}");
        }
        assert_eq!(vectors(&Value::Null), None);
    }
}
