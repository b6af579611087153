//! Requesting, waiting, confirming, releasing.

use std::sync::Arc;

use tokio::time::advance;

use super::*;

#[tokio::test(start_paused = true)]
async fn two_requests_in_a_row_get_two_gpus_and_the_third_waits() {
    let accounting = idle_gpus(&[3, 7]);
    let (a, b) = (accounting.request_json("{}").unwrap(), accounting.request_json("{}").unwrap());
    assert_eq!((a.state, gpu_numbers(&a), gpu_numbers(&b)), (LeaseState::Active, vec![3], vec![7]));
    assert_eq!((a.owner.as_str(), a.expires_at), ("ann", None));
    let c = accounting.request_json("{}").unwrap();
    assert_eq!((c.state, c.queue_position), (LeaseState::Queued, Some(1)));
    assert!(c.reason.unwrap().contains("free"));
    assert_eq!(accounting.refusal_code(r#"{"queue":false}"#), "no_capacity");
    assert_eq!(accounting.refusal_code(r#"{"gpus":3}"#), "unsatisfiable");
    assert_eq!(accounting.refusal_code(r#"{"fraction":2}"#), "invalid");
    assert_eq!(accounting.refusal_code(r#"{"fraction":0.01}"#), "policy");
}

#[tokio::test(start_paused = true)]
async fn ten_tenths_fill_a_gpu_and_the_eleventh_is_refused() {
    let accounting = idle_gpus(&[0]);
    let tenth = r#"{"fraction":0.1,"queue":false}"#;
    for _ in 0..10 {
        assert_eq!(accounting.request_json(tenth).unwrap().state, LeaseState::Active);
    }
    assert_eq!(accounting.refusal_code(tenth), "no_capacity");
    assert_eq!(accounting.refusal_code(r#"{"queue":false}"#), "no_capacity");
    let gpu = &accounting.gpus()[0];
    assert_eq!((gpu.promised, gpu.holders), (1.0, 10));
}

#[tokio::test(start_paused = true)]
async fn requests_are_served_in_order_and_none_overtakes() {
    let accounting = idle_gpus(&[0]);
    let held = accounting.request_json("{}").unwrap();
    let (first, second) = (accounting.request_json("{}").unwrap(), accounting.request_json("{}").unwrap());
    accounting.release(held.id).unwrap();
    assert_eq!((accounting.state_of(&first), accounting.state_of(&second)), (LeaseState::Active, LeaseState::Queued));
    assert_eq!(accounting.request_json("{}").unwrap().queue_position, Some(2));
    assert_eq!(accounting.release(held.id).unwrap().state, LeaseState::Released, "a release is idempotent");
    assert_eq!(accounting.release(99), None);
}

#[tokio::test(start_paused = true)]
async fn a_follower_learns_of_a_grant_at_once() {
    let accounting = Arc::new(idle_gpus(&[0]));
    let held = accounting.request_json("{}").unwrap();
    let waiter = accounting.request_json("{}").unwrap();
    let following = {
        let (accounting, id) = (Arc::clone(&accounting), waiter.id);
        tokio::spawn(async move { (accounting.follow_leases(&[id], Duration::from_secs(3600)).await, Instant::now()) })
    };
    // Far beyond the patience for waiters that are not followed.
    advance(Duration::from_secs(7)).await;
    tokio::time::sleep(Duration::from_secs(101)).await;
    assert_eq!(accounting.state_of(&waiter), LeaseState::Queued);
    let released = Instant::now();
    accounting.apply_statistics(&summary(&[(0, 0.0, 0)]), None);
    accounting.release(held.id);
    let (followed, at) = following.await.unwrap();
    assert_eq!((followed.changed[0].state, at), (LeaseState::Active, released));
    assert_eq!(accounting.follow_leases(&[waiter.id, 99], FAR_FUTURE).await.unknown, [99]);
}

#[tokio::test(start_paused = true)]
async fn following_ends_after_its_wait_and_an_unfollowed_waiter_leaves() {
    let accounting = idle_gpus(&[0]);
    accounting.request_json("{}").unwrap();
    let waiter = accounting.request_json("{}").unwrap();
    let begun = Instant::now();
    assert_eq!(accounting.follow_leases(&[waiter.id], Duration::from_secs(40)).await, FollowResponse::default());
    assert_eq!(begun.elapsed(), Duration::from_secs(40));
    let over = accounting.wait_until_ended(waiter.id).await.unwrap();
    assert_eq!((begun.elapsed(), over.cause.as_deref()), (Duration::from_secs(55), Some("abandoned")));
    assert_eq!(accounting.wait_until_ended(99).await, None);
}

#[tokio::test(start_paused = true)]
async fn an_offer_expires_after_five_seconds_and_goes_to_the_next_waiter() {
    let accounting = idle_gpus(&[0]);
    let offered = accounting.request_json(r#"{"hedged":true}"#).unwrap();
    let waiter = accounting.request_json("{}").unwrap();
    assert_eq!((offered.state, waiter.state), (LeaseState::Offered, LeaseState::Queued));
    advance(Duration::from_secs(2)).await;
    let begun = Instant::now();
    let followed = accounting.follow_leases(&[waiter.id], FAR_FUTURE).await;
    assert_eq!((begun.elapsed(), followed.changed[0].state), (Duration::from_secs(3), LeaseState::Active));
    let late = accounting.confirm(offered.id, offered.token.unwrap()).unwrap_err();
    assert_eq!(late.code(), Some("ended"));
}

#[tokio::test(start_paused = true)]
async fn a_confirmed_offer_lives_without_heartbeats_until_its_maximum_duration() {
    let accounting = idle_gpus(&[0]);
    let offered = accounting.request_json(r#"{"hedged":true,"max_duration_secs":7200,"ttl_secs":1}"#).unwrap();
    assert_eq!(accounting.confirm(offered.id, 99).unwrap_err().code(), Some("stale"));
    let begun = Instant::now();
    let held = accounting.confirm(offered.id, offered.token.unwrap()).unwrap();
    assert!(held.state == LeaseState::Active && held.expires_at.is_some(), "{held:?}");
    let over = accounting.wait_until_ended(held.id).await.unwrap();
    assert_eq!((begun.elapsed().as_secs(), over.cause.as_deref()), (7200, Some("max_duration_passed")));
}

#[tokio::test(start_paused = true)]
async fn a_wait_ends_at_its_limit() {
    let accounting = idle_gpus(&[0]);
    accounting.request_json("{}").unwrap();
    let waiter = accounting.request_json(r#"{"wait_limit_secs":41}"#).unwrap();
    let begun = Instant::now();
    let followed = accounting.follow_leases(&[waiter.id], FAR_FUTURE).await;
    assert_eq!(begun.elapsed(), Duration::from_secs(41));
    assert_eq!(followed.changed[0].cause.as_deref(), Some("wait_limit_passed"));
}

#[tokio::test(start_paused = true)]
async fn the_same_key_is_the_same_lease() {
    let accounting = idle_gpus(&[0, 1]);
    let (key, body) = (IdempotencyKey::random(), RequestBody::default());
    let (a, b) = (accounting.request(&body, &key).unwrap(), accounting.request(&body, &key).unwrap());
    assert_eq!((a.id, a.devices), (b.id, b.devices));
    assert_eq!(accounting.gpus().iter().map(|gpu| gpu.holders).sum::<usize>(), 1);
}
