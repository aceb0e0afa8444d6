//! The energy that the processor packages have used, from the counters that Linux exposes (RAPL).

use std::path::{Path, PathBuf};

/// Where Linux lists the counters.
const COUNTERS: &str = "/sys/class/powercap";

/// The counters of all processor packages.
#[derive(Debug)]
pub struct Packages(Vec<Counter>);

#[derive(Debug)]
struct Counter {
    file: PathBuf,
    /// The counter restarts at zero after this many microjoules.
    range: u64,
}

/// The counters at one moment.
#[derive(Debug, Clone)]
pub struct Reading(Vec<u64>);

impl Packages {
    /// Returns the counters of this machine. `None` if there are none or they cannot be read, as in most virtual
    /// machines and, without privileges, on most others.
    pub fn of_this_machine() -> Option<Self> {
        Self::at(Path::new(COUNTERS))
    }

    fn at(folder: &Path) -> Option<Self> {
        let text = |file: PathBuf| std::fs::read_to_string(file).ok();
        let counter = |zone: PathBuf| {
            // Zones below a package are parts of it.
            text(zone.join("name"))?.starts_with("package").then_some(())?;
            let range = text(zone.join("max_energy_range_uj"))?.trim().parse().ok()?;
            Some(Counter { file: zone.join("energy_uj"), range })
        };
        let zones = std::fs::read_dir(folder).ok()?.filter_map(|zone| Some(zone.ok()?.path()));
        let found = Self(zones.filter_map(counter).collect());
        (!found.0.is_empty() && found.read().is_some()).then_some(found)
    }

    /// Reads all counters.
    pub fn read(&self) -> Option<Reading> {
        let value = |counter: &Counter| std::fs::read_to_string(&counter.file).ok()?.trim().parse().ok();
        self.0.iter().map(value).collect::<Option<_>>().map(Reading)
    }

    /// The joules between two readings, less than the time in which a counter restarts apart.
    pub fn joules(&self, before: &Reading, after: &Reading) -> f64 {
        let values = before.0.iter().zip(&after.0).zip(&self.0);
        let micro = values.map(|((&before, &after), counter)| match after.checked_sub(before) {
            Some(used) => used,
            None => counter.range.saturating_sub(before).saturating_add(after),
        });
        micro.sum::<u64>() as f64 / 1e6
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn energy_is_the_sum_of_packages_and_counters_restart() {
        let folder = tempfile::tempdir().unwrap();
        let zone = |name: &str, kind: &str, energy: u64| {
            let zone = folder.path().join(name);
            std::fs::create_dir_all(&zone).unwrap();
            std::fs::write(zone.join("name"), format!("{kind}\n")).unwrap();
            std::fs::write(zone.join("energy_uj"), format!("{energy}\n")).unwrap();
            std::fs::write(zone.join("max_energy_range_uj"), "10000000\n").unwrap();
        };
        zone("intel-rapl:0", "package-0", 9_000_000);
        zone("intel-rapl:0:0", "core", 5);
        zone("intel-rapl:1", "package-1", 1_000_000);
        let packages = Packages::at(folder.path()).unwrap();
        let before = packages.read().unwrap();
        zone("intel-rapl:0", "package-0", 500_000);
        zone("intel-rapl:0:0", "core", 900_000);
        zone("intel-rapl:1", "package-1", 3_000_000);
        let after = packages.read().unwrap();
        assert_eq!(packages.joules(&before, &after), 3.5);
        assert!(Packages::at(&folder.path().join("none")).is_none());
    }

    #[test]
    fn counters_that_cannot_be_read_are_as_if_absent() {
        let folder = tempfile::tempdir().unwrap();
        let zone = folder.path().join("intel-rapl:0");
        std::fs::create_dir_all(&zone).unwrap();
        std::fs::write(zone.join("name"), "package-0").unwrap();
        std::fs::write(zone.join("max_energy_range_uj"), "10").unwrap();
        assert!(Packages::at(folder.path()).is_none());
    }
}
