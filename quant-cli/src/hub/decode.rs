//! Reads documents from data files: JSON lines compressed with zstd or gzip, and a column of a Parquet file.
//!
//! Everything is decompressed while it is read, and only up to a limit, because a few kilobytes can decompress to more
//! than fits in memory.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;

use flate2::bufread::MultiGzDecoder;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use parquet::schema::types::Type;
use quant_core::calibrate::{guard_panics, read_json_lines};
use quant_core::{Error, Result};
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// Maximum bytes of text taken from a set. Whole documents are taken, from the start of the set.
pub const MAX_TEXT_BYTES: usize = 64 << 20;
/// Limit on the decompressed size of JSON, as a multiple of the limit on its text.
const OVERHEAD: u64 = 8;

/// Returns the documents of a data file. `name` is the file's name in its repository, which determines the format;
/// `field` is the JSON field or the Parquet column that contains the text.
pub fn documents(path: &Path, name: &str, field: &str) -> Result<Vec<String>> {
    limited(path, name, field, MAX_TEXT_BYTES)
}

fn limited(path: &Path, name: &str, field: &str, limit: usize) -> Result<Vec<String>> {
    let file = File::open(path).map_err(|e| Error::io("open", path, e))?;
    let fault = |reason: &str| Error::Text { path: path.to_owned(), line: None, reason: reason.to_owned() };
    // A crafted file that makes a library panic must not end the process.
    let read = guard_panics(|| {
        if name.ends_with(".jsonl.zst") || name.ends_with(".json.zst") {
            read_json_lines(bounded(Zstd::new(BufReader::new(file)), limit), field, path, limit)
        } else if name.ends_with(".jsonl.gz") || name.ends_with(".json.gz") {
            read_json_lines(bounded(MultiGzDecoder::new(BufReader::new(file)), limit), field, path, limit)
        } else if name.ends_with(".parquet") {
            column(file, field, path, limit)
        } else {
            Err(fault("is neither a .parquet file nor a .json or .jsonl file compressed as .zst or .gz"))
        }
    });
    let documents =
        read.unwrap_or_else(|| Err(fault("cannot be read: the decompression library panicked")))?;
    if documents.iter().all(|d| d.trim().is_empty()) {
        return Err(fault("holds no text"));
    }
    Ok(documents)
}

/// All frames of a zstd file in sequence; frames without data are skipped.
struct Zstd<R> {
    input: R,
    decoder: FrameDecoder,
    in_frame: bool,
}

impl<R: BufRead> Zstd<R> {
    fn new(input: R) -> Self {
        Self { input, decoder: FrameDecoder::new(), in_frame: false }
    }

    fn next_frame(&mut self) -> io::Result<bool> {
        while !self.input.fill_buf()?.is_empty() {
            match self.decoder.reset(&mut self.input) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let length = u64::from(length);
                    let passed = io::copy(&mut (&mut self.input).take(length), &mut io::sink())?;
                    if passed < length {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(other) => return Err(io::Error::other(other)),
            }
        }
        Ok(false)
    }
}

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        if target.is_empty() {
            return Ok(0);
        }
        loop {
            if !self.in_frame {
                if !self.next_frame()? {
                    return Ok(0);
                }
                self.in_frame = true;
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                let one = BlockDecodingStrategy::UptoBlocks(1);
                self.decoder.decode_blocks(&mut self.input, one).map_err(io::Error::other)?;
            }
            match self.decoder.read(target)? {
                0 => {
                    let expected = self.decoder.get_checksum_from_data();
                    if expected.is_some() && expected != self.decoder.get_calculated_checksum() {
                        return Err(io::Error::other("the checksum of a zstd frame is wrong"));
                    }
                    self.in_frame = false;
                }
                read => return Ok(read),
            }
        }
    }
}

fn bounded(unpacked: impl Read, limit: usize) -> impl BufRead {
    BufReader::new(unpacked.take((limit as u64).saturating_mul(OVERHEAD)))
}

/// Returns the strings of a Parquet column, one per row, including empty ones.
fn column(file: File, field: &str, path: &Path, limit: usize) -> Result<Vec<String>> {
    let fault = |reason: String| Error::Text { path: path.to_owned(), line: None, reason };
    let broken = |e| fault(format!("is not valid Parquet: {e}"));
    let reader = SerializedFileReader::new(file).map_err(broken)?;
    let schema = reader.metadata().file_metadata().schema();
    let wanted = schema.get_fields().iter().find(|f| f.name() == field);
    let wanted = wanted.ok_or_else(|| fault(format!("has no column `{field}`")))?;
    let only = Type::group_type_builder(schema.name()).with_fields(vec![Arc::clone(wanted)]).build();
    let rows = reader.get_row_iter(Some(only.map_err(broken)?)).map_err(broken)?;
    let (mut documents, mut bytes) = (Vec::new(), 0);
    for (index, row) in rows.enumerate() {
        let value = row.map_err(broken)?.into_columns().pop().map(|(_, value)| value);
        let Some(Field::Str(text)) = value else {
            return Err(fault(format!("row {} of the column `{field}` is not text", index + 1)));
        };
        bytes += text.len();
        if bytes > limit {
            break;
        }
        documents.push(text);
    }
    Ok(documents)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use parquet::basic::Compression as ParquetCompression;
    use parquet::data_type::{ByteArray, ByteArrayType};
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    use super::*;

    const LINES: &str = "{\"text\": \"one\"}\n{\"id\": 7, \"text\": \"two\\n\"}\n{\"text\": \"three\"}\n";

    fn zstd(content: &str) -> Vec<u8> {
        compress_to_vec(content.as_bytes(), CompressionLevel::Fastest)
    }

    fn gzip(content: &str) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(content.as_bytes()).unwrap();
        encoder.finish().unwrap()
    }

    fn parquet(rows: &[Option<&str>]) -> Vec<u8> {
        let schema = "message schema { REQUIRED INT64 id; OPTIONAL BYTE_ARRAY text (UTF8); }";
        let schema = Arc::new(parse_message_type(schema).unwrap());
        let properties = WriterProperties::builder().set_compression(ParquetCompression::SNAPPY).build();
        let mut file = Vec::new();
        let mut writer = SerializedFileWriter::new(&mut file, schema, properties.into()).unwrap();
        // Reading must cover all row groups.
        for rows in rows.chunks(2) {
            let mut group = writer.next_row_group().unwrap();
            let mut column = group.next_column().unwrap().unwrap();
            let ids: Vec<i64> = (0..rows.len() as i64).collect();
            column.typed::<parquet::data_type::Int64Type>().write_batch(&ids, None, None).unwrap();
            column.close().unwrap();
            let mut column = group.next_column().unwrap().unwrap();
            let texts: Vec<ByteArray> = rows.iter().flatten().map(|&t| ByteArray::from(t)).collect();
            let levels: Vec<i16> = rows.iter().map(|r| i16::from(r.is_some())).collect();
            column.typed::<ByteArrayType>().write_batch(&texts, Some(&levels), None).unwrap();
            column.close().unwrap();
            group.close().unwrap();
        }
        writer.close().unwrap();
        file
    }

    fn read(name: &str, content: &[u8], limit: usize) -> Result<Vec<String>> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("blob");
        std::fs::write(&path, content).unwrap();
        limited(&path, name, "text", limit)
    }

    #[test]
    fn every_format_gives_its_documents() {
        let two_frames = [zstd(LINES), b"\x50\x2a\x4d\x18\x03\0\0\0xyz".to_vec(), zstd(LINES)].concat();
        let two_members = [gzip(LINES), gzip(LINES)].concat();
        let once = ["one", "two\n", "three"];
        let twice = [once, once].concat();
        for (name, content, expected) in [
            ("a/b.jsonl.zst", zstd(LINES), &once[..]),
            ("b.jsonl.zst", two_frames, &twice),
            ("b.json.gz", gzip(LINES), &once),
            ("b.json.gz", two_members, &twice),
            ("b.parquet", parquet(&[Some(""), Some(" = A = \n"), Some("")]), &["", " = A = \n", ""]),
        ] {
            assert_eq!(read(name, &content, usize::MAX).unwrap(), expected, "{name}");
        }
    }

    #[test]
    fn only_so_much_is_unpacked() {
        let rows: Vec<_> = ["one", "two\n", "three"].map(Some).to_vec();
        for (name, content) in
            [("b.jsonl.zst", zstd(LINES)), ("b.json.gz", gzip(LINES)), ("b.parquet", parquet(&rows))]
        {
            // The third document would bring the total to 12 bytes.
            assert_eq!(read(name, &content, 11).unwrap(), ["one", "two\n"], "{name}");
        }
        // A megabyte that decompresses to a gigabyte of blank lines: reading stops long before the end.
        let bomb = gzip(&"\n".repeat(1 << 20));
        let error = read("b.json.gz", &bomb.repeat(1 << 10), 1 << 20).unwrap_err();
        assert!(error.to_string().contains("holds no text"), "{error}");
    }

    #[test]
    fn damaged_files_are_errors() {
        let files =
            [("b.jsonl.zst", zstd(LINES)), ("b.json.gz", gzip(LINES)), ("b.parquet", parquet(&[Some("a")]))];
        for (name, content) in &files {
            assert!(read(name, &content[..content.len() - 5], usize::MAX).is_err(), "{name}, cut");
            assert!(read(name, b"something else entirely", usize::MAX).is_err(), "{name}, foreign");
            assert!(read(name, b"", usize::MAX).is_err(), "{name}, empty");
            for at in 0..content.len() {
                let mut bent = content.clone();
                bent[at] ^= 0x55;
                let _ = read(name, &bent, 1 << 20);
            }
        }
        let error = read("b.parquet", &parquet(&[Some("a"), None]), usize::MAX).unwrap_err();
        assert!(error.to_string().contains("row 2 of the column `text`"), "{error}");
        assert!(read("b.txt", b"text", usize::MAX).unwrap_err().to_string().contains("neither"));
    }
}
