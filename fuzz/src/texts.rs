//! Files as parsers see them: arbitrary bytes, or a valid file with some of its values replaced.

use std::cell::RefCell;
use std::path::Path;

use tempfile::TempDir;

use crate::input::Input;

const PARTS: [&str; 24] = [
    "null",
    "0",
    "1",
    "-1",
    "true",
    "[]",
    "{}",
    "\"\"",
    "1e999",
    "NaN",
    "0.5",
    "18446744073709551615",
    "9007199254740993",
    "1e308",
    "\"../x\"",
    "\"\\u0000\"",
    "\"re:(\"",
    "[[[[[[[[]]]]]]]]",
    "[1,2,3]",
    "[0,0]",
    "{\"a\":{\"b\":[]}}",
    "[1024, 1024, 1024, 1024, 1024, 1024, 1024]",
    "\"w4a16-g128\"",
    "\u{202e}",
];

thread_local! {
    static DIRECTORY: RefCell<Option<TempDir>> = const { RefCell::new(None) };
}

/// Files stay in the directory of a thread until they are replaced.
pub(crate) fn in_directory<T>(with: impl FnOnce(&Path) -> T) -> T {
    DIRECTORY.with_borrow_mut(|directory| {
        let directory = directory.get_or_insert_with(|| tempfile::tempdir().expect("a temporary directory"));
        with(directory.path())
    })
}

pub(crate) fn in_file<T>(name: &str, bytes: &[u8], with: impl FnOnce(&Path) -> T) -> T {
    in_directory(|directory| {
        let path = directory.join(name);
        std::fs::write(&path, bytes).expect("the temporary directory can be written");
        with(&path)
    })
}

/// The bytes themselves or, if the first is not an ASCII character, one of these texts with a few values or bytes
/// changed. So the corpus may hold complete files, and random bytes reach the depths of a parser.
pub(crate) fn text(data: &[u8], valid: &[&str]) -> Vec<u8> {
    let Some((&first, rest)) = data.split_first().filter(|(first, _)| !first.is_ascii()) else {
        return data.to_vec();
    };
    let mut input = Input::new(rest);
    let mut text = valid[usize::from(first) % valid.len()].as_bytes().to_vec();
    for _ in 0..1 + input.below(4) {
        change(&mut text, &mut input);
    }
    text
}

fn change(text: &mut Vec<u8>, input: &mut Input<'_>) {
    let starts: Vec<usize> =
        (0..text.len()).filter(|&i| matches!(text[i], b':' | b'=' | b',' | b'[')).map(|i| i + 1).collect();
    let at = starts.get(input.below(starts.len())).copied().unwrap_or(0);
    let is_end = |b: &u8| matches!(b, b',' | b'}' | b']' | b'\n');
    let end = at + text[at..].iter().position(is_end).unwrap_or(text.len() - at);
    match input.below(8) {
        0..=3 => drop(text.splice(at..end, PARTS[input.below(PARTS.len())].bytes())),
        4 => drop(text.drain(at..end)),
        5 => drop(text.splice(end..end, text[at.saturating_sub(1)..end].to_vec())),
        6 if !text.is_empty() => {
            let at = input.below(text.len());
            text[at] = input.byte();
        }
        _ => text.truncate(input.below(text.len() + 1)),
    }
}
