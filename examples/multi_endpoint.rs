//! Uses several servers as one pool: the strategy chooses the server of a request, and if all are full, the request waits at
//! each of them. With three simulated agents: `examples/run multi_endpoint`.

use gpupool_client::{Balancing, Client, ClientBuilder, ClientError, RequestBody};

#[tokio::main]
async fn main() -> Result<(), ClientError> {
    for strategy in [Balancing::Availability, Balancing::RoundRobin, Balancing::Weighted] {
        let client = ClientBuilder::from_environment()?.strategy(strategy).build()?;
        client.start().await?;
        let status = client.pool_status()?;
        println!(
            "{}: {} of {} GPUs available at {} of {} endpoints",
            strategy.name(),
            status.available_gpus,
            status.total_gpus,
            status.healthy_endpoints,
            status.total_endpoints
        );
        fill(&client).await?;
        client.stop().await;
    }
    Ok(())
}

/// Requests every available GPU, then waits for one more.
async fn fill(client: &Client) -> Result<(), ClientError> {
    let mut held = Vec::new();
    for _ in 0..client.pool_status()?.available_gpus {
        let lease = client.request(RequestBody::default()).await?;
        println!("  {}", lease.global_gpu_id().unwrap_or_default());
        held.push(lease);
    }
    let waiting = tokio::spawn({
        let client = client.clone();
        async move { client.request(RequestBody::default()).await }
    });
    if let Some(first) = held.pop() {
        println!("  one more request waits at every server; {} is released", first.global_gpu_id().unwrap_or_default());
        first.release().await?;
    }
    if let Ok(lease) = waiting.await {
        let lease = lease?;
        println!("  and it got {}", lease.global_gpu_id().unwrap_or_default());
        held.push(lease);
    }
    for endpoint in client.endpoints_info()? {
        println!("  {}: {}/{} GPUs available", endpoint.endpoint_id, endpoint.available_gpus, endpoint.total_gpus);
    }
    // A dropped lease is released in the background; `release` waits until it is done.
    for lease in held {
        lease.release().await?;
    }
    Ok(())
}
