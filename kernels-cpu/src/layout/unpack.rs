//! Reads packed matrices back: single elements, rows as floats, and everything in logical order.

use std::ops::Range;

use half::{bf16, f16};

use super::{Layout, PANEL_ROWS, STEP, SUPER_BLOCK, ScaleType, dense::dense_at};
use crate::float_format::{e4m3_packed, e4m3_scale_packed, e8m0_packed};
use crate::{FloatFormat, KernelError, e8m0_value};

impl Layout {
    pub(crate) fn code(&self, panel: &[u8], row: usize, k: usize) -> u8 {
        let (g, i, r) = (k / self.group_size, k % self.group_size, row % PANEL_ROWS);
        let step = g * self.steps() + i / STEP;
        let (at, half, byte) = (self.step_at(step), (i % STEP) / 4, 4 * r + i % 4);
        let low = match self.code_bits {
            8 => panel[at + 64 * half + byte],
            _ => panel[at + byte] >> (4 * half) & 0x0f,
        };
        match self.high_bits(step, half) {
            Some((at, shift)) => low | ((panel[at + byte] >> shift) & ((1 << (self.code_bits - 4)) - 1)) << 4,
            None => low,
        }
    }

    /// The scale of a group: for progressive weights and super-blocks an integer, for E4M3 scales the value before the
    /// division by the global scale.
    fn scale(&self, panel: &[u8], row: usize, g: usize) -> f32 {
        let at = self.scales_at() + (g * PANEL_ROWS + row % PANEL_ROWS) * self.scales.bytes();
        let bytes = |n| &panel[at..at + n];
        match (self.scales, bytes(self.scales.bytes())) {
            (ScaleType::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
            (ScaleType::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
            (ScaleType::E4m3, &[code]) => FloatFormat::E4m3.value(code),
            (ScaleType::E8m0, &[code]) => e8m0_value(code),
            (ScaleType::Super | ScaleType::SuperMins, &[scale]) => f32::from(scale as i8),
            (_, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            (_, other) => f32::from(other[0]),
        }
    }

    pub(crate) fn zero(&self, panel: &[u8], row: usize, g: usize) -> u8 {
        let at = g * PANEL_ROWS + row % PANEL_ROWS;
        match (self.zero_point, self.code_bits) {
            (Some(zero_point), _) => zero_point,
            (None, 4) => panel[self.zeros_at() + at / 2] >> (4 * (at % 2)) & 0x0f,
            (None, _) => panel[self.zeros_at() + at],
        }
    }

    /// The minimum of a group, an integer; 0 if there is none.
    fn min(&self, panel: &[u8], row: usize, g: usize) -> f32 {
        match self.scales {
            ScaleType::SuperMins => f32::from(panel[self.zeros_at() + g * PANEL_ROWS + row % PANEL_ROWS]),
            _ => 0.0,
        }
    }

    fn block(&self, panel: &[u8], row: usize, b: usize) -> [f16; 2] {
        let read = |at: usize| f16::from_le_bytes([panel[at], panel[at + 1]]);
        let at = self.channels_at() + 2 * (b * PANEL_ROWS + row % PANEL_ROWS);
        let min = match self.scales {
            ScaleType::SuperMins => read(at + 2 * PANEL_ROWS * self.blocks()),
            _ => f16::ZERO,
        };
        [read(at), min]
    }

    /// The scale of a row; for E4M3 scales the global one.
    fn channel(&self, panel: &[u8], row: usize) -> f32 {
        let second = if self.scales == ScaleType::E4m3 { PANEL_ROWS } else { 0 };
        let at = self.channels_at() + 4 * (second + row % PANEL_ROWS);
        f32::from_le_bytes([panel[at], panel[at + 1], panel[at + 2], panel[at + 3]])
    }

    fn panel_of<'a>(&self, packed: &'a [u8], row: usize) -> &'a [u8] {
        &packed[row / PANEL_ROWS * self.panel_bytes..][..self.panel_bytes]
    }

    /// Restores the parts of the view from the whole matrix.
    ///
    /// # Errors
    /// When `packed` has the wrong length, the number of weights overflows, an allocation fails, or the weights are
    /// dense and have no codes.
    pub fn unpack(&self, packed: &[u8]) -> Result<Unpacked, KernelError> {
        if self.is_bf16() {
            return Err(KernelError::Scheme("weights of bf16 have no codes to unpack"));
        }
        KernelError::length("packed weights", self.bytes(), packed.len())?;
        let mut out = Unpacked::default();
        // There may be more codes than packed bytes, so their number may overflow.
        let weights = self.n.checked_mul(self.k).ok_or(KernelError::TooLarge("the unpacked matrix"))?;
        let groups = weights / self.group_size;
        let none = |_| KernelError::Memory("the unpacked matrix");
        out.codes.try_reserve_exact(weights).map_err(none)?;
        out.scales.try_reserve_exact(groups).map_err(none)?;
        let has_mins = self.scales == ScaleType::SuperMins;
        let zeros = has_mins || self.zero_point.is_none();
        out.zeros.try_reserve_exact(if zeros { groups } else { 0 }).map_err(none)?;
        let channels = match self.scales {
            ScaleType::Super | ScaleType::SuperMins => weights / SUPER_BLOCK,
            _ if self.channel_bytes() > 0 => self.n,
            _ => 0,
        };
        out.channels.try_reserve_exact(channels).map_err(none)?;
        out.block_mins.try_reserve_exact(if has_mins { channels } else { 0 }).map_err(none)?;
        for row in 0..self.n {
            let panel = self.panel_of(packed, row);
            out.codes.extend((0..self.k).map(|k| self.code(panel, row, k)));
            out.scales.extend((0..self.groups()).map(|g| self.scale(panel, row, g)));
            if self.zero_point.is_none() {
                out.zeros.extend((0..self.groups()).map(|g| self.zero(panel, row, g)));
            }
            if self.scales.is_super() {
                for [scale, min] in (0..self.blocks()).map(|b| self.block(panel, row, b)) {
                    out.channels.push(scale.to_f32());
                    if has_mins {
                        out.block_mins.push(min.to_f32());
                    }
                }
                if has_mins {
                    out.zeros.extend((0..self.groups()).map(|g| self.min(panel, row, g) as u8));
                }
            } else if channels > 0 {
                out.channels.push(self.channel(panel, row));
            }
        }
        Ok(out)
    }

    pub(crate) fn dequantize(
        &self,
        packed: &[u8],
        rows: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        KernelError::length("packed weights", self.bytes(), packed.len())?;
        KernelError::rows(&rows, self.n)?;
        KernelError::length("output", rows.len() * self.k, out.len())?;
        for (row, out) in rows.zip(out.chunks_exact_mut(self.k)) {
            let panel = self.panel_of(packed, row);
            if self.is_bf16() {
                for (i, out) in out.iter_mut().enumerate() {
                    let at = self.step_at(i / STEP) + dense_at(row, i % STEP);
                    *out = bf16::from_le_bytes([panel[at], panel[at + 1]]).to_f32();
                }
                continue;
            }
            for (g, out) in out.chunks_exact_mut(self.group_size).enumerate() {
                let (zero, mut scale) = (i32::from(self.zero(panel, row, g)), self.scale(panel, row, g));
                if self.scales.is_super() {
                    let [of_scales, of_mins] =
                        self.block(panel, row, g * self.group_size / SUPER_BLOCK).map(f16::to_f32);
                    let (scale, min) = (of_scales * scale, of_mins * self.min(panel, row, g));
                    for (i, out) in out.iter_mut().enumerate() {
                        let code = self.code(panel, row, g * self.group_size + i);
                        let code = match self.float {
                            Some(format) => format.value(code),
                            None => (i32::from(code) - zero) as f32,
                        };
                        *out = match self.scales {
                            ScaleType::SuperMins => scale * code - min,
                            _ => scale * code,
                        };
                    }
                    continue;
                }
                // These are the values that kernels use.
                let byte =
                    panel[self.scales_at() + (g * PANEL_ROWS + row % PANEL_ROWS) * self.scales.bytes()];
                match self.scales {
                    ScaleType::E4m3 => {
                        scale = 256.0 * e4m3_scale_packed(byte) / self.channel(panel, row);
                    }
                    ScaleType::E8m0 => scale = e8m0_packed(byte),
                    _ => {}
                }
                for (i, out) in out.iter_mut().enumerate() {
                    let code = self.code(panel, row, g * self.group_size + i);
                    if let Some(format) = self.float {
                        let value = match format {
                            FloatFormat::E4m3 => e4m3_packed(code),
                            FloatFormat::E2m1 | FloatFormat::Iq4 => format.value(code),
                        };
                        *out = value * scale;
                        continue;
                    }
                    let code = i32::from(code) - zero;
                    *out = match self.scales {
                        // The product of the two integers is exact.
                        ScaleType::Progressive => (code * scale as i32) as f32 * self.channel(panel, row),
                        _ => code as f32 * scale,
                    };
                }
            }
        }
        Ok(())
    }
}

/// The parts of a packed matrix, in logical order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Unpacked {
    /// `[n, k]`
    pub codes: Vec<u8>,
    /// `[n, k / group_size]`: scales. As stored: integers for progressive weights and super-blocks; for E4M3 scales
    /// before the division by the global scale.
    pub scales: Vec<f32>,
    /// `[n, k / group_size]`: zero points, or empty if all groups have the same. For super-blocks with minima, the
    /// integers of the minima.
    pub zeros: Vec<u8>,
    /// `[n]`: the row scales of progressive weights, or the global scale of E4M3 scales. `[n, k / 256]`: the float
    /// scales of super-blocks. Otherwise empty.
    pub channels: Vec<f32>,
    /// `[n, k / 256]`: the float minima of super-blocks; empty if they have none.
    pub block_mins: Vec<f32>,
}
