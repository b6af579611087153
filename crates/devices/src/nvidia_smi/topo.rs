//! `nvidia-smi topo -m`: the links between GPUs as a matrix.

use std::collections::BTreeMap;

use gpupool_core::{LinkKind, Vendor};

use super::errors;
use crate::detected_device::DetectedDevice;
use crate::reported::truncate_text;
use crate::source::SourceError;
use crate::source_reading::{DetectedLink, SourceReading};

/// Name of this format in messages.
pub(super) const NAME: &str = "nvidia-smi topo -m";

/// Whether a text is such a matrix.
pub(crate) fn looks_like(text: &str) -> bool {
    let text = strip_terminal_codes(text);
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    lines.next().is_some_and(|line| TopologyHeader::parse(line).is_some())
        && lines.next().is_some_and(|row| row.split_whitespace().next().and_then(gpu_number).is_some())
}

/// Returns the GPUs by index, with their NUMA nodes and links.
pub(crate) fn parse(text: &str) -> Result<SourceReading, SourceError> {
    errors::parse_with_messages(text, |text| {
        let text = strip_terminal_codes(text);
        let mut lines = text.lines();
        let Some(head) = lines.by_ref().find_map(TopologyHeader::parse) else {
            return Err(SourceError::malformed(NAME, "no header with GPU names"));
        };
        let mut reading = SourceReading::default();
        let mut links_by_number: Vec<(u32, u32, LinkKind)> = Vec::new();
        let mut places: BTreeMap<u32, usize> = BTreeMap::new();
        for line in lines.take_while(|line| !line.trim_start().starts_with("Legend")) {
            let mut cells_of = line.split_whitespace();
            let Some(number) = cells_of.next().and_then(gpu_number) else { continue };
            let cells: Vec<&str> = cells_of.collect();
            if places.contains_key(&number) {
                continue;
            }
            let mut found = DetectedDevice::new(Vendor::Nvidia);
            found.index = Some(number);
            found.numa = head.numa(line, &cells);
            let Some(place) = reading.push(found) else { break };
            places.insert(number, place);
            if cells.len() < head.columns.len() {
                reading.warn(format!("GPU{number}: {} of {} columns", cells.len(), head.columns.len()));
            }
            for (column, cell) in head.columns.iter().zip(&cells) {
                let Some(other) = column.filter(|other| *other != number) else { continue };
                match parse_cell(cell) {
                    TopologyCell::Link(kind) => links_by_number.push((number, other, kind)),
                    TopologyCell::NotApplicable => {}
                    TopologyCell::Unknown => reading.warn(format!("GPU{number}-GPU{other}: {}", truncate_text(cell))),
                }
            }
        }
        let link = |(a, b, kind)| Some(DetectedLink::new(*places.get(&a)?, *places.get(&b)?, kind));
        reading.join(links_by_number.into_iter().filter_map(link));
        Ok(reading)
    })
}

/// Merges a matrix into a reading of the same GPUs, matched by index.
pub(crate) fn merge_topology(reading: &mut SourceReading, matrix: &SourceReading) {
    let same = |wanted: &DetectedDevice| {
        let place = |device: &DetectedDevice| device.index == wanted.index && !device.is_mig_instance();
        wanted.index.and_then(|_| reading.devices.iter().position(place))
    };
    let places: Vec<Option<usize>> = matrix.devices.iter().map(same).collect();
    for (place, device) in places.iter().zip(&matrix.devices) {
        if let Some(known) = place.and_then(|place| reading.devices.get_mut(place)) {
            known.numa = known.numa.or(device.numa);
        }
    }
    // An instance has the NUMA node of its GPU, which precedes it.
    let mut numa = None;
    for device in &mut reading.devices {
        match device.partition {
            Some(_) => device.numa = device.numa.or(numa),
            None => numa = device.numa,
        }
    }
    reading.join(matrix.links.iter().filter_map(|link| link.map_positions(&places)));
    for warning in &matrix.warnings {
        reading.warn(warning.clone());
    }
}

struct TopologyHeader {
    /// GPU index of each column; `None` for network cards.
    columns: Vec<Option<u32>>,
    /// Whether the NUMA node follows the column of processors.
    has_numa: bool,
}

impl TopologyHeader {
    fn parse(line: &str) -> Option<Self> {
        // Columns with several words (`CPU Affinity`, `GPU NUMA ID`) follow the matrix.
        let is_column = |word: &&str| !matches!(*word, "CPU" | "NUMA" | "GPU" | "X");
        let columns: Vec<Option<u32>> = line.split_whitespace().take_while(is_column).map(gpu_number).collect();
        let is_header =
            columns.first().is_some_and(Option::is_some) && !line.split_whitespace().any(|word| word == "X");
        is_header.then(|| Self { columns, has_numa: line.contains("NUMA Affinity") })
    }

    /// Returns the NUMA node of a row, if its column is unambiguous.
    fn numa(&self, line: &str, cells: &[&str]) -> Option<u32> {
        let place = self.columns.len() + 1;
        // The column of processors may be empty, which is visible only with tabs.
        let by_tabs = || line.trim_start().split('\t').nth(place + 1);
        let cell = if line.contains('\t') { by_tabs() } else { cells.get(place).copied() };
        cell.filter(|_| self.has_numa)?.trim().parse().ok()
    }
}

/// Parses the number in `GPU7`.
fn gpu_number(word: &str) -> Option<u32> {
    word.strip_prefix("GPU")?.parse().ok()
}

enum TopologyCell {
    Link(LinkKind),
    NotApplicable,
    Unknown,
}

fn parse_cell(word: &str) -> TopologyCell {
    if let Some(lanes) = word.strip_prefix("NV").and_then(|lanes| lanes.parse().ok()) {
        return TopologyCell::Link(LinkKind::NvLink(lanes));
    }
    match word {
        "PIX" => TopologyCell::Link(LinkKind::PcieSwitch),
        "PXB" => TopologyCell::Link(LinkKind::PcieSwitches),
        "PHB" => TopologyCell::Link(LinkKind::HostBridge),
        "NODE" => TopologyCell::Link(LinkKind::SameNuma),
        // Old versions print `SOC`.
        "SYS" | "SOC" => TopologyCell::Link(LinkKind::CrossNuma),
        "X" | "N/A" | "-" => TopologyCell::NotApplicable,
        _ => TopologyCell::Unknown,
    }
}

/// Removes terminal codes for colour and underline, even if copying lost their first character.
fn strip_terminal_codes(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(['\u{1b}', '[']) {
        let (before, code) = rest.split_at(at);
        plain.push_str(before);
        let inner = code.trim_start_matches('\u{1b}');
        let digits =
            inner.strip_prefix('[').map(|inner| inner.trim_start_matches(|c: char| c.is_ascii_digit() || c == ';'));
        rest = match digits.and_then(|after| after.strip_prefix('m')) {
            Some(after) => after,
            // Characters that begin no code are dropped at once: there may be very many.
            None if inner.len() < code.len() => inner,
            None => {
                plain.push('[');
                inner.strip_prefix('[').unwrap_or(inner)
            }
        };
    }
    plain.push_str(rest);
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABS: &str = "\t\x1b[4mGPU0\tGPU1\tGPU2\tmlx5_10\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n\
        GPU0\t X \tNV12\tSYS\tPIX\t0-19,40-59\t0\t\tN/A\nGPU1\tNV12\t X \tPXB\tSYS\t0-19\t1\t\tN/A\n\
        GPU2\tSOC\tPXB\t X \tODD\t\t\t\tN/A\nmlx5_10\tPIX\tSYS\tSYS\t X \n\nLegend:\n\n  X    = Self\n  GPU9 = no\n";

    #[test]
    fn the_matrix_has_links_and_numa_nodes() {
        assert!(looks_like(TABS));
        let reading = parse(TABS).unwrap();
        assert_eq!(reading.warnings, Vec::<String>::new());
        let numbers: Vec<_> = reading.devices.iter().map(|device| (device.index, device.numa)).collect();
        assert_eq!(numbers, [(Some(0), Some(0)), (Some(1), Some(1)), (Some(2), None)]);
        assert_eq!(reading.devices[0].health, None);
        let links: Vec<_> = reading.links.iter().map(|link| (link.a, link.b, link.kind)).collect();
        let expected = [(0, 1, LinkKind::NvLink(12)), (0, 2, LinkKind::CrossNuma), (1, 2, LinkKind::PcieSwitches)];
        assert_eq!(links, expected);
    }

    #[test]
    fn spaces_replace_tabs_and_codes_may_lack_the_escape_character() {
        let blanks = TABS.replace('\t', "   ").replace('\x1b', "");
        assert!(looks_like(&blanks));
        assert_eq!(parse(&blanks).unwrap(), parse(TABS).unwrap());
    }

    #[test]
    fn many_escape_characters_without_a_code_are_dropped() {
        let signs = "\u{1b}".repeat(3 << 20);
        assert_eq!(strip_terminal_codes(&format!("a{signs}[1;4mb{signs}[2c[d\u{1b}")), "ab[2c[d");
    }

    #[test]
    fn every_link_type_is_parsed_and_an_unknown_one_is_a_warning() {
        let link = |word: &str| parse(&format!("\tGPU0\tGPU1\nGPU0\t X \t{word}\nGPU1\t{word}\t X \n")).unwrap();
        for (word, kind) in [
            ("NV4", LinkKind::NvLink(4)),
            ("PIX", LinkKind::PcieSwitch),
            ("PXB", LinkKind::PcieSwitches),
            ("PHB", LinkKind::HostBridge),
            ("NODE", LinkKind::SameNuma),
            ("SYS", LinkKind::CrossNuma),
            ("SOC", LinkKind::CrossNuma),
        ] {
            assert_eq!(link(word).links, [DetectedLink { a: 0, b: 1, kind }], "{word}");
        }
        assert!(link("N/A").links.is_empty() && link("N/A").warnings.is_empty());
        assert_eq!(link("WARP").warnings.len(), 2);
    }

    #[test]
    fn the_option_missing_on_windows_is_an_error() {
        let refused = parse("ERROR: Option -m is missing its value. Please run 'nvidia-smi -h' for help.\n");
        assert_eq!(refused.unwrap_err().code(), "malformed");
        assert!(!looks_like("GPU0 X"));
        assert_eq!(parse("").unwrap_err().code(), "malformed");
    }
}
