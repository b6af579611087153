//! Attaching leases, and the orders that end what runs under them.

use super::*;

fn process(pid: u32) -> LeaseHolder {
    LeaseHolder::Process { pid, started: 1 }
}

fn holder_gone(lease: &LeaseBody, holder: LeaseHolder) -> AuthorityMessage {
    AuthorityMessage::Report(NodeReport::HolderGone { lease: LeaseId(lease.id), holder })
}

#[test]
fn an_attachment_is_committed_or_refused_as_a_whole() {
    let mut stage = AuthorityStage::new();
    let lease = stage.take();
    let token = lease.token.unwrap();
    let (stale, mut refused) = attach(&lease, token + 1, process(7));
    let (good, mut committed) = attach(&lease, token, process(8));
    stage.receive(vec![stale, good]);
    assert!(matches!(refused.try_recv().unwrap(), Err(Refusal::Denied(_))));
    let Ok(Reply::Lease(attached)) = committed.try_recv().unwrap() else { panic!("it was refused") };
    assert_eq!((attached.expires_at, attached.holder.is_some()), (None, true), "a watch in place of the ttl");
    let (other, mut forbidden) = attach(&lease, token, process(9));
    let AuthorityMessage::Attach(attachment, _, reply) = other else { unreachable!() };
    stage.receive(vec![AuthorityMessage::Attach(attachment, user("bob"), reply)]);
    assert!(matches!(forbidden.try_recv().unwrap(), Err(Refusal::Forbidden(_))));
}

#[test]
fn a_holder_that_was_replaced_ends_nothing() {
    let mut stage = AuthorityStage::new();
    let lease = stage.take();
    let group = LeaseHolder::Cgroup("/jobs/1".into());
    for holder in [process(7), group.clone()] {
        let (message, _answer) = attach(&lease, lease.token.unwrap(), holder);
        stage.receive(vec![message]);
    }
    stage.receive(vec![holder_gone(&lease, process(7))]);
    assert_eq!(stage.state(lease.id), LeaseState::Active);
    stage.receive(vec![holder_gone(&lease, group)]);
    assert_eq!(stage.state(lease.id), LeaseState::Released);
}

#[test]
fn the_devices_of_a_lease_without_processes_are_free_in_the_batch_of_its_end() {
    let mut stage = AuthorityStage::new();
    let lease = stage.take();
    stage.release(&lease);
    assert_eq!(stage.node.take_orders(), []);
    stage.take();
}

#[test]
fn the_devices_of_a_lease_with_a_control_group_are_free_when_its_node_reports_it_drained() {
    let mut stage = AuthorityStage::new();
    let lease = stage.take();
    let (message, _answer) = attach(&lease, lease.token.unwrap(), LeaseHolder::Cgroup("/jobs/1".into()));
    stage.receive(vec![message]);
    stage.release(&lease);
    let id = LeaseId(lease.id);
    assert_eq!(stage.node.take_orders(), [NodeOrder::End { lease: id, taken_back: false, awaited: true }]);
    assert_eq!(stage.request("alice").state, LeaseState::Queued);
    stage.receive(vec![AuthorityMessage::Report(NodeReport::Drained { lease: id })]);
    assert_eq!(stage.state(lease.id + 1), LeaseState::Active);
}

#[test]
fn a_lease_that_is_attached_and_released_in_one_batch_is_ended_by_its_node() {
    let mut stage = AuthorityStage::new();
    let lease = stage.take();
    let (attach, _answer) = attach(&lease, lease.token.unwrap(), LeaseHolder::Cgroup("/jobs/1".into()));
    let (release, _released) = asked("alice", PoolCommand::Release { lease: LeaseId(lease.id) });
    stage.receive(vec![attach, release]);
    let end = NodeOrder::End { lease: LeaseId(lease.id), taken_back: false, awaited: true };
    assert_eq!(stage.node.take_orders(), [end]);
}

#[test]
fn orders_that_a_node_cannot_take_are_sent_later_and_in_order() {
    let mut stage = AuthorityStage::new();
    let lease = stage.take();
    let (message, _answer) = attach(&lease, lease.token.unwrap(), LeaseHolder::Cgroup("/jobs/1".into()));
    stage.receive(vec![message]);
    stage.node.set_busy(true);
    stage.release(&lease);
    assert_eq!(stage.node.take_orders(), []);
    assert!(stage.authority.time_until_due() <= crate::limits::ORDER_RETRY);
    stage.node.set_busy(false);
    stage.receive(Vec::new());
    let end = NodeOrder::End { lease: LeaseId(lease.id), taken_back: false, awaited: true };
    assert_eq!(stage.node.take_orders(), [end]);
}

#[test]
fn after_a_restart_the_node_is_fenced_and_ends_leases_before_devices_are_free() {
    let mut stage = AuthorityStage::new();
    let lease = stage.take();
    let (message, _answer) = attach(&lease, lease.token.unwrap(), process(7));
    stage.receive(vec![message]);
    let mut stage = stage.restarted();
    let fenced = crate::messages::FencedLease { lease: LeaseId(lease.id), holder: Some(process(7)) };
    assert_eq!(stage.node.take_orders(), [NodeOrder::Fence { leases: vec![fenced] }]);
    stage.receive(vec![holder_gone(&lease, process(7))]);
    let end = NodeOrder::End { lease: LeaseId(lease.id), taken_back: false, awaited: true };
    assert_eq!(stage.node.take_orders(), [end]);
    let known = stage.authority.pool().lease(LeaseId(lease.id)).unwrap();
    assert!(known.draining, "what ran before the restart is not known, so the node is asked");
}

#[test]
fn after_a_restart_a_connection_has_a_grace_to_reconnect() {
    let mut stage = AuthorityStage::new();
    let lease = stage.take();
    let (message, _answer) = attach(&lease, lease.token.unwrap(), LeaseHolder::Connection);
    stage.receive(vec![message]);
    let mut stage = stage.restarted();
    stage.receive(Vec::new());
    assert_eq!(stage.state(lease.id), LeaseState::Active);
    stage.pass(Millis(11_000));
    assert_eq!(stage.state(lease.id), LeaseState::Expired);
}
