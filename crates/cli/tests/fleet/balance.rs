//! The strategy really decides.

use gpupool_api::RequestBody;
use gpupool_client::{Balancing, Client};

use crate::common::{Fleet, quick, started, whole};

/// How often each endpoint granted something.
fn granted(client: &Client) -> Vec<u64> {
    let metrics = client.detailed_metrics().unwrap();
    let endpoints = client.endpoints_info().unwrap();
    endpoints.iter().map(|endpoint| metrics.endpoints.details[&endpoint.endpoint_id].granted).collect()
}

/// How far counts are from what they should be: Pearson's statistic.
fn chi_square(counts: &[u64], parts: &[f64]) -> f64 {
    let (all, whole): (u64, f64) = (counts.iter().sum(), parts.iter().sum());
    counts
        .iter()
        .zip(parts)
        .map(|(count, part)| {
            let expected = all as f64 * part / whole;
            (*count as f64 - expected).powi(2) / expected
        })
        .sum()
}

/// The value that two degrees of freedom pass by chance once in a thousand times.
const RARE: f64 = 13.82;

async fn split(fleet: &Fleet, strategy: Balancing, clients: usize, each: usize) -> Vec<u64> {
    let mut sum = vec![0; fleet.agents.len()];
    for _ in 0..clients {
        let client = started(fleet.builder().strategy(strategy)).await;
        for _ in 0..each {
            whole(&client).await.release().await.unwrap();
        }
        for (all, here) in sum.iter_mut().zip(granted(&client)) {
            *all += here;
        }
        client.stop().await;
    }
    assert_eq!(sum.iter().sum::<u64>(), (clients * each) as u64);
    sum
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_split_as_the_strategy_says() {
    let fleet = Fleet::of(&["8xH100", "4xH100", "4xH100"]).await;
    // Several clients, so that it is not one that begins at a lucky place.
    let even = split(&fleet, Balancing::RoundRobin, 5, 60).await;
    assert!(chi_square(&even, &[1.0, 1.0, 1.0]) < RARE, "{even:?}");
    let weighted = split(&fleet, Balancing::Weighted, 5, 60).await;
    assert!(chi_square(&weighted, &[2.0, 1.0, 1.0]) < RARE, "{weighted:?}");
    fleet.is_left_empty().await;
    fleet.is_clean().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn availability_keeps_the_shares_level_and_fills_every_gpu() {
    let fleet = Fleet::of(&["8xH100", "4xH100", "4xH100"]).await;
    let client = fleet.client().await;
    let mut held = Vec::new();
    for _ in 0..8 {
        held.push(whole(&client).await);
    }
    // Half of all is half of each.
    assert_eq!(granted(&client), [4, 2, 2]);
    for _ in 0..8 {
        held.push(whole(&client).await);
    }
    assert_eq!(granted(&client), [8, 4, 4]);
    let mut ids: Vec<String> = held.iter().map(|lease| lease.global_gpu_id().unwrap()).collect();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 16, "two never share: {ids:?}");
    let refused = client.request(RequestBody { queue: Some(false), ..RequestBody::default() }).await.unwrap_err();
    assert_eq!(refused.code(), Some("no_capacity"), "{refused}");
    drop(held);
    fleet.is_left_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_at_once_are_spread_before_anybody_has_looked_again() {
    let fleet = Fleet::of(&["4xH100", "4xH100"]).await;
    let client = started(quick(Client::builder().endpoints(fleet.addresses()))).await;
    let asked: Vec<_> = (0..8)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move { client.request(RequestBody::default()).await.unwrap() })
        })
        .collect();
    let mut held = Vec::new();
    for one in asked {
        held.push(one.await.unwrap());
    }
    assert_eq!(granted(&client), [4, 4]);
    drop(held);
    fleet.is_left_empty().await;
}
