//! Load balancing follows the strategy.

use gpupool_api::RequestBody;
use gpupool_client::{Balancing, Client};

use crate::common::{Fleet, quick_polling, request_whole_gpu, start_client};

/// Returns the number of grants of each endpoint.
fn grants_per_endpoint(client: &Client) -> Vec<u64> {
    let metrics = client.detailed_metrics().unwrap();
    let endpoints = client.endpoints_info().unwrap();
    endpoints.iter().map(|endpoint| metrics.endpoints.details[&endpoint.endpoint_id].granted).collect()
}

/// Returns Pearson's chi-square statistic of the counts.
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

/// Value that chance exceeds once in a thousand cases with two degrees of freedom.
const CHI_SQUARE_LIMIT: f64 = 13.82;

async fn grant_counts(fleet: &Fleet, strategy: Balancing, clients: usize, each: usize) -> Vec<u64> {
    let mut sum = vec![0; fleet.agents.len()];
    for _ in 0..clients {
        let client = start_client(fleet.builder().strategy(strategy)).await;
        for _ in 0..each {
            request_whole_gpu(&client).await.release().await.unwrap();
        }
        for (all, here) in sum.iter_mut().zip(grants_per_endpoint(&client)) {
            *all += here;
        }
        client.stop().await;
    }
    assert_eq!(sum.iter().sum::<u64>(), (clients * each) as u64);
    sum
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_distributed_by_the_strategy() {
    let fleet = Fleet::start(&["8xH100", "4xH100", "4xH100"]).await;
    // Several clients average out a lucky first endpoint.
    let even = grant_counts(&fleet, Balancing::RoundRobin, 5, 60).await;
    assert!(chi_square(&even, &[1.0, 1.0, 1.0]) < CHI_SQUARE_LIMIT, "{even:?}");
    let weighted = grant_counts(&fleet, Balancing::Weighted, 5, 60).await;
    assert!(chi_square(&weighted, &[2.0, 1.0, 1.0]) < CHI_SQUARE_LIMIT, "{weighted:?}");
    fleet.wait_until_empty().await;
    fleet.check_audit().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn availability_keeps_shares_level_and_fills_every_gpu() {
    let fleet = Fleet::start(&["8xH100", "4xH100", "4xH100"]).await;
    let client = fleet.client().await;
    let mut held = Vec::new();
    for _ in 0..8 {
        held.push(request_whole_gpu(&client).await);
    }
    // Half of all GPUs is half of each endpoint.
    assert_eq!(grants_per_endpoint(&client), [4, 2, 2]);
    for _ in 0..8 {
        held.push(request_whole_gpu(&client).await);
    }
    assert_eq!(grants_per_endpoint(&client), [8, 4, 4]);
    let mut ids: Vec<String> = held.iter().map(|lease| lease.global_gpu_id().unwrap()).collect();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 16, "two never share: {ids:?}");
    let refused = client.request(RequestBody { queue: Some(false), ..RequestBody::default() }).await.unwrap_err();
    assert_eq!(refused.code(), Some("no_capacity"), "{refused}");
    drop(held);
    fleet.wait_until_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_requests_are_distributed_before_the_next_poll() {
    let fleet = Fleet::start(&["4xH100", "4xH100"]).await;
    let client = start_client(quick_polling(Client::builder().endpoints(fleet.addresses()))).await;
    let received: Vec<_> = (0..8)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move { client.request(RequestBody::default()).await.unwrap() })
        })
        .collect();
    let mut held = Vec::new();
    for one in received {
        held.push(one.await.unwrap());
    }
    assert_eq!(grants_per_endpoint(&client), [4, 4]);
    drop(held);
    fleet.wait_until_empty().await;
}
