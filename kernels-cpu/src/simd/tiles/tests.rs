//! Tests of the emulated unit against plain loops, and of the hardware against the emulated unit, bit for bit.

use super::emulated::Emulated;
use super::*;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 ^ (self.0 >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 16
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Kind {
    Signed,
    Unsigned,
    Bf16,
}

struct Case {
    shape: Shape,
    sum: Vec<u8>,
    left: Vec<u8>,
    right: Vec<u8>,
}

impl Case {
    fn new(shape: Shape, byte: &mut dyn FnMut(usize) -> u8) -> Self {
        let mut bytes = |count: usize| (0..count).map(&mut *byte).collect::<Vec<_>>();
        let (sum, left) = (bytes(shape.rows * ROW), bytes(shape.rows * 4 * shape.depth));
        Self { shape, sum, left, right: bytes(shape.depth * ROW) }
    }

    /// Adds the product to the sums twice, with different tiles each time.
    unsafe fn run<U: TileUnit>(&self, kind: Kind) -> Vec<u8> {
        let mut out = vec![0xa5; self.shape.rows * ROW];
        // SAFETY: the caller guarantees that the processor has the unit; the buffers are as large as the shape's tiles.
        unsafe {
            let mut unit = U::configure(self.shape);
            unit.load::<1>(self.sum.as_ptr(), ROW);
            unit.load::<4>(self.right.as_ptr(), ROW);
            unit.load::<7>(self.left.as_ptr(), 4 * self.shape.depth);
            match kind {
                Kind::Signed => unit.add_signed::<1, 7, 4>(),
                Kind::Unsigned => unit.add_unsigned::<1, 7, 4>(),
                Kind::Bf16 => unit.add_bf16::<1, 7, 4>(),
            }
            unit.store::<1>(out.as_mut_ptr());
            unit.load::<3>(out.as_ptr(), ROW);
            unit.load::<5>(self.right.as_ptr(), ROW);
            unit.load::<6>(self.left.as_ptr(), 4 * self.shape.depth);
            match kind {
                Kind::Signed => unit.add_signed::<3, 6, 5>(),
                Kind::Unsigned => unit.add_unsigned::<3, 6, 5>(),
                Kind::Bf16 => unit.add_bf16::<3, 6, 5>(),
            }
            unit.store::<3>(out.as_mut_ptr());
        }
        out
    }
}

fn shapes() -> impl Iterator<Item = Shape> {
    [1, 2, 5, 15, 16].into_iter().flat_map(|rows| [1, 3, 8, 16].map(|depth| Shape { rows, depth }))
}

/// Random bytes. With `wild`, the bf16 numbers that they form have any magnitude, and may be subnormal, infinite or
/// NaN; otherwise their magnitudes are from `2⁻⁷` to 2.
fn byte(random: &mut Random, wild: bool) -> impl FnMut(usize) -> u8 {
    move |i| {
        let byte = random.next() as u8;
        // The upper byte of a bf16, and of an f32.
        if i % 2 == 1 && !wild { 0x3c + (byte & 0x83) } else { byte }
    }
}

/// Returns the words of `out`, with all bf16 NaNs replaced by the same one.
fn comparable(kind: Kind, out: &[u8]) -> Vec<u32> {
    let words = out.chunks_exact(4).map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]]));
    words.map(|w| if kind == Kind::Bf16 && f32::from_bits(w).is_nan() { 0x7fc0_0000 } else { w }).collect()
}

#[test]
fn the_emulated_unit_multiplies_integers() {
    let mut random = Random(1);
    for (shape, kind) in shapes().flat_map(|shape| [(shape, Kind::Signed), (shape, Kind::Unsigned)]) {
        let case = Case::new(shape, &mut byte(&mut random, true));
        // SAFETY: the emulated unit needs no instructions.
        let got = comparable(kind, &unsafe { case.run::<Emulated>(kind) });
        for (i, got) in got.into_iter().enumerate() {
            let (r, n) = (i / 16, i % 16);
            let mut sum = i64::from(i32::from_le_bytes(case.sum[4 * i..4 * i + 4].try_into().unwrap()));
            for k in 0..4 * shape.depth {
                let right = case.right[k / 4 * ROW + 4 * n + k % 4];
                let right = if kind == Kind::Signed { i64::from(right as i8) } else { i64::from(right) };
                sum += 2 * i64::from(case.left[r * 4 * shape.depth + k] as i8) * right;
            }
            assert_eq!(got, sum as u32, "{shape:?} {kind:?}");
        }
    }
}

#[test]
fn the_emulated_unit_multiplies_bf16() {
    let mut random = Random(2);
    for shape in shapes() {
        let case = Case::new(shape, &mut byte(&mut random, false));
        let half = |bytes: &[u8], i: usize| {
            f64::from(f32::from_bits(u32::from(u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]])) << 16))
        };
        // SAFETY: the emulated unit needs no instructions.
        let got = comparable(Kind::Bf16, &unsafe { case.run::<Emulated>(Kind::Bf16) });
        for (i, got) in got.into_iter().enumerate() {
            let (r, n) = (i / 16, i % 16);
            let start = f64::from(f32::from_le_bytes(case.sum[4 * i..4 * i + 4].try_into().unwrap()));
            let products = (0..2 * shape.depth).map(|k| {
                2.0 * half(&case.left, r * 2 * shape.depth + k)
                    * half(&case.right, k / 2 * 32 + 2 * n + k % 2)
            });
            let (sum, size) = products.fold((start, start.abs()), |(s, a), p| (s + p, a + p.abs()));
            let bound = (2.0 * shape.depth as f64 + 6.0) * 2.0_f64.powi(-24) * size + 1e-37;
            assert!((f64::from(f32::from_bits(got)) - sum).abs() <= bound, "{shape:?}");
        }
    }
}

#[test]
fn the_emulated_unit_flushes_subnormals() {
    let shape = Shape { rows: 1, depth: 1 };
    let product = |sum: f32, left: [u16; 2], right: [u16; 2]| {
        let halves = |h: [u16; 2]| h.into_iter().flat_map(u16::to_le_bytes).collect::<Vec<_>>();
        let case = Case {
            shape,
            sum: [sum.to_le_bytes(); 16].concat(),
            left: halves(left),
            right: vec![halves(right); 16].concat(),
        };
        // SAFETY: the emulated unit needs no instructions.
        f32::from_bits(comparable(Kind::Bf16, &unsafe { case.run::<Emulated>(Kind::Bf16) })[3])
    };
    // 1 · 1 twice; a subnormal operand; a subnormal product; a subnormal sum; an infinity; infinities of both signs.
    assert_eq!(product(0.5, [0x3f80, 0], [0x3f80, 0]), 2.5);
    assert_eq!(product(0.5, [0x007f, 0], [0x4000, 0]), 0.5);
    assert_eq!(product(0.0, [0x0080, 0], [0x3f00, 0]), 0.0);
    assert_eq!(product(f32::from_bits(3), [0; 2], [0; 2]), 0.0);
    assert_eq!(product(1.0, [0x7f80, 0], [0x3f80, 0]), f32::INFINITY);
    assert!(product(1.0, [0x7f80, 0x7f80], [0x3f80, 0xbf80]).is_nan());
}

#[test]
fn steps_are_expanded() {
    let mut random = Random(3);
    let step: Vec<u8> = (0..128).map(|_| random.next() as u8).collect();
    let (mut signed, mut floats) = ([0; 128], [0; 256]);
    let minus: [i32; 16] = core::array::from_fn(|r| i32::from(r as u8) * 0x0101_0101);
    // SAFETY: the buffers have the lengths that are read and written.
    unsafe { Emulated::expand_signed(step.as_ptr(), minus, signed.as_mut_ptr()) };
    for (r, i) in (0..16).flat_map(|r| (0..8).map(move |i| (r, i))) {
        let code = step[4 * r + i % 4] >> (4 * (i / 4)) & 15;
        assert_eq!(signed[64 * (i / 4) + 4 * r + i % 4] as i8, code as i8 - r as i8);
    }
    for bits in [4, 8] {
        // SAFETY: the path is available; the buffers have the lengths that are read and written.
        unsafe {
            match bits {
                4 => Emulated::expand_bf16::<4>(step.as_ptr(), 7, floats.as_mut_ptr()),
                _ => Emulated::expand_bf16::<8>(step.as_ptr(), 7, floats.as_mut_ptr()),
            }
        }
        for (r, i) in (0..16).flat_map(|r| (0..8).map(move |i| (r, i))) {
            let code = match bits {
                4 => step[4 * r + i % 4] >> (4 * (i / 4)) & 15,
                _ => step[64 * (i / 4) + 4 * r + i % 4],
            };
            let row = [0, 2, 0, 2, 1, 3, 1, 3][i];
            let at = 64 * row + 4 * r + 2 * (i / 2 % 2);
            let value = f32::from_bits(u32::from(u16::from_le_bytes([floats[at], floats[at + 1]])) << 16);
            assert_eq!(value, f32::from(code) - 7.0, "{bits} bits, row {r}, feature {i}");
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod hardware {
    use super::super::amx::Amx;
    use super::*;
    use crate::Isa;
    use crate::simd::codes;

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16")]
    unsafe fn expand<const CODES: usize>(
        step: &[u8; 128],
        zero: i32,
        signed: &mut [u8; 128],
        floats: &mut [u8; 256],
    ) {
        // SAFETY: the function is compiled for the instructions, which the caller guarantees; the arrays have the
        // lengths that are read and written.
        unsafe {
            type L = <Amx as TileUnit>::Lanes;
            match CODES {
                codes::E2M1 => Amx::expand_e2m1(step.as_ptr(), signed.as_mut_ptr()),
                _ => Amx::expand_signed(step.as_ptr(), L::splat(zero * 0x0101_0101), signed.as_mut_ptr()),
            }
            Amx::expand_bf16::<CODES>(step.as_ptr(), Amx::table::<CODES>(zero), floats.as_mut_ptr());
        }
    }

    #[test]
    fn the_hardware_equals_the_emulation() {
        if !Isa::Amx.is_available() {
            return;
        }
        let mut random = Random(4);
        for round in 0..40 {
            for (shape, kind) in
                shapes().flat_map(|s| [(s, Kind::Signed), (s, Kind::Unsigned), (s, Kind::Bf16)])
            {
                let case = Case::new(shape, &mut byte(&mut random, round % 2 == 0));
                // SAFETY: the processor has AMX, checked above.
                let got = comparable(kind, &unsafe { case.run::<Amx>(kind) });
                // SAFETY: the emulated unit needs no instructions.
                let expected = comparable(kind, &unsafe { case.run::<Emulated>(kind) });
                assert_eq!(got, expected, "{shape:?} {kind:?} {round}");
            }
        }
    }

    #[test]
    fn the_hardware_expands_as_the_emulation() {
        if !Isa::Amx.is_available() {
            return;
        }
        let mut random = Random(5);
        for zero in 0..16 {
            let step: [u8; 128] = core::array::from_fn(|_| random.next() as u8);
            let mut got = ([0; 128], [0; 256], [0; 256]);
            let mut expected = got;
            // SAFETY: the processor has AMX, checked above; the arrays have the lengths that are read and written.
            unsafe {
                expand::<4>(&step, zero, &mut got.0, &mut got.1);
                expand::<8>(&step, zero, &mut got.0, &mut got.2);
                Emulated::expand_signed(step.as_ptr(), [zero * 0x0101_0101; 16], expected.0.as_mut_ptr());
                Emulated::expand_bf16::<4>(step.as_ptr(), zero, expected.1.as_mut_ptr());
                Emulated::expand_bf16::<8>(step.as_ptr(), zero, expected.2.as_mut_ptr());
            }
            assert_eq!(got, expected, "{zero}");
            // Weights have no NaN codes.
            let step = step.map(|code| if code & 0x7f == 0x7f { 0 } else { code });
            // SAFETY: the path is available; the buffers have the lengths that are read and written.
            unsafe {
                expand::<{ codes::E2M1 }>(&step, 0, &mut got.0, &mut got.1);
                expand::<{ codes::E4M3 }>(&step, 0, &mut [0; 128], &mut got.2);
                Emulated::expand_e2m1(step.as_ptr(), expected.0.as_mut_ptr());
                Emulated::expand_bf16::<{ codes::E2M1 }>(step.as_ptr(), 0, expected.1.as_mut_ptr());
                Emulated::expand_bf16::<{ codes::E4M3 }>(step.as_ptr(), 0, expected.2.as_mut_ptr());
            }
            assert_eq!(got, expected, "{zero} of floating-point codes");
        }
    }
}
