//! Codes of a few bits as a dense little-endian bit stream in 32-bit words.
//!
//! Code `i` occupies bits `i · bits` to `(i + 1) · bits − 1` of the stream; bit `j` of the stream is bit `j mod 32` of
//! word `j / 32`. A code may straddle two words. At 3 bits:
//!
//! ```text
//! word 0   v0 … v9, low 2 bits of v10
//! word 1   high bit of v10, v11 … v20, low bit of v21
//! word 2   high 2 bits of v21, v22 … v31
//! ```
//!
//! A row is padded with zero bits to full words. Words are little-endian, so the stream can also be read by bytes:
//! eight codes take `bits` bytes.

use rayon::prelude::*;

use crate::allocate::{collected, zeros};

const TASK_CODES: usize = 1 << 16;

/// Number of words that `count` codes of `bits` bits occupy.
pub fn words_for(count: usize, bits: u8) -> usize {
    // In two parts, so that no count overflows.
    count / 32 * usize::from(bits) + (count % 32 * usize::from(bits)).div_ceil(32)
}

/// The number of words is not what [`words_for`] returns for these codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{count} codes of {bits} bits take {} words of 32 bits, got {got}", words_for(*count, *bits))]
#[non_exhaustive]
pub struct WordCount {
    /// Number of codes to unpack.
    pub count: usize,
    /// Bits per code.
    pub bits: u8,
    /// Number of words passed.
    pub got: usize,
}

/// Packs one row of codes into `words_for(codes.len(), bits)` words.
///
/// Codes must be below `2^bits`; larger ones corrupt their neighbors.
///
/// # Panics
/// When `bits` is not 1 to 8.
pub fn pack_words(codes: &[u8], bits: u8) -> Vec<u32> {
    let mut bytes = vec![0; words_for(codes.len(), bits) * 4];
    pack_row(codes, bits, &mut bytes);
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Unpacks one row of `count` codes. Padding bits are ignored.
///
/// # Errors
/// When the number of words is not [`words_for`] these codes.
///
/// # Panics
/// When `bits` is not 1 to 8.
pub fn unpack_words(words: &[u32], bits: u8, count: usize) -> Result<Vec<u8>, WordCount> {
    if words.len() != words_for(count, bits) {
        return Err(WordCount { count, bits, got: words.len() });
    }
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    let mut codes = vec![0; count];
    unpack_row(&bytes, bits, &mut codes);
    Ok(codes)
}

/// Packs rows of `columns` codes, each padded to full words, into the words' bytes, row after row.
///
/// Codes must be below `2^bits`; larger ones corrupt their neighbors. Rows are distributed over the current rayon
/// pool.
///
/// # Panics
/// When `columns` is 0, `codes` are not full rows, or `bits` is not 1 to 8.
pub fn pack_rows(codes: &[u8], columns: usize, bits: u8) -> Vec<u8> {
    assert!(columns > 0 && codes.len().is_multiple_of(columns), "codes are not whole rows");
    let row_bytes = words_for(columns, bits) * 4;
    let mut bytes = vec![0; codes.len() / columns * row_bytes];
    let rows = (TASK_CODES / columns).max(1);
    bytes.par_chunks_mut(rows * row_bytes).zip(codes.par_chunks(rows * columns)).for_each(
        |(bytes, codes)| {
            for (bytes, codes) in bytes.chunks_exact_mut(row_bytes).zip(codes.chunks_exact(columns)) {
                pack_row(codes, bits, bytes);
            }
        },
    );
    bytes
}

/// Unpacks rows of `columns` codes from the bytes of their words. Padding bits are ignored.
///
/// # Errors
/// When the length of `bytes` does not match the rows in `codes`.
///
/// # Panics
/// When `columns` is 0, `codes` are not full rows, or `bits` is not 1 to 8.
pub fn unpack_rows(bytes: &[u8], columns: usize, bits: u8, codes: &mut [u8]) -> Result<(), WordCount> {
    assert!(columns > 0 && codes.len().is_multiple_of(columns), "codes are not whole rows");
    let row_bytes = words_for(columns, bits) * 4;
    if bytes.len() != codes.len() / columns * row_bytes {
        return Err(WordCount { count: codes.len(), bits, got: bytes.len() / 4 });
    }
    let rows = (TASK_CODES / columns).max(1);
    codes.par_chunks_mut(rows * columns).zip(bytes.par_chunks(rows * row_bytes)).for_each(
        |(codes, bytes)| {
            for (codes, bytes) in codes.chunks_exact_mut(columns).zip(bytes.chunks_exact(row_bytes)) {
                unpack_row(bytes, bits, codes);
            }
        },
    );
    Ok(())
}

/// Transposes a matrix.
///
/// # Errors
/// [`Error::Memory`](crate::Error::Memory) when the result cannot be allocated.
pub(super) fn transpose<T: Copy>(values: &[T], rows: usize, columns: usize) -> Result<Vec<T>, crate::Error> {
    let transposed = (0..columns).flat_map(|c| (0..rows).map(move |r| values[r * columns + c]));
    collected(rows * columns, transposed, "a transposed tensor")
}

/// Transposes a matrix of 32-bit words.
///
/// # Errors
/// See [`transpose`].
pub(super) fn transpose_words(bytes: &[u8], rows: usize, columns: usize) -> Result<Vec<u8>, crate::Error> {
    let mut transposed = zeros(4 * rows * columns, "a transposed tensor")?;
    for (c, column) in transposed.chunks_exact_mut((4 * rows).max(1)).enumerate() {
        for (r, word) in column.chunks_exact_mut(4).enumerate() {
            word.copy_from_slice(&bytes[4 * (r * columns + c)..][..4]);
        }
    }
    Ok(transposed)
}

/// Packs one row into the bytes of its words; unused bits become 0.
fn pack_row(codes: &[u8], bits: u8, bytes: &mut [u8]) {
    debug_assert!(codes.iter().all(|&c| c <= u8::MAX >> (8 - bits)), "a code has more than {bits} bits");
    let used = (codes.len() * usize::from(bits)).div_ceil(8);
    let (bytes, padding) = bytes.split_at_mut(used);
    padding.fill(0);
    match bits {
        1 => pack_octets::<1>(codes, bytes),
        2 => pack_octets::<2>(codes, bytes),
        3 => pack_octets::<3>(codes, bytes),
        4 => pack_octets::<4>(codes, bytes),
        5 => pack_octets::<5>(codes, bytes),
        6 => pack_octets::<6>(codes, bytes),
        7 => pack_octets::<7>(codes, bytes),
        8 => bytes.copy_from_slice(codes),
        _ => panic!("codes must have 1 to 8 bits, not {bits}"),
    }
}

/// Unpacks one row from the bytes of its words.
fn unpack_row(bytes: &[u8], bits: u8, codes: &mut [u8]) {
    let used = (codes.len() * usize::from(bits)).div_ceil(8);
    let bytes = &bytes[..used];
    match bits {
        1 => unpack_octets::<1>(bytes, codes),
        2 => unpack_octets::<2>(bytes, codes),
        3 => unpack_octets::<3>(bytes, codes),
        4 => unpack_octets::<4>(bytes, codes),
        5 => unpack_octets::<5>(bytes, codes),
        6 => unpack_octets::<6>(bytes, codes),
        7 => unpack_octets::<7>(bytes, codes),
        8 => codes.copy_from_slice(bytes),
        _ => panic!("codes must have 1 to 8 bits, not {bits}"),
    }
}

/// Packs groups of eight codes, one per byte, into `BITS` bytes each.
fn pack_octets<const BITS: usize>(codes: &[u8], bytes: &mut [u8]) {
    let (octets, rest) = codes.as_chunks::<8>();
    let (full, last) = bytes.split_at_mut(octets.len() * BITS);
    for (octet, bytes) in octets.iter().zip(full.as_chunks_mut::<BITS>().0) {
        bytes.copy_from_slice(&squeeze::<BITS>(*octet)[..BITS]);
    }
    let mut octet = [0; 8];
    octet[..rest.len()].copy_from_slice(rest);
    last.copy_from_slice(&squeeze::<BITS>(octet)[..last.len()]);
}

fn unpack_octets<const BITS: usize>(bytes: &[u8], codes: &mut [u8]) {
    let (octets, rest) = codes.as_chunks_mut::<8>();
    let (full, last) = bytes.split_at(octets.len() * BITS);
    let widened = |bytes: &[u8]| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        spread::<BITS>(word)
    };
    for (octet, bytes) in octets.iter_mut().zip(full.as_chunks::<BITS>().0) {
        *octet = widened(bytes);
    }
    rest.copy_from_slice(&widened(last)[..rest.len()]);
}

/// Packs eight codes within a 64-bit word: joins pairs of codes, then of pairs, then the two halves. The first `BITS`
/// bytes are the stream.
fn squeeze<const BITS: usize>(octet: [u8; 8]) -> [u8; 8] {
    let codes = u64::from_le_bytes(octet);
    let pairs = codes & every(16, 0, BITS) | codes >> (8 - BITS) & every(16, BITS, BITS);
    let fours = pairs & every(32, 0, 2 * BITS) | pairs >> (16 - 2 * BITS) & every(32, 2 * BITS, 2 * BITS);
    let eight = fours & every(64, 0, 4 * BITS) | fours >> (32 - 4 * BITS) & every(64, 4 * BITS, 4 * BITS);
    eight.to_le_bytes()
}

/// The inverse of [`squeeze`].
fn spread<const BITS: usize>(stream: [u8; 8]) -> [u8; 8] {
    let eight = u64::from_le_bytes(stream);
    let fours = eight & every(64, 0, 4 * BITS) | eight << (32 - 4 * BITS) & every(64, 32, 4 * BITS);
    let pairs = fours & every(32, 0, 2 * BITS) | fours << (16 - 2 * BITS) & every(32, 16, 2 * BITS);
    let codes = pairs & every(16, 0, BITS) | pairs << (8 - BITS) & every(16, 8, BITS);
    codes.to_le_bytes()
}

/// A mask with `ones` bits, starting at bit `first`, in every field of `field` bits.
const fn every(field: usize, first: usize, ones: usize) -> u64 {
    u64::MAX / (u64::MAX >> (64 - field)) * (((1 << ones) - 1) << first)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn three_bits_straddle_words() {
        let owned = |i: usize| {
            let mut codes = [0; 32];
            codes[i] = 7;
            pack_words(&codes, 3)
        };
        assert_eq!(owned(0), [0b111, 0, 0]);
        assert_eq!(owned(9), [0b111 << 27, 0, 0]);
        assert_eq!(owned(10), [0b11 << 30, 0b1, 0]);
        assert_eq!(owned(11), [0, 0b111 << 1, 0]);
        assert_eq!(owned(20), [0, 0b111 << 28, 0]);
        assert_eq!(owned(21), [0, 0b1 << 31, 0b11]);
        assert_eq!(owned(22), [0, 0, 0b111 << 2]);
        assert_eq!(owned(31), [0, 0, 0b111 << 29]);
    }

    #[test]
    fn golden_words() {
        let codes: Vec<u8> = (0..10).collect();
        assert_eq!(pack_words(&codes, 4), [0x7654_3210, 0x0000_0098]);
        assert_eq!(pack_words(&codes, 8), [0x0302_0100, 0x0706_0504, 0x0000_0908]);
        let codes: Vec<u8> = (0..11).map(|i| i % 8).collect();
        // Octal digits, from left to right, are the codes from last to first: 2 1 0 | 7 6 5 4 3 2 1 0.
        assert_eq!(pack_words(&codes, 3), [0o21_076_543_210_u64 as u32, (0o21_076_543_210_u64 >> 32) as u32]);
        assert_eq!(pack_words(&[1, 0, 1, 1], 1), [0b1101]);
        assert_eq!(pack_words(&[], 4), [0u32; 0]);
    }

    #[test]
    fn rows_are_padded_to_words() {
        let bytes = pack_rows(&[1, 2, 3, 4, 5, 6], 3, 4);
        assert_eq!(bytes, [0x21, 0x03, 0, 0, 0x54, 0x06, 0, 0]);
    }

    #[test]
    fn wrong_word_counts_are_rejected() {
        let error = WordCount { count: 11, bits: 3, got: 1 };
        assert_eq!(unpack_words(&[0], 3, 11), Err(error));
        assert_eq!(error.to_string(), "11 codes of 3 bits take 2 words of 32 bits, got 1");
        assert!(unpack_words(&[0; 3], 3, 11).is_err());
        assert!(unpack_words(&[0], 4, 0).is_err());
        assert!(unpack_rows(&[0; 8], 3, 4, &mut [0; 9]).is_err());
        assert!(unpack_rows(&[0; 7], 3, 4, &mut [0; 6]).is_err());
    }

    #[test]
    fn counts_do_not_overflow() {
        assert_eq!(words_for(usize::MAX, 8), usize::MAX / 4 + 1);
        assert_eq!(words_for(0, 3), 0);
    }

    fn codes() -> impl Strategy<Value = (u8, Vec<u8>)> {
        (1u8..=8).prop_flat_map(|bits| (Just(bits), prop::collection::vec(0..=u8::MAX >> (8 - bits), 0..300)))
    }

    proptest! {
        #[test]
        fn packing_is_the_definition((bits, codes) in codes()) {
            let words = pack_words(&codes, bits);
            prop_assert_eq!(words.len(), (codes.len() * usize::from(bits)).div_ceil(32));
            for j in 0..words.len() * 32 {
                let (i, bit) = (j / usize::from(bits), j % usize::from(bits));
                let expected = codes.get(i).map_or(0, |c| c >> bit & 1);
                prop_assert_eq!((words[j / 32] >> (j % 32) & 1) as u8, expected, "bit {}", j);
            }
        }

        #[test]
        fn codes_come_back_whatever_the_padding((bits, codes) in codes(), noise: u32) {
            let mut words = pack_words(&codes, bits);
            prop_assert_eq!(&unpack_words(&words, bits, codes.len()).unwrap(), &codes);
            let used = codes.len() * usize::from(bits) % 32;
            if used != 0 {
                *words.last_mut().unwrap() |= noise << used;
            }
            prop_assert_eq!(&unpack_words(&words, bits, codes.len()).unwrap(), &codes);
        }

        #[test]
        fn rows_are_rows((bits, codes) in codes(), columns in 1usize..40) {
            let codes = &codes[..codes.len() / columns * columns];
            let expected: Vec<u8> = codes
                .chunks(columns)
                .flat_map(|row| pack_words(row, bits))
                .flat_map(u32::to_le_bytes)
                .collect();
            let bytes = pack_rows(codes, columns, bits);
            prop_assert_eq!(&bytes, &expected);
            let mut back = vec![0xff; codes.len()];
            unpack_rows(&bytes, columns, bits, &mut back).unwrap();
            prop_assert_eq!(&back, codes);
        }
    }

    #[test]
    fn many_rows_are_split_and_joined() {
        let codes: Vec<u8> = (0..700 * 301).map(|i| (i * 7 % 8) as u8).collect();
        let bytes = pack_rows(&codes, 301, 3);
        let one: Vec<u8> =
            codes.chunks(301).flat_map(|r| pack_words(r, 3)).flat_map(u32::to_le_bytes).collect();
        assert_eq!(bytes, one);
    }
}
