//! Models and texts that are named, not lying here: `org/name` is fetched from a hub into the
//! ordinary Hugging Face cache, and so are the public text sets.
//!
//! ```text
//! id ─► fetch ─► remote (hf-hub) ─► cache (checks hashes) ─► a directory like any other
//!       sets  ─┘                                         └─► decode ─► documents
//! ```
//!
//! Only with the feature `hub`; a build without it says how to do without. Whatever exists locally
//! is never looked for elsewhere.

mod id;

#[cfg(not(feature = "hub"))]
mod absent;
#[cfg(feature = "hub")]
mod cache;
#[cfg(feature = "hub")]
mod decode;
#[cfg(feature = "hub")]
mod fault;
#[cfg(feature = "hub")]
mod fetch;
#[cfg(feature = "hub")]
mod remote;
#[cfg(feature = "hub")]
mod sets;

use std::borrow::Cow;
use std::path::Path;

use quant_core::Result;

use crate::commands::Session;

#[cfg(not(feature = "hub"))]
pub use absent::documents;
#[cfg(feature = "hub")]
pub use sets::documents;

/// Whether a model argument is no local path but the name of a model on a hub.
pub fn is_named(given: &Path) -> bool {
    id::HubId::of(given).is_some()
}

/// The directory of the model that was asked for: the path itself, or where a model of that name
/// has been fetched to.
pub fn model_directory<'a>(given: &'a Path, session: &Session) -> Result<Cow<'a, Path>> {
    let Some(id) = id::HubId::of(given) else { return Ok(Cow::Borrowed(given)) };
    #[cfg(feature = "hub")]
    return fetch::model(&id, session).map(Cow::Owned);
    #[cfg(not(feature = "hub"))]
    return absent::model(&id, session);
}
