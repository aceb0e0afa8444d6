//! Blocks whose scales are settled and whose codes are chosen one by one, as GPTQ does.

use super::grid::{Fields, Grid};
use super::{BlockType, refine};

/// A block on its way.
pub struct OpenBlock {
    grid: &'static Grid,
    fields: Fields,
}

impl BlockType {
    /// Finds the scales of one block of values for the least error, weighed by `importance`; `None` of floats.
    pub fn settle(&self, x: &[f32], importance: &[f32]) -> Option<OpenBlock> {
        let grid = self.grid?;
        Some(OpenBlock { grid, fields: refine::block(grid, x, importance) })
    }
}

impl OpenBlock {
    /// Chooses the code of element `e` that is nearest to a value; gives what is stored.
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
