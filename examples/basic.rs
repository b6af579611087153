//! Requests a GPU, uses it and releases it. With a simulated agent: `examples/run basic`.
//!
//! Uses the servers in the environment (`GPU_SERVICE_ENDPOINT`, or several in `GPU_STATS_SERVICE_ENDPOINTS`), else
//! http://localhost:8000.

use gpupool_client::{Client, ClientError, RequestBody};

#[tokio::main]
async fn main() -> Result<(), ClientError> {
    let client = Client::from_environment()?;
    client.start().await?;

    // Waits for a whole GPU.
    let lease = client.request(RequestBody::default()).await?;
    println!("assigned {} to {}", lease.global_gpu_id().unwrap_or_default(), lease.worker_id());
    for (name, value) in lease.env() {
        println!("  {name}={}", value.as_deref().unwrap_or("(must not be set)"));
    }
    lease.release().await?;

    // Half a GPU for the duration of `work`. Dropping the lease would release it as well.
    let half = RequestBody { fraction: Some(0.5), ..RequestBody::default() };
    let lease = client.request(half).await?;
    println!("assigned half of {}", lease.global_gpu_id().unwrap_or_default());
    tokio::select! {
        lost = lease.wait_until_lost() => println!("lost: {lost}"),
        () = work() => println!("done"),
    }
    lease.release().await?;

    // No node has 64 GPUs, so the request is refused at once, with the reason.
    let never = RequestBody { gpus: Some(64), ..RequestBody::default() };
    if let Err(error) = client.request(never).await {
        println!("not assigned: {error}");
    }
    client.stop().await;
    Ok(())
}

async fn work() {
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
}
