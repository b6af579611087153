//! The cost of counting a response, alone and in parallel, and of a scrape without a pool.

use std::sync::Arc;
use std::time::Duration;

use axum::http::{Method, StatusCode};
use divan::{Bencher, black_box};
use gpupool_agent::internals::{DeviceFilter, Metrics, MetricsFormat, MetricsScrape, Statistics};

fn main() {
    divan::main();
}

const ROUTES: [&str; 8] = [
    "/",
    "/gpu/stats",
    "/gpu/summary",
    "/health",
    "/v1/leases",
    "/v1/leases/{id}",
    "/v1/leases/{id}/renew",
    "/v1/devices/{gpu_id}/uncordon",
];

fn metrics() -> Metrics {
    let metrics = Metrics::new();
    metrics.know_routes(ROUTES.map(str::to_owned));
    metrics
}

#[divan::bench(threads = [1, 2])]
fn answered(bencher: Bencher) {
    let metrics = metrics();
    bencher.bench(|| {
        let running = metrics.begin();
        let took = black_box(Duration::from_micros(90));
        metrics.answered(black_box(&Method::GET), black_box("/gpu/stats"), StatusCode::OK, took);
        drop(running);
    });
}

#[divan::bench(args = [MetricsFormat::OpenMetrics, MetricsFormat::Plain])]
fn scraped(bencher: Bencher, format: MetricsFormat) {
    let metrics = Arc::new(metrics());
    for route in ROUTES {
        for method in [Method::GET, Method::POST] {
            metrics.answered(&method, route, StatusCode::OK, Duration::from_micros(90));
        }
    }
    let current = Statistics::new(DeviceFilter::default(), Duration::from_secs(1), 1).current();
    let now = gpupool_agent::internals::now();
    bencher.bench(|| {
        let (metrics, current) = (metrics.clone(), current.clone());
        MetricsScrape { metrics, current, pool: None, node: "here".into(), now }.encode(format)
    });
}
