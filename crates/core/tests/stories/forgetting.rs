//! Devices and nodes that are gone can be forgotten once they hold nothing. A device that returns is new.

use crate::support::*;
use gpupool_core::{
    CommandDenied, CommandReply, DeviceClosure, DeviceHealth, DeviceId, DeviceIdentity, DeviceLink, DeviceReading,
    GpuId, InUseReason, LinkKind, NodeId, PlacementStrategy, PoolCommand, PoolRow, Request,
};

const DEVICE: DeviceId = DeviceId(0);
const NODE: NodeId = NodeId(0);

fn lose(test: &mut PoolFixture, device: u32) {
    test.apply_ok(PoolCommand::SetHealth { device: DeviceId(device), health: DeviceHealth::Lost });
}

fn forget(test: &mut PoolFixture, device: u32) -> Result<CommandReply, CommandDenied> {
    test.apply(PoolCommand::ForgetDevice { device: DeviceId(device) })
}

fn kept(why: InUseReason) -> Result<CommandReply, CommandDenied> {
    Err(CommandDenied::DeviceInUse { device: DEVICE, why })
}

#[test]
fn a_device_can_be_forgotten_once_it_is_gone_and_holds_nothing() {
    let mut test = PoolFixture::draining(1, secs(10));
    assert_eq!(forget(&mut test, 0), kept(InUseReason::Present));
    let lease = test.request(whole());
    lose(&mut test, 0);
    assert_eq!(forget(&mut test, 0), kept(InUseReason::Held(lease)));
    test.release(lease);
    assert_eq!(forget(&mut test, 0), kept(InUseReason::Draining(lease)));
    test.advance(secs(10));
    assert_eq!(forget(&mut test, 0), kept(InUseReason::Quarantined(lease)));
    test.apply_ok(PoolCommand::Drained { lease });
    assert_eq!(forget(&mut test, 0), Ok(CommandReply::Done));
    assert!(test.rows.contains(&PoolRow::ForgetDevice(DEVICE)));
    assert_eq!(forget(&mut test, 0), Err(CommandDenied::UnknownDevice(DEVICE)));
    let late = PoolCommand::Observe { device: DEVICE, reading: DeviceReading::idle(test.now) };
    assert_eq!(test.apply(late), Err(CommandDenied::UnknownDevice(DEVICE)));
    assert_eq!((test.pool.devices().count(), test.pool.node(NODE).unwrap().devices.len()), (0, 0));
    assert!(matches!(test.expect_denied(whole()), CommandDenied::Unsatisfiable(_)));
}

#[test]
fn the_denial_names_the_obstacle() {
    let mut test = PoolFixture::of(1);
    let lease = test.request(whole());
    let denied = |test: &mut PoolFixture| forget(test, 0).unwrap_err().to_string();
    assert_eq!(denied(&mut test), "device 0 cannot be forgotten: lease 0 holds it; release or revoke the lease first");
    test.release(lease);
    assert_eq!(
        denied(&mut test),
        "device 0 cannot be forgotten: it is present and would be registered again; forget it once it is lost or \
         its node is down"
    );
}

#[test]
fn a_forgotten_device_that_returns_is_new_and_takes_free_numbers() {
    let mut test = PoolFixture::of(3);
    test.apply_ok(PoolCommand::Cordon { device: DeviceId(2), cordon: gpupool_core::CordonState::Cordoned });
    for device in [1, 2] {
        lose(&mut test, device);
        forget(&mut test, device).unwrap();
    }
    let again = vec![devices("a", 3).remove(2)];
    let (_, ids) = test.register_node(node("a"), again);
    assert_eq!((ids, test.device(1).gpu_id), (vec![DeviceId(1)], GpuId(1)), "nothing refers to the numbers any more");
    assert_eq!(test.device(1).closed, None, "the cordon was of the device that was forgotten");
    assert_eq!(test.pool.device(DeviceId(2)).map(|view| view.device), None);
}

#[test]
fn a_device_that_was_not_seen_since_a_restart_can_be_forgotten() {
    let mut test = PoolFixture::of(2);
    test.restart();
    test.register_node(node("a"), devices("a", 1));
    assert_eq!(test.device(1).closed, Some(DeviceClosure::NotSeen));
    assert_eq!(forget(&mut test, 1), Ok(CommandReply::Done));
}

#[test]
fn a_node_can_be_forgotten_with_its_devices_once_it_is_down() {
    let mut test = PoolFixture::of(2);
    test.add_node(node("b"), devices("b", 1));
    let forget = |test: &mut PoolFixture| test.apply(PoolCommand::ForgetNode { node: NODE });
    assert_eq!(forget(&mut test), Err(CommandDenied::NodeInUse { node: NODE, why: InUseReason::Present }));
    let lease = test.request(Request { strategy: Some(PlacementStrategy::FirstFit), ..host(cpus(1)) });
    test.apply_ok(PoolCommand::NodeLost { node: NODE });
    assert_eq!(forget(&mut test), Err(CommandDenied::NodeInUse { node: NODE, why: InUseReason::Held(lease) }));
    test.release(lease);
    assert_eq!(forget(&mut test), Ok(CommandReply::Done));
    let forgotten = [PoolRow::ForgetDevice(DeviceId(0)), PoolRow::ForgetDevice(DeviceId(1)), PoolRow::ForgetNode(NODE)];
    assert!(test.rows.ends_with(&forgotten), "{:?}", test.rows);
    assert_eq!(test.pool.nodes().map(|view| view.node).collect::<Vec<_>>(), [NodeId(1)]);
    assert_eq!(test.pool.node_by_name("a"), None);
    assert_eq!(forget(&mut test), Err(CommandDenied::UnknownNode(NODE)));
    assert_eq!(test.place(whole()), [2]);
    assert_eq!(test.add_node(node("a"), devices("a", 1)), NODE, "its number is free");
    assert_eq!(test.place(whole()), [0]);
}

#[test]
fn gaps_between_numbers_are_restored_and_filled_the_same_way() {
    let mut test = PoolFixture::of(2);
    test.add_node(node("b"), devices("b", 2));
    test.add_node(node("c"), devices("c", 1));
    test.apply_ok(PoolCommand::NodeLost { node: NodeId(1) });
    test.apply_ok(PoolCommand::ForgetNode { node: NodeId(1) });
    lose(&mut test, 0);
    forget(&mut test, 0).unwrap();
    let held = test.request(by(PlacementStrategy::WorstFit, whole()));
    assert_eq!(test.restart(), []);
    assert_eq!(test.pool.devices().map(|view| view.device.0).collect::<Vec<_>>(), [1, 4]);
    assert_eq!(test.devices_of(held), [1]);
    assert_eq!(test.add_node(node("d"), devices("d", 2)), NodeId(1));
    assert_eq!(test.pool.devices().map(|view| view.device.0).collect::<Vec<_>>(), [0, 1, 2, 4]);
}

#[test]
fn a_lease_on_a_device_without_a_row_is_reported() {
    let mut test = PoolFixture::of(2);
    let held: Vec<_> = (0..2).map(|_| test.request(whole())).collect();
    test.rows.push(PoolRow::ForgetDevice(DEVICE));
    let bad: Vec<String> = test.restart().iter().map(ToString::to_string).collect();
    assert_eq!(bad, ["lease row 0: a device is unknown"]);
    assert!(test.pool.lease(held[0]).is_none() && test.is_active(held[1]));
}

#[test]
fn links_of_a_forgotten_device_do_not_pass_to_its_successor() {
    let mut test = PoolFixture::of(3);
    let link = |a, b| DeviceLink { a: GpuId(a), b: GpuId(b), kind: LinkKind::NvLink(4) };
    test.apply_ok(PoolCommand::Links { node: NODE, links: vec![link(0, 2), link(0, 1)] });
    lose(&mut test, 2);
    forget(&mut test, 2).unwrap();
    test.add_node(node("a"), vec![device("GPU-new", "NVIDIA H100 80GB HBM3", 80)]);
    assert_eq!(test.device(2).gpu_id, GpuId(2));
    assert_eq!(test.place(gpus(2)), [0, 1]);
}

#[test]
fn waiters_for_a_forgotten_device_no_longer_claim_anything() {
    let mut test = PoolFixture::empty();
    test.add_node(node("a"), vec![device("GPU-a", "NVIDIA A100", 40), device("GPU-h", "NVIDIA H100", 80)]);
    let half = test.request(Request { select: model("A100"), ..part(500) });
    let two = test.request(gpus(2));
    let behind = test.request(Request { select: model("A100"), ..part(500) });
    assert!(test.is_active(half) && test.is_queued(two) && test.is_queued(behind));
    lose(&mut test, 1);
    forget(&mut test, 1).unwrap();
    assert!(test.is_queued(two), "it may be had again when another device comes");
    assert!(test.is_active(behind));
}

#[test]
fn devices_and_nodes_are_found_by_name_identity_and_number() {
    let mut test = PoolFixture::of(2);
    let identity = DeviceIdentity::Uuid("GPU-a-1".into());
    assert_eq!(test.pool.node_by_name("a"), Some(NODE));
    assert_eq!(test.pool.device_by_identity(NODE, &identity), Some(DeviceId(1)));
    assert_eq!(test.pool.device_with_gpu_id(NODE, GpuId(1)), Some(DeviceId(1)));
    lose(&mut test, 1);
    forget(&mut test, 1).unwrap();
    assert_eq!(test.pool.device_by_identity(NODE, &identity), None);
    assert_eq!(test.pool.device_with_gpu_id(NODE, GpuId(1)), None);
}

#[test]
fn changed_devices_are_listed_once() {
    let mut test = PoolFixture::of(3);
    assert_eq!(test.pool.take_touched_devices(), [0, 1, 2].map(DeviceId));
    assert_eq!(test.pool.take_touched_devices(), []);
    test.report_idle(1);
    test.report_idle(1);
    let lease = test.request(by(PlacementStrategy::FirstFit, whole()));
    test.release(lease);
    assert_eq!(test.pool.take_touched_devices(), [1, 0].map(DeviceId));
    test.apply_ok(PoolCommand::NodeSeen { facts: node("a"), devices: devices("a", 3), numbers: vec![] });
    assert_eq!(test.pool.take_touched_devices(), [], "a report of what is known changes nothing");
    lose(&mut test, 2);
    forget(&mut test, 2).unwrap();
    assert_eq!(test.pool.take_touched_devices(), [DeviceId(2)]);
}
