//! The header of a GGUF file, from arbitrary bytes.

use quant_core::gguf::{GgufHeader, MAGIC};

/// Checks that a header is rejected, or describes tensors that lie within the file one after the other.
pub fn gguf(bytes: &[u8]) {
    check(bytes);
    // Random bytes rarely begin with a valid magic and version.
    let mut framed = MAGIC.to_vec();
    framed.extend(3_u32.to_le_bytes());
    framed.extend_from_slice(bytes);
    check(&framed);
}

fn check(bytes: &[u8]) {
    for len in [bytes.len() as u64, bytes.len() as u64 * 2, u64::MAX] {
        let Ok(header) = GgufHeader::parse(bytes, len) else { continue };
        let mut end = 0;
        for tensor in &header.tensors {
            assert!(tensor.offset >= end, "`{}` overlaps the tensor before it", tensor.name);
            end = tensor.offset.checked_add(tensor.bytes).expect("no overflow");
            assert!(end <= len, "`{}` exceeds the file", tensor.name);
            let columns = tensor.columns();
            let rows: usize = tensor.shape[..tensor.shape.len() - 1].iter().product();
            assert_eq!(tensor.kind.row_bytes(columns).map(|row| (row * rows) as u64), Some(tensor.bytes));
        }
    }
}
