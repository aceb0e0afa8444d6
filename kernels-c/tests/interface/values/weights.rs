//! Layouts, packed bytes, and unpacking.

use core::ptr::{null, null_mut};

use quant_kernels::*;
use quant_kernels_cpu::{FloatFormat, Layout, PackedLinear, ScaleType, Scales, Serial, WeightView};

use crate::common::*;

/// Weights for both interfaces.
pub(super) struct Weights {
    pub(super) shape: [usize; 2],
    bits: u8,
    group_size: usize,
    codes: Vec<u8>,
    scales: Vec<f32>,
    /// The lower of two levels of scales.
    groups: Option<Vec<u8>>,
    zeros: Option<Vec<u8>>,
    sums: bool,
    pub(super) float: Option<FloatFormat>,
}

impl Weights {
    pub(super) fn new(bits: u8, group_size: usize, progressive: bool, zeros: bool, sums: bool) -> Self {
        let shape @ [n, k] = [37, 96];
        let (groups, below) = (n * k / group_size, 1_usize << bits);
        let code = |i: usize| (i * 7 % below) as u8;
        Self {
            shape,
            bits,
            group_size,
            codes: (0..n * k).map(code).collect(),
            scales: noise(if progressive { n } else { groups }, 29).iter().map(|s| s / 50.0).collect(),
            // Small enough that products with codes fit 8 bits.
            groups: progressive.then(|| (0..groups).map(|i| (i % 9) as u8).collect()),
            zeros: zeros.then(|| (0..groups).map(|i| code(i * 3)).collect()),
            sums,
            float: None,
        }
    }

    fn floats(format: FloatFormat, group_size: usize, e4m3: bool) -> Self {
        let integers = Self::new(format.bits(), group_size, false, false, false);
        let [n, k] = integers.shape;
        let code = |i: usize| (i * 37 % (1 << format.bits())) as u8;
        Self {
            codes: (0..n * k).map(code).map(|c| if format.is_number(c) { c } else { 1 }).collect(),
            scales: if e4m3 { vec![2.7] } else { integers.scales },
            groups: e4m3.then(|| (0..n * k / group_size).map(|i| (i * 11 % 0x7f) as u8).collect()),
            float: Some(format),
            ..integers
        }
    }

    pub(super) fn all() -> impl Iterator<Item = Self> {
        let kinds = [(4, 32, false), (3, 96, false), (8, 24, false), (4, 48, true)];
        let zeros_and_sums = [(false, false), (false, true), (true, false), (true, true)];
        kinds
            .into_iter()
            .flat_map(move |(bits, group_size, progressive)| {
                zeros_and_sums
                    .into_iter()
                    .map(move |(zeros, sums)| Self::new(bits, group_size, progressive, zeros, sums))
            })
            .chain([
                Self::floats(FloatFormat::E2m1, 32, false),
                Self::floats(FloatFormat::E2m1, 16, true),
                Self::floats(FloatFormat::E4m3, 96, false),
            ])
    }

    pub(super) fn packed(&self) -> PackedLinear {
        let scales = match (&self.groups, self.float) {
            (Some(groups), Some(_)) => Scales::E4m3 { groups, global: self.scales[0] },
            (Some(groups), None) => Scales::Progressive { groups, channels: &self.scales },
            (None, _) => Scales::Float(&self.scales),
        };
        let (codes, zeros) = (&self.codes, self.zeros.as_deref());
        if let Some(format) = self.float {
            let view = WeightView::float_with_scales(self.shape, format, self.group_size, codes, scales);
            return PackedLinear::pack(&view.unwrap(), None, false, &Serial).unwrap();
        }
        let view = WeightView::with_scales(self.shape, self.bits, self.group_size, codes, scales, zeros);
        PackedLinear::pack(&view.unwrap(), None, self.sums, &Serial).unwrap()
    }

    fn c(&self) -> qz1_weights {
        let slice = |of: Option<&Vec<u8>>| of.map_or((null(), 0), |of| (of.as_ptr(), of.len()));
        let (group_scales, group_scales_len) = slice(self.groups.as_ref());
        let (zeros, zeros_len) = slice(self.zeros.as_ref());
        qz1_weights {
            struct_size: size_of::<qz1_weights>() as u32,
            bits: self.bits.into(),
            n: self.shape[0],
            k: self.shape[1],
            group_size: self.group_size,
            codes: self.codes.as_ptr(),
            codes_len: self.codes.len(),
            scales: self.scales.as_ptr(),
            scales_len: self.scales.len(),
            group_scales,
            group_scales_len,
            zeros,
            zeros_len,
            format: match self.float {
                Some(FloatFormat::E4m3) => QZ1_CODES_E4M3,
                Some(_) => QZ1_CODES_E2M1,
                None => QZ1_CODES_INTEGER,
            },
            reserved: 0,
        }
    }

    pub(super) fn layout(&self) -> qz1_layout {
        let mut layout = empty();
        // SAFETY: every pointer is null or points to a live value.
        let status = unsafe { qz1_layout_of(&self.c(), self.sums.into(), &mut layout, null()) };
        assert_eq!(status, qz1_status::Ok);
        layout
    }
}

fn is(layout: &qz1_layout, of: &Layout) {
    let scales = match of.scales() {
        ScaleType::F16 => QZ1_SCALES_F16,
        ScaleType::Bf16 => QZ1_SCALES_BF16,
        ScaleType::F32 => QZ1_SCALES_F32,
        ScaleType::Progressive => QZ1_SCALES_PROGRESSIVE,
        ScaleType::E4m3 => QZ1_SCALES_E4M3,
        ScaleType::E8m0 => QZ1_SCALES_E8M0,
        other => panic!("{other:?} has no number"),
    };
    let l = layout;
    assert_eq!(l.struct_size as usize, size_of::<qz1_layout>());
    assert_eq!((l.code_bits as usize, l.scales), (of.code_bits(), scales));
    assert_eq!((l.zeros == 1, l.sums == 1), (of.zero_point().is_none(), of.has_sums()));
    assert_eq!(l.middle, of.zero_point().map_or(0, u32::from));
    let sizes = [of.n(), of.k(), of.group_size(), of.panels(), of.panel_bytes(), of.bytes()];
    assert_eq!([l.n, l.k, l.group_size, l.panels, l.panel_bytes, l.bytes], sizes.map(|s| s as u64));
    assert_eq!(l.id, of.id());
    let format = match of.float_format() {
        Some(FloatFormat::E4m3) => QZ1_CODES_E4M3,
        Some(_) => QZ1_CODES_E2M1,
        None => QZ1_CODES_INTEGER,
    };
    assert_eq!((l.format, l.reserved), (format, 0));
}

#[test]
fn packed_bytes_are_those_of_rust() {
    for weights in Weights::all() {
        let (rust, layout) = (weights.packed(), weights.layout());
        is(&layout, rust.layout());
        for parallel in [None, Some(threads(&Manner::Right))] {
            let mut bytes = vec![0x55_u8; layout.bytes as usize];
            let (to, parallel) = (bytes.as_mut_ptr(), pointer(parallel.as_ref()));
            let (len, panels) = (bytes.len(), layout.panels as usize);
            // SAFETY: every pointer is null or points to a live value.
            let status = unsafe { qz1_pack(&weights.c(), &layout, 0, panels, to, len, parallel, null()) };
            assert_eq!(status, qz1_status::Ok);
            assert!(bytes == rust.view().bytes());
        }
    }
}

#[test]
fn packed_bytes_come_back() {
    for weights in Weights::all() {
        let (rust, layout) = (weights.packed(), weights.layout());
        let (at, len) = (rust.view().bytes().as_ptr(), rust.view().bytes().len());
        let expected = rust.layout().unpack(rust.view().bytes()).unwrap();
        let (mut codes, mut scales) = (vec![0_u8; expected.codes.len()], vec![0.0; expected.scales.len()]);
        let (mut zeros, mut channels) =
            (vec![0_u8; expected.zeros.len()], vec![0.0; expected.channels.len()]);
        let parts = qz1_parts {
            struct_size: size_of::<qz1_parts>() as u32,
            reserved: 0,
            codes: codes.as_mut_ptr(),
            codes_len: codes.len(),
            scales: scales.as_mut_ptr(),
            scales_len: scales.len(),
            zeros: if zeros.is_empty() { null_mut() } else { zeros.as_mut_ptr() },
            zeros_len: zeros.len(),
            channels: if channels.is_empty() { null_mut() } else { channels.as_mut_ptr() },
            channels_len: channels.len(),
        };
        // SAFETY: every pointer is null or points to a live value.
        assert_eq!(unsafe { qz1_unpack(&layout, at, len, &parts, null()) }, qz1_status::Ok);
        assert_eq!((&codes, &zeros), (&weights.codes, &weights.zeros.clone().unwrap_or_default()));
        assert_eq!((bits(&scales), bits(&channels)), (bits(&expected.scales), bits(&expected.channels)));
        match &weights.groups {
            Some(groups) if weights.float.is_some() => {
                assert!(channels.iter().all(|&global| global == weights.scales[0]));
                assert!(scales.iter().zip(groups).all(|(s, g)| *s == FloatFormat::E4m3.value(*g)));
            }
            Some(groups) => {
                assert_eq!(bits(&channels), bits(&weights.scales));
                assert!(scales.iter().zip(groups).all(|(s, g)| *s == f32::from(*g)));
            }
            None => assert_eq!(bits(&scales), bits(&weights.scales)),
        }
        let [n, k] = weights.shape;
        let mut floats = [vec![0.0; (n - 5) * k], vec![1.0; (n - 5) * k]];
        rust.view().dequantize_rows(3..n - 2, &mut floats[0]).unwrap();
        let (to, to_len) = (floats[1].as_mut_ptr(), floats[1].len());
        // SAFETY: every pointer is null or points to a live value.
        let status = unsafe { qz1_dequantize_rows(&layout, at, len, 3, n - 5, to, to_len, null()) };
        assert_eq!(status, qz1_status::Ok);
        assert_eq!(bits(&floats[0]), bits(&floats[1]));
    }
}

/// A structure of the first version has no `format`, which means integers; an unknown format is rejected.
#[test]
fn formats_of_codes() {
    let weights = Weights::floats(FloatFormat::E2m1, 16, true);
    let with = |change: fn(&mut qz1_weights)| {
        let mut c = weights.c();
        change(&mut c);
        let mut layout = empty();
        // SAFETY: every pointer is null or points to a live value.
        let status = unsafe { qz1_layout_of(&c, 0, &mut layout, null()) };
        (status, layout)
    };
    assert_eq!(with(|_| ()).0, qz1_status::Ok);
    for change in [
        (|c| c.format = 3) as fn(&mut qz1_weights),
        |c| c.bits = 8,
        |c| (c.zeros, c.zeros_len) = (c.codes, c.n * c.k / c.group_size),
        |c| c.format = QZ1_CODES_E4M3,
    ] {
        assert_eq!(with(change).0, qz1_status::Scheme);
    }
    assert_eq!(with(|c| c.scales_len = 0).0, qz1_status::Length);
    let (status, integers) = with(|c| {
        c.struct_size = core::mem::offset_of!(qz1_weights, format) as u32;
        (c.group_scales, c.group_scales_len) = (null(), 0);
        // One row with one group, so that `scales` has the length 1 that floating-point weights need.
        (c.n, c.k, c.group_size, c.codes_len) = (1, 16, 16, 16);
    });
    assert_eq!((status, integers.format), (qz1_status::Ok, QZ1_CODES_INTEGER));
}

#[test]
fn packed_bytes_are_checked() {
    for weights in Weights::all() {
        let (rust, layout) = (weights.packed(), weights.layout());
        let mut bytes = rust.view().bytes().to_vec();
        // SAFETY: every pointer is null or points to a live value.
        let check = |bytes: &[u8], len| unsafe { qz1_check(&layout, bytes.as_ptr(), len, null()) };
        assert_eq!(check(&bytes, bytes.len()), qz1_status::Ok);
        assert_eq!(check(&bytes, bytes.len() - 1), qz1_status::Length);
        bytes[7] = 0xff;
        // No integer code and no E2M1 code is NaN.
        let expected = match weights.float {
            Some(FloatFormat::E4m3) => qz1_status::Scheme,
            _ if layout.scales == QZ1_SCALES_PROGRESSIVE => continue,
            _ => qz1_status::Ok,
        };
        assert_eq!(check(&bytes, bytes.len()), expected);
    }
}
