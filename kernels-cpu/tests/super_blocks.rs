//! Super-blocks, as in GGUF's K types: every instruction set is compared with the definition.

mod common;

use common::{Backwards, Stream, Threads};
use half::f16;
use proptest::prelude::*;
use quant_kernels_cpu::{
    FloatFormat, FloatRows, Int8Rows, Isa, IsaToken, KernelError, Layout, PackedLinear, PackedView, Parallel,
    RowLayout, SUPER_BLOCK, ScaleType, Scales, Serial, StaticScale, SuperMins, SuperScales, ViewError,
    WeightView, dequantize_rows, reference,
};

/// IQ4 among the bits of codes.
const IQ4: u8 = 0x84;
/// Bits of codes and group sizes: those of Q4_K, Q5_K, Q6_K and IQ4_XS, and others that the same kernels support.
const WIDTHS: [(u8, usize); 10] =
    [(4, 32), (5, 32), (6, 16), (IQ4, 32), (4, 8), (4, 256), (5, 128), (6, 64), (2, 16), (IQ4, 8)];

#[derive(Debug, Clone)]
struct Case {
    /// Rows, output features, super-blocks.
    shape: [usize; 3],
    bits: u8,
    group_size: usize,
    codes: Vec<u8>,
    groups: Vec<i8>,
    blocks: Vec<f16>,
    min_groups: Vec<u8>,
    min_blocks: Vec<f16>,
    bias: Option<Vec<f32>>,
    x: Vec<f32>,
}

impl Case {
    fn new(shape: [usize; 3], (bits, group_size): (u8, usize), bias: bool, seed: u64) -> Self {
        let mut s = Stream(seed);
        let [m, n, blocks] = shape;
        let k = blocks * SUPER_BLOCK;
        let top = (1_u64 << (bits & 0x0f)) - 1;
        // Only extreme codes, scales, minima and activations.
        let extreme = s.below(4) == 0;
        let codes = (0..n * k).map(|_| if extreme { s.below(2) * top } else { s.below(top + 1) } as u8);
        let codes = codes.collect();
        let scale = |s: &mut Stream| match (extreme, bits) {
            (false, 6 | IQ4) => s.below(256) as u8 as i8,
            (false, _) => s.below(64) as i8,
            (true, _) => [i8::MIN, i8::MAX][s.below(2) as usize],
        };
        let groups = (0..n * k / group_size).map(|_| scale(&mut s)).collect();
        let mins = (0..n * k / group_size).map(|_| if extreme { 255 } else { s.below(64) as u8 }).collect();
        // Subnormal, zero, negative and positive values.
        let float = |s: &mut Stream, i: usize| match i % 5 {
            0 => f16::from_bits(1 + s.below(1000) as u16),
            1 if i.is_multiple_of(2) => f16::ZERO,
            2 => f16::from_f32(-s.float()),
            _ => f16::from_f32(s.float()),
        };
        let of_blocks = (0..n * blocks).map(|i| float(&mut s, i)).collect();
        let min_blocks = (0..n * blocks).map(|i| float(&mut s, i + 1)).collect();
        let bias = bias.then(|| (0..n).map(|_| s.float()).collect());
        let mut x: Vec<f32> =
            (0..m * k).map(|_| if extreme { [1.0, -1.0][s.below(2) as usize] } else { s.float() }).collect();
        if extreme {
            x[..k].fill(-1.0);
        }
        let (blocks, min_groups) = (of_blocks, mins);
        Self { shape, bits, group_size, codes, groups, blocks, min_groups, min_blocks, bias, x }
    }

    fn mins(&self) -> Option<SuperMins<'_>> {
        (!matches!(self.bits, 6 | IQ4))
            .then_some(SuperMins { groups: &self.min_groups, blocks: &self.min_blocks })
    }

    fn view(&self) -> WeightView<'_> {
        let [_, n, blocks] = self.shape;
        let scales = SuperScales { groups: &self.groups, blocks: &self.blocks, mins: self.mins() };
        let (shape, scales) = ([n, blocks * SUPER_BLOCK], Scales::Super(scales));
        let view = match self.bits {
            IQ4 => {
                WeightView::float_with_scales(shape, FloatFormat::Iq4, self.group_size, &self.codes, scales)
            }
            bits => WeightView::with_scales(shape, bits, self.group_size, &self.codes, scales, None),
        };
        view.unwrap()
    }

    fn pack(&self) -> PackedLinear {
        PackedLinear::pack(&self.view(), None, false, &Backwards).unwrap()
    }

    fn rows(&self, token: IsaToken, layout: &Layout, fixed: Option<StaticScale>) -> Int8Rows {
        let mut rows = Int8Rows::new(token);
        match fixed {
            Some(fixed) => rows.quantize_static(&self.x, RowLayout::of(layout), fixed, &Backwards),
            None => rows.quantize(&self.x, RowLayout::of(layout), &Backwards),
        }
        .unwrap();
        rows
    }

    fn check(&self) {
        let (view, packed) = (self.view(), self.pack());
        for fixed in [None, Some(StaticScale { scale: 0.004, zero: 0 })] {
            let rows = self.rows(IsaToken::detect(), packed.layout(), fixed);
            let expected = bits(&reference::int8_linear(&view, &rows, self.bias.as_deref()));
            for isa in Isa::runnable() {
                let token = isa.token().unwrap();
                let rows = self.rows(token, packed.layout(), fixed);
                for parallel in [&Serial as &dyn Parallel, &Backwards] {
                    let mut out = vec![f32::NAN; expected.len()];
                    packed.view().multiply(token, &rows, self.bias.as_deref(), &mut out, parallel).unwrap();
                    assert_eq!(bits(&out), expected, "{isa:?} {:?} {} bits", self.shape, self.bits);
                }
            }
        }
    }

    /// The paths with tiles do not split the activations of super-blocks.
    fn check_float(&self) {
        let (view, packed) = (self.view(), self.pack());
        let expected = reference::float_linear(&view, &self.x, self.bias.as_deref());
        let mut first: Option<Vec<u32>> = None;
        for isa in Isa::runnable() {
            let mut rows = FloatRows::new(isa.token().unwrap());
            rows.pack(&self.x, RowLayout::of(packed.layout()), &Backwards).unwrap();
            let mut out = vec![f32::NAN; expected.len()];
            packed.view().multiply_float(&rows, self.bias.as_deref(), &mut out, &Backwards).unwrap();
            for (got, (exact, magnitude)) in out.iter().zip(&expected) {
                let k = view.k() as f64;
                let bound = (2.0_f64.powi(-16) + (k + 4.0) * 2.0_f64.powi(-23)) * magnitude;
                let off = (f64::from(*got) - exact).abs();
                assert!(off <= bound + 1e-30, "{isa:?}: {got}, not {exact}: {off:e} of {bound:e}");
            }
            if isa != Isa::Avx512Bf16 {
                let bits = bits(&out);
                assert!(first.get_or_insert_with(|| bits.clone()) == &bits, "{isa:?} on floats");
            }
        }
    }
}

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|x| x.to_bits()).collect()
}

fn cases() -> impl Strategy<Value = Case> {
    let shape = (prop_oneof![1usize..6, 1usize..40], 1usize..100, 1usize..4);
    (shape, 0..WIDTHS.len(), any::<bool>(), any::<u64>()).prop_map(|((m, n, blocks), widths, bias, seed)| {
        Case::new([m, n, blocks], WIDTHS[widths], bias, seed)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn all_instruction_sets_equal_the_definition(case in cases()) {
        case.check();
    }

    #[test]
    fn floats_are_within_their_bound(case in cases()) {
        case.check_float();
    }

    #[test]
    fn packing_keeps_everything(case in cases(), cut in 0usize..8) {
        let (view, whole) = (case.view(), case.pack());
        let layout = Layout::of(&view, false).unwrap();
        let mut bytes = vec![0xa5; layout.bytes()];
        let cut = cut.min(layout.panels());
        let (left, right) = bytes.split_at_mut(cut * layout.panel_bytes());
        layout.pack(&view, 0..cut, left).unwrap();
        layout.pack(&view, cut..layout.panels(), right).unwrap();
        prop_assert_eq!(whole.view().bytes(), &bytes[..]);
        whole.view().check().unwrap();
        let parts = layout.unpack(&bytes).unwrap();
        let floats = |halves: &[f16]| halves.iter().map(|v| v.to_f32()).collect::<Vec<_>>();
        prop_assert_eq!(parts.codes, case.codes.clone());
        prop_assert_eq!(parts.scales, case.groups.iter().map(|&s| f32::from(s)).collect::<Vec<_>>());
        prop_assert_eq!(parts.channels, floats(&case.blocks));
        let mins = case.mins();
        prop_assert_eq!(parts.zeros, mins.map_or(Vec::new(), |mins| mins.groups.to_vec()));
        prop_assert_eq!(parts.block_mins, mins.map_or(Vec::new(), |mins| floats(mins.blocks)));
        let mut out = [(); 3].map(|()| vec![f32::NAN; view.n() * view.k()]);
        whole.view().dequantize_rows(0..view.n(), &mut out[0]).unwrap();
        reference::dequantize_rows(&view, 0..view.n(), &mut out[1]);
        dequantize_rows(&view, 0..view.n(), &mut out[2]).unwrap();
        prop_assert_eq!(bits(&out[0]), bits(&out[1]));
        prop_assert_eq!(bits(&out[0]), bits(&out[2]));
    }
}

#[test]
fn large_shapes_do_not_depend_on_the_split() {
    let shapes = [[1, 3000, 2], [70, 520, 4], [300, 200, 3], [90, 310, 3]];
    for (shape, widths) in shapes.into_iter().zip([(4, 32), (6, 16), (5, 32), (IQ4, 32)]) {
        let case = Case::new(shape, widths, true, 7);
        let packed = case.pack();
        let rows = case.rows(IsaToken::detect(), packed.layout(), None);
        let expected = bits(&reference::int8_linear(&case.view(), &rows, case.bias.as_deref()));
        for parallel in [&Serial as &dyn Parallel, &Backwards, &Threads(2), &Threads(3)] {
            let mut out = vec![f32::NAN; expected.len()];
            let token = IsaToken::detect();
            packed.view().multiply(token, &rows, case.bias.as_deref(), &mut out, parallel).unwrap();
            assert!(bits(&out) == expected, "{shape:?}");
        }
    }
}

#[test]
fn rows_are_the_same_in_every_batch() {
    for widths in [(4, 32), (5, 32), (6, 16), (IQ4, 32)] {
        let case = Case::new([40, 83, 3], widths, false, 9);
        let (packed, k) = (case.pack(), 3 * SUPER_BLOCK);
        for isa in Isa::runnable() {
            let token = isa.token().unwrap();
            let whole = |x: &[f32]| {
                let mut rows = Int8Rows::new(token);
                rows.quantize(x, RowLayout::of(packed.layout()), &Serial).unwrap();
                let mut out = vec![f32::NAN; x.len() / k * 83];
                packed.view().multiply(token, &rows, None, &mut out, &Serial).unwrap();
                bits(&out)
            };
            let float = |x: &[f32]| {
                let mut rows = FloatRows::new(token);
                rows.pack(x, RowLayout::of(packed.layout()), &Serial).unwrap();
                let mut out = vec![f32::NAN; x.len() / k * 83];
                packed.view().multiply_float(&rows, None, &mut out, &Backwards).unwrap();
                bits(&out)
            };
            for product in [&whole as &dyn Fn(&[f32]) -> Vec<u32>, &float] {
                let each: Vec<u32> = case.x.chunks_exact(k).flat_map(product).collect();
                for m in 1..=40 {
                    let first = 40 - m;
                    assert!(product(&case.x[first * k..]) == each[first * 83..], "{isa:?}, {m} rows");
                }
            }
        }
    }
}

#[test]
fn packed_weights_are_in_their_order() {
    let golden: [(u8, usize, u64, u64); 3] = [
        (4, 32, 0x4c2d8a9d6cb1f3a0, 0x552ac6a54cece2c9),
        (5, 32, 0xf560f3ba62796941, 0xfe79c32c1b61c5bc),
        (6, 16, 0x4df8d36f8f33869d, 0x3b2427fd8e4adf96),
    ];
    let hash = |bytes: &[u8]| {
        bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
        })
    };
    let mut bad = Vec::new();
    for (width, group_size, id, bytes) in golden {
        let (n, k) = (19, 2 * SUPER_BLOCK);
        let of = |count: usize, by: usize, top: usize| (0..count).map(move |i| (i * by + i / 7) % top);
        let groups = n * k / group_size;
        let codes: Vec<u8> = of(n * k, 5, 1 << width).map(|v| v as u8).collect();
        let scales: Vec<i8> = of(groups, 11, 64).map(|v| v as i8).collect();
        let mins: Vec<u8> = of(groups, 13, 64).map(|v| v as u8).collect();
        let floats = |by| of(2 * n, by, 50).map(|v| f16::from_f32(v as f32 / 64.0)).collect::<Vec<_>>();
        let (blocks, min_blocks) = (floats(3), floats(7));
        let mins = SuperMins { groups: &mins, blocks: &min_blocks };
        let scales = SuperScales { groups: &scales, blocks: &blocks, mins: (width != 6).then_some(mins) };
        let scales = Scales::Super(scales);
        let view = WeightView::with_scales([n, k], width, group_size, &codes, scales, None).unwrap();
        let packed = PackedLinear::pack(&view, None, false, &Serial).unwrap();
        let got = (packed.layout().id(), hash(packed.view().bytes()));
        if got != (id, bytes) {
            bad.push(format!("({width}, {group_size}, {:#018x}, {:#018x}),", got.0, got.1));
        }
    }
    assert!(bad.is_empty(), "packed otherwise:\n{}", bad.join("\n"));
}

/// Bits per packed weight. In GGUF files they are 4.5, 5.5 and 6.5625.
#[test]
fn packed_weights_are_small() {
    let of = |code_bits, group_size, scales, zero_point| {
        let layout = Layout::from_parts([256, 4096], code_bits, group_size, scales, Some(zero_point), false);
        layout.unwrap().bits_per_weight()
    };
    let sizes = [
        of(4, 32, ScaleType::SuperMins, 0),
        of(5, 32, ScaleType::SuperMins, 0),
        of(6, 16, ScaleType::Super, 32),
    ];
    assert_eq!(sizes, [4.625, 5.625, 6.5625]);
    // IQ4_XS and IQ4_NL: 4.25 and 4.5 in a file.
    let of = |scales| {
        let layout = Layout::from_float_parts([256, 4096], FloatFormat::Iq4, 32, scales).unwrap();
        layout.bits_per_weight()
    };
    assert_eq!([ScaleType::Super, ScaleType::F16].map(of), [4.3125, 4.5]);
}

#[test]
fn misuse_is_an_error() {
    let case = Case::new([2, 3, 1], (4, 32), false, 1);
    let mins = case.mins();
    let scales = SuperScales { groups: &case.groups, blocks: &case.blocks, mins };
    let view = |shape, bits, size, scales, zeros| {
        WeightView::with_scales(shape, bits, size, &case.codes, Scales::Super(scales), zeros).unwrap_err()
    };
    let shape = [3, SUPER_BLOCK];
    for (bits, size) in [(7, 16), (8, 32), (5, 16), (6, 8), (4, 24), (4, 4), (6, 16)] {
        assert_eq!(
            view(shape, bits, size, scales, None),
            match 256 % size {
                0 => ViewError::Scales,
                _ => ViewError::GroupSize { group_size: size, k: 256 },
            }
        );
    }
    assert_eq!(view(shape, 4, 32, SuperScales { mins: None, ..scales }, None), ViewError::Scales);
    assert_eq!(view(shape, 4, 32, scales, Some(&[0; 24])), ViewError::Scales);
    let short = view([6, 128], 4, 32, scales, None);
    assert_eq!(short, ViewError::SuperBlocks { k: 128 });
    assert_eq!(
        short.to_string(),
        "super-blocks require a number of input features that is a multiple of 256, got 128"
    );
    let length = |what, expected, got| ViewError::Length { what, expected, got };
    let short = SuperScales { groups: &case.groups[1..], ..scales };
    assert_eq!(view(shape, 4, 32, short, None), length("group scales", 24, 23));
    let short = SuperScales { blocks: &case.blocks[1..], ..scales };
    assert_eq!(view(shape, 4, 32, short, None), length("super-block scales", 3, 2));
    let short = SuperScales { mins: mins.map(|m| SuperMins { groups: &m.groups[1..], ..m }), ..scales };
    assert_eq!(view(shape, 4, 32, short, None), length("group minima", 24, 23));
    let short = SuperScales { mins: mins.map(|m| SuperMins { blocks: &m.blocks[1..], ..m }), ..scales };
    assert_eq!(view(shape, 4, 32, short, None), length("super-block minima", 3, 2));
    let floats = |format, scales| {
        WeightView::float_with_scales(shape, format, 32, &case.codes, scales).map(|_| ()).unwrap_err()
    };
    assert_eq!(floats(FloatFormat::E2m1, Scales::Super(scales)), ViewError::Scales);
    assert_eq!(floats(FloatFormat::Iq4, Scales::Super(scales)), ViewError::Scales);
    let nvfp4 = Scales::E4m3 { groups: &[1; 24], global: 1.0 };
    assert_eq!(floats(FloatFormat::Iq4, nvfp4), ViewError::Scales);
    for (format, scales) in [
        (FloatFormat::Iq4, ScaleType::SuperMins),
        (FloatFormat::Iq4, ScaleType::E8m0),
        (FloatFormat::Iq4, ScaleType::E4m3),
        (FloatFormat::E2m1, ScaleType::Super),
    ] {
        let error = Layout::from_float_parts([16, 256], format, 32, scales).unwrap_err();
        assert_eq!(error.code(), 3, "{format:?} {scales:?}");
    }
    assert_eq!(Layout::of(&case.view(), true).unwrap_err().code(), 3);
    let parts = |k, bits, size, scales, zero| Layout::from_parts([16, k], bits, size, scales, zero, false);
    for (k, bits, size, scales, zero) in [
        (256, 8, 32, ScaleType::SuperMins, Some(0)),
        (256, 6, 16, ScaleType::SuperMins, Some(0)),
        (256, 4, 32, ScaleType::Super, Some(8)),
        (256, 4, 32, ScaleType::SuperMins, Some(8)),
        (256, 6, 16, ScaleType::Super, Some(0)),
        (256, 6, 16, ScaleType::Super, None),
        (128, 4, 32, ScaleType::SuperMins, Some(0)),
        (256, 5, 32, ScaleType::F16, Some(16)),
    ] {
        assert_eq!(parts(k, bits, size, scales, zero).unwrap_err().code(), 3, "{bits} {size} {scales:?}");
    }
    let mut broken = case.clone();
    broken.codes[5] = 16;
    let error = PackedLinear::pack(&broken.view(), None, false, &Serial).unwrap_err();
    assert_eq!(error, KernelError::Scheme("a code or zero point exceeds the bits of the weight"));
    let packed = case.pack();
    let fixed = StaticScale { scale: 0.1, zero: 3 };
    let rows = case.rows(IsaToken::detect(), packed.layout(), Some(fixed));
    assert_eq!(packed.multiply(&rows, &mut [0.0; 6], &Serial).unwrap_err().code(), 3);
    let other = WeightView::new(shape, 4, 32, &case.codes, &[1.0; 24], None).unwrap();
    let rows = case.rows(IsaToken::detect(), &Layout::of(&other, false).unwrap(), None);
    assert_eq!(packed.multiply(&rows, &mut [0.0; 6], &Serial).unwrap_err().code(), 4);
    // In this layout every byte value is valid, so the check accepts any bytes.
    let layout = *packed.layout();
    let bytes = vec![0xff; layout.bytes()];
    PackedView::new(layout, layout.id(), &bytes).unwrap().check().unwrap();
}
