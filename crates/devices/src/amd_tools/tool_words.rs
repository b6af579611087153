//! What AMD's tools say when they have no device to show. Their exit codes do not tell: rocm-smi fails with 0.

use crate::limits;
use crate::snapshot::Snapshot;
use crate::source::SourceError;

/// Words, in small letters, by which a tool says that its driver is not there.
const NO_DRIVER: [&str; 6] = [
    "driver not initialized",
    "not found in modules",
    "module is not loaded",
    "driver not loaded",
    "driver_not_loaded",
    "/dev/kfd read-write: no such file",
];
/// … that the caller may not look.
const NO_PERMISSION: [&str; 4] = ["permission denied", "no_perm", "requires elevation", "is not member of"];
/// … that there is no device.
const NO_DEVICES: [&str; 7] = [
    "no json data to report",
    "no drm devices",
    "no amd gpus",
    "no gpus",
    "no devices",
    "device not found",
    "unable to detect any gpu",
];
/// … that something else went wrong.
const TROUBLE: [&str; 6] = ["error:", "error=", "failed to", "failure", "exception", "is invalid"];

/// The meaning of output without any device in it.
///
/// A tool that says there is none has answered; one that says why it cannot look has failed; anything else is not
/// what `format` looks like.
pub(crate) fn without_devices(lines: &[String], format: &'static str) -> Result<Snapshot, SourceError> {
    let says = |words: &[&str]| {
        lines.iter().find(|line| words.iter().any(|word| line.to_ascii_lowercase().contains(word))).cloned()
    };
    if let Some(line) = says(&NO_DRIVER) {
        return Err(SourceError::DriverNotLoaded(line));
    }
    if let Some(line) = says(&NO_PERMISSION) {
        return Err(SourceError::NoPermission(line));
    }
    if let Some(line) = says(&NO_DEVICES) {
        return Ok(Snapshot { warnings: vec![line], ..Snapshot::default() });
    }
    if let Some(line) = says(&TROUBLE) {
        return Err(SourceError::Driver(line));
    }
    let first = lines.first().map_or("nothing", String::as_str);
    Err(SourceError::malformed(format, format!("no device is in it; it says: {first}")))
}

/// The first lines of a text that say anything.
pub(crate) fn spoken_lines(text: &str) -> Vec<String> {
    let spoken = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('='));
    spoken.take(limits::WARNINGS).map(|line| line.chars().take(limits::WORDS).collect()).collect()
}

/// Whether the text is one of the answers a tool gives in place of devices.
pub(crate) fn is_refusal(text: &str) -> bool {
    let start: String = text.chars().take(limits::WORDS).collect::<String>().to_ascii_lowercase();
    NO_DRIVER.iter().chain(&NO_DEVICES[..3]).any(|word| start.contains(word))
}

/// The lines of a text that are warnings or errors of the tool.
pub(crate) fn complaints(text: &str) -> Vec<String> {
    let is_complaint = |line: &&str| {
        let lower: String = line.chars().take(8).collect::<String>().to_ascii_lowercase();
        lower.starts_with("warn") || lower.starts_with("error") || line.starts_with("Expected integer value")
    };
    let short = |line: &str| line.chars().take(limits::WORDS).collect();
    text.lines().map(str::trim).filter(is_complaint).take(limits::WARNINGS).map(short).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meaning(line: &str) -> Result<Snapshot, SourceError> {
        without_devices(&[line.to_owned()], "test")
    }

    #[test]
    fn words_decide_what_output_without_devices_means() {
        let code = |line: &str| meaning(line).map_err(|error| error.code());
        assert_eq!(code("ERROR:root:Driver not initialized (amdgpu not found in modules)"), Err("driver_not_loaded"));
        assert_eq!(code("ROCk module is NOT loaded, possibly no GPU devices"), Err("driver_not_loaded"));
        assert_eq!(code("Unable to open /dev/kfd read-write: Permission denied"), Err("no_permission"));
        assert_eq!(code("RuntimeError: hsa api call failure at line 1"), Err("driver_failed"));
        assert_eq!(code("hello"), Err("malformed"));
        assert!(meaning("WARNING: No JSON data to report").unwrap().devices.is_empty());
    }
}
