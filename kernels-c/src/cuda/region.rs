//! Device memory, as described by the caller.

use quant_kernels_cuda::launch::Region;

use crate::status::{Fault, qz1_status};

/// The caller's memory on the device: its address, a `CUdeviceptr` or CUDA pointer, and the number of bytes that belong
/// to this argument. `{0, 0}` means that the argument is absent. Unlike the other structures, it does not begin with
/// its size, because it will never have more fields.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct qz1_cuda_region {
    /// The address.
    pub address: u64,
    /// The number of bytes that begin at the address.
    pub bytes: u64,
}

impl qz1_cuda_region {
    fn is_none(self) -> bool {
        self.address == 0 && self.bytes == 0
    }
}

pub(super) fn region(at: qz1_cuda_region, what: &'static str, align: usize) -> Result<Region, Fault> {
    if at.is_none() {
        return Ok(Region::NONE);
    }
    if at.address == 0 {
        return Err(Fault::part(qz1_status::Null, what, "null pointer"));
    }
    if !at.address.is_multiple_of(align as u64) {
        return Err(Fault::misaligned(what, align));
    }
    if at.address.checked_add(at.bytes).is_none() {
        return Err(Fault::part(qz1_status::TooLarge, what, "exceeds the address space"));
    }
    Ok(Region { address: at.address, bytes: at.bytes })
}

/// Returns the address of a region, after checking that it has at least the given number of bytes. It may be absent if
/// no bytes are needed.
pub(super) fn address(
    at: qz1_cuda_region,
    what: &'static str,
    bytes: Option<usize>,
    align: usize,
) -> Result<u64, Fault> {
    let bytes = bytes.ok_or_else(|| Fault::part(qz1_status::TooLarge, what, "exceeds the address space"))?;
    let region = region(at, what, align)?;
    region.require(what, bytes, align)?;
    Ok(region.address)
}

/// Checks a region like [`address`], or returns 0 if it is absent.
pub(super) fn address_optional(
    at: qz1_cuda_region,
    what: &'static str,
    bytes: Option<usize>,
    align: usize,
) -> Result<u64, Fault> {
    if at.is_none() { Ok(0) } else { address(at, what, bytes, align) }
}

/// The index, in elements, of the end of the last of `count` rows of `width` elements that begin `stride` apart. `None`
/// if it overflows.
pub(super) fn rows(count: usize, stride: usize, width: usize) -> Option<usize> {
    match count {
        0 => Some(0),
        _ => (count - 1).checked_mul(stride)?.checked_add(width),
    }
}

pub(super) fn product<const N: usize>(of: [usize; N]) -> Option<usize> {
    of.into_iter().try_fold(1_usize, usize::checked_mul)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(outcome: Result<u64, Fault>) -> Result<u64, qz1_status> {
        outcome.map_err(|fault| fault.status())
    }

    #[test]
    fn regions_are_checked() {
        let at = |address, bytes| qz1_cuda_region { address, bytes };
        let of = |region, bytes| status(address(region, "x", bytes, 16));
        assert_eq!(of(at(64, 10), Some(10)), Ok(64));
        assert_eq!(of(at(64, 10), Some(11)), Err(qz1_status::Length));
        assert_eq!(of(at(0, 10), Some(0)), Err(qz1_status::Null));
        assert_eq!(of(at(0, 0), Some(0)), Ok(0));
        assert_eq!(of(at(0, 0), Some(1)), Err(qz1_status::Length));
        assert_eq!(of(at(72, 10), Some(0)), Err(qz1_status::Misaligned));
        assert_eq!(of(at(u64::MAX - 15, 16), Some(16)), Err(qz1_status::TooLarge));
        assert_eq!(of(at(64, 10), None), Err(qz1_status::TooLarge));
        assert_eq!(status(address_optional(at(0, 0), "x", Some(5), 4)), Ok(0));
        assert_eq!(status(address_optional(at(4, 4), "x", Some(5), 4)), Err(qz1_status::Length));
    }

    #[test]
    fn rows_end_with_the_last() {
        assert_eq!([rows(0, 9, 5), rows(1, 9, 5), rows(3, 9, 5)], [Some(0), Some(5), Some(23)]);
        assert_eq!([rows(usize::MAX, 2, 1), rows(2, usize::MAX, 1)], [None; 2]);
        assert_eq!(
            [product([3, 5]), product([usize::MAX, 2]), product([usize::MAX, 0])],
            [Some(15), None, Some(0)]
        );
    }
}
