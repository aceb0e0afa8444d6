//! Which layers slide a window over the keys.

use super::Blocks;
use super::parts::DecoderBlock;
use crate::Result;
use crate::checkpoint::ConfigFields;

const SLIDING: &str = "sliding_attention";
const FULL: &str = "full_attention";

/// Which blocks slide a window over the keys, and how long it is.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Windows {
    /// Every query sees all positions before it.
    Never,
    /// Blocks from this one on.
    From { first: usize, window: usize },
    /// Those for which the list says so.
    Listed { slides: Vec<bool>, window: usize },
}

impl Windows {
    /// Reads them. `on`: whether the family's configuration has sliding windows switched on.
    ///
    /// Readers take a missing `sliding_window` for that of the first release, and `null` for none.
    /// `layer_types` says of each block whether it slides; without it, all do, but for the first
    /// `max_window_layers` of families that know the key.
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

    /// Those of families whose layers follow a pattern where `layer_types` is not given. `default` is the window where
    /// the key is missing.
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
            None => {
                Err(config.error("sliding_window", "is null, and some layers of this family slide a window"))
            }
        }
    }

    /// Those of a family whose blocks all slide, or none: it knows neither `layer_types` nor `max_window_layers`. `default`
    /// is the window where the key is missing.
    pub(super) fn uniform(config: &ConfigFields<'_>, default: Option<usize>, on: bool) -> Result<Self> {
        let window = window(config, default)?.filter(|_| on);
        let wanted = if window.is_some() { SLIDING } else { FULL };
        if config.optional_str_list("layer_types")?.is_some_and(|types| types.iter().any(|t| *t != wanted)) {
            return Err(config.error(
                "layer_types",
                format!("requests more than `{wanted}`, but all blocks of this family are alike"),
            ));
        }
        Ok(window.map_or(Self::Never, |window| Self::From { first: 0, window }))
    }

    /// Those of a configuration that has windows switched off, whatever length it names.
    pub(super) fn off(config: &ConfigFields<'_>) -> Result<Self> {
        let slides = layer_types(config)?.unwrap_or_default();
        Self::listed(config, slides, None)
    }

    fn listed(config: &ConfigFields<'_>, slides: Vec<bool>, window: Option<usize>) -> Result<Self> {
        match window {
            _ if !slides.contains(&true) => Ok(Self::Never),
            None => Err(config.error("layer_types", "requests a sliding window, but none is configured")),
            Some(window) => Ok(Self::Listed { slides, window }),
        }
    }

    /// Positions that a query sees in a block, its own included.
    pub(super) fn of(&self, layer: usize) -> Option<usize> {
        match self {
            Self::Never => None,
            Self::From { first, window } => (layer >= *first).then_some(*window),
            Self::Listed { slides, window } => slides.get(layer)?.then_some(*window),
        }
    }

    /// A block whose attention has the window of a layer.
    pub(super) fn apply(&self, block: &DecoderBlock, layer: usize) -> DecoderBlock {
        let mut block = block.clone();
        block.attention.shape.window = self.of(layer);
        block
    }
}

/// `sliding_window`: `default` where the key is missing, none where it is `null`.
fn window(config: &ConfigFields<'_>, default: Option<usize>) -> Result<Option<usize>> {
    match config.has("sliding_window") {
        true => config.optional_positive("sliding_window"),
        false => Ok(default),
    }
}

/// Whether each layer slides, where `layer_types` says so.
fn layer_types(config: &ConfigFields<'_>) -> Result<Option<Vec<bool>>> {
    let Some(types) = config.optional_str_list("layer_types")? else { return Ok(None) };
    let layers = Blocks::layers(config)?;
    if types.len() != layers {
        return Err(config.error("layer_types", format!("has {} entries for {layers} blocks", types.len())));
    }
    if let Some(other) = types.iter().find(|t| **t != SLIDING && **t != FULL) {
        let other = other.escape_default();
        return Err(config.error("layer_types", format!("holds `{other}`, which is not known")));
    }
    Ok(Some(types.iter().map(|t| *t == SLIDING).collect()))
}
