//! The CPU kernels.

use quant_kernels_cpu::{
    FloatRows, Int8Rows, Isa, Layout, PackedLinear, PackedView, RowLayout, Scales, Serial, StaticScale,
    WeightView, reference,
};

use crate::bits;
use crate::input::Input;

struct Matrix {
    shape: [usize; 2],
    bits: u8,
    group_size: usize,
    codes: Vec<u8>,
    scales: Vec<f32>,
    /// Group scales of progressive weights.
    whole: Option<Vec<u8>>,
    zeros: Option<Vec<u8>>,
}

impl Matrix {
    fn valid(input: &mut Input<'_>) -> Self {
        let (n, groups, group_size) = (input.size(40), input.size(4), input.size(72));
        let (k, bits) = (groups * group_size, 2 + input.below(7) as u8);
        let progressive = input.rarely(4);
        // `(code − zero) · scale` must fit int8.
        let bits = if progressive { bits.min(7) } else { bits };
        let largest = if bits <= 4 { 8 } else { 1 };
        let whole = progressive
            .then(|| input.bytes(n * groups).iter().map(|b| b % (largest + 1)).collect::<Vec<_>>());
        Self {
            shape: [n, k],
            bits,
            group_size,
            codes: input.codes(bits, n * k),
            scales: input.floats(if progressive { n } else { n * groups }),
            zeros: input.flag().then(|| input.codes(bits, n * groups)),
            whole,
        }
    }

    fn corrupt(&mut self, input: &mut Input<'_>) {
        let resize = |slice: &mut Vec<u8>, input: &mut Input<'_>| {
            let len = input.below(2 * slice.len() + 2);
            slice.resize(len, 0xff);
        };
        match input.below(9) {
            0 => self.shape[0] = input.word(),
            1 => self.shape[1] = input.word(),
            2 => self.bits = input.byte(),
            3 => self.group_size = input.word(),
            4 => resize(&mut self.codes, input),
            5 => self.scales.truncate(input.below(self.scales.len() + 1)),
            6 => {
                let len = input.below(200);
                self.zeros = Some(input.bytes(len));
            }
            7 => self.whole = Some(input.bytes(self.shape[0].min(100))),
            _ => {
                let (at, any) = (input.below(self.codes.len()), input.byte());
                if let Some(code) = self.codes.get_mut(at) {
                    *code = any;
                }
            }
        }
    }

    fn view(&self) -> Option<WeightView<'_>> {
        let scales = match &self.whole {
            Some(groups) => Scales::Progressive { groups, channels: &self.scales },
            None => Scales::Float(&self.scales),
        };
        let zeros = self.zeros.as_deref();
        WeightView::with_scales(self.shape, self.bits, self.group_size, &self.codes, scales, zeros).ok()
    }
}

fn rows(isa: Isa, by: StaticScale, layout: &Layout, x: &[f32]) -> Int8Rows {
    let mut rows = Int8Rows::new(isa.token().expect("an available instruction set"));
    let row_layout = RowLayout::of(layout);
    if layout.has_sums() {
        rows.quantize_static(x, row_layout, by, &Serial).expect("whole rows and a good scale");
    } else {
        rows.quantize(x, row_layout, &Serial).expect("whole rows");
    }
    rows
}

fn static_scale(input: &mut Input<'_>) -> StaticScale {
    StaticScale { scale: f32::from(1 + input.byte() / 2) / 64.0, zero: input.byte() as i8 }
}

/// Checks that arbitrary views are rejected with an error, or packed and unpacked to the original.
///
/// # Panics
/// If a property does not hold.
pub fn pack(data: &[u8]) {
    let mut input = Input::new(data);
    let mut matrix = Matrix::valid(&mut input);
    for _ in 0..input.below(4) {
        matrix.corrupt(&mut input);
    }
    let sums = input.flag();
    let Some(view) = matrix.view() else { return };
    let Ok(layout) = Layout::of(&view, sums) else { return };
    // A view has a code for each weight, so the buffer is small.
    let mut bytes = vec![0xa5; layout.bytes()];
    let outcome = layout.pack(&view, 0..layout.panels(), &mut bytes);
    let bias = input.rarely(3).then(|| input.floats(view.n()));
    let owned = PackedLinear::pack(&view, bias.as_deref(), sums, &Serial);
    assert_eq!(outcome.is_ok(), owned.is_ok());
    let range = input.below(8)..input.below(8);
    let len = if input.flag() { range.len() * layout.panel_bytes() } else { input.below(4096) };
    let _ = layout.pack(&view, range, &mut vec![0; len]);
    let _ = layout.unpack(&bytes[..input.below(bytes.len() + 1)]);
    let Ok(owned) = owned else { return };
    assert_eq!(owned.view().bytes(), bytes);
    let parts = layout.unpack(&bytes).expect("bytes of the layout's length");
    assert_eq!(parts.codes, matrix.codes);
    assert_eq!(parts.zeros, matrix.zeros.unwrap_or_default());
    match &matrix.whole {
        Some(whole) => {
            assert_eq!(bits(&parts.channels), bits(&matrix.scales));
            assert!(parts.scales.iter().zip(whole).all(|(s, w)| *s == f32::from(*w)));
        }
        None => assert_eq!(bits(&parts.scales), bits(&matrix.scales)),
    }
}

/// Checks that packed weights of arbitrary bytes never cause a panic and give the same result on all instruction sets;
/// products with float activations are not compared on instruction sets that split floats.
///
/// # Panics
/// If a property does not hold.
pub fn packed(data: &[u8]) {
    let mut input = Input::new(data);
    let matrix = Matrix::valid(&mut input);
    let Some(view) = matrix.view() else { return };
    let Ok(layout) = Layout::of(&view, input.flag()) else { return };
    let mut bytes = input.bytes(layout.bytes());
    let (n, k, m) = (layout.n(), layout.k(), input.below(20));
    let cut = input.below(bytes.len());
    assert!(PackedView::new(layout, layout.id(), &bytes[cut + 1..]).is_err());
    assert!(PackedView::new(layout, layout.id() ^ 1, &bytes).is_err());
    if input.flag() {
        bytes.rotate_left(cut);
    }
    let packed = PackedView::new(layout, layout.id(), &bytes).expect("bytes of this layout");
    let parts = layout.unpack(&bytes).expect("bytes of the layout's length");
    assert_eq!(parts.codes.len(), n * k);
    let rows_asked = input.below(n + 2)..input.below(n + 2);
    let mut floats = vec![0.0; rows_asked.len() * k];
    assert_eq!(
        packed.dequantize_rows(rows_asked.clone(), &mut floats).is_ok(),
        rows_asked.start <= rows_asked.end && rows_asked.end <= n
    );

    let x = input.floats(m * k);
    let by = static_scale(&mut input);
    let bias = input.flag().then(|| input.floats(n));
    let (mut whole, mut float) = (None, None);
    for isa in Isa::runnable() {
        let rows = rows(isa, by, &layout, &x);
        let token = isa.token().expect("an available instruction set");
        let mut out = vec![0.0; m * n];
        packed.multiply(token, &rows, bias.as_deref(), &mut out, &Serial).expect("matching shapes");
        assert_eq!(&bits(&out), whole.get_or_insert_with(|| bits(&out)), "{isa:?}");
        let mut rows = FloatRows::new(token);
        rows.pack(&x, RowLayout::of(&layout), &Serial).expect("whole rows");
        packed.multiply_float(&rows, bias.as_deref(), &mut out, &Serial).expect("matching shapes");
        if !isa.splits_floats() {
            assert_eq!(&bits(&out), float.get_or_insert_with(|| bits(&out)), "{isa:?} on floats");
        }
        let mut short = vec![0.0; input.below(m * n + 2)];
        let fits = short.len() == m * n;
        assert_eq!(packed.multiply_float(&rows, None, &mut short, &Serial).is_ok(), fits);
    }
}

/// Checks that dequantizing and multiplying packed weights gives the results of the reference.
///
/// # Panics
/// If a property does not hold.
pub fn round_trip(data: &[u8]) {
    let mut input = Input::new(data);
    let matrix = Matrix::valid(&mut input);
    let view = matrix.view().expect("consistent parts");
    let packed = PackedLinear::pack(&view, None, input.flag(), &Serial).expect("packable weights");
    let (n, k) = (view.n(), view.k());
    let mut floats = [vec![0.0; n * k], vec![0.0; n * k]];
    packed.view().dequantize_rows(0..n, &mut floats[0]).expect("matching shapes");
    reference::dequantize_rows(&view, 0..n, &mut floats[1]);
    assert_eq!(bits(&floats[0]), bits(&floats[1]));

    let m = input.size(20);
    let x = input.floats(m * k);
    let by = static_scale(&mut input);
    let bias = input.flag().then(|| input.floats(n));
    let plain = rows(Isa::Scalar, by, packed.layout(), &x);
    let expected = bits(&reference::int8_linear(&view, &plain, bias.as_deref()));
    for isa in Isa::runnable() {
        let rows = rows(isa, by, packed.layout(), &x);
        let mut out = vec![0.0; m * n];
        let token = isa.token().expect("an available instruction set");
        packed.view().multiply(token, &rows, bias.as_deref(), &mut out, &Serial).expect("matching shapes");
        assert_eq!(bits(&out), expected, "{isa:?}");
    }
}
