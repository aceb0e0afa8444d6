//! Blocks with fixed scales whose codes are chosen element by element, as in GPTQ.

use super::grid::{Fields, Grid};
use super::{BlockType, refine};

/// A block that is being encoded.
pub struct OpenBlock {
    grid: &'static Grid,
    fields: Fields,
}

impl BlockType {
    /// Finds scales for one block of values by this crate's own search. `importance` weights the squared errors. `None`
    /// for types whose codes are not chosen element by element.
    pub fn fit_scales(&self, x: &[f32], importance: &[f32]) -> Option<OpenBlock> {
        let grid = self.grid?;
        Some(OpenBlock { grid, fields: refine::block(grid, x, importance) })
    }
}

impl OpenBlock {
    /// Gives element `e` the code that decodes to the value nearest to `value`; returns the decoded value.
    pub fn choose(&mut self, e: usize, value: f32) -> f32 {
        let (code, stored) = self.grid.round(self.grid.part(&self.fields, e / self.grid.part), value);
        self.fields.codes[e] = code;
        stored
    }

    /// Writes all bytes of the block.
    pub fn write(&self, out: &mut [u8]) {
        (self.grid.pack)(&self.fields, out);
    }
}
