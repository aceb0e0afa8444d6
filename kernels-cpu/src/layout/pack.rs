//! Packs weights.

use std::ops::Range;

use half::{bf16, f16};

use super::{E4M3_NAN, Layout, PANEL_ROWS, PROGRESSIVE_MAX, STEP, ScaleType, e8m0_code, factor};
use crate::weight_view::Scales;
use crate::{KernelError, WeightView};

impl Layout {
    /// Packs a range of panels of a view into `out`, which has exactly their size.
    ///
    /// # Errors
    /// When
    /// - the view does not have this layout, `panels` is out of range, or `out` has the wrong length;
    /// - a code or zero point is above `2^bits − 1`, or a floating-point code is not a number;
    /// - a progressive weight `(code − zero) · group` is beyond ±128;
    /// - an E4M3 scale is negative or NaN.
    pub fn pack(
        &self,
        view: &WeightView<'_>,
        panels: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), KernelError> {
        if Self::of(view, self.sums)? != *self {
            return Err(KernelError::Scheme("the weight view does not match the layout"));
        }
        KernelError::panels(&panels, self.panels())?;
        KernelError::length("packed panels", panels.len() * self.panel_bytes, out.len())?;
        self.pack_panels(view, panels, out)
    }

    /// Packs panels as [`pack`](Self::pack) does; the caller has checked the view, the range and the length of `out`.
    pub(crate) fn pack_panels(
        &self,
        view: &WeightView<'_>,
        panels: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), KernelError> {
        out.fill(0);
        for (panel, bytes) in panels.zip(out.chunks_exact_mut(self.panel_bytes)) {
            for r in 0..PANEL_ROWS.min(self.n - panel * PANEL_ROWS) {
                self.pack_row(view, panel * PANEL_ROWS + r, r, bytes)?;
            }
        }
        Ok(())
    }

    fn check_group(
        &self,
        view: &WeightView<'_>,
        row: usize,
        g: usize,
        group: &[u8],
    ) -> Result<(), KernelError> {
        if let Some(format) = view.float_format() {
            if !group.iter().all(|&code| format.is_number(code)) {
                return Err(KernelError::Scheme("a code is not a number in its format"));
            }
            return match view.all_scales() {
                Scales::E4m3 { groups, .. } if groups[row * self.groups() + g] >= E4M3_NAN => {
                    Err(KernelError::Scheme("a group scale is negative or NaN"))
                }
                _ => Ok(()),
            };
        }
        let zero = view.zero(row, g);
        let (low, high) = group.iter().fold((u8::MAX, 0), |(low, high), &c| (low.min(c), high.max(c)));
        if high.max(zero) > u8::MAX >> (8 - view.bits()) {
            return Err(KernelError::Scheme("a code or zero point exceeds the bits of the weight"));
        }
        if let Scales::Progressive { groups, .. } = view.all_scales() {
            let scale = i32::from(groups[row * self.groups() + g]);
            let reach = |code: u8| ((i32::from(code) - i32::from(zero)) * scale).abs();
            if reach(low).max(reach(high)) > PROGRESSIVE_MAX {
                return Err(KernelError::Scheme("a progressive weight exceeds 8 bits"));
            }
        }
        Ok(())
    }

    fn pack_row(
        &self,
        view: &WeightView<'_>,
        row: usize,
        r: usize,
        panel: &mut [u8],
    ) -> Result<(), KernelError> {
        let codes = view.codes(row..row + 1);
        for (g, group) in codes.chunks_exact(self.group_size).enumerate() {
            self.check_group(view, row, g, group)?;
            for (i, &code) in group.iter().enumerate() {
                let step = g * self.steps() + i / STEP;
                let (at, half, byte) = (self.step_at(step), (i % STEP) / 4, 4 * r + i % 4);
                match self.code_bits {
                    8 => panel[at + 64 * half + byte] = code,
                    _ => panel[at + byte] |= (code & 0x0f) << (4 * half),
                }
                if let Some((at, shift)) = self.high_bits(step, half) {
                    panel[at + byte] |= code >> 4 << shift;
                }
            }
            let at = g * PANEL_ROWS + r;
            let zero = view.zero(row, g);
            if self.zero_point.is_none() {
                match self.code_bits {
                    4 => panel[self.zeros_at() + at / 2] |= zero << (4 * (at % 2)),
                    _ => panel[self.zeros_at() + at] = zero,
                }
            }
            if self.sums {
                let sum: i32 = group.iter().map(|&c| i32::from(c) - i32::from(zero)).sum();
                panel[self.sums_at() + 4 * at..][..4].copy_from_slice(&sum.to_le_bytes());
            }
        }
        let mut write = |at: usize, bytes: &[u8]| panel[at..at + bytes.len()].copy_from_slice(bytes);
        let (groups, size) = (self.groups(), self.scales.bytes());
        for g in 0..groups {
            let at = self.scales_at() + (g * PANEL_ROWS + r) * size;
            match (view.all_scales(), self.scales) {
                (Scales::Float(s), ScaleType::F16) => {
                    write(at, &f16::from_f32(s[row * groups + g]).to_le_bytes())
                }
                (Scales::Float(s), ScaleType::Bf16) => {
                    write(at, &bf16::from_f32(s[row * groups + g]).to_le_bytes())
                }
                // In this layout, all scales have a code.
                (Scales::Float(s), ScaleType::E8m0) => {
                    write(at, &[e8m0_code(s[row * groups + g]).unwrap_or_default()])
                }
                (Scales::Float(s), _) => write(at, &s[row * groups + g].to_le_bytes()),
                (Scales::Progressive { groups: s, .. } | Scales::E4m3 { groups: s, .. }, _) => {
                    write(at, &[s[row * groups + g]])
                }
                (Scales::Super(s), _) => {
                    write(at, &s.groups[row * groups + g].to_le_bytes());
                    if let Some(mins) = s.mins {
                        write(self.zeros_at() + g * PANEL_ROWS + r, &[mins.groups[row * groups + g]]);
                    }
                }
            }
        }
        if let Scales::Super(s) = view.all_scales() {
            let blocks = self.blocks();
            for b in 0..blocks {
                let at = self.channels_at() + 2 * (b * PANEL_ROWS + r);
                write(at, &s.blocks[row * blocks + b].to_le_bytes());
                if let Some(mins) = s.mins {
                    write(at + 2 * PANEL_ROWS * blocks, &mins.blocks[row * blocks + b].to_le_bytes());
                }
            }
        }
        if let Scales::Progressive { channels, .. } = view.all_scales() {
            write(self.channels_at() + 4 * r, &channels[row].to_le_bytes());
        }
        if let Scales::E4m3 { global, .. } = view.all_scales() {
            write(self.channels_at() + 4 * r, &factor(global).to_le_bytes());
            write(self.channels_at() + 4 * (PANEL_ROWS + r), &global.to_le_bytes());
        }
        Ok(())
    }
}
