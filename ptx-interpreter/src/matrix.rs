//! Warp-wide matrix instructions: which element of which matrix a lane's register holds.
//!
//! After the figures of the PTX ISA, "Matrix Multiply-Accumulate Operation using mma instruction"
//! (fragments for m16n8k8, m16n8k16 and m16n8k32), "ldmatrix" and "movmatrix". A lane is `4·g + t`: the
//! figures' group `g` of 0 to 7 and thread `t` of 0 to 3 in it.

use half::{bf16, f16};

use crate::types::{LANES, Lanes};

/// The type of a factor's elements.
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

    /// Element `i` of a register, from its lowest bits up.
    fn float(self, register: u64, i: usize) -> f32 {
        let bits = (register >> (16 * i)) as u16;
        if self == Self::F16 { f16::from_bits(bits).to_f32() } else { bf16::from_bits(bits).to_f32() }
    }

    fn integer(self, register: u64, i: usize) -> i32 {
        match self {
            Self::S8 => i32::from((register >> (8 * i)) as u8 as i8),
            Self::U8 => i32::from((register >> (8 * i)) as u8),
            Self::S4 => i32::from(((register >> (4 * i)) as u8) << 4) << 24 >> 28,
            _ => (register >> (4 * i) & 0xf) as i32,
        }
    }
}

/// The place of element `i` of register `r` of A: row and column, `per` elements in a register.
///
/// Registers alternate between rows `g` and `g + 8`; every second one is `4·per` columns further.
fn place_a(lane: usize, r: usize, i: usize, per: usize) -> (usize, usize) {
    (lane / 4 + 8 * (r % 2), (lane % 4) * per + i + (r / 2) * 4 * per)
}

/// Of B: row (along k) and column.
fn place_b(lane: usize, r: usize, i: usize, per: usize) -> (usize, usize) {
    ((lane % 4) * per + i + r * 4 * per, lane / 4)
}

/// Of C and D in four registers of one element: rows `g` and `g + 8`, two neighbouring columns.
fn place_c(lane: usize, r: usize) -> (usize, usize) {
    (lane / 4 + 8 * (r / 2), (lane % 4) * 2 + r % 2)
}

/// Gathers a factor: `[outer][k]`, A by rows and B by columns.
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

/// `mma.m16n8kK` with float factors and f32 sums: products are exact in f32, and are added in f32 in the
/// order of k.
pub(crate) fn multiply_floats(element: Element, a: &[&Lanes], b: &[&Lanes], c: &[Lanes; 4]) -> [Lanes; 4] {
    let rows: [[f32; 16]; 16] = gather(a, 2, false, |bits, i| element.float(bits, i));
    let columns: [[f32; 16]; 8] = gather(b, 2, true, |bits, i| element.float(bits, i));
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

/// The integer shapes, 8 and 4 bits: exact sums modulo 2³², or saturated at the end.
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
    let per = 32 / elements[0].bits();
    let rows: [[i16; K]; 16] = gather(a, per, false, |bits, i| elements[0].integer(bits, i) as i16);
    let columns: [[i16; K]; 8] = gather(b, per, true, |bits, i| elements[1].integer(bits, i) as i16);
    let mut d = [[0; LANES]; 4];
    for lane in 0..LANES {
        for (r, d) in d.iter_mut().enumerate() {
            let (row, column) = place_c(lane, r);
            let products = rows[row].iter().zip(&columns[column]);
            // At most 64 products of 16 bits: no overflow.
            let sum: i32 = products.map(|(a, b)| i32::from(*a) * i32::from(*b)).sum();
            let c = c[r][lane] as u32 as i32;
            let sum = if saturate { c.saturating_add(sum) } else { c.wrapping_add(sum) };
            d[lane] = u64::from(sum as u32);
        }
    }
    d
}

/// C of two f16 in a register, as four registers of one f32: `{c0, c1}` of row `g`, `{c2, c3}` of `g + 8`.
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

/// The way back, rounded to nearest.
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

/// What a lane gets of an 8x8 matrix of 16-bit elements whose rows are given: two neighbours of row `g`, or
/// transposed, two neighbours of column `g`.
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

/// The matrix that the lanes hold, row by row: the way back of [`spread`].
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
