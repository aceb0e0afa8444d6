//! The `quant` program as a user runs it: tests build it, start it, wait for it, and send it signals.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use quant_kernels_cpu::Isa;
use rustix::process::{Pid, kill_process};

pub use rustix::process::Signal;

/// Time limit of a run.
const LIMIT: Duration = Duration::from_secs(300);

/// Returns the path of the `quant` binary, built from the current sources with the same profile as the tests.
///
/// It is built with the same selection of packages as `cargo test --workspace`, because a different selection would
/// give dependencies different features and compile them again.
///
/// # Panics
/// When it cannot be built.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let test = std::env::current_exe().expect("a test has a path");
        // target/<profile>/deps/<test>-<hash>
        let folder = test.parent().and_then(Path::parent).expect("a test lies in target/<profile>/deps");
        build(folder);
        let program = folder.join(format!("quant{}", std::env::consts::EXE_SUFFIX));
        assert!(program.is_file(), "{} was not built", program.display());
        program
    })
}

fn build(folder: &Path) {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    // A test of quant-cli, for which cargo also builds the program.
    command.args(["test", "--quiet", "--workspace", "--no-run", "--test", "starts"]);
    command.current_dir(crate::workspace_root());
    match folder.file_name().and_then(OsStr::to_str) {
        Some("debug") | None => {}
        Some(profile) => {
            command.args(["--profile", profile]);
        }
    }
    if let Some(target) = folder.parent() {
        command.arg("--target-dir").arg(target);
    }
    let status = command.status().expect("cargo can be run");
    assert!(status.success(), "cargo could not build quant-cli");
}

/// The result of a run: how it ended, and its output.
#[derive(Debug, Clone)]
pub struct Run {
    /// The arguments, for messages.
    pub arguments: String,
    /// The exit status.
    pub status: ExitStatus,
    /// What it printed on stdout: the result.
    pub stdout: String,
    /// What it printed on stderr: progress, notes and errors.
    pub stderr: String,
}

impl Run {
    /// The exit code; `None` if a signal ended the run.
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// Returns the run itself if it exited with 0.
    ///
    /// # Panics
    /// If it ended otherwise.
    #[track_caller]
    pub fn succeeded(self) -> Self {
        assert_eq!(self.code(), Some(0), "{self}");
        self
    }

    /// Parses the run's stdout as JSON.
    ///
    /// # Panics
    /// If the run failed, or printed something else.
    #[track_caller]
    pub fn json(self) -> serde_json::Value {
        let run = self.succeeded();
        serde_json::from_str(&run.stdout).unwrap_or_else(|e| panic!("{e}: {run}"))
    }
}

impl std::fmt::Display for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let signal = self.status.signal();
        write!(
            f,
            "quant {}\ncode {:?}, signal {signal:?}\n--- stdout\n{}--- stderr\n{}---",
            self.arguments,
            self.code(),
            self.stdout,
            self.stderr
        )
    }
}

/// A list of arguments of different types.
///
/// ```
/// let model = std::path::Path::new("m");
/// let all = quant_tests::args!["plan", model, "--json"];
/// assert_eq!(all.len(), 3);
/// ```
#[macro_export]
macro_rules! args {
    ($($argument:expr),* $(,)?) => {
        ::std::vec::Vec::<::std::ffi::OsString>::from([$(::std::ffi::OsString::from($argument)),*])
    };
}

/// Values of `QUANT_ISA` to run the program with: the default path, and if this processor has them, the paths of two
/// generations of x86-64 processors.
pub fn isa_values() -> impl Iterator<Item = &'static str> {
    let names: Vec<_> = Isa::available().map(Isa::name).collect();
    ["", "avx2", "avx512vnni"].into_iter().filter(move |name| name.is_empty() || names.contains(name))
}

/// A command for the program with these arguments, without the caller's settings of logging, network access and GitHub
/// Actions.
pub fn command<A: AsRef<OsStr>>(arguments: impl IntoIterator<Item = A>) -> Command {
    without_environment(Command::new(program()), arguments)
}

/// Like [`command`], with the default handling of a hangup. Programs under `nohup`, as CI may run its tests, ignore
/// hangups, and so do their child processes.
pub fn command_that_hangs_up<A: AsRef<OsStr>>(arguments: impl IntoIterator<Item = A>) -> Command {
    let mut env = Command::new("env");
    env.arg("--default-signal=HUP").arg(program());
    without_environment(env, arguments)
}

fn without_environment<A: AsRef<OsStr>>(
    mut command: Command,
    arguments: impl IntoIterator<Item = A>,
) -> Command {
    command.args(arguments).stdin(Stdio::null());
    command.env_remove("QUANT_LOG").env("RUST_BACKTRACE", "0");
    // Whatever features the binary was built with, no test uses the network.
    command.env("HF_HUB_OFFLINE", "1");
    // Tests may run in GitHub Actions.
    command.env_remove("GITHUB_ACTIONS").env_remove("GITHUB_STEP_SUMMARY");
    command
}

/// Runs the program to its end.
///
/// # Panics
/// When it cannot be started, or exceeds the time limit of a test.
#[track_caller]
pub fn quant<A: AsRef<OsStr>>(arguments: impl IntoIterator<Item = A>) -> Run {
    Running::start(command(arguments)).wait()
}

/// A run that continues while the test does something else.
#[derive(Debug)]
pub struct Running {
    arguments: String,
    child: Child,
    stdout: JoinHandle<String>,
    stderr: JoinHandle<String>,
    started: Instant,
}

impl Running {
    /// Starts a command with its output captured.
    ///
    /// # Panics
    /// When it cannot be started.
    #[track_caller]
    pub fn start(mut command: Command) -> Self {
        let arguments: Vec<String> =
            command.get_args().map(OsString::from).map(|a| a.to_string_lossy().into_owned()).collect();
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("quant starts");
        let stdout = drain(child.stdout.take());
        let stderr = drain(child.stderr.take());
        Self { arguments: arguments.join(" "), child, stdout, stderr, started: Instant::now() }
    }

    /// Returns the process id of the run.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal to the run.
    ///
    /// # Panics
    /// When the system refuses.
    #[track_caller]
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("the child can be signalled");
    }

    /// Whether the run has ended.
    ///
    /// # Panics
    /// If the system does not report it.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("a child can be waited for").is_some()
    }

    /// Waits until a condition holds; returns false if the run ends first.
    ///
    /// # Panics
    /// When it exceeds the time limit of a test.
    #[track_caller]
    pub fn wait_until(&mut self, mut is_so: impl FnMut() -> bool) -> bool {
        loop {
            if is_so() {
                return true;
            }
            if self.has_ended() {
                return false;
            }
            self.check_limit();
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the run ends.
    ///
    /// # Panics
    /// When it exceeds the time limit of a test.
    #[track_caller]
    pub fn wait(mut self) -> Run {
        let status = loop {
            match self.child.try_wait().expect("a child can be waited for") {
                Some(status) => break status,
                None => self.check_limit(),
            }
            std::thread::sleep(Duration::from_millis(3));
        };
        let text = |reader: JoinHandle<String>| reader.join().expect("a reader does not panic");
        Run { arguments: self.arguments, status, stdout: text(self.stdout), stderr: text(self.stderr) }
    }

    #[track_caller]
    fn check_limit(&mut self) {
        if self.started.elapsed() > LIMIT {
            let _ = self.child.kill();
            panic!("quant {} did not finish in time", self.arguments);
        }
    }
}

fn drain(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            let _ = pipe.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Whether a file system can be mounted here, as tests that fill a disk require.
pub fn can_mount() -> bool {
    let Ok(point) = tempfile::tempdir() else { return false };
    SmallDisk::mount(point.path(), 1 << 20).is_some()
}

/// A file system in memory; unmounted when dropped.
#[derive(Debug)]
pub struct SmallDisk {
    point: PathBuf,
}

impl SmallDisk {
    /// Mounts a file system of this many bytes, if the system allows it.
    pub fn mount(point: &Path, bytes: u64) -> Option<Self> {
        let size = format!("size={bytes}");
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(point);
        let mounted = command.stderr(Stdio::null()).status().is_ok_and(|s| s.success());
        mounted.then(|| Self { point: point.to_owned() })
    }

    /// Returns the file system's mount point.
    pub fn path(&self) -> &Path {
        &self.point
    }

    /// Fills the remaining space until the returned file is removed.
    ///
    /// # Panics
    /// When the file cannot be created.
    pub fn fill(&self) -> PathBuf {
        use std::io::Write;
        let path = self.point.join("filler");
        let mut file = File::create(&path).expect("the filler can be created");
        for piece in [vec![1u8; 1 << 16], vec![1; 512], vec![1]] {
            while file.write_all(&piece).is_ok() {}
        }
        path
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.point).status();
    }
}
