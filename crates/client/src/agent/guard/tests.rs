#[path = "../../../tests/common/mod.rs"]
mod common;

use common::{Server, json, lease};

use super::*;

#[tokio::test]
async fn a_copy_in_a_forked_child_gives_nothing_back_and_stops_nothing() {
    let server = Server::start(|_, _| json("200 OK", &lease(1, State::Active))).await;
    let mut guard = server.client().guard(lease(1, State::Active)).unwrap();
    guard.made_by += 1;
    drop(guard);
    server.asked("POST /v1/leases/1/renew", 2).await;
    assert!(server.seen().iter().all(|asked| !asked.what.starts_with("DELETE")));
}
