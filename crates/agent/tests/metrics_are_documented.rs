//! Every metric is documented, every documented metric exists, and the dashboard uses only existing metrics.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use axum::http::{Method, StatusCode};
use gpupool_agent::internals::{DeviceFilter, Metrics, MetricsFormat, MetricsScrape, Statistics};

fn metrics_text(format: MetricsFormat) -> String {
    let metrics = Arc::new(Metrics::new());
    metrics.know_routes(["/gpu/stats".to_owned()]);
    metrics.answered(&Method::GET, "/gpu/stats", StatusCode::OK, Duration::from_micros(70));
    metrics.answered(&Method::PUT, "/made/up", StatusCode::NOT_FOUND, Duration::from_secs(1000));
    let statistics = Statistics::new(DeviceFilter::default(), Duration::from_secs(1), 1);
    let now = gpupool_agent::internals::now();
    MetricsScrape { metrics, current: statistics.current(), pool: None, node: "here".into(), now }.encode(format)
}

/// Returns the families with their kinds.
fn exported_families() -> BTreeMap<String, String> {
    let text = metrics_text(MetricsFormat::OpenMetrics);
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    types.map(|(name, kind)| (name.to_owned(), kind.to_owned())).collect()
}

fn file(path: &str) -> String {
    let path = format!("{}/../../{path}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

#[test]
fn documented_and_exported_metrics_are_the_same() {
    let page = file("docs/metrics.md");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
    let documented: BTreeMap<String, String> =
        rows.filter_map(|(name, rest)| Some((name.into(), rest.split_once(" |")?.0.into()))).collect();
    assert_eq!(documented, exported_families(), "docs/metrics.md on the left, /metrics on the right");
}

#[test]
fn the_dashboard_uses_only_exported_metrics() {
    let dashboard: serde_json::Value = serde_json::from_str(&file("deploy/grafana/gpupool.json")).unwrap();
    let series: BTreeSet<String> = exported_families()
        .into_iter()
        .flat_map(|(name, kind)| match kind.as_str() {
            "counter" => vec![format!("{name}_total")],
            "histogram" => ["bucket", "sum", "count"].map(|end| format!("{name}_{end}")).to_vec(),
            _ => vec![name],
        })
        .collect();
    let mut found = Vec::new();
    collect_expressions(&dashboard, &mut found);
    assert!(found.len() > 20, "the dashboard uses only {found:?}");
    for expression in found {
        let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let mut names = words.filter(|word| word.starts_with("gpupool_") || word.starts_with("process_")).peekable();
        assert!(names.peek().is_some(), "{expression} uses no metric");
        for name in names {
            assert!(series.contains(name), "{name} in {expression} is not exported");
        }
    }
}

fn collect_expressions(value: &serde_json::Value, found: &mut Vec<String>) {
    match value {
        serde_json::Value::Object(fields) => {
            for (name, value) in fields {
                match value.as_str() {
                    Some(text) if name == "expr" || name == "definition" => found.push(text.to_owned()),
                    _ => collect_expressions(value, found),
                }
            }
        }
        serde_json::Value::Array(values) => values.iter().for_each(|value| collect_expressions(value, found)),
        _ => {}
    }
}

#[test]
fn responses_are_counted_in_their_range_and_unknown_routes_together() {
    let text = metrics_text(MetricsFormat::Plain);
    for line in [
        r#"gpupool_http_request_seconds_bucket{le="0.00005",route="/gpu/stats",method="GET",status="2xx"} 0"#,
        r#"gpupool_http_request_seconds_bucket{le="0.0001",route="/gpu/stats",method="GET",status="2xx"} 1"#,
        r#"gpupool_http_request_seconds_bucket{le="300.0",route="none",method="other",status="4xx"} 0"#,
        r#"gpupool_http_request_seconds_bucket{le="+Inf",route="none",method="other",status="4xx"} 1"#,
        r#"gpupool_http_request_seconds_sum{route="none",method="other",status="4xx"} 1000.0"#,
    ] {
        assert!(text.lines().any(|exported| exported == line), "{line} is not in\n{text}");
    }
    assert!(!text.contains("/made/up"), "a client must not make up labels");
}
