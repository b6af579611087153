//! Readings of a card from the files of its driver.
//!
//! Of a sleeping card only the power state is read; its facts from before remain known.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gpupool_core::{Bytes, DeviceHealth, Percent};

use crate::amd_sysfs::drm::DrmCard;
use crate::amd_sysfs::gpu_metrics;
use crate::detected_device::{DetectedDevice, Milliwatts};
use crate::reported::Reported;
use crate::source_reading::SourceReading;
use crate::{amd_names, kernel_file};

/// Name of a card whose device id is unknown.
pub(crate) const UNKNOWN_CARD_NAME: &str = "AMD GPU";

/// Number of readings between two counts of memory errors. Each count queries the card, which is slow.
const READINGS_PER_ERROR_COUNT: u32 = 60;

/// A card and the files of its readings.
#[derive(Debug)]
pub(crate) struct CardReader {
    pub card: DrmCard,
    /// Whether the files are copies, so that reading them wakes no device.
    pub is_captured: bool,
    runtime_status: PathBuf,
    power_state: PathBuf,
    /// Read the first time the card is awake.
    facts: Option<CardFacts>,
    name: Arc<str>,
    errors: Vec<String>,
    readings: u32,
}

/// Constant facts of a card, and the paths of its readings.
#[derive(Debug)]
struct CardFacts {
    /// Whether a file failed, so that all are read again.
    is_partial: bool,
    uuid: Option<Arc<str>>,
    compute_partition: Option<Arc<str>>,
    vram_total: Reported<Bytes>,
    gtt_total: Reported<Bytes>,
    vram_used: Option<PathBuf>,
    gtt_used: Option<PathBuf>,
    busy: Option<PathBuf>,
    metrics: Option<PathBuf>,
    sensors: HwmonSensors,
}

impl CardReader {
    pub(super) fn new(card: DrmCard) -> Self {
        let name = match card.device_id {
            Some(device) => amd_names::device_name(device, card.revision),
            None => UNKNOWN_CARD_NAME.to_owned(),
        };
        Self {
            runtime_status: card.device.join("power/runtime_status"),
            power_state: card.device.join("power_state"),
            facts: None,
            name: name.into(),
            errors: Vec::new(),
            readings: 0,
            is_captured: false,
            card,
        }
    }

    /// Returns the compute partition mode, if the card was awake and reported one.
    pub(super) fn compute_partition(&self) -> Option<Arc<str>> {
        self.facts.as_ref()?.compute_partition.clone()
    }

    /// Reads the card; the second value is whether a known file is gone.
    pub(super) fn read(&mut self, reading: &mut SourceReading) -> (DetectedDevice, bool) {
        let asleep = self.is_asleep();
        let may_read = !asleep || self.is_captured;
        if may_read && self.facts.as_ref().is_none_or(|facts| facts.is_partial) {
            self.read_facts();
        }
        let mut found = self.known_device();
        found.asleep = asleep;
        if asleep {
            found.health = Some(DeviceHealth::Healthy);
            return (found, false);
        }
        let Some(facts) = &self.facts else {
            return (found, false);
        };
        let stale = facts.read_into(&mut found, self.card.device_id);
        found.health = found.has_answered().then_some(DeviceHealth::Healthy);
        if self.readings.is_multiple_of(READINGS_PER_ERROR_COUNT) {
            self.errors = memory_errors(&self.card);
        }
        self.readings = self.readings.wrapping_add(1);
        for error in &self.errors {
            reading.warn(error.clone());
        }
        (found, stale)
    }

    /// Whether the card sleeps. The kernel's bus code serves both files, so reading them does not wake the card.
    fn is_asleep(&self) -> bool {
        match kernel_file::read_text(&self.runtime_status).value().map(String::as_str) {
            Some("suspended" | "suspending") => true,
            Some("active" | "resuming") => false,
            _ => kernel_file::read_text(&self.power_state).value().is_some_and(|state| state.starts_with("D3")),
        }
    }

    fn read_facts(&mut self) {
        let product = kernel_file::read_text(&self.card.device.join("product_name"));
        if let Some(product) = product.value().filter(|name| !name.eq_ignore_ascii_case("n/a")) {
            self.name = crate::reported::truncate_text(product).as_ref().into();
        }
        self.facts = Some(CardFacts::read(&self.card.device));
    }

    /// Returns the device with the facts that are known without reading the card.
    fn known_device(&self) -> DetectedDevice {
        let mut found = self.card.to_device();
        found.name = Some(self.name.clone());
        if let Some(facts) = &self.facts {
            found.uuid = facts.uuid.clone();
            found.memory.total = facts.vram_total.clone();
            found.memory.host_total = facts.gtt_total.clone();
        }
        found
    }
}

impl CardFacts {
    fn read(device: &Path) -> Self {
        let existing = |name: &str| Some(device.join(name)).filter(|path| path.exists());
        let mode = kernel_file::read_text(&device.join("current_compute_partition"));
        let unique_id = kernel_file::read_text(&device.join("unique_id"));
        let vram_total = kernel_file::read_number(&device.join("mem_info_vram_total")).map(Bytes);
        let gtt_total = kernel_file::read_number(&device.join("mem_info_gtt_total")).map(Bytes);
        Self {
            is_partial: [&unique_id, &mode].into_iter().any(has_failed)
                || [&vram_total, &gtt_total].into_iter().any(has_failed),
            uuid: unique_id.value().and_then(|text| parse_uuid(text)),
            compute_partition: mode.value().map(|mode| mode.to_ascii_uppercase().into()),
            vram_total,
            gtt_total,
            vram_used: existing("mem_info_vram_used"),
            gtt_used: existing("mem_info_gtt_used"),
            busy: existing("gpu_busy_percent"),
            metrics: existing("gpu_metrics"),
            sensors: HwmonSensors::find(device),
        }
    }

    /// Reads all changing values; returns whether a known file is gone.
    fn read_into(&self, found: &mut DetectedDevice, device_id: Option<u16>) -> bool {
        let bytes =
            |path: &Option<PathBuf>| path.as_deref().map_or(Reported::ABSENT, kernel_file::read_number).map(Bytes);
        found.memory.used = bytes(&self.vram_used);
        found.memory.host_used = bytes(&self.gtt_used);
        found.utilization = self.busy.as_deref().map_or(Reported::ABSENT, read_busy_percent);
        found.temperature_c = self.sensors.temperature_c();
        found.power = self.sensors.power();
        found.power_limit = self.sensors.power_limit();
        let gone = |path: &Option<PathBuf>, is_absent: bool| path.is_some() && is_absent;
        let stale = gone(&self.vram_used, found.memory.used.is_absent())
            || gone(&self.busy, found.utilization.is_absent())
            || self.sensors.has_temperature() && found.temperature_c.is_absent();

        let complete = found.utilization.value().is_some()
            && found.temperature_c.value().is_some()
            && found.power.value().is_some();
        if let Some(path) = self.metrics.as_deref().filter(|_| !complete) {
            let metrics = match kernel_file::read_bytes(path) {
                Ok(bytes) => gpu_metrics::parse(&bytes),
                Err(error) => kernel_file::from_io_error(&error),
            };
            found.utilization.fill(metrics.clone().and_then(|metrics| metrics.utilization));
            found.temperature_c.fill(metrics.clone().and_then(|metrics| metrics.temperature_c));
            found.power.fill(metrics.and_then(|metrics| metrics.power));
        }
        if device_id.is_some_and(amd_names::has_two_dies) && found.power == Reported::Value(Milliwatts(0)) {
            let words = "the first die of the board measures for both";
            found.power = Reported::Unsupported(words.into());
            found.power_limit = Reported::Unsupported(words.into());
        }
        stale
    }
}

fn has_failed<T>(reported: &Reported<T>) -> bool {
    matches!(reported, Reported::Failed(_))
}

fn read_busy_percent(path: &Path) -> Reported<Percent> {
    match kernel_file::read_number::<u32>(path) {
        Reported::Value(percent @ 0..=100) => Reported::Value(Percent(percent * 1000)),
        Reported::Value(percent) => Reported::Failed(format!("implausible utilization: {percent} %").into()),
        other => other.map(Percent),
    }
}

/// Parses the UUID of a device from its hexadecimal unique id; a zero id is no id.
fn parse_uuid(text: &str) -> Option<Arc<str>> {
    let digits = text.trim_start_matches("0x");
    u64::from_str_radix(digits, 16).ok().and_then(uuid_of)
}

/// Returns the UUID of a device with this unique id.
pub(crate) fn uuid_of(unique_id: u64) -> Option<Arc<str>> {
    (unique_id != 0).then(|| format!("GPU-{unique_id:016x}").into())
}

/// Returns warnings about the card's error counters.
fn memory_errors(card: &DrmCard) -> Vec<String> {
    let mut warnings = Vec::new();
    for path in paths_in(&card.device.join("ras")) {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let reported = kernel_file::read_text(&path);
        let text = reported.value().map_or("", String::as_str);
        if let Some(block) = name.strip_suffix("_err_count") {
            let count = text.lines().find_map(|line| line.trim().strip_prefix("ue:")?.trim().parse::<u64>().ok());
            if let Some(count @ 1..) = count {
                warnings.push(format!("{}: {count} uncorrectable errors in {block}", card.label()));
            }
        } else if name == "gpu_vram_bad_pages" {
            let pages = text.lines().filter(|line| line.trim_start().starts_with("0x")).count();
            if pages > 0 {
                warnings.push(format!("{}: {pages} bad memory pages are retired or about to be", card.label()));
            }
        }
    }
    warnings
}

/// Lists the paths in a folder, in order.
fn paths_in(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> =
        fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

// Sensors of a card: `hwmon` files with labels.

/// Paths of a card's sensors.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct HwmonSensors {
    /// Temperatures of the chip, best first.
    temperatures: Vec<PathBuf>,
    power_average: Option<PathBuf>,
    power_now: Option<PathBuf>,
    power_cap: Option<PathBuf>,
}

impl HwmonSensors {
    /// Finds the sensors of a device. Cards have one set; of several, the first with a temperature counts.
    pub(super) fn find(device: &Path) -> Self {
        // Kernels before 3.14 had the sensors in the device's own folder.
        let folders = paths_in(&device.join("hwmon")).into_iter().chain([device.to_owned()]);
        let sets: Vec<Self> = folders.map(|folder| Self::in_folder(&folder)).collect();
        sets.iter().find(|set| set.has_temperature()).or(sets.first()).cloned().unwrap_or_default()
    }

    fn in_folder(folder: &Path) -> Self {
        let existing = |name: &str| Some(folder.join(name)).filter(|path| path.exists());
        Self {
            temperatures: temperature_paths(folder),
            power_average: existing("power1_average"),
            power_now: existing("power1_input"),
            power_cap: existing("power1_cap"),
        }
    }

    /// Whether there is a temperature.
    pub(super) fn has_temperature(&self) -> bool {
        !self.temperatures.is_empty()
    }

    /// Reads the temperature of the chip: at its edge, else inside, else the only one.
    pub(super) fn temperature_c(&self) -> Reported<i16> {
        let read = |path: &PathBuf| match kernel_file::read_number::<i64>(path) {
            Reported::Value(thousandths) => degrees(thousandths),
            other => other.map(|_| 0),
        };
        first_value(self.temperatures.iter().map(read))
    }

    /// Reads the power draw: the average, or the current value of cards without an average.
    pub(super) fn power(&self) -> Reported<Milliwatts> {
        first_value([&self.power_average, &self.power_now].into_iter().flatten().map(|path| read_watts(path)))
    }

    /// Reads the power limit.
    pub(super) fn power_limit(&self) -> Reported<Milliwatts> {
        self.power_cap.as_deref().map_or(Reported::ABSENT, read_watts).without_zero("0 W")
    }
}

/// Returns the first value and reads no further; else the first reason for its absence.
fn first_value<T>(reported: impl Iterator<Item = Reported<T>>) -> Reported<T> {
    let mut best = Reported::ABSENT;
    for one in reported {
        best = best.or(one);
        if best.value().is_some() {
            break;
        }
    }
    best
}

/// Lists the temperatures of the chip in a folder, without those of memory and voltage regulators, which are hotter.
fn temperature_paths(folder: &Path) -> Vec<PathBuf> {
    let sensor = |entry: std::io::Result<fs::DirEntry>| {
        let name = entry.ok()?.file_name();
        let number: u32 = name.to_str()?.strip_prefix("temp")?.strip_suffix("_input")?.parse().ok()?;
        let label = kernel_file::read_text(&folder.join(format!("temp{number}_label")));
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

fn degrees(thousandths: i64) -> Reported<i16> {
    match thousandths {
        -100_000..=200_000 => Reported::Value((thousandths + 500).div_euclid(1000) as i16),
        _ => Reported::Failed(format!("implausible temperature: {thousandths} thousandths of a degree").into()),
    }
}

/// Reads a power in microwatts.
fn read_watts(path: &Path) -> Reported<Milliwatts> {
    match kernel_file::read_number::<u64>(path) {
        Reported::Value(millionths @ 0..=5_000_000_000) => Reported::Value(Milliwatts(millionths / 1000)),
        Reported::Value(millionths) => Reported::Failed(format!("implausible power: {millionths} µW").into()),
        other => other.map(Milliwatts),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::amd_sysfs::drm;
    use crate::amd_sysfs::tests::SysfsTree;

    fn reader(tree: &SysfsTree) -> CardReader {
        CardReader::new(drm::cards(&tree.path("class/drm")).unwrap().remove(0))
    }

    fn read(tree: &SysfsTree) -> DetectedDevice {
        reader(tree).read(&mut SourceReading::default()).0
    }

    const DEVICE: &str = "class/drm/card0/device";

    #[test]
    fn a_card_reports_its_memory_load_temperature_and_power() {
        let tree = SysfsTree::new();
        tree.amd_card(0, "0000:03:00.0", 0x744c);
        let found = read(&tree);
        assert_eq!(found.memory.total, Reported::Value(Bytes(16 << 30)));
        assert_eq!(found.memory.used, Reported::Value(Bytes(1 << 30)));
        assert_eq!(found.memory.host_total, Reported::Value(Bytes(8 << 30)));
        assert_eq!(found.memory.host_used, Reported::Value(Bytes(4096)));
        assert_eq!(found.utilization, Reported::Value(Percent(37_000)));
        assert_eq!(found.temperature_c, Reported::Value(61));
        assert_eq!(found.power, Reported::Value(Milliwatts(42_500)));
        assert_eq!(found.power_limit, Reported::Value(Milliwatts(300_000)));
        assert_eq!(found.uuid.as_deref(), Some("GPU-000000000000a000"));
        assert_eq!((found.minor, found.numa, found.asleep), (Some(128), None, false));
        assert_eq!(found.health, Some(DeviceHealth::Healthy));
    }

    #[test]
    fn a_file_that_is_empty_or_rubbish_loses_its_own_field_only() {
        let tree = SysfsTree::new();
        tree.amd_card(0, "0000:03:00.0", 0x744c);
        tree.file(&format!("{DEVICE}/unique_id"), "");
        tree.file(&format!("{DEVICE}/gpu_busy_percent"), "655\n");
        tree.file(&format!("{DEVICE}/mem_info_vram_used"), "\0\0\0\0");
        let found = read(&tree);
        assert_eq!(found.uuid, None);
        assert_eq!(found.utilization, Reported::Failed("implausible utilization: 655 %".into()));
        assert!(matches!(found.memory.used, Reported::Unsupported(_)));
        assert_eq!(found.temperature_c, Reported::Value(61));
    }

    #[test]
    fn a_sleeping_card_is_not_read_and_keeps_its_known_facts() {
        let tree = SysfsTree::new();
        tree.amd_card(0, "0000:03:00.0", 0x744c);
        let mut card = reader(&tree);
        let mut reading = SourceReading::default();
        card.read(&mut reading);
        tree.file(&format!("{DEVICE}/power/runtime_status"), "suspended\n");
        let (asleep, _) = card.read(&mut reading);
        assert!(asleep.asleep);
        assert_eq!(asleep.memory.total, Reported::Value(Bytes(16 << 30)));
        assert_eq!((asleep.memory.used, asleep.temperature_c), (Reported::ABSENT, Reported::ABSENT));
        assert!(asleep.uuid.is_some());
    }

    #[test]
    fn no_file_of_a_card_that_sleeps_from_the_start_is_opened() {
        let tree = SysfsTree::new();
        tree.amd_card(0, "0000:03:00.0", 0x744c);
        tree.file(&format!("{DEVICE}/power/runtime_status"), "suspended\n");
        // Opening a pipe without a writer blocks forever.
        let files = ["unique_id", "mem_info_vram_total", "mem_info_vram_used", "gpu_busy_percent", "gpu_metrics"];
        for file in files.into_iter().chain(["product_name", "hwmon/hwmon5/temp1_input", "hwmon/hwmon5/temp1_label"]) {
            let path = tree.path(&format!("{DEVICE}/{file}"));
            let _ = fs::remove_file(&path);
            rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        }
        let found = read(&tree);
        assert!(found.asleep);
        assert_eq!(found.uuid, None);
        assert_eq!(found.name.as_deref(), Some("AMD Radeon RX 7900 XT / 7900 XTX / 7900 GRE"));
    }

    #[test]
    fn a_captured_sleeping_card_still_has_its_identity() {
        let tree = SysfsTree::new();
        tree.amd_card(0, "0000:03:00.0", 0x744c);
        tree.file(&format!("{DEVICE}/power/runtime_status"), "suspended\n");
        let mut card = reader(&tree);
        card.is_captured = true;
        let (found, _) = card.read(&mut SourceReading::default());
        assert!(found.asleep);
        assert_eq!(found.uuid.as_deref(), Some("GPU-000000000000a000"));
        assert_eq!(found.memory.total, Reported::Value(Bytes(16 << 30)));
        assert_eq!((found.memory.used, found.utilization), (Reported::ABSENT, Reported::ABSENT));
    }

    #[test]
    fn a_card_without_runtime_status_sleeps_by_its_power_state() {
        let tree = SysfsTree::new();
        tree.amd_card(0, "0000:03:00.0", 0x744c);
        tree.remove(&format!("{DEVICE}/power/runtime_status"));
        assert!(!read(&tree).asleep);
        for (state, asleep) in [("D0", false), ("D3cold", true), ("D3hot", true), ("unknown", false)] {
            tree.file(&format!("{DEVICE}/power_state"), state);
            assert_eq!(read(&tree).asleep, asleep, "{state}");
        }
    }

    #[test]
    fn the_binary_table_fills_in_what_has_no_file_and_nothing_else() {
        let tree = SysfsTree::new();
        tree.amd_card(0, "0000:03:00.0", 0x744c);
        let mut table = vec![0xff; 120];
        table[..8].copy_from_slice(&[120, 0, 1, 3, 99, 0, 99, 0]);
        table[16..18].copy_from_slice(&[88, 0]);
        table[22..24].copy_from_slice(&[77, 0]);
        tree.file(&format!("{DEVICE}/gpu_metrics"), &table);
        assert_eq!(read(&tree).utilization, Reported::Value(Percent(37_000)));
        tree.remove(&format!("{DEVICE}/gpu_busy_percent"));
        let found = read(&tree);
        assert_eq!(found.utilization, Reported::Value(Percent(88_000)));
        assert_eq!((found.temperature_c, found.power), (Reported::Value(61), Reported::Value(Milliwatts(42_500))));
        tree.remove(&format!("{DEVICE}/hwmon"));
        let found = read(&tree);
        assert_eq!((found.temperature_c, found.power), (Reported::Value(99), Reported::Value(Milliwatts(77_000))));
    }

    #[test]
    fn a_failed_file_is_read_again() {
        let tree = SysfsTree::new();
        tree.amd_card(0, "0000:03:00.0", 0x744c);
        let total = format!("{DEVICE}/mem_info_vram_total");
        tree.remove(&total);
        tree.refuse(&total);
        let mut card = reader(&tree);
        let mut reading = SourceReading::default();
        assert!(matches!(card.read(&mut reading).0.memory.total, Reported::Failed(_)));
        tree.remove(&total);
        tree.file(&total, "4096\n");
        assert_eq!(card.read(&mut reading).0.memory.total, Reported::Value(Bytes(4096)));
    }

    #[test]
    fn the_second_die_of_a_board_measures_no_power() {
        let tree = SysfsTree::new();
        tree.amd_card(0, "0000:c1:00.0", 0x7408);
        tree.file(&format!("{DEVICE}/hwmon/hwmon5/power1_average"), "0\n");
        assert!(matches!(read(&tree).power, Reported::Unsupported(_)));
    }

    #[test]
    fn uncorrectable_errors_are_a_warning_and_leave_the_card_healthy() {
        let tree = SysfsTree::new();
        tree.amd_card(0, "0000:c1:00.0", 0x740f);
        tree.file(&format!("{DEVICE}/ras/umc_err_count"), "ue: 2\nce: 5\n");
        tree.file(&format!("{DEVICE}/ras/gfx_err_count"), "ue: 0\nce: 0\n");
        tree.file(&format!("{DEVICE}/ras/gpu_vram_bad_pages"), "0x00000001 : 0x00001000 : R\n");
        let mut reading = SourceReading::default();
        let (found, _) = reader(&tree).read(&mut reading);
        assert_eq!(found.health, Some(DeviceHealth::Healthy));
        let expected = [
            "0000:c1:00.0: 1 bad memory pages are retired or about to be",
            "0000:c1:00.0: 2 uncorrectable errors in umc",
        ];
        assert_eq!(reading.warnings, expected);
    }

    fn sensors(files: &[(&str, &str)]) -> (SysfsTree, HwmonSensors) {
        let tree = SysfsTree::new();
        for (file, content) in files {
            tree.file(&format!("device/hwmon/hwmon3/{file}"), content);
        }
        let sensors = HwmonSensors::find(&tree.path("device"));
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
        assert_eq!(sensors(&files).1.temperature_c(), Reported::Value(55));
        assert_eq!(sensors(&files[..4]).1.temperature_c(), Reported::Value(70));
        assert_eq!(sensors(&files[..2]).1.temperature_c(), Reported::ABSENT);
        assert_eq!(sensors(&[("temp1_input", "27000")]).1.temperature_c(), Reported::Value(27));
        assert_eq!(sensors(&[("temp1_input", "-4600")]).1.temperature_c(), Reported::Value(-5));
    }

    #[test]
    fn power_is_the_average_or_else_what_it_is_now() {
        let both = [("power1_average", "3103000"), ("power1_input", "3142000")];
        assert_eq!(sensors(&both).1.power(), Reported::Value(Milliwatts(3103)));
        assert_eq!(sensors(&both[1..]).1.power(), Reported::Value(Milliwatts(3142)));
        assert_eq!(sensors(&[]).1.power(), Reported::ABSENT);
        let (_tree, empty) = sensors(&[("power1_average", ""), ("power1_cap", "99000000")]);
        assert!(matches!(empty.power(), Reported::Unsupported(_)));
        assert_eq!(empty.power_limit(), Reported::Value(Milliwatts(99_000)));
    }

    #[test]
    fn a_power_limit_of_zero_is_no_limit() {
        assert_eq!(sensors(&[("power1_cap", "0")]).1.power_limit(), Reported::Unsupported("0 W".into()));
    }

    #[test]
    fn old_kernels_keep_the_sensors_with_the_device() {
        let tree = SysfsTree::new();
        tree.file("device/temp1_input", "65000");
        assert_eq!(HwmonSensors::find(&tree.path("device")).temperature_c(), Reported::Value(65));
    }

    #[test]
    fn implausible_sensor_values_are_failures() {
        let (_tree, sensors) = sensors(&[("temp1_input", "511000"), ("power1_input", "4294967295000")]);
        assert!(matches!(sensors.temperature_c(), Reported::Failed(_)));
        assert!(matches!(sensors.power(), Reported::Failed(_)));
    }
}
