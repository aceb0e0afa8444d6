//! FP8 caches of keys and values: the names of their static scales.

use serde::{Deserialize, Serialize};

/// Keys or values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum CachePart {
    /// Keys, after rotary embedding.
    Keys,
    /// Values, as projected.
    Values,
}

impl CachePart {
    /// Keys and values.
    pub const ALL: [Self; 2] = [Self::Keys, Self::Values];

    /// The last part of the scale's tensor name.
    pub fn scale(self) -> &'static str {
        match self {
            Self::Keys => "k_scale",
            Self::Values => "v_scale",
        }
    }

    /// Returns the name of the scale next to the linear: `model.layers.0.self_attn.k_scale` for
    /// `model.layers.0.self_attn.k_proj`.
    pub fn of_attention(self, linear: &str) -> String {
        match linear.rsplit_once('.') {
            Some((attention, _)) => format!("{attention}.{}", self.scale()),
            None => self.scale().to_owned(),
        }
    }

    /// Returns the name of the scale as a tensor of the linear: `model.layers.0.self_attn.k_proj.k_scale`.
    pub fn of_linear(self, linear: &str) -> String {
        format!("{linear}.{}", self.scale())
    }

    /// Returns the names that checkpoints use for the scale, given the linear that computes the keys or values. Only
    /// old checkpoints use the last one.
    pub fn known_names(self, linear: &str) -> [String; 3] {
        [self.of_attention(linear), self.of_linear(linear), format!("{linear}.output_scale")]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_from_the_linear() {
        let linear = "model.layers.3.self_attn.v_proj";
        assert_eq!(CachePart::Values.of_attention(linear), "model.layers.3.self_attn.v_scale");
        assert_eq!(CachePart::Values.of_linear(linear), "model.layers.3.self_attn.v_proj.v_scale");
        assert_eq!(CachePart::Keys.of_attention("k"), "k_scale");
        assert_eq!(CachePart::Keys.known_names(linear)[2], "model.layers.3.self_attn.v_proj.output_scale");
    }
}
