//! What a loss of power may take from the disk: a log of the operations that were not synced.
//!
//! Written ranges turn to zeros until their file is synced. Names that were created, replaced or removed become as
//! they were before, until their directory is synced, or stay as they are: file systems may do either.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::{CWD, RenameFlags, renameat_with};

/// A file or directory, whatever its names.
pub(super) type Inode = (u64, u64);

pub(super) fn inode(path: &Path) -> Option<Inode> {
    let metadata = fs::metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

/// A change of names.
#[derive(Debug, Clone)]
pub(super) enum Names {
    /// A file, link or directory is created.
    Create(PathBuf),
    Rename(PathBuf, PathBuf),
    Exchange(PathBuf, PathBuf),
    /// A file is removed.
    Remove(PathBuf),
    RemoveDirectory(PathBuf),
}

impl Names {
    /// The directory that has to be synced.
    fn directory(&self) -> Option<Inode> {
        let (Self::Create(path)
        | Self::Rename(_, path)
        | Self::Exchange(_, path)
        | Self::Remove(path)
        | Self::RemoveDirectory(path)) = self;
        inode(path.parent()?)
    }

    /// The file that loses its name.
    fn lost(&self) -> Option<&Path> {
        let (Self::Rename(_, path) | Self::Remove(path)) = self else { return None };
        fs::symlink_metadata(path).is_ok_and(|m| m.is_file()).then_some(path)
    }
}

enum Change {
    Names { names: Names, directory: Option<Inode>, kept: Option<PathBuf> },
    Data { file: Inode, offset: u64, len: u64 },
}

/// The operations that were not synced.
pub(super) struct Disk {
    changes: Vec<(u64, Change)>,
    files: HashMap<Inode, File>,
    next: u64,
    /// A directory of the same file system for files whose names are removed.
    kept: PathBuf,
}

impl Disk {
    pub(super) fn new(kept: PathBuf) -> Self {
        Self { changes: Vec::new(), files: HashMap::new(), next: 0, kept }
    }

    fn add(&mut self, change: Change) -> u64 {
        self.next += 1;
        self.changes.push((self.next, change));
        self.next
    }

    /// Call this before names change.
    pub(super) fn names(&mut self, names: Names) -> Result<u64> {
        let kept = match names.lost() {
            Some(path) => {
                let kept = self.kept.join(self.next.to_string());
                fs::hard_link(path, &kept).with_context(|| format!("cannot keep {}", path.display()))?;
                Some(kept)
            }
            None => None,
        };
        Ok(self.add(Change::Names { directory: names.directory(), names, kept }))
    }

    /// Call this before bytes are written. `path` opens the file.
    pub(super) fn data(&mut self, path: &Path, offset: u64, len: u64) -> Result<u64> {
        let file = inode(path).with_context(|| format!("cannot find {}", path.display()))?;
        if let std::collections::hash_map::Entry::Vacant(place) = self.files.entry(file) {
            place.insert(
                File::options()
                    .write(true)
                    .open(path)
                    .with_context(|| format!("cannot open {}", path.display()))?,
            );
        }
        Ok(self.add(Change::Data { file, offset, len }))
    }

    /// The number of a sync that begins: it covers what was done before.
    pub(super) fn sync(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// A file or directory was synced.
    pub(super) fn synced(&mut self, of: Inode, begun: u64) {
        let is_durable = |number: u64, change: &Change| {
            number < begun
                && match change {
                    Change::Names { directory, .. } => *directory == Some(of),
                    Change::Data { file, .. } => *file == of,
                }
        };
        let moved: Vec<(u64, PathBuf, PathBuf)> = (self.changes.iter())
            .filter(|(number, change)| is_durable(*number, change))
            .filter_map(|(number, change)| match change {
                Change::Names { names: Names::Rename(from, to), .. } => {
                    Some((*number, from.clone(), to.clone()))
                }
                _ => None,
            })
            .collect();
        self.changes.retain(|(number, change)| !is_durable(*number, change));
        // What is below a directory whose new name is durable can only be lost there.
        for (number, from, to) in moved {
            for (_, change) in self.changes.iter_mut().filter(|(earlier, _)| *earlier < number) {
                if let Change::Names { names, .. } = change {
                    names.move_below(&from, &to);
                }
            }
        }
    }

    /// An operation failed, so nothing has changed.
    pub(super) fn undone(&mut self, number: u64) {
        self.changes.retain(|(other, _)| *other != number);
    }

    /// Fewer bytes were written than requested.
    pub(super) fn wrote(&mut self, number: u64, written: u64) {
        for (other, change) in &mut self.changes {
            if let (true, Change::Data { len, .. }) = (*other == number, change) {
                *len = written;
            }
        }
    }

    /// Loses all data that were not synced and, if `names`, all changes of names.
    pub(super) fn lose(self, names: bool) -> Result<()> {
        for (_, change) in self.changes.iter().rev() {
            match change {
                Change::Data { file, offset, len } => {
                    let file = &self.files[file];
                    let end = file.metadata()?.len().min(offset.saturating_add(*len));
                    let lost = usize::try_from(end.saturating_sub(*offset))?;
                    file.write_all_at(&vec![0; lost], *offset)?;
                }
                Change::Names { names: change, kept, .. } if names => change.undo(kept.as_deref())?,
                Change::Names { .. } => {}
            }
        }
        Ok(())
    }
}

impl Names {
    fn move_below(&mut self, from: &Path, to: &Path) {
        let paths: Vec<&mut PathBuf> = match self {
            Self::Create(path) | Self::Remove(path) | Self::RemoveDirectory(path) => vec![path],
            Self::Rename(one, other) | Self::Exchange(one, other) => vec![one, other],
        };
        for path in paths {
            if let Ok(below) = path.strip_prefix(from) {
                *path = to.join(below);
            }
        }
    }

    /// Undoes the change. It may not have happened: the process may have been killed just before.
    fn undo(&self, kept: Option<&Path>) -> Result<()> {
        let exists = |path: &Path| fs::symlink_metadata(path).is_ok();
        match self {
            Self::Create(path) if path.is_dir() => fs::remove_dir_all(path)?,
            Self::Create(path) if exists(path) => fs::remove_file(path)?,
            Self::Rename(from, to) if !exists(from) && exists(to) => fs::rename(to, from)?,
            Self::Exchange(one, other) if exists(one) && exists(other) => {
                renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE)?;
            }
            Self::RemoveDirectory(path) if !exists(path) => fs::create_dir_all(path)?,
            _ => {}
        }
        if let (Self::Rename(_, path) | Self::Remove(path), Some(kept)) = (self, kept)
            && !exists(path)
        {
            fs::rename(kept, path)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Bench {
        directory: tempfile::TempDir,
        disk: Disk,
    }

    impl Bench {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let kept = directory.path().join("kept");
            fs::create_dir(&kept).unwrap();
            fs::write(directory.path().join("old"), "old").unwrap();
            Self { directory, disk: Disk::new(kept) }
        }

        fn at(&self, name: &str) -> PathBuf {
            self.directory.path().join(name)
        }

        fn create(&mut self, name: &str) {
            let path = self.at(name);
            self.disk.names(Names::Create(path.clone())).unwrap();
            fs::write(&path, "new").unwrap();
            self.disk.data(&path, 0, 3).unwrap();
        }

        fn sync(&mut self, name: &str) {
            let (begun, of) = (self.disk.sync(), inode(&self.at(name)).unwrap());
            self.disk.synced(of, begun);
        }

        fn replace(&mut self) {
            let (new, old) = (self.at("new"), self.at("old"));
            self.disk.names(Names::Rename(new.clone(), old.clone())).unwrap();
            fs::rename(new, old).unwrap();
        }

        fn lose(self, names: bool) -> [Option<String>; 2] {
            let Self { directory, disk } = self;
            disk.lose(names).unwrap();
            ["new", "old"].map(|name| {
                let bytes = fs::read(directory.path().join(name)).ok()?;
                Some(String::from_utf8_lossy(&bytes).into_owned())
            })
        }
    }

    const LOST: &str = "\0\0\0";

    #[test]
    fn unsynced_data_turn_to_zeros() {
        let mut bench = Bench::new();
        bench.create("new");
        assert_eq!(bench.lose(false), [Some(LOST.into()), Some("old".into())]);
        let mut bench = Bench::new();
        bench.create("new");
        bench.sync("new");
        assert_eq!(bench.lose(false), [Some("new".into()), Some("old".into())]);
    }

    #[test]
    fn unsynced_names_become_as_they_were() {
        for is_synced in [false, true] {
            let mut bench = Bench::new();
            bench.create("new");
            bench.sync("new");
            bench.replace();
            if is_synced {
                bench.sync("");
            }
            let expected = if is_synced { "new" } else { "old" };
            assert_eq!(bench.lose(true), [None, Some(expected.into())]);
        }
    }

    #[test]
    fn a_sync_covers_only_what_was_done_before_it() {
        let mut bench = Bench::new();
        let begun = bench.disk.sync();
        bench.create("new");
        let of = inode(&bench.at("new")).unwrap();
        bench.disk.synced(of, begun);
        assert_eq!(bench.lose(false), [Some(LOST.into()), Some("old".into())]);
    }

    #[test]
    fn operations_that_fail_lose_nothing() {
        let mut bench = Bench::new();
        let old = bench.at("old");
        let number = bench.disk.data(&old, 0, 3).unwrap();
        bench.disk.undone(number);
        let number = bench.disk.data(&old, 0, 3).unwrap();
        bench.disk.wrote(number, 1);
        assert_eq!(bench.lose(true), [None, Some("\0ld".into())]);
    }

    #[test]
    fn names_below_a_moved_directory() {
        let mut bench = Bench::new();
        fs::create_dir(bench.at("one")).unwrap();
        bench.create("one/file");
        let (from, to) = (bench.at("one"), bench.at("two"));
        bench.disk.names(Names::Rename(from.clone(), to.clone())).unwrap();
        fs::rename(&from, &to).unwrap();
        bench.sync("");
        bench.disk.lose(true).unwrap();
        let names: Vec<_> = fs::read_dir(bench.directory.path().join("two")).unwrap().collect();
        assert!(names.is_empty(), "{names:?}");
    }
}
