//! `rocminfo`: the agents AMD's compute runtime sees, of which those of the type GPU are devices.

use std::collections::BTreeMap;

use gpupool_core::device::Vendor;
use gpupool_core::units::Bytes;

use super::facts;
use super::quantity;
use super::settle::{Cut, settle};
use super::table;
use super::tool_words;
use crate::address;
use crate::found::Found;
use crate::limits;
use crate::snapshot::Snapshot;
use crate::source::SourceError;
use crate::told::Told;

const FORMAT: &str = "rocminfo";

/// Whether a text is what rocminfo prints.
pub fn looks_like(text: &str) -> bool {
    let start: String = text.chars().take(1 << 12).collect();
    start.contains("HSA System Attributes") || start.contains("HSA Agents") || start.contains("ROCk module ")
}

/// The GPUs rocminfo lists, in the order of the runtime, which `ROCR_VISIBLE_DEVICES` counts in.
pub fn parse(text: &str) -> Result<Snapshot, SourceError> {
    let text = table::without_codes(text);
    let agents = agents(&text);
    if agents.is_empty() && !text.contains("HSA Agents") {
        return tool_words::without_devices(&tool_words::spoken_lines(&text), FORMAT);
    }
    let (mut snapshot, mut cuts) = (Snapshot::default(), Vec::new());
    for agent in agents.iter().filter(|agent| agent.is_gpu()) {
        let number = u32::try_from(snapshot.devices.len()).ok();
        if snapshot.push(Found { index: number, ..agent.device() }).is_none() {
            break;
        }
        cuts.push(agent.cut());
    }
    settle(&mut snapshot, &cuts);
    Ok(snapshot)
}

/// What is said of one agent, up to where its instruction sets begin.
#[derive(Debug, Default)]
struct Agent<'a> {
    fields: BTreeMap<&'a str, &'a str>,
    pools: Vec<Pool<'a>>,
}

#[derive(Debug, Default)]
struct Pool<'a> {
    segment: &'a str,
    size: &'a str,
}

/// The agents, each with its own fields and its pools of memory.
fn agents(text: &str) -> Vec<Agent<'_>> {
    let mut found: Vec<Agent> = Vec::new();
    let mut in_isa = false;
    for line in text.lines() {
        let trimmed = line.trim();
        if trimmed.strip_prefix("Agent ").is_some_and(|number| number.parse::<u32>().is_ok()) {
            if found.len() >= limits::DEVICES * 2 {
                return found;
            }
            found.push(Agent::default());
            in_isa = false;
            continue;
        }
        let Some(agent) = found.last_mut().filter(|_| !in_isa) else { continue };
        if trimmed.strip_prefix("Pool ").is_some_and(|number| number.parse::<u32>().is_ok()) {
            agent.pools.push(Pool::default());
        }
        let Some((key, value)) = trimmed.split_once(':') else { continue };
        let value = value.trim_start_matches(':').trim();
        match (key.trim(), agent.pools.last_mut()) {
            ("ISA Info", _) => in_isa = true,
            ("Segment", Some(pool)) => pool.segment = value,
            ("Size", Some(pool)) => pool.size = value,
            (_, Some(_)) => {}
            (key, None) => drop(agent.fields.entry(key).or_insert(value)),
        }
    }
    found
}

impl Agent<'_> {
    fn said(&self, key: &str) -> Option<&str> {
        self.fields.get(key).copied()
    }

    /// Whether it is a GPU. One cut off before it says so is known by its id.
    fn is_gpu(&self) -> bool {
        match self.said("Device Type") {
            Some(kind) => kind == "GPU",
            None => self.said("Uuid").is_some_and(|uuid| uuid.starts_with("GPU-")),
        }
    }

    /// The number that holds bus, device and function, and which partition in its highest bits.
    fn location(&self) -> Option<u32> {
        self.said("BDFID")?.split('(').next()?.trim().parse().ok()
    }

    fn cut(&self) -> Cut {
        let id = self.location().map(|location| (location >> 28) as u16).filter(|&id| id > 0);
        Cut { id, mode: None }
    }

    fn device(&self) -> Found {
        let mut found = Found::new(Vendor::Amd);
        let names: Vec<&str> = ["Marketing Name", "Name"].into_iter().filter_map(|key| self.said(key)).collect();
        found.name = facts::best_name(&names, None, &[]);
        found.uuid = self.said("Uuid").and_then(facts::unique_id);
        let domain = self.said("Domain").and_then(|domain| domain.parse().ok()).unwrap_or(0);
        found.pci = self.location().map(|location| address::from_location(domain, location));
        found.memory.total = self.memory().map_or(Told::ABSENT, Told::Value);
        found
    }

    /// Its own memory: the pool that is not kept in step with other processors. The other pools are the same memory.
    fn memory(&self) -> Option<Bytes> {
        let global = || self.pools.iter().filter(|pool| pool.segment.starts_with("GLOBAL"));
        let coarse = global().find(|pool| pool.segment.contains("COARSE GRAINED"));
        let size = coarse.or_else(|| global().next())?.size.split('(').next()?;
        quantity::bytes(size, "KB")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::found::Partition;

    fn agent(number: u32, uuid: &str, kind: &str, location: u32) -> String {
        format!(
            "*******\nAgent {number}\n*******\n  Name:                    gfx942\n  Uuid:                    {uuid}\n  \
             Marketing Name:          AMD Instinct MI300X\n  Device Type:             {kind}\n  Cache Info:\n    \
             L1:                      32(0x20) KB\n  BDFID:                   {location}\n  Packet Processor uCode:: 138\n  \
             Pool Info:\n    Pool 1\n      Segment:                 GLOBAL; FLAGS: FINE GRAINED\n      \
             Size:                    64(0x40) KB\n    Pool 2\n      Segment:                 GLOBAL; FLAGS: COARSE GRAINED\n      \
             Size:                    201310208(0xbffc000) KB\n  ISA Info:\n    ISA 1\n      \
             Name:                    amdgcn-amd-amdhsa--gfx942\n"
        )
    }

    fn listing(agents: &[String]) -> String {
        format!("ROCk module is loaded\n==========\nHSA Agents\n==========\n{}", agents.concat())
    }

    #[test]
    fn agents_of_the_type_gpu_are_devices() {
        let text = listing(&[
            agent(1, "CPU-XX", "CPU", 0),
            agent(2, "GPU-8d1457e2c20f59d2", "GPU", 9728),
            agent(3, "GPU-XX", "GPU", 17920),
        ]);
        assert!(looks_like(&text));
        let devices = parse(&text).unwrap().devices;
        assert_eq!(devices.len(), 2);
        assert_eq!(devices[0].index, Some(0));
        assert_eq!(devices[0].name.as_deref(), Some("AMD Instinct MI300X"));
        assert_eq!(devices[0].uuid.as_deref(), Some("GPU-8d1457e2c20f59d2"));
        assert_eq!(devices[0].pci.unwrap().to_string(), "0000:26:00.0");
        assert_eq!(devices[0].memory.total, Told::Value(Bytes(201_310_208 << 10)));
        assert_eq!(devices[0].health, None);
        assert_eq!(devices[1].uuid, None);
    }

    #[test]
    fn partitions_of_one_card_are_counted() {
        let part = |number, id: u32| agent(number, "GPU-8d1457e2c20f59d2", "GPU", id << 28 | 0x100);
        let devices = parse(&listing(&[part(1, 0), part(2, 1)])).unwrap().devices;
        assert_eq!(devices[1].partition, Some(Partition::Amd { id: 1, mode: None, parts: Some(2) }));
        assert_eq!(devices[1].pci, devices[0].pci);
    }

    #[test]
    fn without_driver_or_permission_there_is_an_error() {
        assert_eq!(
            parse("ROCk module is NOT loaded, possibly no GPU devices").unwrap_err().code(),
            "driver_not_loaded"
        );
        let refused = "ROCk module is loaded\nUnable to open /dev/kfd read-write: Permission denied\n";
        assert_eq!(parse(refused).unwrap_err().code(), "no_permission");
        assert!(parse(&listing(&[agent(1, "CPU-XX", "CPU", 0)])).unwrap().devices.is_empty());
    }
}
