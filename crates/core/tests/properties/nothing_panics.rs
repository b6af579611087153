//! Whatever comes from outside, the pool answers: unknown ids, numbers at the end of their range, rows that lie.
//!
//! Arithmetic overflow panics in this profile, so this also shows that no number is trusted.

use std::sync::Arc;

use crate::common::session::Session;
use crate::common::world::{self, Theme, World};
use crate::common::{cases, chance};
use gpupool_core::{
    Amount, Attribution, Bytes, Command, Cordon, DeviceId, DeviceMemory, Drain, Field, GpuId, Health, Holder,
    Isolation, LeaseId, Link, LinkKind, MilliCpus, Millis, NodeFacts, NodeId, Percent, Policies, Policy, Pool,
    ProcessUse, Promise, QueueOrder, Quota, Reading, Request, Row, Select, Settings, Share, Strategy as Placement,
    TaskClass, Thresholds, Time, Token,
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

fn node_seen() -> impl Strategy<Value = Command> {
    let memory = prop::option::of((number(), number()));
    let devices = prop::collection::vec((0_usize..4, 0_usize..4, memory), 0..4);
    let numbers = prop::collection::vec(prop_oneof![8 => 0_u32..6, 1 => any::<u32>()].prop_map(GpuId), 0..4);
    (0_usize..3, number(), number(), devices, numbers).prop_map(|(node, cpus, host, devices, numbers)| {
        Command::NodeSeen {
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

fn field<T: Copy + std::fmt::Debug>(value: impl Strategy<Value = T>) -> impl Strategy<Value = Field<T>> {
    prop_oneof![4 => value.prop_map(Field::Value), 1 => Just(Field::Unsupported), 1 => Just(Field::Failed)]
}

fn observe() -> impl Strategy<Value = Command> {
    let whose =
        prop_oneof![lease().prop_map(Attribution::Lease), Just(Attribution::Foreign), Just(Attribution::Unknown)];
    let process = (whose, prop::option::of(number()))
        .prop_map(|(attribution, memory)| ProcessUse { attribution, memory: memory.map(Bytes) });
    let processes = prop::option::of(prop::collection::vec(process, 0..4));
    let as_of = prop::option::of(number().prop_map(Time));
    (device(), (number(), as_of), field(number()), field(small()), field(any::<i16>()), processes).prop_map(
        |(device, (at, leases_as_of), memory, busy, temperature_c, processes)| Command::Observe {
            device,
            reading: Reading {
                at: Time(at),
                memory_used: match memory {
                    Field::Value(bytes) => Field::Value(Bytes(bytes)),
                    Field::Unsupported => Field::Unsupported,
                    Field::Failed => Field::Failed,
                },
                utilization: match busy {
                    Field::Value(busy) => Field::Value(Percent(busy)),
                    Field::Unsupported => Field::Unsupported,
                    Field::Failed => Field::Failed,
                },
                temperature_c,
                processes,
                leases_as_of,
            },
        },
    )
}

fn request() -> impl Strategy<Value = Command> {
    let amount = prop_oneof![
        2 => Just(Amount::Whole),
        2 => small().prop_map(|share| Amount::Share(Share(share))),
        1 => (0_u32..11).prop_map(|tenths| Amount::Share(Share(tenths * 100))),
        1 => number().prop_map(|bytes| Amount::Memory(Bytes(bytes))),
        1 => (small(), number()).prop_map(|(share, bytes)| Amount::Both(Share(share), Bytes(bytes))),
        1 => Just(Amount::Shared),
    ];
    let limits = prop::option::of((small(), small()));
    let gpu_ids = prop::collection::vec(small().prop_map(GpuId), 0..2);
    let place = (0_u16..4, amount, number(), number(), limits, prop::option::of(prop::sample::select(Placement::ALL)));
    let isolation = prop_oneof![9 => Just(Isolation::None), 1 => Just(Isolation::Mig)];
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
                    .map(|(memory, busy)| Thresholds { memory: Percent(memory), utilization: Percent(busy) }),
                select: Arc::new(Select { gpu_ids, ..Select::default() }),
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
            Command::Request { request: Arc::new(request), key: key.map(Into::into) }
        },
    )
}

fn set_policies() -> impl Strategy<Value = Command> {
    let quota = (prop::option::of(small()), prop::option::of(number()), small())
        .prop_map(|(held, share_hours, weight)| Quota { held: held.map(Share), share_hours, weight });
    let policy = (any::<i32>(), prop::option::of(number()), prop::option::of(any::<u16>()), prop::option::of(small()));
    (quota, policy, number(), any::<bool>()).prop_map(|(default_quota, policy, period, fair)| {
        let (priority_boost, max_duration, max_allocations, min_share) = policy;
        let fallback = Policy {
            priority_boost,
            max_duration: max_duration.map(Millis),
            max_allocations,
            min_share: min_share.map(Share),
            ..Policy::unlimited()
        };
        let queue = if fair { QueueOrder::FairShare } else { QueueOrder::Fifo };
        let rules = Policies { fallback, default_quota, queue, period: Millis(period), ..Policies::default() };
        Command::SetPolicies { policies: Box::new(rules) }
    })
}

fn anything() -> impl Strategy<Value = Command> {
    let health = prop_oneof![Just(Health::Healthy), Just(Health::Lost), Just(Health::Unhealthy("".into()))];
    let link = (small(), small(), any::<u8>()).prop_map(|(a, b, lanes)| Link {
        a: GpuId(a),
        b: GpuId(b),
        kind: LinkKind::NvLink(lanes),
    });
    let class = (number(), small(), any::<u16>(), number()).prop_map(|(cpus, share, gpus, count)| {
        (TaskClass { cpus: MilliCpus(cpus), share: Share(share), gpus, models: "H100|A100".into() }, count)
    });
    prop_oneof![
        1 => Just(Command::Tick),
        3 => node_seen(),
        6 => request(),
        3 => observe(),
        1 => small().prop_map(|node| Command::NodeLost { node: NodeId(node) }),
        1 => small().prop_map(|node| Command::ForgetNode { node: NodeId(node) }),
        1 => device().prop_map(|device| Command::ForgetDevice { device }),
        1 => (small(), prop::collection::vec(link, 0..3))
            .prop_map(|(node, links)| Command::Links { node: NodeId(node), links }),
        1 => (device(), health).prop_map(|(device, health)| Command::SetHealth { device, health }),
        1 => lease().prop_map(|lease| Command::Follow { lease }),
        1 => (lease(), token()).prop_map(|(lease, token)| Command::Confirm { lease, token }),
        1 => (lease(), token()).prop_map(|(lease, token)| Command::Renew { lease, token }),
        1 => (lease(), token())
            .prop_map(|(lease, token)| Command::Attach { lease, token, holder: Holder::Connection }),
        1 => (lease(), number()).prop_map(|(lease, grace)| Command::HolderGone { lease, grace: Millis(grace) }),
        2 => lease().prop_map(|lease| Command::Release { lease }),
        2 => lease().prop_map(|lease| Command::Drained { lease }),
        1 => lease().prop_map(|lease| Command::Fail { lease, why: "".into() }),
        1 => (lease(), number()).prop_map(|(lease, grace)| Command::Revoke { lease, grace: Millis(grace) }),
        1 => device().prop_map(|device| Command::Cordon { device, cordon: Cordon::Cordoned }),
        1 => (device(), number()).prop_map(|(device, grace)| Command::Drain { device, grace: Millis(grace) }),
        1 => set_policies(),
        1 => prop::collection::vec(class, 0..3).prop_map(|classes| Command::SetWorkload { classes }),
    ]
}

fn settings() -> impl Strategy<Value = Settings> {
    let drain =
        prop_oneof![Just(Drain::AtOnce), number().prop_map(|patience| Drain::WhenGone { patience: Millis(patience) }),];
    (drain, prop::option::of(number())).prop_map(|(drain, age)| Settings { drain, reading_max_age: age.map(Millis) })
}

/// Small steps, either way, and now and then the end of time.
fn clock() -> impl Strategy<Value = u64> {
    prop_oneof![30 => 0_u64..200_000, 1 => number()]
}

fn goes_on(pool: &mut Pool, commands: Vec<(u64, Command)>) -> Result<(), String> {
    for (now, command) in commands {
        let _denied_or_not = pool.apply(Time(now), command.clone());
        pool.sanity_check().map_err(|broken| format!("{broken} after {command:?}"))?;
        let waiting: Vec<LeaseId> = pool.leases().map(|lease| lease.id).collect();
        for lease in waiting {
            let _why = pool.explain(lease).map(|why| why.to_string());
        }
    }
    Ok(())
}

/// A lie in a row: which, and how.
fn lie() -> impl Strategy<Value = (prop::sample::Index, u8, u64)> {
    (any::<prop::sample::Index>(), 0_u8..9, number())
}

fn tell(rows: &mut Vec<Row>, (at, how, number): (prop::sample::Index, u8, u64)) {
    if rows.is_empty() {
        return;
    }
    let at = at.index(rows.len());
    let twin = rows[at].clone();
    match (&mut rows[at], how) {
        (_, 0) => drop(rows.remove(at)),
        (_, 1) => rows.push(twin),
        (Row::Lease(row), 2) => row.id = LeaseId(number),
        (Row::Lease(row), 3) => row.token = Some(Token(number)),
        (Row::Lease(row), 4) => row.seq = number,
        (Row::Lease(row), 5) => {
            let promise = |p: &Promise| Promise { memory: Bytes(number), ..*p };
            row.promises = row.promises.iter().map(promise).collect();
        }
        (Row::Lease(row), 6) => row.promises = Arc::from([]),
        (Row::Lease(row), 7) => (row.draining, row.quarantined) = (number % 2 == 0, number % 3 == 0),
        (Row::Lease(row), _) => (row.ended_at, row.granted_at) = (Some(Time(number)), None),
        (Row::Counters(row), _) => (row.next_lease, row.last_device) = (number, Some(DeviceId(number as u32))),
        (Row::Device(row), 2) => row.device = DeviceId(number as u32),
        (Row::Device(row), _) => row.gpu_id = GpuId(number as u32),
        (Row::Node(row), 2) => row.node = NodeId(number as u32),
        (Row::Node(row), _) => row.facts.cpus = MilliCpus(number),
        (Row::Usage(row), _) => (row.period, row.share_millis, row.settled_at) = (number, number, Time(number)),
        (Row::Workload(row), _) => (row.seen, row.in_force) = (number / 2, number),
        _ => {}
    }
}

proptest! {
    #![proptest_config(cases(400))]

    /// Rule 6, and the limits of every number.
    #[test]
    fn no_command_stops_a_pool(
        settings in settings(),
        commands in prop::collection::vec((clock(), anything()), 1..120),
    ) {
        let mut pool = Pool::new(settings, Policies::unlimited());
        crate::common::session::ok(goes_on(&mut pool, commands))?;
    }

    /// Rule 6: a row that lies is left out, or taken for what it says; the pool goes on either way.
    #[test]
    fn no_row_stops_a_pool(
        world in chance::world(Theme::Endings, 80),
        lies in prop::collection::vec(lie(), 1..6),
        commands in prop::collection::vec((clock(), anything()), 1..40),
    ) {
        let world: World = world;
        let session = crate::common::session::ok(Session::run(&world))?;
        let mut rows = session.store.rows();
        for lie in lies {
            tell(&mut rows, lie);
        }
        let (mut pool, _complaints) = Pool::restore(world.settings, Policies::unlimited(), session.model.now, rows);
        crate::common::session::ok(pool.sanity_check())?;
        let leases: Vec<LeaseId> = pool.leases().map(|lease| lease.id).collect();
        crate::common::session::ok(goes_on(&mut pool, commands))?;
        for lease in leases {
            for command in [Command::Release { lease }, Command::Drained { lease }] {
                crate::common::session::ok(goes_on(&mut pool, vec![(0, command)]))?;
            }
        }
    }
}
