//! Workers that run tokenizers and templates in this process.

#[cfg(any(feature = "tokenizers", feature = "chat-templates"))]
use rayon::prelude::*;

use super::{chat, local_tokenizer};
#[cfg(not(all(feature = "tokenizers", feature = "chat-templates")))]
use crate::Error;
use crate::Result;
use crate::worker::{Content, Loadable, TextWorker, TextWorkers};

/// Runs tokenizers and templates in this process. A panic in one of the libraries becomes an error; a stack overflow or
/// running out of memory ends the process.
#[derive(Debug, Clone, Copy, Default)]
pub struct InProcess;

impl TextWorkers for InProcess {
    fn load(&self, loadable: Loadable) -> Result<Box<dyn TextWorker>> {
        let Loadable { path, content } = loadable;
        match content {
            Content::Tokenizer(json) => local_tokenizer::load(path, &json),
            Content::Template { source, tokens } => chat::load(source, tokens, path),
        }
    }
}

#[cfg(not(all(feature = "tokenizers", feature = "chat-templates")))]
pub(super) fn left_out(what: &str, feature: &str) -> Error {
    Error::Unavailable {
        what: what.into(),
        reason: format!("this program was built without the feature `{feature}` of quant-core"),
        remedy: "build with this feature, or pass your own text workers".into(),
    }
}

/// Collects results in order. If several items fail, returns the first error in order.
#[cfg(any(feature = "tokenizers", feature = "chat-templates"))]
pub(super) fn in_order<T: Sync, R: Send>(
    items: &[T],
    each: impl Fn(&T) -> Result<R> + Send + Sync,
) -> Result<Vec<R>> {
    match items {
        [] | [_] => items.iter().map(each).collect(),
        _ => items.par_iter().map(each).collect::<Vec<_>>().into_iter().collect(),
    }
}
