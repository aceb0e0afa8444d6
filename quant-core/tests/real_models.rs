//! Real models through the library: the packed tensors read back code for code as the rounded weights, and everything
//! else is copied.

use crate::common;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use common::{decoder, flat, recipe, run, shared_data, windows};
use quant_core::TensorSource;
use quant_core::checkpoint::ModelDirectory;
use quant_core::format::PackedWeight;
use quant_core::model::Model;
use quant_core::quantize::quantize_rtn;
use quant_core::recipe::{Pattern, Recipe};

/// A model's directory, its scheme, and the scheme of `down_proj` if its width is not a multiple of the group size.
const MODELS: [(&str, &str, Option<&str>); 3] = [
    ("books-7m", "w4a16", None),
    ("tinystories-656k", "w4a16", None),
    ("stories260k", "w4a16-g32", Some("w4a16-channel")),
];

fn check(name: &str, path: &Path, recipe: &Recipe) {
    let directory = ModelDirectory::open(path).unwrap();
    let model = Model::open(&directory).unwrap();
    let source = model.source();
    let written = run(&model, directory.config(), recipe, None);
    let read_back = written.model();
    assert_eq!(read_back.quant_method(), Some("compressed-tensors"));
    let reader = quant_core::format::reader(&written.config["quantization_config"]).unwrap();

    let architecture = model.architecture();
    let mut weights = BTreeSet::new();
    for layer in 0..architecture.layers {
        for (_, linear, shape, _) in architecture.graph(layer).linears() {
            let module = architecture.in_block(layer, linear);
            let tensor = format!("{module}.weight");
            let own = recipe.overrides.iter().find(|(pattern, _)| pattern.matches(&module));
            let scheme = own.map_or(recipe.scheme, |(_, scheme)| *scheme).with_default_symmetry(true);
            assert_eq!(read_back.module_scheme(&module), Some(scheme), "{name}: {module}");

            let dtype = source.info(&tensor).unwrap().dtype;
            let values = source.read_f32(&tensor).unwrap();
            let expected = quantize_rtn(&tensor, &values, shape, scheme, dtype, None).unwrap();
            let stated = reader.scheme(&module).expect("the module is quantized");
            let weight = PackedWeight { module: &module, shape, scheme: stated };
            let found = reader.read(&written.source, weight).unwrap();
            assert!(found == expected, "{name}: {module} is not what rounding gives");
            assert!(written.source.info(&tensor).is_none(), "{name}: {tensor} is still there");
            weights.insert(tensor);
        }
    }
    assert_eq!(weights.len(), 7 * architecture.layers);
    for tensor in source.names().into_iter().filter(|t| !weights.contains(*t)) {
        let (before, after) = (source.read(tensor).unwrap(), written.source.read(tensor).unwrap());
        assert!(before == after, "{name}: {tensor} was not copied");
        assert_eq!(source.info(tensor), written.source.info(tensor), "{name}");
    }
}

#[test]
fn what_is_read_back_is_what_rounding_gives() {
    let Some(data) = shared_data() else { return };
    for (name, scheme, down) in MODELS {
        for symmetry in ["sym", "asym"] {
            let mut recipe = recipe("rtn", &format!("{scheme}-{symmetry}"));
            if let Some(down) = down {
                let scheme = format!("{down}-{symmetry}").parse().unwrap();
                recipe.overrides.push((Pattern::new("down_proj").unwrap(), scheme));
            }
            check(name, &data.join("models").join(name), &recipe);
        }
    }
}

/// The model that ships with the repository, so this check runs on every machine.
fn demo_model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../calibration-data/demo-model")
}

#[test]
fn the_demo_model_reads_back_too() {
    check("demo model", &demo_model(), &recipe("rtn", "w8a16-g64-asym"));
    check("demo model", &demo_model(), &recipe("rtn", "w3a16-channel"));
}

#[test]
fn at_real_sizes_a_batch_gives_what_each_window_gives_alone_bit_for_bit() {
    let model = Model::open(&ModelDirectory::open(&demo_model()).unwrap()).unwrap();
    let decoder = decoder(&model);
    let windows = windows(decoder.vocab(), 10, 250, 1);
    let batch: Vec<&[u32]> = (0..windows.len()).map(|i| windows.window(i)).collect();
    let logits = |batch: &[&[u32]]| flat(&decoder.logits(&decoder.hidden(batch).unwrap()).unwrap());
    let together = logits(&batch);
    for (i, alone) in together.chunks_exact(250 * decoder.vocab()).enumerate() {
        assert!(logits(&batch[i..=i]) == alone, "window {i}");
    }
}
