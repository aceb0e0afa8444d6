//! Plain floats; each element is a block.

use half::{bf16, f16};

use super::BlockType;

/// Single precision.
pub static F32: BlockType = BlockType {
    name: "F32",
    id: 0,
    elements: 1,
    bytes: 4,
    needs_importance: false,
    uses_importance: false,
    fallback: None,
    grid: None,
    encode: |row, _, out| {
        for (o, v) in out.chunks_exact_mut(4).zip(row) {
            o.copy_from_slice(&v.to_le_bytes());
        }
    },
    decode: |bytes, out| {
        for (o, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
            *o = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        }
    },
};

/// IEEE half precision.
pub static F16: BlockType = BlockType {
    name: "F16",
    id: 1,
    elements: 1,
    bytes: 2,
    needs_importance: false,
    uses_importance: false,
    fallback: None,
    grid: None,
    encode: |row, _, out| {
        for (o, v) in out.chunks_exact_mut(2).zip(row) {
            o.copy_from_slice(&f16::from_f32(*v).to_le_bytes());
        }
    },
    decode: |bytes, out| {
        for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
            *o = f16::from_le_bytes([b[0], b[1]]).to_f32();
        }
    },
};

/// bfloat16.
pub static BF16: BlockType = BlockType {
    name: "BF16",
    id: 30,
    elements: 1,
    bytes: 2,
    needs_importance: false,
    uses_importance: false,
    fallback: None,
    grid: None,
    encode: |row, _, out| {
        for (o, v) in out.chunks_exact_mut(2).zip(row) {
            o.copy_from_slice(&bf16::from_f32(*v).to_le_bytes());
        }
    },
    decode: |bytes, out| {
        for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
            *o = bf16::from_le_bytes([b[0], b[1]]).to_f32();
        }
    },
};
