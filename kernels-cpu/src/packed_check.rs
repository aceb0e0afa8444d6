//! Validates packed bytes from an external source, such as a file: rejects values that [`Layout::pack`] never writes.
//!
//! Kernels can read any bytes of a layout safely, but bytes that encode NaN decode to other values. Call
//! [`PackedView::check`] once when packed bytes are loaded.

use crate::layout::{E4M3_NAN, LINE, PANEL_ROWS, PROGRESSIVE_MAX, factor};
use crate::{FloatFormat, KernelError, Layout, PackedView, ScaleType};

impl PackedView<'_> {
    /// Fails on values that packing never writes, such as NaN. Allocates nothing.
    ///
    /// # Errors
    /// [`KernelError::Scheme`], which names the problem.
    pub fn check(&self) -> Result<(), KernelError> {
        let layout = self.layout();
        self.bytes().chunks_exact(layout.panel_bytes().max(LINE)).try_for_each(|panel| check(layout, panel))
    }
}

fn check(layout: &Layout, panel: &[u8]) -> Result<(), KernelError> {
    let codes = &panel[..layout.scales_at()];
    let scales = &panel[layout.scales_at()..layout.zeros_at()];
    // Padding bytes are 0, a valid code.
    if layout.float_format() == Some(FloatFormat::E4m3) && codes.iter().any(|code| code & 0x7f == E4M3_NAN) {
        return Err(KernelError::Scheme("a code is NaN"));
    }
    match layout.scales() {
        ScaleType::E4m3 => {
            if scales.iter().any(|&scale| scale >= E4M3_NAN) {
                return Err(KernelError::Scheme("a group scale is negative or NaN"));
            }
            let number = |at: usize| {
                let at = layout.channels_at() + 4 * at;
                f32::from_le_bytes([panel[at], panel[at + 1], panel[at + 2], panel[at + 3]])
            };
            for row in 0..PANEL_ROWS {
                let [by, global] = [number(row), number(PANEL_ROWS + row)];
                // Padding rows of the last panel have no scales.
                let is_filler = by == 0.0 && global == 0.0;
                let fits = global > 0.0 && global.is_finite() && by.is_normal() && by == factor(global);
                if !is_filler && !fits {
                    return Err(KernelError::Scheme(
                        "a global scale is not positive and finite, or so small that 256 divided by it overflows",
                    ));
                }
            }
        }
        ScaleType::E8m0 if scales.contains(&u8::MAX) => {
            return Err(KernelError::Scheme("a group scale is NaN"));
        }
        ScaleType::Progressive => {
            for row in 0..PANEL_ROWS {
                for (k, group) in (0..layout.k()).map(|k| (k, k / layout.group_size())) {
                    let code =
                        i32::from(layout.code(panel, row, k)) - i32::from(layout.zero(panel, row, group));
                    let scale = i32::from(scales[group * PANEL_ROWS + row]);
                    if (code * scale).abs() > PROGRESSIVE_MAX {
                        return Err(KernelError::Scheme("a progressive weight exceeds 8 bits"));
                    }
                }
            }
        }
        _ => {}
    }
    Ok(())
}
