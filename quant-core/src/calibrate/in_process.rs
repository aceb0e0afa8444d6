//! The workers that run tokenizers and templates in this process: the default, and what the process of
//! [`ProcessWorkers`](crate::worker::ProcessWorkers) has.

#[cfg(any(feature = "tokenizers", feature = "chat-templates"))]
use rayon::prelude::*;

use super::{chat, local_tokenizer};
#[cfg(not(all(feature = "tokenizers", feature = "chat-templates")))]
use crate::Error;
use crate::Result;
use crate::worker::{Content, Loadable, TextWorker, TextWorkers};

/// Runs tokenizers and templates where it is asked to. Panics of the libraries are errors; a stack that overflows, or
/// memory that runs out, ends the process. Without the features `tokenizers` and `chat-templates` it has neither, and says
/// so.
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

/// What a build without a feature answers.
#[cfg(not(all(feature = "tokenizers", feature = "chat-templates")))]
pub(super) fn left_out(what: &str, feature: &str) -> Error {
    Error::Unavailable {
        what: what.into(),
        reason: format!("this program was built without the feature `{feature}` of quant-core"),
        remedy: "build with it, or give workers of your own".into(),
    }
}

/// The results of items that do not depend on each other; of several errors the first, whichever was found first.
#[cfg(any(feature = "tokenizers", feature = "chat-templates"))]
pub(super) fn in_order<T: Sync, R: Send>(
    items: &[T],
    each: impl Fn(&T) -> Result<R> + Send + Sync,
) -> Result<Vec<R>> {
    match items {
        // No pool is needed for one.
        [] | [_] => items.iter().map(each).collect(),
        _ => items.par_iter().map(each).collect::<Vec<_>>().into_iter().collect(),
    }
}
