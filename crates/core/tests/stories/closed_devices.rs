//! Devices that take no new work: too hot, unhealthy, lost, stopped, or on a node that is gone. What runs goes on.

use crate::support::*;
use gpupool_core::{
    CommandDenied, CordonState, DeviceClosure, DeviceHealth, DeviceId, NodeId, PoolCommand, PoolEffect, ReadingField,
    Request,
};

const DEVICE: DeviceId = DeviceId(0);

/// Nothing new fits while `close` holds, and the waiter goes once `open` is done.
fn closes_and_opens(close: impl FnOnce(&mut Stage), why: DeviceClosure, open: impl FnOnce(&mut Stage)) {
    let mut stage = Stage::of(1);
    let runs = stage.ask(part(100));
    close(&mut stage);
    assert_eq!(stage.device(0).closed, Some(why));
    assert!(stage.effects.contains(&PoolEffect::DeviceOpen { device: DEVICE, closed: Some(why) }));
    assert!(stage.is_active(runs), "what runs goes on");
    let waits = stage.ask(part(100));
    assert!(stage.is_queued(waits), "{why:?}");
    open(&mut stage);
    assert!(stage.effects.contains(&PoolEffect::DeviceOpen { device: DEVICE, closed: None }));
    assert!(stage.is_active(waits));
}

fn health(health: DeviceHealth) -> impl FnOnce(&mut Stage) {
    move |stage| drop(stage.run(PoolCommand::SetHealth { device: DEVICE, health }))
}

fn cordon(cordon: CordonState) -> impl FnOnce(&mut Stage) {
    move |stage| drop(stage.run(PoolCommand::Cordon { device: DEVICE, cordon }))
}

fn warm(celsius: i16) -> impl FnOnce(&mut Stage) {
    move |stage| stage.read(0, |reading| reading.temperature_c = ReadingField::Value(celsius))
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
fn a_cordoned_device_takes_no_new_work() {
    closes_and_opens(cordon(CordonState::Cordoned), DeviceClosure::Cordoned, cordon(CordonState::Open));
}

#[test]
fn above_ninety_degrees_is_too_hot_and_ninety_is_fine() {
    closes_and_opens(warm(91), DeviceClosure::Hot, warm(90));
    let mut stage = Stage::of(1);
    warm(90)(&mut stage);
    let lease = stage.ask(whole());
    assert!(stage.is_active(lease));
}

#[test]
fn a_device_that_fails_to_tell_its_temperature_stays_as_it_was() {
    let mut stage = Stage::of(1);
    warm(95)(&mut stage);
    stage.read(0, |reading| reading.temperature_c = ReadingField::Failed);
    assert_eq!(stage.device(0).closed, Some(DeviceClosure::Hot));
    stage.read(0, |reading| reading.temperature_c = ReadingField::Unsupported);
    assert_eq!(stage.device(0).closed, None);
}

#[test]
fn a_lost_node_takes_no_new_work_until_it_is_seen_again() {
    closes_and_opens(
        |stage| drop(stage.run(PoolCommand::NodeLost { node: NodeId(0) })),
        DeviceClosure::NodeLost,
        |stage| drop(stage.see(node("a"), devices("a", 1))),
    );
}

#[test]
fn a_lost_node_gives_no_cpus_either() {
    let mut stage = Stage::of(1);
    stage.run(PoolCommand::NodeLost { node: NodeId(0) });
    let lease = stage.ask(host(cpus(1)));
    assert!(stage.is_queued(lease));
    stage.see(node("a"), devices("a", 1));
    assert!(stage.is_active(lease));
}

#[test]
fn one_closed_device_leaves_the_others_open() {
    let mut stage = Stage::of(3);
    health(DeviceHealth::Lost)(&mut stage);
    stage.run(PoolCommand::Cordon { device: DeviceId(1), cordon: CordonState::Cordoned });
    assert_eq!(stage.place(whole()), [2]);
    let lease = stage.ask(whole());
    assert!(stage.why(lease).contains("2 matching GPUs take no new work"), "{}", stage.why(lease));
}

#[test]
fn several_reasons_must_all_be_gone() {
    let mut stage = Stage::of(1);
    cordon(CordonState::Cordoned)(&mut stage);
    warm(95)(&mut stage);
    cordon(CordonState::Open)(&mut stage);
    assert_eq!(stage.device(0).closed, Some(DeviceClosure::Hot));
    warm(60)(&mut stage);
    assert_eq!(stage.device(0).closed, None);
}

#[test]
fn closed_devices_are_waited_for_not_refused() {
    let mut stage = Stage::of(2);
    health(DeviceHealth::Lost)(&mut stage);
    let lease = stage.ask(gpus(2));
    assert!(stage.is_queued(lease), "it may come back");
    assert_eq!(stage.refused(Request { queue: false, ..whole() }), CommandDenied::NoCapacity);
}

#[test]
fn orders_about_what_does_not_exist_are_denied() {
    let mut stage = Stage::of(1);
    let (device, node) = (DeviceId(9), NodeId(9));
    let open = PoolCommand::Cordon { device, cordon: CordonState::Open };
    assert_eq!(stage.apply(open), Err(CommandDenied::UnknownDevice(device)));
    let lost = PoolCommand::SetHealth { device, health: DeviceHealth::Lost };
    assert_eq!(stage.apply(lost), Err(CommandDenied::UnknownDevice(device)));
    assert_eq!(stage.apply(PoolCommand::Drain { device, grace: secs(1) }), Err(CommandDenied::UnknownDevice(device)));
    assert_eq!(stage.apply(PoolCommand::NodeLost { node }), Err(CommandDenied::UnknownNode(node)));
    assert_eq!(stage.apply(PoolCommand::Links { node, links: vec![] }), Err(CommandDenied::UnknownNode(node)));
}
