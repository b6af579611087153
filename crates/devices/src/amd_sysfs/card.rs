//! What a card reports now, from the files its driver keeps.
//!
//! A card that is asleep is asked nothing but whether it is; what it said when it was awake is remembered.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gpupool_core::{Bytes, DeviceHealth, Percent};

use crate::amd_sysfs::drm::Card;
use crate::amd_sysfs::gpu_metrics;
use crate::detected_device::{DetectedDevice, Milliwatts};
use crate::reported::Reported;
use crate::source_reading::SourceReading;
use crate::{amd_names, kernel_file};

/// The name of a card of which not even the id is known.
pub(crate) const NAMELESS: &str = "AMD GPU";

/// Errors of the memory are counted by asking the card, which is slow: only every so many readings.
const READINGS_PER_ERROR_COUNT: u32 = 60;

/// A card and where its readings are.
#[derive(Debug)]
pub(crate) struct CardReader {
    pub card: Card,
    /// Set where its files are copies, so that reading them wakes nothing.
    pub is_captured: bool,
    runtime_status: PathBuf,
    power_state: PathBuf,
    /// Learned the first time the card was awake.
    facts: Option<Facts>,
    name: Arc<str>,
    errors: Vec<String>,
    readings: u32,
}

/// What stays the same, and the files of what does not.
#[derive(Debug)]
struct Facts {
    /// Set where a file failed, so that it is tried again.
    is_partial: bool,
    uuid: Option<Arc<str>>,
    compute_partition: Option<Arc<str>>,
    vram_total: Reported<Bytes>,
    gtt_total: Reported<Bytes>,
    vram_used: Option<PathBuf>,
    gtt_used: Option<PathBuf>,
    busy: Option<PathBuf>,
    metrics: Option<PathBuf>,
    sensors: Sensors,
}

impl CardReader {
    pub(super) fn new(card: Card) -> Self {
        let name = match card.device_id {
            Some(device) => amd_names::name(device, card.revision),
            None => NAMELESS.to_owned(),
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

    /// How the card is cut, where it was awake and said so.
    pub(super) fn compute_partition(&self) -> Option<Arc<str>> {
        self.facts.as_ref()?.compute_partition.clone()
    }

    /// The card with what it reports now, and whether files that were there are gone.
    pub(super) fn read(&mut self, snapshot: &mut SourceReading) -> (DetectedDevice, bool) {
        let asleep = self.is_asleep();
        let may_ask = !asleep || self.is_captured;
        if may_ask && self.facts.as_ref().is_none_or(|facts| facts.is_partial) {
            self.learn();
        }
        let mut found = self.known();
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
            snapshot.warn(error.clone());
        }
        (found, stale)
    }

    /// Both files are kept by the kernel's bus code, so that reading them does not wake the card.
    fn is_asleep(&self) -> bool {
        match kernel_file::read_text(&self.runtime_status).value().map(String::as_str) {
            Some("suspended" | "suspending") => true,
            Some("active" | "resuming") => false,
            _ => kernel_file::read_text(&self.power_state).value().is_some_and(|state| state.starts_with("D3")),
        }
    }

    fn learn(&mut self) {
        let product = kernel_file::read_text(&self.card.device.join("product_name"));
        if let Some(product) = product.value().filter(|name| !name.eq_ignore_ascii_case("n/a")) {
            self.name = crate::reported::truncate_text(product).as_ref().into();
        }
        self.facts = Some(Facts::learn(&self.card.device));
    }

    /// What is known without asking the card.
    fn known(&self) -> DetectedDevice {
        let mut found = self.card.found();
        found.name = Some(self.name.clone());
        if let Some(facts) = &self.facts {
            found.uuid = facts.uuid.clone();
            found.memory.total = facts.vram_total.clone();
            found.memory.host_total = facts.gtt_total.clone();
        }
        found
    }
}

impl Facts {
    fn learn(device: &Path) -> Self {
        let existing = |name: &str| Some(device.join(name)).filter(|path| path.exists());
        let mode = kernel_file::read_text(&device.join("current_compute_partition"));
        let unique_id = kernel_file::read_text(&device.join("unique_id"));
        let vram_total = kernel_file::read_number(&device.join("mem_info_vram_total")).map(Bytes);
        let gtt_total = kernel_file::read_number(&device.join("mem_info_gtt_total")).map(Bytes);
        Self {
            is_partial: [&unique_id, &mode].into_iter().any(has_failed)
                || [&vram_total, &gtt_total].into_iter().any(has_failed),
            uuid: unique_id.value().and_then(|text| uuid(text)),
            compute_partition: mode.value().map(|mode| mode.to_ascii_uppercase().into()),
            vram_total,
            gtt_total,
            vram_used: existing("mem_info_vram_used"),
            gtt_used: existing("mem_info_gtt_used"),
            busy: existing("gpu_busy_percent"),
            metrics: existing("gpu_metrics"),
            sensors: Sensors::find(device),
        }
    }

    /// Reads everything that changes; says whether a file that was there is gone.
    fn read_into(&self, found: &mut DetectedDevice, device_id: Option<u16>) -> bool {
        let bytes =
            |path: &Option<PathBuf>| path.as_deref().map_or(Reported::ABSENT, kernel_file::read_number).map(Bytes);
        found.memory.used = bytes(&self.vram_used);
        found.memory.host_used = bytes(&self.gtt_used);
        found.utilization = self.busy.as_deref().map_or(Reported::ABSENT, busy);
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

fn has_failed<T>(told: &Reported<T>) -> bool {
    matches!(told, Reported::Failed(_))
}

fn busy(path: &Path) -> Reported<Percent> {
    match kernel_file::read_number::<u32>(path) {
        Reported::Value(percent @ 0..=100) => Reported::Value(Percent(percent * 1000)),
        Reported::Value(percent) => Reported::Failed(format!("{percent} % busy").into()),
        other => other.map(Percent),
    }
}

/// The identity that programs are given, from the hexadecimal number in a file; zero means there is none.
fn uuid(text: &str) -> Option<Arc<str>> {
    let digits = text.trim_start_matches("0x");
    u64::from_str_radix(digits, 16).ok().and_then(uuid_of)
}

/// The identity of a device by its unique number.
pub(crate) fn uuid_of(unique_id: u64) -> Option<Arc<str>> {
    (unique_id != 0).then(|| format!("GPU-{unique_id:016x}").into())
}

/// What the card's error counters say that a person should know.
fn memory_errors(card: &Card) -> Vec<String> {
    let mut warnings = Vec::new();
    for path in paths_in(&card.device.join("ras")) {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let told = kernel_file::read_text(&path);
        let text = told.value().map_or("", String::as_str);
        if let Some(block) = name.strip_suffix("_err_count") {
            let count = text.lines().find_map(|line| line.trim().strip_prefix("ue:")?.trim().parse::<u64>().ok());
            if let Some(count @ 1..) = count {
                warnings.push(format!("{}: {count} uncorrectable errors in {block}", card.spelled()));
            }
        } else if name == "gpu_vram_bad_pages" {
            let pages = text.lines().filter(|line| line.trim_start().starts_with("0x")).count();
            if pages > 0 {
                warnings.push(format!("{}: {pages} bad pages of memory are retired or about to be", card.spelled()));
            }
        }
    }
    warnings
}

/// What is in a folder, in order.
fn paths_in(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> =
        fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

// The sensors of a card, as `hwmon` files with labels.

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
    pub(super) fn find(device: &Path) -> Self {
        // Kernels before 3.14 kept the sensors with the device itself.
        let folders = paths_in(&device.join("hwmon")).into_iter().chain([device.to_owned()]);
        let sets: Vec<Self> = folders.map(|folder| Self::in_folder(&folder)).collect();
        sets.iter().find(|set| set.has_temperature()).or(sets.first()).cloned().unwrap_or_default()
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
    pub(super) fn has_temperature(&self) -> bool {
        !self.temperatures.is_empty()
    }

    /// Temperature of the chip: at its edge, or else inside, or the only one there is.
    pub(super) fn temperature_c(&self) -> Reported<i16> {
        let read = |path: &PathBuf| match kernel_file::read_number::<i64>(path) {
            Reported::Value(thousandths) => degrees(thousandths),
            other => other.map(|_| 0),
        };
        first(self.temperatures.iter().map(read))
    }

    /// Power drawn: the average, or what it is now on cards that have no average.
    pub(super) fn power(&self) -> Reported<Milliwatts> {
        first([&self.power_average, &self.power_now].into_iter().flatten().map(|path| watts(path)))
    }

    /// The most it may draw.
    pub(super) fn power_limit(&self) -> Reported<Milliwatts> {
        self.power_cap.as_deref().map_or(Reported::ABSENT, watts).without_zero("0 W")
    }
}

/// The first value, reading no further; else the first that says why there is none.
fn first<T>(told: impl Iterator<Item = Reported<T>>) -> Reported<T> {
    let mut best = Reported::ABSENT;
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
        _ => Reported::Failed(format!("a temperature of {thousandths} thousandths of a degree").into()),
    }
}

/// The power in a file that counts millionths of a watt.
fn watts(path: &Path) -> Reported<Milliwatts> {
    match kernel_file::read_number::<u64>(path) {
        Reported::Value(millionths @ 0..=5_000_000_000) => Reported::Value(Milliwatts(millionths / 1000)),
        Reported::Value(millionths) => Reported::Failed(format!("a power of {millionths} millionths of a watt").into()),
        other => other.map(Milliwatts),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::amd_sysfs::drm;
    use crate::amd_sysfs::tests::Tree;

    fn reader(tree: &Tree) -> CardReader {
        CardReader::new(drm::cards(&tree.path("class/drm")).unwrap().remove(0))
    }

    fn read(tree: &Tree) -> DetectedDevice {
        reader(tree).read(&mut SourceReading::default()).0
    }

    const DEVICE: &str = "class/drm/card0/device";

    #[test]
    fn a_card_reports_its_memory_load_temperature_and_power() {
        let tree = Tree::new();
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
        let tree = Tree::new();
        tree.amd_card(0, "0000:03:00.0", 0x744c);
        tree.file(&format!("{DEVICE}/unique_id"), "");
        tree.file(&format!("{DEVICE}/gpu_busy_percent"), "655\n");
        tree.file(&format!("{DEVICE}/mem_info_vram_used"), "\0\0\0\0");
        let found = read(&tree);
        assert_eq!(found.uuid, None);
        assert_eq!(found.utilization, Reported::Failed("655 % busy".into()));
        assert!(matches!(found.memory.used, Reported::Unsupported(_)));
        assert_eq!(found.temperature_c, Reported::Value(61));
    }

    #[test]
    fn a_sleeping_card_is_asked_nothing_and_what_it_said_before_is_kept() {
        let tree = Tree::new();
        tree.amd_card(0, "0000:03:00.0", 0x744c);
        let mut card = reader(&tree);
        let mut snapshot = SourceReading::default();
        card.read(&mut snapshot);
        tree.file(&format!("{DEVICE}/power/runtime_status"), "suspended\n");
        let (asleep, _) = card.read(&mut snapshot);
        assert!(asleep.asleep);
        assert_eq!(asleep.memory.total, Reported::Value(Bytes(16 << 30)));
        assert_eq!((asleep.memory.used, asleep.temperature_c), (Reported::ABSENT, Reported::ABSENT));
        assert!(asleep.uuid.is_some());
    }

    #[test]
    fn no_file_of_a_card_that_sleeps_from_the_start_is_opened() {
        let tree = Tree::new();
        tree.amd_card(0, "0000:03:00.0", 0x744c);
        tree.file(&format!("{DEVICE}/power/runtime_status"), "suspended\n");
        // A pipe that nobody writes to stops whoever opens it for ever.
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
    fn a_captured_card_that_slept_still_says_who_it_is() {
        let tree = Tree::new();
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
        let tree = Tree::new();
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
        let tree = Tree::new();
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
    fn what_failed_once_is_tried_again() {
        let tree = Tree::new();
        tree.amd_card(0, "0000:03:00.0", 0x744c);
        let total = format!("{DEVICE}/mem_info_vram_total");
        tree.remove(&total);
        tree.refuse(&total);
        let mut card = reader(&tree);
        let mut snapshot = SourceReading::default();
        assert!(matches!(card.read(&mut snapshot).0.memory.total, Reported::Failed(_)));
        tree.remove(&total);
        tree.file(&total, "4096\n");
        assert_eq!(card.read(&mut snapshot).0.memory.total, Reported::Value(Bytes(4096)));
    }

    #[test]
    fn the_second_die_of_a_board_measures_no_power() {
        let tree = Tree::new();
        tree.amd_card(0, "0000:c1:00.0", 0x7408);
        tree.file(&format!("{DEVICE}/hwmon/hwmon5/power1_average"), "0\n");
        assert!(matches!(read(&tree).power, Reported::Unsupported(_)));
    }

    #[test]
    fn uncorrectable_errors_are_a_warning_and_not_a_verdict() {
        let tree = Tree::new();
        tree.amd_card(0, "0000:c1:00.0", 0x740f);
        tree.file(&format!("{DEVICE}/ras/umc_err_count"), "ue: 2\nce: 5\n");
        tree.file(&format!("{DEVICE}/ras/gfx_err_count"), "ue: 0\nce: 0\n");
        tree.file(&format!("{DEVICE}/ras/gpu_vram_bad_pages"), "0x00000001 : 0x00001000 : R\n");
        let mut snapshot = SourceReading::default();
        let (found, _) = reader(&tree).read(&mut snapshot);
        assert_eq!(found.health, Some(DeviceHealth::Healthy));
        let expected = [
            "0000:c1:00.0: 1 bad pages of memory are retired or about to be",
            "0000:c1:00.0: 2 uncorrectable errors in umc",
        ];
        assert_eq!(snapshot.warnings, expected);
    }

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
    fn a_limit_of_nothing_is_no_limit() {
        assert_eq!(sensors(&[("power1_cap", "0")]).1.power_limit(), Reported::Unsupported("0 W".into()));
    }

    #[test]
    fn old_kernels_keep_the_sensors_with_the_device() {
        let tree = Tree::new();
        tree.file("device/temp1_input", "65000");
        assert_eq!(Sensors::find(&tree.path("device")).temperature_c(), Reported::Value(65));
    }

    #[test]
    fn what_cannot_be_is_a_failure() {
        let (_tree, sensors) = sensors(&[("temp1_input", "511000"), ("power1_input", "4294967295000")]);
        assert!(matches!(sensors.temperature_c(), Reported::Failed(_)));
        assert!(matches!(sensors.power(), Reported::Failed(_)));
    }
}
