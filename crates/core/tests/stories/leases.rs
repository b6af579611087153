//! A lease's life: asked for, granted, kept alive, and over for one cause that is told.

use std::sync::Arc;

use crate::support::*;
use gpupool_core::{
    CommandDenied, CommandReply, EndCause, LeaseHolder, LeaseId, LeaseState, Millis, PoolCommand, PoolEffect, Request,
    Token,
};

const PROCESS: LeaseHolder = LeaseHolder::Process { pid: 4711, started: 99 };

fn ended(stage: &Stage, lease: LeaseId) -> (LeaseState, EndCause) {
    (stage.state(lease), stage.cause(lease).expect("an ended lease has a cause"))
}

fn attached(stage: &mut Stage, holder: LeaseHolder) -> LeaseId {
    let lease = stage.ask(whole());
    let token = stage.token(lease);
    stage.run(PoolCommand::Attach { lease, token, holder });
    lease
}

#[test]
fn a_lease_is_queued_then_active_then_released() {
    let mut stage = Stage::of(1);
    let first = stage.ask(whole());
    let second = stage.ask(whole());
    assert_eq!(stage.effects, [PoolEffect::Queued { lease: second }]);
    assert_eq!((stage.state(first), stage.state(second)), (LeaseState::Active, LeaseState::Queued));
    stage.release(first);
    assert_eq!(ended(&stage, first), (LeaseState::Released, EndCause::ByOwner));
    let decision = stage.decision(second);
    assert_eq!(
        stage.effects,
        [
            PoolEffect::Ended { lease: first, cause: EndCause::ByOwner },
            PoolEffect::Freed { lease: first },
            PoolEffect::Granted { lease: second, token: Token(1), decision },
        ]
    );
}

#[test]
fn releasing_twice_is_harmless_and_releasing_what_never_was_is_not_known() {
    let mut stage = Stage::of(1);
    let lease = stage.ask(whole());
    stage.release(lease);
    let rows = stage.rows.len();
    assert_eq!(stage.apply(PoolCommand::Release { lease }), Ok(CommandReply::Lease(lease)));
    assert!(stage.effects.is_empty() && stage.rows.len() == rows, "the second time nothing happens");
    let unknown = LeaseId(77);
    assert_eq!(stage.apply(PoolCommand::Release { lease: unknown }), Err(CommandDenied::UnknownLease(unknown)));
}

#[test]
fn the_same_key_of_the_same_owner_is_granted_once() {
    let mut stage = Stage::of(2);
    let ask = |owner: &str, key: &str| PoolCommand::Request {
        request: Arc::new(owned(owner, whole())),
        key: Some(Arc::from(key)),
    };
    let first = stage.run(ask("alice", "job-1"));
    assert_eq!(stage.run(ask("alice", "job-1")), first);
    assert_eq!(stage.pool.leases().count(), 1);
    assert_ne!(stage.run(ask("bob", "job-1")), first, "bob's key is bob's");
    let CommandDenied::Invalid(error) = stage.apply(ask("alice", "")).unwrap_err() else {
        panic!("an empty key is invalid")
    };
    assert_eq!(error.field, "Idempotency-Key");
}

#[test]
fn a_lease_without_a_heartbeat_expires_and_with_one_it_lives() {
    let mut stage = Stage::of(2);
    let silent = stage.ask(Request { ttl: secs(30), ..whole() });
    let renewed = stage.ask(Request { ttl: secs(30), ..whole() });
    for _ in 0..6 {
        stage.pass(secs(10));
        let token = stage.token(renewed);
        stage.run(PoolCommand::Renew { lease: renewed, token });
    }
    assert_eq!(ended(&stage, silent), (LeaseState::Expired, EndCause::TtlPassed));
    assert!(stage.is_active(renewed));
    stage.pass(Millis(29_999));
    assert!(stage.is_active(renewed));
    stage.pass(Millis(1));
    assert_eq!(ended(&stage, renewed), (LeaseState::Expired, EndCause::TtlPassed));
}

#[test]
fn a_heartbeat_that_comes_too_late_finds_the_lease_over() {
    let mut stage = Stage::of(1);
    let lease = stage.ask(whole());
    let token = stage.token(lease);
    stage.now = stage.now.after(secs(60));
    // No tick in between: the deadline counts, not when somebody looked.
    assert_eq!(stage.apply(PoolCommand::Renew { lease, token }), Err(CommandDenied::Ended(lease)));
}

#[test]
fn a_token_that_is_not_the_leases_is_stale() {
    let mut stage = Stage::of(2);
    let (a, b) = (stage.ask(whole()), stage.ask(whole()));
    let stolen = stage.token(a);
    let stale = Err(CommandDenied::Stale { lease: b, presented: stolen });
    assert_eq!(stage.apply(PoolCommand::Renew { lease: b, token: stolen }), stale);
    assert_eq!(stage.apply(PoolCommand::Attach { lease: b, token: stolen, holder: LeaseHolder::Connection }), stale);
    assert_eq!(stage.apply(PoolCommand::Confirm { lease: b, token: stolen }), stale);
    stage.release(b);
    assert_eq!(stage.apply(PoolCommand::Renew { lease: b, token: stolen }), stale, "stale before ended");
}

#[test]
fn a_waiting_lease_cannot_be_renewed_or_attached() {
    let mut stage = Stage::of(1);
    stage.ask(whole());
    let lease = stage.ask(whole());
    assert_eq!(stage.apply(PoolCommand::Renew { lease, token: Token(0) }), Err(CommandDenied::NotGranted(lease)));
    let attach = PoolCommand::Attach { lease, token: Token(0), holder: PROCESS };
    assert_eq!(stage.apply(attach), Err(CommandDenied::NotGranted(lease)));
}

#[test]
fn no_heartbeat_prolongs_a_lease_beyond_its_max_duration() {
    let mut stage = Stage::of(1);
    let lease = stage.ask(Request { max_duration: Some(mins(2)), ..whole() });
    stage.pass_asking(secs(110));
    assert!(stage.is_active(lease));
    stage.pass_asking(secs(10));
    assert_eq!(ended(&stage, lease), (LeaseState::Expired, EndCause::MaxDurationPassed));
}

#[test]
fn a_held_lease_needs_no_heartbeat_and_ends_with_its_holder() {
    let mut stage = Stage::of(1);
    let lease = attached(&mut stage, PROCESS);
    stage.pass(mins(600));
    assert!(stage.is_active(lease));
    assert_eq!(stage.lease(lease).expires_at, None);
    stage.run(PoolCommand::HolderGone { lease, grace: Millis::ZERO });
    assert_eq!(ended(&stage, lease), (LeaseState::Released, EndCause::HolderGone));
}

#[test]
fn a_holder_may_come_back_within_its_grace() {
    let mut stage = Stage::of(1);
    let lease = attached(&mut stage, LeaseHolder::Connection);
    stage.run(PoolCommand::HolderGone { lease, grace: secs(10) });
    stage.pass(secs(9));
    let token = stage.token(lease);
    stage.run(PoolCommand::Attach { lease, token, holder: LeaseHolder::Connection });
    stage.pass(mins(10));
    assert!(stage.is_active(lease));
    stage.run(PoolCommand::HolderGone { lease, grace: secs(10) });
    stage.pass(secs(10));
    assert_eq!(stage.state(lease), LeaseState::Expired, "this time it did not");
}

#[test]
fn the_end_of_a_holder_that_never_was_ends_nothing() {
    let mut stage = Stage::of(1);
    let lease = stage.ask(whole());
    stage.run(PoolCommand::HolderGone { lease, grace: Millis::ZERO });
    assert!(stage.is_active(lease), "it lives by its heartbeat");
}

#[test]
fn a_waiter_that_gives_up_leaves_nothing_behind() {
    let mut stage = Stage::of(1);
    let holder = stage.ask(whole());
    let (gives_up, stays) = (stage.ask(whole()), stage.ask(whole()));
    stage.release(gives_up);
    assert_eq!(ended(&stage, gives_up), (LeaseState::Released, EndCause::ByOwner));
    assert_eq!((stage.pool.waiter_count(), stage.lease(gives_up).token), (1, None));
    stage.release(holder);
    assert!(stage.is_active(stays));
}

#[test]
fn a_waiter_nobody_asks_for_leaves_after_fifteen_seconds() {
    let mut stage = Stage::of(1);
    stage.ask(Request { ttl: mins(60), ..whole() });
    let forgotten = stage.ask(whole());
    let followed = stage.ask(whole());
    stage.pass(Millis(14_999));
    stage.run(PoolCommand::Follow { lease: followed });
    assert!(stage.is_queued(forgotten));
    stage.pass(Millis(1));
    assert_eq!(ended(&stage, forgotten), (LeaseState::Expired, EndCause::Abandoned));
    assert!(stage.is_queued(followed));
    assert_eq!(stage.pool.explain(followed).unwrap().position, 1);
}

#[test]
fn a_waiter_waits_no_longer_than_it_wants_to() {
    let mut stage = Stage::of(1);
    stage.ask(Request { ttl: mins(60), ..whole() });
    let lease = stage.ask(Request { wait_limit: Some(secs(40)), ..whole() });
    stage.pass_asking(secs(30));
    assert!(stage.is_queued(lease));
    stage.pass_asking(secs(10));
    assert_eq!(ended(&stage, lease), (LeaseState::Expired, EndCause::WaitLimitPassed));
}

#[test]
fn who_does_not_wait_is_told_at_once_and_leaves_no_lease() {
    let mut stage = Stage::of(1);
    stage.ask(whole());
    assert_eq!(stage.refused(Request { queue: false, ..whole() }), CommandDenied::NoCapacity);
    assert_eq!(stage.pool.leases().count(), 1);
}

#[test]
fn a_revoked_lease_is_told_when_and_ends_then() {
    let mut stage = Stage::of(1);
    let lease = stage.ask(Request { ttl: mins(60), ..whole() });
    stage.run(PoolCommand::Revoke { lease, grace: mins(5) });
    let at = stage.now.after(mins(5));
    assert_eq!(stage.effects, [PoolEffect::Revoking { lease, at }]);
    stage.run(PoolCommand::Revoke { lease, grace: mins(30) });
    assert_eq!(stage.lease(lease).revoke_at, Some(at), "a second word does not prolong the first");
    stage.pass(mins(5));
    assert_eq!(ended(&stage, lease), (LeaseState::Revoked, EndCause::Revoked));
    assert_eq!(stage.apply(PoolCommand::Revoke { lease, grace: mins(5) }), Err(CommandDenied::Ended(lease)));
}

#[test]
fn a_revocation_without_grace_is_at_once_and_a_waiter_has_none() {
    let mut stage = Stage::of(1);
    let (active, waiting) = (stage.ask(whole()), stage.ask(whole()));
    stage.run(PoolCommand::Revoke { lease: waiting, grace: mins(5) });
    stage.run(PoolCommand::Revoke { lease: active, grace: Millis::ZERO });
    assert_eq!((stage.state(waiting), stage.state(active)), (LeaseState::Revoked, LeaseState::Revoked));
}

#[test]
fn a_fault_ends_a_lease_and_is_told() {
    let mut stage = Stage::of(1);
    let lease = stage.ask(whole());
    stage.run(PoolCommand::Fail { lease, why: "Xid 79".into() });
    assert_eq!(ended(&stage, lease), (LeaseState::Failed, EndCause::Fault("Xid 79".into())));
}

#[test]
fn an_offer_is_held_until_it_is_confirmed() {
    let mut stage = Stage::of(1);
    let lease = stage.ask(Request { hedged: true, ..whole() });
    let token = stage.token(lease);
    let (until, decision) = (stage.now.after(secs(5)), stage.decision(lease));
    assert_eq!(stage.effects, [PoolEffect::Offered { lease, token, until, decision }]);
    assert_eq!(stage.apply(PoolCommand::Renew { lease, token }), Err(CommandDenied::NotGranted(lease)));
    stage.pass(Millis(4_999));
    stage.run(PoolCommand::Confirm { lease, token });
    assert!(stage.is_active(lease));
    stage.run(PoolCommand::Confirm { lease, token });
    stage.pass(secs(59));
    assert!(stage.is_active(lease), "a full ttl from the confirmation");
}

#[test]
fn an_offer_nobody_confirms_goes_to_the_next_in_line() {
    let mut stage = Stage::of(1);
    let offered = stage.ask(Request { hedged: true, ..whole() });
    let next = stage.ask(whole());
    assert_eq!((stage.state(offered), stage.state(next)), (LeaseState::Offered, LeaseState::Queued));
    stage.pass(secs(5));
    assert_eq!(ended(&stage, offered), (LeaseState::Expired, EndCause::OfferLapsed));
    assert!(stage.is_active(next));
    let token = stage.token(offered);
    assert_eq!(stage.apply(PoolCommand::Confirm { lease: offered, token }), Err(CommandDenied::Ended(offered)));
}

#[test]
fn every_grant_has_a_larger_token() {
    let mut stage = Stage::of(2);
    let tokens: Vec<Token> = (0..5)
        .map(|_| {
            let lease = stage.ask(whole());
            let token = stage.token(lease);
            stage.release(lease);
            token
        })
        .collect();
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
}
