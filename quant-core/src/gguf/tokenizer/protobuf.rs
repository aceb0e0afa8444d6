//! Reads pieces, scores and types from `tokenizer.model`, a Protocol Buffers message. Unknown fields are skipped.

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Piece {
    pub(super) text: String,
    pub(super) score: f32,
    /// 1 for normal, 2 for unknown, 3 for control, 4 for user-defined, 5 for unused, 6 for byte.
    pub(super) kind: u64,
}

#[derive(Debug, Default)]
pub(super) struct SentencePieceModel {
    pub(super) pieces: Vec<Piece>,
    /// Whether a space is added at the start of texts; `None` if the model has no normalizer.
    pub(super) adds_space: Option<bool>,
    /// 1 for unigram, 2 for BPE, 3 for words, 4 for characters.
    pub(super) algorithm: u64,
}

struct Fields<'a> {
    bytes: &'a [u8],
    at: usize,
}

enum Field<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
    Fixed32([u8; 4]),
    Fixed64,
}

impl<'a> Fields<'a> {
    fn varint(&mut self) -> Result<u64, String> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = *self
                .bytes
                .get(self.at)
                .ok_or_else(|| format!("is truncated at byte {}, within a number", self.at))?;
            self.at += 1;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(format!("has a number that is longer than 10 bytes before byte {}", self.at))
    }

    fn take(&mut self, len: u64) -> Result<&'a [u8], String> {
        let end = usize::try_from(len).ok().and_then(|len| self.at.checked_add(len));
        let part = end.and_then(|end| self.bytes.get(self.at..end));
        let part = part.ok_or_else(|| {
            format!("has a field of {len} bytes at byte {} that extends beyond the end", self.at)
        })?;
        self.at += part.len();
        Ok(part)
    }

    fn next(&mut self) -> Result<Option<(u64, Field<'a>)>, String> {
        if self.at == self.bytes.len() {
            return Ok(None);
        }
        let key = self.varint()?;
        let field = match key & 7 {
            0 => Field::Varint(self.varint()?),
            1 => {
                self.take(8)?;
                Field::Fixed64
            }
            2 => {
                let len = self.varint()?;
                Field::Bytes(self.take(len)?)
            }
            5 => {
                let bytes = self.take(4)?;
                Field::Fixed32([bytes[0], bytes[1], bytes[2], bytes[3]])
            }
            other => return Err(format!("has a field of unknown type {other} before byte {}", self.at)),
        };
        Ok(Some((key >> 3, field)))
    }
}

/// Reads a model.
///
/// # Errors
/// The reason why it cannot be read. Offsets are within the malformed message, such as a piece.
pub(super) fn read(bytes: &[u8]) -> Result<SentencePieceModel, String> {
    let mut model = SentencePieceModel { algorithm: 1, ..SentencePieceModel::default() };
    let mut fields = Fields { bytes, at: 0 };
    while let Some((number, field)) = fields.next()? {
        match (number, field) {
            (1, Field::Bytes(piece)) => {
                let piece = read_piece(piece).map_err(|e| format!("piece {}: {e}", model.pieces.len()))?;
                model.pieces.push(piece);
            }
            (2, Field::Bytes(trainer)) => {
                let mut fields = Fields { bytes: trainer, at: 0 };
                while let Some((number, field)) = fields.next()? {
                    if let (3, Field::Varint(algorithm)) = (number, field) {
                        model.algorithm = algorithm;
                    }
                }
            }
            (3, Field::Bytes(normalizer)) => {
                let mut fields = Fields { bytes: normalizer, at: 0 };
                model.adds_space = Some(true);
                while let Some((number, field)) = fields.next()? {
                    if let (3, Field::Varint(adds)) = (number, field) {
                        model.adds_space = Some(adds != 0);
                    }
                }
            }
            _ => {}
        }
    }
    Ok(model)
}

fn read_piece(bytes: &[u8]) -> Result<Piece, String> {
    let mut piece = Piece { text: String::new(), score: 0.0, kind: 1 };
    let mut fields = Fields { bytes, at: 0 };
    while let Some((number, field)) = fields.next()? {
        match (number, field) {
            (1, Field::Bytes(text)) => {
                piece.text = std::str::from_utf8(text)
                    .map_err(|_| "the text of a piece is not valid UTF-8")?
                    .to_owned();
            }
            (2, Field::Fixed32(score)) => piece.score = f32::from_le_bytes(score),
            (3, Field::Varint(kind)) => piece.kind = kind,
            _ => {}
        }
    }
    Ok(piece)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn pieces_scores_and_settings() {
        // Two pieces, a trainer with BPE, a normalizer that adds no space.
        let mut bytes = vec![0x0a, 10, 0x0a, 3, 0xe2, 0x96, 0x81, 0x15, 0, 0, 0x80, 0xbf];
        bytes.extend([0x0a, 6, 0x0a, 2, b'<', b'>', 0x18, 3]);
        bytes.extend([0x12, 2, 0x18, 2, 0x1a, 2, 0x18, 0]);
        let model = read(&bytes).unwrap();
        assert_eq!(model.pieces[0], Piece { text: "▁".into(), score: -1.0, kind: 1 });
        assert_eq!(model.pieces[1], Piece { text: "<>".into(), score: 0.0, kind: 3 });
        assert_eq!((model.algorithm, model.adds_space), (2, Some(false)));
        assert!(read(&bytes[..bytes.len() - 1]).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&bytes);
        }
    }
}
