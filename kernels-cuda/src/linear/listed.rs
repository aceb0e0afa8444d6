//! The variants that the tests compile for the architectures.

use quant_kernels_cpu::{FloatFormat, ScaleType};

use super::scheme::{InputType, KernelScheme, Output};
use super::variant::{GateFunction, LinearVariant, PlanLimits};
use crate::compile::{GpuArchitecture, Variant};
use crate::layout::{Order, WeightLayout};
use crate::registry::Entry;

/// A selection of variants: one for every scheme, and more for common schemes.
pub fn variants() -> Vec<Entry> {
    let variants = listed(GpuArchitecture::Sm86, true);
    let mut entries: Vec<Entry> = variants.iter().map(LinearVariant::entry).collect();
    // Only these devices have so much shared memory.
    for variant in listed(GpuArchitecture::Sm90, false) {
        if !variants.contains(&variant) {
            entries.push(Entry { only_on: Some(GpuArchitecture::Sm90), ..variant.entry() });
        }
    }
    entries.extend(packing());
    entries
}

/// The variants for a typical device of an architecture, for all schemes or only the common ones.
pub fn listed(architecture: GpuArchitecture, all: bool) -> Vec<LinearVariant> {
    let device = PlanLimits::of(architecture);
    let mut variants = Vec::new();
    for (turn, (layout, activation, output, common)) in schemes().into_iter().enumerate() {
        let Ok(scheme) = KernelScheme::new(&layout, activation, output) else { continue };
        let tokens: &[usize] = match (common, all) {
            (true, true) => &[8, 16, 32, 64, 128, 4096],
            (true, false) => &[8, 16, 4096],
            (false, true) if turn % 2 == 0 => &[8],
            (false, true) => &[4096],
            (false, false) => &[],
        };
        for &m in tokens {
            // The first matrix has several chunks, the second has one.
            let shapes: &[[usize; 2]] =
                if common && !all { &[[4096, 4096], [57_344, 4096]] } else { &[[4096, 4096]] };
            for &shape in shapes {
                let variant = LinearVariant::choose(scheme, shape, m, &device);
                if !variants.contains(&variant) {
                    variants.push(variant);
                }
            }
        }
        // One row per expert, a few, and many, of 128 experts. The matrix of all schemes has four chunks, the other one
        // has one. Some are also compiled with a gate.
        let rows: &[usize] = match (common, all) {
            (true, _) => &[8, 128 * 8, 4096 * 8],
            (false, true) if turn % 2 == 0 => &[4096 * 8],
            (false, true) => &[8],
            (false, false) => &[],
        };
        let gates = [GateFunction::Silu, GateFunction::GeluTanh, GateFunction::Clamped];
        let has_gate = common || turn % 4 == 1;
        for (i, &rows) in rows.iter().enumerate() {
            let shape = if all { [768, 2048] } else { [2048, 768] };
            let gate = has_gate.then(|| gates[(turn + i) % gates.len()]);
            for gate in [None, gate] {
                let variant = LinearVariant::choose_experts(scheme, shape, [128, rows], gate, &device);
                if !variants.contains(&variant) {
                    variants.push(variant);
                }
            }
        }
    }
    variants
}

impl LinearVariant {
    pub(super) fn entry(&self) -> Entry {
        let product = if self.scheme.is_float() { "HMMA.16816.F32" } else { "IMMA.16832" };
        Entry {
            family: "linear",
            variant: self.compiled(),
            register_ceiling: self.shape.register_ceiling() as u32,
            spill_bytes: self.spill_bytes(),
            only_on: None,
            // Tensor cores, fragments of activations, copies to shared memory that bypass registers, and codes 16 bytes
            // at a time.
            instructions: vec![product, "LDSM.16.M88.4", "LDGSTS.E.BYPASS.128", "LDS.128"],
        }
    }
}

/// The packing kernels of some schemes.
fn packing() -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    for (layout, ..) in schemes() {
        for launch in layout.device_packing().unwrap_or_default() {
            let is_float = |variant: &Variant| !variant.defines.contains(&("CODES", "INTEGER".to_owned()));
            let kind = |variant: &Variant| (variant.kernel, is_float(variant));
            let same = |e: &Entry| kind(&e.variant) == kind(&launch.variant);
            if entries.iter().filter(|e| same(e)).count() < 6
                && !entries.iter().any(|e| e.variant == launch.variant)
            {
                entries.push(Entry {
                    family: "linear",
                    variant: launch.variant,
                    register_ceiling: 64,
                    spill_bytes: 0,
                    only_on: None,
                    instructions: vec!["STG.E"],
                });
            }
        }
    }
    entries
}

/// Whether a scheme is common is the last part.
fn schemes() -> Vec<(WeightLayout, InputType, Output, bool)> {
    let mut schemes = Vec::new();
    let k = 4096;
    for bits in [4, 8] {
        for group in [32, 64, 128, k] {
            for zeros in [false, true] {
                let zero_point = (!zeros).then_some(1 << (bits - 1));
                let mut add = |scale, order, sums, activation, output, common| {
                    let layout =
                        WeightLayout::from_parts([4096, k], bits, group, scale, zero_point, order, sums);
                    schemes.extend(layout.map(|layout| (layout, activation, output, common)));
                };
                let common = bits == 4 && group == 128;
                add(ScaleType::F16, Order::Float, false, InputType::F16, Output::F16, common);
                add(ScaleType::Bf16, Order::Float, false, InputType::Bf16, Output::Bf16, common);
                for zero in [false, true] {
                    let activation = InputType::Int8 { zero };
                    let common = group == k && !zeros && !zero;
                    add(ScaleType::F16, Order::Int8, zero, activation, Output::F16, common);
                    if bits == 4 && group < k {
                        let common = group == 128 && zeros && !zero;
                        add(ScaleType::Progressive, Order::Int8, zero, activation, Output::F16, common);
                    }
                }
            }
        }
    }
    for (format, group, scale) in [
        (FloatFormat::E2m1, 16, ScaleType::E4m3),
        (FloatFormat::E2m1, 32, ScaleType::E8m0),
        (FloatFormat::E4m3, 32, ScaleType::E8m0),
        (FloatFormat::E4m3, 128, ScaleType::Bf16),
        (FloatFormat::E4m3, k, ScaleType::F32),
    ] {
        let layout = WeightLayout::from_float_parts([4096, k], format, group, scale);
        for (activation, output) in [(InputType::F16, Output::F16), (InputType::Bf16, Output::Bf16)] {
            schemes.extend(layout.clone().map(|layout| (layout, activation, output, group == 16)));
        }
    }
    schemes
}
