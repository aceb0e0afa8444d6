//! Packing on the device: from codes and scales in logical order there.

use core::ffi::c_void;

use quant_kernels_cpu::ScaleType;
use quant_kernels_cuda::compile::Variant;
use quant_kernels_cuda::launch::{Argument, LaunchShape};
use quant_kernels_cuda::layout::{SECTION, Section, WeightLayout};

use super::kernels::{self, Launch, is_family, qz1_cuda_kernels, qz1_cuda_plan};
use super::region::{address, product, qz1_cuda_region};
use super::weights::{layout, qz1_cuda_layout};
use crate::memory::{Scope, fields};
use crate::status::{Fault, qz1_message, qz1_status};

/// What is packed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_cuda_pack_shape {
    /// `sizeof(qz1_cuda_pack_shape)`
    pub struct_size: u32,
    /// Bits of a code, 2 to 8: those of the layout, or fewer that are stored in as many.
    pub bits: u32,
    /// What is made.
    pub layout: *const qz1_cuda_layout,
}

/// Where weights are on the device, as `qz1_weights` has them; addresses are aligned to what stands there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_cuda_pack_arguments {
    /// `sizeof(qz1_cuda_pack_arguments)`
    pub struct_size: u32,
    /// 0
    pub reserved: u32,
    /// u8 `[n, k]`, one code a byte.
    pub codes: qz1_cuda_region,
    /// f32 `[n, k / group_size]`, rounded to the type of the layout; with two levels u8, those of groups, and of E4M3
    /// scales their codes.
    pub scales: qz1_cuda_region,
    /// f32 `[n]` with two levels of scales; of E4M3 scales `[1]`, what they are divided by; else none.
    pub channels: qz1_cuda_region,
    /// u8 `[n, k / group_size]` where the layout has zeros, else none.
    pub zeros: qz1_cuda_region,
    /// A u32 that is 0 before and, when the launch is done, 1 where `qz1_cuda_pack` would have refused a code, zero or
    /// scale.
    pub fault: qz1_cuda_region,
    /// `layout.bytes` bytes at a multiple of 256. Bytes between its sections stay what they were.
    pub out: qz1_cuda_region,
}

fields!(qz1_cuda_pack_shape, layout);
fields!(qz1_cuda_pack_arguments, out, reserved);

/// A planned packing.
pub(super) struct Pack {
    layout: WeightLayout,
    bits: u32,
    /// Names of the kernels, in the order in which they are launched.
    names: Vec<&'static str>,
}

impl Launch for Pack {
    type Shape = qz1_cuda_pack_shape;
    type Arguments = qz1_cuda_pack_arguments;

    is_family!(Pack);

    unsafe fn plan(scope: &Scope, s: Self::Shape) -> Result<(Self, Vec<(Variant, LaunchShape)>), Fault> {
        // SAFETY: the pointer contract.
        let layout = unsafe { layout(scope, s.layout) }?;
        let stored = if s.bits <= 4 { 4 } else { 8 };
        if !(2..=8).contains(&s.bits) || layout.code_bits() != stored {
            return Err(Fault::new(qz1_status::Scheme, "bits of codes that the layout does not hold"));
        }
        let launches = layout.device_packing()?;
        let names = launches.iter().map(|launch| launch.variant.kernel).collect();
        let wanted = launches.into_iter().map(|launch| (launch.variant, launch.launch));
        Ok((Self { layout, bits: s.bits, names }, wanted.collect()))
    }

    unsafe fn launch(
        &self,
        plan: &qz1_cuda_plan,
        at: Self::Arguments,
        stream: *mut c_void,
    ) -> Result<(), Fault> {
        let each = self.arguments(&at)?;
        // SAFETY: the pointer contract.
        unsafe {
            plan.launch_each(stream, |i| match self.names.get(i) {
                Some(&"pack_codes") => &each.codes,
                Some(&"pack_parameters") => &each.parameters,
                _ => &each.rows,
            })
        }
    }
}

/// Plans a packing on the device.
///
/// # Safety
/// As for `qz1_cuda_require_device`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_pack_plan(
    kernels: *const qz1_cuda_kernels,
    shape: *const qz1_cuda_pack_shape,
    out: *mut *mut qz1_cuda_plan,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the pointer contract.
    unsafe { kernels::plan::<Pack>(kernels, shape, out, message) }
}

/// Packs weights on the device.
///
/// # Safety
/// As for `qz1_cuda_require_device`; regions are memory of the device whose context is current, of the type that each
/// has, and stay until the launch is done; the stream is one of that context. So for all that are launched.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_pack_launch(
    plan: *const qz1_cuda_plan,
    arguments: *const qz1_cuda_pack_arguments,
    stream: *mut c_void,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the pointer contract.
    unsafe { kernels::launch::<Pack>(plan, arguments, stream, message) }
}

/// The arguments of the kernels, in their order.
struct Each {
    codes: [Argument; 7],
    parameters: [Argument; 10],
    rows: [Argument; 13],
}

impl Pack {
    fn arguments(&self, at: &qz1_cuda_pack_arguments) -> Result<Each, Fault> {
        let layout = &self.layout;
        let (n, k, group) = (layout.n(), layout.k(), layout.group_size());
        // A count of 32 bits in the kernels; that the weights fit is known of the layout.
        let short = |v: usize| {
            let v = u32::try_from(v).map_err(|_| Fault::new(qz1_status::TooLarge, "the matrix to pack"));
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
        let zeros = long(match layout.middle() {
            None => address(at.zeros, "the zeros", groups, 1)?,
            Some(_) => 0,
        });
        let fault = long(address(at.fault, "the fault", Some(4), 4)?);
        let out = address(at.out, "the packed weights", Some(layout.bytes()), SECTION)?;
        let section = |section| long(out + layout.section(section) as u64);
        let (n, k, group) = (short(n)?, short(k)?, short(group)?);
        let middle = Argument::U32(layout.middle().map_or(0, u32::from));
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
