use super::super::PRESETS;
use super::*;
use crate::calibrate::{ExpertTokens, Mask, Packing};
use crate::transform::{Alpha, AwqSettings, Producers, Search, SmoothSettings};

#[test]
fn presets_come_back() {
    for preset in PRESETS {
        let recipe = Recipe::preset(preset.name).unwrap();
        let text = recipe.to_toml();
        let back = Recipe::parse(&text).unwrap();
        assert_eq!(back.to_toml(), text, "{}", preset.name);
        assert_eq!((back.method.name, back.scheme), (recipe.method.name, recipe.scheme));
        assert_eq!((back.sampling, back.settings), (recipe.sampling, recipe.settings));
    }
}

#[test]
fn every_setting_of_a_recipe() {
    let recipe = Recipe::parse(
        r#"
        format = "awq"
        [[transform]]
        kind = "awq"
        search = "reference"
        [quantize]
        method = "rtn"
        scheme = "w4a16-g64"
        ignore = ["*.layers.0.*", "v_proj"]
        [[quantize.override]]
        pattern = "down_proj"
        scheme = "w4a16-channel"
        [calibration]
        text = "pile-val"
        samples = 3
        length = 100
        seed = 7
        packing = "documents"
        mask = "prompts"
        expert_floor = 200
        "#,
    )
    .unwrap();
    assert_eq!(recipe.containers.iter().map(|c| c.name()).collect::<Vec<_>>(), ["awq"]);
    assert_eq!(recipe.scheme.to_string(), "w4a16-g64", "the format decides the symmetry");
    assert_eq!(
        (&*recipe.method.name, recipe.settings.steps.get::<AwqSettings>().search),
        ("awq", Search::Reference)
    );
    assert_eq!(recipe.ignore.len(), 2);
    assert_eq!(recipe.overrides[0].1.to_string(), "w4a16-channel");
    let (packing, mask) = (Packing::Documents, Mask::Prompts);
    let experts = ExpertSampling { tokens: ExpertTokens::Routed, floor: 200 };
    assert_eq!(recipe.sampling, Sampling { samples: 3, length: 100, seed: 7, packing, mask, experts });
    assert_eq!(recipe.calibration.as_deref(), Some("pile-val"));
    assert_eq!(Recipe::parse(&recipe.to_toml()).unwrap().to_toml(), recipe.to_toml());
}

#[test]
fn several_containers() {
    let text = "format = [\"awq\", \"compressed-tensors\"]\n[quantize]\nscheme = \"w4a16-g64-asym\"";
    let recipe = Recipe::parse(text).unwrap();
    let names: Vec<_> = recipe.containers.iter().map(|c| c.name()).collect();
    assert_eq!(names, ["awq", "compressed-tensors"]);
    assert_eq!(Recipe::parse(&recipe.to_toml()).unwrap().to_toml(), recipe.to_toml());
}

#[test]
fn transforms_follow_on_each_other() {
    let recipe = Recipe::parse(
        r#"
        [[transform]]
        kind = "smoothquant"
        alpha = "auto"
        producers = "all"
        [[transform]]
        kind = "awq"
        [quantize]
        method = "gptq"
        scheme = "w4a8-g64-sym"
        "#,
    )
    .unwrap();
    assert_eq!(recipe.method.name, "smoothquant-awq-gptq");
    let smooth: SmoothSettings = recipe.settings.steps.get();
    assert!(matches!(smooth.alpha, Some(Alpha::Auto(_))));
    assert_eq!(smooth.producers, Producers::All);
    assert_eq!(Recipe::parse(&recipe.to_toml()).unwrap().to_toml(), recipe.to_toml());
    let text = |scheme| format!("[quantize]\nscheme = \"{scheme}\"\n[calibration]\nsamples = 4");
    assert!(Recipe::parse(&text("w8a8-static")).unwrap().needs_text());
    assert!(Recipe::parse(&text("w8a8")).is_err());
}

#[test]
fn what_is_wrong_is_said_with_its_place() {
    for (text, expected) in [
        ("", "quantize"),
        ("[quantize]\nscheme = 4", "line 2: invalid type"),
        ("[quantize]\nscheme = \"w4a16\"\nscehme = 1", "line 3: unknown field `scehme`"),
        ("[quantize]\nscheme = \"w9a16\"", "line 2: scheme `w9a16`"),
        (
            "[quantize]\nscheme = \"w4a16\"\nignore = [\n  \"o_proj\",\n  \"re:(\",\n]",
            "line 5: pattern `re:(`",
        ),
        (
            "[quantize]\nscheme = \"w4a16\"\n[[quantize.override]]\npattern = \"o_proj\"\nscheme = \"w9\"",
            "line 5: scheme `w9`",
        ),
        (
            "[quantize]\nscheme = \"w4a16\"\noverride = [\"o_proj=w8a16\"]",
            "line 3: invalid type: string \"o_proj=w8a16\", expected a table with the keys pattern and scheme",
        ),
        ("[quantize]\nscheme = \"w4a16\"\nmethod = \"magic\"", "quantize.method `magic`"),
        ("[quantize]\nscheme = \"w4a16\"\n[quantize.gptq]\ndamping = 0.1", "[quantize.gptq] has no effect"),
        (
            "[quantize]\nscheme = \"w4a16\"\nmethod = \"gptq\"\n[quantize.gptq]\nact_order = \"desc\"",
            "line 5: unknown act order `desc`",
        ),
        (
            "[quantize]\nscheme = \"w4a16\"\nmethod = \"gptq\"\n[quantize.gptq]\ndampnig = 0.1",
            "line 5: unknown key `dampnig` in [quantize.gptq]",
        ),
        (
            "[quantize]\nscheme = \"w4a16\"\nmethod = \"gptq\"\n[quantize.gptq]\nblock_size = -4",
            "line 5: block_size is -4, which is not a count",
        ),
        ("[[transform]]\nkind = \"magic\"\n[quantize]\nscheme = \"w4a16\"", "unknown step `magic`"),
        ("[[transform]]\nkind = \"awq\"\nsearch = \"deep\"\n[quantize]\nscheme = \"w4a16\"", "line 3"),
        (
            "[quantize]\nscheme = \"w4a16\"\n[calibration]\nsamples = \"4\"",
            "line 4: invalid type: string \"4\", expected an integer of at least 0",
        ),
        (
            "[quantize]\nscheme = \"w4a16\"\n[calibration]\nseed = -1",
            "line 4: invalid value: integer `-1`, expected an integer of at least 0",
        ),
        ("[quantize]\nscheme = \"w4a16\"\n[calibration]\nsamples = 4", "[calibration] has no effect"),
        ("[quantize]\nscheme = \"w4a16\"\nscale_search = \"amax\"", "quantize.scale_search has no effect"),
        ("format = []\n[quantize]\nscheme = \"w4a16\"", "no format"),
        ("format = [\"awq\", \"awq\"]\n[quantize]\nscheme = \"w4a16\"", "`awq` is listed twice"),
        ("format = 4\n[quantize]\nscheme = \"w4a16\"", "or an array of names"),
        (
            "[[transform]]\nkind = \"awq\"\n[quantize]\nscheme = \"w4a16\"\n[calibration]\nmask = \"users\"",
            "line 6: unknown variant `users`",
        ),
        (
            "[[transform]]\nkind = \"awq\"\n[quantize]\nscheme = \"w4a16\"\n[calibration]\nexpert_tokens = \"some\"",
            "line 6: unknown variant `some`",
        ),
        ("format = \"gguf9\"\n[quantize]\nscheme = \"w4a16\"", "unknown format `gguf9`"),
        (
            "[[transform]]\nkind = \"awq\"\n[[transform]]\nkind = \"awq\"\n[quantize]\nscheme = \"w4a16\"",
            "`awq` is listed twice",
        ),
        (
            "[[transform]]\nkind = \"awq\"\n[[transform]]\nkind = \"smoothquant\"\n[quantize]\nscheme = \"w8a8\"",
            "`awq` clips the ranges",
        ),
        (
            "[[transform]]\nkind = \"awq\"\nalpha = 0.5\n[quantize]\nscheme = \"w8a8\"",
            "transform.alpha has no effect",
        ),
        (
            "[[transform]]\nkind = \"smoothquant\"\nalpha = 1.5\n[quantize]\nscheme = \"w8a8\"",
            "alpha is 1.5; it must be from 0 to 1",
        ),
        (
            "[[transform]]\nkind = \"smoothquant\"\nalpha = \"best\"\n[quantize]\nscheme = \"w8a8\"",
            "line 3: invalid alpha `best`",
        ),
        (
            "[[transform]]\nkind = \"smoothquant\"\nproducers = 3\n[quantize]\nscheme = \"w8a8\"",
            "line 3: unknown producers `3`",
        ),
        (
            "[[transform]]\nkind = \"awq\"\nsaerch = \"fast\"\n[quantize]\nscheme = \"w4a16\"",
            "line 3: unknown key `saerch`",
        ),
        ("[[transform]]\nsearch = \"fast\"\n[quantize]\nscheme = \"w4a16\"", "missing field `kind`"),
    ] {
        let error = Recipe::parse(text).unwrap_err().to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
}
