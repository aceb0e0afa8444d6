//! Weights whose groups of inputs are not adjacent, as GPTQ writes them with `desc_act` and without static groups. An
//! index stores the group of every input (`g_idx`).
//!
//! Readers sort the columns by group, so that groups of columns are adjacent, and keep the
//! [order](QuantizedTensor::input_order).

use crate::checkpoint::{Dtype, TensorSource};
use crate::quantize::QuantizedTensor;
use crate::{Error, Result};

/// Reads the index of groups `[k]` and returns the input of every column when columns are sorted by group; `None` if
/// groups of inputs are adjacent already, or the index is unused (all −1).
///
/// # Errors
/// [`Error::UnsupportedQuantization`] when a group does not have `group_size` inputs; when the index cannot be read.
pub(super) fn read(
    source: &dyn TensorSource,
    name: &str,
    k: usize,
    group_size: usize,
) -> Result<Option<Vec<u32>>> {
    let info = source.require(name)?;
    let size = info.dtype.size();
    let number = |bytes: &[u8]| match (<[u8; 8]>::try_from(bytes), <[u8; 4]>::try_from(bytes)) {
        (Ok(wide), _) => i64::from_le_bytes(wide),
        (_, Ok(narrow)) => i64::from(i32::from_le_bytes(narrow)),
        _ => i64::MIN,
    };
    let refuse = |reason: String| {
        Err(Error::UnsupportedQuantization {
            path: source.location(name),
            reason: format!("`{name}` {reason}"),
        })
    };
    if info.shape != [k] || !matches!(info.dtype, Dtype::I32 | Dtype::I64) {
        return refuse(format!("is not an index of {k} integers"));
    }
    let groups: Vec<i64> = source.read(name)?.chunks_exact(size).map(number).collect();
    let unused = |group: &i64| *group == -1;
    if groups.iter().enumerate().all(|(i, &group)| group == (i / group_size.max(1)) as i64)
        || !groups.is_empty() && groups.iter().all(unused)
    {
        return Ok(None);
    }
    let count = k / group_size.max(1);
    let mut members: Vec<Vec<u32>> = vec![Vec::new(); count];
    for (input, &group) in groups.iter().enumerate() {
        match usize::try_from(group).ok().and_then(|group| members.get_mut(group)) {
            Some(members) => members.push(input as u32),
            None => return refuse(format!("assigns input {input} to group {group} of {count}")),
        }
    }
    match members.iter().position(|members| members.len() != group_size) {
        Some(group) => refuse(format!(
            "assigns {} inputs to group {group}, but groups have {group_size}",
            members[group].len()
        )),
        None => Ok(Some(members.concat())),
    }
}

/// Sorts the codes of a weight that was read in the order of its inputs.
pub(super) fn apply(tensor: QuantizedTensor, order: Option<Vec<u32>>) -> QuantizedTensor {
    let Some(order) = order else { return tensor };
    let k = tensor.shape[1];
    let mut codes = Vec::with_capacity(tensor.codes.len());
    for row in tensor.codes.chunks_exact(k.max(1)) {
        codes.extend(order.iter().map(|&input| row[input as usize]));
    }
    QuantizedTensor { codes, input_order: Some(order), ..tensor }
}
