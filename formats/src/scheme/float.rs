//! Schemes of floating-point weights: supported combinations of formats, granularities and activations, and their
//! names.
//!
//! | name | weights | scales | activations |
//! |---|---|---|---|
//! | `wf8a16-channel`, `-tensor`, `-b128` | E4M3 | one per row, tensor or block of 128 × 128 | float |
//! | `wf8af8-channel`, `-tensor` | E4M3 | one per row or tensor | E4M3, one scale per token |
//! | `wf8af8-channel-static`, `-tensor-static` | E4M3 | one per row or tensor | E4M3, one calibrated scale |
//! | `wf8af8-b128` | E4M3 | one per block of 128 × 128 | E4M3, one scale per token and 128 inputs |
//! | `wf4a16-g16-nv`, `wf4af4-g16-nv` | E2M1 | E4M3 per 16 inputs, and one F32 | float, or like the weights with a calibrated F32 |
//! | `wf4a16-g32-mx` | E2M1 | a power of two per 32 inputs | float |
//! | `wf8a16-g32-mx`, `wf8af8-g32-mx` | E4M3 | a power of two per 32 inputs | float, or like the weights |

use super::{ActivationScheme, FloatFormat, Granularity, LinearScheme, ScaleFormat, SchemeRequest};
use crate::checkpoint::Dtype;
use crate::{Error, Result};

/// Rows and columns of a block whose weights share a scale.
pub const BLOCK: usize = 128;
/// Inputs that share a scale in NVFP4.
pub const NV_GROUP: usize = 16;
/// Inputs that share a scale in the MX formats.
pub const MX_GROUP: usize = 32;

/// Names of schemes in other tools, and their meaning here.
pub(super) const ALIASES: [(&str, &str); 9] = [
    ("fp8", "wf8af8-channel"),
    ("fp8-dynamic", "wf8af8-channel"),
    ("fp8-static", "wf8af8-tensor-static"),
    ("fp8-block", "wf8af8-b128"),
    ("nvfp4", "wf4af4-g16-nv"),
    ("nvfp4a16", "wf4a16-g16-nv"),
    ("mxfp4a16", "wf4a16-g32-mx"),
    ("mxfp8a16", "wf8a16-g32-mx"),
    ("mxfp8", "wf8af8-g32-mx"),
];

/// Every scheme of floating-point weights, as it is printed.
pub const FLOAT_SCHEMES: [&str; 13] = [
    "wf8a16-channel",
    "wf8a16-tensor",
    "wf8a16-b128",
    "wf8af8-channel",
    "wf8af8-tensor",
    "wf8af8-channel-static",
    "wf8af8-tensor-static",
    "wf8af8-b128",
    "wf4a16-g16-nv",
    "wf4af4-g16-nv",
    "wf4a16-g32-mx",
    "wf8a16-g32-mx",
    "wf8af8-g32-mx",
];

pub(super) fn alias(text: &str) -> Option<&'static str> {
    ALIASES.iter().find(|(name, _)| *name == text).map(|(_, scheme)| *scheme)
}

pub(super) fn activations(name: &str) -> Option<ActivationScheme> {
    match name {
        "f8" => Some(ActivationScheme::Fp8Token),
        "f4" => Some(ActivationScheme::Nvfp4),
        _ => None,
    }
}

/// The last part of a name: the kind of group scales.
fn suffix(format: FloatFormat, granularity: Granularity) -> Option<&'static str> {
    match (format, granularity) {
        (FloatFormat::E2m1, Granularity::Group(NV_GROUP)) => Some("nv"),
        (_, Granularity::Group(_)) => Some("mx"),
        _ => None,
    }
}

pub(super) fn group_of(suffix: &str) -> Option<usize> {
    match suffix {
        "nv" => Some(NV_GROUP),
        "mx" => Some(MX_GROUP),
        _ => None,
    }
}

/// The end of a name after the granularity.
pub(super) fn ending(
    format: FloatFormat,
    granularity: Granularity,
    activations: ActivationScheme,
) -> (&'static str, &'static str) {
    let scales = match suffix(format, granularity) {
        Some("nv") => "-nv",
        Some(_) => "-mx",
        None => "",
    };
    (scales, if activations == ActivationScheme::Fp8Static { "-static" } else { "" })
}

impl SchemeRequest {
    /// Adjusts the activations to the granularity, and fails if no such scheme exists. `suffix` is the kind of scales
    /// in the name.
    pub(super) fn resolve_float(&mut self, format: FloatFormat, suffix: Option<&str>) -> Result<()> {
        self.activations = match (self.activations, self.granularity) {
            (ActivationScheme::Fp8Token, Granularity::Block) => ActivationScheme::Fp8Group,
            (ActivationScheme::Fp8Token, Granularity::Group(_)) => ActivationScheme::Mxfp8,
            (stated, _) => stated,
        };
        self.check_float(format)?;
        match suffix {
            Some(stated) if self::suffix(format, self.granularity) != Some(stated) => Err(Error::usage(
                format!("scheme `{self}`: the suffix -{stated} does not match the granularity of the scales"),
                known(),
            )),
            _ => Ok(()),
        }
    }

    pub(super) fn check_float(&self, format: FloatFormat) -> Result<()> {
        use ActivationScheme as A;
        let refuse = |what: &str| Err(Error::usage(format!("scheme `{self}`: {what}"), known()));
        if matches!(self.activations, A::Token | A::Static { .. }) {
            return refuse("floating-point weights cannot be combined with int8 activations");
        }
        let fits = match (format, self.granularity) {
            (FloatFormat::E4m3, Granularity::Channel | Granularity::Tensor) => {
                matches!(self.activations, A::Float | A::Fp8Token | A::Fp8Static)
            }
            (FloatFormat::E4m3, Granularity::Block) => matches!(self.activations, A::Float | A::Fp8Group),
            (FloatFormat::E4m3, Granularity::Group(MX_GROUP)) => {
                matches!(self.activations, A::Float | A::Mxfp8)
            }
            (FloatFormat::E4m3, Granularity::Group(_)) => {
                return refuse(
                    "FP8 weights need one scale per row, tensor or block, or per 32 inputs (-g32-mx)",
                );
            }
            (FloatFormat::E2m1, Granularity::Group(NV_GROUP)) => {
                matches!(self.activations, A::Float | A::Nvfp4)
            }
            (FloatFormat::E2m1, Granularity::Group(MX_GROUP)) => match self.activations {
                A::Float => true,
                _ => {
                    return refuse(
                        "MXFP4 weights need float activations (mxfp4a16): most kernels of vLLM 0.33 choose \
                        the type of the activations by the GPU, whatever the checkpoint says",
                    );
                }
            },
            (FloatFormat::E2m1, _) => return refuse("FP4 weights require groups: -g16-nv or -g32-mx"),
            _ => false,
        };
        if fits { Ok(()) } else { refuse("this combination of activations and weights is not supported") }
    }
}

fn known() -> String {
    format!("supported schemes with floating-point weights: {}", FLOAT_SCHEMES.join(", "))
}

impl LinearScheme {
    /// The stored format of scales, if the scheme determines it.
    pub fn fixed_scales(&self) -> Option<ScaleFormat> {
        match (suffix(self.float_format()?, self.granularity), self.granularity) {
            (Some("nv"), _) => Some(ScaleFormat::E4m3),
            (Some(_), _) => Some(ScaleFormat::E8m0),
            (None, _) => None,
        }
    }

    /// The dtype of stored scales for weights of dtype `weight`.
    ///
    /// Some loaders round scales to the model's dtype. So FP8 scales are BF16, whose values F16 (within its range) and
    /// F32 represent exactly. Scales of integers and of `wf8a16-channel` have the weight's dtype.
    pub fn scale_dtype(&self, weight: Dtype) -> Dtype {
        match (self.fixed_scales(), self.float_format(), self.granularity, self.activations) {
            (Some(fixed), ..) => fixed.dtype(),
            (None, None, ..) | (.., Granularity::Channel, ActivationScheme::Float) => weight,
            _ => Dtype::Bf16,
        }
    }

    /// Whether the scheme is NVFP4: E4M3 scales with one F32 for the whole tensor.
    pub fn has_global_scale(&self) -> bool {
        self.fixed_scales() == Some(ScaleFormat::E4m3)
    }

    /// Whether linears that engines fuse into one need a common scale.
    pub fn shares_over_tensor(&self) -> bool {
        self.granularity == Granularity::Tensor || self.has_global_scale()
    }

    /// Whether the range of each row and group can be clipped independently.
    pub fn takes_clip_bounds(&self) -> bool {
        self.fixed_scales().is_none() && !matches!(self.granularity, Granularity::Tensor | Granularity::Block)
    }

    /// The number that must divide the width `columns`: the group size of the weights, and of the activations.
    pub fn needed_divisor(&self, columns: usize) -> usize {
        match self.activations {
            ActivationScheme::Fp8Group => BLOCK,
            _ => self.granularity.group_size(columns),
        }
    }
}

pub(super) fn common_divisor(mut a: usize, mut b: usize) -> usize {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scheme(text: &str) -> LinearScheme {
        text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))
    }

    #[test]
    fn every_name_is_read_back_as_it_is_written() {
        for text in FLOAT_SCHEMES {
            assert_eq!(scheme(text).to_string(), text);
        }
        for (alias, text) in ALIASES {
            assert_eq!(scheme(alias).to_string(), text);
        }
        for (text, whole) in [
            ("wf8af8", "wf8af8-channel"),
            ("wf8af8-static", "wf8af8-channel-static"),
            ("wf4a16-nv", "wf4a16-g16-nv"),
            ("wf4a16-mx", "wf4a16-g32-mx"),
            ("wf4a16-g16", "wf4a16-g16-nv"),
            ("wf4af4", "wf4af4-g16-nv"),
            ("wf8a16-mx", "wf8a16-g32-mx"),
        ] {
            assert_eq!(scheme(text).to_string(), whole);
        }
    }

    #[test]
    fn what_does_not_exist_is_refused() {
        for text in [
            "wf4a16",
            "wf4a16-channel",
            "wf4a16-g64",
            "wf4a16-g16-mx",
            "wf4a16-g32-nv",
            "wf8a16-g16-nv",
            "wf8a16-static",
            "wf8af8-g128",
            "wf8af8-b64",
            "wf8af8-b128-static",
            "wf8af8-static-sym",
            "wf8af4",
            "wf8a8",
            "wf4af8-g16-nv",
            "wf4af8-g32-mx",
            "wf4af4-g32-mx",
            "wf4a16-g16-nv-nv",
            "w4af8-g64",
            "w8a8-tensor",
            "w8a8-b128",
            "w4a16-g16-nv",
        ] {
            let Err(error) = text.parse::<LinearScheme>() else { panic!("{text} was read") };
            assert!(!error.remedy().marked().is_empty(), "{text}");
            let says_why = error.to_string().contains("whatever the checkpoint says");
            assert_eq!(says_why, text.starts_with("wf4af") && text.ends_with("-mx"), "{text}: {error}");
        }
    }

    #[test]
    fn another_format_begins_with_its_own_granularity() {
        let nv = SchemeRequest::from(scheme("nvfp4"));
        assert_eq!(nv.refine("wf8af8").unwrap().to_string(), "wf8af8-channel");
        assert_eq!(
            SchemeRequest::from(scheme("wf8af8-b128")).refine("w8a16").unwrap().to_string(),
            "w8a16-g128"
        );
    }

    #[test]
    fn scales() {
        let dtype = |text: &str, weight| scheme(text).scale_dtype(weight);
        assert_eq!(dtype("wf8a16-channel", Dtype::F32), Dtype::F32);
        assert_eq!(dtype("wf8af8-channel", Dtype::F32), Dtype::Bf16);
        assert_eq!(dtype("wf8a16-b128", Dtype::F16), Dtype::Bf16);
        assert_eq!(dtype("nvfp4", Dtype::Bf16), Dtype::F8E4M3);
        assert_eq!(dtype("mxfp8", Dtype::Bf16), Dtype::F8E8M0);
        assert_eq!(dtype("w4a16", Dtype::F16), Dtype::F16);
        assert!(scheme("nvfp4").has_static_activations() && scheme("fp8-static").has_static_activations());
        assert!(!scheme("fp8").has_static_activations());
        assert!(scheme("wf8a16-tensor").shares_over_tensor() && !scheme("wf8a16-b128").shares_over_tensor());
        assert_eq!(Granularity::Block.group_size(320), 64, "blocks of 128 end at 128, 256 and 320");
    }
}
