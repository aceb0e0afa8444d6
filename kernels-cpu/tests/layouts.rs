//! The order of packed bytes and the ids that identify it are stored in files, so they must not change by accident.
//!
//! To change an order on purpose, increase its `VERSION`, and update the numbers here.

use std::collections::HashSet;

use quant_kernels_cpu::attention::{KvLayout, KvType, PAGE_TOKENS};
use quant_kernels_cpu::{Layout, PackedLinear, ScaleType, Scales, Serial, WeightView};

/// FNV-1a.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

const SHAPE: [usize; 2] = [19, 40];
const SIZE: usize = 20;

fn packed(bits: u8, scales: ScaleType, zeros: bool, sums: bool) -> PackedLinear {
    let [n, k] = SHAPE;
    let (groups, zero_point) = (n * k / SIZE, 1_u32 << (bits - 1));
    let codes: Vec<u8> = (0..n * k).map(|i| ((i * 7 + i / k * 3) % (1 << bits)) as u8).collect();
    // Close to the midpoint, so that weights with two levels of scales stay within 8 bits.
    let of_groups: Vec<u8> =
        (0..groups).map(|g| (zero_point - (g % 2) as u32 * u32::from(bits < 8)) as u8).collect();
    let floats: Vec<f32> = (0..groups.max(n))
        .map(|g| match scales {
            ScaleType::F16 => (1 + g % 50) as f32 / 64.0,
            // Scales below the range of f16.
            ScaleType::Bf16 => (1 + g % 50) as f32 * 2.0_f32.powi(-60),
            _ => 0.1 + g as f32 / 7.0,
        })
        .collect();
    let whole: Vec<u8> = (0..groups).map(|g| if bits < 8 { 1 + (g % 4) as u8 } else { 1 }).collect();
    let scales = match scales {
        ScaleType::Progressive => Scales::Progressive { groups: &whole, channels: &floats[..n] },
        _ => Scales::Float(&floats[..groups]),
    };
    let zeros = zeros.then_some(&of_groups[..]);
    let view = WeightView::with_scales(SHAPE, bits, SIZE, &codes, scales, zeros).unwrap();
    PackedLinear::pack(&view, None, sums, &Serial).unwrap()
}

#[test]
fn packed_weights_are_in_their_order() {
    use ScaleType::{Bf16, F16, F32, Progressive};
    let golden: [(u8, ScaleType, bool, bool, u64, u64); 20] = [
        (2, F16, false, false, 0xd9f7ec85fd0470cd, 0x547db9d0b8f62ac3),
        (2, Bf16, true, false, 0x024e591252af9ead, 0x50634595958bffcc),
        (2, F32, false, true, 0xa9a62a25c395b2ee, 0x98a9074d9cd60691),
        (2, Progressive, true, true, 0x96043f91ccec7fca, 0x7dc366d56c492501),
        (3, F16, true, true, 0x47f0c9571b08d32f, 0x1ee9784dbf3d9c5e),
        (3, Bf16, false, true, 0x9652b332fe356f89, 0xb58cd9b23e3d2eb2),
        (3, F32, true, false, 0xdba6afd69545b44c, 0xb3ba6dff5fdf6957),
        (3, Progressive, false, false, 0xa1f947f3111b12ae, 0xd72e822ce89e97e4),
        (4, F16, false, false, 0x000369d58a85df47, 0x7ee40c42f8a48d1b),
        (4, Bf16, true, false, 0x024e591252af9ead, 0x0013972295c869e8),
        (4, F32, false, true, 0x93b9505504c2c064, 0x3b9d90b578d14409),
        (4, Progressive, true, true, 0x96043f91ccec7fca, 0x8a219e01d01623d6),
        (5, F16, true, true, 0xa2bb0ef8380c64a3, 0x04ffc1057d34eade),
        (5, Bf16, false, true, 0x1cf6ac7598dee611, 0x80bb06e17246ab59),
        (5, F32, true, false, 0x3670f577b24945c0, 0x819936d602bf6fe0),
        (5, Progressive, false, false, 0xe5e9dcd2fe6b1a36, 0x373247bec3c453f4),
        (8, F16, false, false, 0x51c941c0cabe5343, 0x4f2c4bf0209fdd7b),
        (8, Bf16, true, false, 0x5d189eb36fb33021, 0xcb96ed9c038b6dfa),
        (8, F32, false, true, 0xe769602d2fe2f360, 0xa7d4bb1279d8f426),
        (8, Progressive, true, true, 0x260bcf10d53f6446, 0xfcb4a1aa4ad27baa),
    ];
    let mut bad = Vec::new();
    for (bits, scales, zeros, sums, id, bytes) in golden {
        let packed = packed(bits, scales, zeros, sums);
        let layout = packed.layout();
        assert_eq!((layout.scales(), layout.has_sums()), (scales, sums));
        let got = (layout.id(), hash(packed.view().bytes()));
        if got != (id, bytes) {
            bad.push(format!("({bits}, {scales:?}, {zeros}, {sums}, {:#018x}, {:#018x}),", got.0, got.1));
        }
    }
    assert!(bad.is_empty(), "packed otherwise:\n{}", bad.join("\n"));
}

#[test]
fn pages_are_in_their_order() {
    let golden: [(KvType, u64, u64); 3] = [
        (KvType::Kv4, 0x9b82f25139c8b9f7, 0x8e7eb6a9cbd341a1),
        (KvType::Kv8, 0xd77b4971861d1afb, 0x6c1f181ef4bb1e06),
        (KvType::F16, 0x70131690c0dc98e3, 0x694dc2de88685c75),
    ];
    let mut bad = Vec::new();
    for (kind, id, bytes) in golden {
        let layout = KvLayout::new(kind, 48).unwrap();
        let mut page = vec![0; layout.page_bytes()];
        for slot in 0..PAGE_TOKENS {
            let row = |by: usize| -> Vec<f32> {
                (0..48).map(|i| ((i * by + slot * 31) % 97) as f32 / 8.0 - 5.0).collect()
            };
            layout.write(&mut page, slot, &row(7), &row(11)).unwrap();
        }
        let got = (layout.id(), hash(&page));
        if got != (id, bytes) {
            bad.push(format!("(KvType::{kind:?}, {:#018x}, {:#018x}),", got.0, got.1));
        }
    }
    assert!(bad.is_empty(), "written otherwise:\n{}", bad.join("\n"));
}

#[test]
fn every_field_is_in_the_name() {
    #[derive(Clone, Copy)]
    struct Parts {
        shape: [usize; 2],
        code_bits: usize,
        size: usize,
        scales: ScaleType,
        zero_point: Option<u8>,
        sums: bool,
    }
    let base = Parts {
        shape: [32, 64],
        code_bits: 8,
        size: 32,
        scales: ScaleType::F16,
        zero_point: Some(9),
        sums: false,
    };
    let id = |p: &Parts| {
        Layout::from_parts(p.shape, p.code_bits, p.size, p.scales, p.zero_point, p.sums).unwrap().id()
    };
    let mut others = vec![
        base,
        Parts { shape: [33, 64], ..base },
        Parts { shape: [32, 96], ..base },
        Parts { shape: [64, 32], ..base },
        Parts { code_bits: 4, ..base },
        Parts { size: 16, ..base },
        Parts { sums: true, ..base },
        Parts { zero_point: None, ..base },
    ];
    others.extend((0..=255).filter(|&zero| zero != 9).map(|zero| Parts { zero_point: Some(zero), ..base }));
    others.extend(
        [ScaleType::Bf16, ScaleType::F32, ScaleType::Progressive].map(|scales| Parts { scales, ..base }),
    );
    let ids: HashSet<u64> = others.iter().map(id).collect();
    assert_eq!(ids.len(), others.len());
    let kinds = [KvType::Kv4, KvType::Kv8, KvType::F16];
    let pages =
        kinds.into_iter().flat_map(|kind| (1..=32).map(move |d| KvLayout::new(kind, 16 * d).unwrap()));
    let pages: HashSet<u64> = pages.map(|layout| layout.id()).collect();
    assert_eq!(pages.len(), 96);
    assert!(pages.is_disjoint(&ids));
}
