//! A found device in the words of the core: what it is, and what it reads.

use std::sync::Arc;

use gpupool_core::device::{
    DeviceFacts, DeviceIdentity, DeviceMemory, IsolationSupport, Partition as CorePartition, Vendor,
};
use gpupool_core::ids::Labels;
use gpupool_core::reading::{Attribution, ProcessUse, Reading};
use gpupool_core::units::{Bytes, Share, Time};

use crate::found::{Found, Partition, Process};
use crate::told::Told;

/// Names of a vendor's GPUs where the driver gives none.
const NAMELESS: &str = "unknown GPU";

impl Found {
    /// Whether work can be put on it: not on a GPU that is cut into MIG instances, only on the instances.
    pub fn takes_work(&self) -> bool {
        self.mig != Some(true) || self.partition.is_some()
    }

    /// What it is, given what identifies it and the device it is a part of, if any.
    pub fn facts(&self, identity: DeviceIdentity, parent: Option<DeviceIdentity>) -> DeviceFacts {
        let is_mig = matches!(self.partition, Some(Partition::Mig { .. }));
        let partition = self.partition.as_ref().map(|partition| CorePartition {
            parent: parent.or_else(|| self.card()).unwrap_or_else(|| identity.clone()),
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

    /// The card a partition is on, by its place on the bus.
    fn card(&self) -> Option<DeviceIdentity> {
        Some(DeviceIdentity::Pci { address: self.pci?, partition: None })
    }

    /// What it read at a time; `whose` says to whom a process belongs.
    pub fn reading(&self, at: Time, whose: impl Fn(&Process) -> Attribution) -> Reading {
        let process =
            |process: &Process| ProcessUse { attribution: whose(process), memory: process.memory.value().copied() };
        Reading {
            at,
            memory_used: self.memory.used_by_programs().field(),
            utilization: self.utilization.field(),
            temperature_c: self.temperature_c.field(),
            processes: match &self.processes {
                Told::Value(list) => Some(list.iter().map(process).collect()),
                Told::Unsupported(_) | Told::Failed(_) => None,
            },
        }
    }
}

impl Partition {
    /// The vendor's name of the cut.
    pub fn profile(&self) -> Option<Arc<str>> {
        match self {
            Self::Mig { profile, .. } => profile.clone(),
            Self::Amd { mode, .. } => mode.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::found::UsedMeans;
    use gpupool_core::reading::Field;

    fn identity(name: &str) -> DeviceIdentity {
        DeviceIdentity::Uuid(name.into())
    }

    fn gpu() -> Found {
        let mut found = Found::new(Vendor::Nvidia);
        found.name = Some("NVIDIA A100".into());
        found.memory.total = Told::Value(Bytes(1000));
        found.memory.reserved = Told::Value(Bytes(100));
        found.memory.used = Told::Value(Bytes(150));
        found.memory.used_means = UsedMeans::WithReserved;
        found
    }

    #[test]
    fn what_the_driver_keeps_is_neither_for_sale_nor_in_use() {
        assert_eq!(gpu().facts(identity("a"), None).memory_capacity(), Some(Bytes(900)));
        let reading = gpu().reading(Time(5), |_| Attribution::Foreign);
        assert_eq!(reading.memory_used, Field::Value(Bytes(50)));
        assert_eq!(reading.utilization, Field::Unsupported);
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
        instance.partition = Some(Partition::Mig {
            parent_uuid: Some("a".into()),
            gpu_instance: Some(1),
            compute_instance: Some(0),
            profile: Some("3g.40gb".into()),
        });
        assert!(instance.takes_work());
        let facts = instance.facts(identity("m"), Some(identity("a")));
        assert_eq!(facts.of_gpu(), Share(428));
        assert_eq!(facts.partition.unwrap().parent, identity("a"));
        assert_eq!(facts.isolation, IsolationSupport { mps: false, mig: true });
    }
}
