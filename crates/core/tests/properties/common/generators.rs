//! Generators of random worlds: frequencies and sizes.

use std::sync::Arc;

use gpupool_core::{
    Bytes, CordonState, DeviceHealth, DeviceSelector, DrainMode, GpuId, IsolationLevel, LoadThresholds, MilliCpus,
    Millis, Percent, PlacementStrategy as Placement, PoolSettings, ReadingField, Request, RequestedAmount, Share,
    Vendor,
};
use proptest::prelude::*;
use proptest::sample::Index;

use super::world::{
    GIB, LeasePick, NodeChange, NodeSpec, POLICIES, ProcessListing, RandomWorld, ReadingSpec, ShortRequest, StepDelay,
    TokenChoice, WorldAction, WorldStep, WorldTheme,
};

pub fn world(theme: WorldTheme, steps: usize) -> impl Strategy<Value = RandomWorld> {
    let most_nodes = if matches!(theme, WorldTheme::Queueing | WorldTheme::Together) { 2 } else { 3 };
    let most_nodes = if theme == WorldTheme::Backfill { 1 } else { most_nodes };
    (
        prop::collection::vec(node(theme), 1..=most_nodes),
        settings(theme),
        prop_oneof![3 => Just(0), 2 => 0..POLICIES],
        prop::collection::vec(step(theme), 1..=steps),
    )
        .prop_map(|(nodes, settings, policies, steps)| RandomWorld { nodes, settings, policies, steps })
}

fn node(theme: WorldTheme) -> impl Strategy<Value = NodeSpec> {
    let least = if theme == WorldTheme::Together { 3 } else { 1 };
    let kinds = prop::collection::vec(prop_oneof![3 => Just(0), 2 => Just(1), 1 => Just(2), 1 => Just(3)], least..=3);
    (2_u64..9, 4_u64..33, any::<bool>(), kinds).prop_map(|(cpus, memory_gib, zone, kinds)| NodeSpec {
        cpus,
        memory_gib,
        zone,
        kinds,
    })
}

fn settings(theme: WorldTheme) -> impl Strategy<Value = PoolSettings> {
    let when_gone = (1_u64..12_000).prop_map(|patience| DrainMode::WhenGone { patience: Millis(patience) });
    let at_once = if theme == WorldTheme::Endings { 1 } else { 3 };
    let drain = prop_oneof![at_once => Just(DrainMode::AtOnce), 3 => when_gone];
    let max_age = prop_oneof![3 => Just(None), 1 => (1_000_u64..20_000).prop_map(|age| Some(Millis(age)))];
    (drain, max_age).prop_map(|(drain, reading_max_age)| PoolSettings { drain, reading_max_age })
}

fn step(theme: WorldTheme) -> impl Strategy<Value = WorldStep> {
    let wait = prop_oneof![
        10 => Just(StepDelay::None),
        6 => (1_u64..3_000).prop_map(StepDelay::Millis),
        2 => (3_000_u64..20_000).prop_map(StepDelay::Millis),
        2 => Just(StepDelay::ToDeadline),
        2 => Just(StepDelay::JustBefore),
        1 => (1_u64..100_000).prop_map(StepDelay::Back),
    ];
    (wait, act(theme)).prop_map(|(wait, act)| WorldStep { wait, act })
}

fn act(theme: WorldTheme) -> impl Strategy<Value = WorldAction> {
    let (asks, ends, faults) = match theme {
        WorldTheme::Everything => (8, 3, 2),
        WorldTheme::Queueing => (10, 3, 1),
        WorldTheme::Endings => (6, 6, 1),
        WorldTheme::Faults => (6, 2, 6),
        WorldTheme::Together => (8, 5, 3),
        WorldTheme::Learning => (30, 20, 1),
        WorldTheme::Backfill => (30, 5, 1),
    };
    let orders = if theme == WorldTheme::Together { 3 } else { 1 };
    prop_oneof![
        3 => Just(WorldAction::RenewAll),
        asks => (request(theme), prop::option::weighted(0.15, 0_u8..4)).prop_map(|(r, key)| WorldAction::Request(ShortRequest(Arc::new(r)), key)),
        ends => ending(),
        2 => heartbeat(),
        faults => fault(theme),
        orders => administration(theme),
    ]
}

fn ending() -> impl Strategy<Value = WorldAction> {
    prop_oneof![
        4 => pick().prop_map(WorldAction::Release),
        4 => pick().prop_map(WorldAction::Drained),
        1 => (pick(), grace()).prop_map(|(pick, grace)| WorldAction::HolderGone(pick, grace)),
        1 => pick().prop_map(WorldAction::Fail),
        1 => (pick(), grace()).prop_map(|(pick, grace)| WorldAction::Revoke(pick, grace)),
    ]
}

fn heartbeat() -> impl Strategy<Value = WorldAction> {
    let shown =
        || prop_oneof![6 => Just(TokenChoice::Right), 1 => Just(TokenChoice::Older), 1 => Just(TokenChoice::Newer)];
    prop_oneof![
        2 => pick().prop_map(WorldAction::Follow),
        3 => (pick(), shown()).prop_map(|(pick, shown)| WorldAction::Confirm(pick, shown)),
        2 => (pick(), shown()).prop_map(|(pick, shown)| WorldAction::Renew(pick, shown)),
        2 => (pick(), shown()).prop_map(|(pick, shown)| WorldAction::Attach(pick, shown)),
    ]
}

fn fault(theme: WorldTheme) -> impl Strategy<Value = WorldAction> {
    let health = prop_oneof![
        3 => Just(DeviceHealth::Healthy),
        1 => Just(DeviceHealth::Lost),
        1 => Just(DeviceHealth::Unhealthy("uncorrectable errors".into())),
    ];
    let growth = if theme == WorldTheme::Together { 4 } else { 1 };
    let change = prop_oneof![
        4 => Just(NodeChange::Nothing),
        3 => Just(NodeChange::Heartbeat),
        growth => (0_usize..4).prop_map(NodeChange::OneMoreDevice),
        1 => Just(NodeChange::Zone),
        1 => (1_u64..9).prop_map(NodeChange::Cpus),
    ];
    prop_oneof![
        5 => (any::<Index>(), reading()).prop_map(|(device, reading)| WorldAction::Observe(device, reading)),
        2 => (any::<Index>(), health).prop_map(|(device, health)| WorldAction::SetHealth(device, health)),
        1 => any::<Index>().prop_map(WorldAction::NodeLost),
        2 => any::<Index>().prop_map(WorldAction::ForgetDevice),
        1 => any::<Index>().prop_map(WorldAction::ForgetNode),
        2 => (any::<Index>(), change).prop_map(|(node, change)| WorldAction::NodeSeen(node, change)),
    ]
}

fn administration(theme: WorldTheme) -> impl Strategy<Value = WorldAction> {
    let cordon = prop_oneof![2 => Just(CordonState::Open), 1 => Just(CordonState::Cordoned)];
    let link = (0_u8..5, 0_u8..5, any::<bool>());
    let restarts = if theme == WorldTheme::Faults { 3 } else { 1 };
    let joins = if theme == WorldTheme::Together { 8 } else { 1 };
    prop_oneof![
        2 => (any::<Index>(), cordon).prop_map(|(device, cordon)| WorldAction::Cordon(device, cordon)),
        1 => (any::<Index>(), grace()).prop_map(|(device, grace)| WorldAction::Drain(device, grace)),
        joins => (any::<Index>(), prop::collection::vec(link, 0..4)).prop_map(|(node, links)| WorldAction::Links(node, links)),
        2 => (0..POLICIES).prop_map(WorldAction::SetPolicies),
        1 => any::<bool>().prop_map(WorldAction::SetWorkload),
        restarts => Just(WorldAction::Restart),
    ]
}

fn pick() -> impl Strategy<Value = LeasePick> {
    prop_oneof![
        8 => any::<Index>().prop_map(LeasePick::Fitting),
        2 => any::<Index>().prop_map(LeasePick::Any),
        1 => Just(LeasePick::Unknown),
    ]
}

fn grace() -> impl Strategy<Value = u64> {
    prop_oneof![2 => Just(0), 4 => 1_u64..8_000, 1 => Just(u64::MAX)]
}

fn field<T: Copy + std::fmt::Debug>(value: impl Strategy<Value = T>) -> impl Strategy<Value = ReadingField<T>> {
    prop_oneof![
        10 => value.prop_map(ReadingField::Value),
        1 => Just(ReadingField::Unsupported),
        1 => Just(ReadingField::Failed),
    ]
}

fn reading() -> impl Strategy<Value = ReadingSpec> {
    let processes = prop_oneof![
        2 => Just(ProcessListing::NotListed),
        3 => (any::<bool>(), prop::bool::weighted(0.2))
            .prop_map(|(squatter, unknown)| ProcessListing::Gone { squatter, unknown }),
        2 => any::<bool>().prop_map(|squatter| ProcessListing::AllRun { squatter }),
    ];
    let age = prop_oneof![6 => Just(0_u64), 1 => 1_u64..5_000];
    let attributed = prop_oneof![3 => Just(None), 1 => Just(Some(0)), 2 => (1_u64..5_000).prop_map(Some)];
    let temperature = prop_oneof![4 => 30_i16..80, 1 => 89_i16..93];
    (age, attributed, field(0_u64..9), field(0_u32..11), field(temperature), processes).prop_map(
        |(age, attributed, memory_eighths, busy_tens, temperature, processes)| ReadingSpec {
            age,
            attributed,
            memory_eighths,
            busy_tens,
            temperature,
            processes,
        },
    )
}

fn request(theme: WorldTheme) -> BoxedStrategy<Request> {
    if theme == WorldTheme::Backfill { part_or_whole().boxed() } else { any_request(theme).boxed() }
}

fn part_or_whole() -> impl Strategy<Value = Request> {
    let amount = prop_oneof![
        2 => Just(RequestedAmount::Whole),
        3 => (1_u32..10).prop_map(|tenths| RequestedAmount::Share(Share(tenths * 100))),
        3 => (1_u32..4, 1_u64..8)
            .prop_map(|(tenths, tens)| RequestedAmount::Both(Share(tenths * 100), Bytes(tens * 10 * GIB))),
    ];
    let duration =
        prop::option::weighted(0.8, (1_u64..4, 0_u64..2).prop_map(|(secs, more)| Millis(secs * 1000 + more)));
    (amount, duration).prop_map(|(amount, max_duration)| Request { amount, max_duration, ..Request::default() })
}

fn any_request(theme: WorldTheme) -> impl Strategy<Value = Request> {
    let gib = || (1_u64..90).prop_map(|gib| Bytes(gib * GIB));
    let tenths = || (1_u32..=10).prop_map(|tenths| Share(tenths * 100));
    let lopsided = if theme == WorldTheme::Queueing { 6 } else { 1 };
    let amount = prop_oneof![
        4 => Just(RequestedAmount::Whole),
        4 => tenths().prop_map(RequestedAmount::Share),
        2 => gib().prop_map(RequestedAmount::Memory),
        lopsided => (tenths(), gib()).prop_map(|(share, memory)| RequestedAmount::Both(share, memory)),
        1 => Just(RequestedAmount::Shared),
    ];
    let several = if theme == WorldTheme::Together { 12 } else { 3 };
    let gpus = prop_oneof![1 => Just(0_u16), 8 => Just(1), several => Just(2), 1 => Just(3)];
    let host = prop_oneof![3 => Just((0, 0)), 2 => (0_u64..5, 0_u64..8)];
    let percent = || (0_u32..=10).prop_map(|tens| Percent(tens * 10_000));
    let thresholds = prop::option::weighted(
        0.25,
        (percent(), percent()).prop_map(|(memory, utilization)| LoadThresholds { memory, utilization }),
    );
    let (named, strategies) = match theme {
        WorldTheme::Learning => (0.99, &[Placement::Fgd, Placement::LeastFragmentation][..]),
        _ => (0.6, Placement::ALL),
    };
    let strategy = prop::option::weighted(named, prop::sample::select(strategies));
    let isolation = prop_oneof![9 => Just(IsolationLevel::None), 1 => Just(IsolationLevel::Mps)];
    let place = (amount, gpus, host, thresholds, strategy, isolation, select());

    let certain = if theme == WorldTheme::Queueing { 0.6 } else { 0.25 };
    let hedged = if theme == WorldTheme::Endings { 0.4 } else { 0.1 };
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
            amount: if gpus == 0 { RequestedAmount::Whole } else { amount },
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

fn select() -> impl Strategy<Value = DeviceSelector> {
    let uuid = || (0_usize..3, 0_usize..3).prop_map(|(node, number)| format!("gpu-{node}-{number}").into());
    prop_oneof![
        8 => Just(DeviceSelector::default()),
        1 => Just(DeviceSelector { vendor: Some(Vendor::Nvidia), ..DeviceSelector::default() }),
        1 => Just(DeviceSelector { models: vec!["H100".into()], ..DeviceSelector::default() }),
        1 => Just(DeviceSelector { min_memory: Some(Bytes(79 * GIB)), ..DeviceSelector::default() }),
        1 => Just(DeviceSelector { labels: [("zone".into(), "a".into())].into(), ..DeviceSelector::default() }),
        2 => prop::collection::vec((0_u32..3).prop_map(GpuId), 1..3)
            .prop_map(|gpu_ids| DeviceSelector { gpu_ids, ..DeviceSelector::default() }),
        1 => prop::collection::vec(uuid(), 1..3).prop_map(|uuids| DeviceSelector { uuids, ..DeviceSelector::default() }),
    ]
}
