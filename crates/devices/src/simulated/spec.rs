//! Description of simulated devices: `4xH100`, `2xMI300X,1xRTX4090`, `1xH100/3g.40gb/1g.10gb*4`, `1xMI300X/CPX`, or a
//! file.

use std::fs::File;
use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use gpupool_core::{Bytes, LinkKind, PciAddress};
use serde::Deserialize;

use crate::address::parse_pci_address;
use crate::limits;
use crate::simulated::faults::{FaultError, SimulatedFault};
use crate::simulated::models::{GpuFabric, GpuModel, MigProfile, PartitionMode, UnknownModel};

/// Maximum size of a file.
const MAX_FILE_BYTES: u64 = 1 << 20;

type SpecResult<T> = Result<T, SimulationSpecError>;

/// Simulated devices of a node, and their timing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimulationSpec {
    pub(crate) node: Option<String>,
    pub(crate) seed: u64,
    pub(crate) timing: SimTiming,
    pub(crate) cards: Vec<CardGroup>,
}

/// Cards of one model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CardGroup {
    pub model: &'static GpuModel,
    pub count: usize,
    pub partitioning: Partitioning,
    pub uuid: Option<Arc<str>>,
    pub pci: Option<PciAddress>,
    pub memory: Option<Bytes>,
    pub reserved: Option<Bytes>,
    pub fabric: Option<GpuFabric>,
    pub faults: Vec<SimulatedFault>,
}

/// Partitioning of each GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Partitioning {
    Whole,
    Mig(Vec<&'static MigProfile>),
    Amd(&'static PartitionMode),
}

/// Time that devices take to react.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SimTiming {
    pub memory_ramp: Duration,
    pub utilization_ramp: Duration,
    pub memory_drain: Duration,
    pub temperature: Duration,
}

impl Default for SimTiming {
    fn default() -> Self {
        Self {
            memory_ramp: Duration::from_secs(8),
            utilization_ramp: Duration::from_secs(2),
            memory_drain: Duration::from_millis(500),
            temperature: Duration::from_secs(20),
        }
    }
}

/// Reason why a description is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SimulationSpecError {
    /// The value of a field is not allowed.
    #[error("{field}: {value:?} is not allowed; allowed: {allowed}")]
    Field {
        field: String,
        /// Rejected value.
        value: String,
        allowed: String,
    },
    /// The model is unknown.
    #[error("{entry}{error}")]
    Model {
        /// Entry of the file; empty without a file.
        entry: String,
        /// Requested model and the known ones.
        error: UnknownModel,
    },
    /// The fault is invalid.
    #[error("{field}: {error}")]
    Fault { field: String, error: FaultError },
    /// The number of devices is not allowed.
    #[error("count: {asked} devices in total; allowed: 1 to {}", limits::DEVICES)]
    TooMany { asked: usize },
    /// The file is not valid TOML, or has unknown fields.
    #[error("simulated devices: {0}")]
    Toml(String),
    /// The file cannot be read.
    #[error("{path}: {why}")]
    File { path: String, why: String },
}

impl SimulationSpecError {
    pub(crate) fn field(field: impl Into<String>, value: &str, allowed: impl Into<String>) -> Self {
        Self::Field { field: field.into(), value: value.chars().take(64).collect(), allowed: allowed.into() }
    }
}

impl SimulationSpec {
    /// Parses a short text: `MODEL` or `COUNTxMODEL`, followed by `/PROFILE`, `/PROFILE*COUNT` or `/MODE` for each
    /// partition, separated by commas. The count is one of cards; an MI250X is a card with two devices.
    pub fn parse(text: &str) -> Result<Self, SimulationSpecError> {
        let items = text.split(',').map(str::trim);
        let cards = items.map(parse_cards).collect::<Result<_, _>>()?;
        Self { node: None, seed: 0, timing: SimTiming::default(), cards }.validate()
    }

    pub fn from_toml(text: &str) -> Result<Self, SimulationSpecError> {
        parse_file(text)?.validate()
    }

    /// Parses a text, or the TOML file of that path, if it ends in `.toml` or starts with `/`, `./` or `../`.
    pub fn load(text_or_path: &str) -> Result<Self, SimulationSpecError> {
        let text = text_or_path.trim();
        let is_path = text.to_ascii_lowercase().ends_with(".toml")
            || ["/", "./", "../"].iter().any(|start| text.starts_with(start));
        if !is_path {
            return Self::parse(text);
        }
        let failed = |why: String| SimulationSpecError::File { path: text.to_owned(), why };
        let file = File::open(text).map_err(|error| failed(error.to_string()))?;
        let mut content = String::new();
        // One byte more than allowed shows that a file is too long.
        let read = file.take(MAX_FILE_BYTES + 1).read_to_string(&mut content);
        match read {
            Err(error) => Err(failed(error.to_string())),
            Ok(bytes) if bytes as u64 > MAX_FILE_BYTES => Err(failed(format!("longer than {MAX_FILE_BYTES} bytes"))),
            Ok(_) => Self::from_toml(&content),
        }
    }

    /// Sets the name of the node, unless it is set. Devices of different nodes differ in identity.
    pub fn on_node(mut self, name: &str) -> Self {
        self.node.get_or_insert_with(|| name.to_owned());
        self
    }

    /// Returns the name of the node, if set.
    pub fn node(&self) -> Option<&str> {
        self.node.as_deref()
    }

    /// Returns the number of devices, including partitions and their parent GPUs.
    pub fn device_count(&self) -> usize {
        self.cards.iter().map(CardGroup::device_count).fold(0, usize::saturating_add)
    }

    fn validate(self) -> SpecResult<Self> {
        let asked = self.device_count();
        if !(1..=limits::DEVICES).contains(&asked) {
            return Err(SimulationSpecError::TooMany { asked });
        }
        for (place, cards) in self.cards.iter().enumerate() {
            let earlier = || self.cards.iter().take(place);
            let wrong = |field: &str, value: &str| {
                SimulationSpecError::field(format!("device[{place}].{field}"), value, "a unique value")
            };
            if let Some(uuid) = cards.uuid.as_deref().filter(|_| earlier().any(|other| other.uuid == cards.uuid)) {
                return Err(wrong("uuid", uuid));
            }
            if let Some(pci) = cards.pci.filter(|_| earlier().any(|other| other.pci == cards.pci)) {
                return Err(wrong("pci", &pci.to_string()));
            }
        }
        Ok(self)
    }
}

impl CardGroup {
    pub(crate) fn new(model: &'static GpuModel, count: usize, partitioning: Partitioning) -> Self {
        Self {
            model,
            count,
            partitioning,
            uuid: None,
            pci: None,
            memory: model.memory(),
            reserved: Bytes::from_mib(model.reserved_mib).filter(|reserved| !reserved.is_zero()),
            fabric: model.fabric,
            faults: Vec::new(),
        }
    }

    /// Returns the number of devices of these cards.
    pub(crate) fn device_count(&self) -> usize {
        let per_gpu = match &self.partitioning {
            Partitioning::Whole => 1,
            Partitioning::Mig(profiles) => 1 + profiles.len(),
            Partitioning::Amd(mode) => usize::from(mode.parts),
        };
        per_gpu.saturating_mul(self.model.dies.into()).saturating_mul(self.count)
    }
}

/// Parses one item of a short text.
fn parse_cards(item: &str) -> SpecResult<CardGroup> {
    let mut parts = item.split('/').map(str::trim);
    let (count, name) = split_count(parts.next().unwrap_or(""))?;
    let model = GpuModel::find(name).map_err(|error| SimulationSpecError::Model { entry: String::new(), error })?;
    let cuts: Vec<&str> = parts.collect();
    let partitioning = match cuts.as_slice() {
        [] => Partitioning::Whole,
        [mode] if !model.modes.is_empty() => amd_partitioning("partition", model, mode)?,
        profiles => mig_partitioning("mig", model, profiles)?,
    };
    Ok(CardGroup::new(model, count, partitioning))
}

/// Splits off the count before the `x`; the default is one.
fn split_count(text: &str) -> SpecResult<(usize, &str)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, rest) = text.split_at(digits);
    match rest.trim_start().strip_prefix(['x', 'X', '×', '*']) {
        Some(name) if digits > 0 => Ok((parse_count("count", number)?, name.trim())),
        _ => Ok((1, text)),
    }
}

fn parse_count(field: &str, number: &str) -> SpecResult<usize> {
    let is_valid = number.trim().parse().ok().filter(|count| (1..=limits::DEVICES).contains(count));
    is_valid.ok_or_else(|| SimulationSpecError::field(field, number, format!("1 to {}", limits::DEVICES)))
}

/// Returns the partitioning into MIG profiles, each optionally followed by `*COUNT`.
pub(crate) fn mig_partitioning(field: &str, model: &'static GpuModel, profiles: &[&str]) -> SpecResult<Partitioning> {
    if model.mig.is_empty() {
        return Err(SimulationSpecError::field(
            field,
            &profiles.join(", "),
            format!("nothing: {} has no MIG", model.key),
        ));
    }
    let names: Vec<&str> = model.mig.iter().map(|profile| profile.name).collect();
    let mut cut = Vec::new();
    for text in profiles {
        let (name, times) = text.split_once('*').unwrap_or((text, "1"));
        let profile =
            model.mig_profile(name).ok_or_else(|| SimulationSpecError::field(field, text, names.join(", ")))?;
        cut.extend(std::iter::repeat_n(profile, parse_count(field, times)?.min(16)));
    }
    let taken =
        cut.iter().fold((0, 0), |(compute, memory), profile| (compute + profile.compute, memory + profile.memory));
    let slices = (model.compute_slices(), model.memory_slices());
    if taken.0 > slices.0 || taken.1 > slices.1 {
        let allowed =
            format!("{} compute and {} memory slices in total, not {} and {}", slices.0, slices.1, taken.0, taken.1);
        return Err(SimulationSpecError::field(field, &profiles.join(", "), allowed));
    }
    Ok(Partitioning::Mig(cut))
}

/// Returns the partitioning by an AMD mode; `SPX` is none.
pub(crate) fn amd_partitioning(field: &str, model: &'static GpuModel, mode: &str) -> SpecResult<Partitioning> {
    if mode.trim().eq_ignore_ascii_case("SPX") {
        return Ok(Partitioning::Whole);
    }
    let names: Vec<&str> = std::iter::once("SPX").chain(model.modes.iter().map(|mode| mode.name)).collect();
    model.mode(mode).map(Partitioning::Amd).ok_or_else(|| SimulationSpecError::field(field, mode, names.join(", ")))
}

// TOML file that describes simulated devices.

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SpecDocument {
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

/// Maximum time that a device may take to react, in milliseconds.
const MAX_MS: u64 = 3_600_000;
/// Maximum memory of a device in MiB.
const MAX_MEMORY_MIB: u64 = 1 << 24;
/// Maximum length of a node's name in bytes.
const MAX_NAME_BYTES: usize = 253;

pub(crate) fn parse_file(text: &str) -> SpecResult<SimulationSpec> {
    let document: SpecDocument = toml::from_str(text).map_err(|error| SimulationSpecError::Toml(error.to_string()))?;
    if let Some(name) = document.node.as_deref().filter(|name| name.is_empty() || name.len() > MAX_NAME_BYTES) {
        return Err(SimulationSpecError::field("node", name, format!("a name of 1 to {MAX_NAME_BYTES} bytes")));
    }
    let cards = document.device.iter().enumerate().map(|(place, table)| DeviceEntry { place, table }.cards());
    Ok(SimulationSpec {
        node: document.node.clone(),
        seed: document.seed,
        timing: parse_timing(&document.timing)?,
        cards: cards.collect::<Result<_, _>>()?,
    })
}

fn parse_timing(table: &TimingTable) -> SpecResult<SimTiming> {
    let usual = SimTiming::default();
    let millis = |field: &str, given: Option<u64>, usual: Duration| match given {
        None => Ok(usual),
        Some(millis) if millis <= MAX_MS => Ok(Duration::from_millis(millis)),
        Some(millis) => {
            Err(SimulationSpecError::field(format!("timing.{field}"), &millis.to_string(), format!("0 to {MAX_MS}")))
        }
    };
    Ok(SimTiming {
        memory_ramp: millis("memory_ramp_ms", table.memory_ramp_ms, usual.memory_ramp)?,
        utilization_ramp: millis("utilization_ramp_ms", table.utilization_ramp_ms, usual.utilization_ramp)?,
        memory_drain: millis("memory_drain_ms", table.memory_drain_ms, usual.memory_drain)?,
        temperature: millis("temperature_ms", table.temperature_ms, usual.temperature)?,
    })
}

/// A `[[device]]` and its position, for messages.
struct DeviceEntry<'a> {
    place: usize,
    table: &'a DeviceTable,
}

impl DeviceEntry<'_> {
    fn cards(&self) -> SpecResult<CardGroup> {
        let table = self.table;
        let model = GpuModel::find(&table.model)
            .map_err(|error| SimulationSpecError::Model { entry: self.field(""), error })?;
        let mut cards = CardGroup::new(model, self.count()?, self.partitioning(model)?);
        cards.uuid = self.uuid(model)?;
        cards.pci = self.pci(model)?;
        self.memory(&mut cards)?;
        if let Some(links) = &table.links {
            cards.fabric = self.fabric(links)?;
        }
        let wrong = |list: &str, error| SimulationSpecError::Fault { field: self.field(list), error };
        for fault in &table.faults {
            cards.faults.push(fault.parse().map_err(|error| wrong("faults", error))?);
        }
        for &SquatterTable { pid, memory_mib, utilization } in &table.squatters {
            let squatter = SimulatedFault::Squatter { pid, memory_mib, utilization };
            squatter.check().map_err(|error| wrong("squatters", error))?;
            cards.faults.push(squatter);
        }
        Ok(cards)
    }

    fn count(&self) -> SpecResult<usize> {
        parse_count(&self.field("count"), &self.table.count.unwrap_or(1).to_string())
    }

    fn partitioning(&self, model: &'static GpuModel) -> SpecResult<Partitioning> {
        match (&self.table.mig, &self.table.partition) {
            (None, None) => Ok(Partitioning::Whole),
            (None, Some(mode)) => amd_partitioning(&self.field("partition"), model, mode),
            (Some(profiles), None) => {
                let profiles: Vec<&str> = profiles.iter().map(String::as_str).collect();
                mig_partitioning(&self.field("mig"), model, &profiles)
            }
            (Some(_), Some(mode)) => Err(self.wrong("partition", mode, "either mig or partition".into())),
        }
    }

    fn uuid(&self, model: &GpuModel) -> SpecResult<Option<Arc<str>>> {
        let Some(uuid) = self.table.uuid.as_deref() else { return Ok(None) };
        let is_valid = |rest: &str| rest.len() <= 64 && rest.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
        if !uuid.strip_prefix("GPU-").is_some_and(|rest| !rest.is_empty() && is_valid(rest)) {
            return Err(self.wrong("uuid", uuid, "GPU- and then letters, digits and hyphens".into()));
        }
        self.require_single_device("uuid", uuid, model)?;
        Ok(Some(uuid.into()))
    }

    fn pci(&self, model: &GpuModel) -> SpecResult<Option<PciAddress>> {
        let Some(text) = self.table.pci.as_deref() else { return Ok(None) };
        let address = parse_pci_address(text).ok_or_else(|| self.wrong("pci", text, "as in 0000:c1:00.0".into()))?;
        self.require_single_device("pci", text, model)?;
        Ok(Some(address))
    }

    /// Rejects an identity for an entry with several devices.
    fn require_single_device(&self, field: &str, value: &str, model: &GpuModel) -> SpecResult<()> {
        if self.table.count.unwrap_or(1) == 1 && model.dies == 1 {
            return Ok(());
        }
        Err(self.wrong(field, value, "only on an entry with one device".into()))
    }

    fn memory(&self, cards: &mut CardGroup) -> SpecResult<()> {
        if let Some(mib) = self.table.memory_mib {
            let allowed = match (&cards.partitioning, cards.memory) {
                (Partitioning::Mig(_), _) => Some("nothing beside mig, whose profiles define it".to_owned()),
                (_, None) => Some(format!("nothing: {} shares the memory of the host", cards.model.key)),
                _ if !(1..=MAX_MEMORY_MIB).contains(&mib) => Some(format!("1 to {MAX_MEMORY_MIB}")),
                _ => None,
            };
            if let Some(allowed) = allowed {
                return Err(self.wrong("memory_mib", &mib.to_string(), allowed));
            }
            cards.memory = Bytes::from_mib(mib);
            // The reserved memory of the model may exceed the configured memory.
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

    fn fabric(&self, text: &str) -> SpecResult<Option<GpuFabric>> {
        let (kind, number) = text.split_once(':').unwrap_or((text, ""));
        let number = number.trim().parse::<u8>().ok().filter(|number| (1..=18).contains(number));
        let link = match (kind.trim(), number) {
            ("pcie", None) if kind == text => return Ok(None),
            ("nvlink", Some(lanes)) => LinkKind::NvLink(lanes),
            ("xgmi", Some(hops)) => LinkKind::Xgmi(hops),
            _ => return Err(self.wrong("links", text, "pcie, nvlink:LANES or xgmi:HOPS (1 to 18)".into())),
        };
        Ok(Some(GpuFabric { link, group: usize::MAX }))
    }

    fn wrong(&self, field: &str, value: &str, allowed: String) -> SimulationSpecError {
        SimulationSpecError::field(self.field(field), value, allowed)
    }

    fn field(&self, field: &str) -> String {
        format!("device[{}].{field}", self.place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn counts(text: &str) -> Vec<(&'static str, usize)> {
        SimulationSpec::parse(text).unwrap().cards.iter().map(|cards| (cards.model.key, cards.count)).collect()
    }

    #[test]
    fn a_short_text_describes_the_devices() {
        assert_eq!(counts("4xH100"), [("H100", 4)]);
        assert_eq!(counts(" 2xMI300X , 1 x RTX 4090"), [("MI300X", 2), ("RTX4090", 1)]);
        assert_eq!(counts("h100"), [("H100", 1)]);
        for (text, devices) in [
            ("1xH100/1g.10gb*7", 8),
            ("2xH100/3g.40gb/2g.20gb", 6),
            ("1xMI300X/CPX", 8),
            ("MI300X/spx", 1),
            ("3xMI250X", 6),
        ] {
            assert_eq!(SimulationSpec::parse(text).unwrap().device_count(), devices, "{text}");
        }
    }

    #[test]
    fn an_invalid_text_is_refused_with_field_value_and_allowed_values() {
        for (text, error) in [
            ("", "model: \"\" is not known"),
            ("4x", "model: \"\" is not known"),
            ("H100,", "model: \"\" is not known"),
            ("0xH100", "count: \"0\" is not allowed; allowed: 1 to 1024"),
            ("99999999999999999999xH100", "count: \"99999999999999999999\" is not allowed"),
            ("1024xH100,1xA30", "count: 1025 devices in total; allowed: 1 to 1024"),
            ("1024xMI300X/CPX", "count: 8192 devices in total; allowed: 1 to 1024"),
            ("H100/1g.5gb", "mig: \"1g.5gb\" is not allowed; allowed: 1g.10gb, 1g.20gb"),
            ("H100/1g.10gb*8", "allowed: 7 compute and 8 memory slices in total, not 8 and 8"),
            ("T4/1g.10gb", "allowed: nothing: T4 has no MIG"),
            ("MI300X/TPX", "partition: \"TPX\" is not allowed; allowed: SPX, DPX, QPX, CPX"),
            ("missing.toml", "missing.toml: No such file"),
            ("/dev/zero", "/dev/zero: longer than 1048576 bytes"),
        ] {
            let message = SimulationSpec::load(text).unwrap_err().to_string();
            assert!(message.contains(error), "{text}: {message}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in "[0-9xX*×/., a-zA-Z]{0,40}|.{0,40}") {
            let _ = SimulationSpec::parse(&text);
            let _ = SimulationSpec::from_toml(&text);
        }
    }

    #[test]
    fn an_invalid_file_is_refused_with_field_value_and_allowed_values() {
        let device = |rest: &str| format!("[[device]]\nmodel = \"H100\"\n{rest}\n");
        for (text, error) in [
            ("".to_owned(), "count: 0 devices in total"),
            (device("colour = 1"), "unknown field `colour`"),
            (device("count = 0"), "device[0].count: \"0\" is not allowed; allowed: 1 to 1024"),
            (device("count = -1"), "line 3"),
            (device("uuid = \"7\""), "device[0].uuid: \"7\" is not allowed"),
            (device("count = 2\nuuid = \"GPU-1\""), "only on an entry with one device"),
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
            let message = SimulationSpec::from_toml(&text).unwrap_err().to_string();
            assert!(message.contains(error), "{text}: {message}");
        }
    }
}
