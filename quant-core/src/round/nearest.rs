//! Rounding to nearest.

use super::{BlockRounding, Rounding};
use crate::transform::TransformSettings;

/// Rounds each weight to the nearest value of its grid.
#[derive(Debug, Clone, Copy)]
pub struct Nearest;

impl Rounding for Nearest {
    fn name(&self) -> &'static str {
        "rtn"
    }

    fn summary(&self) -> &'static str {
        "rounds to nearest; needs a calibration text only for static scales"
    }

    fn blocks(&self, _settings: &TransformSettings) -> BlockRounding {
        BlockRounding::Nearest
    }
}
