//! The invariant rules (`docs/pool.md`) as properties over random worlds.
//!
//! [`crate::common::session`] checks every step of every world against all rules: the pool's own `check_invariants`, an
//! independent model, the rows, and the order of grants. The tests differ in the emphasis of their worlds and in extra
//! steps. `docs/testing.md` explains how to soak them and how to reproduce a failure.

use std::sync::Arc;

use crate::common::cases;
use crate::common::generators::world;
use crate::common::restored_pool;
use crate::common::session::{PoolSession, case_result};
use crate::common::world::{NodeSpec, RandomWorld, WorldAction, WorldTheme};
use gpupool_core::{
    CommandReply, CordonState, DeviceHealth, DeviceId, DeviceReading, DeviceSelector, LeaseId, LeaseState,
    LoadThresholds, Millis, Pool, PoolCommand, PoolEffect, PoolRow, Request, Token,
};
use proptest::prelude::*;
use proptest::sample::Index;

/// Returns worlds without restarts, so that the whole log can be replayed.
fn without_restarts(theme: WorldTheme, steps: usize) -> impl Strategy<Value = RandomWorld> {
    world(theme, steps).prop_map(|mut world| {
        world.steps.retain(|step| !matches!(step.act, WorldAction::Restart));
        world
    })
}

proptest! {
    #![proptest_config(cases(250))]

    /// Rule 1, in mixed worlds.
    #[test]
    fn promised_share_memory_and_host_never_exceed_what_there_is(world in world(WorldTheme::Everything, 160)) {
        case_result(PoolSession::run(&world))?;
    }

    /// Rule 4: see `grants::check_grant` for legal grants, `session::check_waiter` for waiters that must start.
    #[test]
    fn no_request_is_delayed_by_a_later_one(world in world(WorldTheme::Queueing, 160)) {
        case_result(PoolSession::run(&world))?;
    }

    /// Rule 4, with differences of milliseconds.
    #[test]
    fn a_lease_that_passes_others_ends_before_they_can_start(world in world(WorldTheme::Backfill, 80)) {
        case_result(PoolSession::run(&world))?;
    }

    /// Rule 5: see `effects::check_effect` for due ends.
    #[test]
    fn a_lease_ends_when_it_must_and_not_before(world in world(WorldTheme::Endings, 160)) {
        case_result(PoolSession::run(&world))?;
    }

    /// Rule 6, and the state that a restart must restore.
    #[test]
    fn the_pool_survives_faults_and_restarts(world in world(WorldTheme::Faults, 160)) {
        case_result(PoolSession::run(&world))?;
    }
}

proptest! {
    #![proptest_config(cases(40))]

    /// Rule 2, for the learned workload: counts are adopted from fifty tasks on.
    #[test]
    fn a_restored_pool_has_the_same_learned_workload(
        world in without_restarts(WorldTheme::Learning, 400),
        cut in 60_usize..300,
    ) {
        case_result(restored_pool::check_same_decisions(&world, cut))?;
    }
}

proptest! {
    #![proptest_config(cases(200))]

    /// Rule 2: nothing is lost or reappears, and later decisions are the same.
    #[test]
    fn a_restored_pool_makes_the_same_decisions(
        world in without_restarts(WorldTheme::Everything, 200),
        cut in any::<Index>(),
    ) {
        case_result(restored_pool::check_same_decisions(&world, cut.index(world.steps.len().max(1))))?;
    }

    /// Rule 2, for sets of devices and the links between them.
    #[test]
    fn a_restored_pool_chooses_the_same_devices_together(
        world in without_restarts(WorldTheme::Together, 80),
        cut in any::<Index>(),
    ) {
        case_result(restored_pool::check_same_decisions(&world, cut.index(world.steps.len().max(1))))?;
    }

    /// Rule 3, also without the row of the counters.
    #[test]
    fn tokens_and_numbers_never_repeat_across_restarts(
        world in without_restarts(WorldTheme::Endings, 60),
        more in without_restarts(WorldTheme::Endings, 60),
    ) {
        let session = case_result(PoolSession::run(&world))?;
        let highest = (session.model.last_token, session.model.leases.keys().last().copied());
        for rows in [session.store.rows(), session.store.rows_without_counters()] {
            let mut restarted = case_result(PoolSession::run(&world))?;
            restarted.pool = case_result(session.restored(rows))?;
            restarted.model.restart();
            let from = restarted.log.len();
            for number in 0..restarted.nodes.len() {
                case_result(restarted.send(restarted.node_seen(number)))?;
            }
            for step in &more.steps {
                case_result(restarted.step(step))?;
            }
            let new = restarted.log[from..].iter().flat_map(|logged| &logged.outcome.effects);
            let mut tokens: Vec<Token> = Vec::new();
            for effect in new {
                match effect {
                    PoolEffect::Offered { token, .. } => tokens.push(*token),
                    PoolEffect::Granted { lease, token, .. } if !restarted.model.leases[lease].request.hedged => {
                        tokens.push(*token)
                    }
                    PoolEffect::Queued { lease } => prop_assert!(Some(*lease) > highest.1, "lease {lease} is used again"),
                    _ => {}
                }
            }
            prop_assert!(tokens.is_sorted_by(|a, b| a < b), "tokens go back: {tokens:?}");
            prop_assert!(tokens.first().is_none_or(|first| Some(*first) > highest.0), "a token repeats: {tokens:?}");
        }
    }

    /// Rule 3, also if all ended leases were forgotten and only the counters are left.
    #[test]
    fn tokens_and_numbers_continue_from_the_counters_alone(world in without_restarts(WorldTheme::Endings, 60)) {
        let session = case_result(PoolSession::run(&world))?;
        let over = |row: &PoolRow| matches!(row, PoolRow::Lease(row) if row.state.is_ended() && !row.draining);
        let mut restored = case_result(session.restored(session.store.rows().into_iter().filter(|row| !over(row)).collect()))?;
        let (_, mut outcome) = restored.apply(session.clock, session.node_seen(0));
        let fresh = NodeSpec { cpus: 8, memory_gib: 8, zone: true, kinds: vec![0] };
        let seen = PoolCommand::NodeSeen { facts: fresh.facts(9), devices: fresh.devices(9), numbers: Vec::new() };
        outcome.effects.extend(restored.apply(session.clock, seen).1.effects);
        let request = Arc::new(Request { select: Arc::new(DeviceSelector { uuids: vec!["gpu-9-0".into()], ..DeviceSelector::default() }), ..Request::default() });
        let (reply, granted) = restored.apply(session.clock, PoolCommand::Request { request, key: None, by_admin: false });
        outcome.effects.extend(granted.effects);
        let highest = session.model.leases.keys().last();
        prop_assert!(matches!(&reply, Ok(CommandReply::Lease(lease)) if Some(lease) > highest), "{reply:?} after {highest:?}");
        for effect in &outcome.effects {
            if let PoolEffect::Granted { token, .. } | PoolEffect::Offered { token, .. } = effect {
                prop_assert!(Some(*token) > session.model.last_token, "rule 3: a token repeats: {effect:?}");
            }
        }
    }

    /// Rule 4, liveness: with healthy devices and released leases, each waiter is served.
    #[test]
    fn every_waiter_is_served_once_holders_release(world in world(WorldTheme::Queueing, 120)) {
        let mut session = case_result(PoolSession::run(&world))?;
        case_result(open_all_devices(&mut session))?;
        let can_be_served = |session: &PoolSession, lease: &LeaseId| {
            !session.model.eligible_nodes(&session.model.leases[lease].request).is_empty()
        };
        let waiting = session.model.waiting().filter(|entry| entry.request.wait_limit.is_none()).map(|entry| entry.id);
        let waiting: Vec<LeaseId> = waiting.filter(|lease| can_be_served(&session, lease)).collect();
        let from = session.log.len();
        for _ in 0..=session.model.waiting().count() {
            case_result(release_everything(&mut session))?;
        }
        let granted = session.granted_since(from);
        let starved: Vec<&LeaseId> = waiting.iter().filter(|lease| !granted.contains(lease)).collect();
        prop_assert!(starved.is_empty(), "rule 4: {starved:?} never got a turn");
    }

    /// Rule 6: a fault on one device does not affect leases on others.
    #[test]
    fn a_fault_on_one_device_does_not_affect_other_leases(
        world in world(WorldTheme::Everything, 80),
        at in any::<Index>(),
    ) {
        let mut session = case_result(PoolSession::run(&world))?;
        let devices: Vec<DeviceId> = session.model.devices.keys().copied().collect();
        prop_assume!(!devices.is_empty());
        let broken = *at.get(&devices);
        let node = session.model.devices[&broken].node;
        let elsewhere = |session: &PoolSession| -> Vec<(LeaseId, Token)> {
            let held = session.model.leases.values().filter(|entry| entry.state == LeaseState::Active);
            let other = held.filter(|entry| entry.promises.iter().all(|promise| promise.device != broken));
            other.filter_map(|entry| Some((entry.id, entry.token?))).collect()
        };
        case_result(session.send(PoolCommand::Tick))?;
        let before = elsewhere(&session);
        let from = session.log.len();
        let mut hot = DeviceReading::idle(session.model.now);
        hot.temperature_c = gpupool_core::ReadingField::Value(i16::MAX);
        for command in [
            PoolCommand::Observe { device: broken, reading: hot },
            PoolCommand::SetHealth { device: broken, health: DeviceHealth::Lost },
            PoolCommand::Cordon { device: broken, cordon: CordonState::Cordoned },
            PoolCommand::NodeLost { node },
        ] {
            case_result(session.send(command))?;
        }
        for (lease, token) in before {
            case_result(session.send(PoolCommand::Renew { lease, token }))?;
            let logged = session.log.last();
            prop_assert!(logged.is_some_and(|logged| logged.reply.is_ok()), "rule 6: {logged:?}");
        }
        let others = session.log[from..].iter().flat_map(|logged| &logged.outcome.effects).filter(|effect| match effect {
            PoolEffect::DeviceOpen { device, .. } => session.model.devices[device].node != node,
            PoolEffect::Ended { .. } => true,
            _ => false,
        });
        prop_assert_eq!(others.count(), 0);
    }

    #[test]
    fn the_same_commands_give_the_same_replies_effects_and_rows(world in without_restarts(WorldTheme::Everything, 160)) {
        let session = case_result(PoolSession::run(&world))?;
        let mut again = Pool::new(world.settings, crate::common::world::policies(world.policies));
        for logged in &session.log {
            let (reply, outcome) = again.apply(logged.now, logged.command.clone());
            prop_assert_eq!((&reply, &outcome), (&logged.reply, &logged.outcome));
        }
    }

    #[test]
    fn apply_all_of_one_command_is_apply(world in without_restarts(WorldTheme::Everything, 80)) {
        let session = case_result(PoolSession::run(&world))?;
        let mut again = Pool::new(world.settings, crate::common::world::policies(world.policies));
        for logged in &session.log {
            let (mut replies, outcome) = again.apply_all(logged.now, [logged.command.clone()]);
            prop_assert_eq!((replies.pop(), &outcome), (Some(logged.reply.clone()), &logged.outcome));
            prop_assert!(replies.is_empty());
        }
    }
}

/// Sizes of batches, from one command to more than a world's steps.
fn sizes() -> impl Strategy<Value = Vec<usize>> {
    let size = prop_oneof![3 => 1_usize..5, 2 => 2_usize..20, 1 => Just(1_000)];
    prop::collection::vec(size, 1..6)
}

proptest! {
    #![proptest_config(cases(150))]

    /// All rules, with batches of any size. Deadlines apply before a batch. A new request within it takes nothing that
    /// earlier waiters could use. After the batch, no request that could start is waiting.
    #[test]
    fn batches_of_any_size_keep_every_rule(world in world(WorldTheme::Everything, 160), sizes in sizes()) {
        case_result(PoolSession::run_in_batches(&world, sizes))?;
    }

    /// Rule 4 in batches.
    #[test]
    fn no_request_is_delayed_by_a_later_one_of_a_batch(
        world in world(WorldTheme::Queueing, 160),
        sizes in sizes(),
    ) {
        case_result(PoolSession::run_in_batches(&world, sizes))?;
    }

    /// Rule 4 in batches, with differences of milliseconds.
    #[test]
    fn a_lease_that_passes_others_in_a_batch_ends_before_they_can_start(
        world in world(WorldTheme::Backfill, 80),
        sizes in sizes(),
    ) {
        case_result(PoolSession::run_in_batches(&world, sizes))?;
    }

    /// Rules 5 and 6 in batches, with faults, forgetting and restarts.
    #[test]
    fn the_pool_survives_faults_in_batches(world in world(WorldTheme::Faults, 160), sizes in sizes()) {
        case_result(PoolSession::run_in_batches(&world, sizes))?;
    }
}

fn open_all_devices(session: &mut PoolSession) -> Result<(), String> {
    session.send(PoolCommand::SetPolicies { policies: Box::new(crate::common::world::policies(0)) })?;
    for number in 0..session.nodes.len() {
        session.send(session.node_seen(number))?;
    }
    for device in session.model.devices.keys().copied().collect::<Vec<_>>() {
        session.send(PoolCommand::SetHealth { device, health: DeviceHealth::Healthy })?;
        session.send(PoolCommand::Cordon { device, cordon: CordonState::Open })?;
    }
    // No load is strictly below zero: such requests are never served, nor are those behind them.
    let hopeless = |limits: &LoadThresholds| limits.memory.0 == 0 || limits.utilization.0 == 0;
    let waiting = session.model.waiting().filter(|entry| entry.request.thresholds.as_ref().is_some_and(hopeless));
    for lease in waiting.map(|entry| entry.id).collect::<Vec<_>>() {
        session.send(PoolCommand::Release { lease })?;
    }
    for command in session.renewal_commands() {
        session.send(command)?;
    }
    Ok(())
}

/// Releases all leases, renews all waiters, and reads every device as idle a second later.
fn release_everything(session: &mut PoolSession) -> Result<(), String> {
    let over: Vec<LeaseId> =
        session.model.leases.values().filter(|entry| entry.holds_capacity()).map(|entry| entry.id).collect();
    for lease in over {
        session.send(PoolCommand::Release { lease })?;
        session.send(PoolCommand::Drained { lease })?;
    }
    for command in session.renewal_commands() {
        session.send(command)?;
    }
    session.clock = session.model.now.after(Millis::from_secs(1));
    for device in session.model.devices.keys().copied().collect::<Vec<_>>() {
        session.send(PoolCommand::Observe { device, reading: DeviceReading::idle(session.clock) })?;
    }
    Ok(())
}
