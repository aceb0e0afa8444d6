//! Checkpoints with missing, empty or foreign tensors: no linear disappears without a word, and none can be read that
//! has no weights.

use std::path::Path;
use std::sync::Arc;

use quant_formats::checkpoint::{Dtype, MemorySource, TensorSource, TensorSpec};
use quant_formats::format::{ModuleSchemes, QuantizedCheckpoint, container};
use quant_formats::quantize::quantize_rtn;
use quant_formats::scheme::LinearScheme;
use quant_formats::{Category, Error, Result};
use serde_json::{Value, json};

const CASES: [(&str, &str); 10] = [
    ("awq", "w4a16-g32-asym"),
    ("gptq", "w4a16-g32-asym"),
    ("compressed-tensors", "w4a16-g32-asym"),
    ("compressed-tensors", "w8a8-channel-sym"),
    ("compressed-tensors", "wf8af8-channel"),
    ("compressed-tensors", "wf4a16-g16-nv"),
    ("modelopt", "wf4a16-g16-nv"),
    ("qserve", "w4a8-g128-asym-progressive"),
    ("qserve", "w4a8-channel-asym"),
    ("qserve", "w8a8-channel-sym"),
];

type Stored = Vec<(TensorSpec, Vec<u8>)>;

/// A linear `m` of 64 outputs and 256 inputs, and the configuration.
fn checkpoint(format: &str, scheme: &str) -> (Stored, Value) {
    let container = container(format).unwrap();
    let scheme: LinearScheme = scheme.parse().unwrap();
    let scale_dtype = scheme.fixed_scales().map_or(Dtype::F16, |fixed| fixed.dtype());
    let weights: Vec<f32> = (0..64 * 256).map(|i| (i as f32 * 0.61).sin()).collect();
    let tensor = quantize_rtn("m", &weights, [64, 256], scheme, scale_dtype, None).unwrap();
    let schemes = ModuleSchemes { quantized: vec![("m", scheme)], ..Default::default() };
    (container.pack("m", &tensor).unwrap(), container.quantization_config(&schemes))
}

fn open(tensors: &Stored, config: &Value) -> Result<QuantizedCheckpoint> {
    let mut source = MemorySource::new();
    for (spec, bytes) in tensors {
        source.insert(&spec.name, spec.info.dtype, spec.info.shape.clone(), bytes.clone())?;
    }
    QuantizedCheckpoint::new(Arc::new(source), Path::new("config.json"), config)
}

#[test]
fn a_missing_tensor_is_an_error() {
    for (format, scheme) in CASES {
        let (tensors, config) = checkpoint(format, scheme);
        let whole = open(&tensors, &config).unwrap();
        assert_eq!(whole.linears().len(), 1, "{format} {scheme}");
        assert!(whole.warnings().is_empty(), "{format} {scheme}: {:?}", whole.warnings());
        for at in 0..tensors.len() {
            let mut rest = tensors.clone();
            let (missing, _) = rest.remove(at);
            let what = format!("{format} {scheme} without {}", missing.name);
            match open(&rest, &config) {
                Err(error) => assert_eq!(error.category(), Category::Input, "{what}: {error}"),
                // Without its second scale, a weight of Model Optimizer is not quantized; and g_idx can be omitted.
                Ok(opened) if opened.linears().is_empty() => {
                    assert!(opened.warnings()[0].contains("`m`"), "{what}: {:?}", opened.warnings());
                }
                Ok(opened) => {
                    assert!(missing.name.ends_with("g_idx"), "{what}");
                    opened.read("m").unwrap();
                }
            }
        }
    }
}

#[test]
fn codes_of_a_different_type_are_reported() {
    for (format, scheme) in CASES {
        let (mut tensors, config) = checkpoint(format, scheme);
        let (codes, bytes) = &mut tensors[0];
        codes.info.dtype = Dtype::F16;
        codes.info.shape = vec![codes.info.shape[0], bytes.len() / codes.info.shape[0] / 2];
        let name = codes.name.clone();
        match open(&tensors, &config) {
            Err(error) => assert_eq!(error.category(), Category::Input, "{format} {scheme}: {error}"),
            Ok(opened) => {
                assert!(opened.linears().is_empty(), "{format} {scheme}: {name} is read");
                let notes = opened.warnings().join("\n");
                assert!(notes.contains("`m` has `m."), "{format} {scheme}: {notes}");
                assert!(notes.contains("no quantized linear"), "{format} {scheme}: {notes}");
            }
        }
    }
}

#[test]
fn a_checkpoint_of_a_different_format_is_reported() {
    let (tensors, _) = checkpoint("awq", "w4a16-g32-asym");
    for method in ["fp8", "mxfp4"] {
        let opened = open(&tensors, &json!({ "quant_method": method })).unwrap();
        assert!(opened.linears().is_empty());
        assert!(opened.warnings().iter().any(|note| note.contains("no quantized linear")), "{method}");
    }
}

#[test]
fn a_weight_without_elements_is_an_error() {
    let matrix = |name: &str, dtype, shape: [usize; 2]| (TensorSpec::new(name, dtype, shape), Vec::new());
    let (many, words) = (1 << 40, 1 << 37);
    let shape = |shape: [i64; 2]| {
        let bytes = shape.iter().flat_map(|dimension| dimension.to_le_bytes()).collect();
        (TensorSpec::new("m.weight_shape", Dtype::I64, [2]), bytes)
    };
    let cases = [
        (
            "awq",
            "w4a16-g32-asym",
            vec![
                matrix("m.qweight", Dtype::I32, [0, words]),
                matrix("m.qzeros", Dtype::I32, [0, words]),
                matrix("m.scales", Dtype::F16, [0, many]),
            ],
        ),
        (
            "gptq",
            "w4a16-g32-asym",
            vec![
                matrix("m.qweight", Dtype::I32, [0, many]),
                matrix("m.qzeros", Dtype::I32, [0, words]),
                matrix("m.scales", Dtype::F16, [0, many]),
                (TensorSpec::new("m.g_idx", Dtype::I32, [0]), Vec::new()),
            ],
        ),
        (
            "compressed-tensors",
            "w4a16-g32-sym",
            vec![
                matrix("m.weight_packed", Dtype::I32, [128, 0]),
                matrix("m.weight_scale", Dtype::F16, [128, 0]),
                shape([128, 0]),
            ],
        ),
        (
            "compressed-tensors",
            "w4a16-g32-sym",
            vec![
                matrix("m.weight_packed", Dtype::I32, [0, 16]),
                matrix("m.weight_scale", Dtype::F16, [0, 4]),
                shape([0, 128]),
            ],
        ),
    ];
    for (format, scheme, tensors) in cases {
        let (_, config) = checkpoint(format, scheme);
        let Err(error) = open(&tensors, &config) else { panic!("{format} is opened") };
        assert!(matches!(error, Error::UnsupportedQuantization { .. }), "{format}: {error}");
        assert!(error.to_string().contains("no weights"), "{format}: {error}");
    }
}

/// Tensors of any size that hold zeros, as a sparse file does.
struct Sparse(Vec<TensorSpec>);

impl TensorSource for Sparse {
    fn names(&self) -> Vec<&str> {
        self.0.iter().map(|spec| spec.name.as_str()).collect()
    }

    fn info(&self, name: &str) -> Option<&quant_formats::checkpoint::TensorInfo> {
        self.0.iter().find(|spec| spec.name == name).map(|spec| &spec.info)
    }

    fn read_range(&self, _name: &str, _offset: u64, buffer: &mut [u8]) -> Result<()> {
        buffer.fill(0);
        Ok(())
    }

    fn location(&self, _tensor: &str) -> std::path::PathBuf {
        "sparse".into()
    }
}

#[test]
fn a_weight_that_does_not_fit_in_memory_is_an_error() {
    // The codes or the scales exceed what a process can address. GPTQ's inputs have 32-bit indices.
    let (n, k) = (1_usize << 10, 1_usize << 48);
    let (outputs, inputs) = (1 << 48, 1 << 8);
    let cases = [
        (
            "awq",
            "w4a16-channel-asym",
            vec![
                TensorSpec::new("m.qweight", Dtype::I32, [k, n / 8]),
                TensorSpec::new("m.qzeros", Dtype::I32, [1, n / 8]),
                TensorSpec::new("m.scales", Dtype::F16, [1, n]),
            ],
        ),
        (
            "gptq",
            "w4a16-channel-asym",
            vec![
                TensorSpec::new("m.qweight", Dtype::I32, [inputs / 8, outputs]),
                TensorSpec::new("m.qzeros", Dtype::I32, [1, outputs / 8]),
                TensorSpec::new("m.scales", Dtype::F16, [1, outputs]),
                TensorSpec::new("m.g_idx", Dtype::I32, [inputs]),
            ],
        ),
        (
            "qserve",
            "w8a8-channel-sym",
            vec![
                TensorSpec::new("m.weight", Dtype::I8, [n, k]),
                TensorSpec::new("m.dequant_scale", Dtype::F16, [n]),
            ],
        ),
    ];
    for (format, scheme, tensors) in cases {
        let (_, config) = checkpoint(format, scheme);
        let opened =
            QuantizedCheckpoint::new(Arc::new(Sparse(tensors)), Path::new("config.json"), &config).unwrap();
        let error = opened.read("m").unwrap_err();
        assert!(matches!(error, Error::Memory { .. }), "{format}: {error}");
    }
}
