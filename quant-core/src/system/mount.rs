//! Mounted file systems.

use std::path::Path;

/// Where Linux lists the mount points of this process.
const MOUNTS: &str = "/proc/self/mountinfo";

/// Whether a directory is a mount point, which can be neither renamed nor exchanged. The root directory does not count.
pub(crate) fn is_mount_point(path: &Path) -> bool {
    let Ok(path) = path.canonicalize() else { return false };
    if path.parent().is_none() {
        return false;
    }
    match std::fs::read(MOUNTS) {
        Ok(mounts) => is_listed(&path, &String::from_utf8_lossy(&mounts)),
        Err(_) => is_on_another_device(&path),
    }
}

/// A device is no criterion where there is a list: a part of a file system that is mounted within it has the device of
/// its parent, and a subvolume of Btrfs has another one, but can be renamed.
fn is_listed(path: &Path, mounts: &str) -> bool {
    // Spaces and other separators are escaped in the list.
    let escaped = |c: char| match c {
        ' ' | '\t' | '\n' | '\\' => format!("\\{:03o}", c as u32),
        c => c.to_string(),
    };
    let Some(path) = path.to_str() else { return false };
    let path: String = path.chars().map(escaped).collect();
    mounts.lines().any(|line| line.split(' ').nth(4) == Some(&path))
}

#[cfg(unix)]
fn is_on_another_device(path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let device = |path: &Path| std::fs::metadata(path).ok().map(|found| found.dev());
    path.parent().is_some_and(|parent| path.is_dir() && device(path) != device(parent))
}

#[cfg(not(unix))]
fn is_on_another_device(_: &Path) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_listed() {
        let mounts =
            "36 35 98:0 /a /mnt/a\\040b rw - ext3 /dev/root rw\n37 35 98:0 / /out rw - ext3 /dev/root rw\n";
        for (path, expected) in [("/mnt/a b", true), ("/out", true), ("/out/model", false), ("/mnt/a", false)]
        {
            assert_eq!(is_listed(Path::new(path), mounts), expected, "{path}");
        }
        let folder = tempfile::tempdir().unwrap();
        assert!(!is_mount_point(folder.path()));
        assert!(!is_mount_point(&folder.path().join("none")));
        #[cfg(target_os = "linux")]
        assert!(is_mount_point(Path::new("/proc")) && !is_mount_point(Path::new("/")));
    }
}
