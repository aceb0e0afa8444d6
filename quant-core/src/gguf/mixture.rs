//! Mixtures: which tensor gets which block type, under the names used by `llama-quantize`.
//!
//! A mixture is a base type and a list of rules for the tensors with other types. Rules depend on the role of a tensor,
//! on its layer, and on properties of the model.

use super::families::GgufFamily;
use crate::blocks::{
    self, BF16, BlockType, F16, F32, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, IQ4_NL, IQ4_XS, MXFP4, Q2_K,
    Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, TQ1_0, TQ2_0,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Query,
    Key,
    Value,
    AttentionOutput,
    Gate,
    Up,
    Down,
    /// The output head, or the embedding if it is tied to the head.
    Head,
    Embedding,
    Other,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    Always,
    /// In the first and the last eighth of the layers, and in every third layer between.
    More,
    /// As [`More`](Self::More), in models with exactly eight experts.
    MoreWithEightExperts,
    /// Except in the first and the last eighth of the layers.
    Middle,
    /// In the first `n` layers.
    First(usize),
    /// In the first `1 / n` of the layers.
    FirstOf(usize),
    /// In the first `1 / n` of the layers, with an importance matrix.
    FirstOfWeighted(usize),
    /// In the first `1 / n` of the layers, without an importance matrix.
    FirstOfUnweighted(usize),
    /// If at least four query heads share a key head.
    Shared,
    /// If at least four query heads share a key head, or the model has at least four experts.
    SharedOrExperts,
    /// In models with exactly eight experts.
    EightExperts,
}

#[derive(Clone, Copy)]
struct Rule(Role, When, &'static BlockType);

/// A mixture.
pub struct Mixture {
    /// The name, as in `llama-quantize`.
    pub name: &'static str,
    /// The value of `general.file_type`.
    pub id: u32,
    /// The type of tensors without a rule.
    pub base: &'static BlockType,
    /// Whether the mixture requires an importance matrix.
    pub needs_importance: bool,
    /// Whether the types are chosen by the rules of `llama-quantize` for about two bits: `down` tensors are counted one
    /// by one instead of by their layer, and models with 80 layers are not an exception.
    two_bits: bool,
    /// The type of tensors with several matrices, such as all experts of a block, if it differs.
    stacked: Option<&'static BlockType>,
    /// Rules for tensors whose type differs from the base type. The first rule that applies is used.
    rules: &'static [Rule],
}

impl std::fmt::Debug for Mixture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl PartialEq for Mixture {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Mixture {}

use Role::{AttentionOutput, Down, Embedding, Gate, Head, Key, Query, Up, Value};
use When::{
    Always, EightExperts, First, FirstOf, FirstOfUnweighted, FirstOfWeighted, Middle, More,
    MoreWithEightExperts, Shared, SharedOrExperts,
};

const fn plain(name: &'static str, id: u32, base: &'static BlockType) -> Mixture {
    Mixture { name, id, base, needs_importance: false, two_bits: false, stacked: None, rules: &[] }
}

/// In models with eight experts, keys and values are small compared to the experts.
const EIGHT: [Rule; 2] = [Rule(Value, EightExperts, &Q8_0), Rule(Key, EightExperts, &Q8_0)];
const HEAD: Rule = Rule(Head, Always, &Q6_K);
const SMALL_HEAD: Rule = Rule(Head, Always, &Q5_K);
const TWO_BITS: [Rule; 7] = [
    Rule(Value, SharedOrExperts, &Q4_K),
    Rule(Value, Always, &Q2_K),
    Rule(Key, EightExperts, &Q4_K),
    Rule(Down, FirstOf(8), &Q2_K),
    Rule(AttentionOutput, EightExperts, &Q5_K),
    Rule(Embedding, Always, &Q2_K),
    SMALL_HEAD,
];
const TWO_BITS_LARGE: [Rule; 8] = [
    TWO_BITS[0],
    Rule(Value, Always, &IQ3_S),
    TWO_BITS[2],
    Rule(Down, FirstOf(8), &IQ3_S),
    TWO_BITS[4],
    Rule(AttentionOutput, Always, &IQ3_S),
    Rule(Embedding, Always, &IQ3_S),
    SMALL_HEAD,
];
const TERNARY: [Rule; 4] = [EIGHT[0], EIGHT[1], Rule(Embedding, Always, &Q4_K), HEAD];

/// The mixtures that can be written.
pub static MIXTURES: &[Mixture] = &[
    plain("F32", 0, &F32),
    plain("F16", 1, &F16),
    plain("BF16", 32, &BF16),
    Mixture { rules: &EIGHT, ..plain("Q8_0", 7, &Q8_0) },
    Mixture {
        rules: &[EIGHT[0], EIGHT[1], Rule(Down, FirstOfWeighted(8), &Q4_1), HEAD],
        ..plain("Q4_0", 2, &Q4_0)
    },
    Mixture { rules: &[EIGHT[0], EIGHT[1], HEAD], ..plain("Q4_1", 3, &Q4_1) },
    Mixture {
        rules: &[EIGHT[0], EIGHT[1], Rule(Down, FirstOfWeighted(8), &Q5_1), HEAD],
        ..plain("Q5_0", 8, &Q5_0)
    },
    Mixture { rules: &[EIGHT[0], EIGHT[1], HEAD], ..plain("Q5_1", 9, &Q5_1) },
    Mixture {
        rules: &[
            EIGHT[0],
            EIGHT[1],
            Rule(Value, Shared, &Q4_K),
            Rule(Value, Always, &Q3_K),
            Rule(Down, Always, &Q3_K),
            Rule(AttentionOutput, EightExperts, &Q5_K),
            Rule(AttentionOutput, Always, &Q3_K),
            HEAD,
        ],
        ..plain("Q2_K", 10, &Q2_K)
    },
    Mixture {
        needs_importance: true,
        rules: &[EIGHT[0], EIGHT[1], Rule(Value, Shared, &Q4_K), Rule(Down, FirstOf(8), &Q4_K), HEAD],
        ..plain("Q2_K_S", 21, &Q2_K)
    },
    Mixture {
        rules: &[EIGHT[0], EIGHT[1], Rule(AttentionOutput, EightExperts, &Q5_K), HEAD],
        ..plain("Q3_K_S", 11, &Q3_K)
    },
    Mixture {
        rules: &[
            EIGHT[0],
            EIGHT[1],
            Rule(Value, First(2), &Q5_K),
            Rule(Value, Always, &Q4_K),
            Rule(Down, FirstOf(16), &Q5_K),
            Rule(Down, Always, &Q4_K),
            Rule(AttentionOutput, EightExperts, &Q5_K),
            Rule(AttentionOutput, Always, &Q4_K),
            HEAD,
        ],
        ..plain("Q3_K_M", 12, &Q3_K)
    },
    Mixture {
        rules: &[
            EIGHT[0],
            EIGHT[1],
            Rule(Value, Always, &Q5_K),
            Rule(Down, Always, &Q5_K),
            Rule(AttentionOutput, EightExperts, &Q3_K),
            Rule(AttentionOutput, Always, &Q5_K),
            HEAD,
        ],
        ..plain("Q3_K_L", 13, &Q3_K)
    },
    Mixture {
        rules: &[
            EIGHT[0],
            EIGHT[1],
            Rule(Value, First(4), &Q5_K),
            Rule(Down, FirstOf(8), &Q5_K),
            Rule(AttentionOutput, EightExperts, &Q5_K),
            HEAD,
        ],
        ..plain("Q4_K_S", 14, &Q4_K)
    },
    Mixture {
        rules: &[
            EIGHT[0],
            EIGHT[1],
            Rule(Value, More, &Q6_K),
            Rule(Down, More, &Q6_K),
            Rule(AttentionOutput, EightExperts, &Q5_K),
            HEAD,
        ],
        ..plain("Q4_K_M", 15, &Q4_K)
    },
    Mixture { rules: &[EIGHT[0], EIGHT[1], HEAD], ..plain("Q5_K_S", 16, &Q5_K) },
    Mixture {
        rules: &[EIGHT[0], EIGHT[1], Rule(Value, More, &Q6_K), Rule(Down, More, &Q6_K), HEAD],
        ..plain("Q5_K_M", 17, &Q5_K)
    },
    Mixture { rules: &[EIGHT[0], EIGHT[1], HEAD], ..plain("Q6_K", 18, &Q6_K) },
    Mixture {
        rules: &[
            EIGHT[0],
            EIGHT[1],
            Rule(Value, Shared, &Q5_K),
            Rule(Down, FirstOfUnweighted(8), &Q5_K),
            Rule(AttentionOutput, EightExperts, &Q5_K),
            HEAD,
        ],
        ..plain("IQ4_NL", 25, &IQ4_NL)
    },
    Mixture {
        rules: &[
            EIGHT[0],
            EIGHT[1],
            Rule(Value, Shared, &Q5_K),
            Rule(Down, FirstOfUnweighted(8), &Q5_K),
            Rule(AttentionOutput, EightExperts, &Q5_K),
            HEAD,
        ],
        ..plain("IQ4_XS", 30, &IQ4_XS)
    },
    Mixture { needs_importance: true, two_bits: true, rules: &TWO_BITS, ..plain("IQ2_XXS", 19, &IQ2_XXS) },
    Mixture { needs_importance: true, two_bits: true, rules: &TWO_BITS, ..plain("IQ2_XS", 20, &IQ2_XS) },
    Mixture { needs_importance: true, two_bits: true, rules: &TWO_BITS_LARGE, ..plain("IQ2_S", 28, &IQ2_XS) },
    Mixture { needs_importance: true, two_bits: true, rules: &TWO_BITS_LARGE, ..plain("IQ2_M", 29, &IQ2_S) },
    Mixture {
        needs_importance: true,
        rules: &[
            EIGHT[0],
            EIGHT[1],
            Rule(Value, Shared, &Q4_K),
            Rule(Key, Always, &IQ2_S),
            Rule(Query, Always, &IQ2_S),
            Rule(AttentionOutput, EightExperts, &Q5_K),
            Rule(AttentionOutput, Always, &IQ3_S),
            Rule(Embedding, Always, &IQ3_S),
            SMALL_HEAD,
        ],
        ..plain("IQ3_XXS", 23, &IQ3_XXS)
    },
    Mixture {
        needs_importance: true,
        rules: &[
            EIGHT[0],
            EIGHT[1],
            Rule(Value, Shared, &Q4_K),
            Rule(Key, Always, &IQ3_XXS),
            Rule(Query, Always, &IQ3_XXS),
            Rule(Gate, Middle, &IQ3_XXS),
            Rule(Up, Middle, &IQ3_XXS),
            Rule(AttentionOutput, EightExperts, &Q5_K),
            HEAD,
        ],
        ..plain("IQ3_XS", 22, &IQ3_S)
    },
    Mixture {
        rules: &[
            EIGHT[0],
            EIGHT[1],
            Rule(Value, Shared, &Q4_K),
            Rule(AttentionOutput, EightExperts, &Q5_K),
            HEAD,
        ],
        ..plain("IQ3_S", 26, &IQ3_S)
    },
    Mixture {
        rules: &[
            EIGHT[0],
            EIGHT[1],
            Rule(Value, Always, &Q4_K),
            Rule(Down, FirstOf(8), &Q4_K),
            Rule(Down, MoreWithEightExperts, &Q4_K),
            Rule(AttentionOutput, EightExperts, &Q5_K),
            Rule(AttentionOutput, Always, &Q4_K),
            HEAD,
        ],
        ..plain("IQ3_M", 27, &IQ3_S)
    },
    Mixture { rules: &TERNARY, ..plain("TQ1_0", 36, &TQ1_0) },
    Mixture { rules: &TERNARY, ..plain("TQ2_0", 37, &TQ2_0) },
    Mixture { stacked: Some(&MXFP4), ..plain("MXFP4_MOE", 38, &Q8_0) },
];

/// Names that `llama-quantize` accepts for the medium mixture of a type.
const ALIASES: [&str; 3] = ["Q3_K", "Q4_K", "Q5_K"];

/// Returns the mixture with this name, ignoring case. `Q3_K`, `Q4_K` and `Q5_K` are `Q3_K_M`, `Q4_K_M` and `Q5_K_M`.
pub fn mixture(name: &str) -> Option<&'static Mixture> {
    let is = |mixture: &Mixture, name: &str| mixture.name.eq_ignore_ascii_case(name);
    match ALIASES.iter().find(|alias| alias.eq_ignore_ascii_case(name)) {
        Some(alias) => MIXTURES.iter().find(|m| is(m, &format!("{alias}_M"))),
        None => MIXTURES.iter().find(|m| is(m, name)),
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct ModelFacts {
    pub(super) layers: usize,
    /// The number of layers that compute values.
    pub(super) values: usize,
    pub(super) heads_per_key: usize,
    pub(super) experts: usize,
    pub(super) weighted: bool,
    pub(super) favours_values: bool,
}

impl ModelFacts {
    pub(super) fn favours_values(family: &GgufFamily, layers: usize, heads_per_key: usize) -> bool {
        family.favours_values_of_80_layers && layers == 80 && heads_per_key > 1
    }
}

impl When {
    fn applies(self, role: Role, layer: usize, facts: &ModelFacts) -> bool {
        let n = if role == Value { facts.values } else { facts.layers };
        match self {
            Self::Always => true,
            Self::More => layer < n / 8 || layer >= 7 * n / 8 || (layer - n / 8) % 3 == 2,
            Self::MoreWithEightExperts => facts.experts == 8 && Self::More.applies(role, layer, facts),
            Self::Middle => layer >= n / 8 && layer < 7 * n / 8,
            Self::First(count) => layer < count,
            Self::FirstOf(parts) => layer < n / parts,
            Self::FirstOfWeighted(parts) => facts.weighted && layer < n / parts,
            Self::FirstOfUnweighted(parts) => !facts.weighted && layer < n / parts,
            Self::Shared => facts.heads_per_key >= 4,
            Self::SharedOrExperts => facts.heads_per_key >= 4 || facts.experts >= 4,
            Self::EightExperts => facts.experts == 8,
        }
    }
}

impl Mixture {
    /// The type of tensors with several matrices, if the mixture has a separate type for them.
    pub fn stacked(&self) -> Option<&'static BlockType> {
        self.stacked
    }

    /// Whether rules depend on the index of a `down` tensor among all of them, instead of its layer. The two differ if
    /// blocks have several.
    pub(super) fn counts_downs(&self) -> bool {
        self.two_bits
    }

    /// Whether the mixture is for models whose experts have their own block type.
    pub(super) fn is_of_experts(&self) -> bool {
        self.stacked.is_some()
    }

    /// Returns the type of a tensor that consists of `matrices` matrices with rows of `columns` elements. The caller
    /// checks whether rows fit the type. `layer` is 0 outside blocks; for values, it is the index among the layers that
    /// compute values, and for `down` with [`counts_downs`](Self::counts_downs) the index among these tensors.
    pub(super) fn of(
        &self,
        role: Role,
        layer: usize,
        [matrices, columns]: [usize; 2],
        facts: &ModelFacts,
    ) -> &'static BlockType {
        if self.base.is_float() {
            return self.base;
        }
        if let Some(stacked) = self.stacked.filter(|_| matrices > 1) {
            return stacked;
        }
        if role == Head && !columns.is_multiple_of(self.base.elements) {
            return &Q8_0;
        }
        let rule = self.rules.iter().find(|rule| rule.0 == role && rule.1.applies(role, layer, facts));
        let kind = rule.map_or(self.base, |rule| rule.2);
        let is_small = *kind == blocks::Q3_K || *kind == blocks::Q4_K;
        if role == Value && facts.favours_values && is_small && !self.two_bits { &Q5_K } else { kind }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FACTS: ModelFacts = ModelFacts {
        layers: 8,
        values: 8,
        heads_per_key: 1,
        experts: 0,
        weighted: false,
        favours_values: false,
    };

    fn of(name: &str, role: Role, facts: ModelFacts) -> String {
        let mixture = mixture(name).unwrap();
        (0..facts.layers).map(|layer| format!("{:?} ", mixture.of(role, layer, [1, 256], &facts))).collect()
    }

    #[test]
    fn layers_that_get_more_bits() {
        assert_eq!(of("q4_k_m", Down, FACTS), "Q6_K Q4_K Q4_K Q6_K Q4_K Q4_K Q6_K Q6_K ");
        assert_eq!(of("q4_k_s", Value, FACTS), "Q5_K Q5_K Q5_K Q5_K Q4_K Q4_K Q4_K Q4_K ");
        let weighted = ModelFacts { weighted: true, ..FACTS };
        assert!(of("iq4_xs", Down, FACTS).starts_with("Q5_K IQ4_XS"));
        assert!(of("iq4_xs", Down, weighted).starts_with("IQ4_XS"));
        assert!(of("q4_0", Down, weighted).starts_with("Q4_1 Q4_0"));
    }

    #[test]
    fn heads_and_experts() {
        let q4 = mixture("Q4_K_M").unwrap();
        assert_eq!(q4.of(Head, 0, [1, 256], &FACTS), &Q6_K);
        assert_eq!(q4.of(Head, 0, [1, 128], &FACTS), &Q8_0);
        let eight = ModelFacts { experts: 8, ..FACTS };
        assert_eq!(q4.of(Value, 1, [1, 256], &eight), &Q8_0);
        assert_eq!(q4.of(AttentionOutput, 1, [1, 256], &eight), &Q5_K);
        let large = ModelFacts { layers: 80, values: 80, favours_values: true, ..FACTS };
        assert_eq!(q4.of(Value, 11, [1, 256], &large), &Q5_K);
        assert_eq!(mixture("f16").unwrap().of(Head, 0, [1, 100], &FACTS), &F16);
    }

    #[test]
    fn rules_of_two_and_three_bits() {
        let weighted = ModelFacts { weighted: true, ..FACTS };
        assert!(of("iq2_xxs", Down, weighted).starts_with("Q2_K IQ2_XXS IQ2_XXS"));
        assert!(of("iq2_s", Down, weighted).starts_with("IQ3_S IQ2_XS"));
        assert!(of("iq2_m", Value, ModelFacts { experts: 4, ..weighted }).starts_with("Q4_K Q4_K"));
        let large = ModelFacts { heads_per_key: 8, favours_values: true, ..weighted };
        assert!(of("iq2_xs", Value, large).starts_with("Q4_K"));
        assert!(of("iq3_m", Value, large).starts_with("Q5_K"));
        assert_eq!(of("iq3_xs", Up, weighted), format!("IQ3_S {}IQ3_S ", "IQ3_XXS ".repeat(6)));
        assert_eq!(of("iq3_m", Down, weighted), format!("Q4_K {}", "IQ3_S ".repeat(7)));
        let eight = ModelFacts { experts: 8, ..weighted };
        assert_eq!(of("iq3_m", Down, eight), "Q4_K IQ3_S IQ3_S Q4_K IQ3_S IQ3_S Q4_K Q4_K ");
        assert!(of("iq2_xs", Key, eight).starts_with("Q4_K") && of("iq3_xs", Key, eight).starts_with("Q8_0"));
        for mixture in MIXTURES.iter().filter(|m| m.name.starts_with("IQ2") || m.name.starts_with("IQ3")) {
            let head = mixture.of(Head, 0, [1, 256], &weighted);
            assert_eq!(
                head,
                if mixture.id == 22 || mixture.id > 25 && mixture.id < 28 { &Q6_K } else { &Q5_K }
            );
        }
    }

    #[test]
    fn embeddings_and_stacked_experts() {
        let ternary = mixture("tq1_0").unwrap();
        assert_eq!(ternary.of(Embedding, 0, [1, 256], &FACTS), &Q4_K);
        assert_eq!(ternary.of(Head, 0, [1, 256], &FACTS), &Q6_K);
        assert_eq!(ternary.of(Down, 0, [4, 256], &FACTS), &TQ1_0);
        let experts = mixture("mxfp4_moe").unwrap();
        assert_eq!(experts.of(Down, 0, [8, 256], &FACTS), &MXFP4);
        assert_eq!(experts.of(Down, 0, [1, 256], &FACTS), &Q8_0);
        assert_eq!(experts.of(Head, 0, [1, 256], &FACTS), &Q8_0);
        assert_eq!(experts.of(Value, 0, [1, 256], &ModelFacts { experts: 8, ..FACTS }), &Q8_0);
    }
}
