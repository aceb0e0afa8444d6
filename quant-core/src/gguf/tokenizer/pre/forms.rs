//! llama.cpp's built-in pre-tokenizers as steps of a `tokenizer.json`.
//!
//! Expressions are those of the published tokenizers if these are known; llama.cpp replaces some by others that its
//! regular expressions support.

use std::borrow::Cow;

use serde_json::{Value as Json, json};

/// A step of a pre-tokenizer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    /// Matches of the regular expression are separate pieces.
    Split(Cow<'static, str>),
    /// Every digit is a separate piece.
    Digits,
    /// Maps bytes to the byte-level alphabet, optionally splitting by GPT-2's regular expression first.
    ByteLevel { splits: bool },
}

#[derive(Debug)]
pub(in crate::gguf) struct Form {
    /// Its names in llama.cpp. The first one is written for a vocabulary that is recognized by its steps.
    names: &'static [&'static str],
    pub(super) steps: &'static [Step],
    /// `ignore_merges`: whether pieces in the vocabulary are taken whole, regardless of the merges.
    pub(in crate::gguf) whole: bool,
    /// Whether texts begin with the BOS token unless the file states otherwise.
    pub(in crate::gguf) adds_bos: bool,
    /// Whether the published tokenizers normalize texts to NFC first. llama.cpp does not.
    pub(in crate::gguf) composes: bool,
}

const THREE_DIGITS: &str = r"\p{N}{1,3}";
const NEWLINE: &str = r"[\r\n]";
const THOUSANDS: &str = r"(?=(\d{3})+(?!\d))";
const GPT_2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";
const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN_2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN_35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT_4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const KIMI_K2: &str = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const YOUTU: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK_WORDS: &str = r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";
const DEEPSEEK_PUNCTUATION: &str = r"\s?[!-/:-~！-／：-～‘-‟　-。]+";
const DEEPSEEK_IDEOGRAPHS: &str = r"[一-龥ࠀ-一가-퟿]+";
const DEEPSEEK_3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const KANA: &str = r"[一-龥぀-ゟ゠-ヿ]+";
const SPARK: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"##;
const YOUTU_SCRIPTS: &str = r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+";
const SENTENCES: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";
const SEED_CODER: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const EXAONE_MOE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";
const BAILING: &str = r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
const MINICPM_5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const JAIS_2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}";
const UFAKZEKA: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const FALCON: &str = r"[\p{P}\$\+<=>\^~\|`]+";

const fn split(expression: &'static str) -> Step {
    Step::Split(Cow::Borrowed(expression))
}

const BYTES: Step = Step::ByteLevel { splits: false };
const WORDS: Step = Step::ByteLevel { splits: true };
const FORM: Form = Form { names: &[], steps: &[], whole: false, adds_bos: false, composes: false };

static FORMS: &[Form] = &[
    Form {
        names: &[
            "gpt-2",
            "a.x-4.0",
            "exaone4",
            "gigachat",
            "granite-docling",
            "jais",
            "mellum",
            "mpt",
            "olmo",
            "phi-2",
            "trillion",
        ],
        steps: &[WORDS],
        ..FORM
    },
    Form {
        names: &[
            "smollm",
            "codeshell",
            "command-r",
            "exaone",
            "mellum2",
            "minerva-7b",
            "refact",
            "starcoder",
        ],
        steps: &[Step::Digits, WORDS],
        ..FORM
    },
    Form {
        names: &["llama-bpe", "falcon-h1", "falcon3", "lfm2", "llama-v3", "llama3", "midm-2.0", "pixtral"],
        steps: &[split(LLAMA_3), BYTES],
        whole: true,
        adds_bos: true,
        ..FORM
    },
    Form { names: &["smaug-bpe", "chatglm-bpe", "dbrx", "glm4"], steps: &[split(LLAMA_3), BYTES], ..FORM },
    Form { names: &["qwen2"], steps: &[split(QWEN_2), BYTES], composes: true, ..FORM },
    Form {
        names: &[
            "stablelm2",
            "deepseek-r1-qwen",
            "f2llmv2",
            "grok-2",
            "hunyuan",
            "kormo",
            "megrez",
            "solar-open",
        ],
        steps: &[split(QWEN_2), BYTES],
        ..FORM
    },
    Form { names: &["qwen35"], steps: &[split(QWEN_35), BYTES], composes: true, ..FORM },
    Form { names: &["tekken"], steps: &[split(TEKKEN), BYTES], whole: true, adds_bos: true, ..FORM },
    Form {
        names: &["gpt-4o", "kanana2", "llama4", "minimax-m2", "talkie"],
        steps: &[split(GPT_4O), BYTES],
        ..FORM
    },
    Form { names: &["kimi-k2"], steps: &[split(KIMI_K2), BYTES], ..FORM },
    Form {
        names: &["deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"],
        steps: &[split(THREE_DIGITS), split(KANA), split(DEEPSEEK_3), BYTES],
        ..FORM
    },
    Form {
        names: &["deepseek-llm"],
        steps: &[
            split(NEWLINE),
            split(DEEPSEEK_WORDS),
            split(DEEPSEEK_PUNCTUATION),
            split(r"\s+$"),
            split(DEEPSEEK_IDEOGRAPHS),
            split(r"\p{N}+"),
            BYTES,
        ],
        ..FORM
    },
    Form {
        names: &["deepseek-coder"],
        steps: &[
            split(NEWLINE),
            split(r"\s?\p{L}+"),
            split(r"\s?\p{P}+"),
            split(DEEPSEEK_IDEOGRAPHS),
            Step::Digits,
            BYTES,
        ],
        ..FORM
    },
    Form {
        names: &["falcon"],
        steps: &[split(FALCON), split(GPT_2), split("[0-9][0-9][0-9]"), BYTES],
        ..FORM
    },
    Form { names: &["bloom", "gpt3-finnish", "poro-chat"], steps: &[split(SENTENCES), BYTES], ..FORM },
    Form { names: &["viking"], steps: &[split(SENTENCES), Step::Digits, BYTES], ..FORM },
    Form { names: &["seed-coder"], steps: &[split(SEED_CODER), BYTES], ..FORM },
    Form { names: &["exaone-moe"], steps: &[split(EXAONE_MOE), BYTES], ..FORM },
    Form { names: &["bailingmoe", "bailingmoe2", "llada-moe"], steps: &[split(BAILING), BYTES], ..FORM },
    Form {
        names: &["minicpm5"],
        steps: &[split(THREE_DIGITS), split(MINICPM_5), BYTES],
        whole: true,
        ..FORM
    },
    Form { names: &["jais-2"], steps: &[split(JAIS_2), BYTES], ..FORM },
    Form { names: &["youtu"], steps: &[split(YOUTU_SCRIPTS), split(YOUTU), BYTES], whole: true, ..FORM },
    Form {
        names: &["spark2_5"],
        steps: &[split(THREE_DIGITS), split(KANA), split(SPARK), Step::Digits, BYTES],
        ..FORM
    },
    Form { names: &["superbpe"], steps: &[split(r"\p{N}+"), split(THOUSANDS), BYTES], ..FORM },
    Form {
        names: &["cohere2moe", "tiny_aya"],
        steps: &[split(r"\d{1,3}(?=(?:\d{3})*\b)"), split(GPT_4O), BYTES],
        ..FORM
    },
    Form { names: &["laguna"], steps: &[split(r"[^\n]+|[\n]+"), split(QWEN_2), BYTES], ..FORM },
    Form { names: &["ufakzeka"], steps: &[split(UFAKZEKA), BYTES], ..FORM },
];

/// All names in the table.
#[cfg(test)]
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    FORMS.iter().flat_map(|form| form.names.iter().copied())
}

impl Form {
    pub(in crate::gguf) fn named(name: &str) -> Option<&'static Self> {
        FORMS.iter().find(|form| form.names.contains(&name))
    }

    /// Several pre-tokenizers have the same steps. llama.cpp treats them alike, so the first name in the table is
    /// returned.
    pub(super) fn name(steps: &[Step], whole: bool) -> Option<&'static str> {
        let alike = |form: &&Self| form.steps == steps && form.whole == whole;
        FORMS.iter().find(alike).and_then(|form| form.names.first().copied())
    }

    /// The value of `pre_tokenizer` in a `tokenizer.json`.
    pub(in crate::gguf) fn json(&self) -> Json {
        let one = |step: &Step| match step {
            Step::Split(expression) => json!({
                "type": "Split", "pattern": { "Regex": expression }, "behavior": "Isolated", "invert": false,
            }),
            Step::Digits => json!({ "type": "Digits", "individual_digits": true }),
            Step::ByteLevel { splits } => json!({
                "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": splits,
            }),
        };
        match self.steps {
            [only] => one(only),
            steps => {
                json!({ "type": "Sequence", "pretokenizers": steps.iter().map(one).collect::<Vec<Json>>() })
            }
        }
    }
}

/// The steps of a pre-tokenizer; `None` if one of them is not supported.
pub(super) fn steps(json: &Json) -> Option<Vec<Step>> {
    let flag = |key: &str| json.get(key).and_then(Json::as_bool);
    match json.get("type")?.as_str()? {
        "Sequence" => {
            let parts = json.get("pretokenizers")?.as_array()?;
            let parts: Option<Vec<Vec<Step>>> = parts.iter().map(steps).collect();
            Some(parts?.into_iter().flatten().collect())
        }
        "Split" => {
            let expression = json.get("pattern")?.get("Regex")?.as_str()?;
            // Some files have the characters, others their escapes.
            let expression = expression.replace('\r', r"\r").replace('\n', r"\n");
            let isolates = match (json.get("behavior")?.as_str()?, flag("invert") == Some(true)) {
                ("Isolated", false) => true,
                // Only matches are kept, which is the same if every text consists of matches.
                ("Removed", true) => expression.ends_with(r"|\s+(?!\S)|\s+"),
                _ => false,
            };
            let step = match expression.as_str() {
                r"\p{N}" => Step::Digits,
                _ => Step::Split(expression.into()),
            };
            isolates.then(|| vec![step])
        }
        "Digits" => (flag("individual_digits") == Some(true)).then(|| vec![Step::Digits]),
        "ByteLevel" => {
            let splits = flag("use_regex").unwrap_or(true);
            (flag("add_prefix_space") == Some(false)).then(|| vec![Step::ByteLevel { splits }])
        }
        _ => None,
    }
}
