//! Whatever weights are given, they are refused, or unpack to what they were.
#![no_main]

use libfuzzer_sys::fuzz_target;
use quant_kernels_cpu::{Layout, Scales, WeightView};

#[derive(arbitrary::Arbitrary, Debug)]
struct Input {
    n: u8,
    groups: u8,
    group_size: u8,
    bits: u8,
    sums: bool,
    codes: Vec<u8>,
    scales: Vec<f32>,
    whole: Option<Vec<u8>>,
    zeros: Option<Vec<u8>>,
    /// Whether to cut slices to what the shape says.
    fitting: bool,
}

fn fit<T: Clone>(of: &mut Vec<T>, len: usize, filler: T) {
    of.resize(len, filler);
}

fuzz_target!(|input: Input| {
    let Input { n, groups, group_size, bits, sums, mut codes, mut scales, mut whole, mut zeros, fitting } = input;
    let (n, groups, size) = (usize::from(n % 40), usize::from(groups % 8), usize::from(group_size));
    let k = groups * size;
    if fitting {
        fit(&mut codes, n * k, 3);
        fit(&mut scales, if whole.is_some() { n } else { n * groups }, 0.5);
        if let Some(whole) = &mut whole {
            fit(whole, n * groups, 1);
        }
        if let Some(zeros) = &mut zeros {
            fit(zeros, n * groups, 2);
        }
    }
    let scales_of = match &whole {
        Some(groups) => Scales::Progressive { groups, channels: &scales },
        None => Scales::Float(&scales),
    };
    let Ok(view) = WeightView::with_scales([n, k], bits, size, &codes, scales_of, zeros.as_deref()) else { return };
    let Ok(layout) = Layout::of(&view, sums) else { return };
    let mut packed = vec![0xa5; layout.bytes()];
    if layout.pack(&view, 0..layout.panels(), &mut packed).is_err() {
        return;
    }
    let parts = layout.unpack(&packed).unwrap();
    assert_eq!(parts.codes, codes);
    assert_eq!(parts.zeros, zeros.unwrap_or_default());
    let bits = |v: &[f32]| v.iter().map(|v| if v.is_nan() { 0 } else { v.to_bits() }).collect::<Vec<_>>();
    match whole {
        Some(whole) => {
            assert_eq!(parts.scales, whole.iter().map(|&s| f32::from(s)).collect::<Vec<_>>());
            assert_eq!(bits(&parts.channels), bits(&scales));
        }
        None => assert_eq!(bits(&parts.scales), bits(&scales)),
    }
});
