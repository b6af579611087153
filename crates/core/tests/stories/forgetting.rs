//! Devices and nodes that are gone for good are forgotten, once nothing is held there. A device that comes back is new.

use crate::support::*;
use gpupool_core::{
    CommandDenied, CommandReply, DeviceClosure, DeviceHealth, DeviceId, DeviceIdentity, DeviceLink, DeviceReading,
    GpuId, InUseReason, LinkKind, NodeId, PlacementStrategy, PoolCommand, PoolRow, Request,
};

const DEVICE: DeviceId = DeviceId(0);
const NODE: NodeId = NodeId(0);

fn lose(stage: &mut Stage, device: u32) {
    stage.run(PoolCommand::SetHealth { device: DeviceId(device), health: DeviceHealth::Lost });
}

fn forget(stage: &mut Stage, device: u32) -> Result<CommandReply, CommandDenied> {
    stage.apply(PoolCommand::ForgetDevice { device: DeviceId(device) })
}

fn kept(why: InUseReason) -> Result<CommandReply, CommandDenied> {
    Err(CommandDenied::DeviceInUse { device: DEVICE, why })
}

#[test]
fn a_device_is_forgotten_once_it_is_gone_and_holds_nothing() {
    let mut stage = Stage::draining(1, secs(10));
    assert_eq!(forget(&mut stage, 0), kept(InUseReason::Present));
    let lease = stage.ask(whole());
    lose(&mut stage, 0);
    assert_eq!(forget(&mut stage, 0), kept(InUseReason::Held(lease)));
    stage.release(lease);
    assert_eq!(forget(&mut stage, 0), kept(InUseReason::Draining(lease)));
    stage.pass(secs(10));
    assert_eq!(forget(&mut stage, 0), kept(InUseReason::Quarantined(lease)));
    stage.run(PoolCommand::Drained { lease });
    assert_eq!(forget(&mut stage, 0), Ok(CommandReply::Done));
    assert!(stage.rows.contains(&PoolRow::ForgetDevice(DEVICE)));
    assert_eq!(forget(&mut stage, 0), Err(CommandDenied::UnknownDevice(DEVICE)));
    let late = PoolCommand::Observe { device: DEVICE, reading: DeviceReading::idle(stage.now) };
    assert_eq!(stage.apply(late), Err(CommandDenied::UnknownDevice(DEVICE)));
    assert_eq!((stage.pool.devices().count(), stage.pool.node(NODE).unwrap().devices.len()), (0, 0));
    assert!(matches!(stage.refused(whole()), CommandDenied::Unsatisfiable(_)));
}

#[test]
fn the_denial_says_what_stands_in_the_way() {
    let mut stage = Stage::of(1);
    let lease = stage.ask(whole());
    let denied = |stage: &mut Stage| forget(stage, 0).unwrap_err().to_string();
    assert_eq!(denied(&mut stage), "device 0 cannot be forgotten: lease 0 holds it; release or revoke the lease first");
    stage.release(lease);
    assert_eq!(
        denied(&mut stage),
        "device 0 cannot be forgotten: it is present and would be registered again; forget it once it is lost or \
         its node is down"
    );
}

#[test]
fn a_device_that_comes_back_is_new_and_takes_the_free_numbers() {
    let mut stage = Stage::of(3);
    stage.run(PoolCommand::Cordon { device: DeviceId(2), cordon: gpupool_core::CordonState::Cordoned });
    for device in [1, 2] {
        lose(&mut stage, device);
        forget(&mut stage, device).unwrap();
    }
    let again = vec![devices("a", 3).remove(2)];
    let (_, ids) = stage.see(node("a"), again);
    assert_eq!((ids, stage.device(1).gpu_id), (vec![DeviceId(1)], GpuId(1)), "nothing refers to the numbers any more");
    assert_eq!(stage.device(1).closed, None, "the cordon was of the device that was forgotten");
    assert_eq!(stage.pool.device(DeviceId(2)).map(|view| view.device), None);
}

#[test]
fn a_device_that_was_not_seen_since_a_restart_can_be_forgotten() {
    let mut stage = Stage::of(2);
    stage.restart();
    stage.see(node("a"), devices("a", 1));
    assert_eq!(stage.device(1).closed, Some(DeviceClosure::NotSeen));
    assert_eq!(forget(&mut stage, 1), Ok(CommandReply::Done));
}

#[test]
fn a_node_is_forgotten_with_its_devices_once_it_is_down() {
    let mut stage = Stage::of(2);
    stage.add(node("b"), devices("b", 1));
    let forget = |stage: &mut Stage| stage.apply(PoolCommand::ForgetNode { node: NODE });
    assert_eq!(forget(&mut stage), Err(CommandDenied::NodeInUse { node: NODE, why: InUseReason::Present }));
    let lease = stage.ask(Request { strategy: Some(PlacementStrategy::FirstFit), ..host(cpus(1)) });
    stage.run(PoolCommand::NodeLost { node: NODE });
    assert_eq!(forget(&mut stage), Err(CommandDenied::NodeInUse { node: NODE, why: InUseReason::Held(lease) }));
    stage.release(lease);
    assert_eq!(forget(&mut stage), Ok(CommandReply::Done));
    let forgotten = [PoolRow::ForgetDevice(DeviceId(0)), PoolRow::ForgetDevice(DeviceId(1)), PoolRow::ForgetNode(NODE)];
    assert!(stage.rows.ends_with(&forgotten), "{:?}", stage.rows);
    assert_eq!(stage.pool.nodes().map(|view| view.node).collect::<Vec<_>>(), [NodeId(1)]);
    assert_eq!(stage.pool.node_by_name("a"), None);
    assert_eq!(forget(&mut stage), Err(CommandDenied::UnknownNode(NODE)));
    assert_eq!(stage.place(whole()), [2]);
    assert_eq!(stage.add(node("a"), devices("a", 1)), NODE, "its number is free");
    assert_eq!(stage.place(whole()), [0]);
}

#[test]
fn gaps_are_restored_in_silence_and_filled_the_same_way() {
    let mut stage = Stage::of(2);
    stage.add(node("b"), devices("b", 2));
    stage.add(node("c"), devices("c", 1));
    stage.run(PoolCommand::NodeLost { node: NodeId(1) });
    stage.run(PoolCommand::ForgetNode { node: NodeId(1) });
    lose(&mut stage, 0);
    forget(&mut stage, 0).unwrap();
    let held = stage.ask(by(PlacementStrategy::WorstFit, whole()));
    assert_eq!(stage.restart(), []);
    assert_eq!(stage.pool.devices().map(|view| view.device.0).collect::<Vec<_>>(), [1, 4]);
    assert_eq!(stage.on(held), [1]);
    assert_eq!(stage.add(node("d"), devices("d", 2)), NodeId(1));
    assert_eq!(stage.pool.devices().map(|view| view.device.0).collect::<Vec<_>>(), [0, 1, 2, 4]);
}

#[test]
fn a_lease_on_a_device_without_a_row_is_complained_of() {
    let mut stage = Stage::of(2);
    let held: Vec<_> = (0..2).map(|_| stage.ask(whole())).collect();
    stage.rows.push(PoolRow::ForgetDevice(DEVICE));
    let bad: Vec<String> = stage.restart().iter().map(ToString::to_string).collect();
    assert_eq!(bad, ["lease row 0: a device is unknown"]);
    assert!(stage.pool.lease(held[0]).is_none() && stage.is_active(held[1]));
}

#[test]
fn links_of_a_forgotten_device_are_not_those_of_its_successor() {
    let mut stage = Stage::of(3);
    let link = |a, b| DeviceLink { a: GpuId(a), b: GpuId(b), kind: LinkKind::NvLink(4) };
    stage.run(PoolCommand::Links { node: NODE, links: vec![link(0, 2), link(0, 1)] });
    lose(&mut stage, 2);
    forget(&mut stage, 2).unwrap();
    stage.add(node("a"), vec![device("GPU-new", "NVIDIA H100 80GB HBM3", 80)]);
    assert_eq!(stage.device(2).gpu_id, GpuId(2));
    assert_eq!(stage.place(gpus(2)), [0, 1]);
}

#[test]
fn waiters_that_could_use_only_what_is_forgotten_claim_nothing_more() {
    let mut stage = Stage::empty();
    stage.add(node("a"), vec![device("GPU-a", "NVIDIA A100", 40), device("GPU-h", "NVIDIA H100", 80)]);
    let half = stage.ask(Request { select: model("A100"), ..part(500) });
    let two = stage.ask(gpus(2));
    let behind = stage.ask(Request { select: model("A100"), ..part(500) });
    assert!(stage.is_active(half) && stage.is_queued(two) && stage.is_queued(behind));
    lose(&mut stage, 1);
    forget(&mut stage, 1).unwrap();
    assert!(stage.is_queued(two), "it may be had again when another device comes");
    assert!(stage.is_active(behind));
}

#[test]
fn devices_are_found_by_what_they_are_called() {
    let mut stage = Stage::of(2);
    let identity = DeviceIdentity::Uuid("GPU-a-1".into());
    assert_eq!(stage.pool.node_by_name("a"), Some(NODE));
    assert_eq!(stage.pool.device_by_identity(NODE, &identity), Some(DeviceId(1)));
    assert_eq!(stage.pool.device_with_gpu_id(NODE, GpuId(1)), Some(DeviceId(1)));
    lose(&mut stage, 1);
    forget(&mut stage, 1).unwrap();
    assert_eq!(stage.pool.device_by_identity(NODE, &identity), None);
    assert_eq!(stage.pool.device_with_gpu_id(NODE, GpuId(1)), None);
}

#[test]
fn devices_that_changed_are_told_once() {
    let mut stage = Stage::of(3);
    assert_eq!(stage.pool.take_touched_devices(), [0, 1, 2].map(DeviceId));
    assert_eq!(stage.pool.take_touched_devices(), []);
    stage.idle(1);
    stage.idle(1);
    let lease = stage.ask(by(PlacementStrategy::FirstFit, whole()));
    stage.release(lease);
    assert_eq!(stage.pool.take_touched_devices(), [1, 0].map(DeviceId));
    stage.run(PoolCommand::NodeSeen { facts: node("a"), devices: devices("a", 3), numbers: vec![] });
    assert_eq!(stage.pool.take_touched_devices(), [], "a report of what is known changes nothing");
    lose(&mut stage, 2);
    forget(&mut stage, 2).unwrap();
    assert_eq!(stage.pool.take_touched_devices(), [DeviceId(2)]);
}
