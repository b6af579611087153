//! The messages between a node and the authority: reports go up, orders go down.
//!
//! Both are plain data that could cross a network. On a single machine they cross a channel. File descriptors, processes
//! and control groups stay inside [`crate::node`]; the pool and the store stay inside [`crate::authority`].

use std::sync::Arc;

use gpupool_core::{
    Bytes, DeviceFacts, DeviceHealth, DeviceIdentity, DeviceLink, DeviceReading, GpuId, LeaseHolder, LeaseId,
    NodeFacts, Share, Token,
};
use serde::{Deserialize, Serialize};

/// A fact that a node reports to the authority.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum NodeReport {
    /// The node read its devices.
    Sampled(Box<NodeSample>),
    /// The process, control group or connection that held a lease has ended.
    HolderGone {
        /// The lease that it held.
        lease: LeaseId,
        /// The holder that ended. The report is ignored if the lease has another holder by then.
        holder: LeaseHolder,
    },
    /// The node has ended all processes under a lease, as [`NodeOrder::End`] orders.
    Drained {
        /// The lease that ended.
        lease: LeaseId,
    },
}

/// The devices of a node and their latest readings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct NodeSample {
    /// The node itself.
    pub node: NodeFacts,
    /// The devices that take work, by number.
    pub devices: Vec<DeviceSample>,
    /// The connections between devices.
    pub links: Vec<DeviceLink>,
}

/// One device in a sample.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct DeviceSample {
    /// Its number on the node.
    pub gpu_id: GpuId,
    /// Its properties.
    pub facts: Arc<DeviceFacts>,
    /// Whether it can be trusted with new work.
    pub health: DeviceHealth,
    /// Its reading; `None` when it was not read since the last sample.
    pub reading: Option<DeviceReading>,
}

/// An order of the authority to a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum NodeOrder {
    /// The complete list of leases, as the first order of every authority. The node watches their holders, and ends the
    /// processes of all other leases.
    Fence {
        /// The granted leases and those that still drain.
        leases: Vec<FencedLease>,
    },
    /// A lease was granted: prepare its devices.
    Prepare {
        /// The lease.
        lease: LeaseId,
        /// The parts of devices that it was promised.
        devices: Vec<PreparedDevice>,
    },
    /// A lease ended: end all processes under it.
    End {
        /// The lease.
        lease: LeaseId,
        /// Whether the lease was taken from its holder, which may not have noticed yet.
        taken_back: bool,
        /// Whether the authority waits for [`NodeReport::Drained`].
        awaited: bool,
    },
}

/// A lease that outlived a restart of the authority.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FencedLease {
    /// The lease.
    pub lease: LeaseId,
    /// The process or control group that holds it.
    pub holder: Option<LeaseHolder>,
}

/// A part of a device that a lease was promised.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PreparedDevice {
    /// The device.
    pub identity: DeviceIdentity,
    /// The promised share of it.
    pub share: Share,
    /// The promised memory.
    pub memory: Bytes,
}

/// A request of a node to tie a granted lease to a process, control group or connection.
///
/// The node prepares everything before it sends this: the watch is armed and the control group exists. The authority
/// commits the holder or refuses; after a refusal the node undoes its part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LeaseAttachment {
    /// The lease.
    pub lease: LeaseId,
    /// The fencing token that the caller presented.
    pub token: Token,
    /// The process, control group or connection that keeps the lease alive from now on.
    pub holder: LeaseHolder,
    /// Whether the node watches a process of the lease.
    pub has_process: bool,
    /// Whether jobs of the lease run in a control group.
    pub has_cgroup: bool,
}

/// The link from the authority to one node.
pub(crate) trait NodeLink: Send {
    /// Sends an order, or returns it if the node cannot take it now. Never blocks.
    fn send(&mut self, order: NodeOrder) -> Result<(), NodeOrder>;

    /// Whether the node has to prepare devices before a job uses them.
    fn prepares_devices(&self) -> bool;
}

/// Returns the facts of a GPU for tests.
#[cfg(test)]
pub(crate) fn test_facts(identity: DeviceIdentity) -> DeviceFacts {
    DeviceFacts {
        identity,
        vendor: gpupool_core::Vendor::Nvidia,
        model: "GPU".into(),
        memory: None,
        partition: None,
        isolation: gpupool_core::IsolationSupport::BASIC,
        labels: Default::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_and_orders_survive_a_round_trip_over_a_wire() {
        let (lease, identity) = (LeaseId(7), DeviceIdentity::Uuid("GPU-0".into()));
        let holder = LeaseHolder::Supervisor { pid: 8, started: 9 };
        let device = DeviceSample {
            gpu_id: GpuId(0),
            facts: Arc::new(test_facts(identity.clone())),
            health: DeviceHealth::Healthy,
            reading: Some(DeviceReading::idle(gpupool_core::PoolTime(5))),
        };
        let labels = Default::default();
        let node = NodeFacts { name: "node".into(), cpus: gpupool_core::MilliCpus(1), memory: Bytes(2), labels };
        for report in [
            NodeReport::Sampled(Box::new(NodeSample { node, devices: vec![device], links: Vec::new() })),
            NodeReport::HolderGone { lease, holder: holder.clone() },
            NodeReport::Drained { lease },
        ] {
            let text = serde_json::to_string(&report).unwrap();
            assert_eq!(serde_json::from_str::<NodeReport>(&text).unwrap(), report, "{text}");
        }
        let devices = vec![PreparedDevice { identity, share: Share::WHOLE, memory: Bytes(3) }];
        for order in [
            NodeOrder::Fence { leases: vec![FencedLease { lease, holder: Some(holder) }] },
            NodeOrder::Prepare { lease, devices },
            NodeOrder::End { lease, taken_back: true, awaited: true },
        ] {
            let text = serde_json::to_string(&order).unwrap();
            assert_eq!(serde_json::from_str::<NodeOrder>(&text).unwrap(), order, "{text}");
        }
    }
}
