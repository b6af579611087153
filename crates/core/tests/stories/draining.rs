//! What a lease leaves behind: its capacity is granted again when its processes are gone.

use crate::support::*;
use gpupool_core::{
    Bytes, DeviceClosure, DeviceId, DeviceReading, LeaseId, LeaseState, Millis, PlacementStrategy, PoolCommand,
    PoolEffect, ProcessAttribution, ProcessUsage, Request, Share,
};

/// A lease that has ended, a waiter behind it, and the pool they are in.
fn ended_with_a_waiter() -> (Stage, LeaseId, LeaseId) {
    let mut stage = Stage::draining(1, secs(10));
    let ended = stage.ask(whole());
    let waiter = stage.ask(whole());
    stage.release(ended);
    (stage, ended, waiter)
}

#[test]
fn capacity_drains_before_it_is_granted_again() {
    let (mut stage, ended, waiter) = ended_with_a_waiter();
    assert!(stage.effects.contains(&PoolEffect::Draining { lease: ended }));
    assert_eq!((stage.state(ended), stage.state(waiter)), (LeaseState::Released, LeaseState::Queued));
    assert_eq!((stage.device(0).promised, stage.device(0).leases), (Share::WHOLE, vec![ended]));
    stage.run(PoolCommand::Drained { lease: ended });
    assert!(stage.is_active(waiter));
    assert!(stage.effects.contains(&PoolEffect::Freed { lease: ended }));
}

#[test]
fn a_complete_list_of_processes_without_its_own_frees_it() {
    let (mut stage, ended, waiter) = ended_with_a_waiter();
    stage.read(0, |reading| reading.processes = Some(vec![process_of(ended, gib(1))]));
    assert!(stage.is_queued(waiter), "one of its processes is still there");
    stage.read(0, |reading| reading.processes = None);
    assert!(stage.is_queued(waiter), "no list tells nothing");
    stage.read(0, |reading| {
        reading.processes = Some(vec![ProcessUsage { attribution: ProcessAttribution::Unknown, memory: None }]);
    });
    assert!(stage.is_queued(waiter), "a process nobody can attribute may be its own");
    stage.read(0, |reading| reading.processes = Some(vec![foreign_process(Bytes(1))]));
    assert!(stage.is_active(waiter), "somebody else's process is not its own");
}

#[test]
fn a_list_from_before_the_end_frees_nothing() {
    let mut stage = Stage::draining(1, secs(10));
    let ended = stage.ask(whole());
    stage.release(ended);
    let at_the_end = DeviceReading::idle(stage.now);
    stage.run(PoolCommand::Observe { device: DeviceId(0), reading: at_the_end });
    assert!(stage.lease(ended).draining);
    stage.idle(0);
    assert!(!stage.lease(ended).draining);
}

#[test]
fn a_list_attributed_before_the_end_frees_nothing() {
    let mut stage = Stage::draining(1, secs(10));
    let before_the_grant = stage.now;
    stage.pass(secs(1));
    let ended = stage.ask(whole());
    stage.release(ended);
    let at_the_end = stage.now;
    stage.read(0, |reading| {
        reading.processes = Some(vec![foreign_process(Bytes(1))]);
        reading.leases_as_of = Some(before_the_grant);
    });
    assert!(stage.lease(ended).draining, "the foreign process may be its own");
    stage.read(0, |reading| reading.leases_as_of = Some(at_the_end));
    assert!(!stage.lease(ended).draining);
}

#[test]
fn processes_that_stay_quarantine_the_device_until_they_are_gone() {
    let (mut stage, ended, waiter) = ended_with_a_waiter();
    stage.pass(secs(10));
    let device = DeviceId(0);
    assert!(stage.effects.contains(&PoolEffect::Quarantined { device, lease: ended }));
    assert!(stage.effects.contains(&PoolEffect::DeviceOpen { device, closed: Some(DeviceClosure::Quarantined) }));
    stage.run(PoolCommand::Follow { lease: waiter });
    assert_eq!(stage.device(0).closed, Some(DeviceClosure::Quarantined));
    stage.run(PoolCommand::Drained { lease: ended });
    assert_eq!(stage.device(0).closed, None);
    assert!(stage.is_active(waiter));
}

#[test]
fn a_quarantine_of_one_half_stops_new_work_and_leaves_the_other_half_running() {
    let mut stage = Stage::draining(1, secs(10));
    let (stuck, fine) = (stage.ask(part(500)), stage.ask(part(400)));
    stage.release(stuck);
    stage.pass(secs(10));
    assert!(stage.is_active(fine));
    assert!(stage.try_ask(Request { queue: false, ..part(100) }).is_err());
}

#[test]
fn several_gpus_drain_one_by_one() {
    let mut stage = Stage::draining(2, mins(1));
    let both = stage.ask(gpus(2));
    let one = stage.ask(whole());
    stage.release(both);
    stage.idle(1);
    assert_eq!(stage.on(one), [1], "device 1 is free as soon as it is empty");
    assert_eq!(stage.on(both), [0]);
    stage.idle(0);
    assert!(!stage.lease(both).draining);
}

#[test]
fn host_resources_are_free_when_the_last_device_is() {
    let mut stage = Stage::draining(2, mins(1));
    let both = stage.ask(Request { cpus: cpus(64), ..gpus(2) });
    let waiter = stage.ask(host(cpus(64)));
    stage.release(both);
    stage.idle(0);
    assert!(stage.is_queued(waiter));
    stage.idle(1);
    assert!(stage.is_active(waiter));
}

#[test]
fn an_offer_has_no_processes_and_does_not_drain() {
    let mut stage = Stage::draining(1, secs(10));
    let offered = stage.ask(Request { hedged: true, ..whole() });
    stage.pass(secs(5));
    assert!(!stage.lease(offered).draining && stage.device(0).leases.is_empty());
}

#[test]
fn draining_a_device_stops_new_work_and_revokes_what_runs_there() {
    let mut stage = Stage::of(2);
    let keeps = Request { ttl: mins(60), strategy: Some(PlacementStrategy::FirstFit), ..whole() };
    let (here, there) = (stage.ask(keeps.clone()), stage.ask(keeps));
    stage.run(PoolCommand::Drain { device: DeviceId(0), grace: mins(5) });
    assert_eq!(stage.device(0).closed, Some(DeviceClosure::Cordoned));
    assert_eq!(stage.lease(here).revoke_at, Some(stage.now.after(mins(5))));
    stage.pass(mins(5));
    assert_eq!(stage.state(here), LeaseState::Revoked);
    assert!(stage.is_active(there));
    let next = stage.try_ask(Request { queue: false, ..whole() });
    assert!(next.is_err(), "device 0 is empty and takes no new work");
}

#[test]
fn what_drains_does_not_count_as_held() {
    let quota = gpupool_core::OwnerQuota { held: Some(Share::WHOLE), ..Default::default() };
    let rules = gpupool_core::Policies { default_quota: quota, ..policies([]) };
    let mut stage = Stage::draining(2, mins(1));
    stage.run(PoolCommand::SetPolicies { policies: Box::new(rules) });
    let first = stage.ask(whole());
    stage.release(first);
    let second = stage.ask(whole());
    assert!(stage.is_active(second), "its owner holds nothing any more");
}

#[test]
fn a_second_word_that_it_is_drained_is_harmless() {
    let (mut stage, ended, waiter) = ended_with_a_waiter();
    stage.run(PoolCommand::Drained { lease: ended });
    stage.run(PoolCommand::Drained { lease: ended });
    stage.run(PoolCommand::Drained { lease: waiter });
    assert!(stage.is_active(waiter), "an active lease does not drain");
    stage.pass(Millis(1));
}
