//! `nvidia-smi --help-query-gpu`: which fields a driver knows.

use crate::snapshot::Snapshot;
use crate::source::SourceError;

/// What people call this form.
pub(super) const NAME: &str = "nvidia-smi --help-query-gpu";

/// Whether a text is such a list.
pub fn looks_like(text: &str) -> bool {
    text.lines().any(is_head)
}

/// A list of fields holds no devices, and says so.
pub fn parse(text: &str) -> Result<Snapshot, SourceError> {
    let mut snapshot = Snapshot::default();
    snapshot.warn(format!("it is only a list of {} fields that can be asked for", fields(text).len()));
    Ok(snapshot)
}

/// The names of the fields, each in all its spellings: `"name" or "gpu_name"` is both.
pub fn fields(text: &str) -> Vec<&str> {
    text.lines().filter(|line| line.starts_with('"')).flat_map(names).collect()
}

fn is_head(line: &str) -> bool {
    line.trim_start().starts_with("List of valid properties to query for the switch")
}

/// The quoted words of a line that holds nothing else but `or`.
fn names(line: &str) -> Vec<&str> {
    let parts: Vec<&str> = line.trim().split('"').collect();
    let between_are_or = parts.iter().step_by(2).all(|between| matches!(between.trim(), "" | "or"));
    if between_are_or { parts.into_iter().skip(1).step_by(2).collect() } else { Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_of_a_field_is_known() {
        let text = "List of valid properties to query for the switch \"--query-gpu=\":\n\n\"timestamp\"\nThe time.\n\n\
                    \"name\" or \"gpu_name\"\nThe \"official\" name.\n\"All On\" mode enables everything.\n";
        assert!(looks_like(text));
        assert_eq!(fields(text), ["timestamp", "name", "gpu_name"]);
        let snapshot = parse(text).unwrap();
        assert_eq!((snapshot.devices.len(), snapshot.warnings.len()), (0, 1));
    }
}
