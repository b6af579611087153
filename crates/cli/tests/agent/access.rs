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
                ("GET", format!("/v1/leases/{id}/hold?token={}", lease["token"]), None),
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
    let host = format!("localhost:{}", agent.port());
    assert_eq!(ask(&[("Host", &host), ("Origin", &format!("http://{host}"))]).0, 201);
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
