//! What amd-smi prints for people: indented fields for each GPU, or tables.

use serde_json::{Map, Value};

use super::amd_smi_tables;
use super::amd_smi_tree::Trees;
use super::table;
use super::tool_words;
use crate::limits;
use crate::snapshot::Snapshot;
use crate::source::SourceError;

const FORMAT: &str = "amd-smi text";
/// How deep fields may be nested.
const DEPTH: usize = 32;

/// Whether a text is what amd-smi prints for people.
pub fn looks_like(text: &str) -> bool {
    let start: String = text.chars().take(1 << 15).collect();
    let indented = |line: &str| line.starts_with(' ') && field(line).is_some();
    let mut lines = start.lines().filter(|line| !line.trim().is_empty()).peekable();
    while let Some(line) = lines.next() {
        let followed = lines.peek().is_some_and(|next| indented(next));
        if heading(line).is_some() && followed || amd_smi_tables::begins(line) {
            return true;
        }
    }
    false
}

/// The devices in what amd-smi prints for people.
pub fn parse(text: &str) -> Result<Snapshot, SourceError> {
    let text = table::without_codes(text);
    let mut trees = Trees::default();
    indented(&text).into_iter().for_each(|tree| trees.add(tree));
    amd_smi_tables::add(&text, &mut trees);
    if trees.is_empty() {
        return tool_words::without_devices(&tool_words::spoken_lines(&text), FORMAT);
    }
    let mut snapshot = trees.snapshot();
    tool_words::complaints(&text).into_iter().for_each(|line| snapshot.warn(line));
    Ok(snapshot)
}

/// `GPU: 0` or `CPU: 0` at the start of a line begins a device.
fn heading(line: &str) -> Option<(&'static str, u32)> {
    let (kind, number) = line.split_once(':')?;
    let kind = ["GPU", "CPU"].into_iter().find(|name| *name == kind)?;
    Some((kind, number.trim().parse().ok()?))
}

/// The key and the text of a field; the text is empty where more fields are nested in it.
fn field(line: &str) -> Option<(String, &str)> {
    let (key, text) = line.trim().split_once(':')?;
    let sound = key.starts_with(|first: char| first.is_ascii_alphabetic()) && key.len() <= 64;
    sound.then(|| (key.trim().to_ascii_lowercase().replace(' ', "_"), text.trim()))
}

/// Fields being read, that are nested in `key`.
struct Open {
    indent: usize,
    key: String,
    fields: Map<String, Value>,
}

/// A tree for each GPU in indented fields.
fn indented(text: &str) -> Vec<Value> {
    let mut found: Vec<Value> = Vec::new();
    let mut open: Vec<Open> = Vec::new();
    for line in text.lines() {
        let indent = line.len() - line.trim_start().len();
        if let Some((kind, number)) = heading(line) {
            found.extend(close(&mut open, 0));
            if found.len() > limits::DEVICES {
                return found;
            }
            let fields = Map::from_iter([(kind.to_ascii_lowercase(), Value::from(number))]);
            open.push(Open { indent: 0, key: String::new(), fields });
            continue;
        }
        let Some((key, text)) = field(line).filter(|_| indent > 0 && !open.is_empty()) else { continue };
        close(&mut open, indent);
        if text.is_empty() && open.len() < DEPTH {
            open.push(Open { indent, key, fields: Map::new() });
        } else if let Some(parent) = open.last_mut() {
            insert(&mut parent.fields, key, Value::from(text));
        }
    }
    found.extend(close(&mut open, 0));
    found
}

/// Ends all that is nested at least as deep as `indent`, and gives the tree where that ends it.
fn close(open: &mut Vec<Open>, indent: usize) -> Option<Value> {
    while open.last().is_some_and(|last| last.indent >= indent) {
        let done = open.pop()?;
        match open.last_mut() {
            Some(parent) => insert(&mut parent.fields, done.key, Value::Object(done.fields)),
            None => return Some(Value::Object(done.fields)),
        }
    }
    None
}

/// Adds a field; one that stands there several times, as processes do, becomes a list.
fn insert(fields: &mut Map<String, Value>, key: String, value: Value) {
    match fields.get_mut(&key) {
        Some(Value::Array(list)) => list.push(value),
        Some(known) => *known = Value::Array(vec![known.take(), value]),
        None => drop(fields.insert(key, value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::found::Watts;
    use crate::told::Told;
    use gpupool_core::units::Bytes;
    use serde_json::json;

    const TEXT: &str = "WARNING: User is missing the following required groups: render\n~$ amd-smi static\nCPU: 0
    SMU:
        FW_VERSION: 85.90.0

GPU: 0
    ASIC:
        MARKET_NAME: MI300A
        ASIC_SERIAL: <redacted>
    BUS:
        BDF: 0001:01:00.0
    LIMIT:
        MAX_POWER: 550 W
        SOCKET_POWER: 500 W
    VRAM:
        SIZE: 64289 MB
    POLICIES:
        POLICY_ID: 0
        POLICY_ID: 1
    JPEG_ACTIVITY: [N/A, N/A,
        N/A]
    PROCESS_INFO:
        NAME: python3
        PID: 77
        MEMORY_USAGE:
            VRAM_MEM: 1.5 GB
    PROCESS_INFO:
        NAME: bash
        PID: 78

GPU: 1
    BDF: 0002:01:00.0
    PROCESS_INFO: No running processes detected
";

    #[test]
    fn indented_fields_become_the_tree_of_the_json() {
        let trees = indented(TEXT);
        assert_eq!(trees.len(), 3);
        assert_eq!(trees[0], json!({"cpu": 0, "smu": {"fw_version": "85.90.0"}}));
        assert_eq!(trees[1]["policies"], json!({"policy_id": ["0", "1"]}));
        assert_eq!(trees[1]["bus"], json!({"bdf": "0001:01:00.0"}));
    }

    #[test]
    fn the_text_means_what_the_json_means() {
        assert!(looks_like(TEXT));
        let snapshot = parse(TEXT).unwrap();
        let [first, second] = snapshot.devices.as_slice() else { panic!("{snapshot:?}") };
        assert_eq!(first.name.as_deref(), Some("MI300A"));
        assert_eq!(first.uuid, None);
        assert_eq!(first.pci.unwrap().to_string(), "0001:01:00.0");
        assert_eq!(first.memory.total, Told::Value(Bytes(64_289 << 20)));
        assert_eq!(first.power_limit, Told::Value(Watts(500_000)));
        let pids: Vec<u32> = first.processes.value().unwrap().iter().map(|process| process.pid).collect();
        assert_eq!(pids, [77, 78]);
        assert_eq!(first.processes.value().unwrap()[0].memory, Told::Value(Bytes(3 << 29)));
        assert_eq!(second.processes, Told::Value(Vec::new()));
        assert_eq!(snapshot.warnings.len(), 1);
    }

    #[test]
    fn no_depth_of_nesting_matters() {
        let deep: String = (1..2000).map(|depth| format!("{}K:\n", " ".repeat(depth))).collect();
        assert_eq!(parse(&format!("GPU: 0\n{deep}")).unwrap().devices.len(), 1);
    }
}
