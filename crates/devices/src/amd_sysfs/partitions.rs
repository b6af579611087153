//! Cards that are cut into parts: which parts there are, and what each may say.
//!
//! The parts of a card share its place on the bus and its unique number. The card measures its temperature and power
//! once, and its load and used memory for all of its parts together.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpupool_core::device::PciAddress;

use super::kfd::Node;
use crate::found::{Found, Partition};
use crate::told::Told;

/// A card: its place on the bus and its unique number.
type CardKey = (PciAddress, Option<u64>);

/// Which part of which card a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    pub card: CardKey,
    pub id: u16,
    /// Into how many parts it is cut; `None` where this part alone is to be seen.
    pub parts: Option<u16>,
    /// Compute dies of this part.
    dies: Option<u64>,
}

/// The devices that are, or may be, parts, each given with its place among all devices.
pub(crate) fn parts(gpus: &[(usize, &Node)]) -> Vec<(usize, Part)> {
    let mut cards: BTreeMap<CardKey, Vec<(usize, &Node)>> = BTreeMap::new();
    for (place, node) in gpus {
        if let Some(pci) = node.pci {
            cards.entry((pci, node.unique_id)).or_default().push((*place, node));
        }
    }
    let mut parts = Vec::new();
    for (card, mut members) in cards {
        members.sort_by_key(|(_, node)| (node.partition, node.number));
        let told_apart = members.windows(2).all(|pair| pair[0].1.partition < pair[1].1.partition);
        let highest = members.iter().map(|(_, node)| node.partition + 1).max().unwrap_or(0);
        let count = (members.len() > 1).then(|| highest.max(members.len() as u16));
        for (order, (place, node)) in members.into_iter().enumerate() {
            let id = if told_apart { node.partition } else { order as u16 };
            parts.push((place, Part { card, id, parts: count, dies: node.dies }));
        }
    }
    parts
}

/// The partition a part is, given how its card says it is cut; `None` where it is the whole card.
pub(crate) fn partition(part: Part, mode: Option<Arc<str>>) -> Option<Partition> {
    let is_alone = part.parts.is_none() && part.id == 0;
    if is_alone && mode.as_deref().is_none_or(|mode| mode == "SPX") {
        return None;
    }
    let mode = mode.filter(|mode| &**mode != "SPX").or_else(|| mode_by_parts(part).map(Into::into));
    Some(Partition::Amd { id: part.id, mode, parts: part.parts })
}

/// How a card is cut, by its parts. Only the finest cut leaves parts of one die, so that four of them are not `QPX`.
fn mode_by_parts(part: Part) -> Option<&'static str> {
    match (part.dies?, part.parts?) {
        (1, _) => Some("CPX"),
        (2.., 2) => Some("DPX"),
        (2.., 3) => Some("TPX"),
        (2.., 4) => Some("QPX"),
        _ => None,
    }
}

const OF_ALL_PARTS: &str = "the card tells this of all its partitions together";

/// Makes the readings of a card those of its first part: its own memory, and nothing the other parts have a share in.
pub(crate) fn keep_own(found: &mut Found, node: Option<&Node>) {
    found.memory.total = match node.map(|node| &node.memory) {
        Some(own @ Told::Value(_)) => own.clone(),
        _ => Told::Unsupported(OF_ALL_PARTS.into()),
    };
    found.memory.used = Told::Unsupported(OF_ALL_PARTS.into());
    found.utilization = Told::Unsupported(OF_ALL_PARTS.into());
}

/// Gives another part what its card measures for all; power counts once, with the first part.
pub(crate) fn take_from_card(found: &mut Found, card: &Found) {
    found.temperature_c = card.temperature_c.clone();
    found.memory.used = Told::Unsupported(OF_ALL_PARTS.into());
    found.utilization = Told::Unsupported(OF_ALL_PARTS.into());
    found.power = Told::Unsupported("counted with the first partition".into());
    found.power_limit = Told::Unsupported("counted with the first partition".into());
    found.health = card.health.clone();
    found.asleep = card.asleep;
    found.uuid = found.uuid.take().or_else(|| card.uuid.clone());
    found.numa = card.numa;
    found.driver = card.driver.clone();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(id: u16, parts: Option<u16>, dies: u64) -> Part {
        Part { card: (crate::address::from_location(0, 256), None), id, parts, dies: Some(dies) }
    }

    fn mode(part: Part, told: Option<&str>) -> Option<String> {
        match partition(part, told.map(Into::into))? {
            Partition::Amd { mode, .. } => mode.map(|mode| mode.to_string()),
            Partition::Mig { .. } => None,
        }
    }

    #[test]
    fn four_parts_are_a_quarter_each_only_where_they_have_several_dies() {
        assert_eq!(mode(part(1, Some(4), 2), None).as_deref(), Some("QPX"));
        assert_eq!(mode(part(1, Some(4), 1), None).as_deref(), Some("CPX"));
        assert_eq!(mode(part(1, Some(5), 2), None), None);
        assert_eq!(mode(part(1, Some(4), 1), Some("QPX")).as_deref(), Some("QPX"));
    }

    #[test]
    fn a_card_that_is_not_cut_is_no_partition() {
        assert_eq!(partition(part(0, None, 8), None), None);
        assert_eq!(partition(part(0, None, 8), Some("SPX".into())), None);
        let cut = partition(part(0, None, 1), Some("CPX".into()));
        assert_eq!(cut, Some(Partition::Amd { id: 0, mode: Some("CPX".into()), parts: None }));
    }
}
