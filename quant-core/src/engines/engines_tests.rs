//! Verdicts for the shapes of known models, derived by hand from the engines' sources.

use super::*;
use crate::model::AttentionShape;
use crate::scheme::LinearScheme;

/// Heads, key heads, head dimension, hidden size, intermediate size.
const LLAMA_8B: [usize; 5] = [32, 8, 128, 4096, 14336];
const QWEN_72B: [usize; 5] = [64, 8, 128, 8192, 29568];
const QWEN_05B: [usize; 5] = [14, 2, 64, 896, 4864];

fn outline(
    container: &'static str,
    [heads, kv_heads, head_dim, hidden, inter]: [usize; 5],
    scheme: &str,
) -> Outline {
    let scheme: LinearScheme = scheme.parse().unwrap();
    let layer = |kind, k, parts: &[(&str, usize)]| FusedLayer {
        kind,
        parts: (parts.iter())
            .map(|(module, n)| FusedPart { module: (*module).into(), n: *n, scheme: Some(scheme) })
            .collect(),
        k,
        of_expert: false,
    };
    let (q, kv) = (heads * head_dim, kv_heads * head_dim);
    Outline {
        container,
        family: "llama",
        wrapper: None,
        attentions: vec![AttentionShape::new(kv_heads, heads / kv_heads, head_dim)],
        experts: Default::default(),
        layers: vec![
            layer(LayerKind::Attention(head_dim), hidden, &[("q_proj", q), ("k_proj", kv), ("v_proj", kv)]),
            layer(LayerKind::Row, q, &[("o_proj", hidden)]),
            layer(LayerKind::Column, hidden, &[("gate_proj", inter), ("up_proj", inter)]),
            layer(LayerKind::Row, inter, &[("down_proj", hidden)]),
        ],
        head: None,
        embedding: None,
        fp8_cache: false,
        scales_expert_inputs: false,
    }
}

#[test]
fn transformers_does_not_use_every_fp8_cache() {
    let plain = || Outline { fp8_cache: true, ..outline("compressed-tensors", LLAMA_8B, "wf8a16-channel") };
    assert!(matches!(others::transformers(&plain(), 1), Compatibility::Yes));
    let window = AttentionShape { window: Some(512), ..AttentionShape::new(8, 4, 128) };
    let windowed = Outline { attentions: vec![AttentionShape::new(8, 4, 128), window], ..plain() };
    assert!(matches!(others::transformers(&windowed, 1), Compatibility::Yes));
    let mixed = Outline {
        attentions: vec![AttentionShape::new(8, 4, 128), AttentionShape::new(4, 8, 256)],
        ..plain()
    };
    assert!(matches!(others::transformers(&mixed, 1), Compatibility::No(_)));
    assert!(matches!(others::transformers(&Outline { fp8_cache: false, ..mixed }, 1), Compatibility::Yes));
    let mut fused = plain();
    fused.layers[0].parts[0].module = "gpt_neox.layers.0.attention.query_key_value".into();
    assert!(matches!(others::transformers(&fused, 1), Compatibility::With(_)));
}

fn engine(name: &str) -> &'static Engine {
    ENGINES.iter().find(|e| e.name.starts_with(name)).unwrap()
}

/// The verdicts' words for 1, 2, 4 and 8 ranks.
fn words(name: &str, outline: &Outline) -> Vec<&'static str> {
    RANKS.iter().map(|&ranks| engine(name).loads(outline, ranks).map_or("-", |v| v.word())).collect()
}

fn reason(name: &str, outline: &Outline, ranks: usize) -> String {
    engine(name).loads(outline, ranks).unwrap().reason().unwrap_or_default().to_owned()
}

#[test]
fn even_shapes_load_everywhere() {
    for (container, scheme) in [
        ("compressed-tensors", "w4a16-g128-sym"),
        ("compressed-tensors", "w4a16-g32-sym"),
        ("compressed-tensors", "w4a16-channel-sym"),
        ("compressed-tensors", "w4a16-g128-asym"),
        ("awq", "w4a16-g128-asym"),
        ("awq", "w4a16-g64-asym"),
        ("gptq", "w4a16-g128-sym"),
        ("gptq", "w4a16-channel-sym"),
    ] {
        let model = outline(container, LLAMA_8B, scheme);
        for name in ["vLLM, CUDA", "vLLM, CPU", "SGLang"] {
            assert_eq!(words(name, &model), ["yes"; 4], "{name} {container} {scheme}");
        }
    }
    assert_eq!(words("transformers", &outline("awq", LLAMA_8B, "w4a16-g128-asym")), ["yes", "-", "-", "-"]);
}

#[test]
fn groups_must_divide_what_a_rank_holds() {
    let model = outline("compressed-tensors", QWEN_72B, "w4a16-g128-sym");
    assert_eq!(words("vLLM, CUDA", &model), ["yes", "no", "no", "no"]);
    assert_eq!(
        reason("vLLM, CUDA", &model, 2),
        "`down_proj`: 14784 inputs per rank are not a multiple of the group size 128; groups of 64 would work"
    );
    let finer = outline("compressed-tensors", QWEN_72B, "w4a16-g32-sym");
    assert_eq!(words("vLLM, CUDA", &finer), ["yes", "yes", "yes, but", "no"]);
    assert!(reason("vLLM, CUDA", &finer, 4).contains("padded"));
    // vLLM pads these shapes; SGLang does not load them.
    assert_eq!(words("SGLang", &finer), ["yes", "yes", "no", "no"]);
    // A scale per channel can be split in compressed-tensors.
    let channel = outline("compressed-tensors", QWEN_72B, "w4a16-channel-sym");
    assert_eq!(words("vLLM, CUDA", &channel)[1..], ["yes", "yes, but", "yes, but"]);
    assert_eq!(words("SGLang", &channel), ["yes", "yes", "no", "no"]);
    let awq = outline("awq", QWEN_72B, "w4a16-channel-asym");
    assert_eq!(words("vLLM, CUDA", &awq), ["yes", "no", "no", "no"]);
    assert!(reason("vLLM, CUDA", &awq, 2).contains("scales per channel cannot be split"));
}

#[test]
fn heads_bound_the_ranks() {
    let model = outline("compressed-tensors", QWEN_05B, "w4a16-g32-sym");
    assert_eq!(words("vLLM, CUDA", &model)[2..], ["no", "no"]);
    assert_eq!(reason("vLLM, CUDA", &model, 4), "14 heads cannot be split across 4 ranks");
    let coarse = outline("compressed-tensors", QWEN_05B, "w4a16-g128-sym");
    assert!(reason("vLLM, CUDA", &coarse, 2).starts_with("`o_proj`: 448 inputs per rank"));
}

#[test]
fn bits_and_zeros_that_kernels_lack() {
    let three = outline("compressed-tensors", LLAMA_8B, "w3a16-g64-sym");
    assert_eq!(words("vLLM, CUDA", &three), ["yes, but"; 4]);
    for name in ["vLLM, CPU", "SGLang", "LMDeploy"] {
        assert_eq!(words(name, &three), ["no"; 4], "{name}");
    }
    assert_eq!(words("transformers", &three), ["yes", "-", "-", "-"]);
    assert_eq!(words("llama.cpp", &three), ["no", "-", "-", "-"]);
    let eight = outline("compressed-tensors", LLAMA_8B, "w8a16-channel-asym");
    assert_eq!(words("vLLM, CUDA", &eight), ["yes, but"; 4]);
    assert_eq!(words("SGLang", &eight), ["no"; 4]);
    assert_eq!(words("transformers", &eight)[0], "yes, but");
    let odd = outline("compressed-tensors", LLAMA_8B, "w4a16-g16-sym");
    assert_eq!(words("vLLM, CUDA", &odd), ["yes, but"; 4]);
    assert_eq!(words("SGLang", &odd), ["no"; 4]);
    assert_eq!(words("vLLM, CUDA", &outline("compressed-tensors", LLAMA_8B, "w4a16-g8-sym")), ["no"; 4]);
}

#[test]
fn what_is_read_of_the_gptq_format() {
    for scheme in ["w4a16-g128-asym", "w3a16-g128-sym", "w2a16-g64-sym"] {
        let model = outline("gptq", LLAMA_8B, scheme);
        assert_eq!(words("vLLM, CUDA", &model), ["no"; 4], "{scheme}");
        assert_eq!(words("vLLM, CPU", &model), ["no"; 4], "{scheme}");
        assert_eq!(words("SGLang", &model), ["unsure"; 4], "{scheme}");
    }
    let eight = outline("gptq", LLAMA_8B, "w8a16-g64-sym");
    assert_eq!(words("vLLM, CUDA", &eight), ["yes"; 4]);
    assert_eq!(words("SGLang", &eight), ["yes"; 4]);
    assert_eq!(words("vLLM, CPU", &eight), ["no"; 4]);
    let odd = outline("gptq", LLAMA_8B, "w4a16-g16-sym");
    assert!(reason("vLLM, CUDA", &odd, 1).contains("per channel or in groups of 32, 64 or 128"));
}

#[test]
fn a_float_linear_is_lost_on_transformers_in_the_gptq_format() {
    let mut model = outline("gptq", LLAMA_8B, "w4a16-g128-sym");
    assert_eq!(words("transformers", &model)[0], "yes");
    model.layers[3].parts[0].scheme = None;
    assert!(reason("transformers", &model, 1).contains("`down_proj` is float"));
}

#[test]
fn activations_of_8_bits() {
    let bytes = outline("compressed-tensors", LLAMA_8B, "w8a8");
    assert_eq!(words("vLLM, CUDA", &bytes), ["yes, but"; 4]);
    assert!(reason("vLLM, CUDA", &bytes, 1).contains("7.5 to 9.0"));
    assert_eq!(words("vLLM, CPU", &bytes), ["yes"; 4]);
    assert_eq!(words("SGLang", &bytes), ["yes"; 4]);
    assert!(reason("transformers", &bytes, 1).contains("multiplied as floats"));
    let odd = outline("compressed-tensors", [4, 4, 10, 40, 88], "w8a8");
    assert!(reason("vLLM, CUDA", &odd, 1).contains("not both multiples of 16"));
    assert_eq!(words("SGLang", &odd)[0], "unsure");
    let fixed = outline("compressed-tensors", LLAMA_8B, "w8a8-static-asym");
    assert_eq!((words("vLLM, CPU", &fixed), words("SGLang", &fixed)), (vec!["yes"; 4], vec!["unsure"; 4]));
    let packed = outline("compressed-tensors", LLAMA_8B, "w4a8-g128");
    assert!(reason("vLLM, CUDA", &packed, 1).contains("compiled at startup"));
    assert_eq!((words("vLLM, CPU", &packed), words("SGLang", &packed)), (vec!["yes"; 4], vec!["unsure"; 4]));
    for scheme in ["w8a8-g64", "w4a8-g128-asym"] {
        assert_eq!(
            words("vLLM, CPU", &outline("compressed-tensors", LLAMA_8B, scheme)),
            ["no"; 4],
            "{scheme}"
        );
    }
    for model in [&bytes, &fixed, &packed] {
        for name in ["LMDeploy", "mlx-lm"] {
            assert_eq!(words(name, model)[0], "no", "{name}");
        }
    }
    assert!(reason("llama.cpp", &bytes, 1).contains("leaves activations float"));
    assert_eq!(words("llama.cpp", &fixed)[0], "no");
    // No kernel supports packed weights with zero points together with 8-bit activations.
    let zeros = outline("compressed-tensors", LLAMA_8B, "w4a8-g128-asym");
    assert!(reason("vLLM, CUDA", &zeros, 1).contains("must be symmetric"));
}

#[test]
fn linears_that_run_as_one_need_one_scheme() {
    let mut model = outline("compressed-tensors", LLAMA_8B, "w4a16-g128-sym");
    model.layers[0].parts[2].scheme = Some("w8a16-g128-sym".parse().unwrap());
    for name in ["vLLM, CUDA", "vLLM, CPU", "SGLang"] {
        assert_eq!(words(name, &model), ["no"; 4]);
        assert!(reason(name, &model, 1).contains("`q_proj` and `v_proj` are fused into one linear"));
    }
    assert_eq!(words("transformers", &model)[0], "yes");
    assert_eq!(words("llama.cpp", &model)[0], "no");
    // If all parts are float or have the same scheme, they can be fused.
    for scheme in [None, Some("w8a16-g128-sym".parse().unwrap())] {
        model.layers[0].parts.iter_mut().for_each(|part| part.scheme = scheme);
        assert_eq!(words("vLLM, CUDA", &model), ["yes"; 4]);
        assert_eq!(words("SGLang", &model), ["yes"; 4]);
    }
    model.layers[0].parts.iter_mut().for_each(|p| p.scheme = Some("w4a16-g128-asym".parse().unwrap()));
    assert_eq!(words("transformers", &model)[0], "no");
}

#[test]
fn head_and_embedding() {
    let mut model = outline("compressed-tensors", LLAMA_8B, "w4a16-g128-sym");
    model.head = Some("w8a16-g128-sym".parse().unwrap());
    assert_eq!(words("vLLM, CUDA", &model), ["yes"; 4]);
    assert_eq!(words("vLLM, CPU", &model), ["no"; 4]);
    assert_eq!(words("SGLang", &model), ["yes"; 4]);
    assert_eq!(words("LMDeploy", &model), ["unsure"; 4]);
    model.embedding = model.head;
    assert_eq!(words("vLLM, CUDA", &model), ["yes"; 4]);
    assert_eq!(words("SGLang", &model), ["no"; 4]);
    assert_eq!(words("transformers", &model)[0], "no");
    model.embedding = Some("w8a16-g128-asym".parse().unwrap());
    assert_eq!(words("vLLM, CUDA", &model), ["no"; 4]);
}

#[test]
fn what_each_container_reaches() {
    let yes =
        |container, scheme: &str, name: &str| words(name, &outline(container, LLAMA_8B, scheme))[0] == "yes";
    assert!(yes("compressed-tensors", "w4a16-g128-sym", "LMDeploy"));
    assert!(!yes("compressed-tensors", "w4a16-g64-sym", "LMDeploy"));
    assert!(yes("awq", "w4a16-g128-asym", "LMDeploy"));
    assert!(!yes("awq", "w4a16-g64-asym", "LMDeploy"));
    assert!(yes("awq", "w4a16-g64-asym", "mlx-lm"));
    assert!(!yes("compressed-tensors", "w4a16-g64-sym", "mlx-lm"));
    assert!(
        reason("llama.cpp", &outline("compressed-tensors", LLAMA_8B, "w4a16-g64-sym"), 1)
            .contains("dequantizes the weights")
    );
    assert!(!yes("compressed-tensors", "w4a16-channel-sym", "llama.cpp"));
    assert!(!yes("awq", "w4a16-g128-asym", "llama.cpp"));
    for (scheme, word) in
        [("w8a8-channel-sym", "yes, but"), ("w4a8-g64-sym", "yes, but"), ("w8a8-static", "no")]
    {
        assert_eq!(words("llama.cpp", &outline("compressed-tensors", LLAMA_8B, scheme))[0], word, "{scheme}");
    }
    assert!(yes("gptq", "w4a16-g128-sym", "LMDeploy"));
    assert!(!yes("gptq", "w4a16-g128-asym", "LMDeploy"));
    assert!(!yes("gptq", "w4a16-g64-sym", "LMDeploy"));
    assert!(!yes("gptq", "w4a16-g64-sym", "mlx-lm"));
    assert_eq!(words("llama.cpp", &outline("gptq", LLAMA_8B, "w8a16-channel-asym"))[0], "yes, but");
    assert!(!yes("gptq", "w3a16-g64-sym", "llama.cpp"));
    assert!(yes("gptq", "w2a16-g64-asym", "transformers"));
    let mut mistral = outline("awq", LLAMA_8B, "w4a16-g128-asym");
    mistral.family = "mistral";
    assert_eq!(words("LMDeploy", &mistral), ["no"; 4]);
}

/// The verdicts are those of runs of its model builder, except for the sizes of groups, which the operator refuses.
#[test]
fn onnx_runtime() {
    let word = |container, scheme| words("ONNX Runtime", &outline(container, LLAMA_8B, scheme))[0];
    for scheme in ["w2a16-g64-sym", "w4a16-g32-sym", "w4a16-g64-asym", "w8a16-g128-sym"] {
        assert_eq!(word("gptq", scheme), "yes, but", "{scheme}");
    }
    for scheme in ["w3a16-g64-sym", "w4a16-channel-sym", "w4a16-g48-sym", "w4a16-g8-sym"] {
        assert_eq!(word("gptq", scheme), "no", "{scheme}");
    }
    assert_eq!(word("awq", "w4a16-g128-asym"), "yes, but");
    assert_eq!(word("compressed-tensors", "w4a16-g128-sym"), "no");
    let mut model = outline("gptq", LLAMA_8B, "w4a16-g128-sym");
    model.layers[3].parts[0].scheme = None;
    assert!(reason("ONNX Runtime", &model, 1).starts_with("`down_proj` is float"));
    model.layers[3].parts[0].scheme = Some("w8a16-g128-sym".parse().unwrap());
    assert_eq!(words("ONNX Runtime", &model)[0], "no");
    let opt = Outline { family: "opt", ..outline("gptq", LLAMA_8B, "w4a16-g128-sym") };
    assert_eq!(words("ONNX Runtime", &opt)[0], "no");
}

#[test]
fn no_engine_reads_the_container_of_qserve() {
    let model = outline("qserve", LLAMA_8B, "w4a8-g128-asym-progressive");
    for engine in ENGINES {
        let verdict = engine.loads(&model, 1).unwrap();
        assert_eq!(verdict.reason(), Some("it does not support the qserve format"), "{}", engine.name);
        assert_eq!(verdict.word(), "no");
    }
}

#[test]
fn opt_in_engines() {
    let opt = |container, scheme| Outline { family: "opt", ..outline(container, LLAMA_8B, scheme) };
    let mut model = opt("compressed-tensors", "w4a16-g128-sym");
    for name in ["vLLM, CUDA", "vLLM, CPU", "SGLang"] {
        assert_eq!(words(name, &model), ["yes"; 4], "{name}");
    }
    assert_eq!(words("transformers", &model)[0], "yes");
    assert_eq!(words("LMDeploy", &model), ["no"; 4]);
    assert_eq!(words("llama.cpp", &model)[0], "no");
    assert_eq!(words("mlx-lm", &opt("awq", "w4a16-g128-asym"))[0], "unsure");
    // SGLang's modules ignore settings for single linears.
    model.layers[1].parts[0].scheme = None;
    assert_eq!(words("SGLang", &model), ["no"; 4]);
    assert!(reason("SGLang", &model, 1).starts_with("its OPT uses a different name for `o_proj`"));
    assert_eq!(words("vLLM, CUDA", &model), ["yes"; 4]);
    let mut head = opt("compressed-tensors", "w4a16-g128-sym");
    head.head = Some("w8a16-g128-sym".parse().unwrap());
    assert_eq!(words("vLLM, CUDA", &head), ["unsure"; 4]);
    assert_eq!(words("SGLang", &head), ["no"; 4]);
}

/// transformers is known to read experts in compressed-tensors, with one symmetric scheme for all experts.
#[test]
fn experts_have_rules_of_their_own() {
    let moe = |container, scheme: &str, experts: &[&str]| {
        let experts = experts.iter().map(|scheme| scheme.parse().ok()).collect();
        Outline { experts, ..outline(container, LLAMA_8B, scheme) }
    };
    let (sym, asym) = ("w4a16-g128-sym", "w4a16-g128-asym");
    for (container, scheme, experts, expected) in [
        ("compressed-tensors", sym, &[sym][..], "yes"),
        ("compressed-tensors", asym, &[asym], "no"),
        ("compressed-tensors", sym, &[sym, "w8a16-g128-sym"], "no"),
        ("compressed-tensors", sym, &[sym, "float"], "no"),
        ("compressed-tensors", sym, &["float"], "no"),
        ("awq", asym, &[asym], "no"),
        ("gptq", sym, &[sym], "no"),
    ] {
        let found = words("transformers", &moe(container, scheme, experts))[0];
        assert_eq!(found, expected, "{container}, {scheme}, {experts:?}");
    }
    // What transformers does with experts was run for all of these schemes.
    for (scheme, expected) in [
        ("w8a16-channel-sym", "yes"),
        ("wf8a16-channel", "yes"),
        ("wf8a16-tensor", "yes"),
        ("wf4a16-g32-mx", "yes, but"),
        ("wf8af8-channel", "yes, but"),
        ("w4a8-g128-sym", "yes, but"),
        ("w8a8-channel-sym", "no"),
        ("wf8a16-b128", "no"),
        ("wf8af8-b128", "no"),
        ("wf8a16-g32-mx", "no"),
        ("wf4a16-g16-nv", "no"),
        ("wf4af4-g16-nv", "no"),
    ] {
        let model = moe("compressed-tensors", scheme, &[scheme]);
        assert_eq!(words("transformers", &model)[0], expected, "{scheme}");
        if scheme.contains("a8") || scheme.contains("af8-channel") && expected != "no" {
            let said = reason("transformers", &model, 1);
            assert_eq!(
                said.contains("the inputs of experts stay float"),
                expected != "no",
                "{scheme}: {said}"
            );
        }
    }
    // vLLM has other names for the experts of MiniMax-M2, so only one scheme for all of them reaches them.
    let minimax =
        |experts: &[&str]| Outline { family: "minimax_m2", ..moe("compressed-tensors", sym, experts) };
    assert!(reason("vLLM, CUDA", &minimax(&[sym, "w8a16-g128-sym"]), 1).contains("other names for experts"));
    assert_eq!(words("vLLM, CPU", &minimax(&["float"]))[0], "no");
    assert_ne!(words("vLLM, CUDA", &minimax(&[sym]))[0], "no");
    let llama4 = Outline { family: "llama4_text", ..moe("compressed-tensors", sym, &[sym]) };
    assert_eq!(words("transformers", &llama4)[0], "yes");
    // Experts whose inputs are multiplied by scores are separate linears there.
    let separate = |scheme: &str| Outline {
        family: "llama4_text",
        scales_expert_inputs: true,
        ..moe("compressed-tensors", scheme, &[scheme])
    };
    for (scheme, expected) in
        [(sym, "yes"), ("wf8a16-b128", "yes"), ("nvfp4a16", "yes, but"), ("w8a8-channel-sym", "unsure")]
    {
        assert_eq!(words("transformers", &separate(scheme))[0], expected, "{scheme}");
    }
    assert_eq!(words("vLLM, CPU", &moe("compressed-tensors", sym, &["float"]))[0], "yes");
    let on_cpu = reason("vLLM, CPU", &moe("compressed-tensors", sym, &[sym]), 1);
    assert!(on_cpu.contains("does not support experts"), "{on_cpu}");
}

/// vLLM's sources for NVIDIA devices: the hidden size must fit Marlin's tiles, the intermediate size is padded, and
/// groups may not cross ranks.
#[test]
fn experts_of_vllm() {
    // Qwen3-30B-A3B, and a shape whose hidden size is not a multiple of 128.
    let (even, odd) = ([32, 4, 128, 2048, 768], [14, 2, 64, 896 + 64, 1536]);
    let moe = |container, shape: [usize; 5], scheme: &str| {
        let mut outline = outline(container, shape, scheme);
        outline.experts = [scheme.parse().ok()].into();
        let [_, _, mlp @ ..] = &mut outline.layers[..] else { panic!() };
        mlp.iter_mut().for_each(|layer| layer.of_expert = true);
        outline
    };
    for (container, shape, scheme, expected) in [
        // 768 inputs per expert are 6 groups of 128, which 4 and 8 ranks would split.
        ("compressed-tensors", even, "w4a16-g128-sym", ["yes", "yes", "no", "no"]),
        ("compressed-tensors", even, "w4a16-g32-asym", ["yes", "yes", "yes", "yes"]),
        ("compressed-tensors", even, "w8a16-channel-sym", ["yes", "yes", "yes", "yes"]),
        ("compressed-tensors", odd, "w4a16-g64-sym", ["yes, but", "yes, but", "no", "no"]),
        ("compressed-tensors", odd, "w4a16-channel-sym", ["no", "no", "no", "no"]),
        ("compressed-tensors", even, "w8a8", ["yes, but"; 4]),
        ("compressed-tensors", even, "w8a8-channel-sym-static", ["no"; 4]),
        ("compressed-tensors", even, "w4a8-g128-sym", ["no"; 4]),
        ("compressed-tensors", even, "w4af8-g128-sym", ["yes, but", "no", "no", "no"]),
        ("compressed-tensors", even, "w5a16-g128-sym", ["unsure", "unsure", "no", "no"]),
        ("awq", even, "w4a16-g128-asym", ["yes", "yes", "no", "no"]),
        ("gptq", even, "w4a16-g128-sym", ["yes", "yes", "no", "no"]),
    ] {
        assert_eq!(
            words("vLLM, CUDA", &moe(container, shape, scheme)),
            expected,
            "{container} {shape:?} {scheme}"
        );
    }
    let mut mixed = moe("compressed-tensors", even, "w4a16-g128-sym");
    mixed.experts.insert(None);
    assert_eq!(words("vLLM, CUDA", &mixed)[0], "unsure");
}

/// Rules for linears say nothing about families.
#[test]
fn a_family_that_was_not_checked_gets_no_plain_yes() {
    for family in ["gemma2", "phi3", "cohere", "glm4"] {
        for container in ["compressed-tensors", "awq", "gptq"] {
            let scheme = if container == "awq" { "w4a16-g128-asym" } else { "w4a16-g128-sym" };
            let model = Outline { family, ..outline(container, LLAMA_8B, scheme) };
            for engine in ENGINES {
                let known = engine.known(&model);
                let verdict = engine.loads(&model, 1).unwrap();
                let was_seen = known.basis != Basis::NotChecked;
                assert_eq!(verdict.word() == "yes", was_seen, "{} {container} {family}", engine.name);
                if let Compatibility::Unsure(reason) = verdict {
                    assert!(reason.contains(family) && reason.contains("not checked"), "{reason}");
                }
            }
        }
    }
}

#[test]
fn facts_have_a_version_and_a_day() {
    let known = |name: &str, family| {
        engine(name).known(&Outline { family, ..outline("compressed-tensors", LLAMA_8B, "w4a16-g128-sym") })
    };
    let run = Known { basis: Basis::Run, version: "0.32.0", date: "2026-11-23" };
    assert_eq!(known("vLLM, CPU", "llama"), run);
    assert_eq!(known("SGLang", "llama"), Known { basis: Basis::Read, version: "0.5.23", date: "2026-11-22" });
    assert_eq!(known("vLLM, CUDA", "granite").date, "2026-11-25");
    assert_eq!(known("mlx-lm", "llama"), Known { basis: Basis::Run, version: "0.32.2", date: "2026-11-27" });
    assert_eq!(known("mlx-lm", "qwen3").basis, Basis::Read);
    for fact in ENGINES.iter().flat_map(|engine| engine.models) {
        let (version, date) = fact.on.unwrap_or(("0", "2026-11-22"));
        assert!(version.starts_with(|c: char| c.is_ascii_digit()), "{version}");
        let parts: Vec<&str> = date.split('-').collect();
        assert!(parts.len() == 3 && date.len() == 10 && parts[0] == "2026", "{date}");
        assert!(fact.basis != Basis::NotChecked || fact.on.is_none(), "{:?}", fact.models);
    }
}

/// vLLM, SGLang and transformers have a fact for every model, so that none is forgotten.
#[test]
fn every_family_has_a_line() {
    use crate::model::arch::supported;
    let named = |name: &str, model: &str| engine(name).models.iter().any(|fact| fact.models.contains(&model));
    for model in supported() {
        for name in ["vLLM, CUDA", "vLLM, CPU", "SGLang, CUDA", "transformers"] {
            assert!(named(name, model), "{name} {model}");
        }
    }
}

/// GPT-2 stores weights with inputs first. Engines do not transpose packed codes, but they transpose every tensor named
/// `weight`.
#[test]
fn codes_of_gpt2_that_are_called_weight_are_transposed() {
    let of = |scheme| Outline { family: "gpt2", ..outline("compressed-tensors", LLAMA_8B, scheme) };
    for name in ["vLLM, CUDA", "SGLang"] {
        assert_eq!(words(name, &of("w4a16-g128-sym"))[0], "yes", "{name}");
        for scheme in ["w8a8", "wf8af8-channel"] {
            assert_eq!(words(name, &of(scheme))[0], "no", "{name} {scheme}");
            assert!(reason(name, &of(scheme), 1).contains("transposes all weights"), "{name} {scheme}");
        }
    }
    assert_eq!(words("transformers", &of("w4a16-g128-sym"))[0], "no");
}

/// What transformers does with AWQ and GPTQ files of families beyond Llama.
#[test]
fn formats_in_columns_of_single_families() {
    for (family, awq, gptq) in [
        ("smollm3", "yes", "yes"),
        ("granitemoehybrid", "yes", "yes"),
        ("starcoder2", "no", "yes"),
        ("bloom", "no", "yes"),
        ("qwen3_5_text", "yes", "no"),
        ("qwen3_next", "yes", "no"),
    ] {
        for (container, scheme, expected) in
            [("awq", "w4a16-g128-asym", awq), ("gptq", "w4a16-g128-sym", gptq)]
        {
            let model = Outline { family, ..outline(container, LLAMA_8B, scheme) };
            assert_eq!(words("transformers", &model)[0], expected, "{family} {container}");
        }
    }
}

/// vLLM's rules for Bloom and Ministral 3, and for Gemma 3, which its CPU build ran without restrictions.
#[test]
fn rules_of_single_families() {
    let of = |family, scheme| Outline { family, ..outline("compressed-tensors", LLAMA_8B, scheme) };
    for name in ["vLLM, CUDA", "vLLM, CPU"] {
        assert!(reason(name, &of("bloom", "w4a16-g128-sym"), 1).contains("by head"), "{name}");
        assert_ne!(words(name, &of("bloom", "w8a8"))[0], "no", "{name}");
        assert_eq!(words(name, &of("ministral3", "w4a16-g128-sym"))[0], "yes, but", "{name}");
    }
    let run = engine("vLLM, CPU").known(&of("gemma3_text", "w4a16-g128-sym"));
    assert_eq!((run.basis, run.version), (Basis::Run, "0.32.0"));
    assert_eq!(words("vLLM, CPU", &of("gemma3_text", "w4a16-g128-sym"))[0], "yes");
}

#[test]
fn classes_of_others_and_linears_without_names() {
    let of = |family| Outline { family, ..outline("compressed-tensors", LLAMA_8B, "w4a16-g128-sym") };
    assert_eq!(words("vLLM, CUDA", &of("olmo2"))[0], "yes, but");
    assert_eq!(words("SGLang", &of("phi"))[0], "yes");
    assert_eq!(words("SGLang", &of("gpt_neox"))[0], "unsure");
    let mut mixed = of("phi");
    mixed.layers[3].parts[0].scheme = None;
    assert!(reason("SGLang", &mixed, 1).contains("its class has no name for `down_proj`"));
    assert_eq!(words("vLLM, CUDA", &of("granitemoe"))[0], "yes");
    for name in ["vLLM, CUDA", "vLLM, CPU"] {
        assert!(reason(name, &of("gpt_oss"), 1).contains("skips"), "{name}");
    }
}

#[test]
fn experts_latents_and_containers_of_sglang() {
    let of = |family, container, scheme| Outline { family, ..outline(container, LLAMA_8B, scheme) };
    let with = |model: Outline, experts: &[Option<&str>]| Outline {
        experts: experts.iter().map(|scheme| scheme.map(|s| s.parse().unwrap())).collect(),
        ..model
    };
    let first = |model: &Outline| words("SGLang", model)[0];
    let (packed, bytes) = (Some("w4a16-g128-sym"), Some("w8a8"));
    let mixtral =
        |container, experts: &[Option<&str>]| with(of("mixtral", container, "w4a16-g128-sym"), experts);
    assert_eq!(first(&mixtral("compressed-tensors", &[packed])), "yes");
    assert_eq!(first(&mixtral("compressed-tensors", &[None])), "yes");
    assert_eq!(first(&mixtral("compressed-tensors", &[None, packed])), "unsure");
    assert_eq!(first(&mixtral("compressed-tensors", &[bytes])), "no");
    assert_eq!(first(&mixtral("awq", &[packed])), "unsure");
    assert_eq!(engine("SGLang").basis(&mixtral("compressed-tensors", &[packed])), Basis::Read);

    let mut latent = of("deepseek_v3", "compressed-tensors", "w4a16-g128-sym");
    latent.layers[0].parts[0].module = "model.layers.0.self_attn.kv_b_proj".into();
    assert_eq!(first(&latent), "no");
    assert!(reason("SGLang", &latent, 1).contains("must stay float"));
    latent.layers[0].parts[0].module = "model.layers.0.self_attn.q_a_proj".into();
    assert_eq!(first(&latent), "unsure");
    latent.layers[0].parts[0].module = "model.layers.0.self_attn.q_b_proj".into();
    assert_eq!(first(&latent), "yes");

    let mut class = of("llama", "compressed-tensors", "w4a16-g128-sym");
    class.wrapper = Some("LlavaForConditionalGeneration");
    class.layers[3].parts[0].scheme = None;
    assert_eq!(first(&class), "unsure");
}

#[test]
fn what_nobody_checked_is_unsure() {
    let named = |family, wrapper| Outline {
        family,
        wrapper,
        ..outline("compressed-tensors", LLAMA_8B, "w4a16-g128-sym")
    };
    let unheard = named("unheard", None);
    for engine in
        ENGINES.iter().filter(|engine| engine.reads.iter().any(|r| r.container == COMPRESSED_TENSORS))
    {
        let verdict = engine.loads(&unheard, 1).unwrap();
        let what = "how it runs unheard was not checked";
        assert_eq!((verdict.word(), verdict.reason()), ("unsure", Some(what)), "{}", engine.name);
        assert_eq!(engine.basis(&unheard), Basis::NotChecked);
    }
    // The rules for linears still give a no.
    let three = Outline { family: "unheard", ..outline("compressed-tensors", LLAMA_8B, "w3a16-g64-sym") };
    assert_eq!(words("SGLang", &three), ["no"; 4]);
    // Facts about a class apply to the class, not to the family of its text model.
    let class = named("llama", Some("LlavaForConditionalGeneration"));
    assert_eq!(engine("transformers").basis(&class), Basis::Run);
    assert_eq!(words("vLLM, CUDA", &class), ["yes"; 4]);
    assert_eq!(words("SGLang", &class), ["yes"; 4]);
    assert_eq!(words("SGLang", &named("llama", Some("UnheardForConditionalGeneration"))), ["unsure"; 4]);
}

/// A format without an entry could be split without any checks.
#[test]
fn all_containers_say_how_they_split() {
    for reading in ENGINES.iter().flat_map(|engine| engine.reads) {
        assert!(sharding::SPLITS.iter().any(|(name, _)| *name == reading.container), "{}", reading.container);
        assert!(crate::format::CONTAINERS.iter().any(|known| known.name() == reading.container));
    }
}

/// A fact about a model that quant cannot read would never be used.
#[test]
fn facts_name_models_that_are_read() {
    use crate::model::arch::supported;
    for fact in ENGINES.iter().flat_map(|engine| engine.models) {
        for model in fact.models {
            assert!(supported().any(|known| known == *model), "{model}");
        }
    }
}

#[test]
fn floating_point_weights() {
    let of = |scheme| outline("compressed-tensors", LLAMA_8B, scheme);
    for scheme in ["wf8af8-channel", "wf8af8-tensor-static", "wf8af8-b128"] {
        for name in ["vLLM, CUDA", "SGLang"] {
            assert_eq!(words(name, &of(scheme)), ["yes, but"; 4], "{name} {scheme}");
            assert!(reason(name, &of(scheme), 1).contains("compute capability 8.9"));
        }
        let cpu = if scheme.ends_with("static") { "with a static scale" } else { "AMX" };
        assert!(reason("vLLM, CPU", &of(scheme), 1).contains(cpu), "{scheme}");
        assert!(reason("transformers", &of(scheme), 1).contains("multiplied as floats"));
    }
    for scheme in ["wf8a16-channel", "wf8af8-tensor-static", "wf4a16-g16-nv", "wf8af8-g32-mx"] {
        assert_eq!(words("vLLM, CPU", &of(scheme))[0], "no", "{scheme}");
    }
    for (scheme, vllm, sglang, transformers, llama_cpp) in [
        ("wf8a16-channel", "yes", "yes", "yes", "yes, but"),
        ("wf8a16-tensor", "yes", "yes", "yes", "no"),
        ("wf8a16-b128", "yes", "no", "yes", "yes, but"),
        ("wf8af8-b128", "yes, but", "yes, but", "yes, but", "yes, but"),
        ("wf8af8-tensor-static", "yes, but", "yes, but", "yes, but", "no"),
        ("wf4a16-g16-nv", "yes", "yes", "yes, but", "yes"),
        ("wf4af4-g16-nv", "yes, but", "yes, but", "yes, but", "yes, but"),
        ("wf4a16-g32-mx", "yes, but", "no", "yes, but", "no"),
        ("wf8a16-g32-mx", "yes, but", "no", "yes, but", "no"),
        ("wf8af8-g32-mx", "yes, but", "no", "yes, but", "no"),
    ] {
        let first = |name| words(name, &of(scheme))[0];
        assert_eq!(first("vLLM, CUDA"), vllm, "{scheme}");
        assert_eq!(first("SGLang"), sglang, "{scheme}");
        assert_eq!(first("transformers"), transformers, "{scheme}");
        assert_eq!(first("llama.cpp"), llama_cpp, "{scheme}");
    }
    // Blocks limit the number of ranks: 29568 inputs are 231 blocks, which cannot be split evenly.
    let blocks = outline("compressed-tensors", QWEN_72B, "wf8af8-b128");
    assert_eq!(words("vLLM, CUDA", &blocks), ["yes, but", "no", "no", "no"]);
    assert!(reason("vLLM, CUDA", &blocks, 2).contains("not a multiple of the block size 128"));
    assert_eq!(words("vLLM, CUDA", &of("wf8af8-b128")), ["yes, but"; 4]);
    let narrow = outline("compressed-tensors", [4, 4, 12, 48, 96], "wf4a16-g16-nv");
    assert!(reason("llama.cpp", &narrow, 1).contains("48 inputs are not a multiple of its block size, 64"));
}
