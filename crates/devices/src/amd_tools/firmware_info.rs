//! `amdgpu_firmware_info` of debugfs: versions of firmware, without a word about whose.

use crate::snapshot::Snapshot;
use crate::source::SourceError;

/// Whether a text is such a list.
pub fn looks_like(text: &str) -> bool {
    text.lines().take(8).any(is_version)
}

/// No devices, and a warning that says why.
pub fn parse(text: &str) -> Result<Snapshot, SourceError> {
    let count = text.lines().filter(|line| is_version(line)).count();
    if count == 0 {
        return Err(SourceError::malformed("amdgpu_firmware_info", "no version of firmware is in it"));
    }
    let mut snapshot = Snapshot::default();
    snapshot.warn(format!("{count} versions of firmware, which do not say which device they belong to"));
    Ok(snapshot)
}

/// `ME feature version: 35, firmware version: 0x00000094`.
fn is_version(line: &str) -> bool {
    line.contains(" feature version: ") && line.contains(", firmware version: ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_firmware_are_no_devices() {
        let text =
            "ME feature version: 35, firmware version: 0x00000094\nCE feature version: 1, firmware version: 0x0\n";
        assert!(looks_like(text));
        let snapshot = parse(text).unwrap();
        assert!(snapshot.devices.is_empty());
        assert!(snapshot.warnings[0].starts_with("2 versions"));
        assert!(parse("hello").is_err());
    }
}
