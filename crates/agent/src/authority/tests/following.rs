//! Following leases: a call extends the patience of its leases, and gets one reply.

use gpupool_api::lease::FollowResponse;
use gpupool_core::limits::WAITER_PATIENCE;

use super::*;
use crate::authority::StoreState;

const LATER: PoolTime = PoolTime(u64::MAX - 1);

fn followed(answer: &mut ReplyReceiver) -> FollowResponse {
    match answer.try_recv().expect("an answer") {
        Ok(Reply::Followed(followed)) => followed,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_call_extends_the_patience_of_all_its_leases_while_it_waits() {
    let mut stage = AuthorityStage::new();
    stage.take();
    let waiting: Vec<u64> = (0..100).map(|_| stage.request("alice").id).collect();
    let alone = stage.request("alice").id;
    let mut answer = stage.follow("alice", &waiting, LATER);
    stage.pass(Millis(10 * WAITER_PATIENCE.0));
    assert_eq!(stage.state(alone), LeaseState::Expired, "no call follows it");
    assert!(waiting.iter().all(|lease| stage.state(*lease) == LeaseState::Queued));
    assert!(answer.try_recv().is_err(), "nothing changed");
    drop(answer);
    stage.pass(Millis(2 * WAITER_PATIENCE.0));
    assert!(waiting.iter().all(|lease| stage.state(*lease) == LeaseState::Expired), "the client hung up");
    assert_eq!(stage.authority.follow_due(), None);
}

#[test]
fn a_call_that_is_no_poll_does_not_extend_their_patience() {
    let mut stage = AuthorityStage::new();
    stage.take();
    let waiting = stage.request("alice");
    stage.pass(Millis(10_000));
    stage.follow_as(false, "alice", &[waiting.id], stage.now).try_recv().unwrap().unwrap();
    stage.pass(Millis(6_000));
    assert!(stage.state(waiting.id).is_ended());
}

#[test]
fn an_immediate_reply_extends_their_patience_too() {
    let mut stage = AuthorityStage::new();
    stage.take();
    let waiting = [stage.request("alice").id, stage.request("alice").id];
    for _ in 0..5 {
        stage.pass(Millis(WAITER_PATIENCE.0 - 1000));
        let now = stage.now;
        assert_eq!(followed(&mut stage.follow("alice", &waiting, now)), FollowResponse::default());
    }
}

#[test]
fn a_call_gets_its_reply_at_its_deadline() {
    let mut stage = AuthorityStage::new();
    stage.take();
    let waiting = [stage.request("alice").id];
    let until = stage.now.after(Millis(5_000));
    let mut answer = stage.follow("alice", &waiting, until);
    stage.pass(Millis(4_000));
    assert!(answer.try_recv().is_err());
    assert_eq!(stage.authority.waiters.next_deadline(), Some(until));
    stage.pass(Millis(1_000));
    assert_eq!(followed(&mut answer), FollowResponse::default());
    assert_eq!(stage.authority.waiters.next_deadline(), None);
}

#[test]
fn leases_that_leave_the_queue_together_are_listed_together_in_the_order_of_the_call() {
    let mut stage = AuthorityStage::new();
    let held = stage.take();
    let [first, second, third] = std::array::from_fn(|_| stage.request("alice").id);
    let mut answer = stage.follow("alice", &[third, second, first], LATER);
    let release = |lease| asked("alice", PoolCommand::Release { lease: LeaseId(lease) }).0;
    stage.receive(vec![release(held.id), release(third)]);
    let followed = followed(&mut answer);
    let seen: Vec<_> = followed.changed.iter().map(|lease| (lease.id, lease.state)).collect();
    assert_eq!(seen, [(third, LeaseState::Released), (first, LeaseState::Active)]);
    assert!(followed.changed[1].token.is_some() && followed.unknown.is_empty());
    assert_eq!(stage.authority.follow_due(), None, "an answered call waits no longer");
}

#[test]
fn leases_of_other_owners_are_unknown_and_stay_impatient() {
    let mut stage = AuthorityStage::new();
    stage.take();
    let (hers, his) = (stage.request("alice").id, stage.request("bob").id);
    for _ in 0..3 {
        stage.pass(Millis(WAITER_PATIENCE.0 / 2));
        let followed = followed(&mut stage.follow("alice", &[999, hers, his], LATER));
        assert_eq!((followed.changed, followed.unknown), (Vec::new(), vec![999, his]));
    }
    assert_eq!((stage.state(hers), stage.state(his)), (LeaseState::Queued, LeaseState::Expired));
}

#[test]
fn a_waiting_request_is_one_message_with_one_reply() {
    let mut stage = AuthorityStage::new();
    let held = stage.take();
    let call = stage.next_call();
    let (message, mut answer) = request("alice", None, Some((call, LATER)));
    stage.receive(vec![message]);
    assert!(answer.try_recv().is_err(), "it waits");
    stage.pass(Millis(4 * WAITER_PATIENCE.0));
    stage.release(&held);
    match answer.try_recv().unwrap() {
        Ok(Reply::Lease(lease)) => assert_eq!(lease.state, LeaseState::Active),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_client_that_hangs_up_abandons_its_request_unless_it_has_a_key() {
    for (key, expected) in [(None, LeaseState::Released), (Some("key"), LeaseState::Queued)] {
        let mut stage = AuthorityStage::new();
        let held = stage.take();
        let call = stage.next_call();
        let (message, answer) = request("alice", key, Some((call, LATER)));
        stage.receive(vec![message]);
        drop(answer);
        stage.receive(vec![AuthorityMessage::HungUp(call)]);
        stage.receive(Vec::new());
        assert_eq!(stage.state(held.id + 1), expected, "{key:?}");
        // The same holds if it hangs up while the batch of its request is committed.
        let call = stage.next_call();
        let (message, answer) = request("alice", key.map(|_| "another"), Some((call, LATER)));
        drop(answer);
        stage.receive(vec![message]);
        stage.receive(Vec::new());
        assert_eq!(stage.state(held.id + 2), expected, "{key:?}");
    }
}

#[test]
fn when_the_agent_stops_every_call_gets_a_reply() {
    let mut stage = AuthorityStage::new();
    stage.take();
    let waiting = [stage.request("alice").id];
    let mut before = stage.follow("alice", &waiting, LATER);
    stage.receive(vec![AuthorityMessage::ReplyToCalls]);
    assert_eq!(followed(&mut before), FollowResponse::default());
    assert_eq!(followed(&mut stage.follow("alice", &waiting, LATER)), FollowResponse::default());
    assert_eq!(stage.state(waiting[0]), LeaseState::Queued, "its place stays");
}

#[test]
fn while_the_store_is_broken_every_call_is_refused() {
    let mut stage = AuthorityStage::new();
    stage.take();
    let waiting = [stage.request("alice").id];
    let mut before = stage.follow("alice", &waiting, LATER);
    stage.authority.store_state = StoreState::Broken("it broke".into());
    let refused = Ok(Err(Refusal::NotDurable("it broke".into())));
    assert_eq!(stage.follow("alice", &waiting, LATER).try_recv(), refused);
    assert_eq!(before.try_recv(), Err(oneshot::error::TryRecvError::Empty));
    // The temporary pool has no leases.
    stage.authority.pool = gpupool_core::Pool::default();
    stage.authority.rebuild_indexes();
    stage.receive(Vec::new());
    assert_eq!(before.try_recv(), refused);
}
