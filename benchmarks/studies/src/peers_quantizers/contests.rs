//! The comparisons, and the claims about them.

use super::contestant::{Contestant, Maker, Package};

/// Quality and speed of a method.
#[derive(Debug)]
pub struct Contest {
    pub(super) quality: Quality,
    pub(super) speed: Speed,
}

/// A comparison of divergences from the float model.
#[derive(Debug)]
pub(super) struct Quality {
    /// The folder of the record.
    pub record: &'static str,
    pub title: &'static str,
    /// Notes on the settings, for the record.
    pub settings: &'static str,
    pub contestants: &'static [Contestant],
    pub sets: &'static [Set],
    pub claims: &'static [Claim],
    /// Whether the group size matters.
    pub grouped: bool,
}

/// A set of rows that are pooled.
#[derive(Debug)]
pub(super) struct Set {
    pub title: &'static str,
    pub bits: u32,
    /// Whether outliers are planted in the models.
    pub planted: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Metric {
    /// Mean KL to float, in nats per token.
    Kl,
    /// The logarithm of the perplexity: nats per token.
    LogPerplexity,
}

/// A condition that must hold in every set, pooled over its rows.
#[derive(Debug)]
pub(super) struct Claim {
    pub metric: Metric,
    /// The contestant that the claim is about.
    pub who: &'static str,
    /// The contestants that it is compared with. The claim must hold against each of them.
    pub than: &'static [&'static str],
    pub how: How,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    /// Worse by at most 0.5 % of the other's divergence (or perplexity), or by two standard errors of the paired
    /// difference, whichever is larger.
    NoWorse,
    /// Less than the other.
    Below,
}

/// A comparison of the time and memory of whole runs.
#[derive(Debug)]
pub(super) struct Speed {
    /// The folder of the record.
    pub record: &'static str,
    pub title: &'static str,
    /// quant's contestant, listed first.
    pub ours: &'static Contestant,
    pub peers: &'static [Entry],
    /// Minimum speedups over some entries, by name. The speedup over every entry must be at least [`OVER_BEST`].
    pub promised: &'static [(&'static str, f64)],
}

/// A peer in one element type.
#[derive(Debug)]
pub(super) struct Entry {
    pub peer: &'static Contestant,
    /// Name in PyTorch.
    pub dtype: &'static str,
}

/// Minimum speedup over the fastest entry.
pub(super) const OVER_BEST: f64 = 2.0;

const FLOAT32: &str = "float32";
const BFLOAT16: &str = "bfloat16";

const PLAIN: Set = Set { title: "4 bits, unmodified models", bits: 4, planted: false };
const PLANTED: Set = Set { title: "4 bits, models with planted outliers", bits: 4, planted: true };
const THREE: Set = Set { title: "3 bits, unmodified models", bits: 3, planted: false };

const fn ours(name: &'static str, options: &'static [&'static str]) -> Contestant {
    Contestant { name, maker: Maker::Ours { options, calibrated: true } }
}

const fn rounded(name: &'static str, options: &'static [&'static str]) -> Contestant {
    Contestant { name, maker: Maker::Ours { options, calibrated: false } }
}

const fn peer(
    name: &'static str,
    package: Package,
    method: &'static str,
    settings: &'static [&'static str],
) -> Contestant {
    Contestant { name, maker: Maker::Peer { package, method, settings } }
}

const OUR_AWQ: Contestant = ours("ours", &["--method", "awq"]);
const THEIR_AWQ: Contestant = peer("llm-compressor", Package::LlmCompressor, "awq", &[]);

/// AWQ.
pub const AWQ: Contest = Contest {
    quality: Quality {
        record: "peers-awq-quality",
        title: "AWQ to 4 bits: ours and llm-compressor's",
        settings: "llm-compressor: AWQModifier with duo scaling and 20 ratios, then QuantizationModifier.",
        contestants: &[OUR_AWQ, THEIR_AWQ],
        sets: &[PLAIN, PLANTED],
        claims: &[Claim { metric: Metric::Kl, who: "ours", than: &["llm-compressor"], how: How::NoWorse }],
        grouped: true,
    },
    speed: Speed {
        record: "peers-awq-speed",
        title: "Time and memory of AWQ: ours and llm-compressor's",
        ours: &OUR_AWQ,
        peers: &[Entry { peer: &THEIR_AWQ, dtype: FLOAT32 }, Entry { peer: &THEIR_AWQ, dtype: BFLOAT16 }],
        promised: &[("llm-compressor, float32", 5.0)],
    },
};

const OUR_GPTQ: Contestant = ours("ours", &["--method", "gptq"]);
const LLM_COMPRESSOR_GPTQ: Contestant = peer("llm-compressor", Package::LlmCompressor, "gptq", &[]);
const GPTQMODEL: Contestant = peer("gptqmodel", Package::GptqModel, "gptq", &[]);

/// GPTQ.
pub const GPTQ: Contest = Contest {
    quality: Quality {
        record: "peers-gptq-quality",
        title: "GPTQ: ours, llm-compressor's and gptqmodel's",
        settings: "All with their defaults. Column order: ours and llm-compressor by activations, with grids fixed \
             in advance (`static-groups`, `static`); gptqmodel by groups (`act_group_aware`), which ours runs as \
             well (`group-aware`). Damping: 0.01; in gptqmodel 0.05. gptqmodel does not support rows without groups \
             and is left out there.",
        contestants: &[
            rounded("RTN", &["--method", "rtn"]),
            OUR_GPTQ,
            ours("ours, group-aware", &["--method", "gptq", "--act-order", "group-aware"]),
            LLM_COMPRESSOR_GPTQ,
            GPTQMODEL,
        ],
        sets: &[PLAIN, THREE],
        claims: &[
            Claim {
                metric: Metric::Kl,
                who: "ours",
                than: &["llm-compressor", "gptqmodel"],
                how: How::NoWorse,
            },
            Claim { metric: Metric::Kl, who: "ours, group-aware", than: &["gptqmodel"], how: How::NoWorse },
            Claim { metric: Metric::Kl, who: "ours", than: &["RTN"], how: How::Below },
        ],
        grouped: true,
    },
    speed: Speed {
        record: "peers-gptq-speed",
        title: "Time and memory of GPTQ: ours, llm-compressor's and gptqmodel's",
        ours: &OUR_GPTQ,
        peers: &[
            Entry { peer: &LLM_COMPRESSOR_GPTQ, dtype: FLOAT32 },
            Entry { peer: &LLM_COMPRESSOR_GPTQ, dtype: BFLOAT16 },
            Entry { peer: &GPTQMODEL, dtype: FLOAT32 },
            Entry { peer: &GPTQMODEL, dtype: BFLOAT16 },
        ],
        promised: &[],
    },
};

/// SmoothQuant with 8-bit weights and activations.
pub(super) const SMOOTHQUANT: Quality = Quality {
    record: "peers-smoothquant-quality",
    title: "SmoothQuant, W8A8 per token: ours and llm-compressor's",
    settings: "Ours: the family's α. llm-compressor: SmoothQuantModifier with its default strength, 0.5, and with \
               0.8, then QuantizationModifier with its scheme W8A8. All are scored with activations rounded the \
               same way.",
    contestants: &[
        rounded("not smoothed", &["--method", "rtn", "--scheme", "w8a8"]),
        ours("ours", &["--preset", "smoothquant-w8a8"]),
        peer("llm-compressor, 0.5", Package::LlmCompressor, "smoothquant", &["smoothing_strength=0.5"]),
        peer("llm-compressor, 0.8", Package::LlmCompressor, "smoothquant", &["smoothing_strength=0.8"]),
    ],
    sets: &[
        Set { title: "Unmodified models", bits: 8, planted: false },
        Set { title: "Models with planted outliers", bits: 8, planted: true },
    ],
    claims: &[
        Claim {
            metric: Metric::Kl,
            who: "ours",
            than: &["llm-compressor, 0.5", "llm-compressor, 0.8"],
            how: How::NoWorse,
        },
        Claim {
            metric: Metric::LogPerplexity,
            who: "ours",
            than: &["llm-compressor, 0.5", "llm-compressor, 0.8"],
            how: How::NoWorse,
        },
    ],
    grouped: false,
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_name_contestants() {
        for quality in [&AWQ.quality, &GPTQ.quality, &SMOOTHQUANT] {
            for claim in quality.claims {
                for name in claim.than.iter().chain([&claim.who]) {
                    assert!(quality.contestants.iter().any(|c| c.name == *name), "{name}");
                }
            }
        }
        for speed in [&AWQ.speed, &GPTQ.speed] {
            for (name, _) in speed.promised {
                assert!(speed.peers.iter().any(|e| e.name() == *name), "{name}");
            }
        }
    }
}
