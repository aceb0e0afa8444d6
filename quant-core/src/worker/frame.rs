//! Frames between a process and its worker: a length, followed by as many bytes.
//!
//! Neither side trusts a length. Bytes are read in pieces, so a false length does not allocate memory, and the reader
//! specifies the maximum length of a frame.

use std::borrow::Cow;
use std::io::{self, ErrorKind, Read, Write};

const READ_BYTES: usize = 1 << 20;

/// A message in parts; large parts are borrowed.
#[derive(Debug, Default)]
pub(super) struct Frame<'a> {
    parts: Vec<Cow<'a, [u8]>>,
}

impl<'a> Frame<'a> {
    pub(super) fn borrow(&mut self, bytes: &'a [u8]) {
        self.parts.push(Cow::Borrowed(bytes));
    }

    pub(super) fn put(&mut self, bytes: &[u8]) {
        match self.parts.last_mut() {
            Some(Cow::Owned(last)) => last.extend_from_slice(bytes),
            _ => self.parts.push(Cow::Owned(bytes.to_vec())),
        }
    }

    /// The number of bytes, without the length prefix.
    pub(super) fn len(&self) -> u64 {
        self.parts.iter().map(|part| part.len() as u64).sum()
    }

    #[cfg(test)]
    pub(super) fn concat(&self) -> Vec<u8> {
        self.parts.concat()
    }

    /// Writes the length, then the parts.
    pub(super) fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        // The length and a small first part share one write.
        let mut head = self.len().to_le_bytes().to_vec();
        let mut parts = &self.parts[..];
        if let Some((first @ Cow::Owned(_), rest)) = parts.split_first() {
            head.extend_from_slice(first);
            parts = rest;
        }
        out.write_all(&head)?;
        parts.iter().try_for_each(|part| out.write_all(part))
    }
}

/// Reads a frame of at most `max` bytes; `None` at the end of the input.
pub(super) fn read_frame(input: &mut dyn Read, max: u64) -> io::Result<Option<Vec<u8>>> {
    let mut head = [0; 8];
    let mut have = 0;
    while have < head.len() {
        match input.read(&mut head[have..]) {
            Ok(0) if have == 0 => return Ok(None),
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => have += n,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    let len = u64::from_le_bytes(head);
    if len > max {
        return Err(io::Error::new(
            ErrorKind::InvalidData,
            format!("a frame has {len} bytes; the limit is {max}"),
        ));
    }
    let mut bytes = Vec::new();
    while (bytes.len() as u64) < len {
        let from = bytes.len();
        let piece = usize::try_from(len - from as u64).unwrap_or(READ_BYTES).min(READ_BYTES);
        bytes.try_reserve(piece).map_err(|_| io::Error::from(ErrorKind::OutOfMemory))?;
        bytes.resize(from + piece, 0);
        input.read_exact(&mut bytes[from..])?;
    }
    Ok(Some(bytes))
}
