//! Which devices are simulated: `4xH100`, `2xMI300X,1xRTX4090`, `1xH100/3g.40gb/1g.10gb*4`, `1xMI300X/CPX`, or a file.

use std::fs::File;
use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use gpupool_core::{Bytes, LinkKind, PciAddress};
use serde::Deserialize;

use crate::address::parse_pci_address;
use crate::limits;
use crate::simulated::faults::{FaultError, SimulatedFault};
use crate::simulated::models::{Fabric, MigProfile, Mode, Model, UnknownModel};

/// Longest file that is read.
const FILE_BYTES: u64 = 1 << 20;

/// Which devices are simulated on a node, and how quickly they behave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimulationSpec {
    pub(crate) node: Option<String>,
    pub(crate) seed: u64,
    pub(crate) timing: Timing,
    pub(crate) cards: Vec<Cards>,
}

/// Some cards of one model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cards {
    pub model: &'static Model,
    pub count: usize,
    pub cut: Cut,
    pub uuid: Option<Arc<str>>,
    pub pci: Option<PciAddress>,
    pub memory: Option<Bytes>,
    pub reserved: Option<Bytes>,
    pub fabric: Option<Fabric>,
    pub faults: Vec<SimulatedFault>,
}

/// How each GPU is cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cut {
    Whole,
    Mig(Vec<&'static MigProfile>),
    Amd(&'static Mode),
}

/// How long devices take to react.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Timing {
    pub memory_ramp: Duration,
    pub utilization_ramp: Duration,
    pub memory_drain: Duration,
    pub temperature: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            memory_ramp: Duration::from_secs(8),
            utilization_ramp: Duration::from_secs(2),
            memory_drain: Duration::from_millis(500),
            temperature: Duration::from_secs(20),
        }
    }
}

/// Why devices cannot be simulated as described.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SimulationSpecError {
    /// A field holds what it cannot.
    #[error("{field}: {value:?} is not allowed; allowed: {allowed}")]
    Field {
        field: String,
        /// What it holds.
        value: String,
        /// What it may hold.
        allowed: String,
    },
    /// There is no such model.
    #[error("{entry}{error}")]
    Model {
        /// Which entry of a file, if it is one.
        entry: String,
        /// What was asked for.
        error: UnknownModel,
    },
    /// There is no such fault.
    #[error("{field}: {error}")]
    Fault {
        field: String,
        /// What is wrong with the fault.
        error: FaultError,
    },
    /// They are too many.
    #[error("count: {asked} devices in all; allowed: 1 to {}", limits::DEVICES)]
    TooMany { asked: usize },
    /// The file is no TOML, or not of the right shape.
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
    /// The devices of a short text: `MODEL`, `COUNTxMODEL`, with `/PROFILE`, `/PROFILE*COUNT` or `/MODE` behind it for
    /// each cut, separated by commas. The count is of cards, and an MI250X is a card with two devices.
    pub fn parse(text: &str) -> Result<Self, SimulationSpecError> {
        let items = text.split(',').map(str::trim);
        let cards = items.map(cards_of).collect::<Result<_, _>>()?;
        Self { node: None, seed: 0, timing: Timing::default(), cards }.checked()
    }

    /// The devices of a TOML file.
    pub fn from_toml(text: &str) -> Result<Self, SimulationSpecError> {
        read_file(text)?.checked()
    }

    /// The devices of a text, or of the TOML file whose path it is: one that ends in `.toml` or starts with `/`, `./`
    /// or `../`.
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
        // One byte more than allowed, so that a file that is too long is not taken for a shorter one.
        let read = file.take(FILE_BYTES + 1).read_to_string(&mut content);
        match read {
            Err(error) => Err(failed(error.to_string())),
            Ok(bytes) if bytes as u64 > FILE_BYTES => Err(failed(format!("longer than {FILE_BYTES} bytes"))),
            Ok(_) => Self::from_toml(&content),
        }
    }

    /// The same devices on a node of this name, unless one was given. Devices of different nodes differ in identity.
    pub fn on_node(mut self, name: &str) -> Self {
        self.node.get_or_insert_with(|| name.to_owned());
        self
    }

    /// The node's name, where one was given.
    pub fn node(&self) -> Option<&str> {
        self.node.as_deref()
    }

    /// How many devices there are, partitions and the GPUs they are cut from included.
    pub fn device_count(&self) -> usize {
        self.cards.iter().map(Cards::device_count).fold(0, usize::saturating_add)
    }

    fn checked(self) -> Result<Self, SimulationSpecError> {
        let asked = self.device_count();
        if !(1..=limits::DEVICES).contains(&asked) {
            return Err(SimulationSpecError::TooMany { asked });
        }
        for (place, cards) in self.cards.iter().enumerate() {
            let earlier = || self.cards.iter().take(place);
            let wrong = |field: &str, value: &str| {
                SimulationSpecError::field(format!("device[{place}].{field}"), value, "one that no other device has")
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

impl Cards {
    pub(crate) fn new(model: &'static Model, count: usize, cut: Cut) -> Self {
        Self {
            model,
            count,
            cut,
            uuid: None,
            pci: None,
            memory: model.memory(),
            reserved: Bytes::from_mib(model.reserved_mib).filter(|reserved| !reserved.is_zero()),
            fabric: model.fabric,
            faults: Vec::new(),
        }
    }

    /// How many devices these cards are.
    pub(crate) fn device_count(&self) -> usize {
        let per_gpu = match &self.cut {
            Cut::Whole => 1,
            Cut::Mig(profiles) => 1 + profiles.len(),
            Cut::Amd(mode) => usize::from(mode.parts),
        };
        per_gpu.saturating_mul(self.model.dies.into()).saturating_mul(self.count)
    }
}

/// One item of a short text.
fn cards_of(item: &str) -> Result<Cards, SimulationSpecError> {
    let mut parts = item.split('/').map(str::trim);
    let (count, name) = counted(parts.next().unwrap_or(""))?;
    let model = Model::find(name).map_err(|error| SimulationSpecError::Model { entry: String::new(), error })?;
    let cuts: Vec<&str> = parts.collect();
    let cut = match cuts.as_slice() {
        [] => Cut::Whole,
        [mode] if !model.modes.is_empty() => amd_cut("partition", model, mode)?,
        profiles => mig_cut("mig", model, profiles)?,
    };
    Ok(Cards::new(model, count, cut))
}

/// The count before the `x`, or one.
fn counted(text: &str) -> Result<(usize, &str), SimulationSpecError> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, rest) = text.split_at(digits);
    match rest.trim_start().strip_prefix(['x', 'X', '×', '*']) {
        Some(name) if digits > 0 => Ok((count("count", number)?, name.trim())),
        _ => Ok((1, text)),
    }
}

fn count(field: &str, number: &str) -> Result<usize, SimulationSpecError> {
    let sound = number.trim().parse().ok().filter(|count| (1..=limits::DEVICES).contains(count));
    sound.ok_or_else(|| SimulationSpecError::field(field, number, format!("1 to {}", limits::DEVICES)))
}

/// The cut into these MIG profiles, each with `*COUNT` behind it where there are several.
pub(crate) fn mig_cut(field: &str, model: &'static Model, profiles: &[&str]) -> Result<Cut, SimulationSpecError> {
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
        cut.extend(std::iter::repeat_n(profile, count(field, times)?.min(16)));
    }
    let taken =
        cut.iter().fold((0, 0), |(compute, memory), profile| (compute + profile.compute, memory + profile.memory));
    let slices = (model.compute_slices(), model.memory_slices());
    if taken.0 > slices.0 || taken.1 > slices.1 {
        let allowed =
            format!("{} compute and {} memory slices in all, not {} and {}", slices.0, slices.1, taken.0, taken.1);
        return Err(SimulationSpecError::field(field, &profiles.join(", "), allowed));
    }
    Ok(Cut::Mig(cut))
}

/// The cut by this AMD mode; `SPX` is none.
pub(crate) fn amd_cut(field: &str, model: &'static Model, mode: &str) -> Result<Cut, SimulationSpecError> {
    if mode.trim().eq_ignore_ascii_case("SPX") {
        return Ok(Cut::Whole);
    }
    let names: Vec<&str> = std::iter::once("SPX").chain(model.modes.iter().map(|mode| mode.name)).collect();
    model.mode(mode).map(Cut::Amd).ok_or_else(|| SimulationSpecError::field(field, mode, names.join(", ")))
}

// The TOML file that describes simulated devices.

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

pub(crate) fn read_file(text: &str) -> Result<SimulationSpec, SimulationSpecError> {
    let document: Document = toml::from_str(text).map_err(|error| SimulationSpecError::Toml(error.to_string()))?;
    if let Some(name) = document.node.as_deref().filter(|name| name.is_empty() || name.len() > MOST_NAME) {
        return Err(SimulationSpecError::field("node", name, format!("a name of 1 to {MOST_NAME} bytes")));
    }
    let cards = document.device.iter().enumerate().map(|(place, table)| Entry { place, table }.cards());
    Ok(SimulationSpec {
        node: document.node.clone(),
        seed: document.seed,
        timing: timing(&document.timing)?,
        cards: cards.collect::<Result<_, _>>()?,
    })
}

fn timing(table: &TimingTable) -> Result<Timing, SimulationSpecError> {
    let usual = Timing::default();
    let millis = |field: &str, given: Option<u64>, usual: Duration| match given {
        None => Ok(usual),
        Some(millis) if millis <= MOST_MS => Ok(Duration::from_millis(millis)),
        Some(millis) => {
            Err(SimulationSpecError::field(format!("timing.{field}"), &millis.to_string(), format!("0 to {MOST_MS}")))
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
    fn cards(&self) -> Result<Cards, SimulationSpecError> {
        let table = self.table;
        let model =
            Model::find(&table.model).map_err(|error| SimulationSpecError::Model { entry: self.field(""), error })?;
        let mut cards = Cards::new(model, self.count()?, self.cut(model)?);
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

    fn count(&self) -> Result<usize, SimulationSpecError> {
        count(&self.field("count"), &self.table.count.unwrap_or(1).to_string())
    }

    fn cut(&self, model: &'static Model) -> Result<Cut, SimulationSpecError> {
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

    fn uuid(&self, model: &Model) -> Result<Option<Arc<str>>, SimulationSpecError> {
        let Some(uuid) = self.table.uuid.as_deref() else { return Ok(None) };
        let sound = |rest: &str| rest.len() <= 64 && rest.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
        if !uuid.strip_prefix("GPU-").is_some_and(|rest| !rest.is_empty() && sound(rest)) {
            return Err(self.wrong("uuid", uuid, "GPU- and then letters, digits and hyphens".into()));
        }
        self.alone("uuid", uuid, model)?;
        Ok(Some(uuid.into()))
    }

    fn pci(&self, model: &Model) -> Result<Option<PciAddress>, SimulationSpecError> {
        let Some(text) = self.table.pci.as_deref() else { return Ok(None) };
        let address = parse_pci_address(text).ok_or_else(|| self.wrong("pci", text, "as in 0000:c1:00.0".into()))?;
        self.alone("pci", text, model)?;
        Ok(Some(address))
    }

    /// What names one device can be given to one only.
    fn alone(&self, field: &str, value: &str, model: &Model) -> Result<(), SimulationSpecError> {
        if self.table.count.unwrap_or(1) == 1 && model.dies == 1 {
            return Ok(());
        }
        Err(self.wrong(field, value, "only on an entry that is one device".into()))
    }

    fn memory(&self, cards: &mut Cards) -> Result<(), SimulationSpecError> {
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

    fn fabric(&self, text: &str) -> Result<Option<Fabric>, SimulationSpecError> {
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
    fn a_short_text_says_which_devices_there_are() {
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
    fn a_wrong_text_is_answered_with_the_field_the_value_and_what_is_allowed() {
        for (text, error) in [
            ("", "model: \"\" is not known"),
            ("4x", "model: \"\" is not known"),
            ("H100,", "model: \"\" is not known"),
            ("0xH100", "count: \"0\" is not allowed; allowed: 1 to 1024"),
            ("99999999999999999999xH100", "count: \"99999999999999999999\" is not allowed"),
            ("1024xH100,1xA30", "count: 1025 devices in all; allowed: 1 to 1024"),
            ("1024xMI300X/CPX", "count: 8192 devices in all; allowed: 1 to 1024"),
            ("H100/1g.5gb", "mig: \"1g.5gb\" is not allowed; allowed: 1g.10gb, 1g.20gb"),
            ("H100/1g.10gb*8", "allowed: 7 compute and 8 memory slices in all, not 8 and 8"),
            ("T4/1g.10gb", "allowed: nothing: T4 has no MIG"),
            ("MI300X/TPX", "partition: \"TPX\" is not allowed; allowed: SPX, DPX, QPX, CPX"),
            ("missing.toml", "missing.toml: No such file"),
            ("/dev/zero", "/dev/zero: longer than 1048576 bytes"),
        ] {
            let said = SimulationSpec::load(text).unwrap_err().to_string();
            assert!(said.contains(error), "{text}: {said}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[0-9xX*×/., a-zA-Z]{0,40}|.{0,40}") {
            let _ = SimulationSpec::parse(&text);
            let _ = SimulationSpec::from_toml(&text);
        }
    }

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
            let said = SimulationSpec::from_toml(&text).unwrap_err().to_string();
            assert!(said.contains(error), "{text}: {said}");
        }
    }
}
