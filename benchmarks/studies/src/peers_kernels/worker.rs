//! A peer's process, and the protocol with it: see `benchmarks/kernels-worker`.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// The variables from which libraries read the number of threads.
const THREADS: [&str; 8] = [
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
    "CANDLE_NUM_THREADS",
];

/// How to start a peer; the number of threads is the last argument.
pub struct Program {
    /// The command and its arguments.
    pub command: Vec<String>,
    /// Environment variables, such as those that limit the instruction set.
    pub variables: &'static [(&'static str, &'static str)],
}

/// A peer that waits for requests.
pub struct Worker {
    /// The peer's name.
    pub name: String,
    /// The peer's version.
    pub version: String,
    /// The weight types that the peer can multiply.
    pub contestants: Vec<String>,
    child: Child,
    requests: Option<ChildStdin>,
    replies: BufReader<ChildStdout>,
    /// The peer's standard error.
    errors: File,
}

/// Weights that are ready for products.
pub struct Prepared {
    /// Bytes of one packed copy.
    pub bytes: usize,
    /// A note for the record.
    pub note: String,
}

/// The limits of the machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Memory bandwidth in GB/s.
    pub memory: f64,
    /// 10¹² operations per second.
    pub tops: f64,
}

impl Worker {
    /// Starts a peer on these cores, without environment variables that could affect it.
    pub fn start(program: &Program, threads: usize, cpus: &str) -> Result<Self> {
        let mut command = Command::new("taskset");
        command.args(["--cpu-list", cpus]).args(&program.command).arg(threads.to_string());
        command.env_clear().envs(THREADS.map(|name| (name, threads.to_string())));
        command.envs(["PATH", "HOME"].iter().filter_map(|name| Some((name, std::env::var_os(name)?))));
        command.envs([("OMP_DYNAMIC", "false"), ("MKL_DYNAMIC", "false"), ("PYTHONDONTWRITEBYTECODE", "1")]);
        command.envs(program.variables.iter().copied());
        let errors = tempfile::tempfile().context("cannot create a file for the peer's standard error")?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(errors.try_clone()?);
        let mut child = command.spawn().context("cannot start `taskset`")?;
        let requests = child.stdin.take();
        let replies = BufReader::new(child.stdout.take().context("no output")?);
        let name = program.command.join(" ");
        let mut worker =
            Self { name, version: String::new(), contestants: Vec::new(), child, requests, replies, errors };
        let hello = worker.reply("start")?;
        let text =
            |value: &Value| value.as_str().map(str::to_owned).context("unexpected greeting of the peer");
        (worker.name, worker.version) = (text(&hello["name"])?, text(&hello["version"])?);
        let contestants = hello["contestants"].as_array().context("no contestants")?;
        worker.contestants = contestants.iter().map(text).collect::<Result<_>>()?;
        Ok(worker)
    }

    /// Makes weights of this shape, in copies of `rotated` bytes in total. For workers of experts, `rotated` is the
    /// number of experts.
    pub fn prepare(&mut self, contestant: &str, [n, k]: [usize; 2], rotated: usize) -> Result<Prepared> {
        let reply = self.ask(&format!("prepare {contestant} {n} {k} {rotated}"))?;
        Ok(Prepared {
            bytes: reply["bytes"].as_u64().context("no bytes")? as usize,
            note: reply["note"].as_str().unwrap_or_default().to_owned(),
        })
    }

    /// Makes activations and multiplies once. Returns the error relative to the product with the float weights.
    pub fn tokens(&mut self, contestant: &str, tokens: usize, rotate: bool) -> Result<f64> {
        let reply = self.ask(&format!("tokens {contestant} {tokens} {}", u8::from(rotate)))?;
        reply["error"].as_f64().with_context(|| format!("{} reported no error value: {reply}", self.name))
    }

    /// Routes the tokens of some calls to experts and makes all calls once; returns the error of the first token of the
    /// last call relative to the experts of the float weights.
    pub fn route(
        &mut self,
        contestant: &str,
        [tokens, calls, top_k]: [usize; 3],
        experts: &[u32],
    ) -> Result<f64> {
        let list: Vec<String> = experts.iter().map(u32::to_string).collect();
        let reply = self.ask(&format!("route {contestant} {tokens} {calls} {top_k}\n{}", list.join(" ")))?;
        reply["error"].as_f64().with_context(|| format!("{} reported no error value: {reply}", self.name))
    }

    /// Multiplies for this long; returns the seconds per product of each pass.
    pub fn run(&mut self, contestant: &str, milliseconds: usize) -> Result<Vec<f64>> {
        let reply = self.ask(&format!("run {contestant} {milliseconds}"))?;
        let seconds = reply["seconds"].as_array().context("no seconds")?;
        let seconds: Vec<f64> = seconds.iter().filter_map(Value::as_f64).collect();
        ensure!(!seconds.is_empty(), "{} {contestant} measured nothing", self.name);
        Ok(seconds)
    }

    /// Measures the current limits of the machine.
    pub fn limits(&mut self) -> Result<Limits> {
        let reply = self.ask("limits")?;
        let number = |name: &str| reply[name].as_f64().with_context(|| format!("no {name}"));
        Ok(Limits { memory: number("memory")?, tops: number("tops")? })
    }

    /// Frees the weights.
    pub fn release(&mut self, contestant: &str) -> Result<()> {
        self.ask(&format!("drop {contestant}")).map(|_| ())
    }

    /// Frees all weights, if any.
    pub fn release_all(&mut self) {
        for name in self.contestants.clone() {
            let _ = self.release(&name);
        }
    }

    fn ask(&mut self, request: &str) -> Result<Value> {
        let requests = self.requests.as_mut().context("no input")?;
        // If the worker has ended, the missing reply gives a better error.
        let _ = writeln!(requests, "{request}").and_then(|()| requests.flush());
        self.reply(request)
    }

    /// Describes how the process ended, after it has closed its output.
    fn ended(&mut self) -> String {
        drop(self.requests.take());
        for _ in 0..200 {
            if let Ok(Some(status)) = self.child.try_wait() {
                return format!("ended with {status}");
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        "closed its output".into()
    }

    fn errors_so_far(&mut self) -> String {
        const MAX_BYTES: u64 = 2000;
        let mut end = Vec::new();
        let length = self.errors.seek(SeekFrom::End(0)).unwrap_or(0);
        let read = self.errors.seek(SeekFrom::Start(length.saturating_sub(MAX_BYTES)));
        let _ = read.and_then(|_| self.errors.read_to_end(&mut end));
        match String::from_utf8_lossy(&end).trim() {
            "" => "its standard error is empty".into(),
            text => format!("its standard error ends with: {text}"),
        }
    }

    fn reply(&mut self, request: &str) -> Result<Value> {
        let mut line = String::new();
        self.replies.read_line(&mut line)?;
        if line.is_empty() {
            let (ended, errors_so_far) = (self.ended(), self.errors_so_far());
            bail!("{} {ended} after `{request}`; {errors_so_far}", self.name);
        }
        let reply: Value = serde_json::from_str(&line)
            .with_context(|| format!("{} replied `{}`", self.name, line.trim()))?;
        if let Some(reason) = reply.get("failed") {
            let errors_so_far = self.errors_so_far();
            bail!("{} failed at `{request}`: {}; {errors_so_far}", self.name, reason.as_str().unwrap_or("?"));
        }
        Ok(reply)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // A worker that does not end when its input is closed is killed.
        drop(self.requests.take());
        for _ in 0..200 {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The first `threads` of the cores that this process may use, such as `0,1`.
pub fn cpus(threads: usize) -> Result<String> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let list =
        status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")).context("no list of cores")?;
    let allowed = expand(list.trim()).with_context(|| format!("cores `{list}`"))?;
    ensure!(
        threads > 0 && threads <= allowed.len(),
        "{threads} threads were requested on {} cores",
        allowed.len()
    );
    let cpus: Vec<String> = allowed[..threads].iter().map(usize::to_string).collect();
    Ok(cpus.join(","))
}

/// Expands `0-2,5`.
fn expand(list: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cpus.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cores() {
        assert_eq!(expand("0-2,5"), Some(vec![0, 1, 2, 5]));
        assert_eq!(expand("3"), Some(vec![3]));
        assert_eq!(expand("x"), None);
    }

    #[test]
    fn a_worker_is_asked_and_its_failures_are_reported() {
        let script = r#"echo '{"name":"a","version":"1","contestants":["q"]}'
            while read what name rest; do case $what in
                prepare) echo '{"bytes":8,"note":"n"}';; run) echo '{"seconds":[0.5,0.25]}';;
                tokens) echo '{"error":0.125}';; *) echo '{"failed":"why"}';; esac; done"#;
        let command = ["bash", "-c", script].map(str::to_owned).to_vec();
        let mut worker = Worker::start(&Program { command, variables: &[] }, 1, &cpus(1).unwrap()).unwrap();
        assert_eq!((worker.name.as_str(), worker.contestants.len()), ("a", 1));
        assert_eq!(worker.prepare("q", [1, 2], 3).unwrap().bytes, 8);
        assert_eq!(worker.tokens("q", 1, true).unwrap(), 0.125);
        assert_eq!(worker.run("q", 1).unwrap(), [0.5, 0.25]);
        assert!(worker.limits().unwrap_err().to_string().contains("why"));
    }

    #[test]
    fn a_worker_that_ends_is_reported_with_its_errors() {
        let script = r#"echo '{"name":"a","version":"1","contestants":["q"]}'; read line; echo 'no memory' >&2; exit 3"#;
        let command = ["bash", "-c", script].map(str::to_owned).to_vec();
        let mut worker = Worker::start(&Program { command, variables: &[] }, 1, &cpus(1).unwrap()).unwrap();
        let error = worker.limits().unwrap_err().to_string();
        assert!(error.contains("exit status: 3") && error.contains("no memory"), "{error}");
        worker.release_all();
    }
}
