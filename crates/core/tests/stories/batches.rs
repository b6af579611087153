//! Commands that come at the same time: the queue is served once, and new requests within a batch gain no advantage.

use std::sync::Arc;

use crate::support::*;
use gpupool_core::{
    CommandDenied, CommandReply, LeaseId, Millis, OwnerQuota, Policies, PoolCommand, PoolEffect, PoolRow, Request,
    Share,
};

fn ask(request: Request) -> PoolCommand {
    PoolCommand::Request { request: Arc::new(request), key: None, by_admin: false }
}

/// Applies commands in one batch.
fn batch(
    test: &mut PoolFixture,
    commands: impl IntoIterator<Item = PoolCommand>,
) -> Vec<Result<CommandReply, CommandDenied>> {
    let (replies, outcome) = test.pool.apply_all(test.now, commands);
    test.pool.check_invariants().unwrap();
    test.rows.extend(outcome.rows);
    test.effects = outcome.effects;
    replies
}

fn lease(reply: &Result<CommandReply, CommandDenied>) -> LeaseId {
    match reply {
        Ok(CommandReply::Lease(lease)) => *lease,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_new_request_does_not_take_devices_freed_for_earlier_waiters() {
    let mut test = PoolFixture::of(1);
    let held = test.request(whole());
    let waits = test.request(whole());
    let replies = batch(&mut test, [PoolCommand::Release { lease: held }, ask(whole())]);
    assert!(test.is_active(waits));
    assert!(test.is_queued(lease(&replies[1])));
}

#[test]
fn a_new_request_starts_at_once_on_devices_earlier_waiters_cannot_use() {
    let mut test = PoolFixture::empty();
    test.add_node(node("a"), vec![device("GPU-a", "NVIDIA A100", 40), device("GPU-h", "NVIDIA H100", 80)]);
    let held = test.request(Request { select: model("H100"), ..whole() });
    let waits = test.request(Request { select: model("H100"), ..whole() });
    let replies = batch(&mut test, [PoolCommand::Release { lease: held }, ask(whole())]);
    let newcomer = lease(&replies[1]);
    assert_eq!((test.devices_of(newcomer), test.devices_of(waits)), (vec![0], vec![1]));
    assert!(test.token(newcomer) < test.token(waits), "the queue is served as the batch finishes");
}

#[test]
fn a_request_that_does_not_wait_sees_the_queue_as_served() {
    let mut test = PoolFixture::of(2);
    let held = test.request(whole());
    let half = test.request(part(500));
    let waits = test.request(whole());
    let now_or_never = Request { queue: false, ..part(500) };
    assert_eq!(test.expect_denied(now_or_never.clone()), CommandDenied::NoCapacity, "the free half is claimed");
    let replies = batch(&mut test, [PoolCommand::Release { lease: held }, ask(now_or_never)]);
    assert_eq!((test.devices_of(waits), test.devices_of(lease(&replies[1]))), (vec![0], test.devices_of(half)));
}

#[test]
fn a_quota_freed_in_a_batch_restores_the_claims_of_its_waiters() {
    let quota = OwnerQuota { held: Some(Share::WHOLE), ..OwnerQuota::default() };
    let rules = Policies { quotas: [("a".into(), quota)].into(), ..Policies::unlimited() };
    let mut test = PoolFixture::under(rules, 2);
    let held = test.request(owned("a", whole()));
    let other = test.request(owned("b", whole()));
    let waits = test.request(owned("a", whole()));
    let replies = batch(
        &mut test,
        [PoolCommand::Release { lease: other }, PoolCommand::Release { lease: held }, ask(owned("c", gpus(2)))],
    );
    assert!(test.is_active(waits));
    assert!(test.is_queued(lease(&replies[2])));
}

#[test]
fn a_short_lease_does_not_pass_a_request_that_can_start_in_the_batch() {
    let mut test = PoolFixture::of(1);
    let held = test.request(Request { max_duration: Some(mins(10)), ..part(600) });
    let waits = test.request(part(700));
    let short = Request { max_duration: Some(mins(1)), ..part(400) };
    let replies = batch(&mut test, [PoolCommand::Release { lease: held }, ask(short)]);
    assert!(test.is_active(waits));
    assert!(test.is_queued(lease(&replies[1])));
}

#[test]
fn deadlines_apply_before_the_first_command() {
    let mut test = PoolFixture::of(1);
    let expires = test.request(Request { ttl: secs(5), ..whole() });
    let token = test.token(expires);
    test.now = test.now.after(secs(5));
    let replies = batch(&mut test, [PoolCommand::Renew { lease: expires, token }, ask(whole())]);
    assert_eq!(replies[0], Err(CommandDenied::Ended(expires)));
    assert!(test.is_active(lease(&replies[1])));
    assert!(matches!(test.effects[0], PoolEffect::Ended { .. }));
}

#[test]
fn a_batch_leaves_one_row_of_counters() {
    let mut test = PoolFixture::of(4);
    let before = test.rows.len();
    batch(&mut test, (0..4).map(|_| ask(whole())));
    let counters = test.rows[before..].iter().filter(|row| matches!(row, PoolRow::Counters(_)));
    assert_eq!(counters.count(), 1);
    let before = test.rows.len();
    test.now = test.now.after(Millis(1));
    batch(&mut test, [PoolCommand::Tick, PoolCommand::Tick]);
    assert_eq!(test.rows.len(), before, "nothing changed");
}
