//! The processes rocm-smi lists, which it seldom says the devices of.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpupool_core::units::Bytes;

use super::facts;
use super::quantity;
use crate::found::{Doing, Process};
use crate::limits;
use crate::snapshot::Snapshot;
use crate::told::Told;

/// One process that has the compute driver open.
#[derive(Debug, Clone, Default)]
struct Listed {
    name: Option<Arc<str>>,
    /// On how many devices it is.
    devices: Option<u64>,
    /// Memory on all of them.
    memory: Told<Bytes>,
    /// On which, where that was said.
    on: Vec<u32>,
}

/// Every process rocm-smi listed.
#[derive(Debug, Default)]
pub(crate) struct Processes {
    by_pid: BTreeMap<u32, Listed>,
    /// Set where it said that there is none.
    pub none: bool,
}

impl Processes {
    /// Adds one from its columns: name, number of devices, bytes of memory.
    pub(crate) fn add(&mut self, pid: &str, columns: &[&str]) {
        let Ok(pid) = pid.trim().parse::<u32>() else { return };
        if self.by_pid.len() >= limits::PROCESSES {
            return;
        }
        let column = |number: usize| columns.get(number).map_or("", |text| text.trim());
        let listed = self.by_pid.entry(pid).or_default();
        let name = Some(column(0)).filter(|name| facts::says_something(name));
        listed.name = name.map(|name| name.chars().take(limits::WORDS).collect::<String>().into());
        listed.devices = quantity::count(column(1));
        listed.memory = Told::from_cell(column(2), |text| quantity::bytes(text, "B"));
    }

    /// Notes the devices one is on.
    pub(crate) fn place(&mut self, pid: u32, on: Vec<u32>) {
        if let Some(listed) = self.by_pid.get_mut(&pid) {
            listed.on = on;
        }
    }

    /// Gives each device its processes, or says that nobody knows which are whose. `places` are those of the numbers.
    pub(crate) fn give_to(self, snapshot: &mut Snapshot, places: &BTreeMap<u32, usize>) {
        if self.by_pid.is_empty() && !self.none {
            return;
        }
        let only = if snapshot.devices.len() == 1 { Some(0) } else { None };
        let mut lists: Vec<Vec<Process>> = vec![Vec::new(); snapshot.devices.len()];
        for (&pid, listed) in &self.by_pid {
            let on: Vec<usize> = match only {
                Some(_) if listed.devices == Some(0) && listed.memory == Told::Value(Bytes(0)) => continue,
                Some(place) => vec![place],
                None => listed.on.iter().filter_map(|number| places.get(number)).copied().collect(),
            };
            if on.is_empty() || on.len() < listed.on.len() {
                return self.unknown(snapshot);
            }
            let memory = if on.len() == 1 { listed.memory.clone() } else { Told::ABSENT };
            for place in on {
                let (name, memory) = (listed.name.clone(), memory.clone());
                lists[place].push(Process { pid, name, doing: Doing::Compute, memory, ..Process::default() });
            }
        }
        for (device, list) in snapshot.devices.iter_mut().zip(lists) {
            device.processes = Told::Value(list);
        }
    }

    fn unknown(&self, snapshot: &mut Snapshot) {
        for device in &mut snapshot.devices {
            device.processes = Told::Unsupported("listed for all devices together".into());
        }
        let pids: Vec<String> = self.by_pid.keys().take(8).map(u32::to_string).collect();
        let more = if self.by_pid.len() > pids.len() { ", …" } else { "" };
        snapshot.warn(format!("rocm-smi does not say which devices these processes use: {}{more}", pids.join(", ")));
    }
}
