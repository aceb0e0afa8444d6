//! What is asked of the operating system beyond Rust's standard library, in one place: all of it Unix's, some of it Linux's.
//! `docs/crates.md` lists what other systems would need.

use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, OFlags, RenameFlags};
use rustix::io::Errno;

/// Reads at an offset, as many bytes as come at once; the file has no position that others see.
///
/// # Errors
/// Those of the system.
pub fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    file.read_at(buffer, offset)
}

/// Fills a buffer from an offset on.
///
/// # Errors
/// Those of the system, and `UnexpectedEof`.
pub fn read_exact_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    file.read_exact_at(buffer, offset)
}

/// Writes all bytes at an offset.
///
/// # Errors
/// Those of the system.
pub fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    file.write_all_at(bytes, offset)
}

/// Two numbers that no other file of the machine has while this one is there.
pub fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// Bytes that a file takes on the disk, which are fewer than its length where it has holes.
pub fn bytes_on_disk(metadata: &Metadata) -> u64 {
    metadata.blocks().saturating_mul(512)
}

/// Whether opening it would wait for another program.
pub fn is_named_pipe(metadata: &Metadata) -> bool {
    metadata.file_type().is_fifo()
}

/// Written by the owner, read by all.
pub fn readable_by_all() -> Permissions {
    Permissions::from_mode(0o644)
}

/// Options that open no link that someone put in a file's place, and do not wait for the other end of a pipe.
pub fn open_options() -> OpenOptions {
    // The flag bits of every Unix fit the C `int` that `open` takes.
    let flags = i32::try_from((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits()).unwrap_or_default();
    let mut options = OpenOptions::new();
    options.custom_flags(flags);
    options
}

/// The file that runs, also after an upgrade has replaced it under its path.
///
/// # Errors
/// Those of the system.
pub fn running_program() -> io::Result<PathBuf> {
    let link = PathBuf::from("/proc/self/exe");
    if link.exists() { Ok(link) } else { std::env::current_exe() }
}

/// Gives a file or directory a name that nothing has, in one step.
///
/// # Errors
/// `AlreadyExists`, and those of the system: [`is_unsupported`] where the file system cannot.
pub fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    rename_with(from, to, RenameFlags::NOREPLACE)
}

/// Exchanges two names in one step.
///
/// # Errors
/// As [`rename_new`].
pub fn exchange(one: &Path, other: &Path) -> io::Result<()> {
    rename_with(one, other, RenameFlags::EXCHANGE)
}

fn rename_with(from: &Path, to: &Path, flags: RenameFlags) -> io::Result<()> {
    Ok(rustix::fs::renameat_with(rustix::fs::CWD, from, rustix::fs::CWD, to, flags)?)
}

/// Gives a file this length and takes the room for it from the disk.
///
/// # Errors
/// Those of the system.
pub fn allocate(file: &File, len: u64) -> io::Result<()> {
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, len) {
        Ok(()) => Ok(()),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => file.set_len(len),
        Err(e) => Err(e.into()),
    }
}

/// Makes the entries of a directory survive a crash.
///
/// # Errors
/// Those of the system.
pub fn sync_directory(path: &Path) -> io::Result<()> {
    match File::open(path)?.sync_all() {
        // Some network file systems have no such operation on directories.
        Err(e) if is_errno(&e, &[Errno::INVAL, Errno::NOTSUP]) => Ok(()),
        other => other,
    }
}

/// Bytes that may still be written below a path, if the file system can tell.
///
/// # Errors
/// Those of the system.
pub fn free_bytes(path: &Path) -> io::Result<Option<u64>> {
    let stat = rustix::fs::statvfs(path)?;
    // Some network file systems tell nothing at all.
    Ok((stat.f_blocks > 0).then(|| stat.f_bavail.saturating_mul(stat.f_frsize)))
}

/// Asks the system to read the file from the disk next, not from its memory of what was written. Only a hint.
pub fn forget_cached(file: &File) {
    #[cfg(target_os = "linux")]
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
    #[cfg(not(target_os = "linux"))]
    let _ = file;
}

/// Whether the file system lacks the operation, as opposed to refusing it this time.
pub fn is_unsupported(error: &io::Error) -> bool {
    is_errno(error, &[Errno::INVAL, Errno::NOSYS, Errno::NOTSUP, Errno::OPNOTSUPP])
}

/// Whether a quota is used up.
pub fn is_over_quota(error: &io::Error) -> bool {
    is_errno(error, &[Errno::DQUOT])
}

/// Whether a disk is full.
pub fn is_disk_full(error: &io::Error) -> bool {
    is_errno(error, &[Errno::NOSPC])
}

/// Whether a symbolic link leads to itself.
pub fn is_link_loop(error: &io::Error) -> bool {
    is_errno(error, &[Errno::LOOP])
}

fn is_errno(error: &io::Error, any_of: &[Errno]) -> bool {
    any_of.iter().any(|e| error.raw_os_error() == Some(e.raw_os_error()))
}
