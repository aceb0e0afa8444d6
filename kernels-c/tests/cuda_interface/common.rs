use core::ptr::{null, null_mut};
use std::ffi::CString;
use std::fmt::Display;
use std::io::Write;
use std::panic::Location;

use quant_kernels::*;

/// Whether something that a test needs is available. If not, prints that the test is skipped.
///
/// # Panics
/// If it is not, although `QUANT_REQUIRE_NVRTC` is set.
#[track_caller]
pub fn is_there<E: Display>(needed: Result<(), E>) -> bool {
    let Err(why) = needed else { return true };
    const REQUIRED: &str = "QUANT_REQUIRE_NVRTC";
    assert!(
        std::env::var_os(REQUIRED).is_none_or(|v| v.is_empty() || v == "0"),
        "{REQUIRED} is set, but: {why}"
    );
    let at = Location::caller();
    // The test harness would capture the output of `eprintln!` in tests that pass.
    let line = format!("SKIPPED: {why} ({}:{})\n", at.file(), at.line());
    std::io::stderr().write_all(line.as_bytes()).expect("stderr can be written");
    false
}

pub fn on_gpu() -> bool {
    std::env::var_os("QUANT_GPU").is_some_and(|value| !value.is_empty() && value != "0")
}

pub fn with_message(call: impl FnOnce(*const qz1_message) -> qz1_status) -> (qz1_status, String) {
    let mut text = [0x55_u8; 600];
    let (struct_size, capacity) = (size_of::<qz1_message>() as u32, text.len());
    let message = qz1_message { struct_size, reserved: 0, text: text.as_mut_ptr().cast(), capacity };
    let status = call(&message);
    let end = text.iter().position(|b| *b == 0).expect("a NUL-terminated text");
    let text = String::from_utf8(text[..end].to_vec()).expect("valid UTF-8");
    assert_eq!(text.is_empty(), status == qz1_status::Ok, "{status:?}: {text}");
    (status, text)
}

#[track_caller]
pub fn done(call: impl FnOnce(*const qz1_message) -> qz1_status) {
    let (status, text) = with_message(call);
    assert_eq!(status, qz1_status::Ok, "{text}");
}

pub fn refused(call: impl FnOnce(*const qz1_message) -> qz1_status) -> qz1_status {
    with_message(call).0
}

/// A structure of zeros with its size set.
pub fn sized<T: Copy>() -> T {
    // SAFETY: structures of the interface consist of numbers and pointers, for which zero is valid, and begin with
    // their size.
    unsafe {
        let mut of: T = core::mem::zeroed();
        (&raw mut of).cast::<u32>().write(size_of::<T>() as u32);
        of
    }
}

pub const NONE: qz1_cuda_region = qz1_cuda_region { address: 0, bytes: 0 };

/// A handle of kernels, freed when dropped.
pub struct Kernels(pub *mut qz1_cuda_kernels);

impl Kernels {
    pub fn new() -> Self {
        Self::with(None)
    }

    pub fn with(images: Option<&str>) -> Self {
        let mut kernels = null_mut();
        let images = images.map(|path| CString::new(path).unwrap());
        let images = images.as_ref().map_or(null(), |path| path.as_ptr());
        // SAFETY: every pointer is null or points to a live value.
        done(|m| unsafe { qz1_cuda_kernels_new(images, &mut kernels, m) });
        Self(kernels)
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // SAFETY: made by `with` and freed once; contexts are never released.
        unsafe { qz1_cuda_kernels_free(self.0) }
    }
}

/// A plan, freed when dropped.
pub struct Plan(pub *mut qz1_cuda_plan);

impl Plan {
    #[track_caller]
    pub fn new<S>(
        kernels: &Kernels,
        shape: &S,
        make: unsafe extern "C" fn(
            *const qz1_cuda_kernels,
            *const S,
            *mut *mut qz1_cuda_plan,
            *const qz1_message,
        ) -> qz1_status,
    ) -> Self {
        let mut plan = null_mut();
        // SAFETY: every pointer is null or points to a live value.
        done(|m| unsafe { make(kernels.0, shape, &mut plan, m) });
        assert!(!plan.is_null());
        Self(plan)
    }

    pub fn workspace(&self) -> (usize, usize) {
        let (mut bytes, mut tickets) = (1, 1);
        // SAFETY: every pointer is null or points to a live value.
        done(|m| unsafe { qz1_cuda_plan_workspace(self.0, &mut bytes, &mut tickets, m) });
        (bytes, tickets)
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: made by `new` and freed once.
        unsafe { qz1_cuda_plan_free(self.0) }
    }
}

/// A matrix of codes, scales and zero points.
pub struct Matrix {
    pub shape: [usize; 2],
    pub group: usize,
    pub codes: Vec<u8>,
    pub scales: Vec<f32>,
    pub zeros: Option<Vec<u8>>,
}

impl Matrix {
    /// 4-bit codes; scales are representable in f16.
    pub fn new([n, k]: [usize; 2], group: usize, with_zeros: bool) -> Self {
        let groups = n * k / group;
        Self {
            shape: [n, k],
            group,
            codes: (0..n * k).map(|i| (i * 7 % 31 % 16) as u8).collect(),
            scales: (0..groups).map(|i| (1 + i % 5) as f32 / 128.0).collect(),
            zeros: with_zeros.then(|| (0..groups).map(|i| (i * 3 % 16) as u8).collect()),
        }
    }

    pub fn weights(&self) -> qz1_weights {
        let zeros = self.zeros.as_deref();
        qz1_weights {
            struct_size: size_of::<qz1_weights>() as u32,
            bits: 4,
            n: self.shape[0],
            k: self.shape[1],
            group_size: self.group,
            codes: self.codes.as_ptr(),
            codes_len: self.codes.len(),
            scales: self.scales.as_ptr(),
            scales_len: self.scales.len(),
            group_scales: null(),
            group_scales_len: 0,
            zeros: zeros.map_or(null(), |zeros| zeros.as_ptr()),
            zeros_len: zeros.map_or(0, <[u8]>::len),
            format: QZ1_CODES_INTEGER,
            reserved: 0,
        }
    }

    pub fn layout(&self, order: u32, sums: u32) -> qz1_cuda_layout {
        let mut layout = sized();
        // SAFETY: every pointer is null or points to a live value.
        done(|m| unsafe { qz1_cuda_layout_of(&self.weights(), order, sums, &mut layout, m) });
        layout
    }

    pub fn packed(&self, layout: &qz1_cuda_layout) -> Vec<u8> {
        let mut out = vec![0x55; layout.bytes as usize];
        // SAFETY: every pointer is null or points to a live value.
        done(|m| unsafe { qz1_cuda_pack(&self.weights(), layout, out.as_mut_ptr(), out.len(), m) });
        out
    }

    pub fn weight(&self, row: usize, feature: usize) -> f64 {
        let group = (row * self.shape[1] + feature) / self.group;
        let zero = self.zeros.as_ref().map_or(8, |zeros| zeros[group]);
        let code = self.codes[row * self.shape[1] + feature];
        (f64::from(code) - f64::from(zero)) * f64::from(self.scales[group])
    }
}
