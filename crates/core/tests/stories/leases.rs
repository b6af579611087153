//! Life of a lease: requested, granted, kept alive, and ended for one known cause.

use std::sync::Arc;

use crate::support::*;
use gpupool_core::{
    CommandDenied, CommandReply, EndCause, LeaseHolder, LeaseId, LeaseState, Millis, PoolCommand, PoolEffect, Request,
    Revocation, Token,
};

const PROCESS: LeaseHolder = LeaseHolder::Process { pid: 4711, started: 99 };

fn ended(test: &PoolFixture, lease: LeaseId) -> (LeaseState, EndCause) {
    (test.state(lease), test.cause(lease).expect("an ended lease has a cause"))
}

fn attached(test: &mut PoolFixture, holder: LeaseHolder) -> LeaseId {
    let lease = test.request(whole());
    let token = test.token(lease);
    test.apply_ok(PoolCommand::Attach { lease, token, holder });
    lease
}

#[test]
fn a_lease_is_queued_then_active_then_released() {
    let mut test = PoolFixture::of(1);
    let first = test.request(whole());
    let second = test.request(whole());
    assert_eq!(test.effects, [PoolEffect::Queued { lease: second }]);
    assert_eq!((test.state(first), test.state(second)), (LeaseState::Active, LeaseState::Queued));
    test.release(first);
    assert_eq!(ended(&test, first), (LeaseState::Released, EndCause::ByOwner));
    let decision = test.decision(second);
    assert_eq!(
        test.effects,
        [
            PoolEffect::Ended { lease: first, cause: EndCause::ByOwner },
            PoolEffect::Freed { lease: first },
            PoolEffect::Granted { lease: second, token: Token(1), decision },
        ]
    );
}

#[test]
fn releasing_twice_is_harmless_and_an_unknown_lease_is_denied() {
    let mut test = PoolFixture::of(1);
    let lease = test.request(whole());
    test.release(lease);
    let rows = test.rows.len();
    assert_eq!(test.apply(PoolCommand::Release { lease }), Ok(CommandReply::Lease(lease)));
    assert!(test.effects.is_empty() && test.rows.len() == rows, "the second time nothing happens");
    let unknown = LeaseId(77);
    assert_eq!(test.apply(PoolCommand::Release { lease: unknown }), Err(CommandDenied::UnknownLease(unknown)));
}

#[test]
fn the_same_key_of_the_same_owner_is_granted_once() {
    let mut test = PoolFixture::of(2);
    let ask = |owner: &str, key: &str| PoolCommand::Request {
        request: Arc::new(owned(owner, whole())),
        key: Some(Arc::from(key)),
        by_admin: false,
    };
    let first = test.apply_ok(ask("alice", "job-1"));
    assert_eq!(test.apply_ok(ask("alice", "job-1")), first);
    assert_eq!(test.pool.leases().count(), 1);
    assert_ne!(test.apply_ok(ask("bob", "job-1")), first, "bob's key is bob's");
    let CommandDenied::Invalid(error) = test.apply(ask("alice", "")).unwrap_err() else {
        panic!("an empty key is invalid")
    };
    assert_eq!(error.field, "Idempotency-Key");
}

#[test]
fn a_lease_lives_only_by_its_heartbeats() {
    let mut test = PoolFixture::of(2);
    let silent = test.request(Request { ttl: secs(30), ..whole() });
    let renewed = test.request(Request { ttl: secs(30), ..whole() });
    for _ in 0..6 {
        test.advance(secs(10));
        let token = test.token(renewed);
        test.apply_ok(PoolCommand::Renew { lease: renewed, token });
    }
    assert_eq!(ended(&test, silent), (LeaseState::Expired, EndCause::TtlPassed));
    assert!(test.is_active(renewed));
    test.advance(Millis(29_999));
    assert!(test.is_active(renewed));
    test.advance(Millis(1));
    assert_eq!(ended(&test, renewed), (LeaseState::Expired, EndCause::TtlPassed));
}

#[test]
fn a_late_heartbeat_is_denied() {
    let mut test = PoolFixture::of(1);
    let lease = test.request(whole());
    let token = test.token(lease);
    test.now = test.now.after(secs(60));
    // No tick in between: the deadline itself counts.
    assert_eq!(test.apply(PoolCommand::Renew { lease, token }), Err(CommandDenied::Ended(lease)));
}

#[test]
fn a_token_of_another_lease_is_stale() {
    let mut test = PoolFixture::of(2);
    let (a, b) = (test.request(whole()), test.request(whole()));
    let stolen = test.token(a);
    let stale = Err(CommandDenied::Stale { lease: b, presented: stolen });
    assert_eq!(test.apply(PoolCommand::Renew { lease: b, token: stolen }), stale);
    assert_eq!(test.apply(PoolCommand::Attach { lease: b, token: stolen, holder: LeaseHolder::Connection }), stale);
    assert_eq!(test.apply(PoolCommand::Confirm { lease: b, token: stolen }), stale);
    test.release(b);
    assert_eq!(test.apply(PoolCommand::Renew { lease: b, token: stolen }), stale, "stale before ended");
}

#[test]
fn a_waiting_lease_cannot_be_renewed_or_attached() {
    let mut test = PoolFixture::of(1);
    test.request(whole());
    let lease = test.request(whole());
    assert_eq!(test.apply(PoolCommand::Renew { lease, token: Token(0) }), Err(CommandDenied::NotGranted(lease)));
    let attach = PoolCommand::Attach { lease, token: Token(0), holder: PROCESS };
    assert_eq!(test.apply(attach), Err(CommandDenied::NotGranted(lease)));
}

#[test]
fn no_heartbeat_prolongs_a_lease_beyond_its_max_duration() {
    let mut test = PoolFixture::of(1);
    let lease = test.request(Request { max_duration: Some(mins(2)), ..whole() });
    test.advance_with_heartbeats(secs(110));
    assert!(test.is_active(lease));
    test.advance_with_heartbeats(secs(10));
    assert_eq!(ended(&test, lease), (LeaseState::Expired, EndCause::MaxDurationPassed));
}

#[test]
fn an_attached_lease_needs_no_heartbeat_and_ends_with_its_holder() {
    let mut test = PoolFixture::of(1);
    let lease = attached(&mut test, PROCESS);
    test.advance(mins(600));
    assert!(test.is_active(lease));
    assert_eq!(test.lease(lease).expires_at, None);
    test.apply_ok(PoolCommand::HolderGone { lease, grace: Millis::ZERO });
    assert_eq!(ended(&test, lease), (LeaseState::Released, EndCause::HolderGone));
}

#[test]
fn a_lease_is_never_taken_away_from_its_holder() {
    let mut test = PoolFixture::of(4);
    let group = |path: &str| LeaseHolder::Cgroup(path.into());
    let same = LeaseHolder::Supervisor { pid: 4711, started: 99 };
    let others = [LeaseHolder::Process { pid: 4711, started: 100 }, LeaseHolder::Supervisor { pid: 4712, started: 99 }];
    let [reused, other] = others;
    for (holder, allowed, refused) in [
        (PROCESS, vec![PROCESS, same.clone(), group("/jobs/1")], vec![reused.clone(), LeaseHolder::Connection]),
        (same.clone(), vec![PROCESS, group("/jobs/1")], vec![other, LeaseHolder::Connection]),
        (group("/jobs/1"), vec![group("/jobs/1")], vec![PROCESS, same, group("/jobs/2"), LeaseHolder::Connection]),
        (LeaseHolder::Connection, vec![LeaseHolder::Connection], vec![PROCESS, reused, group("/jobs/1")]),
    ] {
        for next in refused {
            let lease = attached(&mut test, holder.clone());
            let token = test.token(lease);
            let denied = test.apply(PoolCommand::Attach { lease, token, holder: next });
            assert_eq!(denied, Err(CommandDenied::Held { lease, by: holder.clone() }));
            assert_eq!(test.lease(lease).holder, Some(holder.clone()));
            test.release(lease);
        }
        for next in allowed {
            let lease = attached(&mut test, holder.clone());
            let token = test.token(lease);
            test.apply_ok(PoolCommand::Attach { lease, token, holder: next.clone() });
            assert_eq!(test.lease(lease).holder, Some(next));
            test.release(lease);
        }
    }
}

#[test]
fn a_holder_may_come_back_within_its_grace() {
    let mut test = PoolFixture::of(1);
    let lease = attached(&mut test, LeaseHolder::Connection);
    test.apply_ok(PoolCommand::HolderGone { lease, grace: secs(10) });
    test.advance(secs(9));
    let token = test.token(lease);
    test.apply_ok(PoolCommand::Attach { lease, token, holder: LeaseHolder::Connection });
    test.advance(mins(10));
    assert!(test.is_active(lease));
    test.apply_ok(PoolCommand::HolderGone { lease, grace: secs(10) });
    test.advance(secs(10));
    assert_eq!(test.state(lease), LeaseState::Expired, "this time it did not");
}

#[test]
fn a_report_about_a_missing_holder_ends_nothing() {
    let mut test = PoolFixture::of(1);
    let lease = test.request(whole());
    test.apply_ok(PoolCommand::HolderGone { lease, grace: Millis::ZERO });
    assert!(test.is_active(lease), "it lives by its heartbeat");
}

#[test]
fn a_waiter_that_gives_up_leaves_nothing_behind() {
    let mut test = PoolFixture::of(1);
    let holder = test.request(whole());
    let (gives_up, stays) = (test.request(whole()), test.request(whole()));
    test.release(gives_up);
    assert_eq!(ended(&test, gives_up), (LeaseState::Released, EndCause::ByOwner));
    assert_eq!((test.pool.waiter_count(), test.lease(gives_up).token), (1, None));
    test.release(holder);
    assert!(test.is_active(stays));
}

#[test]
fn a_waiter_whose_client_stops_asking_leaves_after_fifteen_seconds() {
    let mut test = PoolFixture::of(1);
    test.request(Request { ttl: mins(60), ..whole() });
    let forgotten = test.request(whole());
    let followed = test.request(whole());
    test.advance(Millis(14_999));
    test.apply_ok(PoolCommand::Follow { lease: followed });
    assert!(test.is_queued(forgotten));
    test.advance(Millis(1));
    assert_eq!(ended(&test, forgotten), (LeaseState::Expired, EndCause::Abandoned));
    assert!(test.is_queued(followed));
    assert_eq!(test.pool.explain(followed).unwrap().position, 1);
}

#[test]
fn a_waiter_leaves_at_its_wait_limit() {
    let mut test = PoolFixture::of(1);
    test.request(Request { ttl: mins(60), ..whole() });
    let lease = test.request(Request { wait_limit: Some(secs(40)), ..whole() });
    test.advance_with_heartbeats(secs(30));
    assert!(test.is_queued(lease));
    test.advance_with_heartbeats(secs(10));
    assert_eq!(ended(&test, lease), (LeaseState::Expired, EndCause::WaitLimitPassed));
}

#[test]
fn a_request_that_does_not_wait_is_denied_at_once_and_leaves_no_lease() {
    let mut test = PoolFixture::of(1);
    test.request(whole());
    assert_eq!(test.expect_denied(Request { queue: false, ..whole() }), CommandDenied::NoCapacity);
    assert_eq!(test.pool.leases().count(), 1);
}

#[test]
fn a_revocation_is_announced_and_takes_effect_on_time() {
    let mut test = PoolFixture::of(1);
    let lease = test.request(Request { ttl: mins(60), ..whole() });
    let revocation = Some(Arc::new(Revocation { by: "root".into(), reason: Some("a demo".into()) }));
    test.apply_ok(PoolCommand::Revoke { lease, grace: mins(5), revocation: revocation.clone() });
    let at = test.now.after(mins(5));
    assert_eq!(test.effects, [PoolEffect::Revoking { lease, at }]);
    test.apply_ok(PoolCommand::Revoke { lease, grace: mins(30), revocation: None });
    assert_eq!(test.lease(lease).revoke_at, Some(at), "a second word does not prolong the first");
    test.advance(mins(5));
    assert_eq!(ended(&test, lease), (LeaseState::Revoked, EndCause::Revoked));
    assert_eq!(test.lease(lease).revocation, revocation, "nor does it change its author");
    assert_eq!(
        test.apply(PoolCommand::Revoke { lease, grace: mins(5), revocation: None }),
        Err(CommandDenied::Ended(lease))
    );
}

#[test]
fn a_revocation_without_grace_or_of_a_waiter_is_immediate() {
    let mut test = PoolFixture::of(1);
    let (active, waiting) = (test.request(whole()), test.request(whole()));
    test.apply_ok(PoolCommand::Revoke { lease: waiting, grace: mins(5), revocation: None });
    test.apply_ok(PoolCommand::Revoke { lease: active, grace: Millis::ZERO, revocation: None });
    assert_eq!((test.state(waiting), test.state(active)), (LeaseState::Revoked, LeaseState::Revoked));
}

#[test]
fn a_fault_ends_a_lease_and_is_its_cause() {
    let mut test = PoolFixture::of(1);
    let lease = test.request(whole());
    test.apply_ok(PoolCommand::Fail { lease, why: "Xid 79".into() });
    assert_eq!(ended(&test, lease), (LeaseState::Failed, EndCause::Fault("Xid 79".into())));
}

#[test]
fn an_offer_is_held_until_it_is_confirmed() {
    let mut test = PoolFixture::of(1);
    let lease = test.request(Request { hedged: true, ..whole() });
    let token = test.token(lease);
    let (until, decision) = (test.now.after(secs(5)), test.decision(lease));
    assert_eq!(test.effects, [PoolEffect::Offered { lease, token, until, decision }]);
    assert_eq!(test.apply(PoolCommand::Renew { lease, token }), Err(CommandDenied::NotGranted(lease)));
    test.advance(Millis(4_999));
    test.apply_ok(PoolCommand::Confirm { lease, token });
    assert!(test.is_active(lease));
    test.apply_ok(PoolCommand::Confirm { lease, token });
    test.advance(secs(59));
    assert!(test.is_active(lease), "a full ttl from the confirmation");
}

#[test]
fn an_unconfirmed_offer_goes_to_the_next_waiter() {
    let mut test = PoolFixture::of(1);
    let offered = test.request(Request { hedged: true, ..whole() });
    let next = test.request(whole());
    assert_eq!((test.state(offered), test.state(next)), (LeaseState::Offered, LeaseState::Queued));
    test.advance(secs(5));
    assert_eq!(ended(&test, offered), (LeaseState::Expired, EndCause::OfferLapsed));
    assert!(test.is_active(next));
    let token = test.token(offered);
    assert_eq!(test.apply(PoolCommand::Confirm { lease: offered, token }), Err(CommandDenied::Ended(offered)));
}

#[test]
fn every_grant_has_a_larger_token() {
    let mut test = PoolFixture::of(2);
    let tokens: Vec<Token> = (0..5)
        .map(|_| {
            let lease = test.request(whole());
            let token = test.token(lease);
            test.release(lease);
            token
        })
        .collect();
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
}
