//! `rocm-smi … --json`: an object of cards, each an object of keys and texts.

use serde_json::Value;

use super::json_text;
use super::quantity;
use super::rocm_smi_cards::Cards;
use super::tool_words;
use crate::snapshot::Snapshot;
use crate::source::SourceError;

const FORMAT: &str = "rocm-smi JSON";

/// Whether a text is rocm-smi's JSON, or what it prints in its place.
pub fn looks_like(text: &str) -> bool {
    let is_card = |after: &str| after.starts_with(|first: char| first.is_ascii_digit());
    let cards = text.contains('{') && text.split("\"card").skip(1).take(4).any(is_card);
    let of_machine = text.contains("\"system\"") && text.contains("\"Driver version\"");
    cards || of_machine || text.len() < 1 << 12 && text.contains("No JSON data to report")
}

/// The devices in rocm-smi's JSON.
pub fn parse(text: &str) -> Result<Snapshot, SourceError> {
    let found = json_text::find(text);
    let mut cards = Cards::default();
    for document in &found.documents {
        for (name, value) in document.as_object().into_iter().flatten() {
            take(&mut cards, name, value);
        }
    }
    if cards.is_empty() {
        return match found.problem {
            Some(problem) if found.lines.is_empty() => Err(SourceError::malformed(FORMAT, problem)),
            _ if found.lines.is_empty() && !found.documents.is_empty() => Ok(Snapshot::default()),
            _ => tool_words::without_devices(&found.lines, FORMAT),
        };
    }
    cards.warnings.extend(found.lines);
    cards
        .warnings
        .extend(found.problem.map(|problem| format!("{FORMAT}: devices after the cut are missing: {problem}")));
    Ok(cards.into_snapshot())
}

/// Takes what stands under one key of the root.
fn take(cards: &mut Cards, name: &str, value: &Value) {
    let texts =
        value.as_object().into_iter().flatten().filter_map(|(key, value)| Some((key, quantity::text_of(value)?)));
    if let Some(card) = name.strip_prefix("card").and_then(|number| number.parse().ok()) {
        cards.add(card);
        texts.for_each(|(key, text)| cards.set(card, key, &text));
        return;
    }
    if name != "system" {
        return;
    }
    for (key, text) in texts {
        match key.strip_prefix("PID").filter(|pid| pid.bytes().all(|byte| byte.is_ascii_digit())) {
            Some(pid) => {
                let (name, numbers) = name_and_numbers(&text);
                cards.processes.add(pid, &[&[name], numbers.as_slice()].concat());
            }
            None => cards.set_system(key, &text),
        }
    }
}

/// `name, devices, memory, …` of a process. A name may hold commas itself; at most four numbers follow it.
fn name_and_numbers(text: &str) -> (&str, Vec<&str>) {
    let is_number = |field: &&str| quantity::count(field).is_some() || *field == "UNKNOWN";
    let numbers = text.rsplit(',').map(str::trim).take_while(is_number).take(4);
    let mut numbers: Vec<&str> = numbers.collect();
    if numbers.len() > text.matches(',').count() {
        numbers.pop();
    }
    numbers.reverse();
    let end = text.rmatch_indices(',').nth(numbers.len().saturating_sub(1)).map_or(text.len(), |(at, _)| at);
    (&text[..if numbers.is_empty() { text.len() } else { end }], numbers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::found::{Partition, Watts};
    use crate::told::Told;
    use gpupool_core::device::{Health, LinkKind};
    use gpupool_core::units::{Bytes, Percent};

    const TWO: &str = r#"WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status
        {"card10": {"Card series": "0x1002", "Card model": "0x1002", "Card SKU": "D65209", "PCI Bus": "0000:C6:00.0",
                    "Unique ID": "0x719d230578348e8c", "Average Graphics Package Power (W)": "N/A (Secondary die)",
                    "Temperature (Sensor edge) (C)": "N/A", "Temperature (Sensor junction) (C)": "51.0",
                    "GPU use (%)": "5.2", "(Topology) Numa Affinity": "4294967295"},
         "card2": {"Card Series": "AMD Instinct MI250X", "PCI Bus": "0000:C1:00.0", "Unique ID": "0x719d230578348e8c",
                   "Current Socket Graphics Package Power (W)": "89.0", "Max Graphics Package Power (W)": "560.0",
                   "VRAM Total Memory (B)": "68702699520", "VRAM Total Used Memory (B)": "0", "GPU use (%)": "NaN",
                   "GTT Total Memory (B)": 135048462336, "(Topology) Numa Node": "3", "Compute Partition": "SPX"},
         "system": {"Driver version": "6.7.0", "PID77": "python3, 2, 4096, 0, 0",
                    "(Topology) Link type between DRM devices 2 and 10": "XGMI",
                    "(Topology) Hops between DRM devices 2 and 10": "1",
                    "(Topology) Weight between DRM devices 2 and 10": "15"}}"#;

    #[test]
    fn what_is_said_of_the_machine_alone_is_an_answer_without_devices() {
        let text = r#"{"system": {"Driver version": "6.8.5"}}"#;
        assert!(looks_like(text));
        assert!(parse(text).unwrap().devices.is_empty());
    }

    #[test]
    fn each_card_is_a_device_in_the_order_of_its_number() {
        let snapshot = parse(TWO).unwrap();
        let [first, second] = snapshot.devices.as_slice() else { panic!("{snapshot:?}") };
        assert_eq!((first.index, second.index), (Some(2), Some(10)));
        assert_eq!((first.name.as_deref(), second.name.as_deref()), (Some("AMD Instinct MI250X"), Some("D65209")));
        assert_eq!(first.uuid.as_deref(), Some("GPU-719d230578348e8c"));
        assert_eq!(second.pci.unwrap().to_string(), "0000:c6:00.0");
        assert_eq!(first.driver.as_deref(), Some("6.7.0"));
        assert_eq!((first.numa, second.numa), (Some(3), None));
        assert_eq!(first.memory.total, Told::Value(Bytes(68_702_699_520)));
        assert_eq!(first.memory.used, Told::Value(Bytes(0)));
        assert_eq!(first.memory.host_total, Told::Value(Bytes(135_048_462_336)));
        assert_eq!(first.utilization, Told::Failed("NaN".into()));
        assert_eq!(second.utilization, Told::Value(Percent(5200)));
        assert_eq!(second.temperature_c, Told::Value(51));
        assert_eq!(first.power_limit, Told::Value(Watts(560_000)));
        assert_eq!(first.health, Some(Health::Healthy));
        assert_eq!(first.partition, None);
        assert_eq!(snapshot.links.len(), 1);
        assert_eq!(snapshot.links[0].kind, LinkKind::Xgmi(1));
        assert!(snapshot.warnings[0].contains("low-power"));
    }

    #[test]
    fn the_power_of_a_second_die_is_not_made_up() {
        let snapshot = parse(TWO).unwrap();
        assert_eq!(snapshot.devices[0].power, Told::Value(Watts(89_000)));
        assert_eq!(snapshot.devices[1].power, Told::Unsupported("N/A (Secondary die)".into()));
    }

    #[test]
    fn processes_belong_to_a_device_only_where_there_is_one() {
        let two = parse(TWO).unwrap();
        assert!(matches!(two.devices[0].processes, Told::Unsupported(_)));
        assert!(two.warnings.iter().any(|warning| warning.contains("77")));
        let one =
            parse(r#"{"card0": {"GPU use (%)": "1"}, "system": {"PID77": "my, program, 1, 4096, 0, 0"}}"#).unwrap();
        let processes = one.devices[0].processes.value().unwrap();
        assert_eq!((processes[0].pid, processes[0].name.as_deref()), (77, Some("my, program")));
        assert_eq!(processes[0].memory, Told::Value(Bytes(4096)));
    }

    #[test]
    fn a_cut_off_document_keeps_the_cards_before_the_cut() {
        let cut = &TWO[..TWO.find("\"Current Socket").unwrap()];
        let snapshot = parse(cut).unwrap();
        assert_eq!(snapshot.devices.len(), 1);
        assert!(snapshot.warnings.iter().any(|warning| warning.contains("cut")));
        assert_eq!(parse("{\"card0\": {\"GPU").unwrap_err().code(), "malformed");
    }

    #[test]
    fn a_tool_without_devices_says_why() {
        assert!(parse("WARNING: No JSON data to report").unwrap().devices.is_empty());
        let none = parse("ERROR:root:Driver not initialized (amdgpu not found in modules)");
        assert_eq!(none.unwrap_err().code(), "driver_not_loaded");
    }

    #[test]
    fn a_partition_mode_makes_partitions() {
        let card = r#"{"Compute Partition": "CPX", "Partition ID": "1", "PCI Bus": "0000:01:00.0"}"#;
        let snapshot = parse(&format!("{{\"card0\": {card}, \"card1\": {}}}", card.replace("\"1\"", "\"0\""))).unwrap();
        let expected = Partition::Amd { id: 1, mode: Some("CPX".into()), parts: Some(2) };
        assert_eq!(snapshot.devices[0].partition, Some(expected));
    }

    #[test]
    fn it_is_told_from_other_json() {
        assert!(looks_like(TWO));
        assert!(!looks_like(r#"[{"gpu": 0, "card": "x"}]"#));
    }
}
