//! `rocm-smi … --csv`: a header of keys, and a line of values for each card.

use super::rocm_smi_cards::Cards;
use super::tool_words;
use crate::limits;
use crate::snapshot::Snapshot;
use crate::source::SourceError;

/// Whether a text is rocm-smi's CSV.
pub fn looks_like(text: &str) -> bool {
    let mut lines = text.lines().take(limits::WARNINGS).skip_while(|line| !line.starts_with("device,"));
    lines.next().is_some() && lines.next().is_some_and(|line| card(line).is_some() || line.starts_with("system,"))
}

/// The devices in rocm-smi's CSV. It writes no quotes: a value with a comma in it has lost that comma.
pub fn parse(text: &str) -> Result<Snapshot, SourceError> {
    let mut cards = Cards::default();
    let mut header: Vec<&str> = Vec::new();
    let mut outside = Vec::new();
    for line in text.lines() {
        let values = line.split(',').skip(1).map(str::trim);
        if line.starts_with("device,") {
            header = values.collect();
        } else if let Some(card) = card(line) {
            cards.add(card);
            header.iter().zip(values).for_each(|(key, value)| cards.set(card, key, value));
        } else if line.starts_with("system,") {
            header.iter().zip(values).for_each(|(key, value)| cards.set_system(key, value));
        } else if !line.trim().is_empty() && outside.len() < limits::WARNINGS {
            outside.push(line.trim().chars().take(limits::WORDS).collect());
        }
    }
    if cards.is_empty() {
        return tool_words::without_devices(&outside, "rocm-smi CSV");
    }
    cards.warnings = outside;
    Ok(cards.into_snapshot())
}

fn card(line: &str) -> Option<u32> {
    line.split(',').next()?.strip_prefix("card")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::told::Told;
    use gpupool_core::units::{Bytes, Percent};

    #[test]
    fn a_line_of_csv_is_a_card() {
        let text = "device,GPU use (%),VRAM Total Memory (B),Card Series,Card SKU\n\
                    card0,12,21458059264,Radeon RX 7900 XT,D70401XT\ncard1,N/A\n";
        assert!(looks_like(text));
        let devices = parse(text).unwrap().devices;
        assert_eq!(devices[0].utilization, Told::Value(Percent(12_000)));
        assert_eq!(devices[0].memory.total, Told::Value(Bytes(21_458_059_264)));
        assert_eq!(devices[0].name.as_deref(), Some("Radeon RX 7900 XT"));
        assert_eq!(devices[1].utilization, Told::Unsupported("N/A".into()));
        assert!(!looks_like("device,x\nother,1\n"));
    }
}
