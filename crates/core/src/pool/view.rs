//! Read-only views of a pool, and the reasons why a request waits, as data and as text.

use std::fmt;
use std::sync::Arc;

use serde::Serialize;

use crate::classes::{RequestClass, RequestShape};
use crate::device::{CordonState, DeviceFacts, DeviceHealth, DeviceIdentity, NodeFacts};
use crate::ids::{DeviceId, GpuId, LeaseId, NodeId, Token};
use crate::lease::{Lease, LeaseState};
use crate::outcome::DeviceClosure;
use crate::placement::is_below;
use crate::policy::{Policies, QueuePriority};
use crate::queue::{OwnerAccount, OwnerId, QuotaExcess};
use crate::reading::ForeignLoad;
use crate::row::UsageRow;
use crate::units::{Bytes, MilliCpus, Millis, Percent, PoolTime, Share};

use super::Pool;

/// Current state of a device.
#[derive(Debug, Clone)]
pub struct DeviceView {
    pub device: DeviceId,
    pub node: NodeId,
    pub gpu_id: GpuId,
    pub facts: Arc<DeviceFacts>,
    pub health: DeviceHealth,
    pub cordon: CordonState,
    /// Reason why it takes no new work, if any.
    pub closed: Option<DeviceClosure>,
    pub promised: Share,
    pub promised_memory: Bytes,
    /// Leases that hold it or drain on it.
    pub leases: Vec<LeaseId>,
    /// Load that no lease explains.
    pub foreign: Option<ForeignLoad>,
    /// Memory % in use, with promises counted as used.
    pub memory_percent: Percent,
    /// Utilization %, with promises counted as used.
    pub utilization_percent: Percent,
    /// Temperature in °C, if reported.
    pub temperature_c: Option<i16>,
    /// Time of the last reading.
    pub read_at: Option<PoolTime>,
}

/// Current state of a node.
#[derive(Debug, Clone)]
pub struct NodeView {
    pub node: NodeId,
    pub facts: NodeFacts,
    pub up: bool,
    pub devices: Vec<DeviceId>,
    pub cpus_promised: MilliCpus,
    pub memory_promised: Bytes,
}

impl Pool {
    /// Returns a lease if it is live or still remembered.
    pub fn lease(&self, id: LeaseId) -> Option<&Lease> {
        self.leases.get(&id).map(|lease| &**lease)
    }

    /// Returns the lease of an owner's request with this key.
    pub fn lease_by_key(&self, owner: &Arc<str>, key: &Arc<str>) -> Option<&Lease> {
        self.lease(*self.keys.get(&(owner.clone(), key.clone()))?)
    }

    pub fn leases(&self) -> impl Iterator<Item = &Lease> {
        self.leases.values().map(|lease| &**lease)
    }

    pub fn waiter_count(&self) -> usize {
        self.queue.len()
    }

    pub fn device(&self, id: DeviceId) -> Option<DeviceView> {
        let slot = self.inventory.devices.get(id.0)?;
        Some(DeviceView {
            device: id,
            node: slot.node,
            gpu_id: slot.gpu_id,
            facts: slot.facts.clone(),
            health: slot.health.clone(),
            cordon: slot.cordon,
            closed: slot.closure(),
            promised: slot.promised,
            promised_memory: slot.promised_memory,
            leases: slot.leases.clone(),
            foreign: slot.foreign,
            memory_percent: slot.memory_percent(),
            utilization_percent: slot.utilization_percent(),
            temperature_c: slot.observed.and_then(|observed| observed.temperature_c.value()),
            read_at: slot.observed.map(|observed| observed.at),
        })
    }

    pub fn devices(&self) -> impl Iterator<Item = DeviceView> {
        self.inventory.devices.iter().filter_map(|(number, _)| self.device(DeviceId(number)))
    }

    pub fn node(&self, id: NodeId) -> Option<NodeView> {
        let slot = self.inventory.nodes.get(id.0)?;
        Some(NodeView {
            node: id,
            facts: slot.facts.clone(),
            up: slot.up,
            devices: slot.devices.clone(),
            cpus_promised: slot.cpus_promised,
            memory_promised: slot.memory_promised,
        })
    }

    pub fn nodes(&self) -> impl Iterator<Item = NodeView> {
        self.inventory.nodes.iter().filter_map(|(number, _)| self.node(NodeId(number)))
    }

    /// Returns the device with this identity on a node.
    pub fn device_by_identity(&self, node: NodeId, identity: &DeviceIdentity) -> Option<DeviceId> {
        self.inventory.device_by_identity(node, identity)
    }

    /// Returns the device with this number on a node.
    pub fn device_with_gpu_id(&self, node: NodeId, gpu_id: GpuId) -> Option<DeviceId> {
        self.inventory.device_with_gpu_id(node, gpu_id)
    }

    pub fn node_by_name(&self, name: &str) -> Option<NodeId> {
        self.inventory.node_by_name(name)
    }

    /// Returns the devices that changed or were removed since the last call, each once. For a removed one,
    /// [`Pool::device`] returns `None` or the new device that took its number.
    pub fn take_touched_devices(&mut self) -> Vec<DeviceId> {
        self.inventory.take_touched()
    }

    /// Returns the token of the next grant; all smaller ones were issued.
    pub fn next_token(&self) -> Token {
        Token(self.counters.next_token)
    }

    /// Grows whenever a new workload is adopted for the strategies that use it.
    pub fn workload_version(&self) -> u64 {
        self.workload.version
    }

    pub fn policies(&self) -> &Policies {
        &self.policies
    }

    /// Returns the use of each owner in its period, up to the last change of its held share.
    pub fn usage(&self) -> impl Iterator<Item = UsageRow> {
        self.owners.accounts().iter().map(OwnerAccount::row)
    }
}

/// Queue position of a request and the reasons why it waits.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WaitExplanation {
    /// Position, 1 for the next request.
    pub position: usize,
    /// Priority in the queue: the request's, with the policy's boost and the gain by waiting.
    pub priority: i32,
    /// Part of the priority that was gained by waiting.
    pub gained_priority: i32,
    /// Reasons, the most important first.
    pub reasons: Vec<WaitReason>,
}

/// Reason why a request waits.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WaitReason {
    /// Its owner holds its whole quota.
    QuotaHeld { held: Share, quota: Share },
    /// Its owner used up the GPU-hours of this period.
    QuotaHours { next_in: Millis },
    /// Not enough matching GPUs are free on one node.
    NeedsGpus {
        needed: u16,
        free: u16,
        share: Share,
        /// Latest time at which one more is free, if that is certain.
        due_in: Option<Millis>,
    },
    /// Matching GPUs take no new work (cordoned, hot, unhealthy, lost, quarantined, claimed elsewhere).
    Closed { gpus: u16 },
    /// Matching GPUs carry foreign load, or have no usable reading.
    ForeignLoad { gpus: u16 },
    /// Not enough host CPUs are free on nodes with free GPUs.
    NeedsCpus { needed: MilliCpus, free: MilliCpus },
    /// Not enough host memory is free on nodes with free GPUs.
    NeedsHostMemory { needed: Bytes, free: Bytes },
    /// GPUs, CPUs and memory are free, but on different nodes.
    NeedsTogether { gpus: u16, cpus: MilliCpus, host_memory: Bytes },
    /// There is room, but earlier requests could use it.
    Behind { ahead: usize },
}

impl fmt::Display for WaitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gpus = |n: u16| if n == 1 { "GPU" } else { "GPUs" };
        match self {
            Self::QuotaHeld { held, quota } => write!(f, "the owner holds {held} of its quota of {quota} GPUs"),
            Self::QuotaHours { next_in } => {
                write!(f, "the owner has used up its GPU-hours; the next period starts in {next_in}")
            }
            Self::NeedsGpus { needed, free, share, due_in } => {
                match *share {
                    Share::WHOLE => write!(f, "needs {needed} free {}", gpus(*needed))?,
                    share => write!(f, "needs {needed} {} with {share} free", gpus(*needed))?,
                }
                match free {
                    0 => f.write_str("; none is free")?,
                    1 => f.write_str("; 1 is free")?,
                    _ => write!(f, "; {free} are free")?,
                }
                match due_in {
                    Some(due_in) => write!(f, "; the next is due in ≤ {due_in}"),
                    None => Ok(()),
                }
            }
            Self::Closed { gpus: 1 } => f.write_str("1 matching GPU takes no new work"),
            Self::Closed { gpus } => write!(f, "{gpus} matching GPUs take no new work"),
            Self::ForeignLoad { gpus: 1 } => f.write_str("1 matching GPU is in use without a lease"),
            Self::ForeignLoad { gpus } => write!(f, "{gpus} matching GPUs are in use without a lease"),
            Self::NeedsCpus { needed, free } => write!(f, "needs {needed} host CPUs; {free} are free"),
            Self::NeedsHostMemory { needed, free } => write!(f, "needs {needed} of host memory; {free} is free"),
            Self::NeedsTogether { gpus: needed, cpus, host_memory } => {
                let mut parts = Vec::new();
                parts.extend((*needed > 0).then(|| format!("{needed} free {}", gpus(*needed))));
                parts.extend((!cpus.is_zero()).then(|| format!("{cpus} host CPUs")));
                parts.extend((!host_memory.is_zero()).then(|| format!("{} of host memory", in_gib(*host_memory))));
                let last = parts.pop().unwrap_or_default();
                write!(f, "no single node has {} and {last}", parts.join(", "))
            }
            Self::Behind { ahead: 1 } => f.write_str("there is room, but 1 earlier request is ahead"),
            Self::Behind { ahead } => write!(f, "there is room, but {ahead} earlier requests are ahead"),
        }
    }
}

/// Formats memory in GiB if that is a whole number, else in MiB.
fn in_gib(memory: Bytes) -> String {
    let mib = memory.as_mib();
    if mib > 0 && mib.is_multiple_of(1024) { format!("{} GiB", mib / 1024) } else { memory.to_string() }
}

impl fmt::Display for WaitExplanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "position {}", self.position)?;
        if self.gained_priority > 0 {
            write!(f, " with priority {} ({} of it for waiting)", self.priority, self.gained_priority)?;
        }
        for reason in &self.reasons {
            write!(f, "; {reason}")?;
        }
        Ok(())
    }
}

impl Pool {
    /// Returns the reasons why a lease waits, or `None` if it does not wait.
    pub fn explain(&self, id: LeaseId) -> Option<WaitExplanation> {
        let lease = self.leases.get(&id).filter(|lease| lease.state == LeaseState::Queued)?;
        let policy = self.policies.policy_for(&lease.request);
        let class = self.classes.find(&RequestShape::of(&lease.request, policy))?;
        let owner = self.owners.find(&lease.request.owner)?;
        let QueuePriority { priority, gained, .. } = lease.queue_priority;
        let ahead = self.queue.count_ahead_of((owner, class), priority, lease.seq);
        // The last pass may have ended before it reached this class, and facts may have changed since.
        let class = &self.classes.get_fresh(class, &self.inventory);

        let mut reasons = Vec::new();
        reasons.extend(self.quota_reason(owner, class));
        let short = self.shortage_reasons(class);
        if short.is_empty() && reasons.is_empty() {
            reasons.push(WaitReason::Behind { ahead });
        }
        reasons.extend(short);
        Some(WaitExplanation { position: ahead + 1, priority, gained_priority: gained, reasons })
    }

    fn quota_reason(&self, owner: OwnerId, class: &RequestClass) -> Option<WaitReason> {
        let account = self.owners.get(owner);
        let quota = self.policies.quota_of(&account.name);
        let over = account.quota_excess(quota, class.max_held, self.now, self.policies.period)?;
        Some(match over {
            QuotaExcess::Held => WaitReason::QuotaHeld {
                held: Share(account.held.min(u64::from(u32::MAX)) as u32),
                quota: quota.held.unwrap_or_default(),
            },
            QuotaExcess::ShareHours { until } => WaitReason::QuotaHours { next_in: until.since(self.now) },
        })
    }

    /// Returns the shortages of a class as if it were alone in the queue.
    fn shortage_reasons(&self, class: &RequestClass) -> Vec<WaitReason> {
        let mut shortages = ResourceShortages::default();
        for (number, slot) in self.inventory.nodes.iter() {
            if class.fits_shape(slot.shape) {
                self.add_node_shortages(class, NodeId(number), &mut shortages);
            }
        }
        if shortages.fits {
            return Vec::new();
        }
        let shape = &class.shape;
        let mut reasons = Vec::new();
        if shortages.most_free < shape.gpus {
            let share = class.needs.iter().map(|need| need.share).max().unwrap_or_default();
            let due_in = shortages.first_due.map(|due| due.since(self.now));
            reasons.push(WaitReason::NeedsGpus { needed: shape.gpus, free: shortages.most_free, share, due_in });
        } else {
            if shortages.most_cpus < shape.cpus {
                reasons.push(WaitReason::NeedsCpus { needed: shape.cpus, free: shortages.most_cpus });
            }
            if shortages.most_memory < shape.host_memory {
                reasons.push(WaitReason::NeedsHostMemory { needed: shape.host_memory, free: shortages.most_memory });
            }
            if reasons.is_empty() {
                let RequestShape { gpus, cpus, host_memory, .. } = *shape;
                reasons.push(WaitReason::NeedsTogether { gpus, cpus, host_memory });
            }
        }
        reasons.extend((shortages.closed > 0).then_some(WaitReason::Closed { gpus: shortages.closed }));
        reasons.extend((shortages.foreign > 0).then_some(WaitReason::ForeignLoad { gpus: shortages.foreign }));
        reasons
    }

    fn add_node_shortages(&self, class: &RequestClass, node: NodeId, shortages: &mut ResourceShortages) {
        let node_slot = self.inventory.node(node);
        let mut free = 0;
        for &device in &node_slot.devices {
            let slot = self.inventory.device(device);
            let Some(need) = class.need_on_device(device, slot.kind) else { continue };
            if slot.closure().is_some() {
                shortages.closed += 1;
                continue;
            }
            let room = slot.free_share() >= need.share
                && slot.unpromised_memory() >= need.memory
                && class.shape.max_allocations.is_none_or(|most| slot.leases.len() < usize::from(most));
            if !room {
                // `now` means a draining device, whose end is not certain.
                let due = self.device_free_at(need, device, slot).filter(|due| *due > self.now);
                shortages.first_due = [shortages.first_due, due].into_iter().flatten().min();
                continue;
            }
            let judged =
                class.shape.thresholds.is_none_or(|thresholds| is_below(slot, thresholds, self.stale_before()));
            let foreign_memory = slot.foreign.and_then(|foreign| foreign.memory).unwrap_or_default();
            let memory_left = !class.shape.names_memory()
                || need.share == Share::WHOLE
                || slot.unpromised_memory().saturating_sub(foreign_memory) >= need.memory;
            if judged && memory_left {
                free += 1;
            } else {
                shortages.foreign += 1;
            }
        }
        shortages.most_free = shortages.most_free.max(free);
        if free >= class.shape.gpus {
            let (cpus, memory) = (node_slot.cpus_free(), node_slot.memory_free());
            shortages.most_cpus = shortages.most_cpus.max(cpus);
            shortages.most_memory = shortages.most_memory.max(memory);
            shortages.fits |= cpus >= class.shape.cpus && memory >= class.shape.host_memory;
        }
    }
}

#[derive(Default)]
struct ResourceShortages {
    fits: bool,
    most_free: u16,
    most_cpus: MilliCpus,
    most_memory: Bytes,
    closed: u16,
    foreign: u16,
    first_due: Option<PoolTime>,
}
