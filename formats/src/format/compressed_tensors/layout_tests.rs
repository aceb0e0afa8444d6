//! Golden bytes of small matrices, and quantized tensors that cannot be packed.

use super::*;

use quant_kernels_cpu::StaticScale;

use crate::format::{CompressedTensors, Container};

fn tensor(
    shape: [usize; 2],
    scheme: &str,
    codes: &[u8],
    scales: &[f32],
    zeros: Option<&[u8]>,
) -> QuantizedTensor {
    QuantizedTensor {
        shape,
        scheme: scheme.parse().unwrap(),
        codes: codes.to_vec(),
        scales: scales.to_vec(),
        scale_dtype: Dtype::F16,
        zeros: zeros.map(<[u8]>::to_vec),
        levels: None,
        global: None,
        input: None,
        input_order: None,
    }
}

fn packed(tensor: &QuantizedTensor) -> Vec<(String, Dtype, Vec<usize>, Vec<u8>)> {
    let packed = CompressedTensors.pack("m.up_proj", tensor).unwrap();
    let agreed =
        CompressedTensors.layout("m.up_proj", tensor.shape, tensor.scheme, tensor.scale_dtype).unwrap();
    assert_eq!(packed.iter().map(|(s, _)| s.clone()).collect::<Vec<_>>(), agreed);
    packed
        .into_iter()
        .map(|(spec, bytes)| {
            assert_eq!(bytes.len() as u64, spec.info.byte_len());
            (spec.name, spec.info.dtype, spec.info.shape, bytes)
        })
        .collect()
}

#[test]
fn four_bits_symmetric_groups() {
    let codes: Vec<u8> = (0..16).chain((0..16).rev()).collect();
    let tensor = tensor([2, 16], "w4a16-g8", &codes, &[1.0, 0.5, 2.0, -0.25], None);
    assert_eq!(
        packed(&tensor),
        [
            (
                "m.up_proj.weight_packed".into(),
                Dtype::I32,
                vec![2, 2],
                vec![
                    0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe, 0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23,
                    0x01
                ],
            ),
            (
                "m.up_proj.weight_scale".into(),
                Dtype::F16,
                vec![2, 2],
                vec![0x00, 0x3c, 0x00, 0x38, 0x00, 0x40, 0x00, 0xb4],
            ),
            (
                "m.up_proj.weight_shape".into(),
                Dtype::I64,
                vec![2],
                vec![2, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0],
            ),
        ]
    );
}

#[test]
fn four_bits_asymmetric_packs_zeros_down_columns() {
    // 9 rows of 2 groups: the zero points of group 0 are 0 … 8, of group 1 15 … 7; eight rows per word.
    let zeros: Vec<u8> = (0..9).flat_map(|r| [r, 15 - r]).collect();
    let tensor = tensor([9, 8], "w4a16-g4-asym", &[3; 72], &[1.0; 18], Some(&zeros));
    let parts = packed(&tensor);
    assert_eq!(parts[0].3, [0x33; 36]);
    assert_eq!(
        parts[2],
        (
            "m.up_proj.weight_zero_point".into(),
            Dtype::I32,
            vec![2, 2],
            vec![0x10, 0x32, 0x54, 0x76, 0xef, 0xcd, 0xab, 0x89, 0x08, 0, 0, 0, 0x07, 0, 0, 0],
        )
    );
    assert_eq!(parts[3].0, "m.up_proj.weight_shape");
    assert_eq!(unpack_zeros(&parts[2].3, 9, 2, 4).unwrap(), zeros);
}

#[test]
fn three_bits_per_channel_with_padding() {
    // 11 codes are 33 bits: two words, and the high bit of the last code is the first bit of the second word.
    let codes = [7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5];
    let symmetric = tensor([1, 11], "w3a16-channel", &codes, &[1.0], None);
    let parts = packed(&symmetric);
    assert_eq!(parts[0].2, [1, 2]);
    assert_eq!(parts[0].3, [0x07, 0, 0, 0x40, 0x01, 0, 0, 0]);
    assert_eq!(parts[1].2, [1, 1]);

    let asymmetric = tensor([3, 1], "w3a16-channel-asym", &[1, 2, 3], &[1.0; 3], Some(&[7, 0, 5]));
    let parts = packed(&asymmetric);
    assert_eq!(parts[0].3, [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]);
    assert_eq!((&parts[2].2[..], &parts[2].3[..]), (&[1, 1][..], &[0b0100_0111, 0b1, 0, 0][..]));
}

#[test]
fn eight_bits_are_bytes() {
    let codes = [0, 1, 127, 128, 255, 254];
    let symmetric = tensor([2, 3], "w8a16-channel", &codes, &[1.0, 1.0], None);
    assert_eq!(packed(&symmetric)[0].3, [0, 1, 127, 0, 128, 255, 254, 0]);
    let asymmetric = tensor([2, 3], "w8a16-channel-asym", &codes, &[1.0, 1.0], Some(&[9, 200]));
    assert_eq!(packed(&asymmetric)[2].3, [9, 200, 0, 0]);
}

#[test]
fn scales_keep_their_type() {
    let mut tensor = tensor([1, 8], "w4a16-channel", &[0; 8], &[1.5], None);
    for (dtype, bytes) in
        [(Dtype::Bf16, vec![0xc0, 0x3f]), (Dtype::F32, vec![0, 0, 0xc0, 0x3f]), (Dtype::F16, vec![0, 0x3e])]
    {
        tensor.scale_dtype = dtype;
        let parts = packed(&tensor);
        assert_eq!((parts[1].1, &parts[1].3), (dtype, &bytes));
    }
}

#[test]
fn no_rows() {
    let tensor = tensor([0, 8], "w4a16-channel-asym", &[], &[], Some(&[]));
    let parts = packed(&tensor);
    assert!(parts[..3].iter().all(|p| p.3.is_empty()));
    assert!(unpack_zeros(&[], 0, 1, 4).unwrap().is_empty());
}

#[test]
fn layouts_that_cannot_be() {
    let layout =
        |shape, scheme: LinearScheme, dtype| CompressedTensors.layout("m", shape, scheme, dtype).unwrap_err();
    let scheme: LinearScheme = "w4a16".parse().unwrap();
    assert!(
        matches!(layout([8, 64], scheme, Dtype::F16), Error::GroupSizeDoesNotDivide(o) if o[0].tensor == "m.weight")
    );
    assert!(matches!(
        layout([8, 0], "w4a16-channel".parse().unwrap(), Dtype::F16),
        Error::GroupSizeDoesNotDivide(_)
    ));
    assert!(matches!(layout([8, 128], scheme, Dtype::I8), Error::Usage { .. }));
    assert!(matches!(layout([usize::MAX, 128], scheme, Dtype::F16), Error::Usage { .. }));
    assert!(matches!(layout([1 << 40, 1 << 22], scheme, Dtype::F16), Error::Usage { .. }));
    for bits in [0, 1, 9] {
        assert!(matches!(
            layout([8, 128], LinearScheme { weight: WeightFormat::int(bits, true), ..scheme }, Dtype::F16),
            Error::Usage { .. }
        ));
    }
}

#[test]
fn bytes_by_hand() {
    let mut linear = tensor([2, 3], "w8a8-static-asym", &[128, 0, 255, 1, 129, 127], &[0.5, 2.0], None);
    linear.input = Some(quant_kernels_cpu::StaticScale { scale: 1.0, zero: -128 });
    let parts = packed(&linear);
    let names: Vec<&str> = parts.iter().map(|p| p.0.as_str()).collect();
    let scales =
        ["m.up_proj.weight", "m.up_proj.weight_scale", "m.up_proj.input_scale", "m.up_proj.input_zero_point"];
    assert_eq!(names, scales);
    assert_eq!((parts[0].1, &parts[0].2[..]), (Dtype::I8, &[2, 3][..]));
    assert_eq!(parts[0].3, [0, 0x80, 0x7f, 0x81, 1, 0xff], "0, -128, 127; -127, 1, -1");
    assert_eq!(
        (parts[1].1, &parts[1].2[..], &parts[1].3[..]),
        (Dtype::F16, &[2, 1][..], &[0, 0x38, 0, 0x40][..])
    );
    assert_eq!(
        (parts[2].1, &parts[2].2[..], &parts[2].3[..]),
        (Dtype::F32, &[1][..], &[0, 0, 0x80, 0x3f][..])
    );
    assert_eq!((parts[3].1, &parts[3].2[..], &parts[3].3[..]), (Dtype::I8, &[1][..], &[0x80][..]));
    linear.scheme = "w8a8-static".parse().unwrap();
    assert!(CompressedTensors.pack("m", &linear).is_err(), "a zero on a symmetric grid");
    linear.input = Some(quant_kernels_cpu::StaticScale { scale: 1.0, zero: 0 });
    assert_eq!(packed(&linear).len(), 3);
    linear.input = None;
    assert!(CompressedTensors.pack("m", &linear).is_err());
}

#[test]
fn inconsistent_tensors_are_not_packed() {
    let good = tensor([2, 8], "w4a16-g8-asym", &[15; 16], &[1.0; 2], Some(&[15, 0]));
    packed(&good);
    let broken: [fn(&mut QuantizedTensor); 7] = [
        |t| t.codes[5] = 16,
        |t| t.zeros = Some(vec![0, 16]),
        |t| t.zeros = None,
        |t| t.scheme = t.scheme.with_symmetry(true),
        |t| t.scales[0] = 0.1,
        |t| t.scales[0] = f32::NAN,
        |t| t.codes.truncate(15),
    ];
    for (i, change) in broken.iter().enumerate() {
        let mut tensor = good.clone();
        change(&mut tensor);
        assert!(matches!(CompressedTensors.pack("m", &tensor), Err(Error::Internal(_))), "case {i}");
    }
}

#[test]
fn floating_point_weights() {
    let codes = [0x00, 0x80, 0x38, 0xb8, 0x7e, 0xfe];
    let tensor = tensor([2, 3], "wf8a16-channel", &codes, &[1.0, 0.5], None);
    assert_eq!(
        packed(&tensor),
        [
            ("m.up_proj.weight".into(), Dtype::F8E4M3, vec![2, 3], codes.to_vec()),
            ("m.up_proj.weight_scale".into(), Dtype::F16, vec![2, 1], vec![0x00, 0x3c, 0x00, 0x38]),
        ]
    );
    let mut broken = tensor;
    broken.codes[2] = 0x7f;
    assert!(matches!(CompressedTensors.pack("m", &broken), Err(Error::Internal(_))));
}

#[test]
fn four_bit_floats_by_hand() {
    let codes: Vec<u8> = (0..16).collect();
    let mut nv = tensor([1, 16], "wf4af4-g16-nv", &codes, &[1.5 / 4.0], None);
    (nv.scale_dtype, nv.global) = (Dtype::F8E4M3, Some(4.0));
    nv.input = Some(StaticScale { scale: 96.0, zero: 0 });
    let nibbles = vec![0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe];
    assert_eq!(
        packed(&nv),
        [
            ("m.up_proj.weight_packed".into(), Dtype::U8, vec![1, 8], nibbles.clone()),
            ("m.up_proj.weight_scale".into(), Dtype::F8E4M3, vec![1, 1], vec![0x3c]),
            ("m.up_proj.weight_global_scale".into(), Dtype::F32, vec![1], vec![0, 0, 0x80, 0x40]),
            ("m.up_proj.input_global_scale".into(), Dtype::F32, vec![1], vec![0, 0, 0xc0, 0x42]),
        ]
    );
    nv.scales[0] = 1.6 / 4.0;
    assert!(matches!(CompressedTensors.pack("m", &nv), Err(Error::Internal(_))), "not an E4M3 value");
    let codes: Vec<u8> = (0..16).chain(0..16).collect();
    let mut mx = tensor([1, 32], "wf4a16-g32-mx", &codes, &[0.25], None);
    mx.scale_dtype = Dtype::F8E8M0;
    assert_eq!(
        packed(&mx),
        [
            ("m.up_proj.weight_packed".into(), Dtype::U8, vec![1, 16], nibbles.repeat(2)),
            ("m.up_proj.weight_scale".into(), Dtype::U8, vec![1, 1], vec![125]),
        ]
    );
    mx.scales[0] = 0.3;
    assert!(matches!(CompressedTensors.pack("m", &mx), Err(Error::Internal(_))), "not a power of two");
}
