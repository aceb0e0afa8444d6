//! Explains a hub's refusals and network failures to the user.

use std::path::Path;

use hf_hub::HFError;
use quant_core::Error;
use quant_core::wording::Remedy;

#[derive(Debug, Clone)]
pub struct Request<'a> {
    /// `model` or `data set`.
    pub kind: &'static str,
    /// `org/name`.
    pub repository: &'a str,
    pub revision: &'a str,
    /// The file, if the request is about one.
    pub file: Option<&'a str>,
    pub endpoint: &'a str,
    /// The cache.
    pub cache: &'a Path,
}

impl Request<'_> {
    pub fn unavailable(&self, reason: impl Into<String>, remedy: impl Into<Remedy>) -> Error {
        let file = self.file.map(|f| format!("the file {} of ", printable(f))).unwrap_or_default();
        let revision = self.revision;
        let what = format!("{file}the {} {} (revision {revision})", self.kind, self.repository);
        Error::Unavailable { what, reason: reason.into(), remedy: remedy.into() }
    }

    pub fn no_such_file(&self) -> Error {
        self.unavailable(
            "the repository does not contain this file at this revision",
            format!("see the list of its files at {}/{}", self.page(), self.repository),
        )
    }

    /// Returns the error for a server that has sent nothing for this many seconds.
    pub fn stalled(&self, seconds: u64) -> Error {
        self.unavailable(
            format!("no data from {} for {seconds} s", self.endpoint),
            "run the same command again (completed files are kept), or set a longer timeout with \
            HF_HUB_DOWNLOAD_TIMEOUT=SECONDS",
        )
    }

    /// Returns the error for content that differs from the hub's announcement.
    pub fn wrong_content(&self, announced: &str, found: &str) -> Error {
        self.unavailable(
            format!("the hub announced {announced}, but the file has {found}; it was removed from the cache"),
            "run the same command again; if the error persists, a proxy, a mirror or a failing disk is \
            altering the file",
        )
    }

    pub fn explain(&self, error: HFError) -> Error {
        let page = format!("{}/{}", self.page(), self.repository);
        match error {
            HFError::AuthRequired { context } | HFError::Forbidden { context } | HFError::Http { context }
                if matches!(context.status.as_u16(), 401 | 403) =>
            {
                self.unavailable(
                    format!(
                        "the server denied access with {}{}",
                        context.status,
                        quoted(context.server_message.as_deref())
                    ),
                    format!(
                        "check the name; if the repository is private or gated, accept its licence on {page} and set \
                         HF_TOKEN to a token of your account"
                    ),
                )
            }
            HFError::RepoNotFound { context, .. }
            | HFError::RevisionNotFound { context, .. }
            | HFError::EntryNotFound { context, .. } => self.not_found(context.and_then(|c| c.error_code)),
            HFError::Http { context } if context.status.as_u16() == 404 => self.not_found(context.error_code),
            HFError::Http { context } | HFError::Conflict { context } | HFError::RateLimited { context, .. } => {
                self.unavailable(
                    format!("the server answered {}{}", context.status, quoted(context.server_message.as_deref())),
                    "run the same command again later; completed files are kept",
                )
            }
            HFError::Request { source, .. } => {
                let action = match source.is_connect() {
                    true => "cannot be reached",
                    false => "did not complete the request",
                };
                let reason = format!("{} {action}: {}", self.endpoint, causes(&source));
                self.unavailable(reason, self.after_network_failure())
            }
            HFError::Xet { source, .. } => {
                let reason = format!("the transfer failed: {}", causes(&*source));
                self.unavailable(reason, self.after_network_failure())
            }
            HFError::Url(e) => self.unavailable(
                format!("the server's address {} is not a URL: {e}", self.endpoint),
                "set HF_ENDPOINT to an address such as https://huggingface.co, or unset it",
            ),
            HFError::Io(e) => Error::io("write", self.cache, e),
            HFError::CacheLockTimeout { path } => Error::Locked { path, holder: "another download".into() },
            other => self.unavailable(
                format!("the server's response cannot be used: {}", printable(&other.to_string())),
                "check HF_ENDPOINT; the server at that address may not be a Hugging Face hub",
            ),
        }
    }

    fn not_found(&self, code: Option<String>) -> Error {
        let page = format!("{}/{}", self.page(), self.repository);
        let (reason, remedy) = match (code.as_deref(), self.file) {
            (Some("RepoNotFound"), _) => (
                "there is no such repository, or it is private".to_owned(),
                "check the name (org/name); if the repository is private, set HF_TOKEN".to_owned(),
            ),
            (Some("RevisionNotFound"), _) => (
                "the repository has no such branch, tag or commit".into(),
                format!("see the list of its branches and tags at {page}"),
            ),
            (_, Some(_)) => return self.no_such_file(),
            (_, None) => (
                "there is no such repository, or it has no such branch, tag or commit".into(),
                format!("check the name and the revision (org/name@revision) at {page}"),
            ),
        };
        self.unavailable(reason, remedy)
    }

    fn after_network_failure(&self) -> &'static str {
        "check the network, the proxy and HF_ENDPOINT, and run the same command again (completed files are \
        kept); or set HF_HUB_OFFLINE=1 to use only files that are already in the cache"
    }

    fn page(&self) -> String {
        match self.kind {
            "model" => self.endpoint.to_owned(),
            _ => format!("{}/datasets", self.endpoint),
        }
    }
}

/// Formats an error with its chain of causes, without repeating a cause that the text already ends with.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    printable(&text)
}

fn quoted(message: Option<&str>) -> String {
    message.filter(|m| !m.is_empty()).map(|m| format!(" ({})", printable(m))).unwrap_or_default()
}

/// Returns a server's message, shortened and without terminal control characters.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(400).collect()
}
