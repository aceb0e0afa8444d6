//! Packing on the device: the kernels of `cuda/linear_pack.cu` and the sections that they write.

use quant_kernels_cpu::{FloatFormat, KernelError, ScaleType};

use super::{Order, SUPER_BLOCKS, TILE_ROWS, WeightLayout};
use crate::compile::{Source, Variant};
use crate::launch::LaunchShape;

/// The source of the kernels.
pub static SOURCE: Source = Source {
    name: "linear_pack.cu",
    text: include_str!("../../cuda/linear_pack.cu"),
    headers: &[
        ("ptx.cuh", include_str!("../../cuda/ptx.cuh")),
        ("dequantize.cuh", include_str!("../../cuda/dequantize.cuh")),
    ],
};

/// One of the kernels that pack a matrix; they may be launched in any order.
///
/// Arguments: `pack_codes(codes, fault, out, n, k, middle, most)`; `pack_parameters(codes, scales, zeros, fault, out,
/// n, k, group_size, middle, most)`; `pack_rows(codes, scales, channels, zeros, fault, row_scales, row_zeros, row_sums,
/// n, k, group_size, middle, most)`. Inputs are the slices of a [`WeightView`](quant_kernels_cpu::WeightView) in device
/// memory, or null if the view has none; for E4M3 scales `channels` is the one number that these are divided by.
/// Outputs are the sections of the packed matrix. `middle` is the zero point of all groups, or 0 if each has its own;
/// `most` is `2^bits − 1`. `fault` must be 0 before, and is 1 afterwards if packing on the CPU would have rejected a
/// value.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PackLaunch {
    /// The kernel.
    pub variant: Variant,
    /// Blocks and threads.
    pub launch: LaunchShape,
}

impl WeightLayout {
    /// The launches that pack a matrix of this layout on the device.
    ///
    /// # Errors
    /// When the matrix or a grid is too large.
    pub fn device_packing(&self) -> Result<Vec<PackLaunch>, KernelError> {
        let scale = match self.scales {
            _ if self.row_is_group() => "F32",
            ScaleType::F16 => "F16",
            ScaleType::Bf16 => "BF16",
            ScaleType::F32 => "F32",
            ScaleType::Progressive => "PROGRESSIVE",
            ScaleType::E4m3 => "E4M3",
            ScaleType::E8m0 => "E8M0",
            ScaleType::Super | ScaleType::SuperMins => return Err(KernelError::Scheme(SUPER_BLOCKS)),
        };
        let codes = match self.float {
            None => "INTEGER",
            Some(FloatFormat::E2m1) => "E2M1",
            Some(_) => "E4M3",
        };
        let flag = |set: bool| usize::from(set).to_string();
        let group = if self.row_is_group() { 0 } else { super::TILE_K / self.tile_groups() };
        let defines = vec![
            ("CODES", codes.to_owned()),
            ("CODE_BITS", self.code_bits.to_string()),
            ("ORDER_FLOAT", flag(self.order == Order::Float)),
            ("SIGNED", flag(self.signed())),
            ("GROUP", group.to_string()),
            ("SCALE", scale.to_owned()),
            ("ZEROS", flag(self.zero_point.is_none())),
            ("SUMS", flag(self.sums)),
        ];
        // The kernels use 32-bit indices.
        if self.n.max(self.k) > i32::MAX as usize {
            return Err(KernelError::TooLarge("the matrix to pack"));
        }
        let launch = |kernel, work: Option<usize>, threads: u32, of_block: usize| {
            let blocks = work.map(|work| work.div_ceil(of_block)).and_then(|b| i32::try_from(b).ok());
            let grid = blocks.ok_or(KernelError::TooLarge("the packing grid"))?.unsigned_abs();
            let variant = Variant { source: &SOURCE, kernel, defines: defines.clone() };
            let launch = LaunchShape { grid: [grid, 1, 1], block: threads, shared_bytes: 0 };
            Ok(PackLaunch { variant, launch })
        };
        let tiles = self.row_blocks().checked_mul(self.tiles());
        let mut launches =
            vec![launch("pack_codes", tiles.and_then(|t| t.checked_mul(self.tile_bytes() / 16)), 256, 256)?];
        if self.parameter_bytes() > 0 {
            let pairs = tiles.and_then(|t| t.checked_mul(TILE_ROWS / 2));
            launches.push(launch("pack_parameters", pairs, 256, 256)?);
        }
        if self.row_is_group() || matches!(self.scales, ScaleType::Progressive | ScaleType::E4m3) {
            launches.push(launch("pack_rows", self.row_blocks().checked_mul(TILE_ROWS), 128, 4)?);
        }
        Ok(launches)
    }
}
