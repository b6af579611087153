//! A device as one source found it at one time.

use std::fmt;
use std::sync::Arc;

use gpupool_core::device::{Health, PciAddress, Vendor};
use gpupool_core::units::{Bytes, Percent, Share};
use serde::Serialize;

use crate::bounded;
use crate::told::Told;

/// Electrical power, in thousandths of a watt.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Watts(pub u64);

impl Watts {
    /// So many watts, to the thousandth, or `None` for what power cannot be.
    pub(crate) fn from_number(watts: f64) -> Option<Self> {
        (0.0..1e9).contains(&watts).then(|| Self((watts * 1000.0).round() as u64))
    }

    /// The power in watts.
    pub fn as_number(self) -> f64 {
        self.0 as f64 / 1000.0
    }
}

impl fmt::Display for Watts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} W", self.as_number())
    }
}

/// Whether memory a device reports as used includes what its driver keeps for itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum UsedMeans {
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
pub struct Memory {
    /// All of its own.
    pub total: Told<Bytes>,
    /// What the driver keeps.
    pub reserved: Told<Bytes>,
    /// What is in use.
    pub used: Told<Bytes>,
    /// What "in use" means here.
    pub used_means: UsedMeans,
    /// Set where the device shares the memory of the host and has none of its own.
    pub unified: bool,
    /// Host memory it may also use (AMD's GTT), the real memory of an APU.
    pub host_total: Told<Bytes>,
    /// How much of that is in use.
    pub host_used: Told<Bytes>,
}

impl Memory {
    /// Memory in use by programs, without what the driver keeps, where that can be told.
    pub fn used_by_programs(&self) -> Told<Bytes> {
        match (self.used_means, &self.used, &self.reserved) {
            (UsedMeans::WithReserved, Told::Value(used), Told::Value(reserved)) => {
                Told::Value(used.saturating_sub(*reserved))
            }
            _ => self.used.clone(),
        }
    }
}

/// Which part of a larger device a device is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Partition {
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

impl Partition {
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
pub enum Doing {
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

/// A process on a device, as the driver names it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Process {
    /// Its number in the driver's PID namespace, which is the host's.
    pub pid: u32,
    /// The name the source gave.
    pub name: Option<Arc<str>>,
    /// What it does.
    pub doing: Doing,
    /// Device memory it uses.
    pub memory: Told<Bytes>,
    /// Who it is on this host, once `attribution` has looked.
    pub who: crate::attribution::Who,
}

/// A device as one source found it at one time. Everything a source does not tell stays empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
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
    pub partition: Option<Partition>,
    /// Whether MIG is on, on a GPU that can.
    pub mig: Option<bool>,
    /// Version of its driver.
    pub driver: Option<Arc<str>>,
    /// NUMA node it is nearest to.
    pub numa: Option<u32>,
    /// Its memory.
    pub memory: Memory,
    /// How busy it is.
    pub utilization: Told<Percent>,
    /// Temperature of the chip in °C.
    pub temperature_c: Told<i16>,
    /// Power drawn.
    pub power: Told<Watts>,
    /// The most it may draw.
    pub power_limit: Told<Watts>,
    /// Every process on it; a value only where the list is complete.
    pub processes: Told<Vec<Process>>,
    /// Whether it can be trusted; `None` where the source says nothing of it.
    pub health: Option<Health>,
    /// Asleep to save power: not read further, because reading would wake it.
    pub asleep: bool,
}

impl Found {
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
            memory: Memory::default(),
            utilization: Told::ABSENT,
            temperature_c: Told::ABSENT,
            power: Told::ABSENT,
            power_limit: Told::ABSENT,
            processes: Told::ABSENT,
            health: None,
            asleep: false,
        }
    }

    /// Whether its name is that one, shortened as tables for people do: `Tesla V100-SXM2...`.
    fn has_cut_name_of(&self, whole: &str) -> bool {
        self.name
            .as_deref()
            .and_then(|name| name.strip_suffix("..."))
            .is_some_and(|start| whole.starts_with(start.trim()))
            && !whole.ends_with("...")
    }

    /// Takes from `other`, the same device seen by another source, what this one does not tell. Long texts are cut.
    pub(crate) fn fill_from(&mut self, other: Self) {
        fn fill<T>(mine: &mut Told<T>, other: Told<T>) {
            *mine = std::mem::take(mine).or(other);
        }
        self.index = self.index.or(other.index);
        self.minor = self.minor.or(other.minor);
        let name = other.name.filter(|name| self.name.is_none() || self.has_cut_name_of(name));
        self.name = name.or_else(|| self.name.take());
        self.uuid = self.uuid.take().or(other.uuid);
        self.pci = self.pci.or(other.pci);
        self.partition = self.partition.take().or(other.partition);
        self.mig = self.mig.or(other.mig);
        self.driver = self.driver.take().or(other.driver);
        self.numa = self.numa.or(other.numa);
        if self.memory.used.value().is_none() && other.memory.used.value().is_some() {
            self.memory.used_means = other.memory.used_means;
        }
        fill(&mut self.memory.total, other.memory.total);
        fill(&mut self.memory.reserved, other.memory.reserved);
        fill(&mut self.memory.used, other.memory.used);
        self.memory.unified |= other.memory.unified;
        fill(&mut self.memory.host_total, other.memory.host_total);
        fill(&mut self.memory.host_used, other.memory.host_used);
        fill(&mut self.utilization, other.utilization);
        fill(&mut self.temperature_c, other.temperature_c);
        fill(&mut self.power, other.power);
        fill(&mut self.power_limit, other.power_limit);
        fill(&mut self.processes, other.processes);
        self.health = worse(self.health.take(), other.health);
        self.asleep |= other.asleep;
        bounded::device(self);
    }
}

/// The worse of two opinions on a device's health.
pub(crate) fn worse(a: Option<Health>, b: Option<Health>) -> Option<Health> {
    let rank = |health: &Option<Health>| match health {
        None => 0,
        Some(Health::Healthy) => 1,
        Some(Health::Unhealthy(_)) => 2,
        Some(Health::Lost) => 3,
    };
    if rank(&b) > rank(&a) { b } else { a }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits;

    #[test]
    fn memory_used_by_programs_leaves_out_what_the_driver_keeps() {
        let memory = |used_means| Memory {
            used: Told::Value(Bytes(920)),
            reserved: Told::Value(Bytes(912)),
            used_means,
            ..Memory::default()
        };
        assert_eq!(memory(UsedMeans::WithReserved).used_by_programs(), Told::Value(Bytes(8)));
        assert_eq!(memory(UsedMeans::WithoutReserved).used_by_programs(), Told::Value(Bytes(920)));
    }

    #[test]
    fn texts_of_another_source_are_cut_when_they_are_taken() {
        let mut other = Found::new(Vendor::Nvidia);
        other.driver = Some("5".repeat(2 * limits::WORDS).into());
        let mut found = Found::new(Vendor::Nvidia);
        found.fill_from(other);
        assert_eq!(found.driver.map(|driver| driver.len()), Some(limits::WORDS));
    }

    #[test]
    fn a_mig_profile_says_how_much_of_the_gpu_it_is() {
        let mig = |profile: &str| Partition::Mig {
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
}
