//! Prints the status updates of a client for some seconds (argument, default 2), then its health. With simulated agents:
//! `examples/run health`.

use std::time::Duration;

use gpupool_client::{Client, ClientError, RequestBody, StatusUpdate};

#[tokio::main]
async fn main() -> Result<(), ClientError> {
    let secs = std::env::args().nth(1).and_then(|secs| secs.parse().ok()).unwrap_or(2.0);
    let client = Client::from_environment()?;
    let mut updates = client.updates();
    client.start().await?;
    let printer = tokio::spawn(async move {
        while let Some(update) = updates.next().await {
            match update {
                StatusUpdate::Statistics { endpoint_id, gpus } => println!("{endpoint_id} has {} GPUs", gpus.len()),
                other => println!("{other:?}"),
            }
        }
    });
    let lease = client.request(RequestBody::default()).await?;
    tokio::time::sleep(Duration::from_secs_f64(secs)).await;
    lease.release().await?;

    println!("{}", client.error_recovery_status()?);
    let metrics = client.detailed_metrics()?;
    println!("efficiency: {}%", metrics.pool_summary.efficiency_percent);
    println!("success rate: {}%", metrics.load_balancer.success_rate);
    for (endpoint_id, endpoint) in metrics.endpoints.details {
        println!("{endpoint_id}: {:.2} ms, healthy: {}", endpoint.avg_response_time_ms, endpoint.is_healthy);
    }
    client.stop().await;
    printer.abort();
    Ok(())
}
