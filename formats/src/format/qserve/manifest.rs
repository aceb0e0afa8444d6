//! The description of a checkpoint for loaders: the `quantization_config`, and the complete parameters in
//! `qserve_manifest.json` next to it.
//!
//! QServe's own loader takes bits and group size from its command line, and assumes the rest. The manifest states it,
//! for example the order of scales, which two converters wrote differently.

use serde_json::{Value, json};

use super::layout::{Kind, S2Order};
use super::{GROUP, HEAD, QUANT_METHOD, TILE};
use crate::checkpoint::Dtype;
use crate::format::ModuleSchemes;
use crate::format::loaders::{LoaderRule, QSERVE};
use crate::quantize::progressive::PROTECTIVE_RANGE;
use crate::scheme::KV_CONFIG_KEY;
use crate::scheme::LinearScheme;

/// The manifest's file name.
pub(super) const FILE: &str = "qserve_manifest.json";
/// The version of its schema.
const SCHEMA: &str = "quant-qserve/1";
/// The layout that the tables of `docs/formats/qserve.md` define.
pub(super) const LAYOUT_VERSION: u64 = 1;

/// All quantized linears have one kind.
fn kind(schemes: &ModuleSchemes<'_>) -> Kind {
    let scheme = schemes.quantized.first().map(|(_, scheme)| *scheme);
    scheme.and_then(Kind::of).unwrap_or(Kind::Group)
}

/// See [`Container::quantization_config`](crate::format::Container::quantization_config).
///
/// SGLang reads the first three keys; the others are specific to quant.
pub(super) fn quantization_config(schemes: &ModuleSchemes<'_>) -> Value {
    let kind = kind(schemes);
    let mut config = json!({
        "quant_method": QUANT_METHOD,
        "wbits": kind.bits(),
        "group_size": kind.group_size(),
        "layout_version": LAYOUT_VERSION,
        "modules_to_not_convert": schemes.float,
        "manifest": FILE,
    });
    if kind == Kind::Group {
        config["s2_order"] = json!(S2Order::Kernel.name());
    }
    config
}

pub(super) fn manifest(schemes: &ModuleSchemes<'_>) -> Value {
    let kind = kind(schemes);
    let mut weights = json!({
        "scheme": kind.scheme().to_string(),
        "bits": kind.bits(),
        "group_size": kind.group_size(),
        "scale_dtype": "float16",
        "rounding": "nearest, ties to even",
    });
    if kind != Kind::Bytes {
        weights["qweight"] = json!({
            "tile": [TILE, TILE],
            "n": "32*nt + 16*p + 8*h + nl",
            "k": "32*kt + 16*kh + 4*kl + kr",
            "byte": "((nt*(K/32) + kt)*32 + 4*nl + kl)*16 + 8*kh + 4*h + kr",
            "nibble": "low if p is 0, high if p is 1",
        });
    }
    match kind {
        Kind::Group => {
            weights["value"] = json!("(code - zero) * s2 * s1");
            weights["s1_scales"] = json!("s1");
            weights["s2_scales"] = json!("s2, 1 to 16");
            weights["s2_zeros"] = json!("-(zero * s2) modulo 256: to be added to code * s2");
            weights["s2_order"] = json!(S2Order::Kernel.name());
            weights["s2_place"] = json!("n - n%32 + 4*(n%8) + n%32/8");
            weights["protective_range"] = json!(PROTECTIVE_RANGE as u8);
            weights["integer"] = json!("(code - zero) * s2 is within -128 to 127");
        }
        Kind::Channel => {
            weights["value"] = json!("(code - zero) * s1");
            weights["s1_scales"] = json!("s1");
            weights["s1_szeros"] = json!("float16(zero * s1): to be subtracted, times the sum of the input");
        }
        Kind::Bytes => {
            weights["value"] = json!("weight * dequant_scale");
            weights["weight"] = json!("signed, row-major");
        }
    }
    json!({
        "schema": SCHEMA,
        "layout_version": LAYOUT_VERSION,
        "weights": weights,
        "activations": {
            "bits": 8,
            "symmetric": true,
            "scale": "max |x| / 127 per token, computed at run time",
            "rounding": "nearest, ties to even",
        },
        "kv_cache": {
            "scheme": format!("see `{KV_CONFIG_KEY}` in config.json; float if the key is absent"),
            "value": "code * scale + zero: the zero is the value of code 0, F16, not a code",
            "keys": "after rotary embedding",
            "rounding": "zero down and scale up in F16, so that the codes cover all values; codes to the nearest, ties to even",
        },
        "modules_to_not_convert": schemes.float,
        "float_tensors": "in the type of the original checkpoint",
        "norms": "stored with their weights: a loader may skip tensors whose names contain `norm` only if it has checked \
                  that all of these are 1",
    })
}

/// Requirements of QServe's kernels over all batch sizes: multiples of outputs and inputs, and the minimum number of
/// inputs.
fn tiles(kind: Kind) -> [usize; 3] {
    match kind {
        Kind::Group => [64, GROUP, 256],
        Kind::Channel => [128, 128, 256],
        Kind::Bytes => [256, 64, 320],
    }
}

pub(super) static LOADER_RULES: &[LoaderRule] = &[
    LoaderRule::new(
        &[QSERVE],
        |_| true,
        "norm weights are stored, but QServe's own loader skips them, which is correct only if all of these weights \
        are 1",
    ),
    LoaderRule::computed(&[QSERVE], |schemes| {
        let other = |dtype: &&Dtype| **dtype != Dtype::F16 && dtype.is_weight_float();
        let dtype = schemes.float_dtypes.iter().find(other);
        let note = |dtype| {
            format!("float tensors keep their type (such as {dtype}), but QServe's loaders support F16 only")
        };
        dtype.map(note).into_iter().collect()
    }),
    LoaderRule::computed(&[QSERVE], |schemes| match schemes.float.iter().filter(|m| **m != HEAD).count() {
        0 => Vec::new(),
        float => vec![format!(
            "{float} linear(s) in blocks stay float, but QServe's loaders treat all linears in blocks as quantized"
        )],
    }),
    LoaderRule::computed(&[QSERVE], |schemes| match narrow(schemes) {
        None => Vec::new(),
        Some((name, [n, k], [rows, columns, min])) => vec![format!(
            "`{name}` has shape [{n}, {k}], but QServe's kernels need a multiple of {rows} outputs, and a multiple \
            of {columns} inputs that is at least {min}"
        )],
    }),
];

/// The first matrix that does not consist of complete kernel tiles or has too few inputs. Fused linears count as one.
fn narrow<'a>(schemes: &'a ModuleSchemes<'_>) -> Option<(&'a str, [usize; 2], [usize; 3])> {
    let shape = |module: &str| schemes.shapes.get(module).copied();
    let kind_of = |scheme: &LinearScheme| Kind::of(*scheme);
    schemes.quantized.iter().find_map(|(module, scheme)| {
        let [rows, columns, min] = tiles(kind_of(scheme)?);
        let [n, k] = shape(module)?;
        let fused = schemes.fused.iter().find(|fused| fused.parts.iter().any(|part| part == module));
        let (name, n) = match fused {
            Some(fused) => {
                let parts = fused.parts.iter().map(|part| shape(part).map(|[n, _]| n));
                (fused.name.as_str(), parts.sum::<Option<usize>>()?)
            }
            None => (*module, n),
        };
        let fits = n.is_multiple_of(rows) && k.is_multiple_of(columns) && k >= min;
        (!fits).then_some((name, [n, k], [rows, columns, min]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::FusedLinears;
    use crate::format::{Container, QServe};

    fn schemes<'a>(scheme: &str, modules: &[(&'a str, [usize; 2])]) -> ModuleSchemes<'a> {
        let scheme = scheme.parse().unwrap();
        ModuleSchemes {
            quantized: modules.iter().map(|(module, _)| (*module, scheme)).collect(),
            float: vec!["lm_head"],
            shapes: modules.iter().copied().collect(),
            float_dtypes: vec![Dtype::F16],
            ..Default::default()
        }
    }

    fn warnings(schemes: &ModuleSchemes<'_>) -> Vec<String> {
        QServe.warnings(schemes)
    }

    #[test]
    fn the_configuration_of_each_kind() {
        let of =
            |scheme: &str| QServe.quantization_config(&schemes(scheme, &[("model.layers.0.a", [64, 256])]));
        assert_eq!(
            of("w4a8-g128-asym-progressive"),
            json!({
                "quant_method": "qoq", "wbits": 4, "group_size": 128, "layout_version": 1,
                "modules_to_not_convert": ["lm_head"], "manifest": "qserve_manifest.json", "s2_order": "kernel",
            })
        );
        let channel = of("w4a8-channel-asym");
        assert_eq!((&channel["wbits"], &channel["group_size"]), (&json!(4), &json!(-1)));
        assert!(channel.get("s2_order").is_none());
        assert_eq!(of("w8a8-channel-sym")["wbits"], json!(8));
    }

    #[test]
    fn the_manifest_says_what_the_tensors_do_not() {
        let files = QServe.companion_files(&schemes("w4a8-g128-asym-progressive", &[("a", [64, 256])]));
        let (name, manifest) = &files[0];
        assert_eq!((*name, files.len()), ("qserve_manifest.json", 1));
        assert_eq!(manifest["schema"], json!("quant-qserve/1"));
        let weights = &manifest["weights"];
        assert_eq!(weights["protective_range"], json!(119));
        assert_eq!(weights["s2_order"], json!("kernel"));
        assert_eq!(weights["scheme"], json!("w4a8-g128-asym-progressive"));
        assert!(manifest["norms"].as_str().unwrap().contains("all of these are 1"));
        assert!(manifest["kv_cache"]["scheme"].as_str().unwrap().contains("kv_cache_quantization"));
    }

    #[test]
    fn notes_on_what_loaders_assume() {
        let fits = [("l.q", [64, 256]), ("l.k", [32, 256]), ("l.v", [32, 256])];
        let mut these = schemes("w4a8-g128-asym-progressive", &fits);
        let parts = fits.map(|(m, _)| m.into()).to_vec();
        let fused = [FusedLinears { name: "l.qkv".into(), parts, absent: vec![] }];
        these.fused = &fused;
        assert_eq!(warnings(&these).len(), 1, "{:?}", warnings(&these));
        assert!(warnings(&these)[0].contains("norm weights are stored"));
        these.fused = &[];
        assert!(warnings(&these)[1].starts_with("`l.k` has shape "));
        these.float_dtypes.push(Dtype::Bf16);
        these.float.push("l.o");
        let message = warnings(&these);
        assert!(message[1].contains("such as BF16") && message[2].starts_with("1 linear(s)"), "{message:?}");
        let short = schemes("w8a8-channel-sym", &[("a", [256, 256])]);
        assert!(warnings(&short)[1].contains("is at least 320"));
    }

    #[test]
    fn one_scheme_for_all_and_a_float_head() {
        let mut these = schemes("w4a8-g128-asym-progressive", &[("a", [64, 256]), ("lm_head", [64, 256])]);
        let error = QServe.check(&these).unwrap_err().to_string();
        assert!(error.contains("`lm_head` cannot be quantized"), "{error}");
        these.quantized[1] = ("b", "w8a8-channel-sym".parse().unwrap());
        let error = QServe.check(&these).unwrap_err();
        assert!(error.to_string().contains("`b` has the scheme w8a8-channel-sym, but `a`"), "{error}");
        assert!(error.remedy().marked().contains("‹ignore›"));
        these.quantized.pop();
        these.embedding = Some(LinearScheme::default());
        assert!(QServe.check(&these).unwrap_err().to_string().contains("the embedding"));
    }
}
