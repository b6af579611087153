//! Half answers, garbage, slow and busy servers, redirects and endless bodies: each gets the error that helps, and nothing is
//! done twice that must be done once.

use std::time::Duration;

use crate::common::{Reply, Server, answer, in_time, json, lease, problem, problem_with};
use gpupool_api::RequestBody;
use gpupool_api::lease::{FollowResponse, LeaseState};
use gpupool_api::tokens::NewToken;
use gpupool_client::{AgentClient, ClientError, IdempotencyKey, SecretString};

fn half() -> Reply {
    let whole =
        answer("201 Created", "application/json", "", &serde_json::to_string(&lease(1, LeaseState::Active)).unwrap());
    Reply::ThenClose(whole[..whole.len() - 20].to_owned())
}

#[tokio::test]
async fn a_request_whose_answer_breaks_off_is_asked_again_under_the_same_key() {
    let server = Server::start(|number, _| match number {
        0 => half(),
        _ => json("201 Created", &lease(1, LeaseState::Active)),
    });
    let server = server.await;
    let lease = in_time("a lease", server.client().request(&RequestBody::default())).await.unwrap();
    assert_eq!(lease.id, 1);
    let seen = server.seen();
    let keys: Vec<_> = seen.iter().map(|asked| asked.header("idempotency-key").unwrap()).collect();
    assert_eq!(keys.len(), 2);
    assert_eq!(keys[0], keys[1]);
    let mine = IdempotencyKey::new("job 17").unwrap();
    server.client().request_as(&RequestBody::default(), &mine).await.unwrap();
    assert_eq!(server.seen()[2].header("idempotency-key"), Some("job 17"));
}

#[tokio::test]
async fn a_token_whose_answer_breaks_off_is_not_made_twice() {
    let server = Server::start(|_, _| half()).await;
    let new = NewToken { owner: "alice".into(), admin: false };
    let error = in_time("an error", server.client().create_token(&new)).await.unwrap_err();
    assert!(matches!(error, ClientError::Unreachable { .. }), "{error}");
    assert_eq!(server.seen().len(), 1);
}

#[tokio::test]
async fn a_server_that_says_when_to_come_back_is_asked_again_then() {
    let server = Server::start(|number, _| match number {
        0 => problem_with(503, "busy", "retry-after: 0\r\n"),
        1 => problem_with(429, "too_many_waiting", "retry-after: 0\r\n"),
        _ => json("200 OK", &lease(1, LeaseState::Active)),
    });
    let server = server.await;
    in_time("a lease", server.client().renew(1, 41)).await.unwrap();
    assert_eq!(server.seen().len(), 3);
}

#[tokio::test]
async fn a_server_that_stays_busy_is_not_asked_for_ever() {
    let server = Server::start(|_, _| problem_with(503, "busy", "retry-after: 0\r\n")).await;
    let error = in_time("an error", server.client().pool()).await.unwrap_err();
    assert_eq!(error.code(), Some("busy"));
    assert_eq!(server.seen().len(), 4);
    let patient = Server::start(|_, _| problem_with(503, "busy", "retry-after: 3600\r\n")).await;
    assert_eq!(in_time("an error", patient.client().pool()).await.unwrap_err().code(), Some("busy"));
    assert_eq!(patient.seen().len(), 1, "an hour is longer than anybody waits here");
}

#[tokio::test]
async fn giving_back_to_an_agent_that_is_away_says_what_went_wrong() {
    let nobody = AgentClient::new("http://127.0.0.1:1".parse().unwrap()).unwrap();
    // Longer than one call with all its retries, whose pauses come to 350 ms at most.
    let error = in_time("the answer", nobody.release_within(1, Duration::from_millis(500))).await.unwrap_err();
    assert!(matches!(error, ClientError::Unreachable { .. }), "{error}");
}

#[tokio::test]
async fn a_refusal_is_final() {
    for (status, code) in [(409, "no_capacity"), (503, "not_durable"), (422, "invalid"), (401, "token_needed")] {
        let server = Server::start(move |_, _| problem(status, code)).await;
        let error = server.client().request(&RequestBody::default()).await.unwrap_err();
        assert_eq!((error.code(), error.to_string()), (Some(code), format!("it is {code}")));
        assert_eq!(server.seen().len(), 1);
    }
}

#[tokio::test]
async fn a_web_page_is_not_an_agent() {
    for status in ["200 OK", "404 Not Found", "500 Oops"] {
        let server = Server::start(move |_, _| Reply::Send(answer(status, "text/html", "", "<html>hello"))).await;
        let error = server.client().pool().await.unwrap_err();
        assert!(matches!(error, ClientError::NotOurs { .. }), "{error}");
        assert!(error.to_string().contains("<html>hello") && error.to_string().contains("gpupool serve"), "{error}");
    }
}

#[tokio::test]
async fn what_does_not_speak_http_does_not_answer() {
    let server = Server::start(|_, _| Reply::ThenClose("SSH-2.0-OpenSSH_9.2\r\n\r\n".into())).await;
    let error = in_time("an error", server.client().pool()).await.unwrap_err();
    assert!(matches!(error, ClientError::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains("invalid HTTP"), "{error}");
}

#[tokio::test]
async fn a_redirect_is_named_and_not_followed() {
    let elsewhere = Server::start(|_, _| json("200 OK", &lease(1, LeaseState::Active))).await;
    let location = format!("location: {}/v1/leases/1\r\n", elsewhere.endpoint);
    let server = Server::start(move |_, _| Reply::Send(answer("307 Temporary Redirect", "text/html", &location, "")));
    let server = server.await;
    let error = server.client().follow(1, Duration::ZERO).await.unwrap_err();
    assert!(matches!(error, ClientError::NotOurs { status: 307, .. }), "{error}");
    assert!(error.to_string().contains(&elsewhere.endpoint.to_string()), "{error}");
    assert!(elsewhere.seen().is_empty());
}

#[tokio::test]
async fn an_answer_without_end_is_given_up() {
    let chunk = format!("100000\r\n{}\r\n", " ".repeat(0x10_0000));
    let server =
        Server::start(move |_, _| Reply::Endlessly(crate::common::stream("application/json", &[" "]), chunk.clone()));
    let server = server.await;
    let error = in_time("an error", server.client().pool()).await.unwrap_err();
    assert!(matches!(error, ClientError::NotOurs { .. }), "{error}");
    assert!(error.to_string().contains("larger than"), "{error}");
}

#[tokio::test]
async fn a_server_that_never_answers_is_given_up() {
    let server = Server::start(|_, _| Reply::ThenSilence(String::new())).await;
    let client =
        AgentClient::builder(server.endpoint.clone()).response_timeout(Duration::from_millis(50)).build().unwrap();
    let error = in_time("an error", client.pool()).await.unwrap_err();
    assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
    assert_eq!(server.seen().len(), 1);
    let error = in_time("an error", client.events(None)).await.unwrap_err();
    assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
}

#[tokio::test]
async fn releasing_what_is_unknown_is_released_but_a_lost_page_is_not() {
    let server = Server::start(|_, _| problem(404, "unknown_lease")).await;
    assert_eq!(server.client().release(1).await.unwrap(), None);
    let server = Server::start(|_, _| Reply::Send(answer("404 Not Found", "text/html", "", "no such page"))).await;
    assert!(matches!(server.client().release(1).await, Err(ClientError::NotOurs { status: 404, .. })));
}

#[tokio::test]
async fn an_agent_that_is_not_well_still_tells_how_it_is() {
    let health = serde_json::json!({
        "status": "unhealthy", "nvidia_smi_available": false, "timestamp": "2026-01-31T08:00:00Z", "problems": ["x"],
        "sources": [], "reading_age_secs": null, "store": "ok", "open": false, "version": "0", "uptime_secs": 1.0,
    });
    let server = Server::start(move |_, _| json("503 Service Unavailable", &health)).await;
    assert_eq!(server.client().health().await.unwrap().status, "unhealthy");
}

#[tokio::test]
async fn a_unix_socket_is_asked_as_an_address_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("agent.sock");
    let server = Server::start_unix(&path, |_, _| json("200 OK", &lease(3, LeaseState::Queued))).await;
    let client = server.client();
    for _ in 0..2 {
        assert_eq!(client.follow(3, Duration::from_secs(2)).await.unwrap().id, 3);
    }
    let seen = server.seen();
    assert_eq!(seen[0].what, "GET /v1/leases/3?wait_secs=2");
    assert_eq!(seen[0].header("host"), Some("localhost"));
}

#[tokio::test]
async fn many_leases_are_followed_by_one_call_which_is_made_again_where_it_breaks() {
    let followed = FollowResponse { changed: vec![lease(2, LeaseState::Active)], unknown: vec![9] };
    let told = followed.clone();
    let server = Server::start(move |number, _| match number {
        0 => half(),
        _ => json("200 OK", &told),
    });
    let server = server.await;
    let wait = Duration::from_millis(1500);
    assert_eq!(in_time("an answer", server.client().follow_leases(&[1, 2, 9], wait)).await.unwrap(), followed);
    for asked in server.seen() {
        assert_eq!(
            (asked.what.as_str(), asked.header("content-type")),
            ("POST /v1/leases/follow", Some("application/json"))
        );
        let body: serde_json::Value = serde_json::from_str(&asked.body).unwrap();
        assert_eq!(body, serde_json::json!({"leases": [1, 2, 9], "wait_secs": 1.5}));
    }
    assert_eq!(server.seen().len(), 2);
}

#[tokio::test]
async fn an_agent_is_believed_over_tls_only_by_who_vouches_for_it() {
    let (server, pem) = Server::start_tls(|_, _| json("200 OK", &lease(1, LeaseState::Active))).await;
    let error = in_time("an error", server.client().pool()).await.unwrap_err();
    assert!(matches!(error, ClientError::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains("trust it by giving the file with its CA certificate"), "{error}");
    let folder = tempfile::tempdir().unwrap();
    let ca_file = folder.path().join("ca.pem");
    std::fs::write(&ca_file, pem).unwrap();
    let builder = AgentClient::builder(server.endpoint.clone()).ca_file(ca_file).token(SecretString::new("hush"));
    let client = builder.build().unwrap();
    assert_eq!(in_time("a lease", client.follow(1, Duration::ZERO)).await.unwrap().id, 1);
    assert_eq!(server.seen()[0].header("authorization"), Some("Bearer hush"));
}

#[tokio::test]
async fn where_nobody_listens_the_error_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let nobody = folder.path().join("agent.sock");
    let port = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    for endpoint in [nobody.to_str().unwrap(), &format!("http://{port}")] {
        let client = AgentClient::new(endpoint.parse().unwrap()).unwrap();
        let error = in_time("an error", client.pool()).await.unwrap_err();
        assert!(matches!(error, ClientError::Unreachable { .. }), "{error}");
        assert!(error.to_string().contains("gpupool serve") && error.to_string().contains(endpoint), "{error}");
    }
}

/// Run by the test below in a process of its own, with a proxy in its environment.
#[tokio::test]
#[ignore = "needs the environment that the test below gives it"]
async fn asked_with_a_proxy_in_the_environment() {
    let server = Server::start(|_, _| json("200 OK", &lease(1, LeaseState::Active))).await;
    assert!(server.client().follow(1, Duration::ZERO).await.is_ok(), "the loopback is not asked through a proxy");
    let far = AgentClient::new("http://gpupool.invalid:8000".parse().unwrap()).unwrap();
    let error = in_time("an error", far.pool()).await.unwrap_err().to_string();
    assert!(error.contains("the proxy was asked"), "the network is: {error}");
}

#[tokio::test]
async fn a_proxy_is_asked_for_the_network_and_not_for_this_machine() {
    let proxy =
        Server::start(|_, _| Reply::Send(answer("403 Forbidden", "text/plain", "", "the proxy was asked"))).await;
    let proxy_address = proxy.endpoint.to_string();
    let asked_with_a_proxy = "answers_of_every_kind_are_understood::asked_with_a_proxy_in_the_environment";
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
    let said = String::from_utf8_lossy(&outcome.stdout).into_owned() + &String::from_utf8_lossy(&outcome.stderr);
    assert!(outcome.status.success() && said.contains("1 passed"), "{said}");
}
