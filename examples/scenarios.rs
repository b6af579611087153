//! Client settings for production, development, batch jobs, several tenants and the edge. With simulated agents:
//! `examples/run scenarios`.

use std::time::Duration;

use gpupool_client::{Balancing, ClientBuilder, ClientError, RequestBody};

/// Settings that differ between the scenarios.
struct Scenario {
    name: &'static str,
    strategy: Balancing,
    /// Thresholds in percent: memory, then utilization.
    thresholds: (f64, f64),
    worker_timeout_secs: u64,
    polling_secs: u64,
}

const SCENARIOS: [Scenario; 5] = [
    // Low thresholds and a long wait limit.
    Scenario {
        name: "production",
        strategy: Balancing::Availability,
        thresholds: (70.0, 80.0),
        worker_timeout_secs: 600,
        polling_secs: 5,
    },
    // Equal use of the test servers, and early errors.
    Scenario {
        name: "development",
        strategy: Balancing::RoundRobin,
        thresholds: (75.0, 85.0),
        worker_timeout_secs: 60,
        polling_secs: 2,
    },
    // High thresholds, more load for larger servers, and a wait limit of half an hour.
    Scenario {
        name: "batch",
        strategy: Balancing::Weighted,
        thresholds: (85.0, 90.0),
        worker_timeout_secs: 1_800,
        polling_secs: 5,
    },
    // Avoids GPUs that others use.
    Scenario {
        name: "multi-tenant",
        strategy: Balancing::Availability,
        thresholds: (60.0, 75.0),
        worker_timeout_secs: 600,
        polling_secs: 3,
    },
    // Frequent polls, because connections at the edge are unreliable.
    Scenario {
        name: "edge",
        strategy: Balancing::Availability,
        thresholds: (75.0, 85.0),
        worker_timeout_secs: 300,
        polling_secs: 2,
    },
];

#[tokio::main]
async fn main() -> Result<(), ClientError> {
    for scenario in SCENARIOS {
        let (memory, utilization) = scenario.thresholds;
        let client = ClientBuilder::from_environment()?
            .strategy(scenario.strategy)
            .memory_threshold(memory)
            .utilization_threshold(utilization)
            .worker_timeout(Duration::from_secs(scenario.worker_timeout_secs))
            .polling_interval(Duration::from_secs(scenario.polling_secs))
            .build()?;
        client.start().await?;
        let lease = client.request(RequestBody::default()).await?;
        println!("{}: {}", scenario.name, lease.global_gpu_id().unwrap_or_default());
        lease.release().await?;
        client.stop().await;
    }
    Ok(())
}
