//! The memory that the machine has, and that this process can still get.

use std::path::{Path, PathBuf};

/// Returns the memory in bytes that this process can still get: what the system has, or less if a control group limits
/// it. `None` on systems that do not report it.
pub fn available_memory() -> Option<u64> {
    let system = meminfo("MemAvailable:", &std::fs::read_to_string("/proc/meminfo").ok()?)?;
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let limits = control_groups(&groups).into_iter().filter_map(|group| group.available());
    Some(limits.fold(system, u64::min))
}

/// Returns the memory of the machine in bytes; `None` on systems that do not report it.
#[cfg(target_os = "linux")]
pub(super) fn machine_memory() -> Option<u64> {
    meminfo("MemTotal:", &std::fs::read_to_string("/proc/meminfo").ok()?)
}

/// A line of `/proc/meminfo` in bytes.
fn meminfo(name: &str, text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

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
    /// Returns the memory that the group's limit leaves. Page cache that the system can drop counts as free.
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
    fn limits_of_control_groups_count() {
        let text = "MemTotal: 9 kB\nMemAvailable:    2048 kB\n";
        assert_eq!(meminfo("MemAvailable:", text), Some(2 << 20));
        assert_eq!(meminfo("MemTotal:", text), Some(9 << 10));
        assert_eq!(meminfo("MemFree:", text), None);
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
