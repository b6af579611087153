//! Messages that `nvidia-smi` prints in place of devices or between them.

use gpupool_core::{DeviceHealth, Vendor};

use crate::address::parse_pci_address;
use crate::detected_device::DetectedDevice;
use crate::reported::truncate_text;
use crate::source::SourceError;
use crate::source_reading::SourceReading;

/// Name of this format in messages.
pub(super) const NAME: &str = "nvidia-smi";

/// Whether a text contains such a message.
pub(crate) fn looks_like(text: &str) -> bool {
    text.lines().any(|line| ToolMessage::parse(line).is_some())
}

/// Reads a text of messages: devices that do not answer, no devices, or an error.
pub(crate) fn parse(text: &str) -> Result<SourceReading, SourceError> {
    parse_with_messages(text, |rest| {
        let problem = format!("unknown message: {}", truncate_text(rest.trim()));
        Err(SourceError::malformed(NAME, problem))
    })
}

/// Removes the messages from a text and reads the rest with `parse`.
///
/// A message about one device adds that device. A general message is the result if there is nothing else, and otherwise
/// a warning.
pub(crate) fn parse_with_messages(
    text: &str,
    parse: impl FnOnce(&str) -> Result<SourceReading, SourceError>,
) -> Result<SourceReading, SourceError> {
    let messages: Vec<(&str, ToolMessage)> =
        text.lines().filter_map(|line| Some((line.trim(), ToolMessage::parse(line)?))).collect();
    if messages.is_empty() {
        return parse(text);
    }
    let rest = text.lines().filter(|line| ToolMessage::parse(line).is_none());
    let rest: String = rest.flat_map(|line| [line, "\n"]).collect();
    let failed: Vec<DetectedDevice> = messages.iter().filter_map(|(line, message)| message.device(line)).collect();
    let general_error = messages.iter().find_map(|(line, message)| message.error(line));
    let mentions = |wanted| messages.iter().any(|(_, message)| *message == wanted);
    let result = if rest.trim().is_empty() { Ok(SourceReading::default()) } else { parse(&rest) };
    let mut reading = match (result, general_error) {
        (Ok(reading), Some(error)) if reading.devices.is_empty() && failed.is_empty() => return Err(error),
        (Ok(mut reading), Some(error)) => {
            reading.warn(error.to_string());
            reading
        }
        (Ok(reading), None) => reading,
        (Err(_), Some(error)) if failed.is_empty() => return Err(error),
        (Err(error), _) if failed.is_empty() && !mentions(ToolMessage::NoDevices) => return Err(error),
        // The text around the message (a date, the name of a container) is ignored.
        (Err(_), _) => SourceReading::default(),
    };
    for (line, _) in messages.iter().filter(|(_, message)| *message == ToolMessage::Notice) {
        reading.warn(truncate_text(line.trim_start_matches("WARNING: ")));
    }
    let mut failed_gpus = SourceReading::default();
    for device in failed {
        // The tool may repeat the message for each query.
        let is_known = |known: &DetectedDevice| device.pci.is_some() && known.pci == device.pci;
        if failed_gpus.devices.iter().any(is_known) {
            continue;
        }
        let name = device.pci.map_or_else(|| "a GPU".to_owned(), |pci| format!("GPU {pci}"));
        failed_gpus.warn(match &device.health {
            Some(DeviceHealth::Unhealthy(reason)) => format!("{name}: {reason}"),
            _ => format!("{name}: the GPU is lost"),
        });
        failed_gpus.push(device);
    }
    reading.merge(failed_gpus);
    Ok(reading)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ToolMessage {
    /// A message about one device, named in the line.
    Device,
    NoDevices,
    /// A notice that is ignored.
    Notice,
    Mismatch,
    NotLoaded,
    NotPresent,
    NoPermission,
    Driver,
    /// The tool rejected its arguments.
    Usage,
}

/// Matches any text.
const ANY: &[&str] = &[""];
const NO_HANDLE: &[&str] = &["unable to determine the device handle for", "unable to detect the device handle for"];
const FAILED: &[&str] = &["failed to initialize nvml", "nvidia smi has failed because"];
const NO_FILE: &[&str] = &["no such file or directory", "executable file not found", "cannot open shared object file"];
const NO_COMMAND: &[&str] = &["nvidia smi command not found", "nvidia smi not found", "command not found nvidia smi"];
const UNKNOWN_OPTION: &[&str] = &["is not recognized", "is missing its value", "is not a valid"];

/// Messages by the start of their line and a phrase in it. The first match counts.
const MESSAGES: [(&[&str], &[&str], ToolMessage); 14] = [
    (NO_HANDLE, ANY, ToolMessage::Device),
    (&["no devices were found", "no devices found"], ANY, ToolMessage::NoDevices),
    (&["nvidia smi couldnt find", "nvidia smi is not recognized"], ANY, ToolMessage::NotPresent),
    (ANY, NO_COMMAND, ToolMessage::NotPresent),
    (&["warning inforom is corrupted"], ANY, ToolMessage::Notice),
    (FAILED, &["version mismatch"], ToolMessage::Mismatch),
    (FAILED, &["insufficient permissions", "no permission"], ToolMessage::NoPermission),
    (FAILED, &["driver not loaded", "communicate with the nvidia driver"], ToolMessage::NotLoaded),
    (FAILED, &["library not found"], ToolMessage::NotPresent),
    (FAILED, ANY, ToolMessage::Driver),
    (&["insufficient permissions"], ANY, ToolMessage::NoPermission),
    (&["field"], &["is not a valid field to query"], ToolMessage::Usage),
    (&["error option", "option"], UNKNOWN_OPTION, ToolMessage::Usage),
    (&["invalid combination of input arguments", "invalid argument"], ANY, ToolMessage::Usage),
];

impl ToolMessage {
    /// Classifies a line, ignoring case and punctuation.
    fn parse(line: &str) -> Option<Self> {
        // Messages are short; a long line may be the command line of a program.
        if line.len() > 400 {
            return None;
        }
        let normalized = normalize_line(line);
        let has = |words: &[&str]| words.iter().any(|words| normalized.contains(words));
        if has(&["nvidia smi"]) && has(NO_FILE) {
            return Some(Self::NotPresent);
        }
        let has_start = |starts: &[&str]| starts.iter().any(|start| normalized.starts_with(start));
        MESSAGES.into_iter().find(|(starts, words, _)| has_start(starts) && has(words)).map(|(.., message)| message)
    }

    /// Returns the general error of the message, if it is one.
    fn error(self, line: &str) -> Option<SourceError> {
        let text = truncate_text(line).into_owned();
        Some(match self {
            Self::Device | Self::NoDevices | Self::Notice => return None,
            Self::Mismatch => SourceError::VersionMismatch(text),
            Self::NotLoaded => SourceError::DriverNotLoaded(text),
            Self::NotPresent => SourceError::NotPresent { what: NAME.into(), why: text },
            Self::NoPermission => SourceError::NoPermission(text),
            Self::Driver => SourceError::Driver(text),
            Self::Usage => SourceError::malformed(NAME, text),
        })
    }

    /// Returns the device of the message, if it is about one.
    fn device(self, line: &str) -> Option<DetectedDevice> {
        if self != Self::Device {
            return None;
        }
        let mut found = DetectedDevice::new(Vendor::Nvidia);
        let after = line.to_ascii_lowercase().find("handle for").and_then(|at| line.get(at + "handle for".len()..))?;
        // The formats `GPU 0000:02:00.0: …`, `GPU0000:02:00.0: …` and `GPU2: 0000:02:00.0: …` are all in use.
        let named = after.trim_start().trim_start_matches(|c: char| c.is_ascii_alphabetic()).trim_start();
        let (first, rest) = named.split_once([' ', '\t']).unwrap_or((named, ""));
        let address = |word: &str| parse_pci_address(word.trim_end_matches([':', ',', ';', '.']));
        found.index = first.trim_end_matches(':').parse().ok();
        found.pci = address(first);
        let rest = match found.index {
            Some(_) => {
                let (second, rest) = rest.trim_start().split_once([' ', '\t']).unwrap_or((rest.trim(), ""));
                found.pci = address(second);
                rest
            }
            None => rest,
        };
        let lost = normalize_line(rest).contains("lost") || normalize_line(rest).contains("fallen off the bus");
        let reason = || truncate_text(rest.trim()).as_ref().into();
        found.health = Some(if lost { DeviceHealth::Lost } else { DeviceHealth::Unhealthy(reason()) });
        Some(found)
    }
}

/// Returns the name of the field that the tool does not support.
pub(crate) fn unknown_field(error: &SourceError) -> Option<&str> {
    let SourceError::Malformed { problem, .. } = error else { return None };
    let (_, rest) = problem.split_once('"').filter(|(before, _)| before.trim().eq_ignore_ascii_case("field"))?;
    rest.split_once('"').map(|(field, _)| field)
}

/// Returns a line in lower case without punctuation, its words separated by single spaces.
fn normalize_line(line: &str) -> String {
    let mut normalized = String::with_capacity(line.len());
    for c in line.chars() {
        match c {
            '\'' | '’' | '`' => {}
            _ if c.is_alphanumeric() => normalized.extend(c.to_lowercase()),
            _ if normalized.is_empty() || normalized.ends_with(' ') => {}
            _ => normalized.push(' '),
        }
    }
    normalized.truncate(normalized.trim_end().len());
    normalized
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_general_message_is_an_error_by_its_remedy() {
        for (text, code) in [
            (
                "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.183",
                "driver_library_mismatch",
            ),
            ("failed to initialize nvml : driver library version mismatch.", "driver_library_mismatch"),
            (
                "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running.",
                "driver_not_loaded",
            ),
            ("NVIDIA-SMI has failed because it couldn’t communicate with the NVIDIA driver", "driver_not_loaded"),
            ("Failed to initialize NVML: Unknown Error", "driver_failed"),
            ("Failed to initialize NVML: Insufficient Permissions", "no_permission"),
            ("Insufficient Permissions", "no_permission"),
            ("bash: nvidia-smi: command not found", "not_here"),
            ("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.", "not_here"),
            ("ERROR: Option -m is missing its value. Please run 'nvidia-smi -h' for help.", "malformed"),
            ("Field \"power.wrong\" is not a valid field to query.", "malformed"),
        ] {
            assert!(looks_like(text), "{text}");
            assert_eq!(parse(text).unwrap_err().code(), code, "{text}");
        }
        assert!(!looks_like(""));
        assert!(!looks_like("GPU 0: Tesla (UUID: GPU-1)"));
        assert_eq!(parse("hello").unwrap_err().code(), "malformed");
    }

    #[test]
    fn no_devices_is_a_valid_result() {
        assert_eq!(parse("No devices were found\n"), Ok(SourceReading::default()));
        assert_eq!(parse("Mon Jan  1 10:00:00 2024\nNo devices were found"), Ok(SourceReading::default()));
    }

    #[test]
    fn a_failed_device_is_parsed_in_all_spellings() {
        let lost = "GPU is lost.  Reboot the system to recover this GPU";
        for (text, pci, index) in [
            ("Unable to determine the device handle for GPU 0000:02:00.0: ", "0000:02:00.0", None),
            ("unable to determine the device handle for gpu 0000:02:00.0: ", "0000:02:00.0", None),
            ("Unable to determine the device handle for GPU0000:02:00.0: ", "0000:02:00.0", None),
            ("Unable to determine the device handle for GPU3: 0000:BA:00.0: ", "0000:ba:00.0", Some(3)),
        ] {
            let reading = parse(&format!("{text}{lost}")).unwrap();
            let [device] = &reading.devices[..] else { panic!("{reading:?}") };
            assert_eq!((device.pci.unwrap().to_string().as_str(), device.index), (pci, index));
            assert_eq!(device.health, Some(DeviceHealth::Lost));
            let unknown = parse(&format!("{text}Unknown Error\n{text}Unknown Error")).unwrap();
            assert_eq!(unknown.devices.len(), 1);
            assert_eq!(unknown.devices[0].health, Some(DeviceHealth::Unhealthy("Unknown Error".into())));
            assert_eq!(unknown.warnings.len(), 1);
        }
    }

    #[test]
    fn a_failed_device_with_an_invalid_address_is_still_reported() {
        let reading = parse("Unable to determine the device handle for GPU 000:BA:80.0: Unknown Error").unwrap();
        let [device] = &reading.devices[..] else { panic!("{reading:?}") };
        assert_eq!((device.pci, device.health.clone()), (None, Some(DeviceHealth::Unhealthy("Unknown Error".into()))));
    }

    #[test]
    fn a_failed_device_does_not_hide_the_others() {
        let text = "GPU 0: NVIDIA A10 (UUID: GPU-1)\n\
                    Unable to determine the device handle for GPU 0000:02:00.0: Unknown Error\n\
                    GPU 2: NVIDIA A10 (UUID: GPU-3)\n";
        let reading = super::super::list::parse(text).unwrap();
        let uuids: Vec<_> = reading.devices.iter().map(|device| device.uuid.as_deref()).collect();
        assert_eq!(uuids, [Some("GPU-1"), Some("GPU-3"), None]);
    }

    #[test]
    fn the_name_of_an_unknown_field_is_returned() {
        let error = parse("Field \"power.wrong\" is not a valid field to query.\n\n").unwrap_err();
        assert_eq!(unknown_field(&error), Some("power.wrong"));
        assert_eq!(unknown_field(&parse("Insufficient Permissions").unwrap_err()), None);
    }
}
