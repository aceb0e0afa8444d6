//! Layouts of packed data as structures of C. Programs may store their fields and pass them back, so every field is
//! checked on every use.

use crate::memory::{Fields, Scope};
use crate::status::{Fault, qz1_status};

/// A structure whose fields describe a layout.
pub(crate) trait Described: Fields {
    /// The layout.
    type Layout;
    /// The fields that callers pass back.
    type Numbers: PartialEq;

    /// Returns the structure for a layout.
    fn of(layout: &Self::Layout) -> Self;

    /// Returns the layout for these fields. It need not check fields that follow from others.
    ///
    /// # Errors
    /// When there is no such layout.
    fn layout(&self) -> Result<Self::Layout, Fault>;

    fn numbers(&self) -> Self::Numbers;
}

pub(crate) fn checked<D: Described>(given: &D) -> Result<D::Layout, Fault> {
    let layout = given.layout().ok().filter(|layout| D::of(layout).numbers() == given.numbers());
    layout.ok_or_else(|| Fault::new(qz1_status::LayoutId, "the fields of the layout do not match its id"))
}

/// Returns the layout that the caller's fields describe; every field is checked.
///
/// # Safety
/// Same as for [`Scope::read`].
pub(crate) unsafe fn layout<D: Described>(scope: &Scope, at: *const D) -> Result<D::Layout, Fault> {
    // SAFETY: this function has the safety contract of `read`.
    checked(&unsafe { scope.read(at, "the layout") }?)
}
