//! Packing on the device, from codes and scales in device memory in logical order.

use core::ffi::c_void;

use quant_kernels_cpu::ScaleType;
use quant_kernels_cuda::compile::Variant;
use quant_kernels_cuda::launch::{Argument, LaunchShape};
use quant_kernels_cuda::layout::{SECTION, Section, WeightLayout};

use super::kernels::{self, Launch, Launcher, MAX_KERNELS, is_family, qz1_cuda_kernels, qz1_cuda_plan};
use super::region::{address, product, qz1_cuda_region};
use super::weights::qz1_cuda_layout;
use crate::layouts;
use crate::memory::{Scope, fields};
use crate::status::{Fault, qz1_message, qz1_status};

/// The parameters of a launch that packs weights.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_cuda_pack_shape {
    /// `sizeof(qz1_cuda_pack_shape)`
    pub struct_size: u32,
    /// Bits per code: 2 to 4 if the layout stores 4 bits per code, 5 to 8 if it stores 8.
    pub bits: u32,
    /// Layout of the packed matrix.
    pub layout: *const qz1_cuda_layout,
}

/// Device addresses of weights in the form of `qz1_weights`, aligned to their types.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_cuda_pack_arguments {
    /// `sizeof(qz1_cuda_pack_arguments)`
    pub struct_size: u32,
    /// 0
    pub reserved: u32,
    /// u8 `[n, k]`, one code per byte.
    pub codes: qz1_cuda_region,
    /// f32 `[n, k / group_size]`, which the scale type of the layout must represent exactly. With two levels of scales:
    /// u8, the group scales; for E4M3 scales, their codes.
    pub scales: qz1_cuda_region,
    /// f32 `[n]` with two levels of scales; with E4M3 group scales `[1]`, the number by which they are divided; else
    /// absent.
    pub channels: qz1_cuda_region,
    /// u8 `[n, k / group_size]` if the layout has zero points, else absent.
    pub zeros: qz1_cuda_region,
    /// A u32 that must be 0 before the launch. Afterwards it is 1 if `qz1_cuda_pack` would have rejected a code, zero
    /// point or scale.
    pub fault: qz1_cuda_region,
    /// `layout.bytes` bytes at a multiple of 256. Bytes between its sections are left unchanged.
    pub out: qz1_cuda_region,
}

fields!(qz1_cuda_pack_shape, layout);
fields!(qz1_cuda_pack_arguments, out, reserved);

pub(super) struct Pack {
    layout: WeightLayout,
    bits: u32,
    /// The names of the kernels, in launch order.
    names: Vec<&'static str>,
}

impl Launch for Pack {
    type Shape = qz1_cuda_pack_shape;
    type Arguments = qz1_cuda_pack_arguments;

    is_family!(Pack);

    unsafe fn plan(scope: &Scope, s: Self::Shape) -> Result<(Self, Vec<(Variant, LaunchShape)>), Fault> {
        // SAFETY: the caller upholds the pointer contract.
        let layout = unsafe { layouts::layout(scope, s.layout) }?;
        let stored = if s.bits <= 4 { 4 } else { 8 };
        if !(2..=8).contains(&s.bits) || layout.code_bits() != stored {
            return Err(Fault::new(
                qz1_status::Scheme,
                "`bits` must be from 2 to 8 and match the code width of the layout",
            ));
        }
        let launches = layout.device_packing()?;
        let names = launches.iter().map(|launch| launch.variant.kernel).collect();
        let wanted = launches.into_iter().map(|launch| (launch.variant, launch.launch));
        Ok((Self { layout, bits: s.bits, names }, wanted.collect()))
    }

    fn launch(&self, at: &Self::Arguments, launch: &mut Launcher<'_>) -> Result<(), Fault> {
        let each = self.arguments(at)?;
        let of = |name: &&str| match *name {
            "pack_codes" => &each.codes[..],
            "pack_parameters" => &each.parameters,
            _ => &each.rows,
        };
        let mut arguments: [&[Argument]; MAX_KERNELS] = [&[]; MAX_KERNELS];
        arguments.iter_mut().zip(&self.names).for_each(|(to, name)| *to = of(name));
        launch(&arguments)
    }
}

/// Plans a packing on the device.
///
/// # Safety
/// Same as for `qz1_cuda_require_device`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_pack_plan(
    kernels: *const qz1_cuda_kernels,
    shape: *const qz1_cuda_pack_shape,
    out: *mut *mut qz1_cuda_plan,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    unsafe { kernels::plan::<Pack>(kernels, shape, out, message) }
}

/// Launches a packing of weights on the device.
///
/// # Safety
/// Same as for `qz1_cuda_require_device`. Regions must be memory of the device whose context is current, hold values of
/// their documented types, and stay allocated until the launch has finished; the stream must belong to that context.
/// The same holds for all launches.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_pack_launch(
    plan: *const qz1_cuda_plan,
    arguments: *const qz1_cuda_pack_arguments,
    stream: *mut c_void,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    unsafe { kernels::launch::<Pack>(plan, arguments, stream, message) }
}

struct Each {
    codes: [Argument; 7],
    parameters: [Argument; 10],
    rows: [Argument; 13],
}

impl Pack {
    fn arguments(&self, at: &qz1_cuda_pack_arguments) -> Result<Each, Fault> {
        let layout = &self.layout;
        let (n, k, group) = (layout.n(), layout.k(), layout.group_size());
        let short = |v: usize| {
            let v = u32::try_from(v)
                .map_err(|_| Fault::new(qz1_status::TooLarge, "the matrix to pack is too large"));
            Ok::<_, Fault>(Argument::U32(v?))
        };
        let groups = product([n, k / group]);
        let channels = match layout.scales() {
            ScaleType::Progressive => Some(n),
            ScaleType::E4m3 => Some(1),
            _ => None,
        };
        let scale = if channels.is_some() { 1 } else { 4 };
        let long = Argument::U64;
        let codes = long(address(at.codes, "the codes", product([n, k]), 1)?);
        let scales =
            long(address(at.scales, "the scales", groups.and_then(|g| g.checked_mul(scale)), scale)?);
        let channels = long(match channels {
            Some(rows) => address(at.channels, "the channels", product([rows, 4]), 4)?,
            None => 0,
        });
        let zeros = long(match layout.zero_point() {
            None => address(at.zeros, "the zeros", groups, 1)?,
            Some(_) => 0,
        });
        let fault = long(address(at.fault, "the fault", Some(4), 4)?);
        let out = address(at.out, "the packed weights", Some(layout.bytes()), SECTION)?;
        let section = |section| long(out + layout.section(section) as u64);
        let (n, k, group) = (short(n)?, short(k)?, short(group)?);
        let middle = Argument::U32(layout.zero_point().map_or(0, u32::from));
        let most = Argument::U32((1 << self.bits) - 1);
        Ok(Each {
            codes: [codes, fault, section(Section::Codes), n, k, middle, most],
            parameters: [
                codes,
                scales,
                zeros,
                fault,
                section(Section::Parameters),
                n,
                k,
                group,
                middle,
                most,
            ],
            rows: [
                codes,
                scales,
                channels,
                zeros,
                fault,
                section(Section::RowScales),
                section(Section::RowZeros),
                section(Section::RowSums),
                n,
                k,
                group,
                middle,
                most,
            ],
        })
    }
}
