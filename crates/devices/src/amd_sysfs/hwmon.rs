//! The sensors of a card, as `hwmon` files with labels.

use std::fs;
use std::path::{Path, PathBuf};

use crate::found::Watts;
use crate::kernel_file;
use crate::told::Told;

/// The files of a card's sensors that exist.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Sensors {
    /// Temperatures of the chip, best first.
    temperatures: Vec<PathBuf>,
    power_average: Option<PathBuf>,
    power_now: Option<PathBuf>,
    power_cap: Option<PathBuf>,
}

impl Sensors {
    /// Looks below the folder of a device. Cards have one set; of several the first that knows a temperature counts.
    pub fn find(device: &Path) -> Self {
        let mut folders: Vec<PathBuf> = fs::read_dir(device.join("hwmon"))
            .into_iter()
            .flatten()
            .filter_map(|entry| Some(entry.ok()?.path()))
            .collect();
        folders.sort();
        // Kernels before 3.14 kept the sensors with the device itself.
        folders.push(device.to_owned());
        let mut sets = folders.iter().map(|folder| Self::in_folder(folder));
        let first = sets.next().unwrap_or_default();
        if first.temperatures.is_empty() {
            return sets.find(|set| !set.temperatures.is_empty()).unwrap_or(first);
        }
        first
    }

    fn in_folder(folder: &Path) -> Self {
        let existing = |name: &str| Some(folder.join(name)).filter(|path| path.exists());
        Self {
            temperatures: temperatures(folder),
            power_average: existing("power1_average"),
            power_now: existing("power1_input"),
            power_cap: existing("power1_cap"),
        }
    }

    /// Whether there is a temperature at all.
    pub fn has_temperature(&self) -> bool {
        !self.temperatures.is_empty()
    }

    /// Temperature of the chip: at its edge, or else inside, or the only one there is.
    pub fn temperature_c(&self) -> Told<i16> {
        let read = |path: &PathBuf| match kernel_file::number::<i64>(path) {
            Told::Value(thousandths) => degrees(thousandths),
            other => other.map(|_| 0),
        };
        first(self.temperatures.iter().map(read))
    }

    /// Power drawn: the average, or what it is now on cards that have no average.
    pub fn power(&self) -> Told<Watts> {
        first([&self.power_average, &self.power_now].into_iter().flatten().map(|path| watts(path)))
    }

    /// The most it may draw.
    pub fn power_limit(&self) -> Told<Watts> {
        match first(self.power_cap.iter().map(|path| watts(path))) {
            Told::Value(Watts(0)) => Told::Unsupported("0 W".into()),
            told => told,
        }
    }
}

/// The first value, reading no further; else the first that says why there is none.
fn first<T>(told: impl Iterator<Item = Told<T>>) -> Told<T> {
    let mut best = Told::ABSENT;
    for one in told {
        best = best.or(one);
        if best.value().is_some() {
            break;
        }
    }
    best
}

/// The temperatures of the chip in a folder; memory and voltage regulators are hotter and not meant.
fn temperatures(folder: &Path) -> Vec<PathBuf> {
    let sensor = |entry: std::io::Result<fs::DirEntry>| {
        let name = entry.ok()?.file_name();
        let number: u32 = name.to_str()?.strip_prefix("temp")?.strip_suffix("_input")?.parse().ok()?;
        let label = kernel_file::text(&folder.join(format!("temp{number}_label")));
        let rank = match label.value().map(String::as_str) {
            Some("edge") => 0,
            Some("junction" | "hotspot") => 1,
            None => 2,
            Some(_) => return None,
        };
        Some((rank, number, folder.join(name)))
    };
    let mut found: Vec<_> = fs::read_dir(folder).into_iter().flatten().filter_map(sensor).collect();
    found.sort();
    found.into_iter().map(|(_, _, path)| path).collect()
}

fn degrees(thousandths: i64) -> Told<i16> {
    match thousandths {
        -100_000..=200_000 => Told::Value((thousandths + 500).div_euclid(1000) as i16),
        _ => Told::Failed(format!("a temperature of {thousandths} thousandths of a degree").into()),
    }
}

/// The power in a file that counts millionths of a watt.
fn watts(path: &Path) -> Told<Watts> {
    match kernel_file::number::<u64>(path) {
        Told::Value(millionths @ 0..=5_000_000_000) => Told::Value(Watts(millionths / 1000)),
        Told::Value(millionths) => Told::Failed(format!("a power of {millionths} millionths of a watt").into()),
        other => other.map(Watts),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::amd_sysfs::tree::Tree;

    fn sensors(files: &[(&str, &str)]) -> (Tree, Sensors) {
        let tree = Tree::new();
        for (file, content) in files {
            tree.file(&format!("device/hwmon/hwmon3/{file}"), content);
        }
        let sensors = Sensors::find(&tree.path("device"));
        (tree, sensors)
    }

    #[test]
    fn the_edge_of_the_chip_is_its_temperature() {
        let files = [
            ("temp1_label", "mem"),
            ("temp1_input", "90000"),
            ("temp2_label", "junction"),
            ("temp2_input", "70000"),
            ("temp3_label", "edge\n\0\0"),
            ("temp3_input", "55499"),
        ];
        assert_eq!(sensors(&files).1.temperature_c(), Told::Value(55));
        assert_eq!(sensors(&files[..4]).1.temperature_c(), Told::Value(70));
        assert_eq!(sensors(&files[..2]).1.temperature_c(), Told::ABSENT);
        assert_eq!(sensors(&[("temp1_input", "27000")]).1.temperature_c(), Told::Value(27));
        assert_eq!(sensors(&[("temp1_input", "-4600")]).1.temperature_c(), Told::Value(-5));
    }

    #[test]
    fn power_is_the_average_or_else_what_it_is_now() {
        let both = [("power1_average", "3103000"), ("power1_input", "3142000")];
        assert_eq!(sensors(&both).1.power(), Told::Value(Watts(3103)));
        assert_eq!(sensors(&both[1..]).1.power(), Told::Value(Watts(3142)));
        assert_eq!(sensors(&[]).1.power(), Told::ABSENT);
        let (_tree, empty) = sensors(&[("power1_average", ""), ("power1_cap", "99000000")]);
        assert!(matches!(empty.power(), Told::Unsupported(_)));
        assert_eq!(empty.power_limit(), Told::Value(Watts(99_000)));
    }

    #[test]
    fn a_limit_of_nothing_is_no_limit() {
        assert_eq!(sensors(&[("power1_cap", "0")]).1.power_limit(), Told::Unsupported("0 W".into()));
    }

    #[test]
    fn old_kernels_keep_the_sensors_with_the_device() {
        let tree = Tree::new();
        tree.file("device/temp1_input", "65000");
        assert_eq!(Sensors::find(&tree.path("device")).temperature_c(), Told::Value(65));
    }

    #[test]
    fn what_cannot_be_is_a_failure() {
        let (_tree, sensors) = sensors(&[("temp1_input", "511000"), ("power1_input", "4294967295000")]);
        assert!(matches!(sensors.temperature_c(), Told::Failed(_)));
        assert!(matches!(sensors.power(), Told::Failed(_)));
    }
}
