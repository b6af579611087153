//! The authority of an endpoint is detected once and remembered.

use std::collections::BTreeSet;
use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_client::{ClientError, LeaseAuthority, LeaseLost};
use gpupool_testkit::{ProxyMode, within_deadline};

use crate::common::{Fleet, request_whole_gpu, wait_for_health};

#[tokio::test(flavor = "multi_thread")]
async fn the_client_accounts_for_leases_of_a_statistics_server() {
    let fleet = Fleet::start(&["2xH100"]).await;
    fleet.set_proxy_mode(0, ProxyMode::StatisticsOnly);
    let client = fleet.client().await;
    assert_eq!(client.pool_status().unwrap().authority, LeaseAuthority::Client);
    let (first, second) = (request_whole_gpu(&client).await, request_whole_gpu(&client).await);
    assert_ne!(first.gpu_id(), second.gpu_id(), "two in a row get two GPUs");
    let waits = tokio::spawn({
        let client = client.clone();
        async move { client.request(RequestBody::default()).await }
    });
    let full = RequestBody { queue: Some(false), ..RequestBody::default() };
    assert_eq!(client.request(full).await.unwrap_err().code(), Some("no_capacity"));
    let freed = first.gpu_id();
    first.release().await.unwrap();
    let third = within_deadline("what came free", waits).await.unwrap().unwrap();
    assert_eq!(third.gpu_id(), freed);
    // The server does not know the lease.
    assert_eq!(fleet.agents[0].client().pool().await.unwrap().active, 0);
    let parts = [(); 10].map(|()| RequestBody { fraction: Some(0.1), queue: Some(false), ..RequestBody::default() });
    second.release().await.unwrap();
    let mut held = Vec::new();
    for part in parts {
        held.push(client.request(part).await.unwrap());
    }
    let on: BTreeSet<_> = held.iter().map(|lease| lease.gpu_id()).collect();
    assert_eq!(on.len(), 1, "ten tenths fill one GPU");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_client_never_accounts_for_leases_of_an_agent() {
    let fleet = Fleet::start(&["1xH100"]).await;
    let client = fleet.client().await;
    assert_eq!(client.pool_status().unwrap().authority, LeaseAuthority::Agent);
    request_whole_gpu(&client).await.release().await.unwrap();
    // A proxy hides the routes or refuses every request.
    for path in [ProxyMode::StatisticsOnly, ProxyMode::Status(401), ProxyMode::Status(500)] {
        fleet.set_proxy_mode(0, path);
        let body = RequestBody { wait_limit_secs: Some(0.5), ..RequestBody::default() };
        let error = client.request(body).await.unwrap_err();
        assert_eq!(client.pool_status().unwrap().authority, LeaseAuthority::Agent, "{path:?}: {error}");
        fleet.set_proxy_mode(0, ProxyMode::Good);
        client.trigger_endpoint_recovery(fleet.paths[0].address()).await.unwrap();
        wait_for_health(&client, 0, true).await;
    }
    client.stop().await;
    fleet.set_proxy_mode(0, ProxyMode::StatisticsOnly);
    client.start().await.unwrap();
    let body = RequestBody { wait_limit_secs: Some(0.5), ..RequestBody::default() };
    assert!(client.request(body).await.is_err(), "remembered also by a client that was stopped");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stale_assignment_is_reclaimed_and_its_next_use_fails() {
    let fleet = Fleet::start(&["1xH100", "1xH100"]).await;
    fleet.set_proxy_mode(1, ProxyMode::StatisticsOnly);
    for number in 0..2 {
        let one =
            crate::common::quick_polling(gpupool_client::Client::builder().endpoint(fleet.paths[number].address()));
        let client = crate::common::start_client(one.stale_age(Duration::from_millis(300))).await;
        let lease = client.request(RequestBody { ttl_secs: Some(1.0), ..RequestBody::default() }).await.unwrap();
        lease.check_held().unwrap();
        let LeaseLost::Ended { cause, .. } = within_deadline("it to be lost", lease.wait_until_lost()).await else {
            panic!("not ended")
        };
        assert_eq!(cause.as_deref(), Some("max_duration_passed"));
        let error = lease.release().await.unwrap_err();
        assert!(matches!(error, ClientError::Stale { .. }), "{error}");
        assert_eq!(client.pool_status().unwrap().active_workers, 0);
        client.stop().await;
    }
}
