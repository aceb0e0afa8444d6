//! Packed weights for GPUs match the plain definition, for every scheme and for ragged shapes; invalid weights are
//! rejected.

mod cases;

use cases::{Case, Kind};
use quant_kernels_cpu::{FloatFormat, KernelError, ScaleType, Unpacked};
use quant_kernels_cuda::layout::{Order, Section, WeightLayout};

fn all() -> Vec<(Case, Order, bool)> {
    let mut all = Vec::new();
    let mut seed = 1;
    for bits in [2, 3, 4, 5, 8] {
        for order in [Order::Float, Order::Int8] {
            for zeros in [false, true] {
                for sums in [false, true] {
                    if sums && order == Order::Float {
                        continue;
                    }
                    for (n, k, group) in [
                        (16, 128, 32),
                        (5, 96, 32),
                        (33, 192, 64),
                        (40, 384, 128),
                        (17, 100, 100),
                        (1, 640, 640),
                    ] {
                        for kind in [Kind::F16, Kind::Bf16, Kind::F32] {
                            seed += 1;
                            all.push((Case::new([n, k], bits, group, kind, zeros, seed), order, sums));
                        }
                    }
                    if order == Order::Float {
                        all.push((Case::new([20, 768], bits, 256, Kind::F16, zeros, seed), order, sums));
                    }
                }
            }
        }
    }
    for sums in [false, true] {
        for zeros in [false, true] {
            for (n, k, group) in [(16, 128, 128), (5, 96, 32), (33, 192, 64), (40, 768, 256), (17, 128, 128)]
            {
                seed += 1;
                all.push((Case::new([n, k], 4, group, Kind::Progressive, zeros, seed), Order::Int8, sums));
            }
        }
    }
    all
}

#[test]
fn unpacking_gives_back_what_was_packed() {
    let mut all = all();
    for (format, group, kind) in [
        (FloatFormat::E2m1, 16, Kind::E4m3),
        (FloatFormat::E2m1, 32, Kind::E8m0),
        (FloatFormat::E2m1, 768, Kind::E4m3),
        (FloatFormat::E4m3, 32, Kind::E8m0),
        (FloatFormat::E4m3, 128, Kind::Bf16),
        (FloatFormat::E4m3, 256, Kind::F16),
        (FloatFormat::E4m3, 768, Kind::F32),
        (FloatFormat::E4m3, 768, Kind::E8m0),
    ] {
        for n in [16, 5, 33] {
            let case = Case::float([n, 768], format, group, kind, (n + group) as u64);
            all.push((case, Order::Float, false));
        }
    }
    assert!(all.len() > 300, "{}", all.len());
    for (case, order, sums) in all {
        let view = case.view();
        let layout = WeightLayout::of(&view, order, sums).unwrap();
        let mut packed = vec![0xff; layout.bytes()];
        layout.pack(&view, &mut packed).unwrap();
        let scales = match case.kind {
            Kind::Progressive => case.groups.iter().map(|&g| f32::from(g)).collect(),
            Kind::E4m3 => case.groups.iter().map(|&g| FloatFormat::E4m3.value(g)).collect(),
            _ => case.scales.clone(),
        };
        let channels = match case.kind {
            Kind::Progressive => case.scales.clone(),
            Kind::E4m3 => vec![case.scales[0]; case.shape[0]],
            _ => Vec::new(),
        };
        let zeros = case.zeros.clone().unwrap_or_default();
        let codes = case.codes.clone();
        let expected = Unpacked { codes, scales, zeros, channels, ..Unpacked::default() };
        assert_eq!(layout.unpack(&packed).unwrap(), expected, "{case:?} {order:?}");
    }
}

/// The sections of a small matrix, derived from the documentation independently of the packer.
#[test]
fn bytes_are_where_the_documentation_says() {
    let case = Case::new([32, 256], 4, 64, Kind::F16, true, 7);
    let view = case.view();
    let layout = WeightLayout::of(&view, Order::Float, false).unwrap();
    let mut packed = vec![0; layout.bytes()];
    layout.pack(&view, &mut packed).unwrap();
    assert_eq!(layout.section(Section::Parameters), 4 * 1024);
    // Two groups per tile: scales of 32 bytes and zero points of 8 bytes each.
    assert_eq!((layout.parameter_bytes(), layout.bytes()), (80, 4 * 1024 + 512));
    for row in 0..32 {
        for k in 0..256 {
            let tile = row / 16 * 2 + k / 128;
            let (r, f) = (row % 16, k % 128);
            let (lane, word) = (r % 8 * 4 + f % 8 / 2, f / 16);
            let at = tile * 1024 + word / 4 * 512 + lane * 16 + word % 4 * 4;
            let stored = u32::from_le_bytes(packed[at..at + 4].try_into().unwrap()).rotate_right(2);
            let field = r / 8 + 2 * (f % 16 / 8);
            assert_eq!((stored >> (16 * (f % 2) + 4 * field)) as u8 & 15, case.codes[row * 256 + k]);
        }
        for g in 0..4 {
            let block = layout.section(Section::Parameters) + (row / 16 * 2 + g / 2) * 80;
            let (r, slot) = (row % 16, g % 2);
            let at = block + slot * 32 + 2 * (2 * (r % 8) + r / 8);
            let scale = half::f16::from_le_bytes([packed[at], packed[at + 1]]).to_f32();
            assert_eq!(scale, case.scales[row * 4 + g]);
            let zero = packed[block + 64 + slot * 8 + r % 8] >> (4 * (r / 8)) & 15;
            assert_eq!(zero, case.zeros.as_ref().unwrap()[row * 4 + g]);
        }
    }
}

#[test]
fn sums_are_those_of_codes_less_zeros() {
    for (kind, group) in [(Kind::F16, 128), (Kind::F32, 256), (Kind::Progressive, 64)] {
        let case = Case::new([20, 256], 4, group, kind, true, 11);
        let view = case.view();
        let layout = WeightLayout::of(&view, Order::Int8, true).unwrap();
        let mut packed = vec![0; layout.bytes()];
        layout.pack(&view, &mut packed).unwrap();
        let i32_at = |at: usize| i32::from_le_bytes(packed[at..at + 4].try_into().unwrap());
        for row in 0..20 {
            let sum = |g: usize| -> i32 {
                let codes = &case.codes[row * 256 + g * group..row * 256 + (g + 1) * group];
                codes.iter().map(|&q| i32::from(q) - i32::from(view.zero(row, g))).sum()
            };
            if kind == Kind::F16 {
                for g in 0..2 {
                    let block =
                        layout.section(Section::Parameters) + (row / 16 * 2 + g) * layout.parameter_bytes();
                    let place = 2 * (row % 8) + row % 16 / 8;
                    assert_eq!(i32_at(block + 32 + 8 + 4 * place), sum(g));
                }
            } else {
                let whole = |g: usize| {
                    if kind == Kind::Progressive { i32::from(case.groups[row * 4 + g]) } else { 1 }
                };
                let expected: i32 = (0..256 / group).map(|g| sum(g) * whole(g)).sum();
                assert_eq!(i32_at(layout.section(Section::RowSums) + 4 * row), expected);
            }
        }
    }
}

#[test]
fn misfits_are_reported() {
    let case = Case::new([16, 128], 4, 32, Kind::F16, true, 3);
    let layout = WeightLayout::of(&case.view(), Order::Float, false).unwrap();
    let mut packed = vec![0; layout.bytes()];
    let other = Case::new([16, 128], 4, 64, Kind::F16, true, 3);
    assert!(matches!(layout.pack(&other.view(), &mut packed), Err(KernelError::Scheme(_))));
    assert!(matches!(layout.pack(&case.view(), &mut packed[1..]), Err(KernelError::Length { .. })));
    assert!(matches!(layout.unpack(&packed[1..]), Err(KernelError::Length { .. })));
    for above in [0, 1] {
        let mut case = case.clone();
        match above {
            0 => case.codes[77] = 16,
            _ => case.zeros.as_mut().unwrap()[5] = 16,
        }
        let refused = Err(KernelError::Scheme("a code or zero point exceeds the bits of the weight"));
        assert_eq!(layout.pack(&case.view(), &mut packed), refused);
    }
    // 128 does not fit a signed byte: `128 + (q − z) s` in the kernels would be 256.
    let mut case = Case::new([16, 128], 4, 128, Kind::Progressive, true, 3);
    let layout = WeightLayout::of(&case.view(), Order::Int8, false).unwrap();
    let mut packed = vec![0; layout.bytes()];
    (case.groups[0], case.zeros.as_mut().unwrap()[0]) = (16, 7);
    case.codes[..128].fill(14);
    assert!(layout.pack(&case.view(), &mut packed).is_ok());
    case.codes[9] = 15;
    let refused = Err(KernelError::Scheme("a progressive weight exceeds 8 bits"));
    assert_eq!(layout.pack(&case.view(), &mut packed), refused);
}

#[test]
fn an_id_is_of_one_layout_alone() {
    let mut ids = std::collections::HashMap::new();
    for n in [16, 17] {
        for k in [128, 256] {
            for bits in [4, 8] {
                for scales in [ScaleType::F16, ScaleType::Bf16, ScaleType::F32] {
                    for zero_point in [None, Some(8)] {
                        for (order, sums) in
                            [(Order::Float, false), (Order::Int8, false), (Order::Int8, true)]
                        {
                            let layout =
                                WeightLayout::from_parts([n, k], bits, 128, scales, zero_point, order, sums);
                            let layout = layout.unwrap();
                            assert_eq!(ids.insert(layout.id(), layout), None);
                            let cpu = quant_kernels_cpu::Layout::from_parts(
                                [n, k],
                                bits,
                                128,
                                scales,
                                zero_point,
                                sums,
                            );
                            assert_ne!(cpu.unwrap().id(), layout.id());
                        }
                    }
                }
            }
        }
    }
}
