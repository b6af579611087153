//! The agent answers every bad request with an error or closes the connection, never with 500, and continues.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use gpupool_testkit::{DEADLINE, TestAgent};

use crate::common::agent;
use crate::common::http::{RawEndpoint, RawResponse, request, stays_silent};

/// Time between two bytes of a slow client, too short to look idle.
const SLOW_BYTE_INTERVAL: Duration = Duration::from_millis(20);

async fn start_agent(config_text: &str) -> (TestAgent, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("gpupool.toml");
    std::fs::write(&config, config_text).unwrap();
    (agent().argument("--config").argument(&config).argument("--access-log=false").start().await, folder)
}

fn connect(agent: &TestAgent) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", agent.port())).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream
}

/// Sends bytes and returns the response; `None` if the agent closed the connection without one.
fn send_bytes(agent: &TestAgent, bytes: &[u8]) -> Option<RawResponse> {
    let mut stream = connect(agent);
    // The agent may have closed the connection before everything was sent.
    let _ = stream.write_all(bytes);
    RawResponse::read(&mut stream).ok()
}

/// Checks that the agent still works, and that nothing in it panicked.
#[track_caller]
fn assert_works(agent: &TestAgent) {
    let endpoint = RawEndpoint::tcp(agent);
    assert_eq!(endpoint.get("/health").json()["status"], "healthy");
    let lease = endpoint.post("/v1/leases", &serde_json::json!({"fraction": 0.1, "queue": false}));
    assert_eq!(lease.status, 201, "{}", lease.text());
    let over = endpoint.send("DELETE", &format!("/v1/leases/{}", lease.json()["id"]), &[], None);
    assert_eq!(over.status, 200, "{}", over.text());
    assert!(!agent.log().contains("panicked"), "{}", agent.log());
}

#[tokio::test]
async fn malformed_requests_are_refused() {
    let (agent, _folder) = start_agent("").await;
    let cases: [&[u8]; 14] = [
        b"\r\n\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00\x01\x02\x03\x04\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: \x01\x02\r\n\r\n",
        b"POST /v1/leases HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/leases HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"POST /v1/leases HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/leases HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
    ];
    for case in cases {
        let shown = String::from_utf8_lossy(case).into_owned();
        let mut stream = connect(&agent);
        let _ = stream.write_all(case);
        let _ = stream.shutdown(Shutdown::Write);
        if let Ok(response) = RawResponse::read(&mut stream) {
            assert!(response.status < 500, "{shown:?} was answered with {}: {}", response.status, response.text());
        }
    }
    assert_works(&agent);
}

#[tokio::test]
async fn every_wrong_body_gets_a_problem() {
    let (agent, _folder) = start_agent("").await;
    let endpoint = RawEndpoint::tcp(&agent);
    let deep = "[".repeat(100_000);
    let deep_object = r#"{"select":"#.repeat(50_000);
    let cases = [
        ("{", 400),
        ("null", 422),
        ("[]", 422),
        ("\"x\"", 422),
        ("{} {}", 400),
        ("{\"gpus\":NaN}", 400),
        ("{\"gpus\":1e999}", 400),
        ("{\"gpus\":99999999999999999999999}", 422),
        ("{\"gpus\":-1}", 422),
        ("{\"gpus\":0.5}", 422),
        ("{\"fraction\":1e308}", 422),
        ("{\"fraction\":-0.0}", 422),
        ("{\"fraction\":0.00000000001}", 422),
        ("{\"ttl_secs\":1e300}", 422),
        ("{\"ttl_secs\":-5}", 422),
        ("{\"wait_secs\":1e9}", 422),
        ("{\"memory_mib\":18446744073709551615}", 422),
        ("{\"cpus\":1e308}", 422),
        ("{\"priority\":2147483648}", 422),
        ("{\"gpus\":1,\"gpus\":2}", 422),
        ("{\"owner\":\"\\u0000\"}", 422),
        ("{\"owner\":\"\\ud800\"}", 400),
        ("{\"unknown\":1}", 422),
        ("{\"select\":{\"gpu_ids\":[4294967296]}}", 422),
        (deep.as_str(), 0),
        (deep_object.as_str(), 0),
    ];
    for (body, status) in cases {
        let shown = &body[..body.len().min(60)];
        let response = endpoint.send("POST", "/v1/leases", &[], Some(body));
        assert!((400..500).contains(&response.status), "{shown}: {} {}", response.status, response.text());
        assert!(status == 0 || response.status == status, "{shown}: {} {}", response.status, response.text());
        assert_eq!(response.header("content-type"), Some("application/problem+json"), "{shown}");
        assert!(!response.code().is_empty(), "{shown}: {}", response.text());
    }
    let mut raw = request("POST", "/v1/leases", &[("Content-Length", "6")], None).into_bytes();
    raw.extend_from_slice(b"{\"\xff\xfe\":1");
    let response = send_bytes(&agent, &raw).unwrap();
    assert!((400..500).contains(&response.status), "{}", response.text());
    assert_works(&agent);
}

#[tokio::test]
async fn requests_that_are_too_large_are_refused() {
    let (agent, _folder) = start_agent("").await;
    let endpoint = RawEndpoint::tcp(&agent);
    let large = format!("{{\"worker_id\":\"{}\"}}", "x".repeat(300_000));
    let response = endpoint.send("POST", "/v1/leases", &[], Some(&large));
    assert_eq!((response.status, response.code().as_str()), (413, "too_large"));
    let response = send_bytes(
        &agent,
        b"POST /v1/leases HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 99999999999\r\n\r\n{",
    );
    assert!(response.is_none_or(|response| (400..500).contains(&response.status)));
    let header = send_bytes(&agent, request("GET", "/health", &[("X-Large", &"x".repeat(100_000))], None).as_bytes());
    assert!(header.is_none_or(|response| response.status == 431));
    let many: Vec<String> = (0..500).map(|number| format!("X-{number}")).collect();
    let many: Vec<(&str, &str)> = many.iter().map(|name| (name.as_str(), "1")).collect();
    let headers = send_bytes(&agent, request("GET", "/health", &many, None).as_bytes());
    assert!(headers.is_none_or(|response| response.status == 431));
    let path = send_bytes(&agent, request("GET", &format!("/{}", "a/".repeat(50_000)), &[], None).as_bytes());
    assert!(path.is_none_or(|response| (400..500).contains(&response.status)));
    let key = endpoint.send("POST", "/v1/leases", &[("Idempotency-Key", &"k".repeat(2_000))], Some("{}"));
    assert_eq!(key.status, 422, "{}", key.text());
    assert_works(&agent);
}

#[tokio::test]
async fn wrong_methods_paths_and_parameters_get_problems() {
    let (agent, _folder) = start_agent("").await;
    let endpoint = RawEndpoint::tcp(&agent);
    for (method, path, status) in [
        ("PUT", "/v1/leases", 405),
        ("DELETE", "/v1/leases", 405),
        ("POST", "/gpu/stats", 405),
        ("PATCH", "/v1/leases/1", 405),
        ("BREW", "/health", 405),
        ("TRACE", "/", 405),
        ("GET", "/v1/leases/../../etc/passwd", 404),
        ("GET", "/v1/leases/%2e%2e%2f%2e%2e%2fetc%2fpasswd", 422),
        ("GET", "/v1/leases/%00", 422),
        ("GET", "/v1/leases/%ff", 400),
        ("GET", "/v1/leases/-1", 422),
        ("GET", "/v1/leases/18446744073709551616", 422),
        ("GET", "/v1/leases/18446744073709551615", 404),
        ("GET", "/v1/leases/1?wait_secs=NaN", 422),
        ("GET", "/v1/leases/1?wait_secs=inf", 422),
        ("GET", "/v1/leases/1?wait_secs=-1", 422),
        ("GET", "//v1//leases", 404),
        ("GET", "/V1/LEASES", 404),
        ("GET", "/docs/../../../etc/passwd", 404),
        ("POST", "/v1/devices/99999999999/cordon", 404),
        ("DELETE", "/v1/tokens/18446744073709551615", 404),
        ("GET", "/v1/history?after=18446744073709551615", 422),
        ("GET", "/v1/history?since=-9999-01-01T00:00:00Z&limit=1", 0),
        ("GET", "/v1/history?until=9999-01-01T00:00:00Z", 200),
    ] {
        let response = endpoint.send(method, path, &[], None);
        assert!(response.status < 500, "{method} {path}: {} {}", response.status, response.text());
        assert!(status == 0 || response.status == status, "{method} {path}: {} {}", response.status, response.text());
        if response.status >= 400 {
            assert_eq!(response.header("content-type"), Some("application/problem+json"), "{method} {path}");
        }
    }
    let head = endpoint.send("HEAD", "/gpu/stats", &[], None);
    assert_eq!((head.status, head.body.len()), (200, 0));
    assert_works(&agent);
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_clients_are_closed_and_disturb_no_others() {
    let (agent, _folder) = start_agent("[limits]\nheader_secs = 0.5\nrequest_secs = 0.5\n").await;
    let slow = |start: &'static str| {
        let mut stream = connect(&agent);
        std::thread::spawn(move || {
            let _ = stream.write_all(start.as_bytes());
            loop {
                // Until the agent answers or closes the connection.
                if stream.write_all(b"a").is_err() || !stays_silent(&mut stream, SLOW_BYTE_INTERVAL) {
                    stream.set_read_timeout(Some(DEADLINE)).unwrap();
                    let mut rest = Vec::new();
                    let _ = stream.read_to_end(&mut rest);
                    return;
                }
            }
        })
    };
    let clients: Vec<_> = (0..20)
        .map(|number| match number % 2 {
            0 => slow("GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: "),
            _ => slow("POST /v1/leases HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n{\"owner\":\""),
        })
        .collect();
    assert_works(&agent);
    let ended = tokio::task::spawn_blocking(move || clients.into_iter().for_each(|client| client.join().unwrap()));
    gpupool_testkit::within_deadline("slow clients to be closed", ended).await.unwrap();
    assert_works(&agent);
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order_and_half_closed_clients_are_gone() {
    let (agent, _folder) = start_agent("").await;
    let mut stream = connect(&agent);
    let mut bytes = "GET /gpu/count HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(200);
    bytes.push_str(&request("GET", "/no/such/route", &[], None));
    stream.write_all(bytes.as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert_eq!(text.matches("HTTP/1.1 200").count(), 200);
    assert!(text.rfind("HTTP/1.1 404").unwrap() > text.rfind("HTTP/1.1 200").unwrap());
    // A client that closes its sending side while it waits counts as gone and leaves the queue.
    let endpoint = RawEndpoint::tcp(&agent);
    for _ in 0..4 {
        assert_eq!(endpoint.post("/v1/leases", &serde_json::json!({"queue": false, "ttl_secs": 300})).status, 201);
    }
    let mut watch = agent.watch_events().await;
    let mut stream = connect(&agent);
    stream.write_all(request("POST", "/v1/leases", &[], Some(r#"{"wait_secs":60}"#)).as_bytes()).unwrap();
    let queued = watch.wait_for("the waiter in the queue", |event| event.kind == "queued").await.lease.unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    watch.wait_for_lease("ended", queued).await;
    endpoint.send("DELETE", "/v1/leases/1", &[], None);
    assert_works(&agent);
}

#[tokio::test]
async fn thousands_of_idle_connections_leave_room_for_others() {
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let mut raised = files;
    raised.current = files.maximum;
    let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, raised);
    let room = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(4_096);
    let count = 2_000.min(room.saturating_sub(512)) as usize;
    let (agent, _folder) = start_agent("").await;
    let idle: Vec<TcpStream> = (0..count).map(|_| connect(&agent)).collect();
    assert_works(&agent);
    drop(idle);
    assert_works(&agent);
}
