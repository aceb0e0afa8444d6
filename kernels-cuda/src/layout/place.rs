//! The positions of the bits of a code within its tile.

use quant_kernels_cpu::FloatFormat;

use super::{Order, WeightLayout};

impl WeightLayout {
    /// The position of a weight's code within its tile: the offset of its word in bytes, and the bit within the word.
    /// For floating-point codes, the second number is the field of the word, plus 16 for the odd feature. `row` and
    /// `feature` are relative to the tile.
    pub(crate) fn place(&self, row: usize, feature: usize) -> (usize, usize) {
        let (r, below) = (row % 8, row / 8);
        // The step of `mma`, the half of the step's features, the lane's quarter of that half, and the index within the
        // quarter.
        let step_k = match self.order {
            Order::Float => 16,
            Order::Int8 => 32,
        };
        let (step, upper) = (feature / step_k, feature % step_k / (step_k / 2));
        let each = step_k / 8;
        let (t, j) = (feature % (step_k / 2) / each, feature % each);
        let (word, bit) = match (self.order, self.code_bits) {
            (Order::Float, 4) if self.float.is_some() => (step, 16 * j + below + 2 * upper),
            (Order::Float, _) if self.float.is_some() => (2 * step + upper, 16 * j + below),
            (Order::Float, 4) => (step, (16 * j + 4 * (below + 2 * upper) + 2) % 32),
            (Order::Float, _) => (2 * step + upper, 16 * below + 8 * j),
            (Order::Int8, 4) => (2 * step + below, 8 * j + 4 * upper),
            (Order::Int8, _) => (4 * step + below + 2 * upper, 8 * j),
        };
        let lane = 4 * r + t;
        (512 * (word / 4) + 16 * lane + 4 * (word % 4), bit)
    }

    /// The bits of a stored code within its word, at the position that [`place`](Self::place) returns. A floating-point
    /// code is split: its magnitude begins at bit `m`, its sign is at bit `s`; for the odd feature 16 bits further,
    /// modulo 32. `(m, s)` for the fields of a word:
    ///
    /// | | 0 | 1 | 2 | 3 |
    /// |---|---|---|---|---|
    /// | E2M1 | 9, 15 | 12, 18 | 3, 16 | 6, 17 |
    /// | E4M3 | 7, 15 | 0, 14 | | |
    pub(crate) fn spread(&self, code: u8, bit: usize) -> u32 {
        let Some((magnitude, sign, bits)) = self.split(bit) else {
            return u32::from(code).rotate_left(bit as u32);
        };
        let (low, high) = (u32::from(code) & ((1 << bits) - 1), u32::from(code) >> bits);
        low.rotate_left(magnitude) | high.rotate_left(sign)
    }

    /// Reads the code at this position of a word: the inverse of `spread`.
    pub(crate) fn gather(&self, word: u32, bit: usize) -> u8 {
        let mask = if self.code_bits == 4 { 15 } else { 255 };
        let Some((magnitude, sign, bits)) = self.split(bit) else {
            return word.rotate_right(bit as u32) as u8 & mask;
        };
        let low = word.rotate_right(magnitude) as u8 & ((1 << bits) - 1);
        low | (word.rotate_right(sign) as u8 & 1) << bits
    }

    /// For a floating-point code: the lowest bit of its magnitude, the bit of its sign, and the bits of its magnitude.
    fn split(&self, bit: usize) -> Option<(u32, u32, u32)> {
        let (field, odd) = (bit % 16, (bit / 16 * 16) as u32);
        let (magnitude, sign) = match self.float? {
            FloatFormat::E2m1 => ([9, 12, 3, 6][field], [15, 18, 16, 17][field]),
            _ => ([7, 0][field], [15, 14][field]),
        };
        Some((magnitude + odd, (sign + odd) % 32, self.code_bits as u32 - 1))
    }
}

#[cfg(test)]
mod tests {
    use quant_kernels_cpu::ScaleType;

    use super::*;
    use crate::layout::{TILE_K, TILE_ROWS};

    fn layout(code_bits: usize, order: Order) -> WeightLayout {
        WeightLayout::from_parts([32, 256], code_bits, 128, ScaleType::F16, Some(8), order, false).unwrap()
    }

    #[test]
    fn places_fill_a_tile() {
        for (code_bits, order) in [(4, Order::Float), (8, Order::Float), (4, Order::Int8), (8, Order::Int8)] {
            let layout = layout(code_bits, order);
            let mut taken = vec![0_u32; layout.tile_bytes() / 4];
            for row in 0..TILE_ROWS {
                for feature in 0..TILE_K {
                    let (word, bit) = layout.place(row, feature);
                    let mask = (((1_u64 << code_bits) - 1) as u32).rotate_left(bit as u32);
                    assert_eq!(taken[word / 4] & mask, 0, "{row} {feature}");
                    taken[word / 4] |= mask;
                }
            }
            assert!(taken.iter().all(|&word| word == u32::MAX));
        }
    }

    #[test]
    fn bits_of_floating_point_codes_fill_a_tile() {
        for (format, scales) in [(FloatFormat::E2m1, ScaleType::E4m3), (FloatFormat::E4m3, ScaleType::E8m0)] {
            let floats = WeightLayout::from_float_parts([32, 256], format, 32, scales).unwrap();
            let integers = layout(floats.code_bits(), Order::Float);
            let mask = ((1_u32 << floats.code_bits()) - 1) as u8;
            let mut taken = vec![0_u32; floats.tile_bytes() / 4];
            for row in 0..TILE_ROWS {
                for feature in 0..TILE_K {
                    let (word, bit) = floats.place(row, feature);
                    assert_eq!(word, integers.place(row, feature).0);
                    let bits = floats.spread(mask, bit);
                    assert_eq!((taken[word / 4] & bits, bits.count_ones()), (0, mask.count_ones()));
                    taken[word / 4] |= bits;
                    for code in 0..=mask {
                        assert_eq!(floats.gather(floats.spread(code, bit) | !bits, bit), code);
                    }
                }
            }
            assert!(taken.iter().all(|&word| word == u32::MAX));
        }
    }

    /// As in the figures of the PTX ISA.
    #[test]
    fn places_are_those_of_fragments() {
        for row in 0..TILE_ROWS {
            for feature in 0..TILE_K {
                // m16n8k16: a register holds two features of a row.
                let (lane, register) = (row % 8 * 4 + feature % 8 / 2, row / 8 + 2 * (feature % 16 / 8));
                let step = feature / 16;
                let (byte, bit) = layout(4, Order::Float).place(row, feature);
                assert_eq!(byte, step / 4 * 512 + lane * 16 + step % 4 * 4);
                assert_eq!(bit, (16 * (feature % 2) + 4 * register + 2) % 32);
                let (byte, bit) = layout(8, Order::Float).place(row, feature);
                let word = 2 * step + register / 2;
                assert_eq!(byte, word / 4 * 512 + lane * 16 + word % 4 * 4);
                assert_eq!(bit, 16 * (register % 2) + 8 * (feature % 2));
                // m16n8k32: a register holds four.
                let (lane, register) = (row % 8 * 4 + feature % 16 / 4, row / 8 + 2 * (feature % 32 / 16));
                let step = feature / 32;
                let (byte, bit) = layout(4, Order::Int8).place(row, feature);
                let word = 2 * step + register % 2;
                assert_eq!(byte, word / 4 * 512 + lane * 16 + word % 4 * 4);
                assert_eq!(bit, 8 * (feature % 4) + 4 * (register / 2));
                let (byte, bit) = layout(8, Order::Int8).place(row, feature);
                let word = 4 * step + register;
                assert_eq!((byte, bit), (word / 4 * 512 + lane * 16 + word % 4 * 4, 8 * (feature % 4)));
            }
        }
    }
}
