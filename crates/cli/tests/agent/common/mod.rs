//! What the stories share.

pub mod chance;
pub mod child;
pub mod http;
pub mod machine;
pub mod schema;

use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_api::lease::{Lease, State};
use gpupool_client::AgentClient;
use gpupool_testkit::{Agent, AgentBuilder, in_time};

/// Between two looks at a state that nobody tells of.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The agent built for these tests, with four simulated H100 unless said otherwise.
pub fn agent() -> AgentBuilder {
    Agent::builder(env!("CARGO_BIN_EXE_gpupool"))
}

/// Says on the real standard error what was not tried and why; a passing test's own output is not shown.
pub fn skipped(what: &str, why: &str) {
    let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("skipped {what}: {why}\n").as_bytes());
}

/// Looks again and again until there is an answer.
pub async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let found = async {
        loop {
            if let Some(found) = look().await {
                return found;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    in_time(what, found).await
}

/// One whole GPU, if there is one right now.
pub fn whole() -> RequestBody {
    RequestBody { queue: Some(false), ..RequestBody::default() }
}

/// A lease that is granted at once, and its token.
pub async fn granted(client: &AgentClient, body: &RequestBody) -> (Lease, u64) {
    let lease = client.request(body).await.unwrap();
    assert_eq!(lease.state, State::Active, "{lease:?}");
    let token = lease.token.unwrap();
    (lease, token)
}

/// A lease as it is.
pub async fn now(client: &AgentClient, lease: u64) -> Lease {
    client.follow(lease, Duration::ZERO).await.unwrap()
}
