//! What `nvidia-smi` prints instead of devices, or between them.

use gpupool_core::{DeviceHealth, Vendor};

use crate::address::parse_pci_address;
use crate::detected_device::DetectedDevice;
use crate::reported::truncate_text;
use crate::source::SourceError;
use crate::source_reading::SourceReading;

/// What people call this form.
pub(super) const NAME: &str = "nvidia-smi";

/// Whether a text holds such a message.
pub(crate) fn looks_like(text: &str) -> bool {
    text.lines().any(|line| Message::of(line).is_some())
}

/// What a text of messages means: devices that do not answer, no devices, or why there are none.
pub(crate) fn parse(text: &str) -> Result<SourceReading, SourceError> {
    around(text, |rest| {
        let problem = format!("it is no known message: {}", truncate_text(rest.trim()));
        Err(SourceError::malformed(NAME, problem))
    })
}

/// Reads a text with `parse` after taking out the messages in it.
///
/// A message about one device makes that device, and loses no other. A message about the whole counts where there is
/// nothing else, and is a warning where there is.
pub(crate) fn around(
    text: &str,
    parse: impl FnOnce(&str) -> Result<SourceReading, SourceError>,
) -> Result<SourceReading, SourceError> {
    let messages: Vec<(&str, Message)> =
        text.lines().filter_map(|line| Some((line.trim(), Message::of(line)?))).collect();
    if messages.is_empty() {
        return parse(text);
    }
    let rest: String = text.lines().filter(|line| Message::of(line).is_none()).flat_map(|line| [line, "\n"]).collect();
    let bad: Vec<DetectedDevice> = messages.iter().filter_map(|(line, message)| message.device(line)).collect();
    let whole = messages.iter().find_map(|(line, message)| message.error(line));
    let told = |wanted| messages.iter().any(|(_, message)| *message == wanted);
    let answer = if rest.trim().is_empty() { Ok(SourceReading::default()) } else { parse(&rest) };
    let mut snapshot = match (answer, whole) {
        (Ok(snapshot), Some(error)) if snapshot.devices.is_empty() && bad.is_empty() => return Err(error),
        (Ok(mut snapshot), Some(error)) => {
            snapshot.warn(error.to_string());
            snapshot
        }
        (Ok(snapshot), None) => snapshot,
        (Err(_), Some(error)) if bad.is_empty() => return Err(error),
        (Err(problem), _) if bad.is_empty() && !told(Message::NoDevices) => return Err(problem),
        // What stands around the message (a date, the name of a container) is no answer.
        (Err(_), _) => SourceReading::default(),
    };
    for (line, _) in messages.iter().filter(|(_, message)| *message == Message::Notice) {
        snapshot.warn(truncate_text(line.trim_start_matches("WARNING: ")));
    }
    let mut of_bad = SourceReading::default();
    for device in bad {
        // The tool may say it once for each thing it was asked.
        let is_known = |known: &DetectedDevice| device.pci.is_some() && known.pci == device.pci;
        if of_bad.devices.iter().any(is_known) {
            continue;
        }
        let place = device.pci.map_or_else(|| "a GPU".to_owned(), |pci| format!("GPU {pci}"));
        of_bad.warn(match &device.health {
            Some(DeviceHealth::Unhealthy(reason)) => format!("{place}: {reason}"),
            _ => format!("{place}: the GPU is lost"),
        });
        of_bad.push(device);
    }
    snapshot.merge(of_bad);
    Ok(snapshot)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Message {
    /// About one device, named in the line.
    Device,
    NoDevices,
    /// Something a person should know, which changes nothing.
    Notice,
    Mismatch,
    NotLoaded,
    NotPresent,
    NoPermission,
    Driver,
    /// The tool did not understand what it was asked.
    Usage,
}

/// Any words.
const ANY: &[&str] = &[""];
const FAILED: &[&str] = &["failed to initialize nvml", "nvidia smi has failed because"];
const NO_FILE: &[&str] = &["no such file or directory", "executable file not found", "cannot open shared object file"];
const UNKNOWN_OPTION: &[&str] = &["is not recognized", "is missing its value", "is not a valid"];

/// Messages by one of the words they begin with and one of those they hold. The first that fits counts.
const MESSAGES: [(&[&str], &[&str], Message); 14] = [
    (&["unable to determine the device handle for", "unable to detect the device handle for"], ANY, Message::Device),
    (&["no devices were found", "no devices found"], ANY, Message::NoDevices),
    (&["nvidia smi couldnt find", "nvidia smi is not recognized"], ANY, Message::NotPresent),
    (
        ANY,
        &["nvidia smi command not found", "nvidia smi not found", "command not found nvidia smi"],
        Message::NotPresent,
    ),
    (&["warning inforom is corrupted"], ANY, Message::Notice),
    (FAILED, &["version mismatch"], Message::Mismatch),
    (FAILED, &["insufficient permissions", "no permission"], Message::NoPermission),
    (FAILED, &["driver not loaded", "communicate with the nvidia driver"], Message::NotLoaded),
    (FAILED, &["library not found"], Message::NotPresent),
    (FAILED, ANY, Message::Driver),
    (&["insufficient permissions"], ANY, Message::NoPermission),
    (&["field"], &["is not a valid field to query"], Message::Usage),
    (&["error option", "option"], UNKNOWN_OPTION, Message::Usage),
    (&["invalid combination of input arguments", "invalid argument"], ANY, Message::Usage),
];

impl Message {
    /// What a line says, in any case and with any punctuation.
    fn of(line: &str) -> Option<Self> {
        // Messages are short; what programs are called is not looked through.
        if line.len() > 400 {
            return None;
        }
        let plain = plain(line);
        let has = |words: &[&str]| words.iter().any(|words| plain.contains(words));
        if has(&["nvidia smi"]) && has(NO_FILE) {
            return Some(Self::NotPresent);
        }
        let begins = |starts: &[&str]| starts.iter().any(|start| plain.starts_with(start));
        MESSAGES.into_iter().find(|(starts, words, _)| begins(starts) && has(words)).map(|(.., message)| message)
    }

    /// Why there are no devices, where this says so.
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

    /// The device this is about.
    fn device(self, line: &str) -> Option<DetectedDevice> {
        if self != Self::Device {
            return None;
        }
        let mut found = DetectedDevice::new(Vendor::Nvidia);
        let after = line.to_ascii_lowercase().find("handle for").and_then(|at| line.get(at + "handle for".len()..))?;
        // `GPU 0000:02:00.0: …`, `GPU0000:02:00.0: …` and `GPU2: 0000:02:00.0: …` are all in use.
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
        let lost = plain(rest).contains("lost") || plain(rest).contains("fallen off the bus");
        found.health = Some(if lost {
            DeviceHealth::Lost
        } else {
            DeviceHealth::Unhealthy(truncate_text(rest.trim()).as_ref().into())
        });
        Some(found)
    }
}

/// The name of the field the tool says it does not know.
pub(crate) fn unknown_field(error: &SourceError) -> Option<&str> {
    let SourceError::Malformed { problem, .. } = error else { return None };
    let (_, rest) = problem.split_once('"').filter(|(before, _)| before.trim().eq_ignore_ascii_case("field"))?;
    rest.split_once('"').map(|(field, _)| field)
}

/// A line in lower case, its words parted by single blanks, without punctuation.
fn plain(line: &str) -> String {
    let mut plain = String::with_capacity(line.len());
    for c in line.chars() {
        match c {
            '\'' | '’' | '`' => {}
            _ if c.is_alphanumeric() => plain.extend(c.to_lowercase()),
            _ if plain.is_empty() || plain.ends_with(' ') => {}
            _ => plain.push(' '),
        }
    }
    plain.truncate(plain.trim_end().len());
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_about_the_whole_is_an_error_by_what_can_be_done() {
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
    fn no_devices_is_an_answer() {
        assert_eq!(parse("No devices were found\n"), Ok(SourceReading::default()));
        assert_eq!(parse("Mon Jan  1 10:00:00 2024\nNo devices were found"), Ok(SourceReading::default()));
    }

    #[test]
    fn a_device_that_does_not_answer_is_named_in_all_spellings() {
        let lost = "GPU is lost.  Reboot the system to recover this GPU";
        for (text, pci, index) in [
            ("Unable to determine the device handle for GPU 0000:02:00.0: ", "0000:02:00.0", None),
            ("unable to determine the device handle for gpu 0000:02:00.0: ", "0000:02:00.0", None),
            ("Unable to determine the device handle for GPU0000:02:00.0: ", "0000:02:00.0", None),
            ("Unable to determine the device handle for GPU3: 0000:BA:00.0: ", "0000:ba:00.0", Some(3)),
        ] {
            let snapshot = parse(&format!("{text}{lost}")).unwrap();
            let [device] = &snapshot.devices[..] else { panic!("{snapshot:?}") };
            assert_eq!((device.pci.unwrap().to_string().as_str(), device.index), (pci, index));
            assert_eq!(device.health, Some(DeviceHealth::Lost));
            let unknown = parse(&format!("{text}Unknown Error\n{text}Unknown Error")).unwrap();
            assert_eq!(unknown.devices.len(), 1);
            assert_eq!(unknown.devices[0].health, Some(DeviceHealth::Unhealthy("Unknown Error".into())));
            assert_eq!(unknown.warnings.len(), 1);
        }
    }

    #[test]
    fn a_device_with_an_address_that_cannot_be_is_still_told_of() {
        let snapshot = parse("Unable to determine the device handle for GPU 000:BA:80.0: Unknown Error").unwrap();
        let [device] = &snapshot.devices[..] else { panic!("{snapshot:?}") };
        assert_eq!((device.pci, device.health.clone()), (None, Some(DeviceHealth::Unhealthy("Unknown Error".into()))));
    }

    #[test]
    fn a_device_that_does_not_answer_leaves_the_others() {
        let text = "GPU 0: NVIDIA A10 (UUID: GPU-1)\n\
                    Unable to determine the device handle for GPU 0000:02:00.0: Unknown Error\n\
                    GPU 2: NVIDIA A10 (UUID: GPU-3)\n";
        let snapshot = super::super::list::parse(text).unwrap();
        let uuids: Vec<_> = snapshot.devices.iter().map(|device| device.uuid.as_deref()).collect();
        assert_eq!(uuids, [Some("GPU-1"), Some("GPU-3"), None]);
    }

    #[test]
    fn an_unknown_field_is_named() {
        let error = parse("Field \"power.wrong\" is not a valid field to query.\n\n").unwrap_err();
        assert_eq!(unknown_field(&error), Some("power.wrong"));
        assert_eq!(unknown_field(&parse("Insufficient Permissions").unwrap_err()), None);
    }
}
