//! `nvidia-smi topo -m`: how GPUs are joined, as a matrix.

use std::collections::BTreeMap;

use gpupool_core::{LinkKind, Vendor};

use super::errors;
use crate::detected_device::DetectedDevice;
use crate::reported::truncate_text;
use crate::source::SourceError;
use crate::source_reading::{DetectedLink, SourceReading};

/// What people call this form.
pub(super) const NAME: &str = "nvidia-smi topo -m";

/// Whether a text is such a matrix.
pub(crate) fn looks_like(text: &str) -> bool {
    let text = without_colours(text);
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    lines.next().is_some_and(|line| Head::of(line).is_some())
        && lines.next().is_some_and(|row| row.split_whitespace().next().and_then(gpu).is_some())
}

/// GPUs by number, with their NUMA nodes and the links between them.
pub(crate) fn parse(text: &str) -> Result<SourceReading, SourceError> {
    errors::around(text, |text| {
        let text = without_colours(text);
        let mut lines = text.lines();
        let Some(head) = lines.by_ref().find_map(Head::of) else {
            return Err(SourceError::malformed(NAME, "it has no line of GPU names"));
        };
        let mut snapshot = SourceReading::default();
        let mut joined: Vec<(u32, u32, LinkKind)> = Vec::new();
        let mut places: BTreeMap<u32, usize> = BTreeMap::new();
        for line in lines.take_while(|line| !line.trim_start().starts_with("Legend")) {
            let mut words_of = line.split_whitespace();
            let Some(number) = words_of.next().and_then(gpu) else { continue };
            let cells: Vec<&str> = words_of.collect();
            if places.contains_key(&number) {
                continue;
            }
            let mut found = DetectedDevice::new(Vendor::Nvidia);
            found.index = Some(number);
            found.numa = head.numa(line, &cells);
            let Some(place) = snapshot.push(found) else { break };
            places.insert(number, place);
            if cells.len() < head.columns.len() {
                snapshot.warn(format!("GPU{number}: {} of {} columns", cells.len(), head.columns.len()));
            }
            for (column, cell) in head.columns.iter().zip(&cells) {
                let Some(other) = column.filter(|other| *other != number) else { continue };
                match kind(cell) {
                    Word::Link(kind) => joined.push((number, other, kind)),
                    Word::NotTold => {}
                    Word::Unknown => snapshot.warn(format!("GPU{number} to GPU{other}: {}", truncate_text(cell))),
                }
            }
        }
        let link = |(a, b, kind)| Some(DetectedLink::new(*places.get(&a)?, *places.get(&b)?, kind));
        snapshot.join(joined.into_iter().filter_map(link));
        Ok(snapshot)
    })
}

/// Adds to an answer what a matrix says of the same GPUs, which it knows by number only.
pub(crate) fn join(snapshot: &mut SourceReading, matrix: &SourceReading) {
    let same = |wanted: &DetectedDevice| {
        let place = |device: &DetectedDevice| device.index == wanted.index && !device.is_mig_instance();
        wanted.index.and_then(|_| snapshot.devices.iter().position(place))
    };
    let places: Vec<Option<usize>> = matrix.devices.iter().map(same).collect();
    for (place, device) in places.iter().zip(&matrix.devices) {
        if let Some(known) = place.and_then(|place| snapshot.devices.get_mut(place)) {
            known.numa = known.numa.or(device.numa);
        }
    }
    // An instance is where its GPU is, which stands before it.
    let mut numa = None;
    for device in &mut snapshot.devices {
        match device.partition {
            Some(_) => device.numa = device.numa.or(numa),
            None => numa = device.numa,
        }
    }
    snapshot.join(matrix.links.iter().filter_map(|link| link.moved(&places)));
    for warning in &matrix.warnings {
        snapshot.warn(warning.clone());
    }
}

/// The line of names above the matrix.
struct Head {
    /// For each column of the matrix the number of its GPU; `None` for network cards.
    columns: Vec<Option<u32>>,
    /// Whether the column after that of the processors is that of the NUMA node.
    has_numa: bool,
}

impl Head {
    fn of(line: &str) -> Option<Self> {
        // Names of two words (`CPU Affinity`, `GPU NUMA ID`) come after the matrix.
        let is_of_matrix = |word: &&str| !matches!(*word, "CPU" | "NUMA" | "GPU" | "X");
        let columns: Vec<Option<u32>> = line.split_whitespace().take_while(is_of_matrix).map(gpu).collect();
        let begins = columns.first().is_some_and(Option::is_some) && !line.split_whitespace().any(|word| word == "X");
        begins.then(|| Self { columns, has_numa: line.contains("NUMA Affinity") })
    }

    /// The NUMA node of a row, where it is one and can be told from the columns around it.
    fn numa(&self, line: &str, cells: &[&str]) -> Option<u32> {
        let place = self.columns.len() + 1;
        // The processors before it may be left out, which only tabs show.
        let by_tabs = || line.trim_start().split('\t').nth(place + 1);
        let cell = if line.contains('\t') { by_tabs() } else { cells.get(place).copied() };
        cell.filter(|_| self.has_numa)?.trim().parse().ok()
    }
}

/// The number in `GPU7`.
fn gpu(word: &str) -> Option<u32> {
    word.strip_prefix("GPU")?.parse().ok()
}

enum Word {
    Link(LinkKind),
    NotTold,
    Unknown,
}

fn kind(word: &str) -> Word {
    if let Some(lanes) = word.strip_prefix("NV").and_then(|lanes| lanes.parse().ok()) {
        return Word::Link(LinkKind::NvLink(lanes));
    }
    match word {
        "PIX" => Word::Link(LinkKind::PcieSwitch),
        "PXB" => Word::Link(LinkKind::PcieSwitches),
        "PHB" => Word::Link(LinkKind::HostBridge),
        "NODE" => Word::Link(LinkKind::SameNuma),
        // Old versions say `SOC`.
        "SYS" | "SOC" => Word::Link(LinkKind::CrossNuma),
        "X" | "N/A" | "-" => Word::NotTold,
        _ => Word::Unknown,
    }
}

/// A text without the codes that colour and underline it on a terminal, also where copying lost their first letter.
fn without_colours(text: &str) -> String {
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
            // Signs that begin no code are dropped at once: there may be very many.
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
    fn the_matrix_gives_links_and_nodes() {
        assert!(looks_like(TABS));
        let snapshot = parse(TABS).unwrap();
        assert_eq!(snapshot.warnings, Vec::<String>::new());
        let numbers: Vec<_> = snapshot.devices.iter().map(|device| (device.index, device.numa)).collect();
        assert_eq!(numbers, [(Some(0), Some(0)), (Some(1), Some(1)), (Some(2), None)]);
        assert_eq!(snapshot.devices[0].health, None);
        let links: Vec<_> = snapshot.links.iter().map(|link| (link.a, link.b, link.kind)).collect();
        let expected = [(0, 1, LinkKind::NvLink(12)), (0, 2, LinkKind::CrossNuma), (1, 2, LinkKind::PcieSwitches)];
        assert_eq!(links, expected);
    }

    #[test]
    fn blanks_do_for_tabs_and_lost_escapes_for_codes() {
        let blanks = TABS.replace('\t', "   ").replace('\x1b', "");
        assert!(looks_like(&blanks));
        assert_eq!(parse(&blanks).unwrap(), parse(TABS).unwrap());
    }

    #[test]
    fn signs_that_begin_no_code_are_dropped_however_many_they_are() {
        let signs = "\u{1b}".repeat(3 << 20);
        assert_eq!(without_colours(&format!("a{signs}[1;4mb{signs}[2c[d\u{1b}")), "ab[2c[d");
    }

    #[test]
    fn every_word_has_its_meaning_and_an_unknown_one_is_warned_of() {
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
    fn the_option_that_windows_does_not_have_is_an_error() {
        let refused = parse("ERROR: Option -m is missing its value. Please run 'nvidia-smi -h' for help.\n");
        assert_eq!(refused.unwrap_err().code(), "malformed");
        assert!(!looks_like("GPU0 X"));
        assert_eq!(parse("").unwrap_err().code(), "malformed");
    }
}
