//! Packed linears that run together in one kernel call: up to rounding, the results are those of running them
//! individually.

use crate::common;
use crate::configs;

use candle_core::Tensor;
use common::{decoder, flat, recipe, run, windows};
use configs::cases;
use quant_core::checkpoint::Dtype;
use quant_core::model::{Decoder, NodeId, Tap, TokenRows};

/// Counts the linears that it observes. Because of the tap, they run individually.
struct Watch(usize);

impl Tap for Watch {
    fn linear_input(&mut self, _: NodeId, _: &Tensor, _: TokenRows<'_>) -> quant_core::Result<()> {
        self.0 += 1;
        Ok(())
    }
}

/// The difference of a block's output between running linears individually and running unobserved: its root mean square
/// relative to that of the output, the largest over all blocks.
fn relative_distance(decoder: &Decoder, batch: &[&[u32]]) -> f64 {
    let (mut max, mut index) = (0.0_f64, 0);
    let mut before = decoder.embed(batch).unwrap();
    decoder
        .hidden_through(batch, &mut |block, after| {
            let mut watch = Watch(0);
            let expected = decoder.advance(block, &before, &mut watch)?;
            // Indexers select all keys, so they are not run.
            let linears = decoder.linears(block).filter(|(_, name)| !name.contains(".indexer.")).count();
            assert_eq!(watch.0, linears, "a watched block runs every linear");
            let (got, expected) = (flat(&after), flat(&expected));
            let off: f64 = got.iter().zip(&expected).map(|(a, b)| f64::from(a - b).powi(2)).sum();
            let all: f64 = expected.iter().map(|b| f64::from(*b).powi(2)).sum();
            max = max.max((off / all).sqrt());
            (before, index) = (after.clone(), block + 1);
            Ok(after)
        })
        .unwrap();
    assert_eq!(index, decoder.blocks());
    max
}

#[test]
fn norms_and_gates_run_with_the_products_that_read_them() {
    let mut families = 0;
    for case in cases() {
        let model = case.random(Dtype::F32, 23);
        let batch = windows(case.vocab(), 3, 40, 24);
        let windows: Vec<&[u32]> = (0..batch.len()).map(|i| batch.window(i)).collect();
        for scheme in ["w4a16-g32-sym", "w8a8-channel-sym"] {
            let quantized = run(&model, &case.config, &recipe("rtn", scheme), None);
            let packed = decoder(&quantized.model()).packed().unwrap();
            let fused: Vec<usize> =
                (0..packed.blocks()).map(|block| packed.fused_operations(block)).collect();
            if ["llama", "mistral", "qwen2", "qwen3"].contains(&case.name) {
                // The norms before attention and before the MLP, and the MLP's gate.
                assert!(fused.iter().all(|count| *count == 3), "{} {fused:?}", case.name);
            }
            families += usize::from(fused.iter().any(|count| *count > 0));
            let off = relative_distance(&packed, &windows);
            println!("{} {scheme}: {fused:?}, {off:.2e}", case.name);
            // The last bits of sums differ; with integer activations they may change a rounding.
            let bound = if scheme.contains("a16") { 5e-6 } else { 5e-3 };
            assert!(off < bound, "{} {scheme}: {off}", case.name);
            // Fused operations change the last bits, which shows that they ran.
            assert!(off > 0.0 || fused.iter().all(|count| *count == 0), "{} {scheme}", case.name);
        }
    }
    assert!(families >= 20, "{families} runs with fused norms or gates");
}

#[test]
fn experts_of_every_family_run_in_one_call() {
    let mut families = 0;
    for case in cases().into_iter().filter(configs::Case::has_experts) {
        let model = case.random(Dtype::F32, 21);
        let batch = windows(case.vocab(), 3, 40, 22);
        let windows: Vec<&[u32]> = (0..batch.len()).map(|i| batch.window(i)).collect();
        for (method, scheme, grouped) in [
            ("rtn", "w4a16-g32-sym", true),
            ("rtn", "w4a16-g32-asym", true),
            ("smoothquant", "w8a8-channel-sym", true),
            ("smoothquant", "w8a8-channel-sym-static", false),
        ] {
            // Experts without gates run individually, and so do experts whose inputs are multiplied by their routing
            // weight.
            let alone = ["nemotron_h", "llama4"].iter().any(|family| case.name.starts_with(family));
            let grouped = grouped && !alone;
            let quantized = run(&model, &case.config, &recipe(method, scheme), Some(&batch));
            let packed = decoder(&quantized.model()).packed().unwrap();
            let experts: usize = (0..packed.blocks()).map(|block| packed.experts_in_one_call(block)).sum();
            assert_eq!(experts > 0, grouped, "{} {scheme}: {experts} experts", case.name);
            let off = relative_distance(&packed, &windows);
            // The last bits of gated products differ; with integer activations they may change a rounding.
            let bound = if scheme.contains("a16") { 5e-6 } else { 5e-3 };
            println!("{} {scheme}: {off:.2e}", case.name);
            assert!(off < bound && (off > 0.0 || !grouped), "{} {scheme}: {off}", case.name);
        }
        families += 1;
    }
    assert!(families >= 5, "{families} families have experts");
}
