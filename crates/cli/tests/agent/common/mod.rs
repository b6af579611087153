//! What the stories share.

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

/// The agent built for these tests, with four simulated H100 unless said otherwise.
pub fn agent() -> TestAgentBuilder {
    TestAgent::builder(env!("CARGO_BIN_EXE_gpupool"))
}

/// One whole GPU, if there is one right now.
pub fn whole_gpu() -> RequestBody {
    RequestBody { queue: Some(false), ..RequestBody::default() }
}

/// A lease that is granted at once, and its token.
pub async fn acquire(client: &AgentClient, body: &RequestBody) -> (LeaseBody, u64) {
    let lease = client.request(body).await.unwrap();
    assert_eq!(lease.state, LeaseState::Active, "{lease:?}");
    let token = lease.token.unwrap();
    (lease, token)
}

/// A lease as it is.
pub async fn read_lease(client: &AgentClient, lease: u64) -> LeaseBody {
    client.follow(lease, Duration::ZERO).await.unwrap()
}
