//! The statistics routes, with the field names and types of the published server, and the environment variables that
//! configure it.

use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::common::http::{RawEndpoint, RawResponse};
use crate::common::{agent, eventually};
use gpupool_testkit::{TestAgent, TestAgentBuilder};

/// The type of a field, which must be present.
#[derive(Debug, Clone, Copy)]
enum FieldType {
    Whole,
    Number,
    Text,
    Flag,
    List,
    Map,
    WholeOrNull,
    NumberOrNull,
    TextOrNull,
    ListOrNull,
}

fn has_type(kind: FieldType, value: &Value) -> bool {
    match kind {
        FieldType::Whole => value.is_u64(),
        FieldType::Number => value.is_number(),
        FieldType::Text => value.is_string(),
        FieldType::Flag => value.is_boolean(),
        FieldType::List => value.is_array(),
        FieldType::Map => value.is_object(),
        FieldType::WholeOrNull => value.is_null() || value.is_i64(),
        FieldType::NumberOrNull => value.is_null() || value.is_number(),
        FieldType::TextOrNull => value.is_null() || value.is_string(),
        FieldType::ListOrNull => value.is_null() || value.is_array(),
    }
}

#[track_caller]
fn assert_fields(body: &Value, fields: &[(&str, FieldType)]) {
    for (path, kind) in fields {
        let value = body.pointer(path).unwrap_or_else(|| panic!("{path} is missing in {body:#}"));
        assert!(has_type(*kind, value), "{path} must be {kind:?} and is {value}");
    }
}

const GPU: [(&str, FieldType); 10] = [
    ("/gpu_id", FieldType::Whole),
    ("/name", FieldType::Text),
    ("/memory/total_mb", FieldType::Whole),
    ("/memory/used_mb", FieldType::Whole),
    ("/memory/free_mb", FieldType::Whole),
    ("/memory/usage_percent", FieldType::Number),
    ("/utilization_percent", FieldType::Whole),
    ("/temperature_c", FieldType::WholeOrNull),
    ("/power/draw_w", FieldType::NumberOrNull),
    ("/power/limit_w", FieldType::NumberOrNull),
];

const SUMMARY: [(&str, FieldType); 7] = [
    ("/gpu_count", FieldType::Whole),
    ("/total_memory_mb", FieldType::Whole),
    ("/total_used_memory_mb", FieldType::Whole),
    ("/total_memory_usage_percent", FieldType::Number),
    ("/average_utilization_percent", FieldType::Number),
    ("/gpus_summary", FieldType::List),
    ("/timestamp", FieldType::Text),
];

/// Checks every statistics route, and returns the number of GPUs.
fn check_statistics(endpoint: &RawEndpoint, prefix: &str) -> usize {
    let get = |route: &str| {
        let response = endpoint.get(&format!("{prefix}{route}"));
        assert_eq!((response.status, response.header("content-type")), (200, Some("application/json")), "{route}");
        response.json()
    };
    let stats = get("/gpu/stats");
    assert_fields(
        &stats,
        &[("/gpu_count", FieldType::Whole), ("/gpus", FieldType::List), ("/timestamp", FieldType::Text)],
    );
    let gpus = stats["gpus"].as_array().unwrap();
    for gpu in gpus {
        assert_fields(gpu, &GPU);
        let percent = gpu["memory"]["usage_percent"].as_f64().unwrap();
        assert!((0.0..=100.0).contains(&percent) && (percent * 100.0 - (percent * 100.0).round()).abs() < 1e-6);
    }
    assert_fields(&get("/gpu/count"), &[("/gpu_count", FieldType::Whole), ("/timestamp", FieldType::Text)]);
    let summary = get("/gpu/summary");
    assert_fields(&summary, &SUMMARY);
    for gpu in summary["gpus_summary"].as_array().unwrap() {
        assert_fields(gpu, &[("/gpu_id", FieldType::Whole), ("/name", FieldType::Text)]);
        assert_fields(gpu, &[("/memory_usage_percent", FieldType::Number), ("/utilization_percent", FieldType::Whole)]);
    }
    assert_fields(
        &get("/health"),
        &[("/status", FieldType::Text), ("/nvidia_smi_available", FieldType::Flag), ("/timestamp", FieldType::Text)],
    );
    let pool_age = get("/health")["pool_age_secs"].as_f64();
    assert!(pool_age.is_some_and(|age| (0.0..60.0).contains(&age)), "{pool_age:?}");
    check_config(&get("/config"));
    let root = endpoint.send("GET", &format!("{prefix}/"), &[("Accept", "application/json")], None);
    assert_fields(
        &root.json(),
        &[("/message", FieldType::Text), ("/version", FieldType::Text), ("/endpoints", FieldType::Map)],
    );
    let offset = stats["timestamp"].as_str().unwrap();
    assert!(offset.ends_with('Z') || offset.contains('+'), "{offset} has no offset");
    for count in [&stats["gpu_count"], &summary["gpu_count"], &json!(summary["gpus_summary"].as_array().unwrap().len())]
    {
        assert_eq!(count.as_u64(), Some(gpus.len() as u64));
    }
    gpus.len()
}

fn check_config(config: &Value) {
    assert_fields(
        config,
        &[("/server/host", FieldType::Text), ("/server/port", FieldType::Whole), ("/server/reload", FieldType::Flag)],
    );
    assert_fields(
        config,
        &[
            ("/server/log_level", FieldType::Text),
            ("/server/access_log", FieldType::Flag),
            ("/server/workers", FieldType::Whole),
        ],
    );
    assert_fields(
        config,
        &[("/api/title", FieldType::Text), ("/api/version", FieldType::Text), ("/api/docs_url", FieldType::TextOrNull)],
    );
    assert_fields(
        config,
        &[
            ("/api/redoc_url", FieldType::TextOrNull),
            ("/api/enable_cors", FieldType::Flag),
            ("/api/api_prefix", FieldType::Text),
        ],
    );
    assert_fields(
        config,
        &[("/monitoring/refresh_interval", FieldType::Number), ("/monitoring/max_history", FieldType::Whole)],
    );
    assert_fields(
        config,
        &[
            ("/gpu_filtering/cuda_visible_devices", FieldType::TextOrNull),
            ("/gpu_filtering/filtering_active", FieldType::Flag),
        ],
    );
    assert_fields(
        config,
        &[
            ("/gpu_filtering/visible_gpu_ids", FieldType::ListOrNull),
            ("/gpu_filtering/total_system_gpus", FieldType::Whole),
        ],
    );
    assert_fields(config, &[("/gpu_filtering/visible_gpu_count", FieldType::Whole)]);
}

#[tokio::test]
async fn every_statistics_route_has_the_published_fields() {
    let agent = agent().simulate("2xH100,2xMI300X").start().await;
    assert_eq!(check_statistics(&RawEndpoint::tcp(&agent), ""), 4);
    assert_eq!(check_statistics(&RawEndpoint::unix(&agent), ""), 4);
}

#[tokio::test]
async fn a_machine_without_gpus_gets_complete_responses() {
    let nowhere = tempfile::tempdir().unwrap();
    let names = ["SYS", "PROC", "DEV", "ETC", "NVML", "NVIDIA_SMI", "AMD_SMI", "ROCM_SMI"];
    let to_nowhere = |builder: TestAgentBuilder, name: &str| {
        builder.variable(format!("GPUPOOL_{name}"), nowhere.path().join(name).display().to_string())
    };
    let agent = names.into_iter().fold(agent().real_devices(), to_nowhere).start().await;
    let endpoint = RawEndpoint::tcp(&agent);
    assert_eq!(check_statistics(&endpoint, ""), 0);
    let health = endpoint.get("/health").json();
    assert_eq!((&health["status"], &health["nvidia_smi_available"]), (&json!("healthy"), &json!(false)));
    assert_eq!(endpoint.get("/gpu/summary").json()["total_memory_usage_percent"], json!(0.0));
    let response = endpoint.post("/v1/leases", &json!({}));
    assert_eq!((response.status, response.code().as_str()), (422, "unsatisfiable"), "{}", response.text());
}

#[tokio::test]
async fn cuda_visible_devices_filters_gpus_and_keeps_their_numbers() {
    let agent = agent().variable("CUDA_VISIBLE_DEVICES", "3, 1 9 x").start().await;
    let endpoint = RawEndpoint::tcp(&agent);
    assert_eq!(check_statistics(&endpoint, ""), 2);
    let stats = endpoint.get("/gpu/stats").json();
    let mut ids: Vec<u64> =
        stats["gpus"].as_array().unwrap().iter().map(|gpu| gpu["gpu_id"].as_u64().unwrap()).collect();
    ids.sort_unstable();
    assert_eq!(ids, [1, 3]);
    let filtering = &endpoint.get("/config").json()["gpu_filtering"];
    assert_eq!((&filtering["filtering_active"], &filtering["total_system_gpus"]), (&json!(true), &json!(4)));
    let left_out = r#"WARN gpupool_agent::node::sampler: CUDA_VISIBLE_DEVICES: "9""#;
    eventually("the warning", async || agent.log().contains(left_out).then_some(())).await;

    let none = crate::common::agent().variable("CUDA_VISIBLE_DEVICES", "").start().await;
    assert_eq!(check_statistics(&RawEndpoint::tcp(&none), ""), 0);
}

#[tokio::test]
async fn api_prefix_and_docs_url_move_the_routes() {
    let agent = agent()
        .variable("API_PREFIX", "/api/v2")
        .variable("DOCS_URL", "/help")
        .variable("ENABLE_CORS", "false")
        .variable("ACCESS_LOG", "false")
        .variable("MAX_HISTORY", "3")
        .variable("REFRESH_INTERVAL", "0.05")
        .start()
        .await;
    let endpoint = RawEndpoint::tcp(&agent);
    assert_eq!(check_statistics(&endpoint, "/api/v2"), 4);
    assert_eq!(endpoint.get("/gpu/stats").status, 404);
    assert_eq!(endpoint.get("/api/v2/v1/pool").status, 200);
    let config = endpoint.get("/api/v2/config").json();
    assert_eq!(config["api"]["docs_url"], "/help");
    assert_eq!(config["monitoring"], json!({"refresh_interval": 0.05, "max_history": 3}));
    assert_eq!(cors_header(&endpoint, "/api/v2/gpu/stats"), None);
    let client = agent.client();
    assert!(client.pool().await.is_ok(), "a client uses the address that the agent printed");
    let full = async || {
        let history = endpoint.get("/api/v2/gpu/history").json();
        let readings = history["gpus"][0]["readings"].as_array()?.len();
        assert!(readings <= 3, "{readings} readings are stored");
        (readings == 3).then_some(())
    };
    eventually("three readings", full).await;
    let log = agent.log();
    assert!(!log.contains("/gpu/stats"), "requests are logged: {log}");
}

fn cors_header(endpoint: &RawEndpoint, path: &str) -> Option<String> {
    let response = endpoint.send("GET", path, &[("Origin", "https://elsewhere.example")], None);
    assert_eq!(response.status, if path.starts_with("/v1/") { 403 } else { 200 });
    response.header("access-control-allow-origin").map(ToOwned::to_owned)
}

#[tokio::test]
async fn pages_of_other_sites_may_read_only_statistics_and_requests_are_logged() {
    let agent = agent().start().await;
    let endpoint = RawEndpoint::tcp(&agent);
    assert_eq!(cors_header(&endpoint, "/gpu/stats").as_deref(), Some("*"));
    assert_eq!(cors_header(&endpoint, "/v1/leases"), None);
    let response = endpoint.send("OPTIONS", "/gpu/stats", &[("Origin", "https://elsewhere.example")], None);
    assert_eq!((response.status, response.header("access-control-allow-methods")), (204, Some("GET, HEAD, OPTIONS")));
    let response = endpoint.send("OPTIONS", "/v1/leases", &[("Origin", "https://elsewhere.example")], None);
    assert_eq!(response.header("access-control-allow-origin"), None);
    eventually("the log of a request", async || agent.log().contains("/gpu/stats").then_some(())).await;
}

#[tokio::test]
async fn host_and_port_may_come_from_the_environment() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpupool"));
    command.args(["serve", "--simulate", "1xH100", "--state-dir"]).arg(folder.path());
    command.env("HOST", "localhost").env("PORT", "0").stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    let address = lines.map_while(Result::ok).find_map(|line| Some(line.split_once("http://")?.1.to_owned()));
    let address = address.unwrap().parse().unwrap();
    let config = RawEndpoint::Tcp(address).get("/config").json();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!((&config["server"]["host"], &config["server"]["port"]), (&json!("localhost"), &json!(address.port())));
}

#[tokio::test]
async fn a_hung_driver_is_reported_and_stops_nothing_else() {
    let agent = agent().argument("--refresh-interval=0.1").start().await;
    let endpoint = RawEndpoint::tcp(&agent);
    let client = agent.client();
    let (lease, token) = crate::common::acquire(&client, &crate::common::whole_gpu()).await;
    let faulted = endpoint.post("/v1/simulate/faults", &json!({"gpu_id": 0, "fault": "hung_driver:50"}));
    assert_eq!(faulted.status, 200, "{}", faulted.text());
    let stale = eventually("the reading to be marked as old", async || {
        let stats = endpoint.get("/gpu/stats").json();
        (stats["stale"] == json!(true)).then_some(stats)
    });
    let stale = stale.await;
    assert_eq!(stale["gpus"].as_array().unwrap().len(), 4, "the last readings are still shown");
    let health = eventually("the health to report it", async || health_unless_healthy(&agent)).await;
    assert!(!health.json()["problems"].as_array().unwrap().is_empty());
    assert!(client.renew(lease.id, token).await.is_ok(), "a lease can still be renewed");
    assert!(client.release(lease.id).await.is_ok());
    assert_eq!(endpoint.get("/v1/pool").status, 200);
    client.clear_faults().await.unwrap();
    eventually("a fresh reading", async || (endpoint.get("/health").json()["status"] == "healthy").then_some(())).await;
}

fn health_unless_healthy(agent: &TestAgent) -> Option<RawResponse> {
    let health = RawEndpoint::tcp(agent).get("/health");
    (health.json()["status"] != "healthy").then_some(health)
}
