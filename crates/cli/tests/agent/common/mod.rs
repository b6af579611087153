//! Helpers for the tests of the agent.

pub mod child;
pub mod http;
pub mod machine;
pub mod schema;

use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_api::lease::{LeaseBody, LeaseState};
use gpupool_client::AgentClient;
use gpupool_testkit::{TestAgent, TestAgentBuilder};

pub use gpupool_testkit::{eventually, skipped};

/// Returns a builder of the agent, by default with four simulated H100.
pub fn agent() -> TestAgentBuilder {
    TestAgent::builder(env!("CARGO_BIN_EXE_gpupool"))
}

/// Returns a request for one whole GPU that does not queue.
pub fn whole_gpu() -> RequestBody {
    RequestBody { queue: Some(false), ..RequestBody::default() }
}

/// Returns a lease that is granted at once, and its token.
pub async fn acquire(client: &AgentClient, body: &RequestBody) -> (LeaseBody, u64) {
    let lease = client.request(body).await.unwrap();
    assert_eq!(lease.state, LeaseState::Active, "{lease:?}");
    let token = lease.token.unwrap();
    (lease, token)
}

/// Returns the current state of a lease.
pub async fn read_lease(client: &AgentClient, lease: u64) -> LeaseBody {
    client.follow(lease, Duration::ZERO).await.unwrap()
}
