//! Operating system calls that Rust's standard library does not cover, except signals. `docs/crates.md` lists what
//! other systems would need.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;

use rustix::fs::OFlags;
use rustix::process::{Resource, getrlimit};

/// Returns options with which opening a pipe without a reader is an error instead of a wait.
pub fn open_without_waiting() -> OpenOptions {
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
    let mut options = OpenOptions::new();
    options.custom_flags(flags);
    options
}

/// Returns the limit on the address space of this process in bytes, if there is one.
pub fn address_space_limit() -> Option<u64> {
    getrlimit(Resource::As).current
}

/// Returns the address space of this process in bytes, if the system reports it.
pub fn address_space() -> Option<u64> {
    kibibytes("VmSize:")
}

/// Returns the peak resident memory of this process so far in bytes, if the system reports it.
pub fn peak_memory() -> Option<u64> {
    kibibytes("VmHWM:")
}

/// Returns the mask of the signals that this process ignores; 0 if the system does not report it.
pub fn ignored_signals() -> u64 {
    let digits = status("SigIgn:").unwrap_or_default();
    u64::from_str_radix(&digits, 16).unwrap_or(0)
}

/// Writes to standard error without allocating. Errors are ignored: it may be closed.
pub fn write_to_stderr(bytes: &[u8]) {
    let _ = rustix::io::write(io::stderr().as_fd(), bytes);
}

/// Returns the socket that is this process's standard output.
///
/// # Errors
/// If the system cannot duplicate it.
pub fn standard_output() -> io::Result<UnixStream> {
    io::stdout().as_fd().try_clone_to_owned().map(UnixStream::from)
}

fn kibibytes(field: &str) -> Option<u64> {
    status(field)?.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn status(field: &str) -> Option<String> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    Some(status.lines().find_map(|line| line.strip_prefix(field))?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_reports_this_process() {
        let (space, peak) = (address_space().unwrap(), peak_memory().unwrap());
        assert!(space >= peak && peak > 1 << 20, "{space} and {peak}");
        assert_eq!(status("NoSuchField:"), None);
        // SIGPIPE, 13, is ignored in every Rust program.
        assert_eq!(ignored_signals() >> 12 & 1, 1);
    }
}
