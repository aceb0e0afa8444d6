//! System calls on files that Rust's standard library does not cover. `docs/crates.md` lists what systems other than
//! Unix would need.

#[cfg(not(unix))]
compile_error!("quant-formats supports only Unix systems; docs/crates.md lists what others would need");

use std::ffi::OsStr;
use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, OFlags, RenameFlags};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// Reads bytes at an offset, without using the file's cursor. May read fewer bytes than the buffer holds.
///
/// # Errors
/// If the system cannot read.
pub fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    file.read_at(buffer, offset)
}

/// Fills a buffer with the bytes at an offset.
///
/// # Errors
/// If the system cannot read, or with `UnexpectedEof` if the file ends too early.
pub fn read_exact_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    file.read_exact_at(buffer, offset)
}

/// Writes all bytes at an offset.
///
/// # Errors
/// If the system cannot write.
pub fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    file.write_all_at(bytes, offset)
}

/// Returns two numbers that identify an existing file on this machine: its device and its inode.
pub fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// Returns the disk space of a file in bytes, which is less than its length if it is sparse.
pub fn bytes_on_disk(metadata: &Metadata) -> u64 {
    metadata.blocks().saturating_mul(512)
}

/// Returns whether the file is a named pipe, which blocks when opened until another program opens its other end.
pub fn is_named_pipe(metadata: &Metadata) -> bool {
    metadata.file_type().is_fifo()
}

/// Returns permissions for the owner to write and for all users to read.
pub fn readable_by_all() -> Permissions {
    Permissions::from_mode(0o644)
}

/// Returns options that do not follow a symbolic link in the last path component and do not block on pipes.
pub fn open_options() -> OpenOptions {
    let flags = i32::try_from((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits()).unwrap_or_default();
    let mut options = OpenOptions::new();
    options.custom_flags(flags);
    options
}

/// Returns the bytes of a path, which need not be UTF-8.
pub fn path_bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_bytes()
}

/// Returns the path with these bytes; the inverse of [`path_bytes`].
pub fn path_of_bytes(bytes: &[u8]) -> PathBuf {
    PathBuf::from(OsStr::from_bytes(bytes))
}

/// Returns a path to the executable of this process. On Linux, it remains valid if an upgrade replaces the file.
///
/// # Errors
/// If the system cannot determine the path.
pub fn running_program() -> io::Result<PathBuf> {
    let link = PathBuf::from("/proc/self/exe");
    if link.exists() {
        return Ok(link);
    }
    std::env::current_exe().or_else(|error| {
        // Without /proc, only the name with which the program was started is known.
        let started = std::env::args_os().next().map(PathBuf::from);
        let started = started.filter(|path| path.components().count() > 1);
        started.and_then(|path| path.canonicalize().ok()).ok_or(error)
    })
}

/// Returns the name of this machine, with only letters, digits and hyphens; `unknown` if the system does not report it.
pub fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let name: String = name.trim().chars().take(64).map(plain).collect();
    if name.is_empty() { "unknown".into() } else { name }
}

/// Returns an identifier that changes when the machine starts; `None` if the system does not report one.
pub fn boot_id() -> Option<String> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let id: String = id.chars().filter(char::is_ascii_alphanumeric).take(32).collect();
    Some(id).filter(|id| !id.is_empty())
}

/// Renames a file or directory atomically, without replacing anything.
///
/// # Errors
/// With `AlreadyExists` if `to` exists, and with the system's error otherwise; see [`is_unsupported`].
pub fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    rename_with(from, to, RenameFlags::NOREPLACE)
}

/// Exchanges two names atomically.
///
/// # Errors
/// With the system's error; see [`is_unsupported`].
pub fn exchange(one: &Path, other: &Path) -> io::Result<()> {
    rename_with(one, other, RenameFlags::EXCHANGE)
}

fn rename_with(from: &Path, to: &Path, flags: RenameFlags) -> io::Result<()> {
    Ok(rustix::fs::renameat_with(rustix::fs::CWD, from, rustix::fs::CWD, to, flags)?)
}

/// Sets the length of a file and reserves disk space for it, if the file system supports that.
///
/// # Errors
/// If the disk is full or the system cannot set the length.
pub fn allocate(file: &File, len: u64) -> io::Result<()> {
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, len) {
        Ok(()) => Ok(()),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => file.set_len(len),
        Err(e) => Err(e.into()),
    }
}

/// Flushes the entries of a directory to disk, so that they survive a crash, if the file system supports that.
///
/// # Errors
/// If the directory cannot be opened, or the flush fails.
pub fn sync_directory(path: &Path) -> io::Result<()> {
    match File::open(path)?.sync_all() {
        // Some network file systems do not support this on directories.
        Err(e) if is_errno(&e, &[Errno::INVAL, Errno::NOTSUP]) => Ok(()),
        other => other,
    }
}

/// Returns the free bytes of the file system at a path, if it reports them.
///
/// # Errors
/// If the system cannot query the file system.
pub fn free_bytes(path: &Path) -> io::Result<Option<u64>> {
    let stat = rustix::fs::statvfs(path)?;
    // Some network file systems report nothing.
    Ok((stat.f_blocks > 0).then(|| stat.f_bavail.saturating_mul(stat.f_frsize)))
}

/// Returns the size in bytes to which this process may extend files; `None` if there is no limit.
pub fn file_size_limit() -> Option<u64> {
    getrlimit(Resource::Fsize).current
}

/// Hints to the system to drop cached pages of a file, so that the next read comes from the disk.
pub fn forget_cached(file: &File) {
    #[cfg(target_os = "linux")]
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
    #[cfg(not(target_os = "linux"))]
    let _ = file;
}

/// Returns whether the file system does not support the operation.
pub fn is_unsupported(error: &io::Error) -> bool {
    is_errno(error, &[Errno::INVAL, Errno::NOSYS, Errno::NOTSUP, Errno::OPNOTSUPP])
}

/// Returns whether a disk quota is exceeded.
pub fn is_over_quota(error: &io::Error) -> bool {
    is_errno(error, &[Errno::DQUOT])
}

/// Returns whether the disk is full.
pub fn is_disk_full(error: &io::Error) -> bool {
    is_errno(error, &[Errno::NOSPC])
}

/// Returns whether following symbolic links ended in a loop.
pub fn is_link_loop(error: &io::Error) -> bool {
    is_errno(error, &[Errno::LOOP])
}

fn is_errno(error: &io::Error, any_of: &[Errno]) -> bool {
    any_of.iter().any(|e| error.raw_os_error() == Some(e.raw_os_error()))
}
