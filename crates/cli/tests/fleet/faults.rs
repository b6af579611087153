//! A failing endpoint does not affect the others, and recovers.

use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_client::{Client, ClientError, DegradationLevel};
use gpupool_testkit::{ProxyMode, eventually, within_deadline};

use crate::common::{Fleet, quick_polling, request_whole_gpu, start_client, wait_for_health};

const FAULTS: [ProxyMode; 6] = [
    ProxyMode::Silent,
    ProxyMode::Reset,
    ProxyMode::Status(500),
    ProxyMode::Status(503),
    ProxyMode::Garbage,
    ProxyMode::HalfAnswers,
];

#[tokio::test(flavor = "multi_thread")]
async fn every_kind_of_fault_leaves_the_other_endpoints_working() {
    let fleet = Fleet::start(&["4xH100", "1xH100"]).await;
    let client = fleet.client().await;
    for way in FAULTS {
        fleet.set_proxy_mode(0, way);
        for _ in 0..6 {
            request_whole_gpu(&client).await.release().await.unwrap();
        }
        wait_for_health(&client, 0, false).await;
        let recovery = client.error_recovery_status().unwrap();
        assert_eq!(recovery.degradation_manager.degradation, DegradationLevel::Partial, "{way:?}");
        assert_eq!(client.health().unwrap().status, "degraded");
        let report = recovery.to_string();
        assert!(report.contains("Degradation Status: Partial (1/2 endpoints healthy)"), "{report}");
        fleet.set_proxy_mode(0, ProxyMode::Good);
        assert!(client.trigger_endpoint_recovery(fleet.paths[0].address()).await.unwrap());
        wait_for_health(&client, 0, true).await;
    }
    fleet.wait_until_empty().await;
    fleet.check_audit().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_endpoint_is_used_and_a_dead_one_does_not_delay_the_start() {
    let fleet = Fleet::start(&["1xH100"]).await;
    fleet.set_proxy_mode(0, ProxyMode::Slow(Duration::from_millis(30)));
    let dead = "http://127.0.0.1:1,http://no-such-host.invalid:8000,http://192.0.2.1:8000";
    let client =
        start_client(quick_polling(Client::builder().endpoints(format!("{dead},{}", fleet.addresses())))).await;
    let lease = request_whole_gpu(&client).await;
    assert_eq!(lease.gpu_id(), Some(0));
    let status = client.pool_status().unwrap();
    assert_eq!((status.total_endpoints, status.healthy_endpoints), (4, 1));
    lease.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_request_survives_the_loss_of_endpoints() {
    let mut fleet = Fleet::start(&["1xH100", "1xH100", "1xH100"]).await;
    let held = fleet.lease_all_gpus().await;
    let client = fleet.client().await;
    let received = tokio::spawn({
        let client = client.clone();
        async move { client.request(RequestBody::default()).await }
    });
    for number in 0..3 {
        eventually("it to wait everywhere", async || (fleet.waiting_at(number).await == 1).then_some(())).await;
    }
    fleet.agents[0].kill9().await;
    fleet.set_proxy_mode(1, ProxyMode::Silent);
    wait_for_health(&client, 0, false).await;
    // After a restart the queue position is kept or requested again.
    fleet.agents[2].restart().await;
    fleet.agents[2].client().release(held[2][0]).await.unwrap();
    let lease = within_deadline("a GPU", received).await.unwrap().unwrap();
    assert_eq!(lease.endpoint_id(), client.endpoints_info().unwrap()[2].endpoint_id);
    lease.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn late_grants_of_a_paused_agent_are_released() {
    let fleet = Fleet::start(&["8xH100", "1xH100"]).await;
    let client = fleet.client().await;
    fleet.agents[0].pause();
    // The first requests may have been sent there; they are neither lost nor awaited.
    for _ in 0..5 {
        request_whole_gpu(&client).await.release().await.unwrap();
    }
    wait_for_health(&client, 0, false).await;
    fleet.agents[0].resume();
    client.trigger_endpoint_recovery(fleet.paths[0].address()).await.unwrap();
    wait_for_health(&client, 0, true).await;
    fleet.wait_until_empty().await;
    fleet.check_audit().await;
    let records = gpupool_testkit::audit::fetch_all_records(&fleet.agents[0].client()).await.unwrap();
    let ends = records.iter().filter(|record| record.event == "ended");
    assert!(
        ends.into_iter().all(|end| end.cause.as_deref() == Some("by_owner")),
        "none waited for its ttl: {records:#?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_reachable_agent_requests_are_queued_until_one_returns() {
    let mut fleet = Fleet::start(&["1xH100", "1xH100"]).await;
    let client = fleet.client().await;
    for agent in &fleet.agents {
        agent.kill9().await;
    }
    wait_for_health(&client, 0, false).await;
    wait_for_health(&client, 1, false).await;
    let error = client.request(RequestBody::default()).await.unwrap_err();
    assert!(matches!(&error, ClientError::AllEndpointsUnavailable { causes } if causes.len() == 2), "{error}");
    assert!(client.error_recovery_status().unwrap().degradation_manager.is_fully_degraded);
    let queued = tokio::spawn({
        let client = client.clone();
        async move { client.queue_request_for_retry(|| client.request(RequestBody::default())).await }
    });
    eventually("it to be queued", async || {
        let queued = client.error_recovery_status().unwrap().degradation_manager.queued_requests;
        (queued == 1).then_some(())
    })
    .await;
    fleet.agents[1].restart().await;
    client.trigger_endpoint_recovery(fleet.paths[1].address()).await.unwrap();
    within_deadline("the queued request", queued).await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_endpoint_is_reported_with_its_next_retry() {
    let fleet = Fleet::start(&["1xH100"]).await;
    let client = start_client(quick_polling(Client::builder().endpoint(fleet.paths[0].address()))).await;
    assert!(!client.is_multi_endpoint_mode());
    fleet.set_proxy_mode(0, ProxyMode::Reset);
    wait_for_health(&client, 0, false).await;
    let error = client.request(RequestBody::default()).await.unwrap_err();
    assert!(matches!(&error, ClientError::BreakerOpen { endpoint_id, .. } if endpoint_id == "127.0.0.1"), "{error}");
}
