//! Truncated, malformed, late and endless responses, busy servers and redirects: each gives a helpful error, and no
//! request takes effect twice.

use std::time::Duration;

use crate::common::{
    ScriptedReply, ScriptedServer, json_reply, lease, problem_reply, problem_with_headers, response, within_deadline,
};
use gpupool_api::RequestBody;
use gpupool_api::lease::{FollowResponse, LeaseState};
use gpupool_api::tokens::NewToken;
use gpupool_client::{AgentClient, ClientError, IdempotencyKey, SecretString};

fn truncated_lease() -> ScriptedReply {
    let whole =
        response("201 Created", "application/json", "", &serde_json::to_string(&lease(1, LeaseState::Active)).unwrap());
    ScriptedReply::ThenClose(whole[..whole.len() - 20].to_owned())
}

#[tokio::test]
async fn a_truncated_response_to_a_request_is_retried_under_the_same_key() {
    let server = ScriptedServer::start(|number, _| match number {
        0 => truncated_lease(),
        _ => json_reply("201 Created", &lease(1, LeaseState::Active)),
    });
    let server = server.await;
    let lease = within_deadline("a lease", server.client().request(&RequestBody::default())).await.unwrap();
    assert_eq!(lease.id, 1);
    let received = server.received();
    let keys: Vec<_> = received.iter().map(|request| request.header("idempotency-key").unwrap()).collect();
    assert_eq!(keys.len(), 2);
    assert_eq!(keys[0], keys[1]);
    let mine = IdempotencyKey::new("job 17").unwrap();
    server.client().request_as(&RequestBody::default(), &mine).await.unwrap();
    assert_eq!(server.received()[2].header("idempotency-key"), Some("job 17"));
}

#[tokio::test]
async fn a_truncated_response_to_a_new_token_is_not_retried() {
    let server = ScriptedServer::start(|_, _| truncated_lease()).await;
    let new = NewToken { owner: "alice".into(), admin: false, read_only: false };
    let error = within_deadline("an error", server.client().create_token(&new)).await.unwrap_err();
    assert!(matches!(error, ClientError::Unreachable { .. }), "{error}");
    assert_eq!(server.received().len(), 1);
}

#[tokio::test]
async fn a_retry_time_of_the_server_is_respected() {
    let server = ScriptedServer::start(|number, _| match number {
        0 => problem_with_headers(503, "busy", "retry-after: 0\r\n"),
        1 => problem_with_headers(429, "too_many_waiting", "retry-after: 0\r\n"),
        _ => json_reply("200 OK", &lease(1, LeaseState::Active)),
    });
    let server = server.await;
    within_deadline("a lease", server.client().renew(1, 41)).await.unwrap();
    assert_eq!(server.received().len(), 3);
}

#[tokio::test]
async fn retries_of_a_busy_server_are_limited() {
    let server = ScriptedServer::start(|_, _| problem_with_headers(503, "busy", "retry-after: 0\r\n")).await;
    let error = within_deadline("an error", server.client().pool()).await.unwrap_err();
    assert_eq!(error.code(), Some("busy"));
    assert_eq!(server.received().len(), 4);
    let patient = ScriptedServer::start(|_, _| problem_with_headers(503, "busy", "retry-after: 3600\r\n")).await;
    assert_eq!(within_deadline("an error", patient.client().pool()).await.unwrap_err().code(), Some("busy"));
    assert_eq!(patient.received().len(), 1, "an hour exceeds the time limit of retries");
}

#[tokio::test]
async fn a_release_at_an_absent_agent_returns_the_last_error() {
    let absent = AgentClient::new("http://127.0.0.1:1".parse().unwrap()).unwrap();
    // Longer than one call with all its retries, whose pauses add up to 350 ms at most.
    let error = within_deadline("the answer", absent.release_within(1, Duration::from_millis(500))).await.unwrap_err();
    assert!(matches!(error, ClientError::Unreachable { .. }), "{error}");
}

#[tokio::test]
async fn a_refusal_is_final() {
    for (status, code) in [(409, "no_capacity"), (503, "not_durable"), (422, "invalid"), (401, "token_needed")] {
        let server = ScriptedServer::start(move |_, _| problem_reply(status, code)).await;
        let error = server.client().request(&RequestBody::default()).await.unwrap_err();
        assert_eq!((error.code(), error.to_string()), (Some(code), format!("it is {code}")));
        assert_eq!(server.received().len(), 1);
    }
}

#[tokio::test]
async fn a_web_page_is_not_an_agent() {
    for status in ["200 OK", "404 Not Found", "500 Oops"] {
        let server =
            ScriptedServer::start(move |_, _| ScriptedReply::Send(response(status, "text/html", "", "<html>hello")))
                .await;
        let error = server.client().pool().await.unwrap_err();
        assert!(matches!(error, ClientError::NotAnAgent { .. }), "{error}");
        assert!(error.to_string().contains("<html>hello") && error.to_string().contains("gpupool serve"), "{error}");
    }
}

#[tokio::test]
async fn a_server_without_http_is_unreachable() {
    let server = ScriptedServer::start(|_, _| ScriptedReply::ThenClose("SSH-2.0-OpenSSH_9.2\r\n\r\n".into())).await;
    let error = within_deadline("an error", server.client().pool()).await.unwrap_err();
    assert!(matches!(error, ClientError::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains("invalid HTTP"), "{error}");
}

#[tokio::test]
async fn a_redirect_is_named_and_not_followed() {
    let elsewhere = ScriptedServer::start(|_, _| json_reply("200 OK", &lease(1, LeaseState::Active))).await;
    let location = format!("location: {}/v1/leases/1\r\n", elsewhere.endpoint);
    let server = ScriptedServer::start(move |_, _| {
        ScriptedReply::Send(response("307 Temporary Redirect", "text/html", &location, ""))
    });
    let server = server.await;
    let error = server.client().follow(1, Duration::ZERO).await.unwrap_err();
    assert!(matches!(error, ClientError::NotAnAgent { status: 307, .. }), "{error}");
    assert!(error.to_string().contains(&elsewhere.endpoint.to_string()), "{error}");
    assert!(elsewhere.received().is_empty());
}

#[tokio::test]
async fn an_endless_response_is_refused() {
    let chunk = format!("100000\r\n{}\r\n", " ".repeat(0x10_0000));
    let server = ScriptedServer::start(move |_, _| {
        ScriptedReply::Endlessly(crate::common::chunked_response("application/json", &[" "]), chunk.clone())
    });
    let server = server.await;
    let error = within_deadline("an error", server.client().pool()).await.unwrap_err();
    assert!(matches!(error, ClientError::NotAnAgent { .. }), "{error}");
    assert!(error.to_string().contains("larger than"), "{error}");
}

#[tokio::test]
async fn a_silent_server_times_out() {
    let server = ScriptedServer::start(|_, _| ScriptedReply::ThenSilence(String::new())).await;
    let client =
        AgentClient::builder(server.endpoint.clone()).response_timeout(Duration::from_millis(50)).build().unwrap();
    let error = within_deadline("an error", client.pool()).await.unwrap_err();
    assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
    assert_eq!(server.received().len(), 1);
    let error = within_deadline("an error", client.events(None)).await.unwrap_err();
    assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
}

#[tokio::test]
async fn an_unknown_lease_counts_as_released_but_a_missing_page_does_not() {
    let server = ScriptedServer::start(|_, _| problem_reply(404, "unknown_lease")).await;
    assert_eq!(server.client().release(1).await.unwrap(), None);
    let server =
        ScriptedServer::start(|_, _| ScriptedReply::Send(response("404 Not Found", "text/html", "", "no such page")))
            .await;
    assert!(matches!(server.client().release(1).await, Err(ClientError::NotAnAgent { status: 404, .. })));
}

#[tokio::test]
async fn an_unhealthy_agent_still_reports_its_health() {
    let health = serde_json::json!({
        "status": "unhealthy", "nvidia_smi_available": false, "timestamp": "2026-01-31T08:00:00Z", "problems": ["x"],
        "sources": [], "reading_age_secs": null, "store": "ok", "open": false, "version": "0", "uptime_secs": 1.0,
    });
    let server = ScriptedServer::start(move |_, _| json_reply("503 Service Unavailable", &health)).await;
    assert_eq!(server.client().health().await.unwrap().status, "unhealthy");
}

#[tokio::test]
async fn a_unix_socket_works_like_an_address() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("agent.sock");
    let server = ScriptedServer::start_unix(&path, |_, _| json_reply("200 OK", &lease(3, LeaseState::Queued))).await;
    let client = server.client();
    for _ in 0..2 {
        assert_eq!(client.follow(3, Duration::from_secs(2)).await.unwrap().id, 3);
    }
    let received = server.received();
    assert_eq!(received[0].target, "GET /v1/leases/3?wait_secs=2");
    assert_eq!(received[0].header("host"), Some("localhost"));
}

#[tokio::test]
async fn many_leases_are_followed_by_one_call_which_is_retried() {
    let followed = FollowResponse { changed: vec![lease(2, LeaseState::Active)], unknown: vec![9] };
    let reported = followed.clone();
    let server = ScriptedServer::start(move |number, _| match number {
        0 => truncated_lease(),
        _ => json_reply("200 OK", &reported),
    });
    let server = server.await;
    let wait = Duration::from_millis(1500);
    assert_eq!(within_deadline("an answer", server.client().follow_leases(&[1, 2, 9], wait)).await.unwrap(), followed);
    for request in server.received() {
        assert_eq!(
            (request.target.as_str(), request.header("content-type")),
            ("POST /v1/leases/follow", Some("application/json"))
        );
        let body: serde_json::Value = serde_json::from_str(&request.body).unwrap();
        assert_eq!(body, serde_json::json!({"leases": [1, 2, 9], "wait_secs": 1.5}));
    }
    assert_eq!(server.received().len(), 2);
}

#[tokio::test]
async fn a_tls_certificate_must_be_trusted() {
    let (server, pem) = ScriptedServer::start_tls(|_, _| json_reply("200 OK", &lease(1, LeaseState::Active))).await;
    let error = within_deadline("an error", server.client().pool()).await.unwrap_err();
    assert!(matches!(error, ClientError::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains("give the file with its CA certificate"), "{error}");
    let folder = tempfile::tempdir().unwrap();
    let ca_file = folder.path().join("ca.pem");
    std::fs::write(&ca_file, pem).unwrap();
    let builder = AgentClient::builder(server.endpoint.clone()).ca_file(ca_file).token(SecretString::new("hush"));
    let client = builder.build().unwrap();
    assert_eq!(within_deadline("a lease", client.follow(1, Duration::ZERO)).await.unwrap().id, 1);
    assert_eq!(server.received()[0].header("authorization"), Some("Bearer hush"));
}

#[tokio::test]
async fn without_a_listener_the_error_names_the_next_step() {
    let folder = tempfile::tempdir().unwrap();
    let absent = folder.path().join("agent.sock");
    let port = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    for endpoint in [absent.to_str().unwrap(), &format!("http://{port}")] {
        let client = AgentClient::new(endpoint.parse().unwrap()).unwrap();
        let error = within_deadline("an error", client.pool()).await.unwrap_err();
        assert!(matches!(error, ClientError::Unreachable { .. }), "{error}");
        assert!(error.to_string().contains("gpupool serve") && error.to_string().contains(endpoint), "{error}");
    }
}

/// Run by the next test in a process of its own, with a proxy in its environment.
#[tokio::test]
#[ignore = "needs the environment that the test below gives it"]
async fn requests_with_a_proxy_in_the_environment() {
    let server = ScriptedServer::start(|_, _| json_reply("200 OK", &lease(1, LeaseState::Active))).await;
    assert!(server.client().follow(1, Duration::ZERO).await.is_ok(), "the loopback bypasses the proxy");
    let far = AgentClient::new("http://gpupool.invalid:8000".parse().unwrap()).unwrap();
    let error = within_deadline("an error", far.pool()).await.unwrap_err().to_string();
    assert!(error.contains("the proxy was asked"), "the network is: {error}");
}

#[tokio::test]
async fn a_proxy_is_used_for_the_network_and_not_for_this_machine() {
    let proxy = ScriptedServer::start(|_, _| {
        ScriptedReply::Send(response("403 Forbidden", "text/plain", "", "the proxy was asked"))
    })
    .await;
    let proxy_address = proxy.endpoint.to_string();
    let asked_with_a_proxy = "responses::requests_with_a_proxy_in_the_environment";
    let outcome = tokio::task::spawn_blocking(move || {
        std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--ignored", asked_with_a_proxy])
            .env_remove("no_proxy")
            .env_remove("NO_PROXY")
            .env("http_proxy", &proxy_address)
            .env("all_proxy", &proxy_address)
            .output()
            .unwrap()
    });
    let outcome = outcome.await.unwrap();
    let output = String::from_utf8_lossy(&outcome.stdout).into_owned() + &String::from_utf8_lossy(&outcome.stderr);
    assert!(outcome.status.success() && output.contains("1 passed"), "{output}");
}
