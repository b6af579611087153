//! What rocm-smi's keys mean, whichever of its forms they came in.

use std::collections::{BTreeMap, BTreeSet};

use gpupool_core::device::Vendor;
use gpupool_core::units::Bytes;

use super::facts::{self, Model};
use super::links::{Links, Way};
use super::quantity;
use super::rocm_smi_processes::Processes;
use super::settle::{Cut, settle};
use crate::address;
use crate::found::{Found, Watts};
use crate::limits;
use crate::snapshot::Snapshot;
use crate::told::Told;

/// Key under which every form files the name of a card.
pub(crate) const NAME: &str = "device name";
/// … the number of its kind.
pub(crate) const DEVICE_ID: &str = "device id";
/// … the revision of that.
pub(crate) const REVISION: &str = "device rev";
/// … its place on the bus.
pub(crate) const BUS: &str = "pci bus";
/// … which part of a card it is.
pub(crate) const PARTITION_ID: &str = "partition id";
/// … how the card is cut.
pub(crate) const COMPUTE_PARTITION: &str = "compute partition";
/// … how busy it is.
pub(crate) const USE: &str = "gpu use (%)";
/// … the temperature at the edge of the chip.
pub(crate) const EDGE: &str = "temperature (sensor edge) (c)";
/// … the temperature of its hottest spot.
pub(crate) const JUNCTION: &str = "temperature (sensor junction) (c)";
/// … the power it draws.
pub(crate) const POWER: &str = "average graphics package power (w)";
/// … the power it may draw.
pub(crate) const MAX_POWER: &str = "max graphics package power (w)";
/// … all of its memory.
pub(crate) const VRAM: &str = "vram total memory (b)";

type Keys = BTreeMap<String, String>;

/// What rocm-smi said of each card and of the machine. Keys are in small letters: their case changed over time.
#[derive(Debug, Default)]
pub(crate) struct Cards {
    cards: BTreeMap<u32, Keys>,
    system: Keys,
    /// Cards it said to be asleep.
    pub asleep: BTreeSet<u32>,
    /// Who uses the cards.
    pub processes: Processes,
    /// What it complained about.
    pub warnings: Vec<String>,
}

impl Cards {
    /// Whether there is none.
    pub(crate) fn is_empty(&self) -> bool {
        self.cards.is_empty()
    }

    /// Notes that a card is there.
    pub(crate) fn add(&mut self, card: u32) {
        self.keys_of(card);
    }

    /// The keys of a card; of one more than there may be, so that it can be said that there are too many.
    fn keys_of(&mut self, card: u32) -> Option<&mut Keys> {
        let room = self.cards.len() <= limits::DEVICES || self.cards.contains_key(&card);
        room.then(|| self.cards.entry(card).or_default())
    }

    /// Notes one thing said of a card; what was said before stays where this is no value.
    pub(crate) fn set(&mut self, card: u32, key: &str, value: &str) {
        let Some(keys) = self.keys_of(card) else { return };
        let key = small(key);
        if facts::says_something(value) || !keys.contains_key(&key) {
            keys.insert(key, value.trim().to_owned());
        }
    }

    /// Notes one thing said of the machine.
    pub(crate) fn set_system(&mut self, key: &str, value: &str) {
        self.system.insert(small(key), value.trim().to_owned());
    }

    /// The devices, in the order of their numbers.
    pub(crate) fn into_snapshot(self) -> Snapshot {
        let mut snapshot = Snapshot::default();
        for warning in self.warnings {
            snapshot.warn(warning);
        }
        let driver = self.system.get("driver version").and_then(|version| facts::driver_version(version));
        let (mut cuts, mut places) = (Vec::new(), BTreeMap::new());
        for (&number, keys) in &self.cards {
            let mut device = device(number, keys);
            device.driver = driver.clone();
            device.asleep = self.asleep.contains(&number);
            let Some(place) = snapshot.push(device) else { break };
            places.insert(number, place);
            let said = |key: &str| keys.get(key).map(String::as_str);
            cuts.push(Cut::new(said(PARTITION_ID), said(COMPUTE_PARTITION)));
        }
        links(&self.system, &places).give_to(&mut snapshot);
        settle(&mut snapshot, &cuts);
        self.processes.give_to(&mut snapshot, &places);
        snapshot
    }
}

fn small(key: &str) -> String {
    key.trim().trim_end_matches(':').trim_end().to_lowercase()
}

fn device(number: u32, keys: &Keys) -> Found {
    let said = |key: &str| keys.get(key).map(String::as_str);
    let mut found = Found::new(Vendor::Amd);
    found.index = Some(number);
    let names: Vec<&str> = [NAME, "card series", "card model"].into_iter().filter_map(said).collect();
    let others: Vec<&str> = said("card sku").into_iter().collect();
    let id = said(DEVICE_ID).or_else(|| said("gpu id"));
    let model = id.map(|id| Model { id, revision: said(REVISION) });
    found.name = facts::best_name(&names, model, &others);
    found.uuid = said("unique id").and_then(facts::unique_id);
    found.pci = said(BUS).and_then(address::parse);
    let numa = ["(topology) numa node", "(topology) numa affinity"];
    found.numa = numa.into_iter().filter_map(said).find_map(facts::numa_node);
    let bytes = |key: &str| told(keys, &[key], |text| quantity::bytes(text, "B"));
    found.memory.total = bytes(VRAM).and_not_zero();
    found.memory.used = bytes("vram total used memory (b)");
    found.memory.host_total = bytes("gtt total memory (b)");
    found.memory.host_used = bytes("gtt total used memory (b)");
    found.utilization = told(keys, &[USE], quantity::percent);
    let sensors = [EDGE, JUNCTION, "temperature (sensor hotspot) (c)", "temperature (sensor #1) (c)", "temperature"];
    found.temperature_c = told(keys, &sensors, quantity::celsius);
    found.power = told(keys, &power_keys(keys), quantity::watts);
    found.power_limit = told(keys, &[MAX_POWER], quantity::watts).and_not_zero();
    found
}

/// The keys a card's power is under: which there are changed with the cards (average, current, socket).
fn power_keys(keys: &Keys) -> Vec<&str> {
    let is_power = |key: &&str| key.ends_with("graphics package power (w)") && *key != MAX_POWER;
    keys.keys().map(String::as_str).filter(is_power).chain(["average gpu power"]).collect()
}

/// The first value under one of these keys; where there is none, why.
fn told<T>(keys: &Keys, names: &[&str], parse: impl Fn(&str) -> Option<T>) -> Told<T> {
    let said = names.iter().filter_map(|name| keys.get(*name));
    said.fold(Told::ABSENT, |known, text| known.or(Told::from_cell(text, &parse)))
}

/// Amounts of which nothing is no answer: a second die has a power limit of 0 W, a card that is lost 0 bytes.
pub(crate) trait AndNotZero {
    /// The same, with zero as unsupported.
    fn and_not_zero(self) -> Self;
}

impl AndNotZero for Told<Watts> {
    fn and_not_zero(self) -> Self {
        if self == Self::Value(Watts(0)) { Self::Unsupported("0 W".into()) } else { self }
    }
}

impl AndNotZero for Told<Bytes> {
    fn and_not_zero(self) -> Self {
        if self == Self::Value(Bytes(0)) { Self::Unsupported("0 bytes".into()) } else { self }
    }
}

/// The links in keys like `(Topology) Hops between DRM devices 0 and 1`.
fn links(system: &Keys, places: &BTreeMap<u32, usize>) -> Links {
    let mut ways: BTreeMap<(u32, u32), Way> = BTreeMap::new();
    for (key, value) in system {
        let Some((what, pair)) = key.split_once(" between drm devices ") else { continue };
        let Some((a, b)) = pair.split_once(" and ") else { continue };
        let (Ok(a), Ok(b)) = (a.trim().parse(), b.trim().parse()) else { continue };
        let way = ways.entry((a, b)).or_default();
        match what.trim_start_matches("(topology)").trim() {
            "weight" => way.weight = quantity::count(value),
            "hops" => way.hops = quantity::count(value),
            "link type" => way.kind = Some(value),
            _ => {}
        }
    }
    let mut links = Links::default();
    for ((a, b), way) in ways {
        if let (Some(&a), Some(&b), Some(kind)) = (places.get(&a), places.get(&b), way.link()) {
            links.join(a, b, kind);
        }
    }
    links
}
