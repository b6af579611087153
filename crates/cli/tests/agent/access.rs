//! The rights of local users, network clients, tokens and browsers: to read, request, renew, release, revoke, cordon, create
//! tokens and set faults.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use gpupool_client::{AgentClient, Endpoint, SecretString};
use gpupool_testkit::{TestAgent, TestAgentBuilder};
use serde_json::json;

use crate::common::http::{RawEndpoint, RawResponse};
use crate::common::machine::{ALICE, BOB, accessible_directory, as_user, is_root, network_address};
use crate::common::{agent, eventually, skipped};

/// The operations whose status is checked, in this order.
const OPERATIONS: [&str; 9] =
    ["read", "request", "renew", "release", "revoke", "cordon", "create tokens", "list tokens", "set faults"];

/// The statuses for a user without administrator rights.
const USER: [u16; 9] = [200, 201, 200, 200, 403, 403, 403, 403, 403];
const ADMIN: [u16; 9] = [200, 201, 200, 200, 200, 200, 201, 200, 200];
/// The statuses for a client that may only read.
const READER: [u16; 9] = [200, 401, 401, 401, 401, 401, 401, 403, 401];

/// The statuses for a token that may only read.
const READ_ONLY: [u16; 9] = [200, 403, 403, 403, 403, 403, 403, 403, 403];

/// Tries every operation: on a lease of its own, and `revoke` on a lease of another owner.
fn statuses(endpoint: &RawEndpoint, headers: &[(&str, &str)], foreign: u64) -> Vec<u16> {
    let ask = |method: &str, path: &str, body: Option<&str>| endpoint.send(method, path, headers, body);
    let mine = ask("POST", "/v1/leases", Some(r#"{"fraction":0.1,"queue":false}"#));
    let (id, token) = match mine.status {
        201 => (mine.json()["id"].clone(), mine.json()["token"].clone()),
        _ => (json!(foreign), json!(1)),
    };
    let renewed = ask("POST", &format!("/v1/leases/{id}/renew"), Some(&json!({"token": token}).to_string()));
    vec![
        ask("GET", "/v1/leases", None).status,
        mine.status,
        renewed.status,
        ask("DELETE", &format!("/v1/leases/{id}"), None).status,
        ask("POST", &format!("/v1/leases/{foreign}/revoke"), Some(r#"{"grace_secs":600}"#)).status,
        ask("POST", "/v1/devices/0/cordon", Some("{}")).status,
        ask("POST", "/v1/tokens", Some(r#"{"owner":"carol"}"#)).status,
        ask("GET", "/v1/tokens", None).status,
        ask("POST", "/v1/simulate/faults", Some(r#"{"fault":null}"#)).status,
    ]
}

#[track_caller]
fn assert_rights(caller: &str, endpoint: &RawEndpoint, headers: &[(&str, &str)], foreign: u64, expected: &[u16; 9]) {
    let got = statuses(endpoint, headers, foreign);
    let table: Vec<_> =
        OPERATIONS.iter().zip(&got).zip(expected).map(|((name, got), expected)| (*name, *got, *expected)).collect();
    assert_eq!(got, expected, "{caller} (operation, status, expected): {table:?}");
}

/// Returns a lease of the administrator.
fn foreign_lease(agent: &TestAgent) -> u64 {
    let response = RawEndpoint::unix(agent).post("/v1/leases", &json!({"fraction": 0.1, "ttl_secs": 600}));
    assert_eq!(response.status, 201, "{}", response.text());
    response.json()["id"].as_u64().unwrap()
}

#[tokio::test]
async fn local_users_own_their_leases_and_only_root_administers() {
    let folder = accessible_directory();
    let agent = agent().state_dir(folder.path().join("state")).start().await;
    let foreign = foreign_lease(&agent);
    let places = [RawEndpoint::unix(&agent), RawEndpoint::tcp(&agent)];
    for endpoint in &places {
        assert_rights("the user of the agent", endpoint, &[], foreign, &ADMIN);
        endpoint.post("/v1/devices/0/uncordon", &json!({}));
    }
    if !is_root() {
        return skipped("other local users", "only root can run as another user");
    }
    for endpoint in places {
        let (caller, uid) = (endpoint.clone(), ALICE);
        as_user(uid, move || assert_rights("alice", &caller, &[], foreign, &USER));
        let (hers, again) = (endpoint.clone(), endpoint.clone());
        let lease = as_user(ALICE, move || hers.post("/v1/leases", &json!({"fraction": 0.1})).json());
        assert_eq!(lease["owner"].as_str().map(|owner| owner.contains(&ALICE.to_string())), Some(true), "{lease}");
        let id = lease["id"].clone();
        as_user(BOB, move || {
            let body = json!({"token": lease["token"]}).to_string();
            let seen = again.get(&format!("/v1/leases/{id}"));
            assert_eq!((seen.status, &seen.json()["token"], &seen.json()["env"]), (200, &json!(null), &json!({})));
            for (method, path, body) in [
                ("POST", format!("/v1/leases/{id}/renew"), Some(body.as_str())),
                ("POST", format!("/v1/leases/{id}/confirm"), Some(body.as_str())),
                ("POST", format!("/v1/leases/{id}/revoke"), None),
                ("POST", format!("/v1/leases/{id}/hold"), Some(body.as_str())),
                ("DELETE", format!("/v1/leases/{id}"), None),
            ] {
                let response = again.send(method, &path, &[], body);
                assert_eq!((response.status, response.code().as_str()), (403, "not_allowed"), "{method} {path}");
            }
            let account = again.post("/v1/leases", &json!({"fraction": 0.1, "owner": ALICE.to_string()}));
            assert_eq!((account.status, account.code().as_str()), (403, "not_your_account"));
            assert_eq!(again.get(&format!("/v1/leases/{id}")).json()["state"], "active");
        });
    }
}

/// Headers of a browser, for a request to `localhost`, that no page of another site sends.
const OWN_PAGE: [&[(&str, &str)]; 5] = [
    &[("Sec-Fetch-Site", "same-origin")],
    &[("Sec-Fetch-Site", "none")],
    &[("Sec-Fetch-Mode", "cors")],
    &[("Origin", "http://localhost")],
    &[("Sec-Fetch-Site", "same-origin"), ("Origin", "https://proxy.example")],
];
/// Headers of a browser for requests of other pages.
const OTHER_PAGE: [&[(&str, &str)]; 5] = [
    &[("Sec-Fetch-Site", "cross-site")],
    &[("Sec-Fetch-Site", "same-site"), ("Origin", "http://localhost")],
    &[("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "navigate")],
    &[("Origin", "http://localhost:8001")],
    &[("Origin", "null")],
];
/// Routes that pages of other sites may read.
const FOR_EVERY_PAGE: [&str; 7] = ["/", "/docs", "/redoc", "/openapi.json", "/health", "/gpu/stats", "/gpu/count"];

/// Returns every method and route of the agent, with numbers in place of parameters.
fn operations(endpoint: &RawEndpoint) -> Vec<(String, String)> {
    let document = crate::common::schema::OpenApiDocument(endpoint.get("/openapi.json").json());
    let operations = document.operations().into_iter();
    operations.map(|(method, route)| (method, route.replace("{id}", "1").replace("{gpu_id}", "0"))).collect()
}

#[tokio::test]
async fn requests_of_other_sites_are_refused() {
    let agent = agent().start().await;
    let lease = RawEndpoint::unix(&agent).post("/v1/leases", &json!({"ttl_secs": 600})).json();
    let body = json!({"token": lease["token"]}).to_string();
    for endpoint in [RawEndpoint::tcp(&agent), RawEndpoint::unix(&agent)] {
        for headers in OTHER_PAGE {
            for (method, path) in operations(&endpoint) {
                let is_for_others = path.starts_with("/gpu/") || FOR_EVERY_PAGE.contains(&path.as_str());
                if method == "GET" && is_for_others {
                    continue;
                }
                let answer = endpoint.send(&method, &path, headers, Some(&body));
                let told = (answer.status, answer.code());
                assert_eq!(told, (403, "origin_not_allowed".into()), "{method} {path} with {headers:?}");
            }
            for path in FOR_EVERY_PAGE {
                assert_eq!(endpoint.send("GET", path, headers, None).status, 200, "{path} with {headers:?}");
            }
        }
        for headers in OWN_PAGE {
            for path in ["/v1/leases", "/v1/pool", "/metrics", "/config", "/gpu/stats", "/"] {
                assert_eq!(endpoint.send("GET", path, headers, None).status, 200, "{path} with {headers:?}");
            }
        }
    }
    let after = RawEndpoint::unix(&agent).get(&format!("/v1/leases/{}", lease["id"])).json();
    assert_eq!((&after["state"], &after["holder"]), (&json!("active"), &json!(null)));
}

#[tokio::test]
async fn a_browser_has_no_rights_from_its_user() {
    let agent = agent().start().await;
    let foreign = foreign_lease(&agent);
    let (user, _) = create_tokens(&agent).await;
    let token = format!("Bearer {user}");
    for endpoint in [RawEndpoint::tcp(&agent), RawEndpoint::unix(&agent)] {
        for headers in OWN_PAGE {
            assert_rights(&format!("a browser with {headers:?}"), &endpoint, headers, foreign, &READER);
            let with_token = [headers, &[("Authorization", token.as_str())]].concat();
            assert_rights(&format!("a token with {headers:?}"), &endpoint, &with_token, foreign, &USER);
        }
    }
}

#[tokio::test]
async fn a_browser_that_reads_a_waiting_request_does_not_keep_it() {
    let agent = agent().simulate("1xH100").start().await;
    let endpoint = RawEndpoint::tcp(&agent);
    let (user, _) = create_tokens(&agent).await;
    let token = format!("Bearer {user}");
    let ask = |method, path: &str, headers: &[(&str, &str)], body| {
        let headers = [headers, &[("Authorization", token.as_str())]].concat();
        endpoint.send(method, path, &headers, body).json()
    };
    ask("POST", "/v1/leases", &[], Some(r#"{"ttl_secs":600}"#));
    let waiting = ask("POST", "/v1/leases", &[], Some("{}"));
    // A poll that counted would be answered after five minutes.
    let seen = ask("GET", &format!("/v1/leases/{}?wait_secs=300", waiting["id"]), OWN_PAGE[0], None);
    assert_eq!((&seen["state"], &seen["owner"]), (&json!("queued"), &json!("alice")));
}

#[tokio::test]
async fn foreign_host_names_are_refused_on_every_route() {
    let agent = agent().argument("--host=0.0.0.0").start().await;
    let (tcp, unix) = (RawEndpoint::tcp(&agent), RawEndpoint::unix(&agent));
    let pages = ["/docs", "/redoc", "/openapi.json", "/nowhere"].map(|path| ("GET".to_owned(), path.to_owned()));
    for (method, path) in operations(&unix).into_iter().chain(pages) {
        for (endpoint, headers) in [
            (&tcp, &[("Host", "evil.example")][..]),
            (&tcp, &[("Host", "localhost.evil.example:80"), ("Sec-Fetch-Site", "same-origin")]),
            (&unix, &[("Host", "evil.example"), ("Origin", "http://evil.example")]),
        ] {
            let answer = endpoint.send(&method, &path, headers, Some("{}"));
            let told = (answer.status, answer.code());
            assert_eq!(told, (403, "host_not_allowed".into()), "{method} {path} with {headers:?}");
        }
    }
    let host_name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim().to_owned();
    for own in ["localhost", "127.0.0.1:80", "[::1]", host_name.as_str()] {
        assert_eq!(tcp.send("GET", "/v1/pool", &[("Host", own)], None).status, 200, "{own}");
    }
    let Some(address) = network_or_skip("foreign host names over the network") else { return };
    let network = RawEndpoint::Tcp(SocketAddr::new(address, agent.port()));
    let ask = |headers: &[(&str, &str)]| network.send("GET", "/v1/pool", headers, None).status;
    assert_eq!(ask(&[("Host", "gpus.example")]), 200, "a program over the network may use any name");
    assert_eq!(ask(&[("Host", "gpus.example"), ("Sec-Fetch-Site", "same-origin")]), 403);
}

#[tokio::test]
async fn no_get_request_holds_a_lease() {
    let agent = agent().start().await;
    let endpoint = RawEndpoint::tcp(&agent);
    let lease = endpoint.post("/v1/leases", &json!({"ttl_secs": 600})).json();
    let path = format!("/v1/leases/{}/hold?token={}", lease["id"], lease["token"]);
    for method in ["GET", "HEAD"] {
        assert_eq!(endpoint.send(method, &path, &[], None).status, 405, "{method}");
    }
    let refused = endpoint.get(&path).json();
    assert_eq!(refused["code"], "method_not_allowed");
    assert!(refused["detail"].as_str().unwrap().contains("clients of gpupool 0.1.0 and newer"), "{refused}");
    let after = endpoint.get(&format!("/v1/leases/{}", lease["id"])).json();
    assert_eq!((&after["state"], &after["holder"]), (&json!("active"), &json!(null)));
}

#[tokio::test]
async fn requests_through_a_browser_or_a_proxy_have_no_local_identity() {
    let agent = agent().start().await;
    let (endpoint, body) = (RawEndpoint::tcp(&agent), Some(r#"{"fraction":0.1}"#));
    let ask = |headers: &[(&str, &str)]| -> (u16, String) {
        let response: RawResponse = endpoint.send("POST", "/v1/leases", headers, body);
        (response.status, response.code())
    };
    assert_eq!(ask(&[("Host", "evil.example")]), (403, "host_not_allowed".into()));
    assert_eq!(ask(&[("Host", "localhost.evil.example")]), (403, "host_not_allowed".into()));
    assert_eq!(ask(&[("Host", "localhost"), ("Origin", "https://evil.example")]), (403, "origin_not_allowed".into()));
    assert_eq!(ask(&[("Host", "localhost"), ("Origin", "null")]), (403, "origin_not_allowed".into()));
    for name in ["X-Forwarded-For", "Forwarded", "X-Real-IP"] {
        assert_eq!(ask(&[(name, "127.0.0.1")]), (401, "token_needed".into()), "{name}");
    }
    for bad in ["Bearer", "Basic cm9vdDpyb290", "Bearer gpupool_nonsense", "Bearer \u{fc}"] {
        assert_eq!(ask(&[("Authorization", bad)]).0, 401, "{bad}");
    }
}

/// The headers of a caller from the network: a proxy on this machine forwards its requests.
const FORWARDED: [(&str, &str); 1] = [("X-Forwarded-For", "192.0.2.7")];

#[tokio::test]
async fn only_local_users_and_owners_see_pids() {
    let agent = agent().start().await;
    let (local, tcp) = (RawEndpoint::unix(&agent), RawEndpoint::tcp(&agent));
    let lease = local.post("/v1/leases", &json!({"fraction": 0.1})).json();
    let (id, token) = (&lease["id"], &lease["token"]);
    let attached = local.post(&format!("/v1/leases/{id}/attach"), &json!({"token": token, "if_taken": "end_jobs"}));
    assert_eq!(attached.status, 200, "{}", attached.text());
    let squatter = 4_194_301;
    let fault = json!({"gpu_id": 0, "fault": format!("squatter:{squatter}:100:5")});
    let fault = local.post("/v1/simulate/faults", &fault);
    assert_eq!(fault.status, 200, "{}", fault.text());
    let process = |endpoint: &RawEndpoint, headers: &[(&str, &str)]| {
        let devices = endpoint.send("GET", "/v1/devices", headers, None).json();
        let devices = devices["devices"].as_array().cloned().unwrap_or_default();
        let processes = devices.iter().flat_map(|device| device["processes"].as_array().cloned().unwrap_or_default());
        processes.into_iter().find(|process| process["squatter"] == true)
    };
    let seen = eventually("the squatter", async || process(&tcp, &[])).await;
    assert_eq!((&seen["pid"], &seen["command"]), (&json!(squatter), &json!("squatter")));
    let seen = process(&tcp, &FORWARDED).unwrap();
    assert_eq!((&seen["pid"], &seen["command"]), (&json!(null), &json!("squatter")));

    let secret = read_only_token(&agent).await;
    let reader = [FORWARDED[0], ("Authorization", secret.as_str())];
    assert_eq!(process(&tcp, &reader).unwrap()["pid"], squatter);

    let one = format!("/v1/leases/{id}");
    let holder = |headers: &[(&str, &str)]| tcp.send("GET", &one, headers, None).json()["holder"].clone();
    assert_eq!(holder(&[]), json!({"kind": "process", "pid": std::process::id()}));
    assert_eq!(holder(&reader)["pid"], std::process::id());
    assert_eq!(holder(&FORWARDED), json!({"kind": "process", "pid": null}));
    let followed = json!({"leases": [id]}).to_string();
    let followed = tcp.send("POST", "/v1/leases/follow", &FORWARDED, Some(&followed)).text();

    let document = local.get("/openapi.json").json();
    // The response of /v1/events does not end; an event has no field for a pid. Pids of faults are simulated.
    let without = ["/v1/events", "/v1/simulate/faults"];
    let routes = document["paths"].as_object().unwrap().iter();
    let routes = routes.filter(|(path, route)| route.get("get").is_some() && !without.contains(&path.as_str()));
    let paths = routes.map(|(path, _)| path.replace("{id}", &id.to_string())).filter(|path| !path.ends_with("/hold"));
    let bodies = paths.map(|path| (tcp.send("GET", &path, &FORWARDED, None).text(), path));
    for (body, path) in bodies.chain([(followed, "/v1/leases/follow".into())]) {
        let body = body.replace(": ", ":");
        for hidden in [squatter.to_string(), format!("\"pid\":{}", std::process::id())] {
            assert!(!body.contains(&hidden), "{path} shows {hidden}: {body}");
        }
    }
}

#[tokio::test]
async fn names_that_are_not_shown_as_they_are_are_refused() {
    let agent = agent().start().await;
    let local = RawEndpoint::unix(&agent);
    for (path, body, value) in [
        ("/v1/leases", json!({"owner": "bo\u{202e}b"}), "bo<U+202E>b"),
        ("/v1/leases", json!({"worker_id": "a\u{200b}b"}), "a<U+200B>b"),
        ("/v1/leases", json!({"worker_id": "a\nb"}), "a<U+000A>b"),
        ("/v1/leases", json!({"labels": {"team\u{feff}": "x"}}), "team<U+FEFF>"),
        ("/v1/leases", json!({"labels": {"team": "\u{1b}[2J"}}), "<U+001B>[2J"),
        ("/v1/tokens", json!({"owner": "ali\u{2066}ce"}), "ali<U+2066>ce"),
    ] {
        let refused = local.post(path, &body);
        let problem = refused.json();
        assert_eq!((refused.status, &problem["code"], &problem["value"]), (422, &json!("invalid"), &json!(value)));
        assert!(problem["detail"].as_str().unwrap().contains(value), "{problem}");
    }
    assert_eq!(local.post("/v1/leases", &json!({"owner": "Zoë 日本", "worker_id": "שלום"})).status, 201);
}

/// Returns an address of this machine that others could reach, or skips the test visibly.
fn network_or_skip(what: &str) -> Option<IpAddr> {
    let found = network_address();
    if found.is_none() {
        skipped(what, "this machine has no address but loopback");
    }
    found
}

fn network_agent() -> TestAgentBuilder {
    agent().argument("--host=0.0.0.0")
}

/// Creates the tokens of a user and of an administrator, and returns their secrets.
async fn create_tokens(agent: &TestAgent) -> (String, String) {
    let client = agent.client_unix();
    let mut made = Vec::new();
    for (owner, admin) in [("alice", false), ("boss", true)] {
        let token = gpupool_api::tokens::NewToken { owner: owner.into(), admin, read_only: false };
        made.push(client.create_token(&token).await.unwrap().secret);
    }
    let admin = made.pop().unwrap();
    (made.pop().unwrap(), admin)
}

/// Creates a read-only token, and returns it as a header's value.
async fn read_only_token(agent: &TestAgent) -> String {
    let token = gpupool_api::tokens::NewToken { owner: "grafana".into(), admin: false, read_only: true };
    format!("Bearer {}", agent.client_unix().create_token(&token).await.unwrap().secret)
}

#[tokio::test]
async fn a_read_only_token_reads_and_changes_nothing() {
    let mut agent = agent().start().await;
    let foreign = foreign_lease(&agent);
    let secret = read_only_token(&agent).await;
    assert_rights("a read-only token", &RawEndpoint::tcp(&agent), &[("Authorization", &secret)], foreign, &READ_ONLY);
    agent.restart().await;
    let local = RawEndpoint::unix(&agent);
    assert_rights("the same after a restart", &local, &[("Authorization", &secret)], foreign, &READ_ONLY);
    // Neither may it keep or see the secrets of leases of its own account.
    let lease = local.post("/v1/leases", &json!({"fraction": 0.1, "owner": "grafana"})).json();
    let path = format!("/v1/leases/{}", lease["id"]);
    let seen = local.send("GET", &path, &[("Authorization", &secret)], None).json();
    assert_eq!((&seen["state"], &seen["token"], &seen["env"]), (&json!("active"), &json!(null), &json!({})));
    let refused = local.send("DELETE", &path, &[("Authorization", &secret)], None);
    assert_eq!((refused.status, refused.code().as_str()), (403, "not_allowed"));
    assert!(refused.text().contains("the token of grafana may only read"), "{}", refused.text());
    let both = local.post("/v1/tokens", &json!({"owner": "x", "admin": true, "read_only": true}));
    assert_eq!((both.status, both.code().as_str()), (422, "invalid"), "{}", both.text());
}

#[tokio::test]
async fn only_an_administrator_exceeds_the_highest_priority() {
    let agent = agent().start().await;
    let (user, admin) = create_tokens(&agent).await;
    let local = RawEndpoint::tcp(&agent);
    let ask = |secret: &str, priority: i32| {
        let body = json!({"fraction": 0.1, "priority": priority}).to_string();
        local.send("POST", "/v1/leases", &[("Authorization", &format!("Bearer {secret}"))], Some(&body))
    };
    let refused = ask(&user, 1);
    assert_eq!((refused.status, refused.code().as_str()), (422, "policy"));
    assert!(refused.text().contains("priority: 1 is not allowed; it must be at most 0"), "{}", refused.text());
    assert_eq!([ask(&user, 0).status, ask(&user, -5).status, ask(&admin, 1_000_000).status], [201; 3]);
}

#[tokio::test]
async fn the_network_may_read_and_a_token_does_not_count_over_plain_http() {
    let Some(address) = network_or_skip("the network without TLS") else { return };
    let agent = network_agent().start().await;
    let endpoint = RawEndpoint::Tcp(SocketAddr::new(address, agent.port()));
    let foreign = foreign_lease(&agent);
    assert_rights("a network client", &endpoint, &[], foreign, &READER);
    let (user, admin) = create_tokens(&agent).await;
    for secret in [&user, &admin] {
        let response =
            endpoint.send("POST", "/v1/leases", &[("Authorization", &format!("Bearer {secret}"))], Some("{}"));
        assert_eq!((response.status, response.code().as_str()), (403, "token_over_plain_http"));
    }
    let seen = endpoint.get(&format!("/v1/leases/{foreign}")).json();
    assert_eq!((&seen["state"], &seen["token"]), (&json!("active"), &json!(null)));
    // Over loopback a token cannot be intercepted.
    let local = RawEndpoint::tcp(&agent);
    assert_rights("alice's token", &local, &[("Authorization", &format!("Bearer {user}"))], foreign, &USER);
    assert_no_secret_is_logged(&agent, &[&user, &admin]).await;
}

/// Waits for a last log line first, because log lines are written later, in order.
async fn assert_no_secret_is_logged(agent: &TestAgent, secrets: &[&str]) {
    let last = "/after/all/else";
    RawEndpoint::unix(agent).get(last);
    eventually("the last line of the log", async || agent.log().contains(last).then_some(())).await;
    let log = agent.log();
    assert!(!secrets.iter().any(|secret| log.contains(secret)), "a secret is in the log: {log}");
}

#[tokio::test]
async fn with_allow_plain_http_tokens_count_until_they_are_revoked() {
    let Some(address) = network_or_skip("tokens over plain HTTP") else { return };
    let mut agent = network_agent().argument("--allow-plain-http").argument("--log-level=trace").start().await;
    let endpoint = RawEndpoint::Tcp(SocketAddr::new(address, agent.port()));
    let foreign = foreign_lease(&agent);
    let (user, admin) = create_tokens(&agent).await;
    let [as_user, as_admin] = [&user, &admin].map(|secret| format!("Bearer {secret}"));
    assert_rights("a network client", &endpoint, &[], foreign, &READER);
    assert_rights("a user's token", &endpoint, &[("Authorization", &as_user)], foreign, &USER);
    assert_rights("an administrator's token", &endpoint, &[("Authorization", &as_admin)], foreign, &ADMIN);
    endpoint.send("POST", "/v1/devices/0/uncordon", &[("Authorization", &as_admin)], Some("{}"));
    let taken = endpoint.send("POST", "/v1/leases", &[("Authorization", &as_user)], Some(r#"{"ttl_secs":600}"#)).json();
    assert_eq!(taken["owner"], "alice");
    agent.restart().await;
    assert_rights("a user's token after a restart", &endpoint, &[("Authorization", &as_user)], foreign, &USER);
    let client = agent.client_unix();
    let tokens = client.tokens().await.unwrap().tokens;
    client.revoke_token(tokens.iter().find(|token| token.owner == "alice").unwrap().id).await.unwrap();
    let refused = endpoint.send("POST", "/v1/leases", &[("Authorization", &as_user)], Some("{}"));
    assert_eq!((refused.status, refused.code().as_str()), (401, "token_unknown"));
    assert_eq!(
        endpoint.get(&format!("/v1/leases/{}", taken["id"])).json()["state"],
        "active",
        "leases of a revoked token stay"
    );
    assert_no_secret_is_logged(&agent, &[&user, &admin]).await;
    let database = std::fs::read(agent.state_dir().join("pool.db")).unwrap();
    let log = std::fs::read(agent.state_dir().join("pool.db-wal")).unwrap_or_default();
    for bytes in [database, log] {
        assert!(!bytes.windows(admin.len()).any(|part| part == admin.as_bytes()), "a secret is in the database");
    }
}

#[tokio::test]
async fn an_open_agent_lets_network_clients_lease_and_warns() {
    let Some(address) = network_or_skip("an open agent") else { return };
    let agent = network_agent().argument("--open").start().await;
    let endpoint = RawEndpoint::Tcp(SocketAddr::new(address, agent.port()));
    let foreign = foreign_lease(&agent);
    assert_rights("a network client", &endpoint, &[], foreign, &USER);
    let response = endpoint.send("DELETE", &format!("/v1/leases/{foreign}"), &[], None);
    assert_eq!(response.status, 403, "an anonymous client releases the lease of a known owner");
    let named = endpoint.post("/v1/leases", &json!({"fraction": 0.1, "owner": "root"})).json();
    let owner = format!("anonymous:{address}/root");
    assert_eq!(named["owner"], owner, "the address precedes the name that an anonymous client chooses");
    // A proxy on this machine is another address.
    let (other, headers) = (RawEndpoint::tcp(&agent), [("X-Forwarded-For", "192.0.2.7")]);
    let (id, token) = (&named["id"], json!({"token": named["token"]}).to_string());
    let copied = json!({"fraction": 0.1, "owner": format!("{address}/root")}).to_string();
    let copied = other.send("POST", "/v1/leases", &headers, Some(&copied)).json();
    assert_eq!(
        copied["owner"],
        format!("anonymous:127.0.0.1/{address}/root"),
        "a chosen name cannot be another address"
    );
    let seen = other.send("GET", &format!("/v1/leases/{id}"), &headers, None).json();
    assert_eq!((&seen["token"], &seen["env"]), (&json!(null), &json!({})));
    for (method, path) in [("POST", format!("/v1/leases/{id}/renew")), ("DELETE", format!("/v1/leases/{id}"))] {
        let refused = other.send(method, &path, &headers, Some(&token));
        assert_eq!((refused.status, refused.code().as_str()), (403, "not_allowed"), "{method} from another address");
    }
    let renewed = endpoint.send("POST", &format!("/v1/leases/{id}/renew"), &[], Some(&token));
    assert_eq!(renewed.status, 200, "{}", renewed.text());
    assert_eq!(endpoint.get("/health").json()["open"], true);
    eventually("the warning", async || agent.log().contains("WARN gpupool_agent::serve: --open").then_some(())).await;
    let browser = endpoint.send("POST", "/v1/leases", &[("Origin", "https://evil.example")], Some("{}"));
    assert_eq!((browser.status, browser.code().as_str()), (403, "origin_not_allowed"));
}

/// Writes a new certificate for these names, and its key.
fn write_certificate(folder: &Path, names: &[String]) {
    let made = rcgen::generate_simple_self_signed(names.to_vec()).unwrap();
    std::fs::write(folder.join("cert.pem"), made.cert.pem()).unwrap();
    std::fs::write(folder.join("key.pem"), made.signing_key.serialize_pem()).unwrap();
}

#[tokio::test]
async fn a_failed_tls_connection_comes_with_its_cause_and_remedy() {
    let Some(address) = network_or_skip("TLS") else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let failure = async |port: u16, host: &str| {
        let endpoint: Endpoint = format!("https://{host}:{port}").parse().unwrap();
        let client = AgentClient::builder(endpoint).ca_file(path("cert.pem")).build().unwrap();
        client.pool().await.unwrap_err().to_string()
    };
    let plain = agent().start().await;
    // As `openssl req -x509` makes it: a CA that signs itself.
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::new(vec![address.to_string()]).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    std::fs::write(path("cert.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
    std::fs::write(path("key.pem"), key.serialize_pem()).unwrap();
    let builder = network_agent().argument("--tls-cert").argument(path("cert.pem"));
    let agent = builder.argument("--tls-key").argument(path("key.pem")).start().await;
    let error = failure(agent.port(), &address.to_string()).await;
    assert!(error.contains("basicConstraints=critical,CA:FALSE"), "{error}");

    let error = failure(plain.port(), "127.0.0.1").await;
    let expected = format!("use http://127.0.0.1:{}", plain.port());
    assert!(error.contains("does not use TLS") && error.contains(&expected), "{error}");
}

#[tokio::test]
async fn over_tls_tokens_count_and_certificates_are_reloaded() {
    let Some(address) = network_or_skip("TLS") else { return };
    let folder = tempfile::tempdir().unwrap();
    let names = [address.to_string(), "localhost".to_owned()];
    write_certificate(folder.path(), &names);
    let path = |name: &str| folder.path().join(name);
    let builder = network_agent().argument("--tls-cert").argument(path("cert.pem"));
    let agent = builder.argument("--tls-key").argument(path("key.pem")).start().await;
    std::fs::copy(path("cert.pem"), path("trusted.pem")).unwrap();
    let (user, _) = create_tokens(&agent).await;
    let client = |secret: &str| -> AgentClient {
        let endpoint: Endpoint = format!("https://{address}:{}", agent.port()).parse().unwrap();
        let builder = AgentClient::builder(endpoint).ca_file(path("trusted.pem"));
        if secret.is_empty() {
            builder.build().unwrap()
        } else {
            builder.token(SecretString::new(secret)).build().unwrap()
        }
    };
    let lease = client(&user).request(&crate::common::whole_gpu()).await.unwrap();
    assert_eq!(lease.owner, "alice");
    let refused = client("").request(&crate::common::whole_gpu()).await.unwrap_err();
    assert_eq!(refused.code(), Some("token_needed"));
    let plain = RawEndpoint::Tcp(SocketAddr::new(address, agent.port())).get("/health");
    assert!((400..500).contains(&plain.status), "plain HTTP to a TLS port: {}", plain.status);

    write_certificate(folder.path(), &names);
    agent.send_sighup();
    eventually("the new certificate", async || client("").pool().await.is_err().then_some(())).await;
    std::fs::copy(path("cert.pem"), path("trusted.pem")).unwrap();
    assert!(client("").pool().await.is_ok(), "the new certificate is trusted");
    std::fs::write(path("key.pem"), "nonsense").unwrap();
    agent.send_sighup();
    eventually("the error in the log", async || agent.log().contains("stay as they were").then_some(())).await;
    assert!(client(&user).pool().await.is_ok(), "a bad certificate changes nothing");
    assert_no_secret_is_logged(&agent, &[&user]).await;
}
