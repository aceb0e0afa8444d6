//! Sliding windows: which layers have them.

use super::Blocks;
use super::parts::DecoderBlock;
use crate::Result;
use crate::checkpoint::ConfigFields;

const SLIDING: &str = "sliding_attention";
const FULL: &str = "full_attention";

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Windows {
    /// Every query attends to all earlier positions.
    Never,
    /// All blocks from `first` on.
    From { first: usize, window: usize },
    /// The blocks that the list marks.
    Listed { slides: Vec<bool>, window: usize },
}

impl Windows {
    /// Reads the windows. `on`: whether the family's configuration enables sliding windows.
    ///
    /// As in transformers, a missing `sliding_window` means 4096, and `null` means no window. Without `layer_types`,
    /// all blocks have a window except the first `max_window_layers`, which are read only in configurations with
    /// `use_sliding_window`.
    pub(super) fn read(config: &ConfigFields<'_>, on: bool) -> Result<Self> {
        let window = window(config, Some(4096))?.filter(|_| on);
        if let Some(slides) = layer_types(config)? {
            return Self::listed(config, slides, window);
        }
        let first = match config.has("use_sliding_window") {
            true => config.optional_usize("max_window_layers")?.unwrap_or(28),
            false => 0,
        };
        Ok(window.map_or(Self::Never, |window| Self::From { first, window }))
    }

    /// Reads the windows of a family whose layers follow a pattern if `layer_types` is not given.
    pub(super) fn patterned(
        config: &ConfigFields<'_>,
        default: Option<usize>,
        pattern: impl Fn(usize) -> bool,
    ) -> Result<Self> {
        let window = window(config, default)?;
        if let Some(slides) = layer_types(config)? {
            return Self::listed(config, slides, window);
        }
        let slides: Vec<bool> = (0..Blocks::layers(config)?).map(pattern).collect();
        match window {
            _ if !slides.contains(&true) => Ok(Self::Never),
            Some(window) => Ok(Self::Listed { slides, window }),
            None => Err(config.error("sliding_window", "is null, but some layers have a sliding window")),
        }
    }

    /// Reads the window of a family in which either all blocks have one or none. `layer_types`, if present, must agree
    /// with that, and `max_window_layers` is not read.
    pub(super) fn uniform(config: &ConfigFields<'_>, default: Option<usize>, on: bool) -> Result<Self> {
        let window = window(config, default)?.filter(|_| on);
        let wanted = if window.is_some() { SLIDING } else { FULL };
        if config.optional_str_list("layer_types")?.is_some_and(|types| types.iter().any(|t| *t != wanted)) {
            return Err(config.error(
                "layer_types",
                format!("must contain only `{wanted}`, because all blocks of this family are alike"),
            ));
        }
        Ok(window.map_or(Self::Never, |window| Self::From { first: 0, window }))
    }

    /// Reads a configuration with sliding windows disabled. The length of the window is ignored, but `layer_types` must
    /// not contain sliding attention.
    pub(super) fn off(config: &ConfigFields<'_>) -> Result<Self> {
        let slides = layer_types(config)?.unwrap_or_default();
        Self::listed(config, slides, None)
    }

    fn listed(config: &ConfigFields<'_>, slides: Vec<bool>, window: Option<usize>) -> Result<Self> {
        match window {
            _ if !slides.contains(&true) => Ok(Self::Never),
            None => {
                Err(config.error("layer_types", "requests a sliding window, but `sliding_window` is not set"))
            }
            Some(window) => Ok(Self::Listed { slides, window }),
        }
    }

    pub(super) fn of(&self, layer: usize) -> Option<usize> {
        match self {
            Self::Never => None,
            Self::From { first, window } => (layer >= *first).then_some(*window),
            Self::Listed { slides, window } => slides.get(layer)?.then_some(*window),
        }
    }

    pub(super) fn apply(&self, block: &DecoderBlock, layer: usize) -> DecoderBlock {
        let mut block = block.clone();
        block.attention.shape.window = self.of(layer);
        block
    }
}

/// `default` if the key is missing, `None` if it is `null`.
fn window(config: &ConfigFields<'_>, default: Option<usize>) -> Result<Option<usize>> {
    match config.has("sliding_window") {
        true => config.optional_positive("sliding_window"),
        false => Ok(default),
    }
}

fn layer_types(config: &ConfigFields<'_>) -> Result<Option<Vec<bool>>> {
    let Some(types) = config.optional_str_list("layer_types")? else { return Ok(None) };
    let layers = Blocks::layers(config)?;
    if types.len() != layers {
        return Err(config.error("layer_types", format!("has {} entries for {layers} blocks", types.len())));
    }
    if let Some(other) = types.iter().find(|t| **t != SLIDING && **t != FULL) {
        let other = other.escape_default();
        return Err(config.error("layer_types", format!("contains an unknown entry, `{other}`")));
    }
    Ok(Some(types.iter().map(|t| *t == SLIDING).collect()))
}
