//! The memory that a run may use, and that the machine has.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::calibrate::Residence;
use crate::model::Model;
use crate::recipe::Plan;
use crate::{Error, Result};

/// The fraction of the available memory that a run uses by default.
const DEFAULT_FRACTION: f64 = 0.8;

/// How much memory a run may use. It decides where hidden states are kept, never what is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum MemoryBudget {
    /// 80 % of the available memory.
    #[default]
    Auto,
    /// This many bytes, even if less memory is available.
    Bytes(u64),
}

impl FromStr for MemoryBudget {
    type Err = Error;

    /// Parses `auto`, or a number with a unit: `8GiB`, `8.5GB`, `900MiB`, `512M` (as MiB).
    ///
    /// # Errors
    /// [`Error::Usage`] for anything else, and for less than 1 MiB.
    fn from_str(text: &str) -> Result<Self> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let unknown = || {
            Error::usage(
                format!("invalid memory budget `{text}`: it must be a size of at least 1 MiB, or `auto`"),
                "use a number with a unit, such as 8GiB or 900MiB",
            )
        };
        let unit_at = text.find(|c: char| c.is_ascii_alphabetic()).ok_or_else(unknown)?;
        let (number, unit) = text.split_at(unit_at);
        let number: f64 = number.trim().parse().map_err(|_| unknown())?;
        let unit: f64 = match unit.to_ascii_lowercase().as_str() {
            "k" | "kib" => 1024.0,
            "m" | "mib" => 1024.0_f64.powi(2),
            "g" | "gib" => 1024.0_f64.powi(3),
            "t" | "tib" => 1024.0_f64.powi(4),
            "kb" => 1e3,
            "mb" => 1e6,
            "gb" => 1e9,
            "tb" => 1e12,
            _ => return Err(unknown()),
        };
        let bytes = number * unit;
        match bytes.is_finite() && bytes >= f64::from(1 << 20) {
            true => Ok(Self::Bytes(bytes as u64)),
            false => Err(unknown()),
        }
    }
}

/// Decides where a run of these plans keeps hidden states, and returns a note for the user if that is not in memory.
///
/// # Errors
/// [`Error::MemoryBudget`] if the run needs more than the budget, or than is available, with the smallest budget that
/// suffices.
pub fn residence(
    plans: &[Plan],
    model: &Model,
    budget: MemoryBudget,
    keeps_maxima: bool,
) -> Result<(Residence, Option<String>)> {
    let (budget, limit) = match budget {
        MemoryBudget::Bytes(bytes) => (bytes, Limit::Budget(bytes)),
        MemoryBudget::Auto => match available_memory() {
            Some(available) => ((available as f64 * DEFAULT_FRACTION) as u64, Limit::Available(available)),
            // The available memory of this machine is unknown.
            None => return Ok((Residence::Memory, None)),
        },
    };
    let residence = match (Plan::residence(plans, model, budget, keeps_maxima), limit) {
        (Ok(residence), _) => residence,
        // A run that needs nearly all of the memory may still succeed.
        (Err(needed), Limit::Available(available)) if needed <= available => {
            Plan::residence(plans, model, needed, keeps_maxima).unwrap_or_default()
        }
        (Err(needed), Limit::Budget(budget)) => {
            return Err(Error::MemoryBudget { needed, budget: Some(budget), available: None });
        }
        (Err(needed), Limit::Available(available)) => {
            return Err(Error::MemoryBudget { needed, budget: None, available: Some(available) });
        }
    };
    let note = (residence != Residence::Memory)
        .then(|| note(Plan::scratch_bytes(plans, model, residence), Plan::peak_memory(plans, model)));
    Ok((residence, note))
}

/// Decides where a run with this peak memory keeps hidden states, and returns a note for the user if that is not in
/// memory. `scratch` is the disk space for them.
///
/// # Errors
/// As [`residence`].
pub(super) fn residence_by(
    peak: impl Fn(Residence) -> u64,
    scratch: u64,
    budget: MemoryBudget,
) -> Result<(Residence, Option<String>)> {
    let (limit, most) = match budget {
        MemoryBudget::Bytes(bytes) => (bytes, bytes),
        MemoryBudget::Auto => match available_memory() {
            // A run that needs nearly all of the memory may still succeed.
            Some(available) => ((available as f64 * DEFAULT_FRACTION) as u64, available),
            None => return Ok((Residence::Memory, None)),
        },
    };
    let files = Residence::Files { round_bytes: 0, experts_apart: false };
    let in_memory = peak(Residence::Memory);
    if in_memory <= limit {
        return Ok((Residence::Memory, None));
    }
    let needed = peak(files).min(in_memory);
    if needed > most {
        let given = matches!(budget, MemoryBudget::Bytes(_));
        let [budget, available] = [given, !given].map(|is| is.then_some(most));
        return Err(Error::MemoryBudget { needed, budget, available });
    }
    match peak(files) < in_memory {
        true => Ok((files, Some(note(scratch, in_memory)))),
        false => Ok((Residence::Memory, None)),
    }
}

/// Why hidden states are in files.
fn note(scratch: u64, in_memory: u64) -> String {
    format!(
        "hidden states are kept in files ({} of disk space): the run would need {} of memory if they were kept in \
        memory",
        super::bytes(scratch),
        super::bytes(in_memory),
    )
}

/// What limits the memory of a run.
enum Limit {
    Budget(u64),
    Available(u64),
}

/// Returns the memory in bytes that this process can still get: what the system has, or less if a control group limits
/// it. `None` on systems that do not report it.
pub fn available_memory() -> Option<u64> {
    let system = meminfo(&std::fs::read_to_string("/proc/meminfo").ok()?)?;
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let limits = control_groups(&groups).into_iter().filter_map(|group| group.available());
    Some(limits.fold(system, u64::min))
}

/// `MemAvailable` in bytes.
fn meminfo(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// A memory control group, and the names of its files in this version of the interface.
struct ControlGroup {
    directory: PathBuf,
    limit: &'static str,
    usage: &'static str,
    inactive: &'static str,
}

/// The memory control groups of a process and their ancestors, from the text of its `cgroup` file.
fn control_groups(text: &str) -> Vec<ControlGroup> {
    let mut found = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let of = |root: &str, names: [&'static str; 3]| {
            // In a container, the path may be that of the host; the root is then the container's own group.
            let path = Path::new(path.trim_start_matches('/'));
            let [limit, usage, inactive] = names;
            let groups = path.ancestors().map(|group| Path::new(root).join(group));
            groups.map(|directory| ControlGroup { directory, limit, usage, inactive }).collect::<Vec<_>>()
        };
        if controllers.is_empty() {
            found.extend(of("/sys/fs/cgroup", ["memory.max", "memory.current", "inactive_file"]));
        } else if controllers.split(',').any(|name| name == "memory") {
            let names = ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"];
            found.extend(of("/sys/fs/cgroup/memory", names));
        }
    }
    found
}

impl ControlGroup {
    /// Returns the memory in bytes that the group's limit leaves; page cache that the system can drop counts as free.
    fn available(&self) -> Option<u64> {
        let read = |name: &str| std::fs::read_to_string(self.directory.join(name)).ok();
        let limit: u64 = read(self.limit)?.trim().parse().ok()?;
        let usage: u64 = read(self.usage)?.trim().parse().ok()?;
        let stat = read("memory.stat").unwrap_or_default();
        let inactive = stat.lines().find_map(|line| {
            let (name, value) = line.split_once(' ')?;
            if name == self.inactive { value.trim().parse::<u64>().ok() } else { None }
        });
        Some(limit.saturating_sub(usage.saturating_sub(inactive.unwrap_or(0))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_have_units() {
        let bytes = |text: &str| match text.parse::<MemoryBudget>() {
            Ok(MemoryBudget::Bytes(bytes)) => Some(bytes),
            _ => None,
        };
        assert_eq!("auto".parse::<MemoryBudget>().unwrap(), MemoryBudget::Auto);
        assert_eq!(bytes("8GiB"), Some(8 << 30));
        assert_eq!(bytes("8G"), Some(8 << 30));
        assert_eq!(bytes("1.5 GB"), Some(1_500_000_000));
        assert_eq!(bytes("900mib"), Some(900 << 20));
        for text in
            ["", "8", "GiB", "-1GiB", "8 gallons", "1KiB", "infGiB", "nanGiB", "1e400GiB", "Auto", "8GiB "]
        {
            let error = text.parse::<MemoryBudget>().unwrap_err();
            assert_eq!(error.category().exit_code(), 2, "{text}");
        }
    }

    #[test]
    fn limits_of_control_groups_count() {
        assert_eq!(meminfo("MemTotal: 9 kB\nMemAvailable:    2048 kB\n"), Some(2 << 20));
        assert_eq!(meminfo("MemTotal: 9 kB\n"), None);
        let directories = |text: &str| -> Vec<PathBuf> {
            control_groups(text).into_iter().map(|group| group.directory).collect()
        };
        let unified = directories("0::/user.slice/a\n");
        let expected = ["/sys/fs/cgroup/user.slice/a", "/sys/fs/cgroup/user.slice", "/sys/fs/cgroup/"];
        assert_eq!(unified, expected.map(PathBuf::from));
        let first = directories("5:cpu:/x\n4:hugetlb,memory:/job/7\n0::/\n");
        assert_eq!(first[0], PathBuf::from("/sys/fs/cgroup/memory/job/7"));
        assert!(first.contains(&PathBuf::from("/sys/fs/cgroup/memory/")));
        assert!(directories("broken\n").is_empty());
        let directory = tempfile::tempdir().unwrap();
        let group = || ControlGroup {
            directory: directory.path().to_owned(),
            limit: "memory.max",
            usage: "memory.current",
            inactive: "inactive_file",
        };
        assert_eq!(group().available(), None);
        let write = |name: &str, text: &str| std::fs::write(directory.path().join(name), text).unwrap();
        write("memory.max", "max\n");
        write("memory.current", "700\n");
        assert_eq!(group().available(), None);
        write("memory.max", "1000\n");
        assert_eq!(group().available(), Some(300));
        write("memory.stat", "anon 400\ninactive_file 200\n");
        assert_eq!(group().available(), Some(500));
    }
}
