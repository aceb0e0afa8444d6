//! Encodes rows with a block type: `encode_rows TYPE COLUMNS VALUES OUT [IMPORTANCE]`, files of little-endian f32.
//! With `-` for VALUES, OUT is decoded to the standard output instead.

use std::io::Write;

use quant_core::blocks::block_type;

fn floats(path: &str) -> Vec<f32> {
    let bytes = std::fs::read(path).expect("a file of floats");
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let kind = block_type(&arguments[0]).expect("a block type");
    let columns: usize = arguments[1].parse().expect("a number of columns");
    let row_bytes = kind.row_bytes(columns).expect("a whole number of blocks");
    if arguments[2] == "-" {
        for bytes in std::fs::read(&arguments[3]).expect("a file").chunks_exact(row_bytes) {
            let mut row = vec![0.0; columns];
            kind.decode(bytes, &mut row);
            let row: Vec<u8> = row.iter().flat_map(|v| v.to_le_bytes()).collect();
            std::io::stdout().write_all(&row).expect("the output is open");
        }
        return;
    }
    let importance = arguments.get(4).map(|path| floats(path));
    let mut out = Vec::new();
    for row in floats(&arguments[2]).chunks_exact(columns) {
        let mut bytes = vec![0; row_bytes];
        kind.encode(row, importance.as_deref(), &mut bytes);
        out.extend(bytes);
    }
    std::fs::write(&arguments[3], out).expect("OUT can be written");
}
