//! No request body causes a panic, and every error names the field.

use crate::support::fuzzed;
use proptest::prelude::*;
use serde_json::{Value, json};

/// Numbers at the limits of fields.
fn edges() -> impl Strategy<Value = Value> {
    prop::sample::select(vec![
        json!(0),
        json!(-1),
        json!(1),
        json!(0.1),
        json!(0.0005),
        json!(1.0),
        json!(1.0000001),
        json!(64),
        json!(65),
        json!(100),
        json!(65_536),
        json!(i32::MIN),
        json!(i32::MAX),
        json!(u32::MAX),
        json!(i64::MIN),
        json!(u64::MAX),
        json!(1e300),
        json!(-1e-300),
        json!(1e9),
        json!(3.2e9),
        json!(17_592_186_044_416_u64),
    ])
}

fn words() -> impl Strategy<Value = Value> {
    prop_oneof![
        prop::sample::select(vec!["", "none", "mps", "mig", "fgd", "least-used", "nvidia", "amd", "H100", " "])
            .prop_map(Value::from),
        any::<String>().prop_map(Value::from),
        Just(Value::from("x".repeat(300))),
    ]
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        edges(),
        words(),
    ];
    leaf.prop_recursive(3, 24, 5, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::vec((field(), inner), 0..5).prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
        ]
    })
}

fn field() -> impl Strategy<Value = String> {
    let known = "gpus fraction memory_mib sharing isolation strategy memory_threshold utilization_threshold select cpus \
                 host_memory_mib owner worker_id labels priority queue wait_secs wait_limit_secs ttl_secs \
                 max_duration_secs hedged vendor model min_memory_mib gpu_ids uuids fractoin";
    prop::sample::select(known.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
}

/// Valid bodies, to be corrupted.
fn valid_bodies() -> Vec<Value> {
    vec![
        json!({}),
        json!({"gpus": 2, "owner": "alice", "priority": 5, "ttl_secs": 30, "max_duration_secs": 3600}),
        json!({"fraction": 0.5, "memory_mib": 4000, "isolation": "none", "strategy": "best-fit"}),
        json!({"sharing": true, "memory_threshold": 80, "utilization_threshold": 90.0, "queue": false}),
        json!({"gpus": 0, "cpus": 1.5, "host_memory_mib": 512, "labels": {"team": "vision"}, "worker_id": "w-1"}),
        json!({"select": {"vendor": "nvidia", "model": ["H100", "A100"], "min_memory_mib": 1000, "gpu_ids": [0, 1],
                          "uuids": ["GPU-own-0"], "labels": {"zone": "west"}}, "hedged": true, "wait_limit_secs": 9}),
    ]
}

proptest! {
    // Failures are printed in full, which is enough to write a test.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_text_is_a_request_or_an_error(text in ".*") {
        fuzzed::request_body(text.as_bytes());
    }

    #[test]
    fn any_json_is_a_request_or_an_error(value in any_json()) {
        fuzzed::request_body(value.to_string().as_bytes());
    }

    #[test]
    fn any_number_in_any_field_is_a_request_or_an_error_that_names_it(field in field(), value in edges()) {
        fuzzed::request_body(json!({ field: value }).to_string().as_bytes());
    }

    #[test]
    fn a_corrupted_body_is_a_request_or_an_error_that_names_the_field(
        body in prop::sample::select(valid_bodies()),
        corruptions in prop::collection::vec((field(), prop_oneof![3 => edges(), 2 => words(), 1 => any_json()]), 1..4),
        inside in any::<bool>(),
    ) {
        let mut body = body;
        for (field, value) in corruptions {
            match body.get_mut("select").and_then(Value::as_object_mut).filter(|_| inside) {
                Some(select) => drop(select.insert(field, value)),
                None => body[field] = value,
            }
        }
        fuzzed::request_body(body.to_string().as_bytes());
    }
}

#[test]
fn the_bodies_to_corrupt_are_valid() {
    for body in valid_bodies() {
        let read: gpupool_core::RequestBody = serde_json::from_value(body.clone()).unwrap();
        assert!(gpupool_core::Request::try_from(read).is_ok(), "{body}");
    }
}
