//! Workers on GPUs that are leased from a real agent.

use std::collections::BTreeSet;
use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_api::lease::{LeaseBody, LeaseState};
use gpupool_client::LeaseQuery;
use gpupool_client::local::LocalAgent;
use gpupool_dispatch::WorkerExitCause;
use gpupool_dispatch::resource_pool::{
    AcquireError, GpuLeaseConfig, HeldWorkerError, ResourcePool, ResourcePoolConfig, WorkerHoldEndReason,
};
use gpupool_testkit::{TestAgent, gpupool_binary};

use crate::test_pool::{TestPool, hold_ends, text, wait_for_status, within_patience};

async fn start_agent(devices: &str) -> TestAgent {
    TestAgent::builder(gpupool_binary()).simulate(devices).start().await
}

fn pool_on(agent: &TestAgent, workers: u32, body: RequestBody) -> TestPool {
    let gpus = GpuLeaseConfig { agent: LocalAgent::from_client(agent.client_unix()), body };
    TestPool::with_workers(workers).configure(|config: &mut ResourcePoolConfig| config.gpus = Some(gpus))
}

async fn active_leases(agent: &TestAgent) -> Vec<LeaseBody> {
    let all = agent.client_unix().leases(&LeaseQuery::default()).await.unwrap();
    all.leases.into_iter().filter(|lease| lease.state == LeaseState::Active).collect()
}

/// Ends a pool and waits until the agent has removed the leases' control groups, which an ended agent could not.
async fn shut_down_pool(agent: &TestAgent, pool: &ResourcePool) {
    within_patience("the end of the pool", pool.shutdown()).await;
    let drained = async {
        // Draining leases have ended and are listed only among all.
        let query = LeaseQuery { state: Some("all".into()), ..LeaseQuery::default() };
        while agent.client_unix().leases(&query).await.unwrap().leases.iter().any(|lease| lease.draining) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    within_patience("the end of draining", drained).await;
}

#[tokio::test]
async fn each_worker_has_its_own_gpu_and_all_are_released() {
    let agent = start_agent("2xH100").await;
    let test_pool = pool_on(&agent, 2, RequestBody::default());
    let pool = test_pool.start();
    let first = within_patience("a worker", pool.acquire("first")).await.unwrap();
    let second = within_patience("another worker", pool.acquire("second")).await.unwrap();
    let ids: BTreeSet<u32> = [&first, &second].iter().flat_map(|worker| worker.gpu_ids().to_vec()).collect();
    assert_eq!(ids, BTreeSet::from([0, 1]));
    let mut seen = BTreeSet::new();
    for worker in [&first, &second] {
        assert_eq!(worker.device(), "cuda:0");
        seen.insert(text(within_patience("the visible GPUs", worker.run("env CUDA_VISIBLE_DEVICES".into())).await));
    }
    assert!(seen.len() == 2 && !seen.contains(""), "each sees only its own: {seen:?}");
    assert_eq!(active_leases(&agent).await.len(), 2);
    drop((first, second));
    within_patience("the end of the pool", pool.shutdown()).await;
    assert_eq!(active_leases(&agent).await.len(), 0, "released when the shutdown returns");
    shut_down_pool(&agent, &pool).await;
}

#[tokio::test]
async fn a_worker_whose_gpu_is_revoked_is_replaced_on_another() {
    let agent = start_agent("2xH100").await;
    let pool = pool_on(&agent, 1, RequestBody::default()).start();
    let worker = within_patience("a worker", pool.acquire("unlucky")).await.unwrap();
    let held = active_leases(&agent).await;
    agent.client_unix().revoke(held[0].id, 0.0).await.unwrap();
    let error = within_patience("the end of the worker", worker.run("sleep 1000000".into())).await.unwrap_err();
    assert!(matches!(error, HeldWorkerError::Lost(WorkerExitCause::GpuWithdrawn(_))), "{error}");
    drop(worker);
    let next = within_patience("the next worker", pool.acquire("next")).await.unwrap();
    assert_eq!(text(within_patience("a result", next.run("echo fresh".into())).await), "fresh");
    assert_eq!(hold_ends(&pool), [Some(WorkerHoldEndReason::Lost), None]);
    let now = active_leases(&agent).await;
    assert!(now.len() == 1 && now[0].id != held[0].id, "{now:#?}");
    drop(next);
    shut_down_pool(&agent, &pool).await;
}

#[tokio::test]
async fn a_waiter_for_an_impossible_gpu_gets_the_reason() {
    let agent = start_agent("1xH100").await;
    let body = RequestBody { memory_mib: Some(1 << 40), ..RequestBody::default() };
    let pool = pool_on(&agent, 1, body).start();
    let error = within_patience("a result", pool.acquire("hopes")).await.unwrap_err();
    assert!(matches!(error, AcquireError::NoWorker(_)), "{error}");
    assert!(pool.status().failure.is_some());
}

#[tokio::test]
async fn a_pool_uses_the_free_gpus_and_grows_with_them() {
    let agent = start_agent("1xH100").await;
    let (larger, smaller) = (pool_on(&agent, 2, RequestBody::default()), pool_on(&agent, 1, RequestBody::default()));
    let pool = larger.start();
    wait_for_status(&pool, "one worker", |status| status.available_workers == 1).await;
    assert_eq!(pool.status().total_workers, 1, "no GPU is free for the other");
    let test_pool = smaller.configure(|config| config.acquire_patience = Duration::from_millis(300));
    let waits = test_pool.start();
    let error = within_patience("a result", waits.acquire("waits")).await.unwrap_err().to_string();
    assert!(error.contains("waiting for a GPU"), "{error}");
    within_patience("the end of the pool", pool.shutdown()).await;
    wait_for_status(&waits, "a granted GPU", |status| status.available_workers == 1).await;
    shut_down_pool(&agent, &waits).await;
}
