//! Names of models on a hub: `org/name`, or `org/name@revision`.

use std::fmt;
use std::path::Path;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubId {
    pub owner: String,
    pub name: String,
    /// A branch, tag or commit, if one was given.
    pub revision: Option<String>,
}

impl HubId {
    /// Returns the hub model that an argument names; `None` if a local file of that name exists, even a broken link, or
    /// if the argument cannot be the name of a model.
    pub fn of(argument: &Path) -> Option<Self> {
        if argument.symlink_metadata().is_ok() {
            return None;
        }
        Self::parse(argument.to_str()?)
    }

    fn parse(text: &str) -> Option<Self> {
        let (repository, revision) = match text.split_once('@') {
            Some((repository, revision)) => (repository, Some(revision)),
            None => (text, None),
        };
        let (owner, name) = repository.split_once('/')?;
        let is_valid = is_part(owner) && is_part(name) && revision.is_none_or(is_revision);
        is_valid.then(|| Self {
            owner: owner.to_owned(),
            name: name.to_owned(),
            revision: revision.map(str::to_owned),
        })
    }

    pub fn repository(&self) -> String {
        format!("{}/{}", self.owner, self.name)
    }
}

impl fmt::Display for HubId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.name)?;
        self.revision.iter().try_for_each(|r| write!(f, "@{r}"))
    }
}

/// Returns whether an owner or a name satisfies the hub's rules. If so, it is also safe as part of a path.
fn is_part(text: &str) -> bool {
    let known = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    let at_edge = |c: char| matches!(c, '-' | '.');
    (1..=96).contains(&text.len())
        && text.bytes().all(known)
        && !text.starts_with(at_edge)
        && !text.ends_with(at_edge)
        && !text.contains("--")
        && !text.contains("..")
}

/// Returns whether a revision is a plain relative path, because the cache stores a file under it.
fn is_revision(text: &str) -> bool {
    let known = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'+');
    let is_part = |p: &str| !p.is_empty() && !p.starts_with('.') && !p.contains("..") && p.bytes().all(known);
    text.len() <= 200 && text.split('/').all(is_part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_models_are_recognized() {
        for text in ["a/b", "org/Llama-3.2_1B", "o/n@main", "o/n@v1.0", "o/n@refs/pr/12"] {
            assert_eq!(HubId::parse(text).map(|id| id.to_string()).as_deref(), Some(text));
        }
        let id = HubId::parse("org/name@refs/pr/1").unwrap();
        assert_eq!((id.repository().as_str(), id.revision.as_deref()), ("org/name", Some("refs/pr/1")));
    }

    #[test]
    fn paths_are_not() {
        for text in [
            "",
            "model",
            "/",
            "/a",
            "a/",
            "a/b/c",
            "./a",
            "../a",
            "a/..",
            "~/a",
            "a/b c",
            ".a/b",
            "a--b/c",
            "a/b.",
            "a/b@",
            "a/b@/x",
            "a/b@x/",
            "a/b@../../x",
            "a/b@x//y",
            "a/b@.x",
            "a\\b/c",
            "ä/b",
        ] {
            assert_eq!(HubId::parse(text), None, "{text}");
        }
        assert_eq!(HubId::parse(&format!("a/{}", "b".repeat(97))), None);
    }

    #[test]
    fn existing_paths_are_not_repositories() {
        // Tests run in the package's directory, which contains a file of this name.
        assert!(HubId::parse("src/main.rs").is_some());
        assert_eq!(HubId::of(Path::new("src/main.rs")), None);
        assert!(HubId::of(Path::new("src/main.rs@1")).is_some());
    }
}
