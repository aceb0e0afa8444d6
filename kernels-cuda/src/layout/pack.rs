//! Packs logical codes, scales and zero points on the CPU, and unpacks them.

use half::{bf16, f16};
use quant_kernels_cpu::e8m0_value;

use super::{FloatFormat, KernelError, ScaleType, Scales, Section, TILE_K, TILE_ROWS, Unpacked, WeightView};
use super::{SUPER_BLOCKS, WeightLayout, pair_order};

/// The range of `(q − z) s` of progressive weights: the kernels compute `128 + (q − z) s` in a byte.
const PROGRESSIVE: core::ops::RangeInclusive<i32> = -128..=127;

const E4M3_NAN: u8 = 0x7f;

struct Group {
    scale: [u8; 4],
    zero: u8,
    sum: i32,
}

impl WeightLayout {
    /// Packs a view into `out`, which is overwritten.
    ///
    /// # Errors
    /// When the view does not have this layout, the length of `out` is not [`bytes`](Self::bytes), a number is invalid
    /// in its format, or a progressive weight `(code − zero) · scale`, with the integer scale of its group, is outside
    /// −128 to 127.
    pub fn pack(&self, view: &WeightView<'_>, out: &mut [u8]) -> Result<(), KernelError> {
        if Self::of(view, self.order, self.sums)? != *self {
            return Err(KernelError::Scheme("the weight view does not match the layout"));
        }
        if out.len() != self.bytes() {
            let (expected, got) = (self.bytes(), out.len());
            return Err(KernelError::Length { what: "packed weights", expected, got });
        }
        out.fill(0);
        for row in 0..self.n {
            self.pack_codes(view, row, out);
            let mut sum_of_row = 0_i32;
            for g in 0..view.groups() {
                let group = self.group(view, row, g)?;
                sum_of_row = sum_of_row.wrapping_add(match view.all_scales() {
                    Scales::Progressive { groups, .. } => {
                        group.sum.wrapping_mul(i32::from(groups[row * view.groups() + g]))
                    }
                    Scales::Float(_) | Scales::E4m3 { .. } | Scales::Super(_) => group.sum,
                });
                if self.row_is_group() {
                    self.pack_row(view, row, &group, out);
                } else {
                    self.pack_group(row, g, &group, out);
                }
            }
            if let Scales::Progressive { channels, .. } = view.all_scales() {
                put(out, self.section(Section::RowScales) + 4 * row, &channels[row].to_le_bytes());
            }
            if let Scales::E4m3 { global, .. } = view.all_scales() {
                let at = self.section(Section::RowScales) + 4 * row;
                put(out, at, &(256.0 / global).to_le_bytes());
                put(out, at + 4 * self.row_blocks() * TILE_ROWS, &global.to_le_bytes());
            }
            if self.sums && self.summed_whole() {
                put(out, self.section(Section::RowSums) + 4 * row, &sum_of_row.to_le_bytes());
            }
        }
        Ok(())
    }

    fn pack_codes(&self, view: &WeightView<'_>, row: usize, out: &mut [u8]) {
        let less = if self.signed() { self.zero_point.unwrap_or(0) } else { 0 };
        let mask = if self.code_bits == 4 { 15 } else { 255 };
        for (i, &code) in view.codes(row..row + 1).iter().enumerate() {
            let (at, bit) = self.code_place(row, i);
            let stored = self.spread(code.wrapping_sub(less) & mask, bit);
            // The bits of a code may wrap around the end of its word.
            for (byte, part) in out[at..at + 4].iter_mut().zip(stored.to_le_bytes()) {
                *byte |= part;
            }
        }
    }

    /// The offset of a code's word in bytes, and its bit or field within the word.
    fn code_place(&self, row: usize, feature: usize) -> (usize, usize) {
        let tile = row / TILE_ROWS * self.tiles() + feature / TILE_K;
        let (at, bit) = self.place(row % TILE_ROWS, feature % TILE_K);
        (self.section(Section::Codes) + tile * self.tile_bytes() + at, bit)
    }

    fn group(&self, view: &WeightView<'_>, row: usize, g: usize) -> Result<Group, KernelError> {
        let size = self.group_size;
        let codes = &view.codes(row..row + 1)[g * size..(g + 1) * size];
        if let Some(format) = view.float_format() {
            return self.float_group(view, format, row, g);
        }
        let zero = view.zero(row, g);
        let (low, high) = codes.iter().fold((u8::MAX, 0), |(low, high), &c| (low.min(c), high.max(c)));
        if high.max(zero) > u8::MAX >> (8 - view.bits()) {
            return Err(KernelError::Scheme("a code or zero point exceeds the bits of the weight"));
        }
        let mut scale = [0; 4];
        match (view.all_scales(), self.scales) {
            (Scales::Progressive { groups, .. }, _) => {
                let whole = groups[row * view.groups() + g];
                let reach = |code: u8| (i32::from(code) - i32::from(zero)) * i32::from(whole);
                if !PROGRESSIVE.contains(&reach(low)) || !PROGRESSIVE.contains(&reach(high)) {
                    return Err(KernelError::Scheme("a progressive weight exceeds 8 bits"));
                }
                scale[0] = whole;
            }
            (Scales::Float(s), _) => scale = self.scale_bytes_of(s[row * view.groups() + g]),
            // Unreachable: creating the view rejects such scales.
            (Scales::E4m3 { .. }, _) => {
                return Err(KernelError::Scheme("E4M3 and E8M0 scales require floating-point codes"));
            }
            (Scales::Super(_), _) => return Err(KernelError::Scheme(SUPER_BLOCKS)),
        }
        let sum = codes.iter().map(|&c| i32::from(c) - i32::from(zero)).sum();
        Ok(Group { scale, zero, sum })
    }

    /// [`group`](Self::group) for floating-point codes.
    fn float_group(
        &self,
        view: &WeightView<'_>,
        format: FloatFormat,
        row: usize,
        g: usize,
    ) -> Result<Group, KernelError> {
        let codes = &view.codes(row..row + 1)[g * self.group_size..(g + 1) * self.group_size];
        if !codes.iter().all(|&code| format.is_number(code)) {
            return Err(KernelError::Scheme("a code is not a number in its format"));
        }
        let at = row * view.groups() + g;
        let scale = match view.all_scales() {
            Scales::E4m3 { groups, .. } if groups[at] >= E4M3_NAN => {
                return Err(KernelError::Scheme("a group scale is negative or NaN"));
            }
            Scales::E4m3 { groups, .. } => [groups[at], 0, 0, 0],
            Scales::Float(s) => self.scale_bytes_of(s[at]),
            // Unreachable: creating the view rejects such scales.
            Scales::Progressive { .. } | Scales::Super(_) => {
                return Err(KernelError::Scheme("progressive scales require integer codes"));
            }
        };
        Ok(Group { scale, zero: 0, sum: 0 })
    }

    /// The stored bytes of a float scale; bytes after the scale are 0.
    fn scale_bytes_of(&self, scale: f32) -> [u8; 4] {
        let mut bytes = [0; 4];
        match self.scales {
            _ if self.row_is_group() => bytes = scale.to_le_bytes(),
            ScaleType::F16 => put(&mut bytes, 0, &f16::from_f32(scale).to_le_bytes()),
            ScaleType::Bf16 => put(&mut bytes, 0, &bf16::from_f32(scale).to_le_bytes()),
            // Powers of two; the smallest one, 2⁻¹²⁷, is subnormal and has code 0.
            ScaleType::E8m0 => bytes[0] = (scale.to_bits() >> 23) as u8,
            ScaleType::F32 | ScaleType::Progressive | ScaleType::E4m3 => bytes = scale.to_le_bytes(),
            ScaleType::Super | ScaleType::SuperMins => {}
        }
        bytes
    }

    fn pack_row(&self, view: &WeightView<'_>, row: usize, group: &Group, out: &mut [u8]) {
        put(out, self.section(Section::RowScales) + 4 * row, &group.scale);
        if view.has_zeros() {
            out[self.section(Section::RowZeros) + row] = group.zero;
        }
    }

    fn pack_group(&self, row: usize, g: usize, group: &Group, out: &mut [u8]) {
        let (r, place) = (row % TILE_ROWS, pair_order(row % TILE_ROWS));
        // Groups may span tiles.
        for tile in self.tiles_of(g) {
            let (at, slot) = self.parameters_of(row, g, tile);
            put(
                out,
                at + (slot * TILE_ROWS + place) * self.scale_bytes(),
                &group.scale[..self.scale_bytes()],
            );
            if self.zero_point.is_none() {
                let zeros = at + self.zeros_at() + slot * TILE_ROWS * self.code_bits / 8;
                match self.code_bits {
                    4 => out[zeros + r % 8] |= group.zero << (4 * (r / 8)),
                    _ => out[zeros + place] = group.zero,
                }
            }
            if self.sums && !self.summed_whole() {
                put(out, at + self.sums_at() + (slot * TILE_ROWS + place) * 4, &group.sum.to_le_bytes());
            }
        }
    }

    fn tiles_of(&self, g: usize) -> core::ops::Range<usize> {
        g * self.group_size / TILE_K..((g + 1) * self.group_size).div_ceil(TILE_K)
    }

    /// The offset of a tile's parameters in bytes, and the index of group `g` among the tile's groups.
    fn parameters_of(&self, row: usize, g: usize, tile: usize) -> (usize, usize) {
        let block = row / TILE_ROWS * self.tiles() + tile;
        let slot = if self.group_size < TILE_K { g % (TILE_K / self.group_size) } else { 0 };
        (self.section(Section::Parameters) + block * self.parameter_bytes(), slot)
    }

    /// Unpacks the whole matrix to the parts of the view.
    ///
    /// # Errors
    /// When `packed` has the wrong length, or there is too little memory.
    pub fn unpack(&self, packed: &[u8]) -> Result<Unpacked, KernelError> {
        if packed.len() != self.bytes() {
            let (expected, got) = (self.bytes(), packed.len());
            return Err(KernelError::Length { what: "packed weights", expected, got });
        }
        let weights = self.n.checked_mul(self.k).ok_or(KernelError::TooLarge("the unpacked matrix"))?;
        let mut out = Unpacked::default();
        let none = |_| KernelError::Memory("the unpacked matrix");
        out.codes.try_reserve_exact(weights).map_err(none)?;
        let groups = self.k / self.group_size;
        let more = if self.signed() { self.zero_point.unwrap_or(0) } else { 0 };
        let mask = if self.code_bits == 4 { 15 } else { 255 };
        for row in 0..self.n {
            for i in 0..self.k {
                let (at, bit) = self.code_place(row, i);
                let word = u32::from_le_bytes([packed[at], packed[at + 1], packed[at + 2], packed[at + 3]]);
                out.codes.push(self.gather(word, bit).wrapping_add(more) & mask);
            }
            for g in 0..groups {
                let (scale, zero) = self.unpack_group(packed, row, g);
                out.scales.push(scale);
                if self.zero_point.is_none() {
                    out.zeros.push(zero);
                }
            }
            let second = if self.scales == ScaleType::E4m3 { self.row_blocks() * TILE_ROWS } else { 0 };
            if let ScaleType::Progressive | ScaleType::E4m3 = self.scales {
                out.channels.push(f32_at(packed, self.section(Section::RowScales) + 4 * (second + row)));
            }
        }
        Ok(out)
    }

    /// The scale and zero point of a group. For a symmetric grid, the zero point is 0; E4M3 scales are not divided by
    /// the global scale.
    fn unpack_group(&self, packed: &[u8], row: usize, g: usize) -> (f32, u8) {
        if self.row_is_group() {
            let zero = match self.zero_point {
                Some(_) => 0,
                None => packed[self.section(Section::RowZeros) + row],
            };
            return (f32_at(packed, self.section(Section::RowScales) + 4 * row), zero);
        }
        let (r, place) = (row % TILE_ROWS, pair_order(row % TILE_ROWS));
        let (at, slot) = self.parameters_of(row, g, self.tiles_of(g).start);
        let scale = at + (slot * TILE_ROWS + place) * self.scale_bytes();
        let scale = match self.scales {
            ScaleType::Progressive => f32::from(packed[scale]),
            ScaleType::E4m3 => FloatFormat::E4m3.value(packed[scale]),
            ScaleType::E8m0 => e8m0_value(packed[scale]),
            ScaleType::F16 => f16::from_le_bytes([packed[scale], packed[scale + 1]]).to_f32(),
            ScaleType::Bf16 => bf16::from_le_bytes([packed[scale], packed[scale + 1]]).to_f32(),
            ScaleType::F32 => f32_at(packed, scale),
            ScaleType::Super | ScaleType::SuperMins => f32::from(packed[scale]),
        };
        let zeros = at + self.zeros_at() + slot * TILE_ROWS * self.code_bits / 8;
        let zero = match (self.zero_point, self.code_bits) {
            (Some(_), _) => 0,
            (None, 4) => packed[zeros + r % 8] >> (4 * (r / 8)) & 15,
            (None, _) => packed[zeros + place],
        };
        (scale, zero)
    }
}

fn put(out: &mut [u8], at: usize, bytes: &[u8]) {
    out[at..at + bytes.len()].copy_from_slice(bytes);
}

fn f32_at(bytes: &[u8], at: usize) -> f32 {
    f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}
