//! A device as one source read it at one time.

use std::fmt;
use std::sync::Arc;

use gpupool_core::{
    Bytes, DeviceFacts, DeviceHealth, DeviceIdentity, DeviceMemory, DeviceReading, IsolationSupport, Labels,
    PartitionFacts, PciAddress, Percent, PoolTime, ProcessAttribution, ProcessUsage, Share, Vendor,
};
use serde::Serialize;

use crate::limits;
use crate::reported::{Reported, truncate_text};

/// Electrical power in milliwatts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Milliwatts(pub u64);

impl Milliwatts {
    /// Converts watts, or returns `None` for an impossible power.
    pub(crate) fn from_number(watts: f64) -> Option<Self> {
        (0.0..1e9).contains(&watts).then(|| Self((watts * 1000.0).round() as u64))
    }

    /// Returns the power in watts.
    pub fn as_number(self) -> f64 {
        self.0 as f64 / 1000.0
    }
}

impl fmt::Display for Milliwatts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} W", self.as_number())
    }
}

/// Whether the used memory of a device includes the memory reserved by its driver.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum UsedMemoryScope {
    /// Used memory is the memory of programs (NVML v2, nvidia-smi since driver 510).
    WithoutReserved,
    /// Used memory includes reserved memory (NVML v1, older nvidia-smi).
    WithReserved,
    /// The source does not report it, or the driver reserves no memory.
    #[default]
    Unknown,
}

/// Memory of a device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryReading {
    pub total: Reported<Bytes>,
    /// Memory reserved by the driver.
    pub reserved: Reported<Bytes>,
    /// Memory in use.
    pub used: Reported<Bytes>,
    /// Whether `used` includes `reserved`.
    pub used_means: UsedMemoryScope,
    /// Whether the device shares the memory of the host and has none of its own.
    pub unified: bool,
    /// Host memory that the device may also use (AMD's GTT), the main memory of an APU.
    pub host_total: Reported<Bytes>,
    /// Part of `host_total` in use.
    pub host_used: Reported<Bytes>,
}

impl MemoryReading {
    /// Returns the memory used by programs, without reserved memory if that is known.
    pub fn used_by_programs(&self) -> Reported<Bytes> {
        match (self.used_means, &self.used, &self.reserved) {
            (UsedMemoryScope::WithReserved, Reported::Value(used), Reported::Value(reserved)) => {
                Reported::Value(used.saturating_sub(*reserved))
            }
            _ => self.used.clone(),
        }
    }
}

/// Partition of a larger device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum DevicePartition {
    Mig {
        /// UUID of the parent GPU, if known.
        parent_uuid: Option<Arc<str>>,
        /// Id of the GPU instance.
        gpu_instance: Option<u32>,
        /// Id of the compute instance in the GPU instance.
        compute_instance: Option<u32>,
        /// Profile, such as `1g.10gb`.
        profile: Option<Arc<str>>,
    },
    Amd {
        /// Index of the partition on its PCI device.
        id: u16,
        /// Partition mode: `SPX`, `DPX`, `TPX`, `QPX`, `CPX`.
        mode: Option<Arc<str>>,
        /// Number of partitions, if known.
        parts: Option<u16>,
    },
}

impl DevicePartition {
    /// Returns the share of the parent, if known: by the slices of a MIG profile or the number of AMD partitions.
    ///
    /// `model` is the name of the GPU: the A30 and RTX PRO models have four slices, others seven.
    pub(crate) fn share_of_parent(&self, model: Option<&str>) -> Option<Share> {
        match self {
            Self::Mig { profile, .. } => {
                let digits = |part: &str| part.chars().rev().take_while(char::is_ascii_digit).count();
                // `2g.10gb` has two slices, `1c.2g.10gb` one.
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

    /// Returns the number of the partition on its PCI device, as part of an identity.
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

/// Kind of work that a process does on a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ProcessActivity {
    Compute,
    Graphics,
    Both,
    /// Not reported by the source.
    #[default]
    Unknown,
}

impl ProcessActivity {
    /// Returns the activity of a process that computes or draws.
    pub(crate) const fn of(computes: bool, draws: bool) -> Self {
        match (computes, draws) {
            (true, true) => Self::Both,
            (true, false) => Self::Compute,
            (false, true) => Self::Graphics,
            (false, false) => Self::Unknown,
        }
    }
}

/// A process on a device, as reported by the driver.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceProcess {
    /// Pid in the driver's PID namespace, which is the host's.
    pub pid: u32,
    /// Name given by the source.
    pub name: Option<Arc<str>>,
    pub activity: ProcessActivity,
    /// Device memory in use.
    pub memory: Reported<Bytes>,
    /// Process of this host, after lookup by a [`HostProcessResolver`](crate::HostProcessResolver).
    pub host_lookup: crate::host_process::HostProcessLookup,
}

/// A device as one source read it at one time. Fields that the source does not report stay empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DetectedDevice {
    /// Index in the source's listing. Sources differ, so it is never an identity.
    pub index: Option<u32>,
    /// Minor number of the device node: `/dev/nvidia3`, `/dev/dri/renderD131`.
    pub minor: Option<u32>,
    pub vendor: Vendor,
    /// Name given by the driver.
    pub name: Option<Arc<str>>,
    /// Identity given by the vendor: `GPU-…`, `MIG-…`, or AMD's unique id.
    pub uuid: Option<Arc<str>>,
    pub pci: Option<PciAddress>,
    /// Set for a partition of a larger device.
    pub partition: Option<DevicePartition>,
    /// Whether MIG is on; `None` for a GPU without MIG.
    pub mig: Option<bool>,
    pub driver: Option<Arc<str>>,
    /// Nearest NUMA node.
    pub numa: Option<u32>,
    pub memory: MemoryReading,
    pub utilization: Reported<Percent>,
    /// Temperature of the chip in °C.
    pub temperature_c: Reported<i16>,
    pub power: Reported<Milliwatts>,
    pub power_limit: Reported<Milliwatts>,
    /// Processes on the device; a value only if the list is complete.
    pub processes: Reported<Vec<DeviceProcess>>,
    /// Health; `None` if the source does not report it.
    pub health: Option<DeviceHealth>,
    /// Whether the device sleeps to save power. It is not read further, because reading would wake it.
    pub asleep: bool,
}

impl DetectedDevice {
    /// Creates a device of a vendor with no other facts.
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

    /// Whether the device is a MIG instance.
    pub(crate) fn is_mig_instance(&self) -> bool {
        matches!(self.partition, Some(DevicePartition::Mig { .. }))
    }

    /// Returns the number of the partition on its PCI device, for a partition.
    pub(crate) fn partition_number(&self) -> Option<u16> {
        self.partition.as_ref()?.number()
    }

    /// Whether the device reported any current value. Power limit and memory size do not count.
    pub(crate) fn has_answered(&self) -> bool {
        self.memory.used.value().is_some()
            || self.utilization.value().is_some()
            || self.temperature_c.value().is_some()
            || self.power.value().is_some()
    }

    /// Fills missing identity and location fields from `other`.
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

    /// Fills missing fields from `other`, the same device read by another source. Long texts are truncated.
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

/// Returns the worse of two health values.
pub(crate) fn worse(a: Option<DeviceHealth>, b: Option<DeviceHealth>) -> Option<DeviceHealth> {
    let rank = |health: &Option<DeviceHealth>| match health {
        None => 0,
        Some(DeviceHealth::Healthy | DeviceHealth::ClaimedElsewhere(_)) => 1,
        Some(DeviceHealth::Unhealthy(_)) => 2,
        Some(DeviceHealth::Lost) => 3,
    };
    if rank(&b) > rank(&a) { b } else { a }
}

// Conversion to the core's device facts and readings.

/// Name of a GPU without a name.
const UNKNOWN_NAME: &str = "unknown GPU";

impl DetectedDevice {
    /// Whether the device takes work. A GPU split into MIG instances does not; its instances do.
    pub fn takes_work(&self) -> bool {
        self.mig != Some(true) || self.partition.is_some()
    }

    /// Returns the facts of the device, given its identity and the device that it is part of.
    pub(crate) fn facts(&self, identity: DeviceIdentity, parent: Option<DeviceIdentity>) -> DeviceFacts {
        let is_mig = self.is_mig_instance();
        let partition = self.partition.as_ref().map(|partition| PartitionFacts {
            parent: parent.or_else(|| self.parent()).unwrap_or_else(|| identity.clone()),
            profile: partition.profile().unwrap_or_else(|| "unknown".into()),
            // A partition of unknown size counts as a whole GPU against a quota, rather than too little.
            of_parent: partition.share_of_parent(self.name.as_deref()).unwrap_or(Share::WHOLE),
        });
        DeviceFacts {
            identity,
            vendor: self.vendor,
            model: self.name.clone().unwrap_or_else(|| UNKNOWN_NAME.into()),
            memory: self.memory.total.value().filter(|_| !self.memory.unified).map(|&total| DeviceMemory {
                total,
                reserved: self.memory.reserved.value().copied().unwrap_or(Bytes::ZERO),
            }),
            partition,
            isolation: IsolationSupport { mps: self.vendor == Vendor::Nvidia && !is_mig, mig: is_mig },
            labels: Labels::new(),
        }
    }

    /// Returns the parent device: by UUID, or else by PCI address.
    fn parent(&self) -> Option<DeviceIdentity> {
        if let Some(DevicePartition::Mig { parent_uuid: Some(uuid), .. }) = &self.partition {
            return Some(DeviceIdentity::Uuid(uuid.clone()));
        }
        Some(DeviceIdentity::Pci { address: self.pci?, partition: None })
    }

    /// Converts the reading of time `at`; `attribute` attributes a process to a lease.
    pub fn reading(&self, at: PoolTime, attribute: impl Fn(&DeviceProcess) -> ProcessAttribution) -> DeviceReading {
        let process = |process: &DeviceProcess| ProcessUsage {
            attribution: attribute(process),
            memory: process.memory.value().copied(),
        };
        DeviceReading {
            at,
            memory_used: self.memory.used_by_programs().to_reading_field(),
            utilization: self.utilization.to_reading_field(),
            temperature_c: self.temperature_c.to_reading_field(),
            processes: match &self.processes {
                Reported::Value(list) => Some(list.iter().map(process).collect()),
                Reported::Unsupported(_) | Reported::Failed(_) => None,
            },
            leases_as_of: None,
        }
    }
}

impl DevicePartition {
    /// Returns the vendor's name of the profile or mode.
    pub(crate) fn profile(&self) -> Option<Arc<str>> {
        match self {
            Self::Mig { profile, .. } => profile.clone(),
            Self::Amd { mode, .. } => mode.clone(),
        }
    }
}

// Texts from outside are bounded.

impl DetectedDevice {
    /// Truncates all texts of the device.
    pub(crate) fn bound_texts(&mut self) {
        [&mut self.name, &mut self.uuid, &mut self.driver].into_iter().for_each(bound_optional_text);
        match &mut self.partition {
            Some(DevicePartition::Mig { parent_uuid, profile, .. }) => {
                [parent_uuid, profile].into_iter().for_each(bound_optional_text)
            }
            Some(DevicePartition::Amd { mode, .. }) => bound_optional_text(mode),
            None => {}
        }
        if let Some(DeviceHealth::Unhealthy(reason)) = &mut self.health {
            bound_shared_text(reason);
        }
        let memory = &mut self.memory;
        let sizes = [&mut memory.total, &mut memory.reserved, &mut memory.used];
        sizes.into_iter().chain([&mut memory.host_total, &mut memory.host_used]).for_each(bound_reason);
        bound_reason(&mut self.utilization);
        bound_reason(&mut self.temperature_c);
        bound_reason(&mut self.power);
        bound_reason(&mut self.power_limit);
        bound_reason(&mut self.processes);
        if let Reported::Value(processes) = &mut self.processes {
            processes.truncate(limits::PROCESSES);
            for process in processes {
                bound_optional_text(&mut process.name);
                bound_reason(&mut process.memory);
            }
        }
    }
}

/// Truncates a text.
pub(crate) fn bound_text(text: String) -> String {
    if is_short(&text) { text } else { truncate_text(&text).into_owned() }
}

fn bound_optional_text(text: &mut Option<Arc<str>>) {
    text.iter_mut().for_each(bound_shared_text);
}

fn bound_shared_text(text: &mut Arc<str>) {
    if !is_short(text) {
        *text = truncate_text(text).into();
    }
}

fn bound_reason<T>(reported: &mut Reported<T>) {
    if let Reported::Unsupported(reason) | Reported::Failed(reason) = reported
        && !is_short(reason)
    {
        *reason = truncate_text(reason);
    }
}

/// Whether a text is surely short enough; its characters are counted only if it has too many bytes.
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
    fn memory_used_by_programs_excludes_reserved_memory() {
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
    fn texts_of_another_source_are_truncated_when_merged() {
        let mut other = DetectedDevice::new(Vendor::Nvidia);
        other.driver = Some("5".repeat(2 * limits::TEXT_CHARS).into());
        let mut found = DetectedDevice::new(Vendor::Nvidia);
        found.fill_from(other);
        assert_eq!(found.driver.map(|driver| driver.len()), Some(limits::TEXT_CHARS));
    }

    #[test]
    fn the_share_of_the_gpu_follows_from_the_mig_profile() {
        let mig = |profile: &str| DevicePartition::Mig {
            parent_uuid: None,
            gpu_instance: Some(7),
            compute_instance: Some(0),
            profile: Some(profile.into()),
        };
        assert_eq!(mig("1g.10gb").share_of_parent(Some("NVIDIA H100 80GB HBM3")), Some(Share(142)));
        assert_eq!(mig("7g.80gb").share_of_parent(None), Some(Share(1000)));
        assert_eq!(mig("MIG 1c.3g.40gb+me").share_of_parent(None), Some(Share(142)));
        assert_eq!(mig("2g.12gb").share_of_parent(Some("NVIDIA A30")), Some(Share(500)));
        assert_eq!(mig("odd").share_of_parent(None), None);
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
    fn reserved_memory_is_neither_capacity_nor_used() {
        assert_eq!(gpu().facts(identity("a"), None).memory_capacity(), Some(Bytes(900)));
        let reading = gpu().reading(PoolTime(5), |_| ProcessAttribution::Foreign);
        assert_eq!(reading.memory_used, ReadingField::Value(Bytes(50)));
        assert_eq!(reading.utilization, ReadingField::Unsupported);
        assert_eq!(reading.processes, None);
    }

    #[test]
    fn unified_memory_is_no_capacity() {
        let mut found = gpu();
        found.memory.unified = true;
        assert_eq!(found.facts(identity("a"), None).memory, None);
    }

    #[test]
    fn a_gpu_in_mig_mode_takes_no_work_but_its_instances_do() {
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
