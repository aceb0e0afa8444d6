//! Names of integer schemes, and rejected names.

use super::*;

#[test]
fn names_are_read_back_as_they_are_written() {
    for text in [
        "w4a16-g128-sym",
        "w3a16-channel-asym",
        "w8a16-g32-sym",
        "w5a16-g64-asym",
        "w6a16-g128-sym",
        "w7a16-channel-sym",
        "w8a8-channel-sym",
        "w4a8-g128-asym",
        "w8a8-channel-sym-static",
        "w8a8-channel-sym-static-asym",
        "w4a8-g128-sym-progressive",
        "w4a8-g64-asym-progressive-static-asym",
        "wf8a16-channel",
    ] {
        assert_eq!(text.parse::<LinearScheme>().unwrap().to_string(), text);
    }
    let base: SchemeRequest = "w4a16-g64-asym".parse().unwrap();
    assert_eq!(base.refine("w8a16-channel").unwrap().to_string(), "w8a16-channel-asym");
}

#[test]
fn symmetry_may_be_left_open() {
    let open: SchemeRequest = "w4a16-g64".parse().unwrap();
    assert_eq!(open.to_string(), "w4a16-g64");
    assert_eq!(open.refine("w8a16-sym").unwrap().to_string(), "w8a16-g64-sym");
    assert_eq!(open.with_default_symmetry(false).to_string(), "w4a16-g64-asym");
    let message: SchemeRequest = "w4a16-g64-sym".parse().unwrap();
    assert_eq!(message.with_default_symmetry(false).to_string(), "w4a16-g64-sym");
    assert_eq!("w4a16".parse::<LinearScheme>().unwrap().to_string(), "w4a16-g128-sym");
}

#[test]
fn activations_of_8_bits() {
    let scheme = |text: &str| text.parse::<LinearScheme>().unwrap();
    assert_eq!(scheme("w8a8").to_string(), "w8a8-channel-sym");
    assert_eq!(scheme("w4a8").to_string(), "w4a8-g128-sym");
    assert_eq!(scheme("w8a8-g64-static-sym").to_string(), "w8a8-g64-sym-static");
    assert_eq!(scheme("w8a8-static-asym").activations, ActivationScheme::Static { symmetric: false });
    // Only granularity and symmetry carry over from the refined scheme.
    let base: SchemeRequest = "w8a8-g64-static".parse().unwrap();
    assert_eq!(base.refine("w8a8").unwrap().to_string(), "w8a8-g64");
    assert_eq!(base.refine("w8a16").unwrap().to_string(), "w8a16-g64");
}

#[test]
fn unknown_and_repeated_parts_are_refused() {
    for text in [
        "",
        "w1a16",
        "w9a16",
        "w4a4",
        "w4a16-static",
        "w8a8-static-channel",
        "w8a8-static-sym-asym",
        "w8a8-static-static",
        "w8",
        "4a16",
        "w4a16-",
        "w4a16-g0",
        "w4a16-gx",
        "w4a16-g64-channel",
        "w4a16-sym-asym",
        "w8a8-g128-progressive",
        "w4a16-g+32",
        "w4a16-g032",
        "w+4a16",
        "w4a8-channel-progressive",
        "w4a8-progressive-progressive",
        "wf8a8",
        "wf8a16-g128",
        "wf8a16-sym",
        "wf8a16-asym",
        "wf8a16-progressive",
        "wf4a16",
        "wf8",
    ] {
        assert!(text.parse::<LinearScheme>().is_err(), "{text}");
    }
}

#[test]
fn floating_point_weights() {
    let scheme: LinearScheme = "wf8a16".parse().unwrap();
    assert_eq!(scheme.to_string(), "wf8a16-channel", "one scale per row unless groups are asked for");
    assert_eq!(scheme.float_format(), Some(FloatFormat::E4m3));
    assert_eq!((scheme.bits(), scheme.int_bits(), scheme.max_code()), (8, None, 255));
    assert!(scheme.is_symmetric() && !scheme.is_progressive() && !scheme.is_stored_as_bytes());
    assert_eq!(scheme.with_symmetry(false), scheme);
    let mut request = SchemeRequest::from(scheme);
    assert!(request.set_symmetric(true).is_ok());
    assert!(matches!(request.set_symmetric(false), Err(Error::Usage { .. })));
    for (base, refined, expected) in [
        ("wf8a16", "w4a16", "w4a16-g128"),
        ("wf8a16-tensor", "w8a16", "w8a16-g128"),
        ("wf4a16-g16-nv", "w4a16", "w4a16-g128"),
        ("wf8af8-b128", "w4a16-channel", "w4a16-channel"),
        ("wf8af8-b128", "w8a8", "w8a8-channel"),
        ("w4a16-channel", "w8a16", "w8a16-channel"),
    ] {
        let base: SchemeRequest = base.parse().unwrap();
        assert_eq!(base.refine(refined).unwrap().to_string(), expected);
    }
}

#[test]
fn four_bit_integers_under_fp8_activations() {
    let scheme: LinearScheme = "w4af8".parse().unwrap();
    assert_eq!(scheme.to_string(), "w4af8-g128-sym");
    assert_eq!((scheme.int_bits(), scheme.activations), (Some(4), ActivationScheme::Fp8Token));
    for text in ["w4af8-g64", "w4af8-channel", "w4af8-asym", "w4af8-static", "w8af8", "w3af8", "w4af4"] {
        assert!(text.parse::<LinearScheme>().is_err(), "{text}");
    }
}

#[test]
fn names_of_other_tools_and_misspelled_ones_are_answered_with_ours() {
    let remedy = |text: &str| text.parse::<SchemeRequest>().unwrap_err().remedy().to_string();
    for (text, meant) in [
        ("int4", "w4a16"),
        ("INT8", "w8a16"),
        ("w4a61", "w4a16"),
        ("w4a16g128", "w4a16"),
        ("nvfp5", "nvfp4"),
        ("int4-g32", "w4a16-g32"),
        ("fp4", "nvfp4"),
    ] {
        let remedy = remedy(text);
        let first = remedy.lines().next().unwrap();
        assert!(first.starts_with(&format!("did you mean {meant}")), "{text}: {remedy}");
        let named = first.trim_start_matches("did you mean ").trim_end_matches('?');
        named.parse::<SchemeRequest>().unwrap();
    }
    assert_eq!(remedy("q4_k_m"), "Q4_K_M is a GGUF quantization type: add ‹format=gguf›");
    for text in ["q4km", "iq4xs"] {
        assert!(remedy(text).ends_with("looks like a GGUF quantization type: add ‹format=gguf›"), "{text}");
    }
    assert!(!remedy("banana").contains("did you mean"));
    // An error in the rest of a name is not reported as a misspelling of its first part.
    assert!(!remedy("w4a16-g0").contains("did you mean"));
}
