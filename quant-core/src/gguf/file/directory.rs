//! The model in a directory of GGUF files.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::open::GgufFile;
use super::parts::{self, Part};
use super::value::Value;
use crate::checkpoint::printable;
use crate::{Error, Result};

/// The maximum number of names in a message.
const MAX_LISTED: usize = 8;

/// The files of a directory that belong together by their names.
struct Candidate {
    /// The name of the first file, which may be missing.
    first: OsString,
    /// The beginning of the names, the number of files, and the numbers of those that exist, if the names state them.
    parts: Option<(String, usize, Vec<usize>)>,
}

/// Returns the GGUF file with the model in a directory: the only one, or the first of a model in several files. `None` if
/// the path is not a directory, the directory has `config.json` or safetensors files, or it has no GGUF files.
///
/// # Errors
/// [`Error::Usage`] if there are several models; [`Error::NoCheckpoint`] if none of several files is a model;
/// [`Error::InputFile`] if the first file of the only model is missing; [`Error::Io`].
pub fn model_in(directory: &Path) -> Result<Option<PathBuf>> {
    if !directory.is_dir() {
        return Ok(None);
    }
    let fail = |e| Error::io("list", directory, e);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(fail)? {
        let name = entry.map_err(fail)?.file_name();
        let extension = Path::new(&name).extension().unwrap_or_default();
        if name == "config.json" || extension == "safetensors" {
            return Ok(None);
        }
        if extension.eq_ignore_ascii_case("gguf") && directory.join(&name).is_file() {
            names.push(name);
        }
    }
    names.sort_unstable();
    let mut found = candidates(names);
    if found.len() > 1 {
        let all = listed(&found);
        found = models(directory, found);
        if found.is_empty() {
            let reason = format!("none of its GGUF files is a model: {all}");
            return Err(Error::NoCheckpoint { path: directory.to_owned(), reason, remedy: None });
        }
    }
    match found.as_slice() {
        [] => Ok(None),
        [only] => {
            only.check_first(directory)?;
            Ok(Some(directory.join(&only.first)))
        }
        several => Err(Error::usage(
            format!("{} contains several GGUF models: {}", directory.display(), listed(several)),
            "give the path of one of these files",
        )),
    }
}

fn candidates(names: Vec<OsString>) -> Vec<Candidate> {
    let mut found: Vec<Candidate> = Vec::new();
    for name in names {
        let Some((stem, number, count)) = name.to_str().and_then(parts::split_name) else {
            found.push(Candidate { first: name, parts: None });
            continue;
        };
        let same = |known: &&mut Candidate| {
            known.parts.as_ref().is_some_and(|(other, total, _)| other == stem && *total == count)
        };
        match found.iter_mut().find(same).and_then(|known| known.parts.as_mut()) {
            Some((_, _, numbers)) => numbers.push(number),
            None => found.push(Candidate {
                first: parts::file_name(stem, 0, count).into(),
                parts: Some((stem.to_owned(), count, vec![number])),
            }),
        }
    }
    found
}

/// The candidates that are models, judged by the headers of their first files. A file that cannot be read counts as one,
/// because opening it explains why.
fn models(directory: &Path, candidates: Vec<Candidate>) -> Vec<Candidate> {
    let mut found = Vec::new();
    let mut renamed = Vec::new();
    for candidate in candidates {
        let header = GgufFile::open(&directory.join(&candidate.first)).ok();
        let header = header.as_ref().map(GgufFile::header);
        let kind = header.and_then(|header| header.get("general.type")).and_then(Value::as_str);
        let part = header.and_then(|header| Part::of(header).ok().flatten());
        if let (Some(Part { number: 0, count, .. }), None) = (part, &candidate.parts) {
            renamed.push(count);
        }
        if kind.is_none_or(|kind| kind == "model") && part.is_none_or(|part| part.number == 0) {
            found.push(candidate);
        }
    }
    // A first file under another name belongs to the other files of its model.
    found.retain(|candidate| match &candidate.parts {
        Some((_, count, numbers)) => numbers.contains(&0) || !renamed.contains(count),
        None => true,
    });
    found
}

fn listed(candidates: &[Candidate]) -> String {
    names(candidates.iter().map(|candidate| candidate.first.to_string_lossy().into_owned()))
}

/// A few names for a message, and the number of the others.
pub(super) fn names(all: impl Iterator<Item = String>) -> String {
    let mut all = all.map(|name| printable(&name));
    let shown: Vec<String> = all.by_ref().take(MAX_LISTED).collect();
    match all.count() {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

impl Candidate {
    /// Fails if the first of several files is missing.
    fn check_first(&self, directory: &Path) -> Result<()> {
        let Some((stem, count, numbers)) = &self.parts else { return Ok(()) };
        if numbers.contains(&0) {
            return Ok(());
        }
        let missing = (0..*count).filter(|number| !numbers.contains(number));
        let missing = names(missing.map(|number| parts::file_name(stem, number, *count)));
        let reason = format!("contains only some of the {count} files of a model; missing: {missing}");
        Err(GgufFile::refused(directory, reason, MISSING))
    }
}

/// The remedy for missing files of a model.
pub(super) const MISSING: &str = "download the missing files into the same directory";

/// Returns the remedy for a first file of `count` whose name does not say so: its name as the other files next to it imply
/// it.
pub(super) fn renaming(path: &Path, count: usize) -> String {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let stem = |name: &str| {
        let (stem, number, total) = parts::split_name(name)?;
        (number > 0 && total == count).then(|| stem.to_owned())
    };
    let mut stems: Vec<String> = entries.filter_map(|entry| stem(entry.file_name().to_str()?)).collect();
    stems.sort_unstable();
    stems.dedup();
    match stems.as_slice() {
        [only] => {
            format!("rename it to {}, as the other files", printable(&parts::file_name(only, 0, count)))
        }
        _ => format!(
            "give it the same name as the other files, except for the ending {}, and keep all of them in one \
             directory",
            parts::file_name("", 0, count)
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::file::write_file;

    fn header(entries: &[(&str, Value)]) -> Vec<u8> {
        let entries: Vec<(String, Value)> =
            entries.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
        write_file(&entries, &[]).unwrap()
    }

    fn part(number: u16, count: u16) -> Vec<u8> {
        header(&[
            ("split.no", Value::U16(number)),
            ("split.count", Value::U16(count)),
            ("split.tensors.count", Value::I32(1)),
        ])
    }

    /// The name of the file that is found among these, or the message and the remedy.
    fn found(files: &[(&str, Vec<u8>)]) -> std::result::Result<Option<String>, String> {
        let directory = tempfile::tempdir().unwrap();
        for (name, bytes) in files {
            std::fs::write(directory.path().join(name), bytes).unwrap();
        }
        match model_in(directory.path()) {
            Ok(path) => Ok(path.map(|path| path.file_name().unwrap().to_string_lossy().into_owned())),
            Err(error) => Err(format!("{:?}: {error}; {}", error.category(), error.remedy().marked())),
        }
    }

    #[test]
    fn a_directory_with_one_model_stands_for_it() {
        let [model, imatrix, vision] =
            ["model", "imatrix", "mmproj"].map(|kind| header(&[("general.type", Value::string(kind))]));
        let text = || b"text".to_vec();
        let name = |name: &str| Ok(Some(name.to_owned()));
        assert_eq!(found(&[("a.gguf", model.clone()), ("README.md", text())]), name("a.gguf"));
        assert_eq!(found(&[("a.GGUF", header(&[]))]), name("a.GGUF"));
        let beside = [("a.gguf", model.clone()), ("b.gguf", imatrix.clone()), ("mmproj.gguf", vision)];
        assert_eq!(found(&beside), name("a.gguf"));
        assert_eq!(found(&[("a-00002-of-00002.gguf", part(1, 2)), ("a-00001-of-00002.gguf", part(0, 2))]), {
            name("a-00001-of-00002.gguf")
        });
        // Opening the file says what is wrong with it.
        assert_eq!(found(&[("a.gguf", text())]), name("a.gguf"));
        assert_eq!(found(&[("b.gguf", imatrix.clone())]), name("b.gguf"));
        let renamed = [("a.gguf", part(0, 2)), ("b-00002-of-00002.gguf", part(1, 2))];
        assert_eq!(found(&renamed), name("a.gguf"));
        let other = [("b-00001-of-00002.gguf", part(0, 2)), ("other.gguf", part(1, 2))];
        assert_eq!(found(&other), name("b-00001-of-00002.gguf"));
        for none in [&[][..], &[("a.txt", text())], &[("a.gguf", model.clone()), ("config.json", text())]] {
            assert_eq!(found(none), Ok(None));
        }
        assert_eq!(found(&[("a.gguf", model), ("x.safetensors", text())]), Ok(None));
        assert_eq!(model_in(Path::new("/does/not/exist")).unwrap(), None);
        let none = found(&[("b.gguf", imatrix.clone()), ("c.gguf", imatrix)]).unwrap_err();
        assert!(
            none.starts_with("Input: ") && none.contains("none of its GGUF files is a model: b.gguf, c.gguf")
        );
    }

    #[test]
    fn several_models_and_missing_files_are_named() {
        let model = || header(&[("general.type", Value::string("model"))]);
        let several = found(&[
            ("a.gguf", model()),
            ("b.gguf", model()),
            ("c-00001-of-00002.gguf", part(0, 2)),
            ("c-00002-of-00002.gguf", part(1, 2)),
            ("d.gguf", b"damaged".to_vec()),
        ]);
        let several = several.unwrap_err();
        let listed =
            "contains several GGUF models: a.gguf, b.gguf, c-00001-of-00002.gguf, d.gguf; give the path";
        assert!(several.starts_with("Usage: ") && several.contains(listed), "{several}");
        let many: Vec<String> = (0..20).map(|i| format!("{i:02}.gguf")).collect();
        let many: Vec<(&str, Vec<u8>)> = many.iter().map(|name| (name.as_str(), model())).collect();
        let many = found(&many).unwrap_err();
        assert!(many.contains("06.gguf, 07.gguf and 12 more; "), "{many}");
        let missing = found(&[("c-00002-of-00004.gguf", part(1, 4)), ("c-00004-of-00004.gguf", part(3, 4))]);
        let missing = missing.unwrap_err();
        let lacks = "contains only some of the 4 files of a model; missing: c-00001-of-00004.gguf, c-00003-of-00004.gguf; download";
        assert!(missing.starts_with("Input: ") && missing.contains(lacks), "{missing}");
    }
}
