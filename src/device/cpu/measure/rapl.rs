//! Energy of the processor packages, from the counters that Linux exposes in `/sys/class/powercap`.
//!
//! A counter wraps at a limit of its own, after some hundred kilojoules. Reading it less often than that (some minutes
//! of full load) misses whole rounds. Since Linux 5.10 only the superuser may read the counters.

#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};

use parking_lot::Mutex;

const ZONES: &str = "/sys/class/powercap";

/// Energy counters of all packages.
#[derive(Debug)]
pub(crate) struct PackageEnergy {
    packages: Mutex<Vec<Package>>,
}

#[derive(Debug)]
struct Package {
    counter: PathBuf,
    /// Value at which the counter wraps.
    limit_uj: u64,
    last_uj: u64,
    used_uj: u64,
}

impl PackageEnergy {
    /// Opens the counters of all packages that this process may read.
    pub(crate) fn from_system() -> Self {
        Self::from_folder(Path::new(ZONES))
    }

    fn from_folder(folder: &Path) -> Self {
        let zones = std::fs::read_dir(folder).into_iter().flatten().flatten();
        // Zones inside a package and the zone of the whole platform overlap the packages' counters.
        let packages = zones.filter_map(|zone| {
            let zone = zone.path();
            let name = std::fs::read_to_string(zone.join("name")).ok()?;
            let counter = zone.join("energy_uj");
            let last_uj = number(&counter).filter(|_| name.starts_with("package-"))?;
            Some(Package { limit_uj: number(&zone.join("max_energy_range_uj"))?, counter, last_uj, used_uj: 0 })
        });
        Self { packages: Mutex::new(packages.collect()) }
    }

    /// Energy used since `self` was created, in microjoules; `None` without a readable counter.
    pub(crate) fn used_uj(&self) -> Option<u64> {
        let mut packages = self.packages.lock();
        packages.iter_mut().map(Package::used_uj).reduce(u64::saturating_add)
    }
}

impl Package {
    fn used_uj(&mut self) -> u64 {
        if let Some(now_uj) = number(&self.counter) {
            let used_uj = match now_uj.checked_sub(self.last_uj) {
                Some(used_uj) => used_uj,
                None => self.limit_uj.saturating_sub(self.last_uj).saturating_add(now_uj),
            };
            (self.last_uj, self.used_uj) = (now_uj, self.used_uj.saturating_add(used_uj));
        }
        self.used_uj
    }
}

fn number(file: &Path) -> Option<u64> {
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_added_and_may_start_again() {
        let folder = std::env::temp_dir().join(format!("ascend-llm-powercap-{}", std::process::id()));
        let zone = |zone: &str, name: &str, energy_uj: &str| {
            let zone = folder.join(zone);
            std::fs::create_dir_all(&zone).unwrap();
            std::fs::write(zone.join("name"), format!("{name}\n")).unwrap();
            std::fs::write(zone.join("max_energy_range_uj"), "1000\n").unwrap();
            std::fs::write(zone.join("energy_uj"), format!("{energy_uj}\n")).unwrap();
        };
        assert_eq!(PackageEnergy::from_folder(&folder).used_uj(), None);
        zone("intel-rapl:0", "package-0", "900");
        zone("intel-rapl:1", "package-1", "5");
        zone("intel-rapl:0:0", "core", "70");
        zone("intel-rapl:2", "psys", "800");
        zone("broken", "package-2", "not a number");
        let energy = PackageEnergy::from_folder(&folder);
        assert_eq!(energy.used_uj(), Some(0));
        zone("intel-rapl:0", "package-0", "950");
        zone("intel-rapl:1", "package-1", "25");
        assert_eq!(energy.used_uj(), Some(70));
        zone("intel-rapl:0", "package-0", "30");
        assert_eq!(energy.used_uj(), Some(150), "a counter that started again");
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(energy.used_uj(), Some(150), "nothing new is known");
    }
}
