//! Asking, waiting, confirming, giving back.

use std::sync::Arc;

use tokio::time::advance;

use super::*;

#[tokio::test(start_paused = true)]
async fn two_requests_in_a_row_get_two_gpus_and_the_third_waits() {
    let books = idle(&[3, 7]);
    let (a, b) = (books.ask("{}").unwrap(), books.ask("{}").unwrap());
    assert_eq!((a.state, numbers(&a), numbers(&b)), (LeaseState::Active, vec![3], vec![7]));
    assert_eq!((a.owner.as_str(), a.expires_at), ("ann", None));
    let c = books.ask("{}").unwrap();
    assert_eq!((c.state, c.queue_position), (LeaseState::Queued, Some(1)));
    assert!(c.reason.unwrap().contains("free"));
    assert_eq!(books.code(r#"{"queue":false}"#), "no_capacity");
    assert_eq!(books.code(r#"{"gpus":3}"#), "unsatisfiable");
    assert_eq!(books.code(r#"{"fraction":2}"#), "invalid");
    assert_eq!(books.code(r#"{"fraction":0.01}"#), "policy");
}

#[tokio::test(start_paused = true)]
async fn ten_tenths_fill_a_gpu_and_the_eleventh_is_refused() {
    let books = idle(&[0]);
    let tenth = r#"{"fraction":0.1,"queue":false}"#;
    for _ in 0..10 {
        assert_eq!(books.ask(tenth).unwrap().state, LeaseState::Active);
    }
    assert_eq!(books.code(tenth), "no_capacity");
    assert_eq!(books.code(r#"{"queue":false}"#), "no_capacity");
    let gpu = &books.gpus()[0];
    assert_eq!((gpu.promised, gpu.holders), (1.0, 10));
}

#[tokio::test(start_paused = true)]
async fn who_came_first_is_served_first_and_nobody_overtakes() {
    let books = idle(&[0]);
    let held = books.ask("{}").unwrap();
    let (first, second) = (books.ask("{}").unwrap(), books.ask("{}").unwrap());
    books.release(held.id).unwrap();
    assert_eq!((books.state_of(&first), books.state_of(&second)), (LeaseState::Active, LeaseState::Queued));
    assert_eq!(books.ask("{}").unwrap().queue_position, Some(2));
    assert_eq!(books.release(held.id).unwrap().state, LeaseState::Released, "twice is harmless");
    assert_eq!(books.release(99), None);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_hears_of_its_turn_when_it_comes() {
    let books = Arc::new(idle(&[0]));
    let held = books.ask("{}").unwrap();
    let waiter = books.ask("{}").unwrap();
    let following = {
        let (books, id) = (Arc::clone(&books), waiter.id);
        tokio::spawn(async move { (books.follow_leases(&[id], Duration::from_secs(3600)).await, Instant::now()) })
    };
    // Far beyond the patience for waiters nobody asks for.
    advance(Duration::from_secs(7)).await;
    tokio::time::sleep(Duration::from_secs(101)).await;
    assert_eq!(books.state_of(&waiter), LeaseState::Queued);
    let released = Instant::now();
    books.take_in(&summary(&[(0, 0.0, 0)]), None);
    books.release(held.id);
    let (followed, at) = following.await.unwrap();
    assert_eq!((followed.changed[0].state, at), (LeaseState::Active, released));
    assert_eq!(books.follow_leases(&[waiter.id, 99], FAR).await.unknown, [99]);
}

#[tokio::test(start_paused = true)]
async fn following_ends_after_its_time_and_a_waiter_nobody_asks_for_leaves() {
    let books = idle(&[0]);
    books.ask("{}").unwrap();
    let waiter = books.ask("{}").unwrap();
    let begun = Instant::now();
    assert_eq!(books.follow_leases(&[waiter.id], Duration::from_secs(40)).await, FollowResponse::default());
    assert_eq!(begun.elapsed(), Duration::from_secs(40));
    let over = books.ended(waiter.id).await.unwrap();
    assert_eq!((begun.elapsed(), over.cause.as_deref()), (Duration::from_secs(55), Some("abandoned")));
    assert_eq!(books.ended(99).await, None);
}

#[tokio::test(start_paused = true)]
async fn an_offer_is_held_five_seconds_and_then_the_next_one_has_it() {
    let books = idle(&[0]);
    let offered = books.ask(r#"{"hedged":true}"#).unwrap();
    let waiter = books.ask("{}").unwrap();
    assert_eq!((offered.state, waiter.state), (LeaseState::Offered, LeaseState::Queued));
    advance(Duration::from_secs(2)).await;
    let begun = Instant::now();
    let followed = books.follow_leases(&[waiter.id], FAR).await;
    assert_eq!((begun.elapsed(), followed.changed[0].state), (Duration::from_secs(3), LeaseState::Active));
    let late = books.confirm(offered.id, offered.token.unwrap()).unwrap_err();
    assert_eq!(late.code(), Some("ended"));
}

#[tokio::test(start_paused = true)]
async fn a_confirmed_offer_lives_without_heartbeats_until_its_longest_time_is_over() {
    let books = idle(&[0]);
    let offered = books.ask(r#"{"hedged":true,"max_duration_secs":7200,"ttl_secs":1}"#).unwrap();
    assert_eq!(books.confirm(offered.id, 99).unwrap_err().code(), Some("stale"));
    let begun = Instant::now();
    let held = books.confirm(offered.id, offered.token.unwrap()).unwrap();
    assert!(held.state == LeaseState::Active && held.expires_at.is_some(), "{held:?}");
    let over = books.ended(held.id).await.unwrap();
    assert_eq!((begun.elapsed().as_secs(), over.cause.as_deref()), (7200, Some("max_duration_passed")));
}

#[tokio::test(start_paused = true)]
async fn waiting_has_the_limit_it_was_given() {
    let books = idle(&[0]);
    books.ask("{}").unwrap();
    let waiter = books.ask(r#"{"wait_limit_secs":41}"#).unwrap();
    let begun = Instant::now();
    let followed = books.follow_leases(&[waiter.id], FAR).await;
    assert_eq!(begun.elapsed(), Duration::from_secs(41));
    assert_eq!(followed.changed[0].cause.as_deref(), Some("wait_limit_passed"));
}

#[tokio::test(start_paused = true)]
async fn the_same_key_is_the_same_lease() {
    let books = idle(&[0, 1]);
    let (key, body) = (IdempotencyKey::random(), RequestBody::default());
    let (a, b) = (books.request(&body, &key).unwrap(), books.request(&body, &key).unwrap());
    assert_eq!((a.id, a.devices), (b.id, b.devices));
    assert_eq!(books.gpus().iter().map(|gpu| gpu.holders).sum::<usize>(), 1);
}
