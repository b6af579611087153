//! The pool handles any input: unknown ids, extreme numbers, corrupted rows.
//!
//! Arithmetic overflow panics in this profile, so this also shows that no number is trusted.

use std::sync::Arc;

use crate::common::session::PoolSession;
use crate::common::world::{self, RandomWorld, WorldTheme};
use crate::common::{cases, generators};
use gpupool_core::{
    Bytes, CordonState, DeviceHealth, DeviceId, DeviceLink, DeviceMemory, DevicePromise, DeviceReading, DeviceSelector,
    DrainMode, GpuId, IsolationLevel, LeaseHolder, LeaseId, LinkKind, LoadThresholds, MilliCpus, Millis, NodeFacts,
    NodeId, OwnerQuota, Percent, PlacementStrategy as Placement, Policies, Pool, PoolCommand, PoolRow, PoolSettings,
    PoolTime, ProcessAttribution, ProcessUsage, QueueOrder, ReadingField, Request, RequestPolicy, RequestedAmount,
    Share, TaskClass, Token,
};
use proptest::prelude::*;

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 0_u64..5,
        2 => 1_000_u64..100_000,
        1 => (1_u64..200).prop_map(|gib| gib << 30),
        1 => prop::sample::select(vec![u64::MAX, u64::MAX - 1, u64::MAX / 2, 1 << 63, u64::from(u32::MAX)]),
    ]
}

fn small() -> impl Strategy<Value = u32> {
    prop_oneof![8 => 0_u32..6, 1 => prop::sample::select(vec![u32::MAX, u32::MAX - 1, 1_000, 100_000])]
}

fn lease() -> impl Strategy<Value = LeaseId> {
    prop_oneof![8 => 0_u64..12, 1 => Just(u64::MAX)].prop_map(LeaseId)
}

fn device() -> impl Strategy<Value = DeviceId> {
    small().prop_map(DeviceId)
}

fn token() -> impl Strategy<Value = Token> {
    prop_oneof![8 => 0_u64..12, 1 => Just(u64::MAX)].prop_map(Token)
}

fn node_seen() -> impl Strategy<Value = PoolCommand> {
    let memory = prop::option::of((number(), number()));
    let devices = prop::collection::vec((0_usize..4, 0_usize..4, memory), 0..4);
    let numbers = prop::collection::vec(prop_oneof![8 => 0_u32..6, 1 => any::<u32>()].prop_map(GpuId), 0..4);
    (0_usize..3, number(), number(), devices, numbers).prop_map(|(node, cpus, host, devices, numbers)| {
        PoolCommand::NodeSeen {
            numbers,
            facts: NodeFacts {
                name: format!("node-{node}").into(),
                cpus: MilliCpus(cpus),
                memory: Bytes(host),
                labels: Default::default(),
            },
            devices: devices
                .into_iter()
                .map(|(kind, number, memory)| {
                    let mut facts = world::device(kind, node, number);
                    facts.memory =
                        memory.map(|(total, reserved)| DeviceMemory { total: Bytes(total), reserved: Bytes(reserved) });
                    facts
                })
                .collect(),
        }
    })
}

fn field<T: Copy + std::fmt::Debug>(value: impl Strategy<Value = T>) -> impl Strategy<Value = ReadingField<T>> {
    prop_oneof![4 => value.prop_map(ReadingField::Value), 1 => Just(ReadingField::Unsupported), 1 => Just(ReadingField::Failed)]
}

fn observe() -> impl Strategy<Value = PoolCommand> {
    let whose = prop_oneof![
        lease().prop_map(ProcessAttribution::Lease),
        Just(ProcessAttribution::Foreign),
        Just(ProcessAttribution::Unknown)
    ];
    let process = (whose, prop::option::of(number()))
        .prop_map(|(attribution, memory)| ProcessUsage { attribution, memory: memory.map(Bytes) });
    let processes = prop::option::of(prop::collection::vec(process, 0..4));
    let as_of = prop::option::of(number().prop_map(PoolTime));
    (device(), (number(), as_of), field(number()), field(small()), field(any::<i16>()), processes).prop_map(
        |(device, (at, leases_as_of), memory, busy, temperature_c, processes)| PoolCommand::Observe {
            device,
            reading: DeviceReading {
                at: PoolTime(at),
                memory_used: match memory {
                    ReadingField::Value(bytes) => ReadingField::Value(Bytes(bytes)),
                    ReadingField::Unsupported => ReadingField::Unsupported,
                    ReadingField::Failed => ReadingField::Failed,
                },
                utilization: match busy {
                    ReadingField::Value(busy) => ReadingField::Value(Percent(busy)),
                    ReadingField::Unsupported => ReadingField::Unsupported,
                    ReadingField::Failed => ReadingField::Failed,
                },
                temperature_c,
                processes,
                leases_as_of,
            },
        },
    )
}

fn request() -> impl Strategy<Value = PoolCommand> {
    let amount = prop_oneof![
        2 => Just(RequestedAmount::Whole),
        2 => small().prop_map(|share| RequestedAmount::Share(Share(share))),
        1 => (0_u32..11).prop_map(|tenths| RequestedAmount::Share(Share(tenths * 100))),
        1 => number().prop_map(|bytes| RequestedAmount::Memory(Bytes(bytes))),
        1 => (small(), number()).prop_map(|(share, bytes)| RequestedAmount::Both(Share(share), Bytes(bytes))),
        1 => Just(RequestedAmount::Shared),
    ];
    let limits = prop::option::of((small(), small()));
    let gpu_ids = prop::collection::vec(small().prop_map(GpuId), 0..2);
    let place = (0_u16..4, amount, number(), number(), limits, prop::option::of(prop::sample::select(Placement::ALL)));
    let isolation = prop_oneof![9 => Just(IsolationLevel::None), 1 => Just(IsolationLevel::Mig)];
    let terms =
        (number(), prop::option::of(number()), prop::option::of(number()), any::<bool>(), any::<i32>(), gpu_ids);
    (place, isolation, terms, 0_u8..3, prop::option::weighted(0.2, ".{0,3}")).prop_map(
        |((gpus, amount, cpus, host, limits, strategy), isolation, terms, owner, key)| {
            let (ttl, wait_limit, max_duration, hedged, priority, gpu_ids) = terms;
            let request = Request {
                gpus,
                amount,
                isolation,
                strategy,
                thresholds: limits
                    .map(|(memory, busy)| LoadThresholds { memory: Percent(memory), utilization: Percent(busy) }),
                select: Arc::new(DeviceSelector { gpu_ids, ..DeviceSelector::default() }),
                cpus: MilliCpus(cpus),
                host_memory: Bytes(host),
                owner: format!("owner-{owner}").into(),
                ttl: Millis(if ttl < 5 { 60_000 } else { ttl }),
                wait_limit: wait_limit.map(Millis),
                max_duration: max_duration.map(Millis),
                hedged,
                priority: if priority % 2 == 0 { 0 } else { priority },
                ..Request::default()
            };
            PoolCommand::Request { request: Arc::new(request), key: key.map(Into::into), by_admin: hedged }
        },
    )
}

fn set_policies() -> impl Strategy<Value = PoolCommand> {
    let quota = (prop::option::of(small()), prop::option::of(number()), small())
        .prop_map(|(held, share_hours, weight)| OwnerQuota { held: held.map(Share), share_hours, weight });
    let priorities = (any::<i32>(), prop_oneof![Just(0), Just(1), Just(1_000_000), any::<i32>()], number());
    let policy = (priorities, prop::option::of(number()), prop::option::of(any::<u16>()), prop::option::of(small()));
    (quota, policy, number(), any::<bool>()).prop_map(|(default_quota, policy, period, fair)| {
        let ((priority_boost, max_priority, ageing_step), max_duration, max_allocations, min_share) = policy;
        let fallback = RequestPolicy {
            max_priority,
            priority_boost,
            max_duration: max_duration.map(Millis),
            max_allocations,
            min_share: min_share.map(Share),
            ..RequestPolicy::unlimited()
        };
        let queue = if fair { QueueOrder::FairShare } else { QueueOrder::Fifo };
        let (period, ageing_step) = (Millis(period), Millis(ageing_step));
        let rules = Policies { fallback, default_quota, queue, period, ageing_step, ..Policies::default() };
        PoolCommand::SetPolicies { policies: Box::new(rules) }
    })
}

fn any_command() -> impl Strategy<Value = PoolCommand> {
    let health =
        prop_oneof![Just(DeviceHealth::Healthy), Just(DeviceHealth::Lost), Just(DeviceHealth::Unhealthy("".into()))];
    let link = (small(), small(), any::<u8>()).prop_map(|(a, b, lanes)| DeviceLink {
        a: GpuId(a),
        b: GpuId(b),
        kind: LinkKind::NvLink(lanes),
    });
    let class = (number(), small(), any::<u16>(), number()).prop_map(|(cpus, share, gpus, count)| {
        (TaskClass { cpus: MilliCpus(cpus), share: Share(share), gpus, models: "H100|A100".into() }, count)
    });
    prop_oneof![
        1 => Just(PoolCommand::Tick),
        3 => node_seen(),
        6 => request(),
        3 => observe(),
        1 => small().prop_map(|node| PoolCommand::NodeLost { node: NodeId(node) }),
        1 => small().prop_map(|node| PoolCommand::ForgetNode { node: NodeId(node) }),
        1 => device().prop_map(|device| PoolCommand::ForgetDevice { device }),
        1 => (small(), prop::collection::vec(link, 0..3))
            .prop_map(|(node, links)| PoolCommand::Links { node: NodeId(node), links }),
        1 => (device(), health).prop_map(|(device, health)| PoolCommand::SetHealth { device, health }),
        1 => lease().prop_map(|lease| PoolCommand::Follow { lease }),
        1 => (lease(), token()).prop_map(|(lease, token)| PoolCommand::Confirm { lease, token }),
        1 => (lease(), token()).prop_map(|(lease, token)| PoolCommand::Renew { lease, token }),
        1 => (lease(), token())
            .prop_map(|(lease, token)| PoolCommand::Attach { lease, token, holder: LeaseHolder::Connection }),
        1 => (lease(), number()).prop_map(|(lease, grace)| PoolCommand::HolderGone { lease, grace: Millis(grace) }),
        2 => lease().prop_map(|lease| PoolCommand::Release { lease }),
        2 => lease().prop_map(|lease| PoolCommand::Drained { lease }),
        1 => lease().prop_map(|lease| PoolCommand::Fail { lease, why: "".into() }),
        1 => (lease(), number()).prop_map(|(lease, grace)| PoolCommand::Revoke { lease, grace: Millis(grace), revocation: None }),
        1 => device().prop_map(|device| PoolCommand::Cordon { device, cordon: CordonState::Cordoned }),
        1 => (device(), number()).prop_map(|(device, grace)| PoolCommand::Drain { device, grace: Millis(grace) }),
        1 => set_policies(),
        1 => prop::collection::vec(class, 0..3).prop_map(|classes| PoolCommand::SetWorkload { classes }),
    ]
}

fn settings() -> impl Strategy<Value = PoolSettings> {
    let drain = prop_oneof![
        Just(DrainMode::AtOnce),
        number().prop_map(|patience| DrainMode::WhenGone { patience: Millis(patience) }),
    ];
    (drain, prop::option::of(number()))
        .prop_map(|(drain, age)| PoolSettings { drain, reading_max_age: age.map(Millis) })
}

/// Small steps in both directions, and sometimes an extreme time.
fn clock() -> impl Strategy<Value = u64> {
    prop_oneof![30 => 0_u64..200_000, 1 => number()]
}

fn apply_and_check(pool: &mut Pool, commands: Vec<(u64, PoolCommand)>) -> Result<(), String> {
    for (now, command) in commands {
        let _denied_or_not = pool.apply(PoolTime(now), command.clone());
        pool.check_invariants().map_err(|broken| format!("{broken} after {command:?}"))?;
        let waiting: Vec<LeaseId> = pool.leases().map(|lease| lease.id).collect();
        for lease in waiting {
            let _why = pool.explain(lease).map(|why| why.to_string());
        }
    }
    Ok(())
}

/// Corruption of one row: position, kind and number.
fn row_corruption() -> impl Strategy<Value = (prop::sample::Index, u8, u64)> {
    (any::<prop::sample::Index>(), 0_u8..9, number())
}

fn corrupt_row(rows: &mut Vec<PoolRow>, (at, how, number): (prop::sample::Index, u8, u64)) {
    if rows.is_empty() {
        return;
    }
    let at = at.index(rows.len());
    let twin = rows[at].clone();
    match (&mut rows[at], how) {
        (_, 0) => drop(rows.remove(at)),
        (_, 1) => rows.push(twin),
        (PoolRow::Lease(row), 2) => row.id = LeaseId(number),
        (PoolRow::Lease(row), 3) => row.token = Some(Token(number)),
        (PoolRow::Lease(row), 4) => row.seq = number,
        (PoolRow::Lease(row), 5) => {
            let promise = |p: &DevicePromise| DevicePromise { memory: Bytes(number), ..*p };
            row.promises = row.promises.iter().map(promise).collect();
        }
        (PoolRow::Lease(row), 6) => row.promises = Arc::from([]),
        (PoolRow::Lease(row), 7) => (row.draining, row.quarantined) = (number % 2 == 0, number % 3 == 0),
        (PoolRow::Lease(row), _) => (row.ended_at, row.granted_at) = (Some(PoolTime(number)), None),
        (PoolRow::Counters(row), _) => (row.next_lease, row.last_device) = (number, Some(DeviceId(number as u32))),
        (PoolRow::Device(row), 2) => row.device = DeviceId(number as u32),
        (PoolRow::Device(row), _) => row.gpu_id = GpuId(number as u32),
        (PoolRow::Node(row), 2) => row.node = NodeId(number as u32),
        (PoolRow::Node(row), _) => row.facts.cpus = MilliCpus(number),
        (PoolRow::Usage(row), _) => (row.period, row.share_millis, row.settled_at) = (number, number, PoolTime(number)),
        (PoolRow::Workload(row), _) => (row.seen, row.in_force) = (number / 2, number),
        _ => {}
    }
}

proptest! {
    #![proptest_config(cases(400))]

    /// Rule 6, and the limits of every number.
    #[test]
    fn no_command_stops_a_pool(
        settings in settings(),
        commands in prop::collection::vec((clock(), any_command()), 1..120),
    ) {
        let mut pool = Pool::new(settings, Policies::unlimited());
        crate::common::session::case_result(apply_and_check(&mut pool, commands))?;
    }

    /// Rule 6: a corrupted row is skipped or believed; the pool works on either way.
    #[test]
    fn no_row_stops_a_pool(
        world in generators::world(WorldTheme::Endings, 80),
        corruptions in prop::collection::vec(row_corruption(), 1..6),
        commands in prop::collection::vec((clock(), any_command()), 1..40),
    ) {
        let world: RandomWorld = world;
        let session = crate::common::session::case_result(PoolSession::run(&world))?;
        let mut rows = session.store.rows();
        for row_corruption in corruptions {
            corrupt_row(&mut rows, row_corruption);
        }
        let (mut pool, _complaints) = Pool::restore(world.settings, Policies::unlimited(), session.model.now, rows);
        crate::common::session::case_result(pool.check_invariants())?;
        let leases: Vec<LeaseId> = pool.leases().map(|lease| lease.id).collect();
        crate::common::session::case_result(apply_and_check(&mut pool, commands))?;
        for lease in leases {
            for command in [PoolCommand::Release { lease }, PoolCommand::Drained { lease }] {
                crate::common::session::case_result(apply_and_check(&mut pool, vec![(0, command)]))?;
            }
        }
    }
}
