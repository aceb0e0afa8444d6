//! The tensors of a GGUF file, for comparisons. Files are trusted: they were written by the programs under test.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

/// A tensor's type, dimensions without trailing dimensions of 1, and the hash of its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// The id of its type.
    pub kind: u32,
    /// Its dimensions, innermost first.
    pub shape: Vec<u64>,
    /// SHA-256 of its bytes and their padding.
    pub sha256: [u8; 32],
}

/// Reads the tensors of a file, by name.
///
/// # Errors
/// When the file cannot be read or does not have the format.
pub fn tensors(path: &Path) -> Result<BTreeMap<String, Tensor>> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let end = file.metadata()?.len();
    let mut reader = Reader { file: BufReader::new(file), at: 0 };
    ensure!(reader.bytes(4)? == b"GGUF", "{} is not a GGUF file", path.display());
    reader.u32()?;
    let (count, entries) = (reader.u64()?, reader.u64()?);
    for _ in 0..entries {
        reader.string()?;
        let kind = reader.u32()?;
        reader.skip_value(kind)?;
    }
    let mut found = Vec::new();
    for _ in 0..count {
        let name = reader.string()?;
        let dimensions = reader.u32()?;
        let mut shape = (0..dimensions).map(|_| reader.u64()).collect::<Result<Vec<u64>>>()?;
        while shape.len() > 1 && shape.last() == Some(&1) {
            shape.pop();
        }
        found.push((reader.u32()?, shape, reader.u64()?, name));
    }
    let data = reader.at.next_multiple_of(ALIGNMENT);
    found.sort_by_key(|(.., offset, _)| *offset);
    let mut tensors = BTreeMap::new();
    for (i, (kind, shape, offset, name)) in found.iter().enumerate() {
        let next = found.get(i + 1).map_or(end - data, |(.., offset, _)| *offset);
        let sha256 = reader.hash(data + offset, next - offset)?;
        tensors.insert(name.clone(), Tensor { kind: *kind, shape: shape.clone(), sha256 });
    }
    Ok(tensors)
}

/// The alignment of tensors in files without a key for it.
const ALIGNMENT: u64 = 32;

struct Reader {
    file: BufReader<File>,
    at: u64,
}

impl Reader {
    fn bytes(&mut self, count: u64) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.file.by_ref().take(count).read_to_end(&mut bytes)?;
        ensure!(bytes.len() as u64 == count, "the file ends early");
        self.at += count;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.bytes(4)?.try_into().unwrap_or_default()))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.bytes(8)?.try_into().unwrap_or_default()))
    }

    fn string(&mut self) -> Result<String> {
        let length = self.u64()?;
        Ok(String::from_utf8(self.bytes(length)?)?)
    }

    fn skip_value(&mut self, kind: u32) -> Result<()> {
        match kind {
            0 | 1 | 7 => self.bytes(1)?,
            2 | 3 => self.bytes(2)?,
            4..=6 => self.bytes(4)?,
            10..=12 => self.bytes(8)?,
            8 => self.string()?.into_bytes(),
            9 => {
                let of = self.u32()?;
                for _ in 0..self.u64()? {
                    self.skip_value(of)?;
                }
                Vec::new()
            }
            other => anyhow::bail!("unknown type {other} of a value"),
        };
        Ok(())
    }

    fn hash(&mut self, at: u64, count: u64) -> Result<[u8; 32]> {
        self.file.seek(SeekFrom::Start(at))?;
        let (mut hash, mut buffer, mut left) = (Sha256::new(), vec![0; 1 << 20], count);
        while left > 0 {
            let part = left.min(buffer.len() as u64) as usize;
            self.file.read_exact(&mut buffer[..part])?;
            hash.update(&buffer[..part]);
            left -= part as u64;
        }
        Ok(hash.finalize().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_found_after_metadata_of_every_type() {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        let put = |bytes: &mut Vec<u8>, text: &str| {
            bytes.extend((text.len() as u64).to_le_bytes());
            bytes.extend(text.as_bytes());
        };
        bytes.extend([2_u64, 3].map(u64::to_le_bytes).concat());
        put(&mut bytes, "number");
        bytes.extend([4_u32, 7].map(u32::to_le_bytes).concat());
        put(&mut bytes, "text");
        bytes.extend(8_u32.to_le_bytes());
        put(&mut bytes, "value");
        put(&mut bytes, "list");
        bytes.extend([9_u32, 8].map(u32::to_le_bytes).concat());
        bytes.extend(2_u64.to_le_bytes());
        put(&mut bytes, "a");
        put(&mut bytes, "bc");
        for (name, offset) in [("second", 32_u64), ("first", 0)] {
            put(&mut bytes, name);
            bytes.extend(2_u32.to_le_bytes());
            bytes.extend([4_u64, 1].map(u64::to_le_bytes).concat());
            bytes.extend(0_u32.to_le_bytes());
            bytes.extend(offset.to_le_bytes());
        }
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend([1; 32]);
        bytes.extend([2; 32]);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.gguf");
        std::fs::write(&path, &bytes).unwrap();
        let found = tensors(&path).unwrap();
        let expected =
            |byte: u8| Tensor { kind: 0, shape: vec![4], sha256: Sha256::digest([byte; 32]).into() };
        assert_eq!(found["first"], expected(1));
        assert_eq!(found["second"], expected(2));
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        assert_ne!(tensors(&path).unwrap()["second"], expected(2));
    }
}
