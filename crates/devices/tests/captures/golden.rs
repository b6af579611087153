//! Golden values of every NVIDIA and AMD capture, and damaged captures.
//!
//! `fixtures/captures.golden` has a line for each device of each capture of a real machine, `fixtures/own.golden` of
//! our own; `docs/testing.md` states which values were compared with the files. After an intended change,
//! `GPUPOOL_WRITE_GOLDEN=1 cargo test -p gpupool-devices --test captures` rewrites them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use gpupool_devices::capture::{self, CaptureFormat};
use gpupool_devices::{DeviceReport, DevicesReport, ErrorReport, SourceReading};

use crate::capture_fixtures::{capture_roots, own_captures};

/// Folders whose entries are captured trees.
const TREE_COLLECTIONS: [&str; 3] = ["amd/lact-sysfs", "nvidia/lact-sysfs", "amd/k8s-device-plugin-kfd"];
const SINGLE_TREES: [&str; 1] = ["amd/procfs-drm"];
/// Written from specifications, not captured.
const EXCLUDED_FOLDERS: [&str; 1] = ["nvidia/mock-nvml-NOT-CAPTURES"];

/// Returns every capture below `root`, with a tree as one.
fn find_captures(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for vendor in ["nvidia", "amd"] {
        collect(root, &root.join(vendor), &mut found);
    }
    found.sort();
    found
}

fn collect(root: &Path, folder: &Path, found: &mut Vec<PathBuf>) {
    let name = folder.strip_prefix(root).unwrap().to_str().unwrap();
    if EXCLUDED_FOLDERS.contains(&name) {
        return;
    }
    if SINGLE_TREES.contains(&name) {
        found.push(folder.to_owned());
        return;
    }
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let is_text_folder = path.file_name().is_some_and(|name| name == "debugfs-parsing");
        if path.is_dir() && (is_text_folder || !TREE_COLLECTIONS.contains(&name)) {
            collect(root, &path, found);
        } else {
            found.push(path);
        }
    }
}

fn report(path: &Path) -> DevicesReport {
    match capture::read_capture(path, None) {
        Ok(snapshot) => DevicesReport::new(&snapshot, None),
        Err(error) => DevicesReport::new(
            &SourceReading::default(),
            Some(ErrorReport { code: error.code(), message: error.to_string() }),
        ),
    }
}

/// Returns the golden text of a capture: devices, links by kind, number of warnings, and error.
fn summary(report: &DevicesReport) -> String {
    let mut text = String::new();
    if let Some(error) = &report.error {
        writeln!(text, "  error {}", error.code).unwrap();
    }
    for device in &report.devices {
        writeln!(text, "  {}", device_line(device)).unwrap();
    }
    let mut links: BTreeMap<String, usize> = BTreeMap::new();
    for link in &report.links {
        let width = link.lanes.or(link.hops).map_or_else(String::new, |number| format!(" {number}"));
        *links.entry(format!("{}{width}", link.kind)).or_default() += 1;
    }
    for (kind, count) in links {
        writeln!(text, "  link {kind} ×{count}").unwrap();
    }
    if !report.warnings.is_empty() {
        writeln!(text, "  warnings {}", report.warnings.len()).unwrap();
    }
    text
}

fn device_line(device: &DeviceReport) -> String {
    fn or_dash(value: Option<impl ToString>) -> String {
        value.map_or_else(|| "-".to_owned(), |value| value.to_string())
    }
    let processes = if device.unsupported.contains(&"processes") || device.failed.contains_key("processes") {
        "-".to_owned()
    } else {
        device.processes.len().to_string()
    };
    let partition = device.partition.as_ref().map(|partition| {
        let value = serde_json::to_value(partition).unwrap();
        let part = |name: &str| value.get(name).filter(|part| !part.is_null()).map(ToString::to_string);
        [part("gpu_instance"), part("compute_instance"), part("profile"), part("id"), part("mode"), part("parts")]
            .into_iter()
            .flatten()
            .collect::<Vec<_>>()
            .join("/")
    });
    [
        device.gpu_id.to_string(),
        or_dash(device.name.as_deref()),
        or_dash(device.pci.as_deref()),
        if device.uuid.is_some() { "uuid" } else { "-" }.to_owned(),
        format!("part {}", or_dash(partition)),
        format!("minor {}", or_dash(device.minor)),
        format!(
            "memory {}/{} reserved {}{}",
            or_dash(device.memory_used_mib),
            or_dash(device.memory_total_mib),
            or_dash(device.memory_reserved_mib),
            if device.unified_memory { " unified" } else { "" }
        ),
        format!("host {}/{}", or_dash(device.host_memory_used_mib), or_dash(device.host_memory_total_mib)),
        format!("busy {}", or_dash(device.utilization_percent)),
        format!("temp {}", or_dash(device.temperature_c)),
        format!("power {}/{}", or_dash(device.power_w), or_dash(device.power_limit_w)),
        format!("driver {}", or_dash(device.driver.as_deref())),
        format!("mig {}", or_dash(device.mig)),
        format!("processes {processes}"),
        format!("failed {:?}", device.failed.keys().collect::<Vec<_>>()),
        or_dash(device.health),
    ]
    .join(" | ")
}

#[test]
fn every_capture_has_its_golden_values() {
    for root in capture_roots() {
        let mut now = String::new();
        for path in find_captures(&root) {
            let report = report(&path);
            // Formats that no source reads are refused.
            if report.error.as_ref().is_some_and(|error| error.code == "unknown_format") {
                continue;
            }
            writeln!(now, "{}", path.strip_prefix(&root).unwrap().display()).unwrap();
            now += &summary(&report);
        }
        let golden = if root == own_captures() { "own.golden" } else { "captures.golden" };
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(golden);
        if std::env::var_os("GPUPOOL_WRITE_GOLDEN").is_some() {
            fs::write(&golden, &now).unwrap();
        }
        let known = fs::read_to_string(&golden).unwrap();
        for (number, (known, now)) in known.lines().zip(now.lines()).enumerate() {
            assert_eq!(now, known, "line {} of {}", number + 1, golden.display());
        }
        assert_eq!(now.lines().count(), known.lines().count());
    }
}

#[test]
fn a_text_capture_reads_the_same_with_its_format_named_or_is_refused() {
    for root in capture_roots() {
        for path in find_captures(&root).into_iter().filter(|path| path.is_file()) {
            let bytes = fs::read(&path).unwrap();
            let text = String::from_utf8_lossy(&bytes);
            if text.trim().is_empty() {
                continue;
            }
            let Some(format) = CaptureFormat::detect(&text) else {
                assert!(root != own_captures(), "{} is in no known format", path.display());
                let refused = capture::read_capture(&path, None).unwrap_err();
                assert_eq!(refused.code(), "unknown_format", "{}", path.display());
                assert!(CaptureFormat::all().all(|format| refused.to_string().contains(format.name())), "{refused}");
                continue;
            };
            let (named, guessed) = (capture::read_capture(&path, Some(format)), capture::read_capture(&path, None));
            assert_eq!(named.ok(), guessed.ok(), "{} as {format}", path.display());
        }
    }
}

/// Number of damaged variants of each capture; more in a soak test.
fn damage_cases() -> u64 {
    std::env::var("GPUPOOL_SOAK_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(24)
}

/// A deterministic generator of numbers.
struct NumberGenerator(u64);

impl NumberGenerator {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % bound.max(1)
    }
}

/// Damages the bytes in one way, and returns a description of it.
fn damage(bytes: &[u8], case: u64) -> (Vec<u8>, String) {
    let mut numbers = NumberGenerator(case.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ bytes.len() as u64);
    numbers.below(1);
    let at = numbers.below(bytes.len());
    let mut damaged = bytes.to_vec();
    let what = match case % 4 {
        0 => {
            damaged.truncate(at);
            format!("cut at {at}")
        }
        1 => {
            damaged.drain(..at);
            format!("begun at {at}")
        }
        2 => {
            let end = at + numbers.below(bytes.len() - at);
            damaged.drain(at..end);
            format!("without {at}..{end}")
        }
        _ => {
            for _ in 0..8 {
                let at = numbers.below(bytes.len());
                damaged[at] = numbers.below(256) as u8;
            }
            format!("flipped by case {case}")
        }
    };
    (damaged, what)
}

#[test]
fn damaged_text_captures_do_not_panic() {
    for root in capture_roots() {
        for path in find_captures(&root).into_iter().filter(|path| path.is_file()) {
            let bytes = fs::read(&path).unwrap();
            if bytes.is_empty() {
                continue;
            }
            let whole = CaptureFormat::detect(&String::from_utf8_lossy(&bytes));
            // Fewer cases for large logs, because they repeat.
            let cases = if bytes.len() > 200_000 { damage_cases() / 4 } else { damage_cases() };
            for case in 0..cases {
                let (damaged, what) = damage(&bytes, case);
                let text = String::from_utf8_lossy(&damaged);
                let read = || {
                    for format in whole.into_iter().chain(CaptureFormat::detect(&text)) {
                        if let Some(Ok(snapshot)) = format.parse(&text) {
                            let _ = DevicesReport::new(&snapshot, None);
                        }
                    }
                };
                std::panic::catch_unwind(read).unwrap_or_else(|_| panic!("{} {what} panics", path.display()));
            }
        }
    }
}

#[test]
fn damaged_captured_trees_do_not_panic() {
    for root in capture_roots() {
        for tree in find_captures(&root).into_iter().filter(|path| path.is_dir()) {
            let copy = tempfile::tempdir().unwrap();
            let mut files = Vec::new();
            copy_tree(&tree, copy.path(), &mut files);
            files.sort();
            // Fewer cases for large trees, because they repeat.
            let cases = (damage_cases() / (1 + files.len() as u64 / 150)).max(2);
            for case in 0..cases {
                // Damages a third of the files at a time.
                let mut numbers = NumberGenerator(case);
                let chosen: Vec<&PathBuf> = files.iter().filter(|_| numbers.below(3) == 0).collect();
                let before: Vec<Vec<u8>> = chosen.iter().map(|file| fs::read(file).unwrap()).collect();
                for (file, bytes) in chosen.iter().zip(&before) {
                    if !bytes.is_empty() {
                        fs::write(file, damage(bytes, case + numbers.below(1000) as u64).0).unwrap();
                    }
                }
                let read = || {
                    let _ =
                        capture::read_capture(copy.path(), None).map(|snapshot| DevicesReport::new(&snapshot, None));
                };
                std::panic::catch_unwind(read).unwrap_or_else(|_| panic!("{} in case {case} panics", tree.display()));
                for (file, bytes) in chosen.iter().zip(before) {
                    fs::write(file, bytes).unwrap();
                }
            }
        }
    }
}

fn copy_tree(from: &Path, to: &Path, files: &mut Vec<PathBuf>) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_tree(&entry.path(), &target, files);
        } else if entry.path().is_file() {
            fs::write(&target, fs::read(entry.path()).unwrap()).unwrap();
            files.push(target);
        }
    }
}
