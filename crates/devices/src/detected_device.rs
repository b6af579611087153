//! A device as one source found it at one time.

use std::fmt;
use std::sync::Arc;

use gpupool_core::{
    Bytes, DeviceFacts, DeviceHealth, DeviceIdentity, DeviceMemory, DeviceReading, IsolationSupport, Labels,
    PartitionFacts as CorePartition, PciAddress, Percent, PoolTime, ProcessAttribution, ProcessUsage, Share, Vendor,
};
use serde::Serialize;

use crate::limits;
use crate::reported::{Reported, truncate_text};

/// Electrical power, in thousandths of a watt.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Milliwatts(pub u64);

impl Milliwatts {
    /// So many watts, to the thousandth, or `None` for what power cannot be.
    pub(crate) fn from_number(watts: f64) -> Option<Self> {
        (0.0..1e9).contains(&watts).then(|| Self((watts * 1000.0).round() as u64))
    }

    /// The power in watts.
    pub fn as_number(self) -> f64 {
        self.0 as f64 / 1000.0
    }
}

impl fmt::Display for Milliwatts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} W", self.as_number())
    }
}

/// Whether memory a device reports as used includes what its driver keeps for itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum UsedMemoryScope {
    /// Used memory is what programs use (NVML v2, nvidia-smi since driver 510).
    WithoutReserved,
    /// Used memory includes what the driver keeps (NVML v1, older nvidia-smi).
    WithReserved,
    /// The source does not say, or the driver keeps nothing.
    #[default]
    Unknown,
}

/// The memory of a device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryReading {
    /// All of its own.
    pub total: Reported<Bytes>,
    /// What the driver keeps.
    pub reserved: Reported<Bytes>,
    /// What is in use.
    pub used: Reported<Bytes>,
    /// What "in use" means here.
    pub used_means: UsedMemoryScope,
    /// Set where the device shares the memory of the host and has none of its own.
    pub unified: bool,
    /// Host memory it may also use (AMD's GTT), the real memory of an APU.
    pub host_total: Reported<Bytes>,
    /// How much of that is in use.
    pub host_used: Reported<Bytes>,
}

impl MemoryReading {
    /// Memory in use by programs, without what the driver keeps, where that can be told.
    pub fn used_by_programs(&self) -> Reported<Bytes> {
        match (self.used_means, &self.used, &self.reserved) {
            (UsedMemoryScope::WithReserved, Reported::Value(used), Reported::Value(reserved)) => {
                Reported::Value(used.saturating_sub(*reserved))
            }
            _ => self.used.clone(),
        }
    }
}

/// Which part of a larger device a device is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum DevicePartition {
    /// A MIG instance.
    Mig {
        /// UUID of the GPU it is cut from, where the source tells.
        parent_uuid: Option<Arc<str>>,
        /// GPU instance.
        gpu_instance: Option<u32>,
        /// Compute instance in it.
        compute_instance: Option<u32>,
        /// The cut: `1g.10gb`.
        profile: Option<Arc<str>>,
    },
    /// An AMD partition.
    Amd {
        /// Which of the parts of its PCI device it is.
        id: u16,
        /// How the device is cut: `SPX`, `DPX`, `TPX`, `QPX`, `CPX`.
        mode: Option<Arc<str>>,
        /// Into how many parts it is cut, where that is known.
        parts: Option<u16>,
    },
}

impl DevicePartition {
    /// How much of its parent it is, where that is known: by the slices of a MIG profile, by the number of AMD parts.
    ///
    /// `model` is the name of the GPU: those of the A30 and RTX PRO kinds have four slices, others seven.
    pub(crate) fn of_parent(&self, model: Option<&str>) -> Option<Share> {
        match self {
            Self::Mig { profile, .. } => {
                let digits = |part: &str| part.chars().rev().take_while(char::is_ascii_digit).count();
                // `2g.10gb` has two slices, `1c.2g.10gb` one of two.
                let (head, _) = profile.as_deref()?.split_once(['c', 'g'])?;
                let slices: u32 = head.get(head.len() - digits(head)..)?.parse().ok()?;
                let four = model.is_some_and(|model| model.contains("A30") || model.contains("RTX PRO"));
                let of = if four { 4 } else { 7 };
                (1..=of).contains(&slices).then(|| Share(slices * 1000 / of))
            }
            Self::Amd { parts, .. } => {
                let parts = u32::from((*parts)?);
                (1..=1000).contains(&parts).then(|| Share(1000 / parts))
            }
        }
    }

    /// Which of the partitions of its PCI device it is, as part of an identity.
    pub fn number(&self) -> Option<u16> {
        match self {
            Self::Amd { id, .. } => Some(*id),
            Self::Mig { gpu_instance, compute_instance, .. } => {
                let gpu = u16::try_from((*gpu_instance)?).ok()?;
                let compute = u16::try_from(compute_instance.unwrap_or(0)).ok()?;
                gpu.checked_mul(16)?.checked_add(compute)
            }
        }
    }
}

/// What a process does on a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ProcessActivity {
    /// Computes.
    Compute,
    /// Draws.
    Graphics,
    /// Both.
    Both,
    /// The source does not say.
    #[default]
    Unknown,
}

impl ProcessActivity {
    /// What a process does that computes, or draws.
    pub(crate) const fn of(computes: bool, draws: bool) -> Self {
        match (computes, draws) {
            (true, true) => Self::Both,
            (true, false) => Self::Compute,
            (false, true) => Self::Graphics,
            (false, false) => Self::Unknown,
        }
    }
}

/// A process on a device, as the driver names it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceProcess {
    /// Its number in the driver's PID namespace, which is the host's.
    pub pid: u32,
    /// The name the source gave.
    pub name: Option<Arc<str>>,
    /// What it does.
    pub activity: ProcessActivity,
    /// Device memory it uses.
    pub memory: Reported<Bytes>,
    /// The process of this host, once a [`HostProcessResolver`](crate::HostProcessResolver) has looked it up.
    pub host_lookup: crate::attribution::HostProcessLookup,
}

/// A device as one source found it at one time. Everything a source does not tell stays empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DetectedDevice {
    /// The number the source gives it; one of several orders, never an identity.
    pub index: Option<u32>,
    /// The minor number of its device node: `/dev/nvidia3`, `/dev/dri/renderD131`.
    pub minor: Option<u32>,
    /// Who made it.
    pub vendor: Vendor,
    /// Its name, as the driver gives it.
    pub name: Option<Arc<str>>,
    /// The vendor's identity of it: `GPU-…`, `MIG-…`, or AMD's unique id.
    pub uuid: Option<Arc<str>>,
    /// Its place on the bus.
    pub pci: Option<PciAddress>,
    /// Set where it is a part of a larger device.
    pub partition: Option<DevicePartition>,
    /// Whether MIG is on, on a GPU that can.
    pub mig: Option<bool>,
    /// Version of its driver.
    pub driver: Option<Arc<str>>,
    /// NUMA node it is nearest to.
    pub numa: Option<u32>,
    /// Its memory.
    pub memory: MemoryReading,
    /// How busy it is.
    pub utilization: Reported<Percent>,
    /// Temperature of the chip in °C.
    pub temperature_c: Reported<i16>,
    /// Power drawn.
    pub power: Reported<Milliwatts>,
    /// The most it may draw.
    pub power_limit: Reported<Milliwatts>,
    /// Every process on it; a value only where the list is complete.
    pub processes: Reported<Vec<DeviceProcess>>,
    /// Whether it can be trusted; `None` where the source says nothing of it.
    pub health: Option<DeviceHealth>,
    /// Asleep to save power: not read further, because reading would wake it.
    pub asleep: bool,
}

impl DetectedDevice {
    /// A device of which nothing is known but its maker.
    pub fn new(vendor: Vendor) -> Self {
        Self {
            index: None,
            minor: None,
            vendor,
            name: None,
            uuid: None,
            pci: None,
            partition: None,
            mig: None,
            driver: None,
            numa: None,
            memory: MemoryReading::default(),
            utilization: Reported::ABSENT,
            temperature_c: Reported::ABSENT,
            power: Reported::ABSENT,
            power_limit: Reported::ABSENT,
            processes: Reported::ABSENT,
            health: None,
            asleep: false,
        }
    }

    /// Whether it is a MIG instance.
    pub(crate) fn is_mig_instance(&self) -> bool {
        matches!(self.partition, Some(DevicePartition::Mig { .. }))
    }

    /// Which of the partitions of its PCI device it is, where it is one.
    pub(crate) fn partition_number(&self) -> Option<u16> {
        self.partition.as_ref()?.number()
    }

    /// Whether it told anything of its present state. The power limit and the size of memory are no such answer.
    pub(crate) fn has_answered(&self) -> bool {
        self.memory.used.value().is_some()
            || self.utilization.value().is_some()
            || self.temperature_c.value().is_some()
            || self.power.value().is_some()
    }

    /// Takes from `other` what the device is and where, as far as this one does not tell.
    pub(crate) fn fill_identity(&mut self, other: &Self) {
        fn fill<T: Clone>(mine: &mut Option<T>, other: &Option<T>) {
            if mine.is_none() {
                mine.clone_from(other);
            }
        }
        fill(&mut self.index, &other.index);
        fill(&mut self.minor, &other.minor);
        fill(&mut self.name, &other.name);
        fill(&mut self.uuid, &other.uuid);
        fill(&mut self.pci, &other.pci);
        fill(&mut self.partition, &other.partition);
        fill(&mut self.mig, &other.mig);
        fill(&mut self.driver, &other.driver);
        fill(&mut self.numa, &other.numa);
    }

    /// Takes from `other`, the same device seen by another source, what this one does not tell. Long texts are cut.
    pub(crate) fn fill_from(&mut self, other: Self) {
        self.fill_identity(&other);
        if self.memory.used.value().is_none() && other.memory.used.value().is_some() {
            self.memory.used_means = other.memory.used_means;
        }
        self.memory.total.fill(other.memory.total);
        self.memory.reserved.fill(other.memory.reserved);
        self.memory.used.fill(other.memory.used);
        self.memory.unified |= other.memory.unified;
        self.memory.host_total.fill(other.memory.host_total);
        self.memory.host_used.fill(other.memory.host_used);
        self.utilization.fill(other.utilization);
        self.temperature_c.fill(other.temperature_c);
        self.power.fill(other.power);
        self.power_limit.fill(other.power_limit);
        self.processes.fill(other.processes);
        self.health = worse(self.health.take(), other.health);
        self.asleep |= other.asleep;
        self.bound_texts();
    }
}

/// Whether a text is a UUID: five groups of hexadecimal digits.
pub(crate) fn is_uuid(text: &str) -> bool {
    let lengths = text.split('-').map(str::len);
    lengths.eq([8, 4, 4, 4, 12]) && text.bytes().all(|byte| byte == b'-' || byte.is_ascii_hexdigit())
}

/// The worse of two opinions on a device's health.
pub(crate) fn worse(a: Option<DeviceHealth>, b: Option<DeviceHealth>) -> Option<DeviceHealth> {
    let rank = |health: &Option<DeviceHealth>| match health {
        None => 0,
        Some(DeviceHealth::Healthy) => 1,
        Some(DeviceHealth::Unhealthy(_)) => 2,
        Some(DeviceHealth::Lost) => 3,
    };
    if rank(&b) > rank(&a) { b } else { a }
}

// A found device in the words of the core: what it is, and what it reads.

/// Names of a vendor's GPUs where the driver gives none.
const NAMELESS: &str = "unknown GPU";

impl DetectedDevice {
    /// Whether work can be put on it: not on a GPU that is cut into MIG instances, only on the instances.
    pub fn takes_work(&self) -> bool {
        self.mig != Some(true) || self.partition.is_some()
    }

    /// What it is, given what identifies it and the device it is a part of, if any.
    pub(crate) fn facts(&self, identity: DeviceIdentity, parent: Option<DeviceIdentity>) -> DeviceFacts {
        let is_mig = self.is_mig_instance();
        let partition = self.partition.as_ref().map(|partition| CorePartition {
            parent: parent.or_else(|| self.parent()).unwrap_or_else(|| identity.clone()),
            profile: partition.profile().unwrap_or_else(|| "unknown".into()),
            // A part of unknown size is taken for whole: too much is counted against a quota rather than too little.
            of_parent: partition.of_parent(self.name.as_deref()).unwrap_or(Share::WHOLE),
        });
        DeviceFacts {
            identity,
            vendor: self.vendor,
            model: self.name.clone().unwrap_or_else(|| NAMELESS.into()),
            memory: self.memory.total.value().filter(|_| !self.memory.unified).map(|&total| DeviceMemory {
                total,
                reserved: self.memory.reserved.value().copied().unwrap_or(Bytes::ZERO),
            }),
            partition,
            isolation: IsolationSupport { mps: self.vendor == Vendor::Nvidia && !is_mig, mig: is_mig },
            labels: Labels::new(),
        }
    }

    /// The device it is cut from, as far as it tells by itself: by UUID, else by the place on the bus.
    fn parent(&self) -> Option<DeviceIdentity> {
        if let Some(DevicePartition::Mig { parent_uuid: Some(uuid), .. }) = &self.partition {
            return Some(DeviceIdentity::Uuid(uuid.clone()));
        }
        Some(DeviceIdentity::Pci { address: self.pci?, partition: None })
    }

    /// What it read at a time; `whose` says to whom a process belongs.
    pub fn reading(&self, at: PoolTime, whose: impl Fn(&DeviceProcess) -> ProcessAttribution) -> DeviceReading {
        let process = |process: &DeviceProcess| ProcessUsage {
            attribution: whose(process),
            memory: process.memory.value().copied(),
        };
        DeviceReading {
            at,
            memory_used: self.memory.used_by_programs().field(),
            utilization: self.utilization.field(),
            temperature_c: self.temperature_c.field(),
            processes: match &self.processes {
                Reported::Value(list) => Some(list.iter().map(process).collect()),
                Reported::Unsupported(_) | Reported::Failed(_) => None,
            },
            leases_as_of: None,
        }
    }
}

impl DevicePartition {
    /// The vendor's name of the cut.
    pub(crate) fn profile(&self) -> Option<Arc<str>> {
        match self {
            Self::Mig { profile, .. } => profile.clone(),
            Self::Amd { mode, .. } => mode.clone(),
        }
    }
}

// Texts from outside, kept at a bounded length wherever they came from.

impl DetectedDevice {
    /// Cuts every text of the device.
    pub(crate) fn bound_texts(&mut self) {
        [&mut self.name, &mut self.uuid, &mut self.driver].into_iter().for_each(bound_optional);
        match &mut self.partition {
            Some(DevicePartition::Mig { parent_uuid, profile, .. }) => {
                [parent_uuid, profile].into_iter().for_each(bound_optional)
            }
            Some(DevicePartition::Amd { mode, .. }) => bound_optional(mode),
            None => {}
        }
        if let Some(DeviceHealth::Unhealthy(reason)) = &mut self.health {
            bound_shared(reason);
        }
        let memory = &mut self.memory;
        let sizes = [&mut memory.total, &mut memory.reserved, &mut memory.used];
        sizes.into_iter().chain([&mut memory.host_total, &mut memory.host_used]).for_each(bound_told);
        bound_told(&mut self.utilization);
        bound_told(&mut self.temperature_c);
        bound_told(&mut self.power);
        bound_told(&mut self.power_limit);
        bound_told(&mut self.processes);
        if let Reported::Value(processes) = &mut self.processes {
            processes.truncate(limits::PROCESSES);
            for process in processes {
                bound_optional(&mut process.name);
                bound_told(&mut process.memory);
            }
        }
    }
}

/// A text, cut.
pub(crate) fn bound_text(text: String) -> String {
    if is_short(&text) { text } else { truncate_text(&text).into_owned() }
}

fn bound_optional(text: &mut Option<Arc<str>>) {
    text.iter_mut().for_each(bound_shared);
}

fn bound_shared(text: &mut Arc<str>) {
    if !is_short(text) {
        *text = truncate_text(text).into();
    }
}

fn bound_told<T>(told: &mut Reported<T>) {
    if let Reported::Unsupported(said) | Reported::Failed(said) = told
        && !is_short(said)
    {
        *said = truncate_text(said);
    }
}

/// Whether a text is surely not too long; characters are not counted before their bytes are too many.
fn is_short(text: &str) -> bool {
    text.len() <= limits::TEXT_CHARS
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpupool_core::ReadingField;

    use crate::detected_device::UsedMemoryScope;
    use crate::limits;

    #[test]
    fn memory_used_by_programs_leaves_out_what_the_driver_keeps() {
        let memory = |used_means| MemoryReading {
            used: Reported::Value(Bytes(920)),
            reserved: Reported::Value(Bytes(912)),
            used_means,
            ..MemoryReading::default()
        };
        assert_eq!(memory(UsedMemoryScope::WithReserved).used_by_programs(), Reported::Value(Bytes(8)));
        assert_eq!(memory(UsedMemoryScope::WithoutReserved).used_by_programs(), Reported::Value(Bytes(920)));
    }

    #[test]
    fn texts_of_another_source_are_cut_when_they_are_taken() {
        let mut other = DetectedDevice::new(Vendor::Nvidia);
        other.driver = Some("5".repeat(2 * limits::TEXT_CHARS).into());
        let mut found = DetectedDevice::new(Vendor::Nvidia);
        found.fill_from(other);
        assert_eq!(found.driver.map(|driver| driver.len()), Some(limits::TEXT_CHARS));
    }

    #[test]
    fn a_mig_profile_says_how_much_of_the_gpu_it_is() {
        let mig = |profile: &str| DevicePartition::Mig {
            parent_uuid: None,
            gpu_instance: Some(7),
            compute_instance: Some(0),
            profile: Some(profile.into()),
        };
        assert_eq!(mig("1g.10gb").of_parent(Some("NVIDIA H100 80GB HBM3")), Some(Share(142)));
        assert_eq!(mig("7g.80gb").of_parent(None), Some(Share(1000)));
        assert_eq!(mig("MIG 1c.3g.40gb+me").of_parent(None), Some(Share(142)));
        assert_eq!(mig("2g.12gb").of_parent(Some("NVIDIA A30")), Some(Share(500)));
        assert_eq!(mig("odd").of_parent(None), None);
        assert_eq!(mig("1g.10gb").number(), Some(112));
    }

    fn identity(name: &str) -> DeviceIdentity {
        DeviceIdentity::Uuid(name.into())
    }

    fn gpu() -> DetectedDevice {
        let mut found = DetectedDevice::new(Vendor::Nvidia);
        found.name = Some("NVIDIA A100".into());
        found.memory.total = Reported::Value(Bytes(1000));
        found.memory.reserved = Reported::Value(Bytes(100));
        found.memory.used = Reported::Value(Bytes(150));
        found.memory.used_means = UsedMemoryScope::WithReserved;
        found
    }

    #[test]
    fn what_the_driver_keeps_is_neither_for_sale_nor_in_use() {
        assert_eq!(gpu().facts(identity("a"), None).memory_capacity(), Some(Bytes(900)));
        let reading = gpu().reading(PoolTime(5), |_| ProcessAttribution::Foreign);
        assert_eq!(reading.memory_used, ReadingField::Value(Bytes(50)));
        assert_eq!(reading.utilization, ReadingField::Unsupported);
        assert_eq!(reading.processes, None);
    }

    #[test]
    fn unified_memory_is_nobodys_to_promise() {
        let mut found = gpu();
        found.memory.unified = true;
        assert_eq!(found.facts(identity("a"), None).memory, None);
    }

    #[test]
    fn a_gpu_cut_by_mig_takes_no_work_and_its_instances_do() {
        let mut parent = gpu();
        parent.mig = Some(true);
        assert!(!parent.takes_work());
        let mut instance = parent.clone();
        instance.partition = Some(DevicePartition::Mig {
            parent_uuid: Some("a".into()),
            gpu_instance: Some(1),
            compute_instance: Some(0),
            profile: Some("3g.40gb".into()),
        });
        assert!(instance.takes_work());
        let facts = instance.facts(identity("m"), Some(identity("a")));
        assert_eq!(facts.share_of_gpu(), Share(428));
        assert_eq!(facts.partition.unwrap().parent, identity("a"));
        assert_eq!(facts.isolation, IsolationSupport { mps: false, mig: true });
    }
}
