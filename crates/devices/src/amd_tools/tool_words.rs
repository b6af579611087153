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
const NO_PERMISSION: [&str; 5] =
    ["permission denied", "no_perm", "requires elevation", "is not member of", "missing the following required groups"];
/// … that the tool is not installed; said by the shell.
const NOT_HERE: [&str; 3] = ["command not found", "-smi: not found", "rocminfo: not found"];
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
const TROUBLE: [&str; 9] = [
    "error:",
    "error=",
    "error code",
    "init_error",
    "failed to",
    "failure",
    "exception",
    "is invalid",
    "the expected value is 0",
];
/// Names by which AMD's tools are known to have spoken; the kernel uses others.
const SPEAKERS: [&str; 9] =
    ["amdsmi", "amd-smi", "rocm-smi", "rocm_smi", "rocm smi", "rsmi_", "rocminfo", "hsa api call", "/dev/kfd"];

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
    if let Some(why) = says(&NOT_HERE) {
        let tool = ["amd-smi", "rocm-smi", "rocminfo"].into_iter().find(|tool| why.contains(tool)).unwrap_or(format);
        return Err(SourceError::NotHere { what: tool.into(), why });
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
    let says = |words: &[&str]| words.iter().any(|word| start.contains(word));
    let is_of_tool = says(&SPEAKERS) || says(&["required groups: render", "required groups: video"]);
    let complains = [&NO_PERMISSION[..], &NOT_HERE, &NO_DEVICES, &TROUBLE].into_iter().any(says);
    says(&NO_DRIVER) || says(&["unable to detect any gpu", "no amd gpus", "no drm devices"]) || is_of_tool && complains
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
        assert_eq!(code("bash: rocm-smi: command not found"), Err("not_here"));
        assert!(meaning("WARNING: No JSON data to report").unwrap().devices.is_empty());
    }

    #[test]
    fn what_a_tool_says_alone_is_known_as_its_answer() {
        for (said, code) in [
            ("ERROR:root:Driver not initialized (amdgpu not found in modules)", "driver_not_loaded"),
            ("AmdSmiException: Error code:\n\t34 | AMDSMI_STATUS_DRIVER_NOT_LOADED", "driver_not_loaded"),
            ("AmdSmiLibraryException: Error code:\n\t10 | AMDSMI_STATUS_NO_PERM - Permission Denied", "no_permission"),
            ("User is missing the following required groups: render, video.", "no_permission"),
            ("ERROR: Failed to initialize amdsmi: AMDSMI_STATUS_INIT_ERROR", "driver_failed"),
            ("rsmi_init() failed\nERROR:root:ROCm SMI returned 8 (the expected value is 0)", "driver_failed"),
            ("sh: 1: amd-smi: not found", "not_here"),
        ] {
            assert!(is_refusal(said), "{said}");
            assert_eq!(without_devices(&spoken_lines(said), "test").unwrap_err().code(), code, "{said}");
        }
        let none = "ERROR:root:Unable to detect any GPU devices, check amdgpu version and module status";
        assert!(is_refusal(none) && meaning(none).unwrap().devices.is_empty());
        for other in [
            "amdgpu 0000:03:00.0: amdgpu: failed to write reg 28b4 wait reg 28c6",
            "bash: nvidia-smi: command not found",
            "Permission denied",
        ] {
            assert!(!is_refusal(other), "{other}");
        }
    }
}
