//! What the fields of amd-smi mean: one tree for each GPU, as its JSON has it; its text is read to the same tree.

use std::collections::BTreeMap;

use gpupool_core::device::Vendor;
use serde_json::{Map, Value};

use super::amd_smi_links;
use super::amd_smi_processes;
use super::facts;
use super::quantity;
use super::rocm_smi_cards::AndNotZero;
use super::settle::{Cut, settle};
use crate::address;
use crate::found::Found;
use crate::limits;
use crate::snapshot::Snapshot;
use crate::told::Told;

/// The GPUs of one or several answers of amd-smi, each with all that was said of it.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Trees {
    /// By the number amd-smi gives the GPU.
    gpus: BTreeMap<u32, Value>,
}

impl Trees {
    /// The GPUs in a document: a list of them, bare or under `gpu_data`, or one alone.
    pub(crate) fn add_document(&mut self, document: Value) {
        match document {
            Value::Array(items) => items.into_iter().for_each(|item| self.add(item)),
            Value::Object(mut root) => match root.remove("gpu_data") {
                Some(Value::Array(items)) => items.into_iter().for_each(|item| self.add(item)),
                Some(one) => self.add(one),
                None => self.add(Value::Object(root)),
            },
            _ => {}
        }
    }

    /// Adds what was said of one GPU; things without a number, such as CPUs, are left out.
    pub(crate) fn add(&mut self, tree: Value) {
        let Some(number) = tree.get("gpu").and_then(number) else { return };
        // `monitor` repeats a GPU for each of its parts; what it says of the first is what it says of the GPU.
        if tree.get("xcp").and_then(self::number).is_some_and(|part| part > 0) {
            return;
        }
        // One more than may be is enough to say that there are too many.
        if self.gpus.len() > limits::DEVICES && !self.gpus.contains_key(&number) {
            return;
        }
        let known = self.gpus.entry(number).or_insert_with(|| Value::Object(Map::new()));
        overlay(known, tree);
    }

    /// Adds all that other answers said, over what is known.
    pub(crate) fn add_all(&mut self, other: &Self) {
        other.gpus.values().cloned().for_each(|tree| self.add(tree));
    }

    /// Whether there is none.
    pub(crate) fn is_empty(&self) -> bool {
        self.gpus.is_empty()
    }

    /// Which GPUs there are.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u32> {
        self.gpus.keys().copied()
    }

    /// The devices, in amd-smi's order.
    pub(crate) fn snapshot(&self) -> Snapshot {
        let mut snapshot = Snapshot::default();
        let (mut cuts, mut places) = (Vec::new(), BTreeMap::new());
        for (&number, tree) in &self.gpus {
            let tree = Tree(tree);
            let Some(place) = snapshot.push(device(number, tree)) else { break };
            places.insert(number, place);
            let modes = ["partition.compute_partition", "partition.accelerator_partition", "compute_partition"];
            let ids = ["partition_id", "partition.partition_id"];
            cuts.push(Cut::new(tree.first(&ids).as_deref(), tree.first(&modes).as_deref()));
            warn_of_errors(&mut snapshot, number, tree);
        }
        amd_smi_links::links(&self.gpus, &places).give_to(&mut snapshot);
        settle(&mut snapshot, &cuts);
        snapshot
    }
}

/// Lays `new` over `known`: objects key by key; a value is not overwritten by the lack of one.
fn overlay(known: &mut Value, new: Value) {
    match (known, new) {
        (Value::Object(known), Value::Object(new)) if !new.contains_key("value") => {
            for (key, value) in new {
                match known.get_mut(&key) {
                    Some(known) => overlay(known, value),
                    None => drop(known.insert(key, value)),
                }
            }
        }
        (known, new) => {
            let says = quantity::text_of(&new).is_none_or(|text| facts::says_something(&text));
            if says {
                *known = new;
            }
        }
    }
}

pub(crate) fn number(value: &Value) -> Option<u32> {
    quantity::count(&quantity::text_of(value)?)?.try_into().ok()
}

/// What was said of one GPU, by paths like `asic.market_name`.
#[derive(Clone, Copy)]
pub(crate) struct Tree<'a>(pub &'a Value);

impl<'a> Tree<'a> {
    fn at(self, path: &str) -> Option<&'a Value> {
        path.split('.').try_fold(self.0, |tree, key| tree.get(key))
    }

    /// The texts at these paths, in their order.
    fn texts(self, paths: &[&str]) -> Vec<String> {
        paths.iter().filter_map(|path| quantity::text_of(self.at(path)?)).collect()
    }

    /// The first of them that says something.
    pub(crate) fn first(self, paths: &[&str]) -> Option<String> {
        self.texts(paths).into_iter().find(|text| facts::says_something(text))
    }

    /// The first value at these paths; where there is none, why.
    pub(crate) fn told<T>(self, paths: &[&str], parse: impl Fn(&str) -> Option<T>) -> Told<T> {
        let texts = self.texts(paths);
        texts.iter().fold(Told::ABSENT, |known, text| known.or(Told::from_cell(text, &parse)))
    }
}

/// A device from its tree. The paths are those of amd-smi's versions, the newest and most exact first.
fn device(number: u32, tree: Tree) -> Found {
    let mut found = Found::new(Vendor::Amd);
    found.index = Some(number);
    let render = tree.first(&["render", "drm_render"]);
    found.minor = render.and_then(|render| render.rsplit("renderD").next()?.parse().ok());
    let names = tree.texts(&["asic.market_name", "board.product_name", "market_name"]);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let (id, revision) = (tree.first(&["asic.device_id"]), tree.first(&["asic.rev_id"]));
    let model = id.as_deref().map(|id| facts::Model { id, revision: revision.as_deref() });
    found.name = facts::best_name(&names, model, &[]);
    let ids = tree.texts(&["asic.asic_serial", "asic_serial", "hip_uuid", "unique_id"]);
    let long = || tree.first(&["uuid"]).and_then(|uuid| facts::unique_id(&uuid).or_else(|| facts::long_uuid(&uuid)));
    found.uuid = ids.iter().find_map(|id| facts::unique_id(id)).or_else(long);
    found.pci = tree.first(&["bus.bdf", "bdf"]).and_then(|bdf| address::parse(&bdf));
    let driver = tree.first(&["driver.version", "driver.driver_version", "driver_version"]);
    found.driver = driver.and_then(|version| facts::driver_version(&version));
    found.numa = tree.first(&["numa.node"]).and_then(|node| facts::numa_node(&node));
    memory(&mut found, tree);
    found.utilization =
        tree.told(&["usage.gfx_activity", "usage.gfx_usage", "gfx", "gfx_util", "gfx%"], quantity::percent);
    let temperature = [
        "temperature.edge",
        "temperature.edge_temperature",
        "temperature.hotspot",
        "temperature.hotspot_temperature",
        "hotspot_temperature",
        "gpu_temp",
        "gpu_t",
    ];
    found.temperature_c = tree.told(&temperature, quantity::celsius);
    let power = [
        "power.socket_power",
        "power.current_socket_power",
        "power.average_socket_power",
        "power.current_power",
        "power.average_power",
        "power_usage",
        "power",
    ];
    found.power = tree.told(&power, quantity::watts);
    let limit = [
        "limit.socket_power",
        "limit.socket_power_limit",
        "limit.ppt0.socket_power_limit",
        "limit.power_cap",
        "limit.current_power",
        "power.power_limit",
        "limit.max_power",
        "limit.max_power_limit",
        "limit.ppt0.max_power_limit",
    ];
    let caps = limit.iter().map(|path| tree.told(&[path], quantity::watts).and_not_zero());
    found.power_limit = caps.fold(Told::ABSENT, Told::or);
    found.processes = amd_smi_processes::processes(tree.0);
    found
}

fn memory(found: &mut Found, tree: Tree) {
    let megabytes = |paths: &[&str]| tree.told(paths, |text| quantity::bytes(text, "MB"));
    // Newer tables have both in one cell: `0.3/192.0 GB`.
    let part = |used: bool| {
        tree.told(&["vram_usage"], move |text| {
            let (first, second) = text.split_once('/')?;
            let unit = second.trim().trim_start_matches(|c: char| c.is_ascii_digit() || c == '.').trim();
            quantity::bytes(if used { first } else { second }, if unit.is_empty() { "MB" } else { unit })
        })
    };
    let total =
        ["mem_usage.total_vram", "vram.size", "vram.vram_size", "vram.vram_size_mb", "vram_total", "fb_usage.fb_total"];
    found.memory.total = megabytes(&total).or(part(false)).and_not_zero();
    found.memory.used = megabytes(&["mem_usage.used_vram", "vram_used", "fb_usage.fb_used"]).or(part(true));
    found.memory.host_total = megabytes(&["mem_usage.total_gtt"]);
    found.memory.host_used = megabytes(&["mem_usage.used_gtt"]);
}

/// Errors of memory that could not be corrected. The count alone does not make a device unfit: pages are retired.
fn warn_of_errors(snapshot: &mut Snapshot, number: u32, tree: Tree) {
    let paths = ["ecc.total_uncorrectable_count", "ecc.total_uncorrectable", "ecc.uncorrectable_count", "double_ecc"];
    if let Told::Value(count @ 1..) = tree.told(&paths, quantity::count) {
        snapshot.warn(format!(
            "GPU {number}: {count} errors of memory that could not be corrected since the driver was loaded"
        ));
    }
}
