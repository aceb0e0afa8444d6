//! Wall time, CPU time and peak memory of a child process, and the baseline work that it is compared with.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
use sha2::{Digest, Sha256};

use super::shell::display;

/// Bytes read, hashed or written at a time.
const CHUNK: usize = 4 << 20;
/// Interval at which a child's high-water mark is read.
const POLL: Duration = Duration::from_millis(5);
/// Units of CPU time per second in `/proc/PID/stat` (`USER_HZ`).
const TICKS_PER_SECOND: f64 = 100.0;

/// Time and memory of a run.
#[derive(Debug, Clone, Copy)]
pub struct Usage {
    /// Wall time from start to exit, in seconds.
    pub seconds: f64,
    /// CPU time of all threads, user and system, in seconds; a multiple of 0.01.
    pub cpu_seconds: f64,
    /// Peak resident memory (`VmHWM`), in bytes.
    pub peak_bytes: u64,
}

/// Runs a program to its end.
///
/// # Errors
/// When it cannot be started or fails; the message contains its output.
pub fn run(command: &mut Command) -> Result<Usage> {
    Ok(run_with_output(command)?.0)
}

/// Like [`run`], and also returns the program's output on both streams.
///
/// # Errors
/// When it cannot be started or fails; the message contains its output.
pub fn run_with_output(command: &mut Command) -> Result<(Usage, String)> {
    let line = display(command);
    let log = tempfile::tempfile()?;
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log.try_clone()?);
    let start = Instant::now();
    let mut child = command.spawn().with_context(|| format!("cannot start `{line}`"))?;
    let status_file = format!("/proc/{}/status", child.id());
    let ended = AtomicBool::new(false);
    let (status, seconds, cpu_seconds, peak_bytes) = std::thread::scope(|scope| -> Result<_> {
        let watcher = scope.spawn(|| {
            let mut peak = 0;
            while !ended.load(Ordering::Relaxed) {
                peak = peak_rss(&status_file).unwrap_or(0).max(peak);
                std::thread::sleep(POLL);
            }
            peak
        });
        let cpu_seconds = wait_for_cpu_seconds(child.id());
        let seconds = start.elapsed().as_secs_f64();
        let status = child.wait();
        ended.store(true, Ordering::Relaxed);
        let peak = watcher.join().unwrap_or(0);
        Ok((status?, seconds, cpu_seconds, peak))
    })?;
    let printed = contents(log)?;
    if !status.success() {
        bail!("`{line}` ended with {status}:\n{printed}");
    }
    Ok((Usage { seconds, cpu_seconds: cpu_seconds?, peak_bytes }, printed))
}

/// Waits until a child has ended and reads its CPU time. The caller must still wait for the child, whose entry in
/// `/proc` exists until then.
fn wait_for_cpu_seconds(id: u32) -> Result<f64> {
    let pid = i32::try_from(id).ok().and_then(Pid::from_raw).context("the child has no process id")?;
    waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)?;
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat"))?;
    ticks_from(&stat, UTIME)
        .map(|ticks| ticks as f64 / TICKS_PER_SECOND)
        .context("/proc/PID/stat has an unexpected form")
}

/// CPU time, user and system, of all children of this process that have ended and were waited for, and of their
/// children.
pub fn children_cpu_time() -> Option<Duration> {
    let ticks = ticks_from(&std::fs::read_to_string("/proc/self/stat").ok()?, CUTIME)?;
    Some(Duration::from_secs_f64(ticks as f64 / TICKS_PER_SECOND))
}

/// The index, counted from 1, of a process's user time in a `stat` file; the system time follows it.
const UTIME: usize = 14;
/// The index of the user time of a process's children that have ended; their system time follows it.
const CUTIME: usize = 16;

/// The sum of a field of a `stat` file and the next one.
fn ticks_from(stat: &str, field: usize) -> Option<u64> {
    // The second field is the program's name in parentheses, which may contain any characters.
    let (_, after_name) = stat.rsplit_once(')')?;
    let mut fields = after_name.split_whitespace().skip(field - 3);
    let mut next = || fields.next()?.parse::<u64>().ok();
    Some(next()? + next()?)
}

fn contents(mut log: File) -> Result<String> {
    use std::io::Seek;
    let mut text = String::new();
    log.rewind()?;
    log.read_to_string(&mut text)?;
    Ok(text)
}

/// `VmHWM` of a process in bytes; `None` once its memory has been freed.
fn peak_rss(status_file: &str) -> Option<u64> {
    let status = std::fs::read_to_string(status_file).ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// The baseline, on one thread: reads all safetensors of `input`, computes their SHA-256, writes `output_bytes` to a
/// new file in `scratch`, syncs it and, if `read_back` is set, reads it again and computes its SHA-256. Returns seconds.
pub fn read_hash_write(input: &Path, scratch: &Path, output_bytes: u64, read_back: bool) -> Result<f64> {
    let target = scratch.join("baseline.bin");
    let start = Instant::now();
    let mut buffer = vec![0; CHUNK];
    for path in safetensors_of(input)? {
        read_and_hash(&path, &mut buffer)?;
    }
    let mut file = File::create(&target)?;
    let mut left = output_bytes;
    while left > 0 {
        let part = left.min(buffer.len() as u64) as usize;
        file.write_all(&buffer[..part])?;
        left -= part as u64;
    }
    file.sync_all()?;
    if read_back {
        read_and_hash(&target, &mut buffer)?;
    }
    let seconds = start.elapsed().as_secs_f64();
    std::fs::remove_file(&target)?;
    Ok(seconds)
}

fn read_and_hash(path: &Path, buffer: &mut [u8]) -> Result<()> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    loop {
        let read = file.read(buffer)?;
        if read == 0 {
            break;
        }
        hasher.update(&buffer[..read]);
    }
    std::hint::black_box(hasher.finalize());
    Ok(())
}

/// The safetensors files of a directory, sorted.
pub fn safetensors_of(dir: &Path) -> Result<Vec<std::path::PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// A distribution-free 95 % confidence interval of the median of independent values: the `k`th smallest and the `k`th
/// largest value, with the largest `k` that leaves out at most 2.5 % on either side. `None` for fewer than 6 values,
/// which have no such interval, and for more than 1000.
pub fn median_interval(values: impl IntoIterator<Item = f64>) -> Option<[f64; 2]> {
    const TAIL: f64 = 0.025;
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    let n = Some(sorted.len()).filter(|n| *n <= 1000)?;
    // The median is below the `k`th smallest value if fewer than `k` of `n` coin tosses are heads.
    let mut probability = 0.5f64.powi(i32::try_from(n).ok()?);
    let (mut below, mut k) = (probability, 0);
    while below <= TAIL {
        k += 1;
        probability *= (n + 1 - k) as f64 / k as f64;
        below += probability;
    }
    (k > 0).then(|| [sorted[k - 1], sorted[n - k]])
}

/// The median.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_of_a_child_is_seen() {
        // The shell keeps the whole line, 20 MB, in a variable for longer than a polling interval.
        let script = "x=$(head -c 20000000 /dev/zero | tr '\\0' a); sleep 0.05; echo ${#x}";
        let (usage, printed) = run_with_output(Command::new("bash").args(["-c", script])).unwrap();
        assert_eq!(printed, "20000000\n");
        assert!(usage.peak_bytes > 15 << 20, "{usage:?}");
        assert!(usage.seconds >= 0.05);
    }

    #[test]
    fn the_cpu_time_of_a_child_is_not_its_wall_time() {
        let spent = |script: &str| run(Command::new("bash").args(["-c", script])).unwrap();
        let asleep = spent("sleep 0.3");
        assert!(asleep.seconds >= 0.3 && asleep.cpu_seconds < 0.2, "{asleep:?}");
        let busy = spent("for ((i = 0; i < 200000; i++)); do :; done");
        assert!(busy.cpu_seconds > 0.03 && busy.cpu_seconds < busy.seconds + 0.1, "{busy:?}");
    }

    #[test]
    fn cpu_ticks_are_found_after_any_name() {
        let stat = "12 (a) (b c) S 1 2 3 4 5 6 7 8 9 10 70 8 30 40 20 0 1";
        assert_eq!([UTIME, CUTIME].map(|field| ticks_from(stat, field)), [Some(78), Some(70)]);
        assert_eq!(ticks_from("12 (a) S 1 2", UTIME), None);
        assert_eq!(ticks_from("", UTIME), None);
    }

    #[test]
    fn the_cpu_time_of_children_grows() {
        let before = children_cpu_time().unwrap();
        run(Command::new("bash").args(["-c", "for ((i = 0; i < 200000; i++)); do :; done"])).unwrap();
        assert!(children_cpu_time().unwrap() >= before + Duration::from_millis(30));
    }

    #[test]
    fn intervals_of_the_median_are_those_of_the_tables() {
        // Published tables of the sign test: the ranks of both ends for 6, 9, 15, 25 and 40 values.
        for (n, low, high) in [(6, 1, 6), (9, 2, 8), (15, 4, 12), (25, 8, 18), (40, 14, 27)] {
            let values = (1..=n).rev().map(f64::from);
            assert_eq!(median_interval(values), Some([f64::from(low), f64::from(high)]), "{n}");
        }
        assert_eq!(median_interval((1..=5).map(f64::from)), None);
        assert_eq!(median_interval([]), None);
    }

    #[test]
    fn a_failing_child_is_an_error_with_its_output() {
        let error = run(Command::new("bash").args(["-c", "echo why >&2; exit 4"])).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("why") && message.contains('4'), "{message}");
    }

    #[test]
    fn medians() {
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([4.0, 1.0]), 2.5);
        assert!(median([]).is_nan());
    }
}
