//! What rocm-smi prints for people: tables, and lines of `GPU[0] : key: value`.

use super::rocm_smi_cards::{Cards, EDGE, MAX_POWER, POWER, USE, VRAM};
use super::rocm_smi_tables::{self, Table};
use super::table;
use super::tool_words;
use crate::snapshot::Snapshot;
use crate::source::SourceError;

const FORMAT: &str = "rocm-smi text";

/// Whether a text is what rocm-smi prints for people.
pub fn looks_like(text: &str) -> bool {
    let start: String = text.chars().take(1 << 14).collect();
    start.contains("ROCm System Management Interface")
        || start.contains("ROCm SMI Log")
        || start.lines().any(|line| gpu_line(line).is_some() || Table::begins(line).is_some())
        || tool_words::is_refusal(&start) && !start.contains("ROCk module ")
}

/// The devices in what rocm-smi prints for people.
pub fn parse(text: &str) -> Result<Snapshot, SourceError> {
    let text = table::without_codes(text);
    let mut cards = Cards::default();
    let mut open: Option<Table> = None;
    let mut listing = Listing::Nothing;
    for line in text.lines() {
        if let Some(table) = &mut open {
            if table.take(line, &mut cards) {
                continue;
            }
            open = None;
        }
        match gpu_line(line) {
            Some((card, rest)) => take_line(&mut cards, card, rest),
            None => {
                open = Table::begins(line);
                listing = listing.next(line, &mut cards);
            }
        }
    }
    rocm_smi_tables::take_squares(&text, &mut cards);
    if cards.is_empty() {
        return tool_words::without_devices(&tool_words::spoken_lines(&text), FORMAT);
    }
    cards.warnings.extend(tool_words::complaints(&text));
    Ok(cards.into_snapshot())
}

/// A line about one card, and what it says: `GPU[0]   : …`.
fn gpu_line(line: &str) -> Option<(u32, &str)> {
    let (number, rest) = line.trim_start().strip_prefix("GPU[")?.split_once(']')?;
    let (between, said) = rest.split_once(':')?;
    // A value of one part of a card (`GPU[0] XCP[1] : …`) is not the card's.
    between.trim().is_empty().then_some(())?;
    Some((number.parse().ok()?, said.trim()))
}

fn take_line(cards: &mut Cards, card: u32, said: &str) {
    cards.add(card);
    let lower = said.to_lowercase();
    if lower.contains("low-power state") {
        cards.asleep.insert(card);
        cards.warnings.push(format!("GPU[{card}]: {said}"));
        return;
    }
    if let Some((key, value)) = said.split_once(':') {
        return cards.set(card, key, value);
    }
    if let Some((call, why)) = said.split_once(", ")
        && let Some(key) = key_of_call(call)
    {
        // In words that read as a field the card cannot give, or failed to.
        let cannot = why.to_lowercase().contains("not supported");
        cards.set(card, key, &if cannot { format!("N/A ({why})") } else { format!("[{why}]") });
    }
}

/// Which field a call of rocm-smi's library was for: it prints the call in place of a value that it did not get.
fn key_of_call(call: &str) -> Option<&'static str> {
    let keys = [
        ("get_power_cap", MAX_POWER),
        ("get_power_avg", POWER),
        ("get_power", POWER),
        ("get_temp_metric", EDGE),
        ("GPU Utilization", USE),
        ("get_memory_total_vram", VRAM),
        ("get_memory_total_VRAM", VRAM),
    ];
    if call.starts_with("get_power_cap_") || call.starts_with("get_power_profile") {
        return None;
    }
    keys.iter().find(|(start, _)| call.trim().starts_with(start)).map(|(_, key)| *key)
}

/// Where in the lists of processes a line stands.
enum Listing {
    Nothing,
    /// Below the header of the table of processes.
    Processes,
    /// Below a line that says how many devices a process uses; these come next.
    DevicesOf(u32),
}

impl Listing {
    fn next(self, line: &str, cards: &mut Cards) -> Self {
        let line = line.trim();
        if let Some(version) = line.strip_prefix("Driver version:") {
            cards.set_system("Driver version", version);
        } else if line.contains("No KFD PIDs currently running") {
            cards.processes.none = true;
        } else if line.starts_with("PID") && line.contains("PROCESS NAME") {
            return Self::Processes;
        } else if let Some(rest) = line.strip_prefix("PID ")
            && let Some((pid, _)) = rest.split_once(" is using ")
        {
            return pid.trim().parse().map_or(Self::Nothing, Self::DevicesOf);
        } else if line.starts_with('=') {
            return Self::Nothing;
        }
        match self {
            Self::Processes => {
                let columns: Vec<&str> = line.split('\t').collect();
                let cells: Vec<&str> = table::cells(line).iter().map(|cell| cell.text).collect();
                if let Some((pid, rest)) = if columns.len() > 2 { &columns } else { &cells }.split_first() {
                    cards.processes.add(pid, rest);
                }
                self
            }
            Self::DevicesOf(pid) => {
                cards.processes.place(pid, line.split_whitespace().filter_map(|word| word.parse().ok()).collect());
                Self::Nothing
            }
            Self::Nothing => self,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::found::{Partition, Watts};
    use crate::told::Told;
    use gpupool_core::device::{Health, LinkKind};
    use gpupool_core::units::{Bytes, Percent};

    const OLD: &str = "
========================ROCm System Management Interface========================
================================================================================
GPU  Temp   AvgPwr  SCLK    MCLK    Fan     Perf  PwrCap  VRAM%  GPU%
0    34.0c  21.0W   858Mhz  350Mhz  0.0%    auto  220.0W    0%   7%
1    N/A    N/A     None    350Mhz  0.0%    auto  unsupported    0%   unsupported
================================================================================
==============================End of ROCm SMI Log ==============================
";

    const NEW: &str = "WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status

=================== ROCm System Management Interface ===================
============================= Concise Info =============================
Device  Node  IDs              Temp    Power  Partitions          SCLK  MCLK   Fan    Perf    PwrCap  VRAM%  GPU%
\u{1b}[3m              (DID,     GUID)  (Edge)  (Avg)  (Mem, Compute, ID)                          \u{1b}[0m
========================================================================
0       1     0x740c,   34495  43.0°C  89.5W  NPS1, SPX, 0        0Mhz  96Mhz  0%     manual  560.0W  3%     0%
1       2     0x740c,   22215  34.0°C  N/A    NPS4, DPX, 0        0Mhz  96Mhz  20.0%  manual  0.0W    0%     100%
2       3     0x740c,   22215  34.0°C  N/A    NPS4, DPX, 1        0Mhz  96Mhz  20.0%  manual  0.0W    0%     100%
========================================================================
";

    #[test]
    fn the_old_table_is_read_by_its_columns() {
        let snapshot = parse(OLD).unwrap();
        assert!(looks_like(OLD));
        let [first, second] = snapshot.devices.as_slice() else { panic!("{snapshot:?}") };
        assert_eq!(first.temperature_c, Told::Value(34));
        assert_eq!(first.power, Told::Value(Watts(21_000)));
        assert_eq!(first.power_limit, Told::Value(Watts(220_000)));
        assert_eq!(first.utilization, Told::Value(Percent(7000)));
        assert_eq!(first.memory.total, Told::ABSENT);
        assert_eq!(first.health, Some(Health::Healthy));
        assert_eq!(second.health, None);
        for told in [&second.power, &second.power_limit] {
            assert!(matches!(told, Told::Unsupported(_)), "{told:?}");
        }
    }

    #[test]
    fn the_new_table_has_two_lines_of_header() {
        let snapshot = parse(NEW).unwrap();
        assert_eq!(snapshot.devices.len(), 3);
        assert_eq!(snapshot.devices[0].name.as_deref(), Some("AMD Instinct MI250X / MI250"));
        assert_eq!(snapshot.devices[0].power, Told::Value(Watts(89_500)));
        assert_eq!(snapshot.devices[0].partition, None);
        let second = &snapshot.devices[2];
        assert_eq!(second.partition, Some(Partition::Amd { id: 1, mode: Some("DPX".into()), parts: Some(2) }));
        assert_eq!(second.utilization, Told::Value(Percent::FULL));
        assert!(matches!(second.power_limit, Told::Unsupported(_)));
        assert!(snapshot.warnings[0].contains("low-power"));
        assert!(!second.asleep);
    }

    #[test]
    fn a_name_below_a_row_is_that_cards() {
        let text = "
Device  [Model : Revision]    Temp        Power     Partitions      SCLK   PwrCap  VRAM%  GPU%
        Name (20 chars)       (Junction)  (Socket)  (Mem, Compute)
==============================================================================================
0       [0x74a1 : 0x00]       40.0°C      102.0W    NPS1, SPX       31Mhz  750.0W    0%   0%
        AMD Instinct MI300X
1       [0x74a1 : 0x00]       41.0°C      103.0W    NPS1, SPX       31Mhz  750.0W    0%   0%
        AMD Instinct MI300X
==============================================================================================
";
        let snapshot = parse(text).unwrap();
        let names: Vec<_> = snapshot.devices.iter().map(|device| device.name.as_deref()).collect();
        assert_eq!(names, [Some("AMD Instinct MI300X"); 2]);
        assert_eq!(snapshot.devices[1].temperature_c, Told::Value(41));
    }

    #[test]
    fn lines_about_cards_mean_what_the_json_keys_mean() {
        let text = "
============================ ROCm System Management Interface ============================
Driver version: 6.7.0
GPU[0]\t\t: Unique ID: 0x8d1457e2c20f59d2
GPU[0]\t\t: PCI Bus: 0000:26:00.0
GPU[0]\t\t: Card series: \t\tAMD Instinct MI300X
GPU[0]\t\t: Temperature (Sensor junction) (C): 35.0
GPU[0]\t\t: Current Socket Graphics Package Power (W): 133.0
GPU[0]\t\t: GPU use (%): Expected integer value from monitor, but got \"\"
GPU[0]\t\t: get_power_cap, Not supported on the given system
GPU[0] XCP[1]\t: GPU use (%): 55
GPU[1]\t\t: get_temp_metric_edge, Unexpected data
GPU[1]\t\t: device is in a low-power state
ERROR: GPU[1]\t: Unable to get Average or Current Socket Graphics Package Power Consumption
";
        let snapshot = parse(text).unwrap();
        let [first, second] = snapshot.devices.as_slice() else { panic!("{snapshot:?}") };
        assert_eq!(first.name.as_deref(), Some("AMD Instinct MI300X"));
        assert_eq!(first.driver.as_deref(), Some("6.7.0"));
        assert_eq!(first.uuid.as_deref(), Some("GPU-8d1457e2c20f59d2"));
        assert_eq!(first.power, Told::Value(Watts(133_000)));
        assert!(matches!(&first.utilization, Told::Failed(words) if words.starts_with("Expected integer")));
        assert!(matches!(&first.power_limit, Told::Unsupported(_)));
        assert!(matches!(&second.temperature_c, Told::Failed(_)));
        assert!(second.asleep);
        assert!(snapshot.warnings.iter().any(|warning| warning.starts_with("ERROR: GPU[1]")));
    }

    #[test]
    fn processes_are_placed_by_the_devices_they_are_said_to_use() {
        let cards = "GPU[0]\t\t: GPU use (%): 1\nGPU[1]\t\t: GPU use (%): 1\nKFD process information:\n\
                     PID\tPROCESS NAME\tGPU(s)\tVRAM USED\tSDMA USED\tCU OCCUPANCY\t\n\
                     77\tpython3 x\t1\t4096\t0\t0\t\n====\nPID 77 is using 1 DRM device(s):\n";
        let placed = parse(&format!("{cards}1 \n====\n")).unwrap();
        assert_eq!(placed.devices[0].processes, Told::Value(Vec::new()));
        let process = &placed.devices[1].processes.value().unwrap()[0];
        assert_eq!((process.pid, process.name.as_deref()), (77, Some("python3 x")));
        assert_eq!(process.memory, Told::Value(Bytes(4096)));
        let unknown = parse(cards).unwrap();
        assert!(matches!(unknown.devices[0].processes, Told::Unsupported(_)));
        let none = parse("GPU[0]\t\t: GPU use (%): 1\nNo KFD PIDs currently running\n").unwrap();
        assert_eq!(none.devices[0].processes, Told::Value(Vec::new()));
    }

    #[test]
    fn tables_between_gpus_become_links() {
        let text = "
============================ ROCm System Management Interface ============================
================================= Hops between two GPUs ==================================
       GPU0         GPU1         GPU2
GPU0   0            1            3
GPU1   1            0            2
GPU2   3            2            0
=============================== Link Type between two GPUs ===============================
       GPU0         GPU1         GPU2
GPU0   0            XGMI         PCIE
GPU1   XGMI         0            PCIE
GPU2   PCIE         PCIE         0
";
        let snapshot = parse(text).unwrap();
        let kinds: Vec<_> = snapshot.links.iter().map(|link| (link.a, link.b, link.kind)).collect();
        assert_eq!(kinds, [(0, 1, LinkKind::Xgmi(1)), (0, 2, LinkKind::CrossNuma), (1, 2, LinkKind::SameNuma)]);
        assert_eq!(snapshot.devices[0].health, None);
    }

    #[test]
    fn a_missing_driver_is_an_error_whatever_the_exit_code() {
        let text = "ERROR:root:Driver not initialized (amdgpu not found in modules)\n";
        assert!(looks_like(text));
        assert_eq!(parse(text).unwrap_err().code(), "driver_not_loaded");
    }
}
