//! Weights of floating-point formats: arbitrary codes and scales are rejected, or packed and multiplied with the
//! results of the reference.

use quant_kernels_cpu::{
    FloatFormat, FloatRows, Int8Rows, Isa, Layout, PackedLinear, RowLayout, Scales, Serial, WeightView,
    reference,
};

use crate::bits;
use crate::input::Input;

/// Checks that weights are packed only if no code is NaN, and that their products are correct.
///
/// # Panics
/// If a property does not hold.
pub fn floating_point(data: &[u8]) {
    let mut input = Input::new(data);
    let format = if input.flag() { FloatFormat::E4m3 } else { FloatFormat::E2m1 };
    let (n, groups, size) = (input.size(40), input.size(4), input.size(72));
    let k = groups * size;
    let valid = !input.rarely(3);
    let mut codes = input.bytes(n * k);
    if valid {
        codes.iter_mut().for_each(|code| *code = if format.is_number(*code) { *code } else { *code & 7 });
    }
    let mut of_groups = input.bytes(n * groups);
    let mut global = input.floats(1)[0];
    if valid {
        of_groups.iter_mut().for_each(|code| *code = (*code & 0x7f).min(0x7e));
        global = global.abs().clamp(1e-3, 1e3);
    }
    let floats = input.floats(n * groups);
    let scales = match input.flag() {
        true => Scales::E4m3 { groups: &of_groups, global },
        false => Scales::Float(&floats),
    };
    let view = WeightView::float_with_scales([n, k], format, size, &codes, scales).expect("consistent parts");
    assert!(Layout::of(&view, true).is_err(), "such codes have no sums");
    let packed = PackedLinear::pack(&view, None, false, &Serial);
    let are_numbers = codes.iter().all(|&code| format.is_number(code));
    let Ok(packed) = packed else {
        assert!(!valid || !global.is_finite() || !are_numbers, "refused without a reason");
        return;
    };
    assert!(are_numbers, "a NaN code was packed");
    packed.view().check().expect("valid packed bytes");
    let parts = packed.layout().unpack(packed.view().bytes()).expect("bytes of the layout's length");
    assert_eq!(parts.codes, codes);
    let mut values = [vec![0.0; n * k], vec![0.0; n * k]];
    packed.view().dequantize_rows(0..n, &mut values[0]).expect("matching shapes");
    reference::dequantize_rows(&view, 0..n, &mut values[1]);
    assert_eq!(bits(&values[0]), bits(&values[1]));

    let m = input.size(20);
    let x = input.floats(m * k);
    let layout = RowLayout::of(packed.layout());
    let mut plain = Int8Rows::new(Isa::Scalar.token().expect("an available instruction set"));
    plain.quantize(&x, layout, &Serial).expect("whole rows");
    let expected = (format == FloatFormat::E2m1).then(|| bits(&reference::int8_linear(&view, &plain, None)));
    let mut float = None;
    for isa in Isa::runnable() {
        let token = isa.token().expect("an available instruction set");
        let mut out = vec![0.0; m * n];
        let mut rows = Int8Rows::new(token);
        rows.quantize(&x, layout, &Serial).expect("whole rows");
        let product = packed.view().multiply(token, &rows, None, &mut out, &Serial);
        match &expected {
            Some(expected) => {
                product.expect("matching shapes");
                assert_eq!(&bits(&out), expected, "{isa:?}");
            }
            None => assert!(product.is_err(), "a product of integers with FP8"),
        }
        let mut rows = FloatRows::new(token);
        rows.pack(&x, layout, &Serial).expect("whole rows");
        packed.view().multiply_float(&rows, None, &mut out, &Serial).expect("matching shapes");
        if !isa.splits_floats() {
            assert_eq!(&bits(&out), float.get_or_insert_with(|| bits(&out)), "{isa:?} on floats");
        }
    }
}
