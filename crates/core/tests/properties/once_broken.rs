//! Bugs that the rules found, each as the shortest test that showed it.

use std::sync::Arc;

use crate::common::world::{self, GIB, NodeSpec};
use gpupool_core::{
    ApplyOutcome, Bytes, CommandDenied, CommandReply, DeviceId, DeviceReading, DeviceSelector, DrainMode, GpuId,
    LeaseId, LeaseRow, LeaseState, MilliCpus, Millis, Percent, PlacementStrategy, Policies, Pool, PoolCommand,
    PoolEffect, PoolRow, PoolSettings, PoolTime, ProcessAttribution, ProcessUsage, QueueOrder, ReadingField, Request,
    RequestedAmount, Share, TaskClass,
};

const WHEN_GONE: PoolSettings =
    PoolSettings { drain: DrainMode::WhenGone { patience: Millis(60_000) }, reading_max_age: None };

/// Creates a pool of nodes with devices of these kinds (`world::device`).
fn pool(settings: PoolSettings, rules: Policies, nodes: &[&[usize]]) -> Pool {
    let mut pool = Pool::new(settings, rules);
    for (number, kinds) in nodes.iter().enumerate() {
        see(&mut pool, number, kinds);
    }
    pool
}

fn see(pool: &mut Pool, number: usize, kinds: &[usize]) -> ApplyOutcome {
    let node = NodeSpec { cpus: 8, memory_gib: 64, zone: false, kinds: kinds.to_vec() };
    pool.apply(
        PoolTime(0),
        PoolCommand::NodeSeen { facts: node.facts(number), devices: node.devices(number), numbers: Vec::new() },
    )
    .1
}

fn whole(owner: &str) -> Request {
    Request { owner: owner.into(), ..Request::default() }
}

fn share(owner: &str, share: u32) -> Request {
    Request { amount: RequestedAmount::Share(Share(share)), ..whole(owner) }
}

fn ask_at(pool: &mut Pool, now: u64, request: Request) -> LeaseId {
    match pool.apply(PoolTime(now), PoolCommand::Request { request: Arc::new(request), key: None, by_admin: false }) {
        (Ok(CommandReply::Lease(lease)), _) => lease,
        (other, _) => panic!("{other:?}"),
    }
}

fn ask(pool: &mut Pool, request: Request) -> LeaseId {
    ask_at(pool, 0, request)
}

fn state(pool: &Pool, lease: LeaseId) -> Option<LeaseState> {
    pool.lease(lease).map(|lease| lease.state)
}

#[test]
fn an_offer_is_not_held_beyond_the_time_the_lease_may_be_held() {
    let mut pool = pool(PoolSettings::default(), Policies::unlimited(), &[&[0]]);
    let request = Request { hedged: true, max_duration: Some(Millis(1_000)), ..whole("a") };
    let (reply, outcome) =
        pool.apply(PoolTime(0), PoolCommand::Request { request: Arc::new(request), key: None, by_admin: false });
    assert!(
        outcome.effects.iter().any(|e| matches!(e, PoolEffect::Offered { until: PoolTime(1_000), .. })),
        "{outcome:?}"
    );
    let Ok(CommandReply::Lease(lease)) = reply else { panic!("{reply:?}") };
    pool.apply(PoolTime(1_000), PoolCommand::Tick).0.unwrap();
    assert_eq!(state(&pool, lease), Some(LeaseState::Expired));
}

#[test]
fn a_waiter_claims_of_the_devices_it_names_only_those_it_could_use() {
    let mut pool = pool(PoolSettings::default(), Policies::unlimited(), &[&[0], &[1]]);
    let named = Arc::new(DeviceSelector { gpu_ids: vec![GpuId(0)], ..DeviceSelector::default() });
    let _held = ask(
        &mut pool,
        Request {
            select: Arc::new(DeviceSelector { models: vec!["H100".into()], ..DeviceSelector::default() }),
            ..whole("a")
        },
    );
    let waits = Request { amount: RequestedAmount::Both(Share(1000), Bytes(60 * GIB)), select: named, ..whole("b") };
    let waits = ask(&mut pool, waits);
    let small = ask(&mut pool, whole("c"));
    assert_eq!(state(&pool, waits), Some(LeaseState::Queued));
    assert_eq!(state(&pool, small), Some(LeaseState::Active), "the 40 GB GPU is no good to the one before");
}

#[test]
fn a_draining_lease_frees_the_quota_of_its_owner() {
    let mut rules = Policies::unlimited();
    rules.default_quota.held = Some(Share(1000));
    let mut pool = pool(WHEN_GONE, rules, &[&[0, 0]]);
    let first = ask(&mut pool, whole("a"));
    let second = ask(&mut pool, whole("a"));
    pool.apply(PoolTime(0), PoolCommand::Release { lease: first }).0.unwrap();
    assert_eq!(state(&pool, second), Some(LeaseState::Active));
}

#[test]
fn a_quota_that_is_reached_takes_the_claims_of_the_owners_waiters_away() {
    let mut rules = Policies::unlimited();
    rules.default_quota.held = Some(Share(1000));
    let mut pool = pool(PoolSettings::default(), rules, &[&[0, 1]]);
    let h100 = Arc::new(DeviceSelector { models: vec!["H100".into()], ..DeviceSelector::default() });
    let a100 = Arc::new(DeviceSelector { models: vec!["A100".into()], ..DeviceSelector::default() });
    let holder =
        ask(&mut pool, Request { amount: RequestedAmount::Share(Share(500)), select: h100.clone(), ..whole("a") });
    let claims = ask(&mut pool, Request { select: h100.clone(), ..whole("b") });
    let behind = ask(&mut pool, Request { amount: RequestedAmount::Share(Share(500)), select: h100, ..whole("c") });
    assert_eq!(state(&pool, behind), Some(LeaseState::Queued));
    let other = ask(&mut pool, Request { select: a100, ..whole("b") });
    assert_eq!([holder, other].map(|lease| state(&pool, lease)), [Some(LeaseState::Active); 2]);
    assert_eq!(state(&pool, claims), Some(LeaseState::Queued));
    assert_eq!(state(&pool, behind), Some(LeaseState::Active));
}

#[test]
fn used_up_gpu_hours_remove_the_claims_of_the_owners_waiters() {
    let mut rules = Policies::unlimited();
    rules.quotas.insert("a".into(), gpupool_core::OwnerQuota { share_hours: Some(1), ..Default::default() });
    let mut pool = pool(PoolSettings::default(), rules, &[&[0], &[0, 0]]);
    let two = ask(&mut pool, Request { gpus: 2, ..whole("a") });
    let one = ask(&mut pool, share("d", 500));
    let claims = ask(&mut pool, whole("a"));
    let behind = ask(&mut pool, share("c", 500));
    assert_eq!([two, one].map(|lease| state(&pool, lease)), [Some(LeaseState::Active); 2]);
    assert_eq!([claims, behind].map(|lease| state(&pool, lease)), [Some(LeaseState::Queued); 2]);
    let runs_out = pool.next_deadline().unwrap();
    assert_eq!(runs_out, PoolTime(1_800), "one thousandth of a GPU-hour is 3.6 s of one GPU, 1.8 s of two");
    pool.apply(runs_out, PoolCommand::Tick).0.unwrap();
    assert_eq!(state(&pool, behind), Some(LeaseState::Active));
}

#[test]
fn an_announced_revocation_lets_a_short_lease_start_first() {
    let mut pool = pool(PoolSettings::default(), Policies::unlimited(), &[&[0]]);
    let half = ask(&mut pool, share("a", 500));
    let waits = ask(&mut pool, whole("b"));
    let short = ask(&mut pool, Request { max_duration: Some(Millis(3_000)), ..share("c", 500) });
    assert_eq!(state(&pool, short), Some(LeaseState::Queued), "the end of the first lease is unknown");
    pool.apply(PoolTime(0), PoolCommand::Revoke { lease: half, grace: Millis(3_000), revocation: None }).0.unwrap();
    assert_eq!([waits, short].map(|lease| state(&pool, lease)), [Some(LeaseState::Queued), Some(LeaseState::Active)]);
}

#[test]
fn a_new_period_during_a_pass_keeps_the_order_of_priorities() {
    let mut rules = Policies { queue: QueueOrder::FairShare, period: Millis(60_000), ..Policies::unlimited() };
    rules.default_quota.held = Some(Share(5000));
    let mut pool = pool(PoolSettings::default(), rules, &[&[0]]);
    let used = ask(&mut pool, whole("a"));
    pool.apply(PoolTime(30_000), PoolCommand::Release { lease: used }).0.unwrap();
    let holder = ask_at(&mut pool, 30_000, Request { ttl: Millis(80_000), cpus: MilliCpus(8_000), ..whole("z") });
    let host_only = Request { gpus: 0, cpus: MilliCpus(1_000), ..whole("a") };
    let first = ask_at(&mut pool, 50_000, host_only);
    let gpu = ask_at(&mut pool, 50_000, whole("a"));
    let lower = ask_at(&mut pool, 50_000, Request { priority: -1, ..whole("b") });
    pool.apply(PoolTime(61_000), PoolCommand::Release { lease: holder }).0.unwrap();
    let states = [first, gpu, lower].map(|lease| state(&pool, lease));
    assert_eq!(states, [Some(LeaseState::Active), Some(LeaseState::Active), Some(LeaseState::Queued)]);
}

#[test]
fn checking_a_quota_does_not_change_the_order() {
    let mut rules = Policies { queue: QueueOrder::FairShare, ..Policies::unlimited() };
    rules.default_quota.share_hours = Some(1_000_000);
    let mut pool = pool(PoolSettings::default(), rules, &[&[0]]);
    let _held = ask(&mut pool, whole("a"));
    let _asks = ask_at(&mut pool, 5_000, whole("a"));
    let used = pool.usage().find(|usage| &*usage.owner == "a").unwrap();
    assert_eq!(used.share_millis, 0, "nothing was kept, so nothing may be counted: {used:?}");
}

#[test]
fn links_remain_when_another_device_arrives() {
    let mut pool = pool(PoolSettings::default(), Policies::unlimited(), &[&[0, 0, 0]]);
    let links = world::links(&[(0, 2, true)]);
    pool.apply(PoolTime(0), PoolCommand::Links { node: gpupool_core::NodeId(0), links }).0.unwrap();
    see(&mut pool, 0, &[0, 0, 0, 0]);
    let pair = ask(&mut pool, Request { gpus: 2, ..whole("a") });
    let devices: Vec<DeviceId> = pool.lease(pair).unwrap().promises.iter().map(|promise| promise.device).collect();
    assert_eq!(devices, [DeviceId(0), DeviceId(2)]);
}

#[test]
fn a_new_request_respects_earlier_waiters_after_facts_changed() {
    let mut pool = pool(PoolSettings::default(), Policies::unlimited(), &[&[0], &[1]]);
    let a100 = Arc::new(DeviceSelector { models: vec!["A100".into()], ..DeviceSelector::default() });
    let on_a100 = |owner, part, secs: u64| Request {
        select: a100.clone(),
        max_duration: Some(Millis::from_secs(secs)),
        ..share(owner, part)
    };
    let _h100 = ask(&mut pool, Request { strategy: Some(PlacementStrategy::FirstFit), ..whole("holder") });
    let _short = ask(&mut pool, on_a100("holder", 500, 5));
    let _long = ask(&mut pool, on_a100("holder", 300, 20));
    let takes_new = ask(&mut pool, whole("a"));
    let _whole = ask(&mut pool, Request { strategy: Some(PlacementStrategy::FirstFit), ..whole("b") });
    let starts_soon = ask(&mut pool, Request { select: a100.clone(), ..share("c", 600) });
    see(&mut pool, 0, &[0, 2]);
    assert_eq!(state(&pool, takes_new), Some(LeaseState::Active));
    let late = ask(&mut pool, on_a100("d", 200, 10));
    assert_eq!([starts_soon, late].map(|lease| state(&pool, lease)), [Some(LeaseState::Queued); 2]);
}

#[test]
fn contradictory_rows_are_skipped_and_numbers_continue() {
    let mut live = pool(WHEN_GONE, Policies::unlimited(), &[&[0, 0]]);
    let mut rows = see(&mut Pool::new(WHEN_GONE, Policies::unlimited()), 0, &[0, 0]).rows;
    let good = ask(&mut live, share("a", 300));
    let row = live.lease(good).unwrap().row().clone();
    let with = |id: u64, change: &dyn Fn(&mut LeaseRow)| {
        let mut row = LeaseRow { id: LeaseId(id), seq: id, ..row.clone() };
        change(&mut row);
        PoolRow::Lease(row)
    };
    rows.push(PoolRow::Lease(row.clone()));
    rows.push(with(1, &|row| row.ended_at = Some(PoolTime(1))));
    rows.push(with(2, &|row| row.granted_at = None));
    rows.push(with(3, &|row| row.draining = true));
    rows.push(with(4, &|row| {
        row.promises =
            row.promises.iter().map(|p| gpupool_core::DevicePromise { memory: Bytes(u64::MAX), ..*p }).collect()
    }));
    rows.push(with(u64::MAX, &|_| {}));
    rows.push(PoolRow::Counters(gpupool_core::PoolCounters { next_token: u64::MAX, ..Default::default() }));
    let (mut pool, bad) = Pool::restore(WHEN_GONE, Policies::unlimited(), PoolTime(0), rows);
    assert_eq!(bad.len(), 6, "{bad:?}");
    see(&mut pool, 0, &[0, 0]);
    let next = ask(&mut pool, share("b", 300));
    assert!(next > good && next.0 < 100);
    pool.check_invariants().unwrap();
}

#[test]
fn absurd_numbers_are_handled() {
    let mut rules = Policies { period: Millis(1), ..Policies::unlimited() };
    rules.default_quota.share_hours = Some(0);
    let mut pool = pool(PoolSettings::default(), rules, &[&[0]]);
    let squatter = ProcessUsage { attribution: ProcessAttribution::Foreign, memory: None };
    let mut reading = DeviceReading::idle(PoolTime(0));
    reading.utilization = ReadingField::Value(Percent(u32::MAX));
    reading.processes = Some(vec![squatter]);
    let _part = pool.apply(PoolTime(0), PoolCommand::Observe { device: DeviceId(0), reading });
    let class = |cpus| TaskClass { cpus: MilliCpus(cpus), share: Share(500), gpus: 1, models: "".into() };
    pool.apply(PoolTime(0), PoolCommand::SetWorkload { classes: vec![(class(0), u64::MAX), (class(1), u64::MAX)] })
        .0
        .unwrap();
    let request = Request { strategy: Some(PlacementStrategy::Fgd), queue: false, ..share("a", 500) };
    let command = PoolCommand::Request { request: Arc::new(request.clone()), key: None, by_admin: false };
    assert_eq!(pool.apply(PoolTime(u64::MAX), command.clone()).0, Err(CommandDenied::NoCapacity));
    pool.apply(PoolTime(0), PoolCommand::SetPolicies { policies: Box::new(Policies::unlimited()) }).0.unwrap();
    pool.apply(PoolTime(0), command).0.unwrap();
    pool.check_invariants().unwrap();
}
