//! Holds two workers of a resource pool with hidden children, prints their pids on one line each, and waits to be
//! killed.
//!
//! ```text
//! pool_holder WORKER AUDIT_TRAIL
//! ```

use std::time::Duration;

use gpupool_dispatch::WorkerProgram;
use gpupool_dispatch::resource_pool::{ResourcePool, ResourcePoolConfig};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    gpupool_dispatch::run_helper_if_requested();
    tokio::runtime::Builder::new_current_thread().build()?.block_on(hold_workers())
}

async fn hold_workers() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let worker = arguments.next().ok_or("which worker?")?;
    let mut config = ResourcePoolConfig::new(WorkerProgram::native(worker), 2, Duration::from_secs(600));
    config.audit = arguments.next().map(Into::into);
    let pool = ResourcePool::start(config)?;
    let mut holds = Vec::new();
    for task in ["first", "second"] {
        let worker = pool.acquire(task).await?;
        worker.run("spawn".into()).await?;
        println!("{}", worker.pid());
        holds.push(worker);
    }
    std::future::pending().await
}
