//! Draining after the end of a lease: its capacity is granted again once its processes are gone.

use crate::support::*;
use gpupool_core::{
    Bytes, DeviceClosure, DeviceId, DeviceReading, LeaseId, LeaseState, Millis, PlacementStrategy, PoolCommand,
    PoolEffect, ProcessAttribution, ProcessUsage, Request, Share,
};

/// Returns a pool with an ended lease and a waiter behind it.
fn ended_with_a_waiter() -> (PoolFixture, LeaseId, LeaseId) {
    let mut test = PoolFixture::draining(1, secs(10));
    let ended = test.request(whole());
    let waiter = test.request(whole());
    test.release(ended);
    (test, ended, waiter)
}

#[test]
fn capacity_drains_before_it_is_granted_again() {
    let (mut test, ended, waiter) = ended_with_a_waiter();
    assert!(test.effects.contains(&PoolEffect::Draining { lease: ended }));
    assert_eq!((test.state(ended), test.state(waiter)), (LeaseState::Released, LeaseState::Queued));
    assert_eq!((test.device(0).promised, test.device(0).leases), (Share::WHOLE, vec![ended]));
    test.apply_ok(PoolCommand::Drained { lease: ended });
    assert!(test.is_active(waiter));
    assert!(test.effects.contains(&PoolEffect::Freed { lease: ended }));
}

#[test]
fn a_complete_process_list_without_the_leases_processes_frees_it() {
    let (mut test, ended, waiter) = ended_with_a_waiter();
    test.report(0, |reading| reading.processes = Some(vec![process_of(ended, gib(1))]));
    assert!(test.is_queued(waiter), "one of its processes is still there");
    test.report(0, |reading| reading.processes = None);
    assert!(test.is_queued(waiter), "no list tells nothing");
    test.report(0, |reading| {
        reading.processes = Some(vec![ProcessUsage { attribution: ProcessAttribution::Unknown, memory: None }]);
    });
    assert!(test.is_queued(waiter), "an unattributed process may be its own");
    test.report(0, |reading| reading.processes = Some(vec![foreign_process(Bytes(1))]));
    assert!(test.is_active(waiter), "a foreign process is not its own");
}

#[test]
fn a_list_from_before_the_end_frees_nothing() {
    let mut test = PoolFixture::draining(1, secs(10));
    let ended = test.request(whole());
    test.release(ended);
    let at_the_end = DeviceReading::idle(test.now);
    test.apply_ok(PoolCommand::Observe { device: DeviceId(0), reading: at_the_end });
    assert!(test.lease(ended).draining);
    test.report_idle(0);
    assert!(!test.lease(ended).draining);
}

#[test]
fn a_list_attributed_before_the_end_frees_nothing() {
    let mut test = PoolFixture::draining(1, secs(10));
    let before_the_grant = test.now;
    test.advance(secs(1));
    let ended = test.request(whole());
    test.release(ended);
    let at_the_end = test.now;
    test.report(0, |reading| {
        reading.processes = Some(vec![foreign_process(Bytes(1))]);
        reading.leases_as_of = Some(before_the_grant);
    });
    assert!(test.lease(ended).draining, "the foreign process may be its own");
    test.report(0, |reading| reading.leases_as_of = Some(at_the_end));
    assert!(!test.lease(ended).draining);
}

#[test]
fn processes_that_stay_quarantine_the_device_until_they_are_gone() {
    let (mut test, ended, waiter) = ended_with_a_waiter();
    test.advance(secs(10));
    let device = DeviceId(0);
    assert!(test.effects.contains(&PoolEffect::Quarantined { device, lease: ended }));
    assert!(test.effects.contains(&PoolEffect::DeviceOpen { device, closed: Some(DeviceClosure::Quarantined) }));
    test.apply_ok(PoolCommand::Follow { lease: waiter });
    assert_eq!(test.device(0).closed, Some(DeviceClosure::Quarantined));
    test.apply_ok(PoolCommand::Drained { lease: ended });
    assert_eq!(test.device(0).closed, None);
    assert!(test.is_active(waiter));
}

#[test]
fn a_quarantine_of_one_half_stops_new_work_and_leaves_the_other_half_running() {
    let mut test = PoolFixture::draining(1, secs(10));
    let (stuck, fine) = (test.request(part(500)), test.request(part(400)));
    test.release(stuck);
    test.advance(secs(10));
    assert!(test.is_active(fine));
    assert!(test.try_request(Request { queue: false, ..part(100) }).is_err());
}

#[test]
fn several_gpus_drain_one_by_one() {
    let mut test = PoolFixture::draining(2, mins(1));
    let both = test.request(gpus(2));
    let one = test.request(whole());
    test.release(both);
    test.report_idle(1);
    assert_eq!(test.devices_of(one), [1], "device 1 is free as soon as it is empty");
    assert_eq!(test.devices_of(both), [0]);
    test.report_idle(0);
    assert!(!test.lease(both).draining);
}

#[test]
fn host_resources_are_free_when_the_last_device_is() {
    let mut test = PoolFixture::draining(2, mins(1));
    let both = test.request(Request { cpus: cpus(64), ..gpus(2) });
    let waiter = test.request(host(cpus(64)));
    test.release(both);
    test.report_idle(0);
    assert!(test.is_queued(waiter));
    test.report_idle(1);
    assert!(test.is_active(waiter));
}

#[test]
fn an_offer_has_no_processes_and_does_not_drain() {
    let mut test = PoolFixture::draining(1, secs(10));
    let offered = test.request(Request { hedged: true, ..whole() });
    test.advance(secs(5));
    assert!(!test.lease(offered).draining && test.device(0).leases.is_empty());
}

#[test]
fn draining_a_device_stops_new_work_and_revokes_its_leases() {
    let mut test = PoolFixture::of(2);
    let keeps = Request { ttl: mins(60), strategy: Some(PlacementStrategy::FirstFit), ..whole() };
    let (here, there) = (test.request(keeps.clone()), test.request(keeps));
    test.apply_ok(PoolCommand::Drain { device: DeviceId(0), grace: mins(5) });
    assert_eq!(test.device(0).closed, Some(DeviceClosure::Cordoned));
    assert_eq!(test.lease(here).revoke_at, Some(test.now.after(mins(5))));
    test.advance(mins(5));
    assert_eq!(test.state(here), LeaseState::Revoked);
    assert!(test.is_active(there));
    let next = test.try_request(Request { queue: false, ..whole() });
    assert!(next.is_err(), "device 0 is empty and takes no new work");
}

#[test]
fn draining_devices_do_not_count_as_held() {
    let quota = gpupool_core::OwnerQuota { held: Some(Share::WHOLE), ..Default::default() };
    let rules = gpupool_core::Policies { default_quota: quota, ..policies([]) };
    let mut test = PoolFixture::draining(2, mins(1));
    test.apply_ok(PoolCommand::SetPolicies { policies: Box::new(rules) });
    let first = test.request(whole());
    test.release(first);
    let second = test.request(whole());
    assert!(test.is_active(second), "its owner holds nothing any more");
}

#[test]
fn a_repeated_drained_report_is_harmless() {
    let (mut test, ended, waiter) = ended_with_a_waiter();
    test.apply_ok(PoolCommand::Drained { lease: ended });
    test.apply_ok(PoolCommand::Drained { lease: ended });
    test.apply_ok(PoolCommand::Drained { lease: waiter });
    assert!(test.is_active(waiter), "an active lease does not drain");
    test.advance(Millis(1));
}
