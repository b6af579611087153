//! Commands that come at the same time: the queue is served once, and a newcomer gains nothing by being in the middle.

use std::sync::Arc;

use crate::support::*;
use gpupool_core::{
    CommandDenied, CommandReply, LeaseId, Millis, OwnerQuota, Policies, PoolCommand, PoolEffect, PoolRow, Request,
    Share,
};

fn ask(request: Request) -> PoolCommand {
    PoolCommand::Request { request: Arc::new(request), key: None }
}

/// Applies commands in one batch.
fn batch(
    stage: &mut Stage,
    commands: impl IntoIterator<Item = PoolCommand>,
) -> Vec<Result<CommandReply, CommandDenied>> {
    let (answers, outcome) = stage.pool.apply_all(stage.now, commands);
    stage.pool.check_invariants().unwrap();
    stage.rows.extend(outcome.rows);
    stage.effects = outcome.effects;
    answers
}

fn lease(answer: &Result<CommandReply, CommandDenied>) -> LeaseId {
    match answer {
        Ok(CommandReply::Lease(lease)) => *lease,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_newcomer_does_not_get_what_the_batch_freed_for_those_before_it() {
    let mut stage = Stage::of(1);
    let held = stage.ask(whole());
    let waits = stage.ask(whole());
    let answers = batch(&mut stage, [PoolCommand::Release { lease: held }, ask(whole())]);
    assert!(stage.is_active(waits));
    assert!(stage.is_queued(lease(&answers[1])));
}

#[test]
fn a_newcomer_goes_at_once_where_those_before_it_could_not() {
    let mut stage = Stage::empty();
    stage.add(node("a"), vec![device("GPU-a", "NVIDIA A100", 40), device("GPU-h", "NVIDIA H100", 80)]);
    let held = stage.ask(Request { select: model("H100"), ..whole() });
    let waits = stage.ask(Request { select: model("H100"), ..whole() });
    let answers = batch(&mut stage, [PoolCommand::Release { lease: held }, ask(whole())]);
    let newcomer = lease(&answers[1]);
    assert_eq!((stage.on(newcomer), stage.on(waits)), (vec![0], vec![1]));
    assert!(stage.token(newcomer) < stage.token(waits), "the queue is served as the batch finishes");
}

#[test]
fn a_request_that_does_not_wait_is_decided_as_if_the_queue_had_been_served() {
    let mut stage = Stage::of(2);
    let held = stage.ask(whole());
    let half = stage.ask(part(500));
    let waits = stage.ask(whole());
    let now_or_never = Request { queue: false, ..part(500) };
    assert_eq!(stage.refused(now_or_never.clone()), CommandDenied::NoCapacity, "the free half is claimed");
    let answers = batch(&mut stage, [PoolCommand::Release { lease: held }, ask(now_or_never)]);
    assert_eq!((stage.on(waits), stage.on(lease(&answers[1]))), (vec![0], stage.on(half)));
}

#[test]
fn a_quota_that_a_batch_leaves_gives_its_owners_waiters_their_claims_back() {
    let quota = OwnerQuota { held: Some(Share::WHOLE), ..OwnerQuota::default() };
    let rules = Policies { quotas: [("a".into(), quota)].into(), ..Policies::unlimited() };
    let mut stage = Stage::under(rules, 2);
    let held = stage.ask(owned("a", whole()));
    let other = stage.ask(owned("b", whole()));
    let waits = stage.ask(owned("a", whole()));
    let answers = batch(
        &mut stage,
        [PoolCommand::Release { lease: other }, PoolCommand::Release { lease: held }, ask(owned("c", gpus(2)))],
    );
    assert!(stage.is_active(waits));
    assert!(stage.is_queued(lease(&answers[2])));
}

#[test]
fn a_short_lease_does_not_pass_a_request_that_the_batch_lets_start_now() {
    let mut stage = Stage::of(1);
    let held = stage.ask(Request { max_duration: Some(mins(10)), ..part(600) });
    let waits = stage.ask(part(700));
    let short = Request { max_duration: Some(mins(1)), ..part(400) };
    let answers = batch(&mut stage, [PoolCommand::Release { lease: held }, ask(short)]);
    assert!(stage.is_active(waits));
    assert!(stage.is_queued(lease(&answers[1])));
}

#[test]
fn what_is_due_ends_before_the_first_command() {
    let mut stage = Stage::of(1);
    let expires = stage.ask(Request { ttl: secs(5), ..whole() });
    let token = stage.token(expires);
    stage.now = stage.now.after(secs(5));
    let answers = batch(&mut stage, [PoolCommand::Renew { lease: expires, token }, ask(whole())]);
    assert_eq!(answers[0], Err(CommandDenied::Ended(expires)));
    assert!(stage.is_active(lease(&answers[1])));
    assert!(matches!(stage.effects[0], PoolEffect::Ended { .. }));
}

#[test]
fn a_batch_leaves_one_row_of_counters() {
    let mut stage = Stage::of(4);
    let before = stage.rows.len();
    batch(&mut stage, (0..4).map(|_| ask(whole())));
    let counters = stage.rows[before..].iter().filter(|row| matches!(row, PoolRow::Counters(_)));
    assert_eq!(counters.count(), 1);
    let before = stage.rows.len();
    stage.now = stage.now.after(Millis(1));
    batch(&mut stage, [PoolCommand::Tick, PoolCommand::Tick]);
    assert_eq!(stage.rows.len(), before, "nothing changed");
}
