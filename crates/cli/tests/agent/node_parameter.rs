//! `?node=` limits devices, leases, history, events and the routes of one device to a node; unknown names are refused.

use std::io::{BufRead, BufReader, Write};

use gpupool_api::RequestBody;
use gpupool_client::{HistoryQuery, LeaseQuery};
use gpupool_testkit::TestAgent;
use serde_json::json;

use crate::common::agent;
use crate::common::http::{RawEndpoint, request};
use crate::common::{acquire, whole_gpu};

async fn agent_named_here() -> TestAgent {
    agent().simulate("2xH100").argument("--node-name=here").start().await
}

#[tokio::test]
async fn a_node_name_limits_lists_to_that_node() {
    let agent = agent_named_here().await;
    let client = agent.client();
    let (lease, _) = acquire(&client, &RequestBody { gpus: Some(2), ..whole_gpu() }).await;
    let queued = client.request(&RequestBody::default()).await.unwrap();
    let endpoint = RawEndpoint::tcp(&agent);

    let devices = endpoint.get("/v1/devices?node=here").json();
    let read: Vec<_> = devices["devices"].as_array().unwrap().iter().map(|d| (&d["gpu_id"], &d["stale"])).collect();
    assert_eq!(read, [(&json!(0), &json!(false)), (&json!(1), &json!(false))], "each device has its own reading");
    assert!(devices["devices"][1]["memory_used_mib"].is_u64(), "{devices}");
    let on_node = LeaseQuery { node: Some("here".into()), ..LeaseQuery::default() };
    let ids: Vec<u64> = client.leases(&on_node).await.unwrap().leases.iter().map(|lease| lease.id).collect();
    assert_eq!(ids, [lease.id], "lease {} is queued and so on no node", queued.id);
    for (gpu_id, records) in [(None, 1), (Some(1), 1), (Some(7), 0)] {
        let query = HistoryQuery { node: Some("here".into()), gpu_id, ..HistoryQuery::default() };
        assert_eq!(client.history(&query).await.unwrap().records.len(), records, "GPU {gpu_id:?}");
    }
}

#[tokio::test]
async fn a_node_name_selects_the_device_to_cordon() {
    let agent = agent_named_here().await;
    let endpoint = RawEndpoint::unix(&agent);
    for (route, cordoned) in [("cordon", true), ("uncordon", false)] {
        let response = endpoint.post(&format!("/v1/devices/1/{route}?node=here"), &json!({}));
        assert_eq!((response.status, &response.json()["cordoned"]), (200, &json!(cordoned)), "{}", response.text());
    }
}

#[tokio::test]
async fn events_of_a_node_leave_out_events_without_a_node() {
    let agent = agent_named_here().await;
    let client = agent.client();
    let (first, _) = acquire(&client, &RequestBody { gpus: Some(2), ..whole_gpu() }).await;
    let mut stream = RawEndpoint::tcp(&agent).connect().unwrap();
    stream.write_all(request("GET", "/v1/events?node=here", &[], None).as_bytes()).unwrap();
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    lines.find(|line| line == ": listening").unwrap();
    client.request(&RequestBody::default()).await.unwrap();
    client.release(first.id).await.unwrap();
    let mut kinds = lines.filter_map(|line| Some(line.strip_prefix("event: ")?.to_owned()));
    let until_granted: Vec<String> = kinds.by_ref().take_while(|kind| kind != "granted").collect();
    assert!(until_granted.contains(&"ended".to_owned()), "{until_granted:?}");
    assert!(!until_granted.contains(&"queued".to_owned()), "{until_granted:?}");
}

#[tokio::test]
async fn an_unknown_node_is_refused_with_the_known_names() {
    let agent = agent_named_here().await;
    let endpoint = RawEndpoint::unix(&agent);
    for (method, path) in [
        ("GET", "/v1/devices?node=there"),
        ("GET", "/v1/leases?node=there"),
        ("GET", "/v1/history?node=there&gpu_id=0"),
        ("GET", "/v1/events?node=there"),
        ("POST", "/v1/devices/0/cordon?node=there"),
        ("POST", "/v1/devices/0/uncordon?node=there"),
    ] {
        let response = endpoint.send(method, path, &[], None);
        assert_eq!((response.status, response.code().as_str()), (404, "unknown_node"), "{method} {path}");
        let detail = response.json()["detail"].as_str().unwrap().to_owned();
        assert!(detail.contains("\"there\"") && detail.contains("here"), "{detail}");
    }
}
