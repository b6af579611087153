//! Start and stop of the client, and errors of a client that was not started.

use gpupool_api::RequestBody;
use gpupool_client::{Client, ClientError, StatusUpdate};
use gpupool_testkit::{ProxyMode, within_deadline};

use crate::common::{Fleet, quick_polling, request_whole_gpu, start_client};

#[tokio::test(flavor = "multi_thread")]
async fn a_client_reports_that_it_is_not_started_and_can_be_restarted() {
    let fleet = Fleet::start(&["2xH100"]).await;
    let client = fleet.builder().build().unwrap();
    let printed = client.request(RequestBody::default()).await.unwrap_err().to_string();
    assert_eq!(printed, "Client must be started before requesting GPU");
    let printed = client.pool_status().unwrap_err().to_string();
    assert_eq!(printed, "Client must be started before getting pool status");
    let printed = client.detailed_metrics().unwrap_err().to_string();
    assert_eq!(printed, "Client must be started before getting metrics");
    for _ in 0..2 {
        client.start().await.unwrap();
        assert_eq!(client.start().await.unwrap_err().to_string(), "Client is already started");
        let lease = request_whole_gpu(&client).await;
        client.stop().await;
        fleet.wait_until_empty().await;
        assert!(!client.is_started());
        drop(lease);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_or_revoked_lease_is_lost_and_its_release_reports_that() {
    let fleet = Fleet::start(&["2xH100"]).await;
    let client = start_client(fleet.builder()).await;
    // The renewal interval of twenty minutes cannot reveal the loss.
    let lasting =
        |max_duration_secs| RequestBody { ttl_secs: Some(3600.0), max_duration_secs, ..RequestBody::default() };
    let timed = within_deadline("a GPU", client.request(lasting(Some(0.3)))).await.unwrap();
    let lost = within_deadline("its end", timed.wait_until_lost()).await.to_string();
    assert!(lost.contains("maximum duration"), "{lost}");
    assert!(matches!(timed.release().await, Err(ClientError::Stale { .. })));
    let taken = within_deadline("a GPU", client.request(lasting(None))).await.unwrap();
    fleet.agents[0].client_unix().revoke(taken.id(), 0.0).await.unwrap();
    assert!(taken.check_held().is_ok(), "the loss is not known yet");
    let refused = within_deadline("giving it back", taken.release()).await.unwrap_err();
    assert!(matches!(refused, ClientError::Stale { .. }), "{refused}");
    assert_eq!(client.pool_status().unwrap().active_workers, 0);
    fleet.wait_until_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn updates_are_sent_as_they_happen() {
    let fleet = Fleet::start(&["1xH100"]).await;
    let client = fleet.builder().build().unwrap();
    let mut updates = client.updates();
    client.start().await.unwrap();
    let next = async |updates: &mut gpupool_client::StatusUpdateStream| loop {
        match within_deadline("an update", updates.next()).await.unwrap() {
            StatusUpdate::Statistics { gpus, .. } => assert_eq!(gpus.len(), 1),
            other => return other,
        }
    };
    assert!(matches!(next(&mut updates).await, StatusUpdate::EndpointUp { .. }));
    let lease = request_whole_gpu(&client).await;
    let StatusUpdate::Assigned { worker_id, gpu_ids, .. } = next(&mut updates).await else { panic!("not assigned") };
    assert_eq!((worker_id.as_str(), gpu_ids.as_slice()), (lease.worker_id(), &[0][..]));
    let waits = tokio::spawn({
        let client = client.clone();
        async move { client.request(RequestBody::default()).await }
    });
    assert!(matches!(next(&mut updates).await, StatusUpdate::Blocked { .. }));
    lease.release().await.unwrap();
    assert!(matches!(next(&mut updates).await, StatusUpdate::Released { .. }));
    let _lease = within_deadline("its turn", waits).await.unwrap().unwrap();
    assert!(matches!(next(&mut updates).await, StatusUpdate::Unblocked { .. }));
    assert!(matches!(next(&mut updates).await, StatusUpdate::Assigned { .. }));
    fleet.set_proxy_mode(0, ProxyMode::Reset);
    let StatusUpdate::EndpointDown { error, .. } = next(&mut updates).await else { panic!("not told that it is down") };
    assert!(error.contains("does not answer"), "{error}");
    fleet.set_proxy_mode(0, ProxyMode::Good);
    client.trigger_endpoint_recovery(fleet.paths[0].address()).await.unwrap();
    assert!(matches!(next(&mut updates).await, StatusUpdate::EndpointUp { .. }));
}

#[tokio::test(flavor = "multi_thread")]
async fn ids_and_numbers_are_as_documented() {
    let fleet = Fleet::start(&["2xH100", "2xH100"]).await;
    let client = fleet.client().await;
    let lease = request_whole_gpu(&client).await;
    let endpoint = client.endpoints_info().unwrap()[0].clone();
    assert!(endpoint.endpoint_id.starts_with("127.0.0.1_"), "hosts are not unique: {}", endpoint.endpoint_id);
    assert_eq!(lease.global_gpu_id().unwrap(), format!("{}:{}", lease.endpoint_id(), lease.gpu_id().unwrap()));
    let status = client.pool_status().unwrap();
    assert_eq!((status.total_gpus, status.available_gpus), (4, 3));
    assert_eq!((status.total_endpoints, status.healthy_endpoints), (2, 2));
    assert_eq!(status.gpu_assignments[&lease.global_gpu_id().unwrap()][0].worker_id, lease.worker_id());
    let metrics = serde_json::to_value(client.detailed_metrics().unwrap()).unwrap();
    assert_eq!(metrics["pool_summary"]["efficiency_percent"], 25.0);
    assert_eq!(metrics["load_balancer"]["strategy_name"], "availability");
    assert_eq!(metrics["load_balancer"]["total_requests"], 1);
    assert_eq!(metrics["load_balancer"]["success_rate"], 100.0);
    assert_eq!(metrics["thresholds"]["memory_threshold_percent"], 80.0);
    let detail = &metrics["endpoints"]["details"][&endpoint.endpoint_id];
    assert_eq!(detail["total_gpus"], 2);
    assert_eq!(detail["is_healthy"], true);
    assert!(detail["avg_response_time_ms"].as_f64().unwrap() > 0.0);
    let recovery = client.error_recovery_status().unwrap();
    assert_eq!((recovery.healthy_endpoints.len(), recovery.degraded_endpoints.len()), (2, 0));
    assert!(recovery.to_string().starts_with("=== Error Recovery Status ===\nDegradation Status: None (2/2 endpoints"));
    assert!(!client.trigger_endpoint_recovery("nobody").await.unwrap());
    assert!(client.trigger_endpoint_recovery(&endpoint.endpoint_id).await.unwrap());
    lease.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_settings_are_reported_with_the_allowed_values() {
    let printed = |builder: gpupool_client::ClientBuilder| builder.build().unwrap_err().to_string();
    let client = Client::builder;
    assert!(
        printed(client().memory_threshold(101.0))
            .contains("memory_threshold is 101; it must be a number from 0 to 100")
    );
    assert!(printed(client().utilization_threshold(f64::NAN)).contains("utilization_threshold is NaN"));
    assert!(printed(client().endpoint("localhost:8000")).contains("http://localhost:8000"));
    assert!(printed(client().endpoints(" , ")).contains("at least one endpoint"));
    let token = gpupool_client::SecretString::new("x");
    assert!(printed(client().token_for("nobody", token)).contains("nobody"));
    let client = start_client(quick_polling(client().endpoints("http://127.0.0.1:1"))).await;
    let bad = RequestBody { fraction: Some(1.5), ..RequestBody::default() };
    let error = client.request(bad).await.unwrap_err();
    assert!(error.code() == Some("invalid") && error.to_string().contains("fraction is 1.5"), "{error}");
}
