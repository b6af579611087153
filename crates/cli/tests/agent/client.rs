//! The client against the real agent: every call is understood by both sides, and a lease lasts as long as it is wanted.

use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_api::lease::State;
use gpupool_api::simulate::FaultBody;
use gpupool_api::tokens::NewToken;
use gpupool_client::{AgentClient, HistoryQuery, HoldEnd, LeaseGuard, LeaseQuery, Lost, Secret, UsageBy, WaitOptions};
use gpupool_testkit::{Agent, Audit, Seen, in_time};

async fn agent(devices: &str) -> Agent {
    Agent::builder(env!("CARGO_BIN_EXE_gpupool")).simulate(devices).start().await
}

async fn granted(client: &AgentClient, body: RequestBody) -> LeaseGuard {
    in_time("a grant", client.wait_until_granted(body, WaitOptions::default(), |_| {})).await.unwrap()
}

fn whole() -> RequestBody {
    RequestBody { ttl_secs: Some(3.0), ..RequestBody::default() }
}

#[tokio::test]
async fn client_and_agent_understand_each_other_in_every_call() {
    let agent = agent("2xH100").await;
    for client in [agent.client(), agent.client_unix()] {
        let pool = client.pool().await.unwrap();
        assert_eq!((pool.authority.as_str(), pool.devices, pool.simulated), ("agent", 2, true));
        if let Some(here) = gpupool_api::node::this_machine() {
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

        assert!(client.cordon(1).await.unwrap().cordoned);
        assert!(!client.uncordon(1).await.unwrap().cordoned);
        let fault = FaultBody { gpu_id: Some(0), fault: client.faults().await.unwrap().known[0].clone().into() };
        assert_eq!(client.set_fault(&fault).await.unwrap().faults.len(), 1);
        assert!(client.clear_faults().await.unwrap().faults.is_empty());

        let made = client.create_token(&NewToken { owner: "carol".into(), admin: false }).await.unwrap();
        let carols = AgentClient::builder(client.endpoint().clone()).token(Secret::new(&made.secret)).build().unwrap();
        let lease = carols.request(&RequestBody { fraction: Some(0.5), ..whole() }).await.unwrap();
        assert_eq!((lease.owner.as_str(), lease.state), ("carol", State::Active));
        assert_eq!(carols.follow(lease.id, Duration::ZERO).await.unwrap().id, lease.id);
        let of_carol = LeaseQuery { owner: Some("carol".into()), ..LeaseQuery::default() };
        assert_eq!(client.leases(&of_carol).await.unwrap().leases.len(), 1);
        assert_eq!(client.revoke(lease.id, 0.0).await.unwrap().state, State::Revoked);
        assert_eq!(carols.renew(lease.id, lease.token.unwrap()).await.unwrap_err().code(), Some("ended"));
        client.revoke_token(made.id).await.unwrap();
        assert!(client.tokens().await.unwrap().tokens.iter().any(|token| token.id == made.id));
        assert_eq!(carols.request(&whole()).await.unwrap_err().code(), Some("token_unknown"));

        let history = client.history(&HistoryQuery { owner: Some("carol".into()), ..HistoryQuery::default() }).await;
        assert!(history.unwrap().records.iter().any(|record| record.lease == lease.id && record.event == "ended"));
        assert_eq!(client.usage(UsageBy::Owner, None).await.unwrap().by, "owner");
        assert_eq!(client.usage(UsageBy::Gpu, None).await.unwrap().by, "gpu");
        assert_eq!(client.release(lease.id).await.unwrap().unwrap().state, State::Revoked);
        assert_eq!(client.release(1 << 40).await.unwrap(), None);
    }
}

#[tokio::test]
async fn a_guard_outlives_the_agents_death_and_the_audit_is_clean() {
    let mut agent = agent("1xH100").await;
    let client = agent.client();
    let guard = granted(&client, whole()).await;
    let lease = guard.lease();
    agent.kill9().await;
    agent.restart().await;
    let renewed = in_time("a renewal", client.renew(lease.id, lease.token.unwrap())).await.unwrap();
    assert_eq!(renewed.state, State::Active);
    let released = in_time("the release", guard.release()).await.unwrap().unwrap();
    assert_eq!((released.id, released.state), (lease.id, State::Released));
    let seen = Seen { granted: vec![(lease.id, lease.token.unwrap())], released: vec![lease.id], ..Seen::default() };
    Audit::of(&client).await.unwrap().assert_clean(&seen);
    assert!(agent.stop().await.success(), "{}", agent.log());
}

#[tokio::test]
async fn a_guard_tells_that_an_administrator_took_its_lease() {
    let agent = agent("1xH100").await;
    let guard = granted(&agent.client(), whole()).await;
    agent.client_unix().revoke(guard.lease().id, 0.0).await.unwrap();
    let lost = in_time("the loss", guard.lost()).await;
    assert!(matches!(&lost, Lost::Ended { cause: Some(cause), .. } if cause == "revoked"), "{lost:?}");
}

#[tokio::test]
async fn a_waiter_gets_its_turn_and_one_that_gives_up_leaves_the_queue() {
    let agent = agent("1xH100").await;
    let client = agent.client_unix();
    let mut watch = agent.watch().await;
    let first = granted(&client, whole()).await;

    let gives_up = client.wait_until_granted(whole(), WaitOptions::default(), |_| {});
    let queued = tokio::select! {
        _ = gives_up => panic!("the only GPU is taken"),
        event = watch.until("a waiter", |event| event.kind == "queued") => event.lease.unwrap(),
    };
    watch.lease("ended", queued).await;

    let (next, released) = tokio::join!(granted(&client, whole()), async {
        watch.until("a waiter", |event| event.kind == "queued").await;
        first.release().await
    });
    assert_eq!(released.unwrap().unwrap().state, State::Released);
    next.release().await.unwrap();
    Audit::of(&client).await.unwrap().assert_clean(&Seen::default());
}

#[tokio::test]
async fn a_lease_held_by_a_connection_ends_with_it() {
    let agent = agent("1xH100").await;
    let client = agent.client();
    let mut watch = agent.watch().await;
    let lease = granted(&client, whole()).await.let_go_on();
    let token = lease.token.unwrap();
    let mut hold = client.hold(lease.id, token).await.unwrap();
    assert_eq!(hold.lease().expires_at, None);
    assert_eq!(client.hold(lease.id, token + 1).await.unwrap_err().code(), Some("stale"));
    client.revoke(lease.id, 0.0).await.unwrap();
    assert!(matches!(in_time("the end", hold.ended()).await, HoldEnd::Ended(_)));

    let lease = granted(&client, whole()).await.let_go_on();
    drop(client.hold(lease.id, lease.token.unwrap()).await.unwrap());
    watch.lease("ended", lease.id).await;
}

#[tokio::test]
async fn events_go_on_over_a_restart_with_a_reset() {
    let mut agent = agent("1xH100").await;
    let mut watch = agent.watch().await;
    let guard = granted(&agent.client(), whole()).await;
    watch.lease("granted", guard.lease().id).await;
    agent.restart().await;
    watch.until("a reset", |event| event.kind == "reset").await;
    let id = guard.lease().id;
    guard.release().await.unwrap();
    watch.lease("ended", id).await;
}

#[tokio::test]
async fn an_agent_that_stood_still_goes_on() {
    let agent = agent("1xH100").await;
    let client = AgentClient::builder(agent.address().parse().unwrap()).answer_timeout(Duration::from_millis(300));
    let client = client.build().unwrap();
    agent.pause();
    assert!(in_time("an error", client.pool()).await.unwrap_err().is_passing());
    agent.resume();
    in_time("an answer", agent.client().pool()).await.unwrap();
}
