//! Parts of weights that are read alone equal parts of the whole weight, in every format.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use quant_formats::checkpoint::{Dtype, MemorySource, TensorInfo, TensorSource, TensorSpec};
use quant_formats::format::{
    ModuleSchemes, PackedReader, PackedWeight, QuantizedCheckpoint, container, reader,
};
use quant_formats::quantize::{QuantizedTensor, quantize_rtn};
use quant_formats::random::mix;
use quant_formats::scheme::LinearScheme;
use quant_formats::{Category, Error, Result};
use serde_json::json;

/// They differ in how words, groups, blocks and tiles divide a weight.
const CASES: [(&str, &str); 21] = [
    ("awq", "w4a16-g32-asym"),
    ("awq", "w4a16-channel-asym"),
    ("gptq", "w2a16-g64-sym"),
    ("gptq", "w3a16-g32-asym"),
    ("gptq", "w4a16-g32-sym"),
    ("gptq", "w4a16-channel-asym"),
    ("gptq", "w8a16-g128-asym"),
    ("compressed-tensors", "w4a16-g32-asym"),
    ("compressed-tensors", "w4a16-g128-sym"),
    ("compressed-tensors", "w3a16-g64-asym"),
    ("compressed-tensors", "w5a16-channel-asym"),
    ("compressed-tensors", "w8a8-channel-sym"),
    ("compressed-tensors", "wf8af8-channel"),
    ("compressed-tensors", "wf8af8-tensor"),
    ("compressed-tensors", "wf8af8-b128"),
    ("compressed-tensors", "wf4a16-g16-nv"),
    ("compressed-tensors", "wf4a16-g32-mx"),
    ("modelopt", "wf4a16-g16-nv"),
    ("qserve", "w4a8-g128-asym-progressive"),
    ("qserve", "w4a8-channel-asym"),
    ("qserve", "w8a8-channel-sym"),
];

/// Tensors in memory that count the bytes that are read from them.
struct Counting(MemorySource, AtomicU64);

impl TensorSource for Counting {
    fn names(&self) -> Vec<&str> {
        self.0.names()
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.0.info(name)
    }

    fn read_range(&self, name: &str, offset: u64, buffer: &mut [u8]) -> Result<()> {
        self.1.fetch_add(buffer.len() as u64, Ordering::Relaxed);
        self.0.read_range(name, offset, buffer)
    }

    fn location(&self, name: &str) -> PathBuf {
        self.0.location(name)
    }
}

fn weights(shape: [usize; 2], seed: u64) -> Vec<f32> {
    let value = |i: usize| (mix(mix(seed) ^ i as u64) >> 40) as f32 / (1 << 23) as f32 - 1.0;
    (0..shape[0] * shape[1]).map(value).collect()
}

fn checkpoint(
    format: &str,
    scheme: &str,
    shape: [usize; 2],
    seed: u64,
) -> (QuantizedCheckpoint, Arc<Counting>) {
    let container = container(format).unwrap();
    let scheme: LinearScheme = scheme.parse().unwrap();
    let scale_dtype = scheme.fixed_scales().map_or(Dtype::F16, |fixed| fixed.dtype());
    let tensor = quantize_rtn("m", &weights(shape, seed), shape, scheme, scale_dtype, None).unwrap();
    let mut source = MemorySource::new();
    for (spec, bytes) in container.pack("m", &tensor).unwrap() {
        source.insert(&spec.name, spec.info.dtype, spec.info.shape.clone(), bytes).unwrap();
    }
    let source = Arc::new(Counting(source, AtomicU64::new(0)));
    let schemes = ModuleSchemes { quantized: vec![("m", scheme)], ..Default::default() };
    let settings = container.quantization_config(&schemes);
    let opened = QuantizedCheckpoint::new(source.clone(), "config.json".as_ref(), &settings).unwrap();
    (opened, source)
}

/// A range whose ends are multiples, or the end of the weight.
fn range(total: usize, multiple: usize, seed: u64) -> Range<usize> {
    let places: Vec<usize> = (0..total).step_by(multiple).chain([total]).collect();
    let [a, b] = [1, 2].map(|i| mix(seed ^ i) as usize % places.len());
    match (a.min(b), a.max(b)) {
        (a, b) if a == b => places[a.min(places.len() - 2)]..places[a.min(places.len() - 2) + 1],
        (a, b) => places[a]..places[b],
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn parts_equal_those_of_the_whole(
        (case, seed) in (0..CASES.len(), any::<u64>()),
        shape in (1_usize..4, 1_usize..4).prop_map(|(n, k)| [64 * n, 128 * k]),
    ) {
        let (format, scheme) = CASES[case];
        let (opened, source) = checkpoint(format, scheme, shape, seed);
        let whole = opened.read("m").unwrap();
        let multiples = opened.part_multiples("m").unwrap();
        let [rows, columns] = [0, 1].map(|i| range(shape[i], multiples[i], mix(seed ^ i as u64)));
        let before = source.1.load(Ordering::Relaxed);
        let part = opened.read_part("m", rows.clone(), columns.clone()).unwrap();
        let read = source.1.load(Ordering::Relaxed) - before;
        prop_assert_eq!(&part, &whole.part(rows.clone(), columns.clone()).unwrap());
        let [n, k] = part.shape;
        prop_assert_eq!([n, k], [rows.len(), columns.len()]);
        let (all, some) = (whole.dequantize().unwrap(), part.dequantize().unwrap());
        for (i, row) in rows.enumerate() {
            prop_assert_eq!(&some[i * k..(i + 1) * k], &all[row * shape[1]..][columns.clone()]);
        }
        // Codes, at most 4 bytes per scale and zero point, and a few numbers.
        let bits = usize::from(part.scheme.bits());
        let most = n * k * bits / 8 + 8 * part.scales.len() + 8 * k + 8 * n + 64;
        prop_assert!(read <= most as u64, "{} bytes read for {:?} {}", read, part.shape, scheme);
    }

    #[test]
    fn the_last_part_ends_with_the_weight(seed in any::<u64>(), n in 1_usize..300, k in 1_usize..300) {
        for (scheme, floats) in [("w3a16-channel-asym", false), ("wf8a16-channel", true)] {
            let (opened, _) = checkpoint("compressed-tensors", scheme, [n, k], seed);
            let whole = opened.read("m").unwrap();
            let multiples = opened.part_multiples("m").unwrap();
            prop_assert_eq!(multiples, if floats { [1, 1] } else { [32, 32] });
            let [rows, columns] = [n, k].map(|total| (total - 1) / multiples[0] * multiples[0]..total);
            let part = opened.read_part("m", rows.clone(), columns.clone()).unwrap();
            prop_assert_eq!(part, whole.part(rows, columns).unwrap());
        }
    }
}

/// FP8 as models are published: blocks of 128 × 128, cut off at both ends.
#[test]
fn blocks_that_are_cut_off() {
    let [n, k] = [300_usize, 320_usize];
    let mut source = MemorySource::new();
    let codes = (0..n * k).map(|i| (mix(i as u64) % 0x7f) as u8).collect();
    source.insert("m.weight", Dtype::F8E4M3, [n, k], codes).unwrap();
    let scales: Vec<u8> = (1..=9).flat_map(|i| (i as f32).to_le_bytes()).collect();
    source.insert("m.weight_scale_inv", Dtype::F32, [3, 3], scales).unwrap();
    let settings = json!({ "quant_method": "fp8", "weight_block_size": [128, 128] });
    let opened = QuantizedCheckpoint::new(Arc::new(source), "config.json".as_ref(), &settings).unwrap();
    assert_eq!(opened.part_multiples("m").unwrap(), [128, 128]);
    let whole = opened.read("m").unwrap().dequantize().unwrap();
    for rows in [0..128, 128..300, 256..300, 0..300] {
        for columns in [0..128, 128..256, 256..320, 128..320, 0..320] {
            let part = opened.read_part("m", rows.clone(), columns.clone()).unwrap().dequantize().unwrap();
            for (i, row) in rows.clone().enumerate() {
                let expected = &whole[row * k..][columns.clone()];
                assert_eq!(
                    &part[i * columns.len()..(i + 1) * columns.len()],
                    expected,
                    "{rows:?} {columns:?}"
                );
            }
        }
    }
}

#[test]
fn ranges_that_do_not_fit_are_refused() {
    let (opened, _) = checkpoint("awq", "w4a16-g32-asym", [64, 128], 1);
    assert_eq!(opened.part_multiples("m").unwrap(), [8, 32]);
    let whole = opened.read("m").unwrap();
    #[expect(clippy::reversed_empty_ranges, reason = "refused")]
    for (rows, columns, expected) in [
        (8..8, 0..128, "rows 8..8"),
        (16..8, 0..128, "rows 16..8"),
        (0..72, 0..128, "rows 0..72"),
        (0..64, 0..16, "columns 0..16 do not begin and end at multiples of 32"),
        (0..64, 96..160, "columns 96..160"),
        (0..64, 0..usize::MAX, "columns 0.."),
    ] {
        let error = opened.read_part("m", rows.clone(), columns.clone()).unwrap_err();
        assert_eq!(error.category(), Category::Usage);
        assert!(error.to_string().contains(expected), "{error}");
        assert!(whole.part(rows, columns).is_err());
    }
    let error = opened.read_rows("n", 0..8).unwrap_err();
    assert!(
        matches!(&error, Error::MissingLinear { linear, is_float: false, .. } if linear == "n"),
        "{error}"
    );
    assert!(opened.part_multiples("n").is_err());
}

#[test]
fn a_missing_linear_is_explained() {
    let mut source = MemorySource::new();
    source.insert("layers.0.q_proj.weight", Dtype::F8E4M3, [2, 2], vec![0x38; 4]).unwrap();
    source.insert("layers.0.q_proj.weight_scale_inv", Dtype::F32, [1, 1], 1f32.to_le_bytes().into()).unwrap();
    source.insert("lm_head.weight", Dtype::F32, [1, 1], vec![0; 4]).unwrap();
    let settings = json!({ "quant_method": "fp8", "weight_block_size": [128, 128] });
    let opened = QuantizedCheckpoint::new(Arc::new(source), "config.json".as_ref(), &settings).unwrap();
    assert_eq!(opened.linears().len(), 1);
    let nothing = "the checkpoint lists the names of its quantized linears";
    for (name, suffix, remedy) in [
        ("lm_head", ": its weight is float", "read a float weight from the source of the checkpoint"),
        ("layers.0.qproj", "", "did you mean layers.0.q_proj?"),
        ("layers.0.q_proj.weight", "", "did you mean layers.0.q_proj?"),
        ("x", "", nothing),
    ] {
        let error = opened.read(name).unwrap_err();
        let message = format!("the checkpoint has no quantized linear `{name}`{suffix}");
        assert_eq!((error.to_string(), error.remedy().to_string()), (message, remedy.to_owned()));
        assert_eq!(error.category(), Category::Usage);
    }
}

/// If only the storage forbids a division, the part is taken from the whole weight.
#[test]
fn parts_that_the_storage_does_not_divide() {
    for (format, scheme, rows, columns) in [
        // QServe stores 4-bit codes of all inputs together, and of 32 outputs.
        ("qserve", "w4a8-g128-asym-progressive", 0..64, 128..256),
        ("qserve", "w4a8-channel-asym", 0..64, 0..128),
        ("qserve", "w4a8-channel-asym", 3..5, 7..100),
        ("qserve", "w8a8-channel-sym", 1..2, 0..17),
        ("awq", "w4a16-g32-asym", 4..64, 0..256),
        ("gptq", "w3a16-g32-asym", 5..6, 32..64),
        ("compressed-tensors", "w5a16-channel-asym", 3..64, 1..2),
    ] {
        let (opened, source) = checkpoint(format, scheme, [64, 256], 5);
        let whole = opened.read("m").unwrap();
        let before = source.1.load(Ordering::Relaxed);
        let part = opened.read_part("m", rows.clone(), columns.clone()).unwrap();
        assert!(source.1.load(Ordering::Relaxed) - before >= 64 * 256 * 3 / 8, "{format} {scheme}");
        assert_eq!(part, whole.part(rows, columns).unwrap(), "{format} {scheme}");
    }
}

/// A reader that does not describe its tensors: the whole weight is read, and divided in memory.
#[test]
fn a_reader_without_parts_reads_the_whole() {
    struct Opaque(Box<dyn PackedReader>);
    impl PackedReader for Opaque {
        fn code_suffixes(&self) -> &'static [&'static str] {
            self.0.code_suffixes()
        }
        fn scheme(&self, module: &str) -> Option<LinearScheme> {
            self.0.scheme(module)
        }
        fn scale_dtype(&self, source: &dyn TensorSource, module: &str) -> Result<Dtype> {
            self.0.scale_dtype(source, module)
        }
        fn shape(&self, source: &dyn TensorSource, module: &str) -> Result<Option<[usize; 2]>> {
            self.0.shape(source, module)
        }
        fn tensors(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<Vec<TensorSpec>> {
            self.0.tensors(source, weight)
        }
        fn zeros(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<Option<Vec<u8>>> {
            self.0.zeros(source, weight)
        }
        fn read(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<QuantizedTensor> {
            self.0.read(source, weight)
        }
    }
    let (known, source) = checkpoint("gptq", "w4a16-g32-asym", [64, 128], 7);
    let scheme = known.linear("m").unwrap().scheme;
    let schemes = ModuleSchemes { quantized: vec![("m", scheme)], ..Default::default() };
    let settings = container("gptq").unwrap().quantization_config(&schemes);
    let reader = Box::new(Opaque(reader(&settings).unwrap()));
    let opened = QuantizedCheckpoint::with_reader(source, reader).unwrap();
    assert_eq!(opened.part_multiples("m").unwrap(), [1, 32], "only groups limit what can be divided");
    let part = opened.read_part("m", 8..24, 32..96).unwrap();
    assert_eq!(part, known.read_part("m", 8..24, 32..96).unwrap());
    assert_eq!(opened.read_rows("m", 3..5).unwrap(), known.read("m").unwrap().part(3..5, 0..128).unwrap());
}
