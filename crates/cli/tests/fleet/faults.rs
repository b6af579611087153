//! An endpoint that fails, in whatever way, costs the others nothing, and comes back.

use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_client::{Client, ClientError, DegradationLevel};
use gpupool_testkit::{ProxyMode, eventually, within_deadline};

use crate::common::{Fleet, is_healthy, quick, started, whole};

const WAYS: [ProxyMode; 6] = [
    ProxyMode::Silent,
    ProxyMode::Reset,
    ProxyMode::Status(500),
    ProxyMode::Status(503),
    ProxyMode::Garbage,
    ProxyMode::HalfAnswers,
];

#[tokio::test(flavor = "multi_thread")]
async fn whatever_way_an_endpoint_fails_the_others_serve_and_it_comes_back() {
    let fleet = Fleet::of(&["4xH100", "1xH100"]).await;
    let client = fleet.client().await;
    for way in WAYS {
        fleet.set(0, way);
        for _ in 0..6 {
            whole(&client).await.release().await.unwrap();
        }
        is_healthy(&client, 0, false).await;
        let recovery = client.error_recovery_status().unwrap();
        assert_eq!(recovery.degradation_manager.degradation, DegradationLevel::Partial, "{way:?}");
        assert_eq!(client.health().unwrap().status, "degraded");
        let report = recovery.to_string();
        assert!(report.contains("Degradation Status: Partial (1/2 endpoints healthy)"), "{report}");
        fleet.set(0, ProxyMode::Good);
        assert!(client.trigger_endpoint_recovery(fleet.paths[0].address()).await.unwrap());
        is_healthy(&client, 0, true).await;
    }
    fleet.is_left_empty().await;
    fleet.is_clean().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_endpoint_is_asked_and_a_dead_one_does_not_hold_up_the_start() {
    let fleet = Fleet::of(&["1xH100"]).await;
    fleet.set(0, ProxyMode::Slow(Duration::from_millis(30)));
    let dead = "http://127.0.0.1:1,http://no-such-host.invalid:8000,http://192.0.2.1:8000";
    let client = started(quick(Client::builder().endpoints(format!("{dead},{}", fleet.addresses())))).await;
    let lease = whole(&client).await;
    assert_eq!(lease.gpu_id(), Some(0));
    let status = client.pool_status().unwrap();
    assert_eq!((status.total_endpoints, status.healthy_endpoints), (4, 1));
    lease.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_request_survives_the_loss_of_endpoints_and_is_served_where_it_can_be() {
    let mut fleet = Fleet::of(&["1xH100", "1xH100", "1xH100"]).await;
    let held = fleet.fill().await;
    let client = fleet.client().await;
    let asked = tokio::spawn({
        let client = client.clone();
        async move { client.request(RequestBody::default()).await }
    });
    for number in 0..3 {
        eventually("it to wait everywhere", async || (fleet.waiting_at(number).await == 1).then_some(())).await;
    }
    fleet.agents[0].kill9().await;
    fleet.set(1, ProxyMode::Silent);
    is_healthy(&client, 0, false).await;
    // Killed and started again: the place in the queue is kept, or taken anew.
    fleet.agents[2].restart().await;
    fleet.agents[2].client().release(held[2][0]).await.unwrap();
    let lease = within_deadline("a GPU", asked).await.unwrap().unwrap();
    assert_eq!(lease.endpoint_id(), client.endpoints_info().unwrap()[2].endpoint_id);
    lease.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_is_paused_is_done_without_and_its_late_grants_are_given_back() {
    let fleet = Fleet::of(&["8xH100", "1xH100"]).await;
    let client = fleet.client().await;
    fleet.agents[0].pause();
    // The first ones may have been sent there; they are not lost, and not waited for.
    for _ in 0..5 {
        whole(&client).await.release().await.unwrap();
    }
    is_healthy(&client, 0, false).await;
    fleet.agents[0].resume();
    client.trigger_endpoint_recovery(fleet.paths[0].address()).await.unwrap();
    is_healthy(&client, 0, true).await;
    fleet.is_left_empty().await;
    fleet.is_clean().await;
    let records = gpupool_testkit::audit::fetch_all_records(&fleet.agents[0].client()).await.unwrap();
    let ends = records.iter().filter(|record| record.event == "ended");
    assert!(
        ends.into_iter().all(|end| end.cause.as_deref() == Some("by_owner")),
        "none waited for its ttl: {records:#?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn with_nobody_to_ask_that_is_said_and_what_was_queued_runs_when_somebody_is_back() {
    let mut fleet = Fleet::of(&["1xH100", "1xH100"]).await;
    let client = fleet.client().await;
    for agent in &fleet.agents {
        agent.kill9().await;
    }
    is_healthy(&client, 0, false).await;
    is_healthy(&client, 1, false).await;
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
async fn one_endpoint_that_fails_is_named_with_when_it_is_looked_at_again() {
    let fleet = Fleet::of(&["1xH100"]).await;
    let client = started(quick(Client::builder().endpoint(fleet.paths[0].address()))).await;
    assert!(!client.is_multi_endpoint_mode());
    fleet.set(0, ProxyMode::Reset);
    is_healthy(&client, 0, false).await;
    let error = client.request(RequestBody::default()).await.unwrap_err();
    assert!(matches!(&error, ClientError::BreakerOpen { endpoint_id, .. } if endpoint_id == "127.0.0.1"), "{error}");
}
