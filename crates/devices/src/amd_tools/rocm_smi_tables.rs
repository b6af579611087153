//! The tables of rocm-smi: the concise one in its layouts, the one of the hardware, and those between devices.

use super::rocm_smi_cards::{
    BUS, COMPUTE_PARTITION, Cards, DEVICE_ID, EDGE, JUNCTION, MAX_POWER, NAME, PARTITION_ID, POWER, REVISION, USE,
};
use super::table::{self, Cell, Edge};

/// A table being read.
#[derive(Debug)]
pub(crate) struct Table<'a> {
    header: Vec<Cell<'a>>,
    /// The second line of the header, where it has one.
    below: Vec<Cell<'a>>,
    card: Option<u32>,
}

impl<'a> Table<'a> {
    /// The table that begins with this line, if one does.
    pub(crate) fn begins(line: &'a str) -> Option<Self> {
        let header = table::cells(line);
        let first = header.first()?.text;
        let has = |names: &[&str]| header.iter().any(|cell| names.iter().any(|name| cell.text.starts_with(name)));
        let is_table = matches!(first, "GPU" | "Device") && has(&["Temp", "DID"]) && header.len() > 3;
        is_table.then_some(Self { header, below: Vec::new(), card: None })
    }

    /// Takes one more line of it; `false` where the table has ended.
    pub(crate) fn take(&mut self, line: &'a str, cards: &mut Cards) -> bool {
        let trimmed = line.trim();
        if trimmed.is_empty() || trimmed.starts_with('=') {
            // One such line stands below the header, the next ends the table.
            return self.card.is_none();
        }
        let row = table::row(&self.header, line, Edge::Left);
        let number = row.first().filter(|(column, _)| *column == 0).map(|(_, cell)| cell.text.parse());
        match (number, self.card) {
            (Some(Ok(card)), _) => {
                cards.add(card);
                self.card = Some(card);
                self.fill(card, &row, cards);
            }
            // The name of a card stands by itself below its row.
            (None, Some(card)) => cards.set(card, NAME, trimmed),
            (None, None) => self.below = table::cells(line),
            (Some(Err(_)), _) => return self.card.is_none(),
        }
        true
    }

    fn fill(&self, card: u32, row: &[(usize, Cell)], cards: &mut Cards) {
        for (column, heading) in self.header.iter().enumerate() {
            let texts: Vec<&str> = row.iter().filter(|(at, _)| *at == column).map(|(_, cell)| cell.text).collect();
            let Some(first) = texts.first() else { continue };
            let below =
                self.below.iter().find(|cell| table::column_of(&self.header, **cell, Edge::Left) == Some(column));
            let below = below.map_or("", |cell| cell.text);
            match heading.text {
                "DID" | "IDs" => cards.set(card, DEVICE_ID, first.split(',').next().unwrap_or_default()),
                "BUS" => cards.set(card, BUS, first),
                "PARTITION ID" => cards.set(card, PARTITION_ID, first),
                "AvgPwr" | "Power" => cards.set(card, POWER, first),
                "PwrCap" => cards.set(card, MAX_POWER, first),
                "GPU%" => cards.set(card, USE, first),
                "Partitions" => partitions(card, &texts.join(" "), below, cards),
                text if text.starts_with("Temp") => cards.set(card, sensor(&format!("{text} {below}")), first),
                text if text.starts_with("[Model") => {
                    let (model, revision) = first.trim_matches(['[', ']']).split_once(':').unwrap_or((first, ""));
                    cards.set(card, DEVICE_ID, model.trim());
                    cards.set(card, REVISION, revision);
                }
                _ => {}
            }
        }
    }
}

/// The key of the sensor a column shows. Before rocm-smi named it, it was that of the edge.
fn sensor(heading: &str) -> &'static str {
    let heading = heading.to_lowercase();
    if heading.contains("junction") || heading.contains("hotspot") { JUNCTION } else { EDGE }
}

/// `NPS1, SPX, 0` under `(Mem, Compute, ID)`.
fn partitions(card: u32, text: &str, below: &str, cards: &mut Cards) {
    let names = if below.is_empty() { "Mem, Compute, ID" } else { below.trim_matches(['(', ')']) };
    for (name, value) in names.split(',').zip(text.split(',')) {
        match name.trim() {
            "Compute" => cards.set(card, COMPUTE_PARTITION, value),
            "ID" => cards.set(card, PARTITION_ID, value),
            _ => {}
        }
    }
}

/// Files the tables between devices under the keys rocm-smi uses for them in JSON.
pub(crate) fn take_squares(text: &str, cards: &mut Cards) {
    for square in table::squares(text) {
        let what = square.title.split(" between ").next().unwrap_or_default().to_owned();
        let numbers: Vec<u32> = square.names.iter().filter_map(|name| name.strip_prefix("GPU")?.parse().ok()).collect();
        numbers.iter().for_each(|&number| cards.add(number));
        for (a, row) in numbers.iter().zip(&square.rows) {
            for (b, value) in numbers.iter().zip(row).filter(|(b, _)| a < b) {
                let what = if ["XGMI", "PCIE"].contains(&value.as_str()) { "Link type" } else { &what };
                cards.set_system(&format!("(Topology) {what} between DRM devices {a} and {b}"), value);
            }
        }
    }
}
