//! Models and public text sets that are given by name: they are downloaded from a hub into the standard Hugging Face
//! cache.
//!
//! ```text
//! id ─► fetch ─► remote (hf-hub) ─► cache (checks hashes) ─► a directory like any other
//!       sets  ─┘                                         └─► decode ─► documents
//! ```
//!
//! Downloads need the feature `hub`; a build without it reports errors that say what to do instead. A path that exists
//! locally is never looked up on a hub.

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

/// Returns whether a model argument is the name of a model on a hub instead of a local path.
pub fn is_named(given: &Path) -> bool {
    id::HubId::of(given).is_some()
}

/// Returns the directory of the requested model: the path itself, or the cached download of the model of that name.
pub fn model_directory<'a>(given: &'a Path, session: &Session) -> Result<Cow<'a, Path>> {
    let Some(id) = id::HubId::of(given) else { return Ok(Cow::Borrowed(given)) };
    #[cfg(feature = "hub")]
    return fetch::model(&id, session).map(Cow::Owned);
    #[cfg(not(feature = "hub"))]
    return absent::model(&id, session);
}
