//! Measures the cost of the client, for `benches/run-client`.
//!
//! - `cost pairs ADDRESS SECONDS`: requests and releases a GPU repeatedly, alternating between the bare HTTP library
//!   (`reqwest`, the same bodies, no retries, no state) and the client. Prints the median of each in µs.
//! - `cost wait ADDRESSES N`: lets N requests wait at all addresses (comma-separated); prints the memory that this
//!   process uses for them, in MiB, and waits for the end of standard input.

use std::error::Error;
use std::io::Read as _;
use std::time::{Duration, Instant};

use gpupool_client::{Client, RequestBody};
use serde_json::Value;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

#[tokio::main]
async fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["pairs", address, seconds] => pairs(address, seconds.parse()?).await,
        ["wait", addresses, count] => wait(addresses, count.parse()?).await,
        _ => Err("usage: cost pairs ADDRESS SECONDS | cost wait ADDRESSES N".into()),
    }
}

/// Runs in a task of the runtime, as in real programs; the main thread is not one of its workers.
async fn pairs(address: &str, seconds: f64) -> Outcome<()> {
    let address = address.to_owned();
    let (mut bare, mut ours) = tokio::spawn(measure(address, seconds)).await??;
    println!("{:.1} {:.1}", median(&mut bare), median(&mut ours));
    Ok(())
}

async fn measure(address: String, seconds: f64) -> Outcome<(Vec<Duration>, Vec<Duration>)> {
    // reqwest requires a provider even without encryption; an installed one is fine.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let http = reqwest::Client::builder().no_proxy().build()?;
    // A simulated GPU stays busy for a moment after a release, which must not affect the measurement.
    let client = Client::builder().endpoint(&address).memory_threshold(100.0).utilization_threshold(100.0).build()?;
    client.start().await?;
    let (mut bare, mut ours) = (Vec::new(), Vec::new());
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    while Instant::now() < end {
        // Alternating, so that other load on the machine affects both alike.
        let began = Instant::now();
        by_hand(&http, &address).await?;
        bare.push(began.elapsed());
        let began = Instant::now();
        client.request(RequestBody::default()).await?.release().await?;
        ours.push(began.elapsed());
    }
    Ok((bare, ours))
}

/// The calls of a program without the client: request, parse, release.
async fn by_hand(http: &reqwest::Client, address: &str) -> Outcome<()> {
    // The same body as the client's: thresholds travel with each request.
    let body = serde_json::json!({
        "queue": false, "worker_id": "worker-1", "memory_threshold": 100.0, "utilization_threshold": 100.0,
    });
    let asked = http.post(format!("{address}/v1/leases")).header("idempotency-key", key()).json(&body).send().await?;
    let lease: Value = asked.error_for_status()?.json().await?;
    let released = http.delete(format!("{address}/v1/leases/{}", lease["id"])).send().await?;
    let _: Value = released.error_for_status()?.json().await?;
    Ok(())
}

fn key() -> String {
    format!("{:?}", Instant::now())
}

fn median(times: &mut [Duration]) -> f64 {
    times.sort();
    times.get(times.len() / 2).map_or(0.0, |time| time.as_secs_f64() * 1e6)
}

async fn wait(addresses: &str, count: usize) -> Outcome<()> {
    let client = Client::builder().endpoints(addresses).worker_timeout(Duration::from_secs(3_600)).build()?;
    client.start().await?;
    let before = resident_mib()?;
    for _ in 0..count {
        let client = client.clone();
        tokio::spawn(async move { client.request(RequestBody::default()).await });
    }
    // Until all requests wait at all endpoints, and a while longer, to measure their idle cost.
    while client.pool_status()?.blocked_workers < count {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    for endpoint in client.endpoints_info()? {
        let Some(agent) = client.endpoint(&endpoint.url) else { continue };
        while agent.pool().await?.waiting < count {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    tokio::time::sleep(Duration::from_secs(12)).await;
    let after = resident_mib()?;
    println!("{:.1} {:.1}", after, after - before);
    tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new())).await??;
    Ok(())
}

fn resident_mib() -> Outcome<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
    Ok(line.trim().trim_end_matches(" kB").trim().parse::<f64>()? / 1024.0)
}
