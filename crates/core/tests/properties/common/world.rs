//! Random worlds: a fleet of nodes, and steps that select things loosely, so that they shrink well and are meaningful
//! in any state of the pool.

use std::fmt;
use std::sync::Arc;

use gpupool_core::{
    Bytes, CordonState, DeviceFacts, DeviceHealth, DeviceIdentity, DeviceLink, DeviceMemory, GpuId, IsolationSupport,
    LinkKind, MilliCpus, Millis, NodeFacts, OwnerQuota, PciAddress, Policies, PolicyMatch, PoolSettings, QueueOrder,
    ReadingField, Request, RequestPolicy, Share, Vendor,
};
use proptest::sample::Index;

pub const GIB: u64 = 1 << 30;

/// Emphasis of a world. Every check is on in every world; themes differ in the frequency of steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorldTheme {
    /// A mixture of all steps.
    Everything,
    /// Few devices, many waiters, certain ends, hardly any faults.
    Queueing,
    /// Short lives, offers, holders, drains.
    Endings,
    /// Restarts, faults and administrators.
    Faults,
    /// Several devices at a time, links between them, more devices coming.
    Together,
    /// One request after the other under the strategies that learn.
    Learning,
    /// A GPU or two, parts and wholes of them, and certain ends a millisecond apart.
    Backfill,
}

#[derive(Clone)]
pub struct RandomWorld {
    pub nodes: Vec<NodeSpec>,
    pub settings: PoolSettings,
    pub policies: usize,
    pub steps: Vec<WorldStep>,
}

#[derive(Debug, Clone)]
pub struct NodeSpec {
    pub cpus: u64,
    pub memory_gib: u64,
    pub zone: bool,
    pub kinds: Vec<usize>,
}

#[derive(Debug, Clone)]
pub struct WorldStep {
    pub wait: StepDelay,
    pub act: WorldAction,
}

/// Delay before a step.
#[derive(Debug, Clone, Copy)]
pub enum StepDelay {
    None,
    Millis(u64),
    /// Exactly until the next deadline.
    ToDeadline,
    /// Until just before the next deadline, so that nothing may happen.
    JustBefore,
    /// Back in time.
    Back(u64),
}

#[derive(Debug, Clone)]
pub enum WorldAction {
    Request(ShortRequest, Option<u8>),
    Follow(LeasePick),
    Confirm(LeasePick, TokenChoice),
    Renew(LeasePick, TokenChoice),
    Attach(LeasePick, TokenChoice),
    HolderGone(LeasePick, u64),
    Release(LeasePick),
    Drained(LeasePick),
    Fail(LeasePick),
    Revoke(LeasePick, u64),
    /// Every waiter sends a heartbeat, every holder renews.
    RenewAll,
    Observe(Index, ReadingSpec),
    SetHealth(Index, DeviceHealth),
    Cordon(Index, CordonState),
    Drain(Index, u64),
    NodeLost(Index),
    NodeSeen(Index, NodeChange),
    ForgetDevice(Index),
    ForgetNode(Index),
    Links(Index, Vec<(u8, u8, bool)>),
    SetPolicies(usize),
    SetWorkload(bool),
    Restart,
}

/// Request with a short debug output.
#[derive(Clone)]
pub struct ShortRequest(pub Arc<Request>);

/// Selection of a lease: one that suits the action, or any.
#[derive(Debug, Clone)]
pub enum LeasePick {
    Fitting(Index),
    Any(Index),
    Unknown,
}

/// Choice of the presented token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenChoice {
    Right,
    Older,
    Newer,
}

/// Change of a node since it was last seen.
#[derive(Debug, Clone, Copy)]
pub enum NodeChange {
    /// All its devices are listed again.
    Nothing,
    /// No device is listed.
    Heartbeat,
    OneMoreDevice(usize),
    Zone,
    Cpus(u64),
}

/// Reading in rough numbers: eighths of the memory, tens of percent.
#[derive(Debug, Clone)]
pub struct ReadingSpec {
    pub age: u64,
    /// Age of the state by which processes were attributed, if it is not the reading's.
    pub attributed: Option<u64>,
    pub memory_eighths: ReadingField<u64>,
    pub busy_tens: ReadingField<u32>,
    pub temperature: ReadingField<i16>,
    pub processes: ProcessListing,
}

#[derive(Debug, Clone, Copy)]
pub enum ProcessListing {
    NotListed,
    /// No process of a lease is left; foreign or unattributed ones may be.
    Gone {
        squatter: bool,
        unknown: bool,
    },
    /// Each lease on the device runs one process.
    AllRun {
        squatter: bool,
    },
}

/// One line per step, to keep failures readable.
impl fmt::Debug for RandomWorld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:?}, policies({})", self.settings, self.policies)?;
        self.nodes.iter().try_for_each(|node| writeln!(f, "  {node:?}"))?;
        self.steps.iter().try_for_each(|step| writeln!(f, "  {:?}: {:?}", step.wait, step.act))
    }
}

/// Only the differences from a default request.
impl fmt::Debug for ShortRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fields = |request: &Request| -> Vec<String> {
            let text = format!("{request:#?}");
            let mut fields = Vec::new();
            for line in text.lines().skip(1) {
                match line.starts_with("    ") && line[4..].starts_with(char::is_alphabetic) {
                    true => fields.push(line.trim().to_owned()),
                    false => fields.last_mut().into_iter().for_each(|field: &mut String| *field += line.trim()),
                }
            }
            fields
        };
        let plain = fields(&Request::default());
        fields(&self.0).into_iter().filter(|field| !plain.contains(field)).try_for_each(|field| write!(f, "{field} "))
    }
}

pub fn device(kind: usize, node: usize, number: usize) -> DeviceFacts {
    let uuid = DeviceIdentity::Uuid(format!("gpu-{node}-{number}").into());
    let known =
        |gib: u64, reserved: u64| Some(DeviceMemory { total: Bytes(gib * GIB), reserved: Bytes(reserved * GIB) });
    let (vendor, model, memory) = match kind {
        0 => (Vendor::Nvidia, "NVIDIA H100 80GB HBM3", known(80, 2)),
        1 => (Vendor::Nvidia, "NVIDIA A100-SXM4-40GB", known(40, 0)),
        2 => (Vendor::Nvidia, "NVIDIA GB10", None),
        _ => (Vendor::Amd, "AMD Instinct MI300X", known(192, 1)),
    };
    let address = PciAddress { domain: 0, bus: number as u8, device: 0, function: 0 };
    let identity = if kind == 3 { DeviceIdentity::Pci { address, partition: None } } else { uuid };
    let isolation = IsolationSupport { mps: kind == 0, mig: false };
    let labels = if kind == 1 { [("tier".into(), "old".into())].into() } else { Default::default() };
    DeviceFacts { identity, vendor, model: model.into(), memory, partition: None, isolation, labels }
}

impl NodeSpec {
    pub fn facts(&self, number: usize) -> NodeFacts {
        let zone = if self.zone { "a" } else { "b" };
        NodeFacts {
            name: format!("node-{number}").into(),
            cpus: MilliCpus(self.cpus * 1000),
            memory: Bytes(self.memory_gib * GIB),
            labels: [("zone".into(), zone.into())].into(),
        }
    }

    pub fn devices(&self, number: usize) -> Vec<DeviceFacts> {
        self.kinds.iter().enumerate().map(|(i, kind)| device(*kind, number, i)).collect()
    }
}

pub const POLICIES: usize = 8;

/// Policies of the worlds. All count GPU-hours in the same period.
pub fn policies(number: usize) -> Policies {
    let mut rules = Policies { period: Millis::from_secs(60), ..Policies::unlimited() };
    match number {
        0 => {}
        1 => {
            rules.fallback = RequestPolicy { max_allocations: Some(2), ..RequestPolicy::default() };
            rules.ageing_step = Millis::from_secs(3);
        }
        2 => rules.default_quota.held = Some(Share(1500)),
        3 => rules.default_quota.share_hours = Some(2),
        4 => {
            rules.queue = QueueOrder::FairShare;
            rules.default_quota.held = Some(Share(2500));
            rules.ageing_step = Millis::from_secs(10);
            rules.quotas.insert("owner-1".into(), OwnerQuota { weight: 3, ..OwnerQuota::default() });
        }
        5 | 6 => {
            // Requests gain up to two, so that they reach the priorities of administrators and of owner 1.
            rules.ageing_step = Millis::from_secs(if number == 5 { 2 } else { 7 });
            rules.fallback = RequestPolicy { max_priority: 0, ..RequestPolicy::unlimited() };
            rules.policies.push(RequestPolicy {
                name: "owner 1".into(),
                applies_to: PolicyMatch { owners: vec!["owner-1".into()], ..PolicyMatch::default() },
                max_priority: 1,
                ..RequestPolicy::unlimited()
            });
        }
        _ => rules.policies.push(RequestPolicy {
            name: "short jobs of owner 1 in zone a".into(),
            applies_to: PolicyMatch { owners: vec!["owner-1".into()], ..PolicyMatch::default() },
            priority_boost: 1,
            max_duration: Some(Millis::from_secs(8)),
            node_selector: Arc::new([("zone".into(), "a".into())].into()),
            preferred_models: Arc::from([Arc::from("A100")]),
            ..RequestPolicy::unlimited()
        }),
    }
    rules
}

pub fn links(picks: &[(u8, u8, bool)]) -> Vec<DeviceLink> {
    let kind = |near: &bool| if *near { LinkKind::NvLink(18) } else { LinkKind::HostBridge };
    picks
        .iter()
        .map(|(a, b, near)| DeviceLink { a: GpuId((*a).into()), b: GpuId((*b).into()), kind: kind(near) })
        .collect()
}
