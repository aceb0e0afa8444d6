//! Warp-wide matrix instructions: which element of which matrix each register of a lane holds.
//!
//! Follows the figures of the PTX ISA in "Matrix Multiply-Accumulate Operation using mma instruction", "ldmatrix" and
//! "movmatrix". A lane is `4·g + t`, where the figures call `g` (0 to 7) the group and `t` (0 to 3) the thread within
//! the group.

use half::f16;

use crate::types::{LANES, Lanes};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Element {
    F16,
    Bf16,
    S8,
    U8,
    S4,
    U4,
}

impl Element {
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "f16" => Self::F16,
            "bf16" => Self::Bf16,
            "s8" => Self::S8,
            "u8" => Self::U8,
            "s4" => Self::S4,
            "u4" => Self::U4,
            _ => return None,
        })
    }

    pub fn bits(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 16,
            Self::S8 | Self::U8 => 8,
            Self::S4 | Self::U4 => 4,
        }
    }

    pub fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::Bf16)
    }
}

/// Shifting the fields to those of an f32 and scaling by 2¹¹² is correct for subnormals too.
fn f16_value(bits: u16) -> f32 {
    let fields = u32::from(bits & 0x7fff) << 13;
    let size = f32::from_bits(fields) * f32::from_bits(0x7780_0000);
    let size = if bits & 0x7c00 == 0x7c00 { f32::from_bits(0x7f80_0000 | fields) } else { size };
    f32::from_bits(size.to_bits() | u32::from(bits & 0x8000) << 16)
}

/// Element `i` of a register begins at bit `16·i`.
fn gather_floats<const N: usize>(element: Element, registers: &[&Lanes], is_b: bool) -> [[f32; 16]; N] {
    match element {
        Element::Bf16 => {
            gather(registers, 2, is_b, |bits, i| f32::from_bits(u32::from((bits >> (16 * i)) as u16) << 16))
        }
        _ => gather(registers, 2, is_b, |bits, i| f16_value((bits >> (16 * i)) as u16)),
    }
}

fn gather_integers<const K: usize, const N: usize>(
    element: Element,
    registers: &[&Lanes],
    is_b: bool,
) -> [[i16; K]; N] {
    match element {
        Element::S8 => gather(registers, 4, is_b, |bits, i| i16::from((bits >> (8 * i)) as u8 as i8)),
        Element::U8 => gather(registers, 4, is_b, |bits, i| i16::from((bits >> (8 * i)) as u8)),
        Element::S4 => gather(registers, 8, is_b, |bits, i| ((bits >> (4 * i)) << 12) as u16 as i16 >> 12),
        _ => gather(registers, 8, is_b, |bits, i| (bits >> (4 * i) & 0xf) as i16),
    }
}

/// The row and column of element `i` of register `r` of A, with `per` elements per register.
///
/// Even registers hold row `g`, odd ones row `g + 8`. Each further pair of registers is `4·per` columns to the right.
fn place_a(lane: usize, r: usize, i: usize, per: usize) -> (usize, usize) {
    (lane / 4 + 8 * (r % 2), (lane % 4) * per + i + (r / 2) * 4 * per)
}

/// The row (along k) and column of an element of B.
fn place_b(lane: usize, r: usize, i: usize, per: usize) -> (usize, usize) {
    ((lane % 4) * per + i + r * 4 * per, lane / 4)
}

/// The row and column of an element of C or D, which have four registers of one element each: rows `g` and `g + 8`, two
/// neighbouring columns.
fn place_c(lane: usize, r: usize) -> (usize, usize) {
    (lane / 4 + 8 * (r / 2), (lane % 4) * 2 + r % 2)
}

/// Gathers a factor as `[outer][k]`: A by rows, B by columns.
#[inline(always)]
fn gather<T: Copy + Default, const K: usize, const N: usize>(
    registers: &[&Lanes],
    per: usize,
    is_b: bool,
    read: impl Fn(u64, usize) -> T,
) -> [[T; K]; N] {
    let mut out = [[T::default(); K]; N];
    for lane in 0..LANES {
        for (r, register) in registers.iter().enumerate() {
            for i in 0..per {
                let (outer, k) = if is_b {
                    let (k, column) = place_b(lane, r, i, per);
                    (column, k)
                } else {
                    place_a(lane, r, i, per)
                };
                out[outer][k] = read(register[lane], i);
            }
        }
    }
    out
}

/// Products are exact in f32, and are added in f32 in the order of k.
pub(crate) fn multiply_floats(element: Element, a: &[&Lanes], b: &[&Lanes], c: &[Lanes; 4]) -> [Lanes; 4] {
    let rows: [[f32; 16]; 16] = gather_floats(element, a, false);
    let columns: [[f32; 16]; 8] = gather_floats(element, b, true);
    let mut sums = [[0f32; 8]; 16];
    let places = || (0..LANES).flat_map(|lane| (0..4).map(move |r| (lane, r, place_c(lane, r))));
    for (lane, r, (row, column)) in places() {
        sums[row][column] = f32::from_bits(c[r][lane] as u32);
    }
    for k in 0..(b.len() * 8).min(16) {
        let line: [f32; 8] = std::array::from_fn(|column| columns[column][k]);
        for (sums, row) in sums.iter_mut().zip(&rows) {
            for (sum, value) in sums.iter_mut().zip(&line) {
                *sum += row[k] * value;
            }
        }
    }
    let mut d = [[0; LANES]; 4];
    for (lane, r, (row, column)) in places() {
        d[r][lane] = u64::from(crate::rounding::canonical(sums[row][column]).to_bits());
    }
    d
}

/// Sums are exact modulo 2³², or saturated at the end.
pub(crate) fn multiply_integers(
    elements: [Element; 2],
    a: &[&Lanes],
    b: &[&Lanes],
    c: &[Lanes; 4],
    saturate: bool,
) -> [Lanes; 4] {
    match b.len() * 128 / elements[0].bits() {
        16 => multiply_depth::<16>(elements, a, b, c, saturate),
        32 => multiply_depth::<32>(elements, a, b, c, saturate),
        _ => multiply_depth::<64>(elements, a, b, c, saturate),
    }
}

fn multiply_depth<const K: usize>(
    elements: [Element; 2],
    a: &[&Lanes],
    b: &[&Lanes],
    c: &[Lanes; 4],
    saturate: bool,
) -> [Lanes; 4] {
    let rows: [[i16; K]; 16] = gather_integers(elements[0], a, false);
    let columns: [[i16; K]; 8] = gather_integers(elements[1], b, true);
    let mut d = [[0; LANES]; 4];
    for lane in 0..LANES {
        for (r, d) in d.iter_mut().enumerate() {
            let (row, column) = place_c(lane, r);
            let products = rows[row].iter().zip(&columns[column]);
            // At most 64 products of 16 bits cannot overflow.
            let sum: i32 = products.map(|(a, b)| i32::from(*a) * i32::from(*b)).sum();
            let c = c[r][lane] as u32 as i32;
            let sum = if saturate { c.saturating_add(sum) } else { c.wrapping_add(sum) };
            d[lane] = u64::from(sum as u32);
        }
    }
    d
}

/// From two f16 per register to one f32: `{c0, c1}` of row `g`, `{c2, c3}` of `g + 8`.
pub(crate) fn widen(c: [&Lanes; 2]) -> [Lanes; 4] {
    let mut out = [[0; LANES]; 4];
    for (r, out) in out.iter_mut().enumerate() {
        for lane in 0..LANES {
            let half = f16::from_bits((c[r / 2][lane] >> (16 * (r % 2))) as u16);
            out[lane] = u64::from(half.to_f32().to_bits());
        }
    }
    out
}

/// The inverse of [`widen`], rounding to nearest.
pub(crate) fn narrow(d: &[Lanes; 4]) -> [Lanes; 2] {
    let half = |bits: u64| u64::from(f16::from_f32(f32::from_bits(bits as u32)).to_bits());
    let mut out = [[0; LANES]; 2];
    for (r, out) in out.iter_mut().enumerate() {
        for (lane, out) in out.iter_mut().enumerate() {
            *out = half(d[2 * r][lane]) | half(d[2 * r + 1][lane]) << 16;
        }
    }
    out
}

/// The elements that a lane receives of an 8x8 matrix of 16-bit elements, given by rows: two neighbours of row `g` or,
/// transposed, of column `g`.
pub(crate) fn spread(rows: &[[u16; 8]; 8], transposed: bool) -> Lanes {
    let mut out = [0; LANES];
    for (lane, out) in out.iter_mut().enumerate() {
        let (g, t) = (lane / 4, 2 * (lane % 4));
        let (low, high) =
            if transposed { (rows[t][g], rows[t + 1][g]) } else { (rows[g][t], rows[g][t + 1]) };
        *out = u64::from(low) | u64::from(high) << 16;
    }
    out
}

/// The inverse of [`spread`].
pub(crate) fn collect(register: &Lanes, transposed: bool) -> [[u16; 8]; 8] {
    let mut rows = [[0; 8]; 8];
    for (lane, bits) in register.iter().enumerate() {
        let (g, t) = (lane / 4, 2 * (lane % 4));
        for i in 0..2 {
            let value = (bits >> (16 * i)) as u16;
            if transposed { rows[t + i][g] = value } else { rows[g][t + i] = value }
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_has_its_value() {
        for bits in 0..=u16::MAX {
            let (got, want) = (f16_value(bits), f16::from_bits(bits).to_f32());
            assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{bits:#x}");
        }
    }
}
