//! Finds which of llama.cpp's pre-tokenizers a byte-level BPE uses.
//!
//! llama.cpp has built-in pre-tokenizers, identified by name. Its converter finds the name by the hash of the tokens of
//! one text, which recognizes published vocabularies. For others, the steps in `tokenizer.json` are compared with those
//! of known names.

use std::path::Path;

use serde_json::{Value as Json, json};

use crate::Error;
use crate::digest::sha256_hex;

/// The text whose tokens are hashed.
pub(super) const PROBE: &str = "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶\u{200d}🌫\u{fe0f} (multiple emojis concatenated) ✅ 🦙🦙 3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3 កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天～ ------======= нещо на Български ''''''```````\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure? 'M not sure I'll make it, 'D you like some tea? We'Ve a'lL";

/// Names by the SHA-256 of the tokens, written as a Python list.
const HASHES: &[(&str, &str)] = &[
    ("a.x-4.0", "b0a6b1c0bd5998ebd9df08611efde34a4ff03faed45ae09c43e6b31ebd4b94cf"),
    ("bloom", "3c30d3ad1d6b64202cd222813e7736c2db6e1bd6d67197090fc1211fbc612ae7"),
    ("chatglm-bpe", "81d72c7348a9f0ebe86f23298d37debe0a5e71149e29bd283904c02262b27516"),
    ("chatglm-bpe", "b6e8e1518dc4305be2fe39c313ed643381c4da5db34a98f6a04c093f8afbe99b"),
    ("codeshell", "7b3e7548e4308f52a76e8229e4e6cc831195d0d1df43aed21ac6c93da05fec5f"),
    ("command-r", "9c2227e4dd922002fb81bde4fc02b0483ca4f12911410dee2255e4987644e3f8"),
    ("dbrx", "a8594e3edff7c29c003940395316294b2c623e09894deebbc65f33f1515df79e"),
    ("deepseek-coder", "347715f544604f9118bb75ed199f68779f423cabb20db6de6f31b908d04d7821"),
    ("deepseek-llm", "049ecf7629871e3041641907f3de7c733e4dbfdc736f57d882ba0b0845599754"),
    ("deepseek-r1-qwen", "b3f499bb4255f8ca19fccd664443283318f2fd2414d5e0b040fbdd0cc195d6c5"),
    ("deepseek-v3", "877081d19cf6996e2c4ff0e1236341e9b7bde288f5311a56a937f0afbbb3aeb5"),
    ("exaone", "4e2b24cc4770243d65a2c9ec19770a72f08cffc161adbb73fcbb6b7dd45a0aae"),
    ("exaone4", "2085e1638f6c377a0aa4ead21b27bb4cb941bf800df86ed391011769c1758dfb"),
    ("falcon", "8aeee3860c56296a157a1fe2fad249ec40aa59b1bb5709f4ade11c4e6fe652ed"),
    ("falcon-h1", "3eda48b4c4dc7de733d1a8b3e3b4a85243dbbf704da2ee9d42c6beced8897896"),
    ("falcon-h1", "48f8e02c0359c0bbdd82f26909171fac1c18a457bb47573ed1fe3bbb2c1cfd4b"),
    ("falcon-h1", "60476e1243776c4fb1b993dbd7a5f15ac22f83c80afdf425fa5ae01c8d44ef86"),
    ("falcon-h1", "a6b57017d60e6edb4d88ecc2845188e0eb333a70357e45dcc9b53964a73bbae6"),
    ("falcon3", "9d032fcbd5501f4a38150912590928bfb36091efb5df11b8e2124b0390e3fb1e"),
    ("glm4", "9ca2dd618e8afaf09731a7cf6e2105b373ba6a1821559f258b272fe83e6eb902"),
    ("glm4", "a1336059768a55c99a734006ffb02203cd450fed003e9a71886c88acf24fdbc2"),
    ("glm4", "cdf5f35325780597efd76153d4d1c16778f766173908894c04afc20108536267"),
    ("gpt-2", "0fe1cf6eda062318a1af7270f3331a85c539a01778ff948e24388e949c5282f4"),
    ("gpt-2", "3ce83efda5659b07b1ad37ca97ca5797ea4285d9b9ab0dc679e4a720c9da7454"),
    ("gpt-4o", "ccc2ef013c104be7bae2965776d611e1d7a8a2a9c547dd93a682c9a9fc80352e"),
    ("gpt3-finnish", "bc01ce58980e1db43859146dc51b1758b3b88729b217a74792e9f8d43e479d21"),
    ("granite-docling", "53e325976a6e142379c19b09afcae354f2f496f147afa8f9e189a33fe4e3024e"),
    ("hunyuan", "7e57df22b1fe23a7b1e1c7f3dc4e3f96d43a4eb0836d0c6bdc3436d7b2f1c664"),
    ("hunyuan-dense", "bba3b3366b646dbdded5dbc42d59598b849371afc42f7beafa914afaa5b70aa6"),
    ("jais", "b53802fb28e26d645c3a310b34bfe07da813026ec7c7716883404d5e0f8b1901"),
    ("jais-2", "bc5108ee1eb6a3d600cadd065f63190fbd0554dbc9e4bbd6a0d977970afc8d2a"),
    ("kormo", "4a2e2abae11ca2b86d570fc5b44be4d5eb5e72cc8f22dd136a94b37da83ab665"),
    ("lfm2", "169bf0296a13c4d9b7672313f749eb36501d931022de052aad6e36f2bf34dd51"),
    ("lfm2", "9e454714343b69b99b71795c1d27a68c2a1d15dab111f4d353109f966af29da7"),
    ("llama-bpe", "0ef9807a4087ebef797fc749390439009c3b9eda9ad1a097abbe738f486c01e5"),
    ("llama4", "d353350c764d8c3b39c763113960e4fb4919bea5fbf208a0e3b22e8469dc7406"),
    ("mellum", "a1e163ecab2e718a4c829d1148b6e86824ec36163bb71941c3dca9cd5ac25756"),
    ("midm-2.0", "f6791d196f87ce6b56a7d234be618e0d58f8cda3549416635b2bebcd22cd95c4"),
    ("minicpm5", "36f3066e97b7f3994b379aaacde306c1444c6ae84e81a5ae3cd2b7ed3b8c42d4"),
    ("mpt", "b6dc8df998e1cfbdc4eac8243701a65afe638679230920b50d6f17d81c098166"),
    ("phi-2", "fcace8b9cac38ce847670c970cd5892031a753a1ef381abd1d9af00f713da085"),
    ("pixtral", "0e9433cbbb161f89e264eb32e8e64bfe69e834973ffca5d41d3948a604a3e2a3"),
    ("poro-chat", "c7ea5862a53e4272c035c8238367063e2b270d51faa48c0f09e9d5b54746c360"),
    ("qwen2", "d4540891389ea895b53b399da6ac824becc30f2fba0e9ddbb98f92e55ca0e97c"),
    ("qwen2", "e636dc30a262dcc0d8c323492e32ae2b70728f4df7dfe9737d9f920a282b8aea"),
    ("qwen35", "1444df51289cfa8063b96f0e62b1125440111bc79a52003ea14b6eac7016fd5f"),
    ("qwen35", "d30d75d9059f1aa2c19359de71047b3ae408c70875e8a3ccf8c5fba56c9d8af4"),
    ("refact", "6221ad2852e85ce96f791f476e0b390cf9b474c9e3d1362f53a24a06dc8220ff"),
    ("seed-coder", "d5f1dd6f980fec569fb218a81a7658ac45fc56b38c5a0adeb1c232fbe04ef5ec"),
    ("smaug-bpe", "c136ed14d01c2745d4f60a9596ae66800e2b61fa45643e72436041855ad4089d"),
    ("smollm", "855059429035d75a914d1eda9f10a876752e281a054a7a3d421ef0533e5b6249"),
    ("stablelm2", "32d85c31273f8019248f2559fed492d929ea28b17e51d81d3bb36fff23ca72b3"),
    ("starcoder", "35d91631860c815f952d711435f48d356ebac988362536bed955d43bfa436e34"),
    ("superbpe", "7dec86086fcc38b66b7bc1575a160ae21cf705be7718b9d5598190d7c12db76f"),
    ("tekken", "63b97e4253352e6f357cc59ea5b583e3a680eaeaf2632188c2b952de2588485e"),
    ("tiny_aya", "d772b220ace2baec124bed8cfafce0ead7d6c38a4b65ef11261cf9d5d62246d1"),
    ("trillion", "1994ffd01900cfb37395608534236ecd63f2bd5995d6cb1004dda1af50240f15"),
    ("viking", "7fc505bd3104ca1083b150b17d088b59534ede9bde81f0dd2090967d7fe52cee"),
];

/// A step of a pre-tokenizer.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// Matches of the regular expression are separate pieces.
    Split(String),
    /// Every digit is a separate piece.
    Digits,
    /// Maps bytes to the byte-level alphabet, optionally splitting by GPT-2's regular expression first.
    ByteLevel { splits: bool },
}

const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN_2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The name of a pre-tokenizer with these steps; `whole` is `ignore_merges`: whether pieces in the vocabulary are taken
/// whole, regardless of the merges.
fn by_steps(steps: &[Step], whole: bool) -> Option<&'static str> {
    match steps {
        [Step::ByteLevel { splits: true }] if !whole => Some("gpt-2"),
        [Step::Digits, Step::ByteLevel { splits: true }] if !whole => Some("smollm"),
        [Step::Split(expression), Step::ByteLevel { splits: false }] => match (expression.as_str(), whole) {
            (LLAMA_3, true) => Some("llama-bpe"),
            (LLAMA_3, false) => Some("smaug-bpe"),
            (QWEN_2, false) => Some("qwen2"),
            (TEKKEN, true) => Some("tekken"),
            _ => None,
        },
        _ => None,
    }
}

/// A pre-tokenizer by its name in the form of `tokenizer.json`, and whether pieces in the vocabulary are taken whole;
/// `None` if the name is not supported.
pub(in crate::gguf) fn pre_tokenizer(name: &str) -> Option<(Json, bool)> {
    let bytes = |splits: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": splits });
    let split = |expression: &str| {
        let split = json!({
            "type": "Split", "pattern": { "Regex": expression }, "behavior": "Isolated", "invert": false,
        });
        json!({ "type": "Sequence", "pretokenizers": [split, bytes(false)] })
    };
    Some(match name {
        "gpt-2" => (bytes(true), false),
        "smollm" | "starcoder" | "command-r" | "refact" => {
            let digits = json!({ "type": "Digits", "individual_digits": true });
            (json!({ "type": "Sequence", "pretokenizers": [digits, bytes(true)] }), false)
        }
        "llama-bpe" => (split(LLAMA_3), true),
        "smaug-bpe" | "dbrx" => (split(LLAMA_3), false),
        "qwen2" | "deepseek-r1-qwen" => (split(QWEN_2), false),
        "tekken" => (split(TEKKEN), true),
        _ => return None,
    })
}

/// The steps of a pre-tokenizer; `None` if one of them is not supported.
fn steps(json: &Json) -> Option<Vec<Step>> {
    let flag = |key: &str| json.get(key).and_then(Json::as_bool);
    match json.get("type")?.as_str()? {
        "Sequence" => {
            let parts = json.get("pretokenizers")?.as_array()?;
            let parts: Option<Vec<Vec<Step>>> = parts.iter().map(steps).collect();
            Some(parts?.into_iter().flatten().collect())
        }
        "Split" => {
            let isolates = json.get("behavior")?.as_str()? == "Isolated" && flag("invert") != Some(true);
            let expression = json.get("pattern")?.get("Regex")?.as_str()?;
            isolates.then(|| vec![Step::Split(expression.to_owned())])
        }
        "Digits" => (flag("individual_digits") == Some(true)).then(|| vec![Step::Digits]),
        "ByteLevel" => {
            let splits = flag("use_regex").unwrap_or(true);
            (flag("add_prefix_space") == Some(false)).then(|| vec![Step::ByteLevel { splits }])
        }
        _ => None,
    }
}

/// Whether a pre-tokenizer or decoder is byte-level, or contains one that is.
pub(super) fn has_byte_level(json: &Json) -> bool {
    let parts = ["pretokenizers", "decoders"].into_iter().filter_map(|key| json.get(key)?.as_array());
    json.get("type").and_then(Json::as_str) == Some("ByteLevel") || parts.flatten().any(has_byte_level)
}

/// Whether the normalizer does not change text, or only normalizes it to NFC.
fn leaves_text(json: &Json) -> bool {
    match json.get("normalizer") {
        None | Some(Json::Null) => true,
        Some(normalizer) => normalizer.get("type").and_then(Json::as_str) == Some("NFC"),
    }
}

/// The name and how it was found: by the hash of the tokens of [`PROBE`], or by the steps.
pub(super) fn find(json: &Json, probe: &[u32]) -> Option<(String, String)> {
    let ids: Vec<String> = probe.iter().map(u32::to_string).collect();
    let hash = sha256_hex(format!("[{}]", ids.join(", ")));
    if let Some((name, _)) = HASHES.iter().find(|(_, known)| *known == hash) {
        return Some(((*name).to_owned(), "recognized by its vocabulary".into()));
    }
    let whole = json.get("model").and_then(|m| m.get("ignore_merges")).and_then(Json::as_bool) == Some(true);
    let found = json.get("pre_tokenizer").and_then(steps).and_then(|steps| by_steps(&steps, whole));
    let name = found.filter(|_| leaves_text(json))?;
    Some((name.to_owned(), "recognized by its steps".into()))
}

/// The error for a pre-tokenizer that is not recognized.
pub(super) fn unrecognized(path: &Path) -> Error {
    Error::InputFile {
        path: path.to_owned(),
        line: None,
        reason: "has an unknown pre-tokenizer".into(),
        remedy: "add ‹pre=NAME›, with llama.cpp's name of the equivalent pre-tokenizer, or ‹pre=none› for a \
            file without a vocabulary"
            .into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_have_names() {
        let split = |expression: &str| json!({ "type": "Split", "pattern": { "Regex": expression }, "behavior": "Isolated" });
        let bytes =
            |splits: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "use_regex": splits });
        let digits = json!({ "type": "Digits", "individual_digits": true });
        let sequence = |parts: Vec<Json>| json!({ "type": "Sequence", "pretokenizers": parts });
        for (json, whole, name) in [
            (bytes(true), false, Some("gpt-2")),
            (sequence(vec![digits.clone(), bytes(true)]), false, Some("smollm")),
            (sequence(vec![split(LLAMA_3), bytes(false)]), true, Some("llama-bpe")),
            (sequence(vec![split(LLAMA_3), bytes(false)]), false, Some("smaug-bpe")),
            (sequence(vec![split(QWEN_2), bytes(false)]), false, Some("qwen2")),
            (sequence(vec![split(TEKKEN), bytes(false)]), true, Some("tekken")),
            (sequence(vec![split("\\s+"), bytes(false)]), false, None),
            (sequence(vec![digits, bytes(false)]), false, None),
        ] {
            assert_eq!(by_steps(&steps(&json).unwrap(), whole), name, "{json}");
        }
        assert_eq!(steps(&json!({ "type": "ByteLevel", "add_prefix_space": true })), None);
        assert_eq!(steps(&json!({ "type": "Metaspace" })), None);
    }

    #[test]
    fn one_that_is_not_recognized_can_be_named() {
        assert_eq!(find(&json!({ "pre_tokenizer": { "type": "Whitespace" } }), &[1, 2]), None);
        let error = unrecognized(Path::new("tokenizer.json"));
        assert_eq!(error.category(), crate::Category::Input);
        assert!(
            error.remedy().marked().contains("‹pre=NAME›") && error.remedy().marked().contains("‹pre=none›")
        );
    }
}
