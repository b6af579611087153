//! `nvidia-smi nvlink -s`: the NVLinks of each GPU, without what they lead to.

use super::{errors, list};
use crate::snapshot::Snapshot;
use crate::source::SourceError;
use crate::told::words;

/// What people call this form.
pub(super) const NAME: &str = "nvidia-smi nvlink -s";

/// Whether a text is such a status. A machine without NVLink prints nothing, which looks like nothing.
pub fn looks_like(text: &str) -> bool {
    let mut gpu = false;
    text.lines().any(|line| {
        gpu |= list::gpu(line).is_some();
        gpu && line_of(line) != Line::Other
    })
}

/// The GPUs of a status, with a warning for each link that is down. No text is no GPU.
pub fn parse(text: &str) -> Result<Snapshot, SourceError> {
    errors::around(text, |text| {
        let mut snapshot = Snapshot::default();
        let mut gpu = String::new();
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            if let Some(device) = list::gpu(line) {
                gpu = device.index.map_or_else(String::new, |index| format!("GPU {index}"));
                snapshot.push(device);
                continue;
            }
            match line_of(line) {
                Line::Up | Line::NoLinks => {}
                Line::Down => snapshot.warn(format!("{gpu}: {}", words(line.trim()))),
                Line::Other => snapshot.warn(format!("not understood: {}", words(line.trim()))),
            }
        }
        if snapshot.devices.is_empty() && !snapshot.warnings.is_empty() {
            return Err(SourceError::malformed(NAME, snapshot.warnings.swap_remove(0)));
        }
        Ok(snapshot)
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Line {
    /// A link and its speed.
    Up,
    /// A link, or all of them, that is down.
    Down,
    /// The GPU has none, or they are not shown.
    NoLinks,
    Other,
}

fn line_of(line: &str) -> Line {
    let lower = line.trim().to_ascii_lowercase();
    let link = lower.strip_prefix("link ").and_then(|rest| rest.split_once(':'));
    match link {
        Some(_) if lower.contains("inactive") => Line::Down,
        Some((_, speed)) if speed.contains("b/s") => Line::Up,
        _ if lower.contains("nvlink") && lower.contains("inactive") => Line::Down,
        _ if lower.contains("nvlink") => Line::NoLinks,
        _ => Line::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_that_is_down_is_warned_of() {
        let text = "GPU 0: A100 (UUID: GPU-a)\n\t Link 0: 25 GB/s\n\t Link 1: <inactive>\n\
                    GPU 1: L40S (UUID: GPU-b)\nDevice does not have or support Nvlink\n\
                    GPU 2: RTX (UUID: GPU-c)\nNVML: Unable to retrieve Nvlink information as all links are inActive\n";
        assert!(looks_like(text));
        assert!(!list::looks_like(text));
        let snapshot = parse(text).unwrap();
        assert_eq!(snapshot.devices.iter().map(|device| device.index).collect::<Vec<_>>(), [Some(0), Some(1), Some(2)]);
        assert_eq!(snapshot.devices[0].health, None);
        assert_eq!(snapshot.warnings.len(), 2, "{:?}", snapshot.warnings);
        assert_eq!(snapshot.warnings[0], "GPU 0: Link 1: <inactive>");
    }

    #[test]
    fn no_text_is_no_gpu() {
        assert!(!looks_like(""));
        assert_eq!(parse(""), Ok(Snapshot::default()));
        assert_eq!(parse("hello").unwrap_err().code(), "malformed");
    }
}
