#[allow(unreachable_pub, reason = "shared with tests outside of the crate")]
#[path = "../../../tests/common/mod.rs"]
mod common;

use common::{ScriptedServer, json_reply, lease};

use super::*;
use crate::transport::{ExchangeFuture, HttpRequest, Transport};

#[tokio::test]
async fn a_copy_in_a_forked_child_releases_nothing_and_stops_nothing() {
    let server = ScriptedServer::start(|_, _| json_reply("200 OK", &lease(1, LeaseState::Active))).await;
    let mut lease_guard = server.client().guard_lease(lease(1, LeaseState::Active)).unwrap();
    lease_guard.creator_pid += 1;
    drop(lease_guard);
    server.wait_for_request("POST /v1/leases/1/renew", 2).await;
    assert!(server.received().iter().all(|request| !request.target.starts_with("DELETE")));
}

/// A transport that never responds.
#[derive(Debug)]
struct SilentTransport;

impl Transport for SilentTransport {
    fn exchange(&self, _: HttpRequest) -> ExchangeFuture<'_> {
        Box::pin(std::future::pending())
    }
}

#[tokio::test(start_paused = true)]
async fn no_task_outlives_a_client_whose_leases_are_released() {
    let client = AgentClient::builder("http://silent".parse().unwrap())
        .build_with_transport(std::sync::Arc::new(SilentTransport));
    let lease = LeaseBody { ttl_secs: 86_400.0, ..lease(1, LeaseState::Active) };
    drop(client.guard_lease(lease).unwrap());
    drop(client);
    // By then the release was abandoned, and no renewal would have been due yet.
    tokio::time::sleep(RELEASE_TIME_LIMIT * 2).await;
    assert_eq!(Handle::current().metrics().num_alive_tasks(), 0);
}
