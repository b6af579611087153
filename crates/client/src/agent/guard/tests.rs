#[allow(unreachable_pub, reason = "shared with tests outside of the crate")]
#[path = "../../../tests/common/mod.rs"]
mod common;

use common::{Server, json, lease};

use super::*;
use crate::transport::{ExchangeFuture, HttpRequest, Transport};

#[tokio::test]
async fn a_copy_in_a_forked_child_gives_nothing_back_and_stops_nothing() {
    let server = Server::start(|_, _| json("200 OK", &lease(1, LeaseState::Active))).await;
    let mut guard = server.client().guard_lease(lease(1, LeaseState::Active)).unwrap();
    guard.made_by += 1;
    drop(guard);
    server.asked("POST /v1/leases/1/renew", 2).await;
    assert!(server.seen().iter().all(|asked| !asked.what.starts_with("DELETE")));
}

/// An agent that never answers.
#[derive(Debug)]
struct Silent;

impl Transport for Silent {
    fn exchange(&self, _: HttpRequest) -> ExchangeFuture<'_> {
        Box::pin(std::future::pending())
    }
}

#[tokio::test(start_paused = true)]
async fn no_task_outlives_a_client_whose_leases_are_given_back() {
    let client =
        AgentClient::builder("http://silent".parse().unwrap()).build_with_transport(std::sync::Arc::new(Silent));
    let lease = LeaseBody { ttl_secs: 86_400.0, ..lease(1, LeaseState::Active) };
    drop(client.guard_lease(lease).unwrap());
    drop(client);
    // The release is given up by then, and no lease would have been renewed yet.
    tokio::time::sleep(RELEASE_PATIENCE * 2).await;
    assert_eq!(Handle::current().metrics().num_alive_tasks(), 0);
}
