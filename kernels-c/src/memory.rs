//! Checked conversion of pointers to structures and slices.
//!
//! Each part of a call is entered into a [`Scope`]. Memory that is written must not overlap any other part. Slices
//! borrow the scope, so none is alive when the text of the message is written at the end.

use core::cell::{Cell, RefCell};
use core::mem::{MaybeUninit, align_of, size_of};

use crate::status::{Fault, qz1_message, qz1_status};

/// A structure of the interface.
///
/// # Safety
/// It must be `repr(C)` and consist of plain numbers and pointers, so that any bits are a valid value; zero means that
/// a field is not set. The first field must be a `u32`, the size of the structure.
pub(crate) unsafe trait Fields: Copy {
    /// The size of the structure's first version in bytes, the smallest that a caller may pass.
    const FIRST_SIZE: usize;

    /// The reserved fields, which have no meaning yet and must be 0.
    fn reserved(&self) -> u32 {
        0
    }
}

pub(crate) const fn size_of_field<S, F>(_: fn(&S) -> &F) -> usize {
    size_of::<F>()
}

/// Implements [`Fields`] for a structure, given the last field of its first version and its reserved field, if any.
macro_rules! fields {
    ($of:ty, $last:ident $(, $reserved:ident)?) => {
        // SAFETY: callers of the macro name `repr(C)` structures of plain numbers and pointers that begin with their
        // size.
        unsafe impl $crate::memory::Fields for $of {
            const FIRST_SIZE: usize = (core::mem::offset_of!($of, $last)
                + $crate::memory::size_of_field::<$of, _>(|of| &of.$last))
            .next_multiple_of(align_of::<$of>());
            $(
                fn reserved(&self) -> u32 {
                    self.$reserved
                }
            )?
        }
    };
}
pub(crate) use fields;

const LARGEST: usize = 4096;
const PARTS: usize = 16;

#[derive(Clone, Copy)]
struct Span {
    start: usize,
    end: usize,
    written: bool,
}

pub(crate) struct Scope {
    /// The parts entered so far, the text of the message first.
    parts: RefCell<([Span; PARTS], usize)>,
    /// Whether the text of the message can be written: no other part overlaps it.
    text_is_apart: Cell<bool>,
}

fn usable<T>(at: *const T, what: &'static str) -> Result<(), Fault> {
    if at.is_null() {
        return Err(Fault::part(qz1_status::Null, what, "null pointer"));
    }
    if !at.is_aligned() {
        return Err(Fault::misaligned(what, align_of::<T>()));
    }
    Ok(())
}

/// Returns the size of `len` elements in bytes, or an error if they would exceed the address space.
fn bytes_of<T>(at: *const T, len: usize, what: &'static str) -> Result<usize, Fault> {
    usable(at, what)?;
    let bytes = len.checked_mul(size_of::<T>()).filter(|&bytes| isize::try_from(bytes).is_ok());
    bytes.filter(|&bytes| at.addr().checked_add(bytes).is_some()).ok_or_else(|| Fault::elements(what, len))
}

/// Reads a structure's size.
///
/// # Safety
/// Same as for [`Scope::read`].
unsafe fn size_at<T: Fields>(at: *const T, what: &'static str) -> Result<usize, Fault> {
    usable(at, what)?;
    // SAFETY: not null and aligned, checked above; by the pointer contract a structure begins here, whose first field
    // is its size.
    let size = unsafe { at.cast::<u32>().read() } as usize;
    let refuse = |why| Err(Fault::part(qz1_status::StructSize, what, why));
    if size < T::FIRST_SIZE {
        return refuse("struct_size is smaller than in the first version of the structure");
    }
    if size > LARGEST || !size.is_multiple_of(align_of::<T>()) {
        return refuse("struct_size does not match any version of the structure");
    }
    for i in size_of::<T>()..size {
        // SAFETY: the pointer contract covers as many bytes as the structure says.
        if unsafe { at.cast::<u8>().add(i).read() } != 0 {
            return refuse("a field of a later version of the structure is not 0");
        }
    }
    Ok(size)
}

/// Copies a structure of any version to this version of it; fields that an older version lacks are zero.
///
/// # Safety
/// Same as for [`Scope::read`]; `size` must be the structure's size.
unsafe fn copy<T: Fields>(at: *const T, size: usize, what: &'static str) -> Result<T, Fault> {
    let mut of = MaybeUninit::<T>::zeroed();
    // SAFETY: the pointer contract covers `size` bytes, and no more than fit are copied. Any bits are a valid `T`.
    let of = unsafe {
        at.cast::<u8>().copy_to_nonoverlapping(of.as_mut_ptr().cast(), size.min(size_of::<T>()));
        of.assume_init()
    };
    match of.reserved() {
        0 => Ok(of),
        _ => Err(Fault::part(qz1_status::StructSize, what, "a reserved field is not 0")),
    }
}

impl Scope {
    pub(crate) fn new() -> Self {
        let none = Span { start: 0, end: 0, written: false };
        Self { parts: RefCell::new(([none; PARTS], 0)), text_is_apart: Cell::new(true) }
    }

    pub(crate) fn text_is_apart(&self) -> bool {
        self.text_is_apart.get()
    }

    /// Fails if the memory overlaps a part that was entered before and either of them is written. The caller has
    /// already checked the pointer and the size.
    fn check<T>(&self, at: *const T, bytes: usize, written: bool, what: &'static str) -> Result<Span, Fault> {
        let new = Span { start: at.addr(), end: at.addr() + bytes, written };
        let parts = self.parts.borrow();
        for (i, old) in parts.0[..parts.1].iter().enumerate() {
            if (old.written || new.written) && old.start < new.end && new.start < old.end {
                // The text of the message, if there is one, is the first part. Two parts may overlap if both are only
                // read.
                if i == 0 && old.written {
                    self.text_is_apart.set(false);
                }
                return Err(Fault::part(
                    qz1_status::Overlap,
                    what,
                    "overlaps the memory of another argument",
                ));
            }
        }
        Ok(new)
    }

    fn enter<T>(&self, at: *const T, bytes: usize, written: bool, what: &'static str) -> Result<(), Fault> {
        if bytes == 0 {
            return Ok(());
        }
        let new = self.check(at, bytes, written, what)?;
        let mut parts = self.parts.borrow_mut();
        let count = parts.1;
        let room = parts.0.get_mut(count);
        *room.ok_or_else(|| Fault::new(qz1_status::Internal, "too many memory regions in one call"))? = new;
        parts.1 += 1;
        Ok(())
    }

    /// Reads a structure.
    ///
    /// # Safety
    /// The caller must uphold the pointer contract of the crate: if `at` is aligned and not null, it points to as many
    /// bytes as the `u32` at its beginning states.
    pub(crate) unsafe fn read<T: Fields>(&self, at: *const T, what: &'static str) -> Result<T, Fault> {
        // SAFETY: the caller upholds the pointer contract.
        unsafe {
            let size = size_at(at, what)?;
            self.enter(at, size, false, what)?;
            copy(at, size, what)
        }
    }

    /// Reads a structure, or returns `None` if the pointer is null.
    ///
    /// # Safety
    /// Same as for [`Self::read`].
    pub(crate) unsafe fn read_optional<T: Fields>(
        &self,
        at: *const T,
        what: &'static str,
    ) -> Result<Option<T>, Fault> {
        // SAFETY: the caller upholds the pointer contract.
        if at.is_null() { Ok(None) } else { unsafe { self.read(at, what) }.map(Some) }
    }

    /// Enters an array of structures that are only read, and calls `body` with each index and structure. All must state
    /// the same size as the first one.
    ///
    /// # Safety
    /// Same as for [`Self::read`], for all structures.
    pub(crate) unsafe fn each<T: Fields>(
        &self,
        at: *const T,
        count: usize,
        what: &'static str,
        mut body: impl FnMut(usize, T) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        if count == 0 {
            return Ok(());
        }
        // SAFETY: the caller upholds the pointer contract.
        let size = unsafe { size_at(at, what) }?;
        bytes_of(at.cast::<u8>(), count.saturating_mul(size), what)?;
        self.enter(at, count * size, false, what)?;
        for i in 0..count {
            // SAFETY: the pointer contract covers `count` structures of this size.
            unsafe {
                let at = at.byte_add(i * size);
                if size_at(at, what)? != size {
                    let why = "struct_size differs from that of the first element";
                    return Err(Fault::part(qz1_status::StructSize, what, why));
                }
                body(i, copy(at, size, what)?)?;
            }
        }
        Ok(())
    }

    /// Reads one of any number of structures. It is not added to the parts, so all memory that is written must have
    /// been entered before.
    ///
    /// # Safety
    /// Same as for [`Self::read`].
    pub(crate) unsafe fn read_one_of_many<T: Fields>(
        &self,
        at: *const T,
        what: &'static str,
    ) -> Result<T, Fault> {
        // SAFETY: this function has the safety contract of both unsafe functions that it calls.
        unsafe {
            let size = size_at(at, what)?;
            self.check(at, size, false, what)?;
            copy(at, size, what)
        }
    }

    /// Enters a structure that will be written; the caller has set its size.
    ///
    /// # Safety
    /// Same as for [`Self::read`].
    pub(crate) unsafe fn place<T: Fields>(&self, at: *mut T, what: &'static str) -> Result<Place<T>, Fault> {
        // SAFETY: the caller upholds the pointer contract.
        let size = unsafe { size_at(at.cast_const(), what) }?;
        self.enter(at.cast_const(), size, true, what)?;
        Ok(Place { at, size })
    }

    /// Enters a number or handle that will be written.
    pub(crate) fn value<T: Copy>(&self, at: *mut T, what: &'static str) -> Result<Value<T>, Fault> {
        usable(at.cast_const(), what)?;
        self.enter(at.cast_const(), size_of::<T>(), true, what)?;
        Ok(Value { at })
    }

    /// Enters a handle that is only read.
    ///
    /// # Safety
    /// If the pointer is aligned and not null, it must be valid.
    pub(crate) unsafe fn shared<T>(&self, at: *const T, what: &'static str) -> Result<&T, Fault> {
        usable(at, what)?;
        self.enter(at, size_of::<T>(), false, what)?;
        // SAFETY: the caller upholds the pointer contract.
        Ok(unsafe { &*at })
    }

    /// Enters a handle that will be modified.
    ///
    /// # Safety
    /// Same as for [`Self::shared`]; no other code may access the handle.
    #[allow(clippy::mut_from_ref, reason = "overlapping parts are rejected")]
    pub(crate) unsafe fn handle<T>(&self, at: *mut T, what: &'static str) -> Result<&mut T, Fault> {
        usable(at.cast_const(), what)?;
        self.enter(at.cast_const(), size_of::<T>(), true, what)?;
        // SAFETY: the caller upholds the pointer contract.
        Ok(unsafe { &mut *at })
    }

    /// Enters memory that is only read.
    ///
    /// # Safety
    /// If the pointer is aligned and not null, it must be valid for reads of `len` elements, and no thread may write to
    /// them during the call.
    pub(crate) unsafe fn slice<T>(
        &self,
        at: *const T,
        len: usize,
        what: &'static str,
    ) -> Result<&[T], Fault> {
        if len == 0 {
            return Ok(&[]);
        }
        self.enter(at, bytes_of(at, len, what)?, false, what)?;
        // SAFETY: not null, aligned and of a possible size, checked above; the pointer contract covers the rest.
        Ok(unsafe { core::slice::from_raw_parts(at, len) })
    }

    /// Enters memory that is only read; returns `None` if the pointer is null and the length is 0.
    ///
    /// # Safety
    /// Same as for [`Self::slice`].
    pub(crate) unsafe fn slice_optional<T>(
        &self,
        at: *const T,
        len: usize,
        what: &'static str,
    ) -> Result<Option<&[T]>, Fault> {
        if at.is_null() && len == 0 {
            return Ok(None);
        }
        // SAFETY: the caller upholds the pointer contract.
        unsafe { self.slice(at, len, what) }.map(Some)
    }

    /// Reads one of any number of slices. It is not added to the parts, so all memory that is written must have been
    /// entered before.
    ///
    /// # Safety
    /// Same as for [`Self::slice`].
    pub(crate) unsafe fn one_of_many<T>(
        &self,
        at: *const T,
        len: usize,
        what: &'static str,
    ) -> Result<&[T], Fault> {
        if len == 0 {
            return Ok(&[]);
        }
        self.check(at, bytes_of(at, len, what)?, false, what)?;
        // SAFETY: this function has the safety contract of `slice`.
        Ok(unsafe { core::slice::from_raw_parts(at, len) })
    }

    /// Enters memory that will be written. The result is not a slice yet, because a part entered later might overlap
    /// it.
    pub(crate) fn output<T>(
        &self,
        at: *mut T,
        len: usize,
        what: &'static str,
    ) -> Result<Output<'_, T>, Fault> {
        if len > 0 {
            self.enter(at.cast_const(), bytes_of(at.cast_const(), len, what)?, true, what)?;
        }
        Ok(Output { at, len, scope: self })
    }

    /// Enters the destination of the message, if the caller passed one. Must be called before any other part is
    /// entered.
    ///
    /// # Safety
    /// Same as for [`Self::read`].
    pub(crate) unsafe fn text(&self, message: *const qz1_message) -> Result<(*mut u8, usize), Fault> {
        if message.is_null() {
            return Ok((core::ptr::null_mut(), 0));
        }
        // SAFETY: the caller upholds the pointer contract.
        let (size, m) = unsafe {
            let size = size_at(message, "the message")?;
            (size, copy(message, size, "the message")?)
        };
        let at = m.text.cast::<u8>();
        if m.capacity > 0 {
            self.enter(
                at.cast_const(),
                bytes_of(at.cast_const(), m.capacity, "the text")?,
                true,
                "the text",
            )?;
        }
        self.enter(message, size, false, "the message")?;
        Ok((at, m.capacity))
    }
}

pub(crate) struct Place<T> {
    at: *mut T,
    size: usize,
}

impl<T: Fields> Place<T> {
    /// Writes the fields that the caller's version has, and keeps the caller's size.
    ///
    /// # Safety
    /// The memory must be valid for writes of as many bytes as its size field says.
    pub(crate) unsafe fn put(self, value: T) {
        const SIZE: usize = size_of::<u32>();
        let from = (&raw const value).cast::<u8>();
        // SAFETY: the caller upholds the pointer contract; `size` is at least that of the first version, which has the
        // size field.
        unsafe {
            let bytes = self.size.min(size_of::<T>()) - SIZE;
            self.at.cast::<u8>().add(SIZE).copy_from_nonoverlapping(from.add(SIZE), bytes);
        }
    }
}

/// A number or handle that will be written; its memory may be uninitialized.
pub(crate) struct Value<T> {
    at: *mut T,
}

impl<T: Copy> Value<T> {
    /// # Safety
    /// The memory must be valid for writes.
    pub(crate) unsafe fn put(&self, value: T) {
        // SAFETY: the pointer is not null and aligned, checked above; the caller upholds the rest of the pointer
        // contract.
        unsafe { self.at.write(value) }
    }
}

pub(crate) struct Output<'s, T> {
    at: *mut T,
    len: usize,
    scope: &'s Scope,
}

impl<'s, T> Output<'s, T> {
    /// Returns the slice. All other parts must have been entered before.
    ///
    /// # Safety
    /// The memory must be valid for `len` elements, any bits must be a valid element, and no other code may access it
    /// during the call.
    pub(crate) unsafe fn slice(self) -> &'s mut [T] {
        // The slice borrows the scope, which rejects any part that overlaps it.
        let _: &'s Scope = self.scope;
        match self.len {
            0 => &mut [],
            // SAFETY: not null, aligned and of a possible size, checked above; the pointer contract covers the rest.
            len => unsafe { core::slice::from_raw_parts_mut(self.at, len) },
        }
    }
}

/// Creates a handle that is freed by [`free`]. On error, `out` is set to null.
///
/// # Safety
/// The caller must uphold the pointer contract of the crate for `out`.
pub(crate) unsafe fn make<T>(
    scope: &Scope,
    out: *mut *mut T,
    made: impl FnOnce() -> Result<T, Fault>,
) -> Result<(), Fault> {
    // SAFETY: the caller upholds the pointer contract.
    unsafe {
        let out = scope.value(out, "the handle")?;
        out.put(core::ptr::null_mut());
        out.put(boxed(made()?)?);
    }
    Ok(())
}

/// Frees a handle; null is allowed.
///
/// # Safety
/// The handle must come from [`boxed`]. It must be freed only once, and not be used afterwards.
pub(crate) unsafe fn free<T>(handle: *mut T) {
    if !handle.is_null() {
        // SAFETY: the caller guarantees that the handle comes from `boxed` and is freed once. Dropping its value frees
        // memory, ends idle threads or unloads kernels, none of which panics.
        drop(unsafe { Box::from_raw(handle) });
    }
}

/// Allocates a handle, like `Box::new`, but returns an error if memory cannot be allocated.
pub(crate) fn boxed<T>(value: T) -> Result<*mut T, Fault> {
    let layout = std::alloc::Layout::new::<T>();
    assert!(layout.size() > 0);
    // SAFETY: the size is not 0, asserted above.
    let at = unsafe { std::alloc::alloc(layout) }.cast::<T>();
    if at.is_null() {
        return Err(Fault::new(qz1_status::Memory, "not enough memory for the handle"));
    }
    // SAFETY: not null, checked above, and allocated with the layout of `T`.
    unsafe { at.write(value) };
    Ok(at)
}

pub(crate) fn room<T>(len: usize, what: &'static str) -> Result<Vec<T>, Fault> {
    let mut room = Vec::new();
    match room.try_reserve_exact(len) {
        Ok(()) => Ok(room),
        Err(_) => Err(Fault::part(qz1_status::Memory, what, "not enough memory")),
    }
}

#[cfg(test)]
mod tests;
