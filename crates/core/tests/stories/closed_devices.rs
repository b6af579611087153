//! Devices that take no new work: hot, unhealthy, lost, cordoned, or on a lost node. Running work continues.

use crate::support::*;
use gpupool_core::{
    CommandDenied, CordonState, DeviceClosure, DeviceHealth, DeviceId, GpuId, NodeId, PoolCommand, PoolEffect,
    ReadingField, Request,
};

const DEVICE: DeviceId = DeviceId(0);

/// Checks that a waiter is not served after `close` and is served after `open`.
fn closes_and_opens(close: impl FnOnce(&mut PoolFixture), why: DeviceClosure, open: impl FnOnce(&mut PoolFixture)) {
    let mut test = PoolFixture::of(1);
    let runs = test.request(part(100));
    close(&mut test);
    assert_eq!(test.device(0).closed, Some(why));
    assert!(test.effects.contains(&PoolEffect::DeviceOpen { device: DEVICE, closed: Some(why) }));
    assert!(test.is_active(runs), "what runs goes on");
    let waits = test.request(part(100));
    assert!(test.is_queued(waits), "{why:?}");
    open(&mut test);
    assert!(test.effects.contains(&PoolEffect::DeviceOpen { device: DEVICE, closed: None }));
    assert!(test.is_active(waits));
}

fn health(health: DeviceHealth) -> impl FnOnce(&mut PoolFixture) {
    move |test| drop(test.apply_ok(PoolCommand::SetHealth { device: DEVICE, health }))
}

fn cordon(cordon: CordonState) -> impl FnOnce(&mut PoolFixture) {
    move |test| drop(test.apply_ok(PoolCommand::Cordon { device: DEVICE, cordon }))
}

fn warm(celsius: i16) -> impl FnOnce(&mut PoolFixture) {
    move |test| test.report(0, |reading| reading.temperature_c = ReadingField::Value(celsius))
}

#[test]
fn an_unhealthy_device_takes_no_new_work() {
    let bad = DeviceHealth::Unhealthy("double bit ECC error".into());
    closes_and_opens(health(bad), DeviceClosure::Unhealthy, health(DeviceHealth::Healthy));
}

#[test]
fn a_lost_device_takes_no_new_work_until_it_is_back() {
    closes_and_opens(health(DeviceHealth::Lost), DeviceClosure::Lost, health(DeviceHealth::Healthy));
}

#[test]
fn a_device_that_another_agent_leases_takes_no_new_work() {
    let claimed = DeviceHealth::ClaimedElsewhere("the agent of uid 1 (pid 2)".into());
    closes_and_opens(health(claimed), DeviceClosure::ClaimedElsewhere, health(DeviceHealth::Healthy));
}

#[test]
fn a_new_device_that_is_seen_closed_is_never_granted_in_between() {
    let mut test = PoolFixture::of(1);
    let first = test.request(whole());
    let waits = test.request(whole());
    assert!(test.is_active(first) && test.is_queued(waits));
    let claimed = DeviceHealth::ClaimedElsewhere("the agent of uid 1 (pid 2)".into());
    let facts = Box::new(device("another", "H100", 80));
    let seen = PoolCommand::DeviceSeen { node: NodeId(0), facts, number: GpuId(1), health: claimed };
    test.apply_ok(seen);
    assert!(test.is_queued(waits));
    assert_eq!(test.device(1).closed, Some(DeviceClosure::ClaimedElsewhere));
    test.apply_ok(PoolCommand::SetHealth { device: DeviceId(1), health: DeviceHealth::Healthy });
    assert!(test.is_active(waits));
}

#[test]
fn a_cordoned_device_takes_no_new_work() {
    closes_and_opens(cordon(CordonState::Cordoned), DeviceClosure::Cordoned, cordon(CordonState::Open));
}

#[test]
fn above_ninety_degrees_is_too_hot_and_ninety_is_fine() {
    closes_and_opens(warm(91), DeviceClosure::Hot, warm(90));
    let mut test = PoolFixture::of(1);
    warm(90)(&mut test);
    let lease = test.request(whole());
    assert!(test.is_active(lease));
}

#[test]
fn a_failed_temperature_reading_keeps_the_last_state() {
    let mut test = PoolFixture::of(1);
    warm(95)(&mut test);
    test.report(0, |reading| reading.temperature_c = ReadingField::Failed);
    assert_eq!(test.device(0).closed, Some(DeviceClosure::Hot));
    test.report(0, |reading| reading.temperature_c = ReadingField::Unsupported);
    assert_eq!(test.device(0).closed, None);
}

#[test]
fn a_lost_node_takes_no_new_work_until_it_is_seen_again() {
    closes_and_opens(
        |test| drop(test.apply_ok(PoolCommand::NodeLost { node: NodeId(0) })),
        DeviceClosure::NodeLost,
        |test| drop(test.register_node(node("a"), devices("a", 1))),
    );
}

#[test]
fn a_lost_node_gives_no_cpus_either() {
    let mut test = PoolFixture::of(1);
    test.apply_ok(PoolCommand::NodeLost { node: NodeId(0) });
    let lease = test.request(host(cpus(1)));
    assert!(test.is_queued(lease));
    test.register_node(node("a"), devices("a", 1));
    assert!(test.is_active(lease));
}

#[test]
fn one_closed_device_leaves_the_others_open() {
    let mut test = PoolFixture::of(3);
    health(DeviceHealth::Lost)(&mut test);
    test.apply_ok(PoolCommand::Cordon { device: DeviceId(1), cordon: CordonState::Cordoned });
    assert_eq!(test.place(whole()), [2]);
    let lease = test.request(whole());
    assert!(test.wait_reason(lease).contains("2 matching GPUs take no new work"), "{}", test.wait_reason(lease));
}

#[test]
fn a_device_opens_once_all_reasons_are_gone() {
    let mut test = PoolFixture::of(1);
    cordon(CordonState::Cordoned)(&mut test);
    warm(95)(&mut test);
    cordon(CordonState::Open)(&mut test);
    assert_eq!(test.device(0).closed, Some(DeviceClosure::Hot));
    warm(60)(&mut test);
    assert_eq!(test.device(0).closed, None);
}

#[test]
fn a_request_for_closed_devices_waits() {
    let mut test = PoolFixture::of(2);
    health(DeviceHealth::Lost)(&mut test);
    let lease = test.request(gpus(2));
    assert!(test.is_queued(lease), "it may come back");
    assert_eq!(test.expect_denied(Request { queue: false, ..whole() }), CommandDenied::NoCapacity);
}

#[test]
fn commands_about_unknown_devices_and_nodes_are_denied() {
    let mut test = PoolFixture::of(1);
    let (device, node) = (DeviceId(9), NodeId(9));
    let open = PoolCommand::Cordon { device, cordon: CordonState::Open };
    assert_eq!(test.apply(open), Err(CommandDenied::UnknownDevice(device)));
    let lost = PoolCommand::SetHealth { device, health: DeviceHealth::Lost };
    assert_eq!(test.apply(lost), Err(CommandDenied::UnknownDevice(device)));
    assert_eq!(test.apply(PoolCommand::Drain { device, grace: secs(1) }), Err(CommandDenied::UnknownDevice(device)));
    assert_eq!(test.apply(PoolCommand::NodeLost { node }), Err(CommandDenied::UnknownNode(node)));
    assert_eq!(test.apply(PoolCommand::Links { node, links: vec![] }), Err(CommandDenied::UnknownNode(node)));
}
