//! The client with the real agent: both sides understand every call, and a guard keeps its lease until it is released.

use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_api::lease::LeaseState;
use gpupool_api::simulate::FaultBody;
use gpupool_api::tokens::NewToken;
use gpupool_client::{
    AgentClient, HistoryQuery, LeaseGuard, LeaseHoldEnd, LeaseLost, LeaseQuery, SecretString, UsageGrouping,
    WaitOptions,
};
use gpupool_testkit::{ClientObservations, TestAgent, TrailAudit, within_deadline};

async fn agent(devices: &str) -> TestAgent {
    TestAgent::builder(env!("CARGO_BIN_EXE_gpupool")).simulate(devices).start().await
}

async fn acquire(client: &AgentClient, body: RequestBody) -> LeaseGuard {
    within_deadline("a grant", client.wait_until_granted(body, WaitOptions::default(), |_| {})).await.unwrap()
}

fn whole_gpu() -> RequestBody {
    RequestBody { ttl_secs: Some(3.0), ..RequestBody::default() }
}

#[tokio::test]
async fn client_and_agent_agree_on_every_call() {
    let agent = agent("2xH100").await;
    for client in [agent.client(), agent.client_unix()] {
        let pool = client.pool().await.unwrap();
        assert_eq!((pool.authority.as_str(), pool.devices, pool.simulated), ("agent", 2, true));
        if let Some(here) = gpupool_api::node::machine_id() {
            assert_eq!(pool.node_id, here);
        }
        assert_eq!(client.devices().await.unwrap().devices.len(), 2);
        assert_eq!(client.stats().await.unwrap().gpu_count, 2);
        assert_eq!(client.summary().await.unwrap().gpu_count, 2);
        assert_eq!(client.gpu_history().await.unwrap().gpus.len(), 2);
        assert_eq!(client.health().await.unwrap().status, "healthy");
        assert!(client.config().await.unwrap().is_object());
        client.metrics().await.unwrap();
        assert!(client.openapi().await.unwrap()["paths"]["/v1/leases"].is_object());

        assert!(client.cordon(1, None).await.unwrap().cordoned);
        assert!(!client.uncordon(1, None).await.unwrap().cordoned);
        let fault = FaultBody { gpu_id: Some(0), fault: client.faults().await.unwrap().known[0].clone().into() };
        assert_eq!(client.set_fault(&fault).await.unwrap().faults.len(), 1);
        assert!(client.clear_faults().await.unwrap().faults.is_empty());

        let made =
            client.create_token(&NewToken { owner: "carol".into(), admin: false, read_only: false }).await.unwrap();
        let carols =
            AgentClient::builder(client.endpoint().clone()).token(SecretString::new(&made.secret)).build().unwrap();
        let lease = carols.request(&RequestBody { fraction: Some(0.5), ..whole_gpu() }).await.unwrap();
        assert_eq!((lease.owner.as_str(), lease.state), ("carol", LeaseState::Active));
        assert_eq!(carols.follow(lease.id, Duration::ZERO).await.unwrap().id, lease.id);
        let of_carol = LeaseQuery { owner: Some("carol".into()), ..LeaseQuery::default() };
        assert_eq!(client.leases(&of_carol).await.unwrap().leases.len(), 1);
        assert_eq!(client.revoke(lease.id, 0.0).await.unwrap().state, LeaseState::Revoked);
        assert_eq!(carols.renew(lease.id, lease.token.unwrap()).await.unwrap_err().code(), Some("ended"));
        client.revoke_token(made.id).await.unwrap();
        assert!(client.tokens().await.unwrap().tokens.iter().any(|token| token.id == made.id));
        assert_eq!(carols.request(&whole_gpu()).await.unwrap_err().code(), Some("token_unknown"));

        let history = client.history(&HistoryQuery { owner: Some("carol".into()), ..HistoryQuery::default() }).await;
        assert!(history.unwrap().records.iter().any(|record| record.lease == lease.id && record.event == "ended"));
        assert_eq!(client.usage(UsageGrouping::Owner, None).await.unwrap().by, "owner");
        assert_eq!(client.usage(UsageGrouping::Gpu, None).await.unwrap().by, "gpu");
        assert_eq!(client.release(lease.id).await.unwrap().unwrap().state, LeaseState::Revoked);
        assert_eq!(client.release(1 << 40).await.unwrap(), None);
    }
}

#[tokio::test]
async fn a_guard_survives_a_kill_of_the_agent_and_the_audit_is_clean() {
    let mut agent = agent("1xH100").await;
    let client = agent.client();
    let guard = acquire(&client, whole_gpu()).await;
    let lease = guard.lease();
    agent.kill9().await;
    agent.restart().await;
    let renewed = within_deadline("a renewal", client.renew(lease.id, lease.token.unwrap())).await.unwrap();
    assert_eq!(renewed.state, LeaseState::Active);
    let released = within_deadline("the release", guard.release()).await.unwrap().unwrap();
    assert_eq!((released.id, released.state), (lease.id, LeaseState::Released));
    let seen = ClientObservations {
        granted: vec![(lease.id, lease.token.unwrap())],
        released: vec![lease.id],
        ..ClientObservations::default()
    };
    TrailAudit::collect(&client).await.unwrap().assert_clean(&seen);
    assert!(agent.stop().await.success(), "{}", agent.log());
}

#[tokio::test]
async fn a_guard_reports_that_an_administrator_revoked_its_lease() {
    let agent = agent("1xH100").await;
    let guard = acquire(&agent.client(), whole_gpu()).await;
    agent.client_unix().revoke(guard.lease().id, 0.0).await.unwrap();
    let lost = within_deadline("the loss", guard.wait_until_lost()).await;
    assert!(matches!(&lost, LeaseLost::Ended { cause: Some(cause), .. } if cause == "revoked"), "{lost:?}");
}

#[tokio::test]
async fn a_waiter_gets_its_turn_and_leaves_the_queue_when_it_gives_up() {
    let agent = agent("1xH100").await;
    let client = agent.client_unix();
    let mut watch = agent.watch_events().await;
    let first = acquire(&client, whole_gpu()).await;

    let gives_up = client.wait_until_granted(whole_gpu(), WaitOptions::default(), |_| {});
    let queued = tokio::select! {
        _ = gives_up => panic!("the only GPU is taken"),
        event = watch.wait_for("a waiter", |event| event.kind == "queued") => event.lease.unwrap(),
    };
    watch.wait_for_lease("ended", queued).await;

    let (next, released) = tokio::join!(acquire(&client, whole_gpu()), async {
        watch.wait_for("a waiter", |event| event.kind == "queued").await;
        first.release().await
    });
    assert_eq!(released.unwrap().unwrap().state, LeaseState::Released);
    next.release().await.unwrap();
    TrailAudit::collect(&client).await.unwrap().assert_clean(&ClientObservations::default());
}

#[tokio::test]
async fn a_lease_held_by_a_connection_ends_with_it() {
    let agent = agent("1xH100").await;
    let client = agent.client();
    let mut watch = agent.watch_events().await;
    let lease = acquire(&client, whole_gpu()).await.detach();
    let token = lease.token.unwrap();
    let mut hold = client.hold_lease(lease.id, token).await.unwrap();
    assert_eq!(hold.lease().expires_at, None);
    assert_eq!(client.hold_lease(lease.id, token + 1).await.unwrap_err().code(), Some("stale"));
    client.revoke(lease.id, 0.0).await.unwrap();
    assert!(matches!(within_deadline("the end", hold.wait_until_ended()).await, LeaseHoldEnd::Ended(_)));

    let lease = acquire(&client, whole_gpu()).await.detach();
    drop(client.hold_lease(lease.id, lease.token.unwrap()).await.unwrap());
    watch.wait_for_lease("ended", lease.id).await;
}

#[tokio::test]
async fn events_continue_after_a_restart_with_a_reset() {
    let mut agent = agent("1xH100").await;
    let mut watch = agent.watch_events().await;
    let guard = acquire(&agent.client(), whole_gpu()).await;
    watch.wait_for_lease("granted", guard.lease().id).await;
    agent.restart().await;
    watch.wait_for("a reset", |event| event.kind == "reset").await;
    let id = guard.lease().id;
    guard.release().await.unwrap();
    watch.wait_for_lease("ended", id).await;
}

#[tokio::test]
async fn an_agent_that_was_stopped_continues() {
    let agent = agent("1xH100").await;
    let client = AgentClient::builder(agent.address().parse().unwrap()).response_timeout(Duration::from_millis(300));
    let client = client.build().unwrap();
    agent.pause();
    assert!(within_deadline("an error", client.pool()).await.unwrap_err().is_transient());
    agent.resume();
    within_deadline("an response", agent.client().pool()).await.unwrap();
}
