//! Packing on the device gives the same bytes as on the CPU, and detects the values that the CPU rejects.

use quant_kernels_cpu::ScaleType;
use quant_kernels_cuda::layout::device::SOURCE;
use quant_kernels_cuda::layout::{Order, Section, WeightLayout};
use quant_ptx_interpreter::{Error, FaultKind};

use crate::cases::{Case, Kind};
use crate::machine::ready;
use crate::planted::changed;
use crate::support::machine::{Argument, Launch, Memory, Module, Options, ptx_of};

/// The sections as packed on the device, and whether the device detected a fault.
pub fn pack(case: &Case, layout: &WeightLayout) -> (Vec<Vec<u8>>, bool) {
    pack_by(case, layout, &[]).unwrap()
}

fn pack_by(case: &Case, layout: &WeightLayout, places: &[[&str; 2]]) -> Result<(Vec<Vec<u8>>, bool), Error> {
    let mut memory = Memory::new();
    let [n, k] = case.shape;
    let mut put = |name, bytes: &[u8]| if bytes.is_empty() { 0 } else { memory.buffer_from(name, bytes, 4) };
    let floats = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let codes = put("codes", &case.codes);
    let progressive = case.kind == Kind::Progressive;
    let progressive = progressive || case.kind == Kind::E4m3;
    let scales = if progressive { case.groups.clone() } else { floats(&case.scales) };
    let scales = put("scales", &scales);
    let channels = put("channels", &if progressive { floats(&case.scales) } else { Vec::new() });
    let zeros = put("zeros", case.zeros.as_deref().unwrap_or_default());
    let fault = put("fault", &[0; 4]);
    let ends = sections(layout);
    let targets: Vec<u64> = ends
        .iter()
        .enumerate()
        .map(
            |(i, &(_, bytes))| if bytes == 0 { 0 } else { memory.buffer(&format!("section {i}"), bytes, 16) },
        )
        .collect();
    let max = u32::from(u8::MAX >> (8 - case.bits));
    let sizes = |with_group: bool| {
        let zero_point = u32::from(layout.zero_point().unwrap_or(0));
        let group = with_group.then_some(case.group as u32);
        let sizes = [Some(n as u32), Some(k as u32), group, Some(zero_point), Some(max)];
        sizes.into_iter().flatten().map(Argument::U32)
    };
    for launch in layout.device_packing().unwrap() {
        let pointers: &[u64] = match launch.variant.kernel {
            "pack_codes" => &[codes, fault, targets[0]],
            "pack_parameters" => &[codes, scales, zeros, fault, targets[1]],
            _ => &[codes, scales, channels, zeros, fault, targets[2], targets[3], targets[4]],
        };
        let arguments = pointers.iter().map(|&p| Argument::U64(p));
        let arguments = arguments.chain(sizes(launch.variant.kernel != "pack_codes")).collect();
        let mut variant = launch.variant.clone();
        if !places.is_empty() {
            variant.source = changed(&SOURCE, places);
        }
        let module = Module::parse(&ptx_of(&variant)).unwrap();
        let (grid, block) = (launch.launch.grid, [launch.launch.block, 1, 1]);
        let run = Launch { grid, block, dynamic_shared: 0, arguments };
        module.launch(launch.variant.kernel, &run, &mut memory, &Options::default())?;
    }
    let written =
        targets.iter().map(|&t| if t == 0 { Vec::new() } else { memory.bytes(t).unwrap().to_vec() });
    Ok((written.collect(), memory.bytes(fault).unwrap()[0] != 0))
}

/// Packs with a changed source. Returns the interpreter's fault, or whether the bytes equal the CPU's and no value is
/// invalid.
pub fn outcome(case: &Case, order: Order, places: &[[&str; 2]]) -> Result<bool, (FaultKind, String)> {
    let layout = WeightLayout::of(&case.view(), order, order == Order::Int8).unwrap();
    let mut packed = vec![0; layout.bytes()];
    layout.pack(&case.view(), &mut packed).unwrap();
    match pack_by(case, &layout, places) {
        Ok((made, fault)) => {
            let is_same = |(made, (at, bytes)): (&Vec<u8>, (usize, usize))| made == &packed[at..at + bytes];
            Ok(!fault && made.iter().zip(sections(&layout)).all(is_same))
        }
        Err(Error::Fault(fault)) => Err((fault.kind, fault.buffer.unwrap_or_default())),
        Err(other) => panic!("{other}"),
    }
}

pub fn sections(layout: &WeightLayout) -> [(usize, usize); 5] {
    let tiles = layout.row_blocks() * layout.tiles();
    let rows = 16 * layout.row_blocks();
    let of_row = if layout.scales() == ScaleType::E4m3 { 8 } else { 4 };
    let there = |from, to: usize, bytes| {
        let from = layout.section(from);
        (from, if to > from { bytes } else { 0 })
    };
    let begin = |s| layout.section(s);
    [
        there(Section::Codes, begin(Section::Parameters), tiles * layout.tile_bytes()),
        there(Section::Parameters, begin(Section::RowScales), tiles * layout.parameter_bytes()),
        there(Section::RowScales, begin(Section::RowZeros), of_row * rows),
        there(Section::RowZeros, begin(Section::RowSums), rows),
        there(Section::RowSums, layout.bytes(), 4 * rows),
    ]
}

#[test]
fn bytes_are_those_of_the_cpu() {
    if !ready() {
        return;
    }
    let mut seed = 70;
    for (bits, group, kind, order) in [
        (4, 32, Kind::F16, Order::Float),
        (4, 128, Kind::Bf16, Order::Float),
        (8, 64, Kind::F32, Order::Float),
        (4, 320, Kind::F16, Order::Float),
        (3, 64, Kind::F16, Order::Int8),
        (8, 32, Kind::Bf16, Order::Int8),
        (8, 320, Kind::F32, Order::Int8),
        (4, 320, Kind::F32, Order::Int8),
        (4, 64, Kind::Progressive, Order::Int8),
    ] {
        for zeros in [false, true] {
            for sums in [false, true] {
                if sums && order == Order::Float {
                    continue;
                }
                seed += 1;
                let k = if group == 128 { 384 } else { 320 };
                let case = Case::new([37, k], bits, group, kind, zeros, seed);
                let view = case.view();
                let layout = WeightLayout::of(&view, order, sums).unwrap();
                let mut packed = vec![0; layout.bytes()];
                layout.pack(&view, &mut packed).unwrap();
                let (made, fault) = pack(&case, &layout);
                assert!(!fault);
                for (made, (at, bytes)) in made.iter().zip(sections(&layout)) {
                    assert!(
                        made == &packed[at..at + bytes],
                        "{bits} bits, {group}, {kind:?}, {zeros}, {sums}"
                    );
                }
            }
        }
    }
}

#[test]
fn faults_are_found() {
    if !ready() {
        return;
    }
    let good = Case::new([5, 128], 4, 32, Kind::F16, true, 3);
    let float = WeightLayout::of(&good.view(), Order::Float, false).unwrap();
    for bad in [0, 1] {
        let mut case = good.clone();
        match bad {
            0 => case.codes[77] = 16,
            _ => case.zeros.as_mut().unwrap()[5] = 16,
        }
        assert!(pack(&case, &float).1);
    }
    let mut case = Case::new([5, 128], 4, 64, Kind::Progressive, true, 3);
    let layout = WeightLayout::of(&case.view(), Order::Int8, false).unwrap();
    (case.groups[3], case.zeros.as_mut().unwrap()[3]) = (16, 7);
    case.codes[192..256].fill(14);
    assert!(!pack(&case, &layout).1);
    case.codes[200] = 15;
    assert!(pack(&case, &layout).1);
    // (0 − 15) · 8 = −120 fits eight signed bits, and (0 − 15) · 9 = −135 does not.
    (case.groups[3], case.zeros.as_mut().unwrap()[3]) = (8, 15);
    case.codes[192..256].fill(0);
    assert!(!pack(&case, &layout).1);
    case.groups[3] = 9;
    assert!(pack(&case, &layout).1);
    // An invalid zero point of a row that is one group.
    let mut case = Case::new([5, 128], 4, 128, Kind::F32, true, 3);
    let layout = WeightLayout::of(&case.view(), Order::Float, false).unwrap();
    assert!(layout.row_is_group() && !pack(&case, &layout).1);
    case.zeros.as_mut().unwrap()[2] = 16;
    assert!(pack(&case, &layout).1);
    // Scales that f16 cannot represent: one too large, one with too many bits.
    for scale in [1e6, 1.0 + 1.0 / 4096.0] {
        let mut case = good.clone();
        case.scales[1] = scale;
        assert!(pack(&case, &float).1, "{scale}");
    }
}

#[test]
fn zero_points_that_do_not_fit_are_found() {
    if !ready() {
        return;
    }
    let of = |zero_point| {
        WeightLayout::from_parts([16, 256], 4, 128, ScaleType::F16, Some(zero_point), Order::Int8, false)
    };
    assert!(of(9).is_err() && of(15).is_err());
    // Codes of 3 bits always fit; codes of 4 bits may not.
    let mut case = Case::new([16, 256], 3, 128, Kind::F16, false, 3);
    assert!(!pack(&case, &of(4).unwrap()).1);
    case.bits = 4;
    case.codes[9] = 12;
    assert!(pack(&case, &of(4).unwrap()).1);
    assert!(!pack(&case, &of(8).unwrap()).1);
}
