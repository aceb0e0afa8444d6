//! Child processes with limits on memory and time, connected by a socket.

use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, prlimit};

use super::memory::machine_memory;

/// The time that a process may take to end after its socket was closed.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// Reads and writes block for at most the time that was set.
pub(crate) type Socket = UnixStream;

/// A process whose standard output is a socket; dropping this kills it.
#[derive(Debug)]
pub(crate) struct WorkerProcess {
    child: Child,
    socket: Socket,
}

impl WorkerProcess {
    /// `name` is the process's name in lists of processes. Its standard input closes when this process ends. It is in a
    /// process group of its own, so it does not receive signals from the terminal.
    pub(crate) fn start(command: &mut Command, name: Option<&str>, poll: Duration) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_read_timeout(Some(poll))?;
        ours.set_write_timeout(Some(poll))?;
        if let Some(name) = name {
            command.arg0(name);
        }
        command.process_group(0).stdin(Stdio::piped()).stdout(OwnedFd::from(theirs)).stderr(Stdio::null());
        Ok(Self { child: command.spawn()?, socket: ours })
    }

    pub(crate) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Sets limits, in addition to those of this process. If the system refuses one, the process runs without it; its
    /// crashes still do not affect this process.
    pub(crate) fn limit(&self, limits: ProcessLimits) {
        let process = Pid::from_child(&self.child);
        if limits.is_first {
            // The process may write neither core dumps nor other files.
            let none = Rlimit { current: Some(0), maximum: Some(0) };
            lower(process, Resource::Core, none);
            lower(process, Resource::Fsize, none);
        }
        for (resource, max) in [(Resource::As, limits.memory), (Resource::Cpu, limits.seconds)] {
            let Rlimit { current, maximum } = getrlimit(resource);
            let current = [Some(max), current, maximum].into_iter().flatten().min();
            lower(process, resource, Rlimit { current, maximum });
        }
    }

    /// Waits for a process that is about to end, and kills it if it does not.
    pub(crate) fn end(&mut self) -> ExitStatus {
        let started = Instant::now();
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        let mut pause = Duration::from_micros(100);
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return status,
                Ok(None) if started.elapsed() < EXIT_TIMEOUT => std::thread::sleep(pause),
                _ => break,
            }
            pause = (pause * 2).min(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        self.child.wait().unwrap_or_default()
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProcessLimits {
    /// Address space in bytes.
    pub(crate) memory: u64,
    /// Processor time in seconds.
    pub(crate) seconds: u64,
    /// Whether they are the first of this process, which then loses the right to write files.
    pub(crate) is_first: bool,
}

impl ProcessLimits {
    /// The memory of the machine and the lower limit on the memory of this process, in bytes, if there are any.
    pub(crate) fn of_this_process() -> (Option<u64>, Option<u64>) {
        let limits = [Resource::As, Resource::Data].map(|resource| getrlimit(resource).current);
        (machine_memory(), limits.into_iter().flatten().min())
    }
}

fn lower(process: Pid, resource: Resource, limit: Rlimit) {
    if let Err(error) = prlimit(Some(process), resource, limit) {
        tracing::debug!("{resource:?} of the text worker is not limited: {error}");
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// By a signal that is usually sent to all processes of a program to stop it.
    Stopped,
    /// Killed, usually because memory ran out.
    Killed,
    /// By the limit on processor time.
    OutOfTime,
    /// By a fault, such as a stack overflow.
    Crashed,
    /// With an exit code, or by another signal.
    Other,
}

pub(crate) fn ending(status: ExitStatus) -> Ending {
    let is = |signals: &[Signal]| signals.iter().any(|s| status.signal() == Some(s.as_raw()));
    if is(&[Signal::TERM, Signal::INT, Signal::HUP]) {
        Ending::Stopped
    } else if is(&[Signal::KILL]) {
        Ending::Killed
    } else if is(&[Signal::XCPU]) {
        Ending::OutOfTime
    } else if is(&[Signal::ABORT, Signal::SEGV, Signal::BUS, Signal::ILL]) {
        Ending::Crashed
    } else {
        Ending::Other
    }
}

/// Whether the error is a lack of resources, so that a process might start later.
pub(crate) fn is_shortage(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::OutOfMemory)
        || [Errno::NFILE, Errno::MFILE].iter().any(|e| error.raw_os_error() == Some(e.raw_os_error()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endings_of_processes() {
        for (raw, expected) in [
            (0, Ending::Other),
            (5 << 8, Ending::Other),
            (15, Ending::Stopped),
            (9, Ending::Killed),
            (24, Ending::OutOfTime),
            (11, Ending::Crashed),
            (6, Ending::Crashed),
            (10, Ending::Other),
        ] {
            assert_eq!(ending(ExitStatus::from_raw(raw)), expected, "{raw}");
        }
    }

    #[test]
    fn shortages_are_distinguished_from_other_errors() {
        assert!([23, 24, 11, 12].iter().all(|code| is_shortage(&io::Error::from_raw_os_error(*code))));
        assert!([2, 13].iter().all(|code| !is_shortage(&io::Error::from_raw_os_error(*code))));
    }
}
