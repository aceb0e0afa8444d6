//! The seal of a file: a digest of its contents inside its header, by which a file is recognized that nothing has changed
//! since it was written.

use std::ops::Range;

use crate::digest::{Digest256, hex};

/// What a header has in place of its seal, the digits of a BLAKE3, until all tensors are written.
pub const UNSEALED: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// Returns the seal of a file: the BLAKE3 of its header with [`UNSEALED`], followed by those of its tensors in order.
pub fn seal(header: &[u8], tensors: impl IntoIterator<Item = Digest256>) -> String {
    let mut hash = blake3::Hasher::new();
    hash.update(blake3::hash(header).as_bytes());
    for tensor in tensors {
        hash.update(&tensor);
    }
    hex(hash.finalize().as_bytes())
}

/// Whether a header equals the planned one apart from its seal.
pub(crate) fn equal_unsealed(header: &[u8], planned: &[u8], seal: Option<&Range<usize>>) -> bool {
    let Some(Range { start, end }) = seal.cloned() else { return header == planned };
    header.len() == planned.len() && header[..start] == planned[..start] && header[end..] == planned[end..]
}
