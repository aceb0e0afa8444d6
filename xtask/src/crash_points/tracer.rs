//! Runs a program under `ptrace`, counts its operations on files below a directory, and makes one of them fail or be
//! the last.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use nix::libc;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::disk::{Disk, Inode, Names, inode};

/// What happens at the operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// Nothing; the run is only watched.
    Nothing,
    /// The disk is full from here on; the first write is cut in half.
    DiskFull,
    /// Only this operation fails.
    Fails,
    /// The program is killed, before the operation or after it.
    PowerLoss {
        /// Whether the operation happens.
        after: bool,
    },
}

/// A run that has ended.
pub(super) struct Traced {
    /// `None` if it was killed.
    pub(super) code: Option<i32>,
    /// The number of operations, at most up to the one at which the power was lost.
    pub(super) operations: usize,
    /// The operation with the fault.
    pub(super) hit: Option<String>,
    pub(super) disk: Disk,
    pub(super) stderr: String,
}

/// An operation on the disk.
enum Operation {
    Names(Names),
    /// `opened` is the file as the process has opened it.
    Write {
        path: PathBuf,
        opened: PathBuf,
        offset: u64,
        len: u64,
    },
    Sync {
        path: PathBuf,
        of: Option<Inode>,
    },
    /// Changes the size of a file, which loses nothing that matters here.
    Resize {
        path: PathBuf,
        grows: bool,
    },
}

impl Operation {
    fn describe(&self) -> String {
        match self {
            Self::Names(names) => format!("{names:?}"),
            Self::Write { path, offset, len, .. } => {
                format!("write of {len} bytes at {offset}: {}", path.display())
            }
            Self::Sync { path, .. } => format!("sync: {}", path.display()),
            Self::Resize { path, .. } => format!("resize: {}", path.display()),
        }
    }

    fn needs_space(&self) -> bool {
        match self {
            Self::Sync { .. } => false,
            Self::Resize { grows, .. } => *grows,
            Self::Names(names) => {
                !matches!(names, Names::Remove(_) | Names::RemoveDirectory(_) | Names::Exchange(..))
            }
            Self::Write { .. } => true,
        }
    }
}

/// What is known about a thread between the entry to a system call and its end.
enum Inside {
    Nothing,
    Change(u64, bool),
    Sync(Option<Inode>, u64),
    Failing(i64),
    /// The process is killed at the end.
    Last(Box<Inside>),
}

pub(super) struct Tracer<'a> {
    directory: &'a Path,
    fault: (usize, Fault),
    operations: usize,
    hit: Option<String>,
    disk: Disk,
    /// The threads that are in a system call.
    threads: HashMap<i32, Inside>,
    is_full: bool,
}

/// Runs a program to its end, or to the fault.
pub(super) fn run(
    (program, arguments): (&Path, &[OsString]),
    directory: &Path,
    kept: &Path,
    fault: (usize, Fault),
) -> Result<Traced> {
    let messages = kept.join("stderr");
    let mut command = Command::new("sh");
    // The shell waits until it is traced.
    command.args(["-c", "kill -STOP $$; exec \"$0\" \"$@\""]).arg(program).args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&messages)?);
    let child = command.spawn().context("no shell can be started")?;
    let pid = Pid::from_raw(i32::try_from(child.id())?);
    match waitpid(pid, Some(WaitPidFlag::WUNTRACED))? {
        WaitStatus::Stopped(..) => {}
        other => bail!("the shell did not stop: {other:?}"),
    }
    ptrace::seize(
        pid,
        Options::PTRACE_O_TRACESYSGOOD
            | Options::PTRACE_O_TRACECLONE
            | Options::PTRACE_O_TRACEEXEC
            | Options::PTRACE_O_EXITKILL,
    )
    .context("the program cannot be traced")?;
    kill(pid, Signal::SIGCONT)?;
    let mut tracer = Tracer {
        directory,
        fault,
        operations: 0,
        hit: None,
        disk: Disk::new(kept.to_owned()),
        threads: HashMap::new(),
        is_full: false,
    };
    let code = tracer.follow(pid)?;
    let Tracer { operations, hit, disk, .. } = tracer;
    let stderr = fs::read_to_string(&messages).unwrap_or_default();
    Ok(Traced { code, operations, hit, disk, stderr })
}

impl Tracer<'_> {
    /// Returns the exit code; `None` if the process was killed.
    fn follow(&mut self, main: Pid) -> Result<Option<i32>> {
        loop {
            let status = waitpid(None, Some(WaitPidFlag::__WALL)).context("the program is lost")?;
            let (thread, signal) = match status {
                WaitStatus::Exited(pid, code) if pid == main => return Ok(Some(code)),
                WaitStatus::Signaled(pid, Signal::SIGKILL, _) if pid == main && self.hit.is_some() => {
                    return Ok(None);
                }
                WaitStatus::Signaled(pid, signal, _) if pid == main => bail!("the program ended by {signal}"),
                WaitStatus::Exited(thread, _) | WaitStatus::Signaled(thread, ..) => {
                    self.threads.remove(&thread.as_raw());
                    continue;
                }
                WaitStatus::PtraceSyscall(thread) => {
                    match self.system_call(thread) {
                        // Another thread has ended the process.
                        Err(error) if is_gone(&error) => {}
                        other => {
                            if other.with_context(|| self.where_it_is())? {
                                kill(main, Signal::SIGKILL)?;
                                continue;
                            }
                        }
                    }
                    (thread, None)
                }
                WaitStatus::PtraceEvent(thread, ..) => (thread, None),
                WaitStatus::Stopped(thread, signal) => (thread, Some(signal)),
                _ => continue,
            };
            match ptrace::syscall(thread, signal) {
                Ok(()) | Err(nix::Error::ESRCH) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn where_it_is(&self) -> String {
        format!("operation {} of the program", self.operations)
    }

    /// Returns whether the process has to be killed.
    fn system_call(&mut self, thread: Pid) -> Result<bool> {
        let is_entry = ptrace::syscall_info(thread)?.op == libc::PTRACE_SYSCALL_INFO_ENTRY;
        match self.threads.remove(&thread.as_raw()) {
            Some(inside) if !is_entry => self.end(thread, inside),
            // The call in which tracing began.
            None if !is_entry => Ok(false),
            _ => {
                let (inside, is_last) = self.begin(thread)?;
                self.threads.insert(thread.as_raw(), inside);
                Ok(is_last)
            }
        }
    }

    fn end(&mut self, thread: Pid, inside: Inside) -> Result<bool> {
        let (inside, is_last) = match inside {
            Inside::Last(inside) => (*inside, true),
            other => (other, false),
        };
        if matches!(inside, Inside::Nothing) {
            return Ok(is_last);
        }
        let mut registers = ptrace::getregs(thread)?;
        let result = registers.rax.cast_signed();
        match inside {
            Inside::Failing(errno) => {
                registers.rax = (-errno).cast_unsigned();
                ptrace::setregs(thread, registers)?;
            }
            Inside::Change(number, _) if result < 0 => self.disk.undone(number),
            Inside::Change(number, true) => self.disk.wrote(number, registers.rax),
            Inside::Sync(Some(of), number) if result == 0 => self.disk.synced(of, number),
            _ => {}
        }
        Ok(is_last)
    }

    fn begin(&mut self, thread: Pid) -> Result<(Inside, bool)> {
        let mut registers = ptrace::getregs(thread)?;
        let Some(operation) = self.operation(thread, &registers)? else {
            return Ok((Inside::Nothing, false));
        };
        let number = self.operations;
        self.operations += 1;
        let (at, fault) = self.fault;
        let is_here = number == at;
        if is_here && fault != Fault::Nothing {
            self.hit = Some(operation.describe());
        }
        if let (true, Fault::PowerLoss { after: false }) = (is_here, fault) {
            return Ok((Inside::Nothing, true));
        }
        let fails = match fault {
            Fault::Fails => is_here.then_some(match operation.needs_space() {
                true if number.is_multiple_of(2) => libc::ENOSPC,
                _ => libc::EIO,
            }),
            Fault::DiskFull if is_here && is_write(registers.orig_rax) && registers.rdx > 1 => {
                registers.rdx /= 2;
                ptrace::setregs(thread, registers)?;
                self.is_full = true;
                None
            }
            Fault::DiskFull if is_here || self.is_full => {
                self.is_full = true;
                operation.needs_space().then_some(libc::ENOSPC)
            }
            _ => None,
        };
        if let Some(errno) = fails {
            // No system call has this number.
            registers.orig_rax = u64::MAX;
            ptrace::setregs(thread, registers)?;
            return Ok((Inside::Failing(i64::from(errno)), false));
        }
        let inside = match operation {
            Operation::Names(names) => Inside::Change(self.disk.names(names)?, false),
            Operation::Write { opened, offset, len, .. } if opened.exists() => {
                Inside::Change(self.disk.data(&opened, offset, len)?, true)
            }
            Operation::Sync { of, .. } => Inside::Sync(of, self.disk.sync()),
            Operation::Write { .. } | Operation::Resize { .. } => Inside::Nothing,
        };
        Ok(match (is_here, fault) {
            (true, Fault::PowerLoss { after: true }) => (Inside::Last(Box::new(inside)), false),
            _ => (inside, false),
        })
    }

    /// Returns the operation of a system call, if it concerns the directory.
    fn operation(&self, thread: Pid, registers: &libc::user_regs_struct) -> Result<Option<Operation>> {
        let process = PathBuf::from(format!("/proc/{thread}"));
        let arguments =
            [registers.rdi, registers.rsi, registers.rdx, registers.r10, registers.r8, registers.r9];
        let call = Call { process, arguments };
        let Ok(number) = i64::try_from(registers.orig_rax) else { return Ok(None) };
        let here = libc::AT_FDCWD as u64;
        let [a, b, c, d, e, _] = call.arguments;
        let names = match number {
            libc::SYS_open => call.opened(here, a, b)?,
            libc::SYS_openat => call.opened(a, b, c)?,
            libc::SYS_creat => call.opened(here, a, libc::O_CREAT as u64)?,
            libc::SYS_mkdir => Some(Names::Create(call.path(here, a)?)),
            libc::SYS_mkdirat => Some(Names::Create(call.path(a, b)?)),
            libc::SYS_link => Some(Names::Create(call.path(here, b)?)),
            libc::SYS_linkat => Some(Names::Create(call.path(c, d)?)),
            libc::SYS_symlink => Some(Names::Create(call.path(here, b)?)),
            libc::SYS_symlinkat => Some(Names::Create(call.path(b, c)?)),
            libc::SYS_rename => Some(Names::Rename(call.path(here, a)?, call.path(here, b)?)),
            libc::SYS_renameat => Some(Names::Rename(call.path(a, b)?, call.path(c, d)?)),
            libc::SYS_renameat2 => Some(match e & u64::from(libc::RENAME_EXCHANGE) {
                0 => Names::Rename(call.path(a, b)?, call.path(c, d)?),
                _ => Names::Exchange(call.path(a, b)?, call.path(c, d)?),
            }),
            libc::SYS_unlink => Some(Names::Remove(call.path(here, a)?)),
            libc::SYS_rmdir => Some(Names::RemoveDirectory(call.path(here, a)?)),
            libc::SYS_unlinkat if c & libc::AT_REMOVEDIR as u64 != 0 => {
                Some(Names::RemoveDirectory(call.path(a, b)?))
            }
            libc::SYS_unlinkat => Some(Names::Remove(call.path(a, b)?)),
            _ => None,
        };
        if let Some(names) = names {
            let is_inside = names.paths().iter().any(|path| path.starts_with(self.directory));
            return Ok(is_inside.then_some(Operation::Names(names)));
        }
        let (descriptor, at, len) = match number {
            libc::SYS_write | libc::SYS_writev => (a, None, c),
            libc::SYS_pwrite64 | libc::SYS_pwritev | libc::SYS_pwritev2 => (a, Some(d), c),
            libc::SYS_copy_file_range => {
                ensure!(d == 0, "copy_file_range with an offset is not implemented");
                (c, None, e)
            }
            libc::SYS_sendfile => (a, None, d),
            libc::SYS_fsync | libc::SYS_fdatasync | libc::SYS_ftruncate | libc::SYS_fallocate => (a, None, 0),
            _ => return Ok(None),
        };
        let opened = call.process.join(format!("fd/{}", descriptor as i32));
        let Ok(path) = fs::read_link(&opened) else { return Ok(None) };
        if !path.starts_with(self.directory) {
            return Ok(None);
        }
        Ok(Some(match number {
            libc::SYS_fsync | libc::SYS_fdatasync => Operation::Sync { of: inode(&opened), path },
            libc::SYS_ftruncate => {
                let grows = fs::metadata(&opened)?.len() < b;
                Operation::Resize { path, grows }
            }
            libc::SYS_fallocate => Operation::Resize { path, grows: true },
            _ => {
                let offset = match at {
                    Some(offset) => offset,
                    None => call.position(descriptor, &opened)?,
                };
                // The length of a vector is known only afterwards.
                let is_vector = [libc::SYS_writev, libc::SYS_pwritev, libc::SYS_pwritev2].contains(&number);
                let len = if is_vector { u64::MAX / 2 } else { len };
                Operation::Write { path, opened, offset, len }
            }
        }))
    }
}

fn is_write(number: u64) -> bool {
    i64::try_from(number).is_ok_and(|number| [libc::SYS_write, libc::SYS_pwrite64].contains(&number))
}

fn is_gone(error: &anyhow::Error) -> bool {
    error.downcast_ref::<nix::Error>() == Some(&nix::Error::ESRCH)
}

impl Names {
    fn paths(&self) -> Vec<&Path> {
        match self {
            Self::Create(path) | Self::Remove(path) | Self::RemoveDirectory(path) => vec![path],
            Self::Rename(from, to) | Self::Exchange(from, to) => vec![from, to],
        }
    }
}

/// A system call of a thread.
struct Call {
    process: PathBuf,
    arguments: [u64; 6],
}

impl Call {
    /// Reads a path from the memory of the process.
    fn path(&self, directory: u64, address: u64) -> Result<PathBuf> {
        let memory = File::open(self.process.join("mem"))?;
        let mut bytes = Vec::new();
        let mut piece = [0; 256];
        while !bytes.contains(&0) && bytes.len() < 1 << 16 {
            // A page that follows may not exist.
            let at = address + bytes.len() as u64;
            let within = piece.len().min(4096 - usize::try_from(at % 4096)?);
            let read = memory.read_at(&mut piece[..within], at)?;
            ensure!(read > 0, "a path cannot be read");
            bytes.extend_from_slice(&piece[..read]);
        }
        bytes.truncate(bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len()));
        let path = PathBuf::from(OsString::from_vec(bytes));
        let base = match directory as i32 {
            libc::AT_FDCWD => fs::read_link(self.process.join("cwd"))?,
            descriptor if path.is_relative() => fs::read_link(self.process.join(format!("fd/{descriptor}")))?,
            _ => PathBuf::new(),
        };
        Ok(base.join(path))
    }

    /// A file that is created, if opening creates one.
    fn opened(&self, directory: u64, address: u64, flags: u64) -> Result<Option<Names>> {
        if flags & libc::O_CREAT as u64 == 0 {
            return Ok(None);
        }
        let path = self.path(directory, address)?;
        Ok((!path.exists()).then_some(Names::Create(path)))
    }

    /// Where a write without an offset goes.
    fn position(&self, descriptor: u64, opened: &Path) -> Result<u64> {
        let text = fs::read_to_string(self.process.join(format!("fdinfo/{}", descriptor as i32)))?;
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let flags = field("flags:").and_then(|flags| u64::from_str_radix(flags, 8).ok());
        if flags.is_some_and(|flags| flags & libc::O_APPEND as u64 != 0) {
            return Ok(fs::metadata(opened)?.len());
        }
        field("pos:").and_then(|position| position.parse().ok()).context("a file without a position")
    }
}
