//! A random outside world: a fleet of nodes, and steps that name things by rough picks, so that they shrink well and
//! mean something in whatever state the pool is when they come.

use std::fmt;
use std::sync::Arc;

use gpupool_core::device::{
    Cordon, DeviceFacts, DeviceIdentity, DeviceMemory, Health, IsolationSupport, Link, LinkKind, NodeFacts, PciAddress,
    Vendor,
};
use gpupool_core::policy::{Policies, Policy, PolicyMatch, QueueOrder, Quota};
use gpupool_core::reading::Field;
use gpupool_core::request::{Isolation, Select, Thresholds};
use gpupool_core::{
    Amount, Bytes, Drain, GpuId, MilliCpus, Millis, Percent, Request, Settings, Share, Strategy as Placement,
};
use proptest::prelude::*;
use proptest::sample::Index;

pub const GIB: u64 = 1 << 30;

/// What a world is full of. Every check is on in every world; the worlds differ in what happens often.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Theme {
    /// A bit of everything.
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
}

#[derive(Clone)]
pub struct World {
    pub nodes: Vec<NodeSpec>,
    pub settings: Settings,
    pub policies: usize,
    pub steps: Vec<Step>,
}

#[derive(Debug, Clone)]
pub struct NodeSpec {
    pub cpus: u64,
    pub memory_gib: u64,
    pub zone: bool,
    pub kinds: Vec<usize>,
}

#[derive(Debug, Clone)]
pub struct Step {
    pub wait: Wait,
    pub act: Act,
}

/// How much time passes before a step.
#[derive(Debug, Clone, Copy)]
pub enum Wait {
    None,
    Millis(u64),
    /// Exactly until the pool wants to hear the clock.
    ToDeadline,
    /// To just before that: nothing may happen.
    JustBefore,
    /// The clock goes back.
    Back(u64),
}

#[derive(Debug, Clone)]
pub enum Act {
    Ask(Wish, Option<u8>),
    Follow(Pick),
    Confirm(Pick, Shown),
    Renew(Pick, Shown),
    Attach(Pick, Shown),
    HolderGone(Pick, u64),
    Release(Pick),
    Drained(Pick),
    Fail(Pick),
    Revoke(Pick, u64),
    /// Everybody who waits asks, everybody who holds renews.
    KeepAll,
    Observe(Index, ReadingSpec),
    SetHealth(Index, Health),
    Cordon(Index, Cordon),
    Drain(Index, u64),
    NodeLost(Index),
    NodeSeen(Index, Change),
    Links(Index, Vec<(u8, u8, bool)>),
    SetPolicies(usize),
    SetWorkload(bool),
    Restart,
}

/// A request that prints short.
#[derive(Clone)]
pub struct Wish(pub Arc<Request>);

/// A lease: the one that fits the act best, or any.
#[derive(Debug, Clone)]
pub enum Pick {
    Fitting(Index),
    Any(Index),
    Unknown,
}

/// The token that is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    Right,
    Older,
    Newer,
}

/// What changed of a node since it was last seen.
#[derive(Debug, Clone, Copy)]
pub enum Change {
    Nothing,
    OneMoreDevice(usize),
    Zone,
    Cpus(u64),
}

/// A reading in rough numbers: eighths of the memory, tens of percent.
#[derive(Debug, Clone)]
pub struct ReadingSpec {
    pub age: u64,
    pub memory_eighths: Field<u64>,
    pub busy_tens: Field<u32>,
    pub temperature: Field<i16>,
    pub processes: Processes,
}

#[derive(Debug, Clone, Copy)]
pub enum Processes {
    NotListed,
    /// None of them left; with a squatter or without, with one nobody can name or without.
    Gone {
        squatter: bool,
        unknown: bool,
    },
    /// Each lease on the device runs one.
    AllRun {
        squatter: bool,
    },
}

/// One line a step, so that a failure can be read.
impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:?}, policies({})", self.settings, self.policies)?;
        self.nodes.iter().try_for_each(|node| writeln!(f, "  {node:?}"))?;
        self.steps.iter().try_for_each(|step| writeln!(f, "  {:?}: {:?}", step.wait, step.act))
    }
}

/// Only what differs from a plain request.
impl fmt::Debug for Wish {
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

pub const POLICIES: usize = 6;

/// The rules that worlds are run under. All count GPU-hours in the same period.
pub fn policies(number: usize) -> Policies {
    let mut rules = Policies { period: Millis::from_secs(60), ..Policies::unlimited() };
    match number {
        0 => {}
        1 => rules.fallback = Policy { max_allocations: Some(2), ..Policy::default() },
        2 => rules.default_quota.held = Some(Share(1500)),
        3 => rules.default_quota.share_hours = Some(2),
        4 => {
            rules.queue = QueueOrder::FairShare;
            rules.default_quota.held = Some(Share(2500));
            rules.quotas.insert("owner-1".into(), Quota { weight: 3, ..Quota::default() });
        }
        _ => rules.policies.push(Policy {
            name: "short jobs of owner 1 in zone a".into(),
            applies_to: PolicyMatch { owners: vec!["owner-1".into()], ..PolicyMatch::default() },
            priority_boost: 1,
            max_duration: Some(Millis::from_secs(8)),
            node_selector: Arc::new([("zone".into(), "a".into())].into()),
            preferred_models: Arc::from([Arc::from("A100")]),
            ..Policy::unlimited()
        }),
    }
    rules
}

pub fn links(picks: &[(u8, u8, bool)]) -> Vec<Link> {
    let kind = |near: &bool| if *near { LinkKind::NvLink(18) } else { LinkKind::HostBridge };
    picks.iter().map(|(a, b, near)| Link { a: GpuId((*a).into()), b: GpuId((*b).into()), kind: kind(near) }).collect()
}

pub fn world(theme: Theme, steps: usize) -> impl Strategy<Value = World> {
    let most_nodes = if matches!(theme, Theme::Queueing | Theme::Together) { 2 } else { 3 };
    (
        prop::collection::vec(node(theme), 1..=most_nodes),
        settings(theme),
        prop_oneof![3 => Just(0), 2 => 0..POLICIES],
        prop::collection::vec(step(theme), 1..=steps),
    )
        .prop_map(|(nodes, settings, policies, steps)| World { nodes, settings, policies, steps })
}

fn node(theme: Theme) -> impl Strategy<Value = NodeSpec> {
    let least = if theme == Theme::Together { 3 } else { 1 };
    let kinds = prop::collection::vec(prop_oneof![3 => Just(0), 2 => Just(1), 1 => Just(2), 1 => Just(3)], least..=3);
    (2_u64..9, 4_u64..33, any::<bool>(), kinds).prop_map(|(cpus, memory_gib, zone, kinds)| NodeSpec {
        cpus,
        memory_gib,
        zone,
        kinds,
    })
}

fn settings(theme: Theme) -> impl Strategy<Value = Settings> {
    let when_gone = (1_u64..12_000).prop_map(|patience| Drain::WhenGone { patience: Millis(patience) });
    let at_once = if theme == Theme::Endings { 1 } else { 3 };
    let drain = prop_oneof![at_once => Just(Drain::AtOnce), 3 => when_gone];
    let max_age = prop_oneof![3 => Just(None), 1 => (1_000_u64..20_000).prop_map(|age| Some(Millis(age)))];
    (drain, max_age).prop_map(|(drain, reading_max_age)| Settings { drain, reading_max_age })
}

fn step(theme: Theme) -> impl Strategy<Value = Step> {
    let wait = prop_oneof![
        10 => Just(Wait::None),
        6 => (1_u64..3_000).prop_map(Wait::Millis),
        2 => (3_000_u64..20_000).prop_map(Wait::Millis),
        2 => Just(Wait::ToDeadline),
        2 => Just(Wait::JustBefore),
        1 => (1_u64..100_000).prop_map(Wait::Back),
    ];
    (wait, act(theme)).prop_map(|(wait, act)| Step { wait, act })
}

fn act(theme: Theme) -> impl Strategy<Value = Act> {
    let (asks, ends, faults) = match theme {
        Theme::Everything => (8, 3, 2),
        Theme::Queueing => (10, 3, 1),
        Theme::Endings => (6, 6, 1),
        Theme::Faults => (6, 2, 6),
        Theme::Together => (8, 5, 3),
        Theme::Learning => (30, 20, 1),
    };
    let orders = if theme == Theme::Together { 3 } else { 1 };
    prop_oneof![
        3 => Just(Act::KeepAll),
        asks => (request(theme), prop::option::weighted(0.15, 0_u8..4)).prop_map(|(r, key)| Act::Ask(Wish(Arc::new(r)), key)),
        ends => ending(),
        2 => heartbeat(),
        faults => fault(theme),
        orders => administration(theme),
    ]
}

fn ending() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => pick().prop_map(Act::Release),
        4 => pick().prop_map(Act::Drained),
        1 => (pick(), grace()).prop_map(|(pick, grace)| Act::HolderGone(pick, grace)),
        1 => pick().prop_map(Act::Fail),
        1 => (pick(), grace()).prop_map(|(pick, grace)| Act::Revoke(pick, grace)),
    ]
}

fn heartbeat() -> impl Strategy<Value = Act> {
    let shown = || prop_oneof![6 => Just(Shown::Right), 1 => Just(Shown::Older), 1 => Just(Shown::Newer)];
    prop_oneof![
        2 => pick().prop_map(Act::Follow),
        3 => (pick(), shown()).prop_map(|(pick, shown)| Act::Confirm(pick, shown)),
        2 => (pick(), shown()).prop_map(|(pick, shown)| Act::Renew(pick, shown)),
        2 => (pick(), shown()).prop_map(|(pick, shown)| Act::Attach(pick, shown)),
    ]
}

fn fault(theme: Theme) -> impl Strategy<Value = Act> {
    let health = prop_oneof![
        3 => Just(Health::Healthy),
        1 => Just(Health::Lost),
        1 => Just(Health::Unhealthy("uncorrectable errors".into())),
    ];
    let growth = if theme == Theme::Together { 4 } else { 1 };
    let change = prop_oneof![
        4 => Just(Change::Nothing),
        growth => (0_usize..4).prop_map(Change::OneMoreDevice),
        1 => Just(Change::Zone),
        1 => (1_u64..9).prop_map(Change::Cpus),
    ];
    prop_oneof![
        5 => (any::<Index>(), reading()).prop_map(|(device, reading)| Act::Observe(device, reading)),
        2 => (any::<Index>(), health).prop_map(|(device, health)| Act::SetHealth(device, health)),
        1 => any::<Index>().prop_map(Act::NodeLost),
        2 => (any::<Index>(), change).prop_map(|(node, change)| Act::NodeSeen(node, change)),
    ]
}

fn administration(theme: Theme) -> impl Strategy<Value = Act> {
    let cordon = prop_oneof![2 => Just(Cordon::Open), 1 => Just(Cordon::Cordoned)];
    let link = (0_u8..5, 0_u8..5, any::<bool>());
    let restarts = if theme == Theme::Faults { 3 } else { 1 };
    let joins = if theme == Theme::Together { 8 } else { 1 };
    prop_oneof![
        2 => (any::<Index>(), cordon).prop_map(|(device, cordon)| Act::Cordon(device, cordon)),
        1 => (any::<Index>(), grace()).prop_map(|(device, grace)| Act::Drain(device, grace)),
        joins => (any::<Index>(), prop::collection::vec(link, 0..4)).prop_map(|(node, links)| Act::Links(node, links)),
        2 => (0..POLICIES).prop_map(Act::SetPolicies),
        1 => any::<bool>().prop_map(Act::SetWorkload),
        restarts => Just(Act::Restart),
    ]
}

fn pick() -> impl Strategy<Value = Pick> {
    prop_oneof![
        8 => any::<Index>().prop_map(Pick::Fitting),
        2 => any::<Index>().prop_map(Pick::Any),
        1 => Just(Pick::Unknown),
    ]
}

fn grace() -> impl Strategy<Value = u64> {
    prop_oneof![2 => Just(0), 4 => 1_u64..8_000, 1 => Just(u64::MAX)]
}

fn field<T: Copy + std::fmt::Debug>(value: impl Strategy<Value = T>) -> impl Strategy<Value = Field<T>> {
    prop_oneof![
        10 => value.prop_map(Field::Value),
        1 => Just(Field::Unsupported),
        1 => Just(Field::Failed),
    ]
}

fn reading() -> impl Strategy<Value = ReadingSpec> {
    let processes = prop_oneof![
        2 => Just(Processes::NotListed),
        3 => (any::<bool>(), prop::bool::weighted(0.2))
            .prop_map(|(squatter, unknown)| Processes::Gone { squatter, unknown }),
        2 => any::<bool>().prop_map(|squatter| Processes::AllRun { squatter }),
    ];
    let age = prop_oneof![6 => Just(0_u64), 1 => 1_u64..5_000];
    let temperature = prop_oneof![4 => 30_i16..80, 1 => 89_i16..93];
    (age, field(0_u64..9), field(0_u32..11), field(temperature), processes).prop_map(
        |(age, memory_eighths, busy_tens, temperature, processes)| ReadingSpec {
            age,
            memory_eighths,
            busy_tens,
            temperature,
            processes,
        },
    )
}

fn request(theme: Theme) -> impl Strategy<Value = Request> {
    let gib = || (1_u64..90).prop_map(|gib| Bytes(gib * GIB));
    let tenths = || (1_u32..=10).prop_map(|tenths| Share(tenths * 100));
    let amount = prop_oneof![
        4 => Just(Amount::Whole),
        4 => tenths().prop_map(Amount::Share),
        2 => gib().prop_map(Amount::Memory),
        1 => (tenths(), gib()).prop_map(|(share, memory)| Amount::Both(share, memory)),
        1 => Just(Amount::Shared),
    ];
    let several = if theme == Theme::Together { 12 } else { 3 };
    let gpus = prop_oneof![1 => Just(0_u16), 8 => Just(1), several => Just(2), 1 => Just(3)];
    let host = prop_oneof![3 => Just((0, 0)), 2 => (0_u64..5, 0_u64..8)];
    let percent = || (0_u32..=10).prop_map(|tens| Percent(tens * 10_000));
    let thresholds = prop::option::weighted(
        0.25,
        (percent(), percent()).prop_map(|(memory, utilization)| Thresholds { memory, utilization }),
    );
    let (named, strategies) = match theme {
        Theme::Learning => (0.99, &[Placement::Fgd, Placement::LeastFragmentation][..]),
        _ => (0.6, Placement::ALL),
    };
    let strategy = prop::option::weighted(named, prop::sample::select(strategies));
    let isolation = prop_oneof![9 => Just(Isolation::None), 1 => Just(Isolation::Mps)];
    let place = (amount, gpus, host, thresholds, strategy, isolation, select());

    let certain = if theme == Theme::Queueing { 0.6 } else { 0.25 };
    let hedged = if theme == Theme::Endings { 0.4 } else { 0.1 };
    let priority = prop_oneof![8 => Just(0), 1 => -1_i32..=1];
    let terms = (
        0_u8..3,
        priority,
        prop::bool::weighted(0.9),
        prop::option::weighted(0.15, (0_u64..20_000).prop_map(Millis)),
        prop_oneof![1 => 1_000_u64..5_000, 2 => 30_000_u64..120_000],
        prop::option::weighted(certain, (1_u64..20_000).prop_map(Millis)),
        prop::bool::weighted(hedged),
    );
    (place, terms).prop_map(|(place, terms)| {
        let (amount, gpus, (cpus, host_gib), thresholds, strategy, isolation, select) = place;
        let (owner, priority, queue, wait_limit, ttl, max_duration, hedged) = terms;
        Request {
            gpus,
            amount: if gpus == 0 { Amount::Whole } else { amount },
            isolation,
            strategy,
            thresholds,
            select: Arc::new(select),
            cpus: MilliCpus(if gpus == 0 { cpus + 1 } else { cpus } * 1000),
            host_memory: Bytes(host_gib * GIB),
            owner: format!("owner-{owner}").into(),
            priority,
            queue,
            wait_limit,
            ttl: Millis(ttl),
            max_duration,
            hedged,
            ..Request::default()
        }
    })
}

fn select() -> impl Strategy<Value = Select> {
    let uuid = || (0_usize..3, 0_usize..3).prop_map(|(node, number)| format!("gpu-{node}-{number}").into());
    prop_oneof![
        8 => Just(Select::default()),
        1 => Just(Select { vendor: Some(Vendor::Nvidia), ..Select::default() }),
        1 => Just(Select { models: vec!["H100".into()], ..Select::default() }),
        1 => Just(Select { min_memory: Some(Bytes(79 * GIB)), ..Select::default() }),
        1 => Just(Select { labels: [("zone".into(), "a".into())].into(), ..Select::default() }),
        2 => prop::collection::vec((0_u32..3).prop_map(GpuId), 1..3)
            .prop_map(|gpu_ids| Select { gpu_ids, ..Select::default() }),
        1 => prop::collection::vec(uuid(), 1..3).prop_map(|uuids| Select { uuids, ..Select::default() }),
    ]
}
