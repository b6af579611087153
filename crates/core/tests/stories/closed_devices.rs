//! Devices that take no new work: too hot, unhealthy, lost, stopped, or on a node that is gone. What runs goes on.

use crate::support::*;
use gpupool_core::{Closed, Command, Cordon, Denied, DeviceId, Effect, Field, Health, NodeId, Request};

const DEVICE: DeviceId = DeviceId(0);

/// Nothing new fits while `close` holds, and the waiter goes once `open` is done.
fn closes_and_opens(close: impl FnOnce(&mut Stage), why: Closed, open: impl FnOnce(&mut Stage)) {
    let mut stage = Stage::of(1);
    let runs = stage.ask(part(100));
    close(&mut stage);
    assert_eq!(stage.device(0).closed, Some(why));
    assert!(stage.effects.contains(&Effect::DeviceOpen { device: DEVICE, closed: Some(why) }));
    assert!(stage.is_active(runs), "what runs goes on");
    let waits = stage.ask(part(100));
    assert!(stage.is_queued(waits), "{why:?}");
    open(&mut stage);
    assert!(stage.effects.contains(&Effect::DeviceOpen { device: DEVICE, closed: None }));
    assert!(stage.is_active(waits));
}

fn health(health: Health) -> impl FnOnce(&mut Stage) {
    move |stage| drop(stage.run(Command::SetHealth { device: DEVICE, health }))
}

fn cordon(cordon: Cordon) -> impl FnOnce(&mut Stage) {
    move |stage| drop(stage.run(Command::Cordon { device: DEVICE, cordon }))
}

fn warm(celsius: i16) -> impl FnOnce(&mut Stage) {
    move |stage| stage.read(0, |reading| reading.temperature_c = Field::Value(celsius))
}

#[test]
fn an_unhealthy_device_takes_no_new_work() {
    let bad = Health::Unhealthy("double bit ECC error".into());
    closes_and_opens(health(bad), Closed::Unhealthy, health(Health::Healthy));
}

#[test]
fn a_lost_device_takes_no_new_work_until_it_is_back() {
    closes_and_opens(health(Health::Lost), Closed::Lost, health(Health::Healthy));
}

#[test]
fn a_cordoned_device_takes_no_new_work() {
    closes_and_opens(cordon(Cordon::Cordoned), Closed::Cordoned, cordon(Cordon::Open));
}

#[test]
fn above_ninety_degrees_is_too_hot_and_ninety_is_fine() {
    closes_and_opens(warm(91), Closed::Hot, warm(90));
    let mut stage = Stage::of(1);
    warm(90)(&mut stage);
    let lease = stage.ask(whole());
    assert!(stage.is_active(lease));
}

#[test]
fn a_device_that_fails_to_tell_its_temperature_stays_as_it_was() {
    let mut stage = Stage::of(1);
    warm(95)(&mut stage);
    stage.read(0, |reading| reading.temperature_c = Field::Failed);
    assert_eq!(stage.device(0).closed, Some(Closed::Hot));
    stage.read(0, |reading| reading.temperature_c = Field::Unsupported);
    assert_eq!(stage.device(0).closed, None);
}

#[test]
fn a_lost_node_takes_no_new_work_until_it_is_seen_again() {
    closes_and_opens(
        |stage| drop(stage.run(Command::NodeLost { node: NodeId(0) })),
        Closed::NodeLost,
        |stage| drop(stage.see(node("a"), devices("a", 1))),
    );
}

#[test]
fn a_lost_node_gives_no_cpus_either() {
    let mut stage = Stage::of(1);
    stage.run(Command::NodeLost { node: NodeId(0) });
    let lease = stage.ask(host(cpus(1)));
    assert!(stage.is_queued(lease));
    stage.see(node("a"), devices("a", 1));
    assert!(stage.is_active(lease));
}

#[test]
fn one_closed_device_leaves_the_others_open() {
    let mut stage = Stage::of(3);
    health(Health::Lost)(&mut stage);
    stage.run(Command::Cordon { device: DeviceId(1), cordon: Cordon::Cordoned });
    assert_eq!(stage.place(whole()), [2]);
    let lease = stage.ask(whole());
    assert!(stage.why(lease).contains("2 matching GPUs take no new work"), "{}", stage.why(lease));
}

#[test]
fn several_reasons_must_all_be_gone() {
    let mut stage = Stage::of(1);
    cordon(Cordon::Cordoned)(&mut stage);
    warm(95)(&mut stage);
    cordon(Cordon::Open)(&mut stage);
    assert_eq!(stage.device(0).closed, Some(Closed::Hot));
    warm(60)(&mut stage);
    assert_eq!(stage.device(0).closed, None);
}

#[test]
fn closed_devices_are_waited_for_not_refused() {
    let mut stage = Stage::of(2);
    health(Health::Lost)(&mut stage);
    let lease = stage.ask(gpus(2));
    assert!(stage.is_queued(lease), "it may come back");
    assert_eq!(stage.refused(Request { queue: false, ..whole() }), Denied::NoCapacity);
}

#[test]
fn orders_about_what_does_not_exist_are_denied() {
    let mut stage = Stage::of(1);
    let (device, node) = (DeviceId(9), NodeId(9));
    let open = Command::Cordon { device, cordon: Cordon::Open };
    assert_eq!(stage.apply(open), Err(Denied::UnknownDevice(device)));
    let lost = Command::SetHealth { device, health: Health::Lost };
    assert_eq!(stage.apply(lost), Err(Denied::UnknownDevice(device)));
    assert_eq!(stage.apply(Command::Drain { device, grace: secs(1) }), Err(Denied::UnknownDevice(device)));
    assert_eq!(stage.apply(Command::NodeLost { node }), Err(Denied::UnknownNode(node)));
    assert_eq!(stage.apply(Command::Links { node, links: vec![] }), Err(Denied::UnknownNode(node)));
}
