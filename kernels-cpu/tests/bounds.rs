//! With the widest accepted groups, the largest possible sums do not overflow; wider groups are rejected.

use quant_kernels_cpu::{
    Int8Rows, Isa, KernelError, Layout, PackedLinear, RowLayout, ScaleType, Scales, Serial, StaticScale,
    WeightView,
};

/// Code bits, whether there are sums, whether there are two levels of scales, and the widest group (or row).
const LIMITS: [(u8, bool, bool, usize); 8] = [
    (8, false, false, 65_793),
    (4, false, false, 1_118_481),
    (8, true, false, 33_025),
    (4, true, false, 561_433),
    (8, false, true, 131_071),
    (4, false, true, 131_071),
    (8, true, true, 65_793),
    (4, true, true, 65_793),
];

fn accepts(width: usize, bits: u8, sums: bool, progressive: bool) -> bool {
    let scales = if progressive { ScaleType::Progressive } else { ScaleType::F32 };
    let result = Layout::from_parts([1, width], bits.into(), width, scales, None, sums);
    if let Err(error) = &result {
        assert_eq!(*error, KernelError::TooLarge("the group size"));
    }
    result.is_ok()
}

/// Each limit is the last width whose largest sum is below 2³¹ in exact arithmetic.
#[test]
fn limits_are_the_largest_there_are() {
    for (bits, sums, progressive, limit) in LIMITS {
        let weight = if progressive { 128 } else { (1_u128 << bits) - 1 };
        let max = weight * if sums { 255 } else { 128 };
        assert!(max * (limit as u128) < 1 << 31 && max * (limit as u128 + 1) >= 1 << 31, "{limit}");
        assert!(accepts(limit, bits, sums, progressive) && !accepts(limit + 1, bits, sums, progressive));
    }
    let layout = |width, scales| Layout::from_parts([1, 4 * width], 4, width, scales, None, false);
    assert!(layout(40_000, ScaleType::Progressive).is_err() && layout(40_000, ScaleType::F16).is_ok());
}

/// One row with one group of the maximum accepted width, and extreme values everywhere.
#[test]
fn extremes_at_the_limits_are_exact() {
    for (bits, sums, progressive, _) in LIMITS {
        // Search the accepted width: if the layout accepted too wide a group, the sums below would be wrong.
        let width = (1..24).rev().fold(1_usize, |width, bit| {
            let more = width + (1 << bit) / 2;
            if accepts(more, bits, sums, progressive) { more } else { width }
        });
        let width = (width..).find(|width| !accepts(width + 1, bits, sums, progressive)).unwrap();
        let top = u8::MAX >> (8 - bits);
        // Codes, zero points and group scales for which `(code − zero) · scale` is as large as allowed.
        let ends: Vec<(u8, Option<u8>, u8)> = match (progressive, bits) {
            (false, _) => vec![(top, Some(0), 1), (0, Some(top), 1), (0, None, 1), (top, None, 1)],
            (true, 4) => vec![(8, Some(0), 16), (0, Some(8), 16), (0, None, 16)],
            (true, _) => vec![(128, Some(0), 1), (0, Some(128), 1), (0, None, 1)],
        };
        for (code, zero, scale) in ends {
            let (codes, zeros) = (vec![code; width], zero.map(|zero| [zero]));
            let groups = [scale];
            let scales = match progressive {
                true => Scales::Progressive { groups: &groups, channels: &[1.0] },
                false => Scales::Float(&[1.0]),
            };
            let zeros = zeros.as_ref().map(|zeros| &zeros[..]);
            let view = WeightView::with_scales([1, width], bits, width, &codes, scales, zeros).unwrap();
            let packed = PackedLinear::pack(&view, None, sums, &Serial).unwrap();
            let weight = i64::from(code) - i64::from(zero.unwrap_or(1 << (bits - 1)));
            for (x, by) in [
                // Codes of −127 and 127 (per token), of −128 and 127 (static), and codes as far from the zero point as
                // possible.
                (-1.0_f32, None),
                (1.0, None),
                (-1.0, Some(0)),
                (1.0, Some(0)),
                (-1.0, Some(127)),
                (1.0, Some(-128)),
            ] {
                if !sums && by.is_some_and(|zero| zero != 0) {
                    continue;
                }
                let (mut rows, layout) = (Int8Rows::default(), RowLayout::of(packed.layout()));
                let x = vec![x; width];
                let a = match by {
                    None => {
                        rows.quantize(&x, layout, &Serial).unwrap();
                        (127.0 * x[0]) as i64
                    }
                    Some(zero) => {
                        let by = StaticScale { scale: 1.0 / 1024.0, zero };
                        rows.quantize_static(&x, layout, by, &Serial).unwrap();
                        (if x[0] < 0.0 { -128 } else { 127 }) - i64::from(zero)
                    }
                };
                assert_eq!(i64::from(rows.row(0)[width - 1]), a + i64::from(rows.zero()));
                let sum = weight * i64::from(scale) * a * width as i64;
                let expected = i32::try_from(sum).unwrap() as f32 * rows.scales()[0];
                for isa in Isa::runnable() {
                    let mut out = [0.0];
                    packed.view().multiply(isa.token().unwrap(), &rows, None, &mut out, &Serial).unwrap();
                    assert_eq!(
                        out[0], expected,
                        "{isa:?} {bits} {sums} {progressive} {code} {zero:?} {by:?}"
                    );
                }
            }
        }
    }
}
