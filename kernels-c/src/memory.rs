//! Pointers become structures and slices, or a reason why not.

use core::mem::{align_of, size_of};

use crate::status::{Fault, qz1_message, qz1_status};

/// A structure of the interface: plain numbers and pointers, of which any bits are one, the first field its size.
pub(crate) trait Fields: Copy {}

/// More than any version of a structure will have.
const LARGEST: usize = 4096;

fn usable<T>(at: *const T, what: &str) -> Result<(), Fault> {
    if at.is_null() {
        return Err(Fault::new(qz1_status::Null, format!("{what} is null")));
    }
    if !at.is_aligned() {
        let text = format!("{what} is not aligned to {} bytes", align_of::<T>());
        return Err(Fault::new(qz1_status::Misaligned, text));
    }
    Ok(())
}

/// Looks at a structure's size.
///
/// # Safety
/// As [`read`].
unsafe fn check<T: Fields>(at: *const T, what: &str) -> Result<usize, Fault> {
    usable(at, what)?;
    // SAFETY: aligned and not null; the caller vouches that there is a structure, whose first field is its size.
    let size = unsafe { at.cast::<u32>().read() } as usize;
    let refuse = |why| Err(Fault::new(qz1_status::StructSize, format!("{what} {why}")));
    if size < size_of::<T>() {
        return refuse("has a smaller size than its first version");
    }
    if size > LARGEST {
        return refuse("has a size beyond all versions");
    }
    for i in size_of::<T>()..size {
        // SAFETY: the caller vouches for as many bytes as the structure says.
        if unsafe { at.cast::<u8>().add(i).read() } != 0 {
            return refuse("has fields that this library does not know");
        }
    }
    Ok(size)
}

/// A structure.
///
/// # Safety
/// A pointer that is not null and aligned must point to as many bytes as the `u32` there says.
pub(crate) unsafe fn read<T: Fields>(at: *const T, what: &str) -> Result<T, Fault> {
    // SAFETY: as the caller vouches.
    unsafe {
        check(at, what)?;
        Ok(at.read())
    }
}

/// A structure, or none.
///
/// # Safety
/// As [`read`].
pub(crate) unsafe fn read_optional<T: Fields>(at: *const T, what: &str) -> Result<Option<T>, Fault> {
    // SAFETY: as the caller vouches.
    if at.is_null() { Ok(None) } else { unsafe { read(at, what) }.map(Some) }
}

/// Structures one after another, each of the size that the first has.
///
/// # Safety
/// As [`read`], for all of them.
pub(crate) unsafe fn each<T: Fields>(
    at: *const T,
    count: usize,
    what: &str,
    mut body: impl FnMut(usize, T) -> Result<(), Fault>,
) -> Result<(), Fault> {
    if count == 0 {
        return Ok(());
    }
    // SAFETY: as the caller vouches.
    let size = unsafe { check(at, what) }?;
    let refuse = |why| Err(Fault::new(qz1_status::StructSize, format!("{what} {why}")));
    if !size.is_multiple_of(align_of::<T>()) {
        return refuse("has a size that no array has");
    }
    span(at.cast::<u8>(), count.saturating_mul(size), what)?;
    for i in 0..count {
        // SAFETY: the caller vouches for so many structures of this size.
        unsafe {
            let at = at.byte_add(i * size);
            if check(at, what)? != size {
                return refuse("has another size than the first");
            }
            body(i, at.read())?;
        }
    }
    Ok(())
}

/// Where a structure goes, whose size the caller has set.
///
/// # Safety
/// As [`read`], and nobody else may look at it.
pub(crate) unsafe fn fill<'a, T: Fields>(at: *mut T, what: &str) -> Result<&'a mut T, Fault> {
    // SAFETY: as the caller vouches.
    unsafe {
        check(at.cast_const(), what)?;
        Ok(&mut *at)
    }
}

/// Where a value or handle goes.
///
/// # Safety
/// A pointer that is not null and aligned must be valid.
pub(crate) unsafe fn place<'a, T>(at: *mut T, what: &str) -> Result<&'a mut T, Fault> {
    usable(at.cast_const(), what)?;
    // SAFETY: as the caller vouches.
    Ok(unsafe { &mut *at })
}

/// A handle that is only looked at.
///
/// # Safety
/// As [`place`].
pub(crate) unsafe fn look<'a, T>(at: *const T, what: &str) -> Result<&'a T, Fault> {
    usable(at, what)?;
    // SAFETY: as the caller vouches.
    Ok(unsafe { &*at })
}

fn span<T>(at: *const T, len: usize, what: &str) -> Result<(), Fault> {
    usable(at, what)?;
    match len.checked_mul(size_of::<T>()).filter(|&bytes| isize::try_from(bytes).is_ok()) {
        Some(bytes) if at.addr().checked_add(bytes).is_some() => Ok(()),
        _ => Err(Fault::new(qz1_status::TooLarge, format!("{what} of {len} elements"))),
    }
}

/// Memory that is read.
///
/// # Safety
/// A pointer that is not null and aligned must be valid for `len` elements, of which nothing writes to any meanwhile.
pub(crate) unsafe fn slice<'a, T>(at: *const T, len: usize, what: &str) -> Result<&'a [T], Fault> {
    if len == 0 {
        return Ok(&[]);
    }
    span(at, len, what)?;
    // SAFETY: not null, aligned, of a size that there can be; the caller vouches for the rest.
    Ok(unsafe { core::slice::from_raw_parts(at, len) })
}

/// The same, or none where the pointer is null.
///
/// # Safety
/// As [`slice`].
pub(crate) unsafe fn slice_optional<'a, T>(
    at: *const T,
    len: usize,
    what: &str,
) -> Result<Option<&'a [T]>, Fault> {
    if at.is_null() && len == 0 {
        return Ok(None);
    }
    // SAFETY: as the caller vouches.
    unsafe { slice(at, len, what) }.map(Some)
}

/// Memory that is written: no slice yet, for it must overlap no other.
pub(crate) struct Output<T> {
    at: *mut T,
    len: usize,
    what: &'static str,
}

impl<T> Output<T> {
    pub(crate) fn new(at: *mut T, len: usize, what: &'static str) -> Result<Self, Fault> {
        if len > 0 {
            span(at.cast_const(), len, what)?;
        }
        Ok(Self { at, len, what })
    }

    /// The same without another part of the call.
    pub(crate) fn apart_from<U>(self, at: *const U, len: usize) -> Result<Self, Fault> {
        let (start, end) = (self.at.addr(), self.at.addr() + self.len * size_of::<T>());
        let (other, other_end) = (at.addr(), at.addr().saturating_add(len.saturating_mul(size_of::<U>())));
        if start < other_end && other < end {
            let text = format!("{} overlaps other memory of the call", self.what);
            return Err(Fault::new(qz1_status::Overlap, text));
        }
        Ok(self)
    }

    /// The same without a slice.
    pub(crate) fn apart<U>(self, other: &[U]) -> Result<Self, Fault> {
        self.apart_from(other.as_ptr(), other.len())
    }

    /// The slice.
    ///
    /// # Safety
    /// The memory must be valid for as many elements, any bits be an element, and nothing else look at it or write to it
    /// as long as the slice lives.
    pub(crate) unsafe fn slice<'a>(self) -> &'a mut [T] {
        match self.len {
            0 => &mut [],
            // SAFETY: not null, aligned, of a size that there can be; the caller vouches for the rest.
            len => unsafe { core::slice::from_raw_parts_mut(self.at, len) },
        }
    }
}

/// Where a message goes, if one is wanted.
///
/// # Safety
/// As [`read`], and its text must be as long as it says.
pub(crate) unsafe fn text<'a>(message: *const qz1_message) -> Result<Option<&'a mut [u8]>, Fault> {
    // SAFETY: as the caller vouches.
    unsafe {
        let Some(message) = read_optional(message, "the message")? else { return Ok(None) };
        Ok(Some(Output::new(message.text.cast::<u8>(), message.capacity, "the text")?.slice()))
    }
}
