//! The TOML file that describes simulated devices.

use std::sync::Arc;
use std::time::Duration;

use gpupool_core::device::{LinkKind, PciAddress};
use gpupool_core::units::Bytes;
use serde::Deserialize;

use super::faults::Fault;
use super::models::{Fabric, Model};
use super::spec::{Cards, Cut, Spec, SpecError, Timing, amd_cut, mig_cut};
use crate::{address, limits};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    node: Option<String>,
    #[serde(default)]
    seed: u64,
    #[serde(default)]
    timing: TimingTable,
    #[serde(default)]
    device: Vec<DeviceTable>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct TimingTable {
    memory_ramp_ms: Option<u64>,
    utilization_ramp_ms: Option<u64>,
    memory_drain_ms: Option<u64>,
    temperature_ms: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceTable {
    model: String,
    count: Option<u64>,
    uuid: Option<String>,
    pci: Option<String>,
    memory_mib: Option<u64>,
    reserved_mib: Option<u64>,
    mig: Option<Vec<String>>,
    partition: Option<String>,
    links: Option<String>,
    #[serde(default)]
    faults: Vec<String>,
    #[serde(default)]
    squatters: Vec<SquatterTable>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SquatterTable {
    pid: u32,
    memory_mib: u64,
    #[serde(default)]
    utilization: u8,
}

/// Longest time a device may take to react, in thousandths of a second.
const MOST_MS: u64 = 3_600_000;
/// Largest memory of a device, in MiB.
const MOST_MIB: u64 = 1 << 24;
/// Longest name of a node.
const MOST_NAME: usize = 253;

pub(crate) fn read(text: &str) -> Result<Spec, SpecError> {
    let document: Document = toml::from_str(text).map_err(|error| SpecError::Toml(error.to_string()))?;
    if let Some(name) = document.node.as_deref().filter(|name| name.is_empty() || name.len() > MOST_NAME) {
        return Err(SpecError::field("node", name, format!("a name of 1 to {MOST_NAME} bytes")));
    }
    let cards = document.device.iter().enumerate().map(|(place, table)| Entry { place, table }.cards());
    Ok(Spec {
        node: document.node.clone(),
        seed: document.seed,
        timing: timing(&document.timing)?,
        cards: cards.collect::<Result<_, _>>()?,
    })
}

fn timing(table: &TimingTable) -> Result<Timing, SpecError> {
    let usual = Timing::default();
    let millis = |field: &str, given: Option<u64>, usual: Duration| match given {
        None => Ok(usual),
        Some(millis) if millis <= MOST_MS => Ok(Duration::from_millis(millis)),
        Some(millis) => {
            Err(SpecError::field(format!("timing.{field}"), &millis.to_string(), format!("0 to {MOST_MS}")))
        }
    };
    Ok(Timing {
        memory_ramp: millis("memory_ramp_ms", table.memory_ramp_ms, usual.memory_ramp)?,
        utilization_ramp: millis("utilization_ramp_ms", table.utilization_ramp_ms, usual.utilization_ramp)?,
        memory_drain: millis("memory_drain_ms", table.memory_drain_ms, usual.memory_drain)?,
        temperature: millis("temperature_ms", table.temperature_ms, usual.temperature)?,
    })
}

/// One `[[device]]`, which knows its place for what it has to say.
struct Entry<'a> {
    place: usize,
    table: &'a DeviceTable,
}

impl Entry<'_> {
    fn cards(&self) -> Result<Cards, SpecError> {
        let table = self.table;
        let model = Model::find(&table.model).map_err(|error| SpecError::Model { entry: self.field(""), error })?;
        let mut cards = Cards::new(model, self.count()?, self.cut(model)?);
        cards.uuid = self.uuid(model)?;
        cards.pci = self.pci(model)?;
        self.memory(&mut cards)?;
        if let Some(links) = &table.links {
            cards.fabric = self.fabric(links)?;
        }
        let wrong = |list: &str, error| SpecError::Fault { field: self.field(list), error };
        for fault in &table.faults {
            cards.faults.push(fault.parse().map_err(|error| wrong("faults", error))?);
        }
        for &SquatterTable { pid, memory_mib, utilization } in &table.squatters {
            let squatter = Fault::Squatter { pid, memory_mib, utilization };
            squatter.check().map_err(|error| wrong("squatters", error))?;
            cards.faults.push(squatter);
        }
        Ok(cards)
    }

    fn count(&self) -> Result<usize, SpecError> {
        let count = self.table.count.unwrap_or(1);
        let sound = usize::try_from(count).ok().filter(|count| (1..=limits::DEVICES).contains(count));
        sound.ok_or_else(|| self.wrong("count", &count.to_string(), format!("1 to {}", limits::DEVICES)))
    }

    fn cut(&self, model: &'static Model) -> Result<Cut, SpecError> {
        match (&self.table.mig, &self.table.partition) {
            (None, None) => Ok(Cut::Whole),
            (None, Some(mode)) => amd_cut(&self.field("partition"), model, mode),
            (Some(profiles), None) => {
                let profiles: Vec<&str> = profiles.iter().map(String::as_str).collect();
                mig_cut(&self.field("mig"), model, &profiles)
            }
            (Some(_), Some(mode)) => Err(self.wrong("partition", mode, "either mig or partition".into())),
        }
    }

    fn uuid(&self, model: &Model) -> Result<Option<Arc<str>>, SpecError> {
        let Some(uuid) = self.table.uuid.as_deref() else { return Ok(None) };
        let sound = |rest: &str| rest.len() <= 64 && rest.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
        if !uuid.strip_prefix("GPU-").is_some_and(|rest| !rest.is_empty() && sound(rest)) {
            return Err(self.wrong("uuid", uuid, "GPU- and then letters, digits and hyphens".into()));
        }
        self.alone("uuid", uuid, model)?;
        Ok(Some(uuid.into()))
    }

    fn pci(&self, model: &Model) -> Result<Option<PciAddress>, SpecError> {
        let Some(text) = self.table.pci.as_deref() else { return Ok(None) };
        let address = address::parse(text).ok_or_else(|| self.wrong("pci", text, "as in 0000:c1:00.0".into()))?;
        self.alone("pci", text, model)?;
        Ok(Some(address))
    }

    /// What names one device can be given to one only.
    fn alone(&self, field: &str, value: &str, model: &Model) -> Result<(), SpecError> {
        if self.table.count.unwrap_or(1) == 1 && model.dies == 1 {
            return Ok(());
        }
        Err(self.wrong(field, value, "only on an entry that is one device".into()))
    }

    fn memory(&self, cards: &mut Cards) -> Result<(), SpecError> {
        if let Some(mib) = self.table.memory_mib {
            let allowed = match (&cards.cut, cards.memory) {
                (Cut::Mig(_), _) => Some("nothing beside mig, whose profiles have theirs".to_owned()),
                (_, None) => Some(format!("nothing: {} shares the memory of its host", cards.model.key)),
                _ if !(1..=MOST_MIB).contains(&mib) => Some(format!("1 to {MOST_MIB}")),
                _ => None,
            };
            if let Some(allowed) = allowed {
                return Err(self.wrong("memory_mib", &mib.to_string(), allowed));
            }
            cards.memory = Bytes::from_mib(mib);
            // What the model's driver keeps may be more than there is now.
            cards.reserved = cards.reserved.filter(|reserved| Some(*reserved) < cards.memory);
        }
        if let Some(mib) = self.table.reserved_mib {
            let most = cards.memory.map_or(0, |memory| memory.as_mib().saturating_sub(1));
            if mib > most {
                return Err(self.wrong("reserved_mib", &mib.to_string(), format!("0 to {most}")));
            }
            cards.reserved = Bytes::from_mib(mib);
        }
        Ok(())
    }

    fn fabric(&self, text: &str) -> Result<Option<Fabric>, SpecError> {
        let (kind, number) = text.split_once(':').unwrap_or((text, ""));
        let number = number.trim().parse::<u8>().ok().filter(|number| (1..=18).contains(number));
        let link = match (kind.trim(), number) {
            ("pcie", None) if kind == text => return Ok(None),
            ("nvlink", Some(lanes)) => LinkKind::NvLink(lanes),
            ("xgmi", Some(hops)) => LinkKind::Xgmi(hops),
            _ => return Err(self.wrong("links", text, "pcie, nvlink:LANES or xgmi:HOPS (1 to 18)".into())),
        };
        Ok(Some(Fabric { link, group: usize::MAX }))
    }

    fn wrong(&self, field: &str, value: &str, allowed: String) -> SpecError {
        SpecError::field(self.field(field), value, allowed)
    }

    fn field(&self, field: &str) -> String {
        format!("device[{}].{field}", self.place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_file_is_answered_with_the_field_the_value_and_what_is_allowed() {
        let device = |rest: &str| format!("[[device]]\nmodel = \"H100\"\n{rest}\n");
        for (text, error) in [
            ("".to_owned(), "count: 0 devices in all"),
            (device("colour = 1"), "unknown field `colour`"),
            (device("count = 0"), "device[0].count: \"0\" is not allowed; allowed: 1 to 1024"),
            (device("count = -1"), "line 3"),
            (device("uuid = \"7\""), "device[0].uuid: \"7\" is not allowed"),
            (device("count = 2\nuuid = \"GPU-1\""), "only on an entry that is one device"),
            (device("pci = \"here\""), "device[0].pci: \"here\""),
            (device("memory_mib = 0"), "device[0].memory_mib: \"0\" is not allowed; allowed: 1 to 16777216"),
            (device("reserved_mib = 81559"), "device[0].reserved_mib: \"81559\" is not allowed; allowed: 0 to 81558"),
            (device("mig = [\"1g.10gb\"]\nmemory_mib = 5"), "nothing beside mig"),
            (device("mig = [\"9g\"]"), "device[0].mig: \"9g\" is not allowed; allowed: 1g.10gb"),
            (device("mig = []\npartition = \"CPX\""), "either mig or partition"),
            (device("links = \"string\""), "pcie, nvlink:LANES or xgmi:HOPS"),
            (device("faults = [\"melted\"]"), "device[0].faults: fault: \"melted\" is not allowed; allowed: lost"),
            (device("squatters = [{ pid = 0, memory_mib = 1 }]"), "device[0].squatters: pid: \"0\""),
            (device("[timing]\nmemory_ramp_ms = 9999999"), "timing.memory_ramp_ms: \"9999999\""),
            (device("pci = \"01:00.0\"") + &device("pci = \"0000:01:00.0\""), "device[1].pci: \"0000:01:00.0\""),
            ("node = \"\"\n".to_owned() + &device(""), "node: \"\" is not allowed"),
            ("[[device]]\nmodel = \"G100\"".to_owned(), "device[0].model: \"G100\" is not known"),
        ] {
            let said = Spec::from_toml(&text).unwrap_err().to_string();
            assert!(said.contains(error), "{text}: {said}");
        }
    }
}
