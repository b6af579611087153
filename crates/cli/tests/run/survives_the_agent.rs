//! Commands survive a restart of the agent, and end when their lease is revoked.
use gpupool_api::lease::{HolderBody, LeaseState};
use gpupool_confine::Signal;
use gpupool_testkit::within_deadline;

use crate::support::{ObservedProcess, active_lease, agent_of, lease_end, live_leases, run, run_at};

const STAYS: [&str; 3] = ["sh", "-c", "echo pid $$; exec sleep 600"];

#[tokio::test]
async fn the_command_survives_a_restart_of_the_agent() {
    let mut agent = agent_of("1xH100").start().await;
    let mut running = run(&agent, &[], &STAYS);
    let command = ObservedProcess::of(&running.wait_for_output("pid "));
    let before = active_lease(&agent.client_unix()).await;
    agent.restart().await;
    assert!(command.is_alive());
    let after = active_lease(&agent.client_unix()).await;
    assert_eq!((after.id, after.token, &after.holder), (before.id, before.token, &before.holder));
    assert_eq!(after.holder, Some(HolderBody::Process { pid: Some(running.pid()) }));

    running.signal(Signal::TERM);
    assert_eq!(running.code(), 143);
    assert_eq!(lease_end(&agent.client_unix(), before.id).await, (LeaseState::Released, Some("by_owner".into())));
}

#[tokio::test]
async fn killing_gpupool_after_a_restart_of_the_agent_releases_the_lease() {
    let mut agent = agent_of("1xH100").start().await;
    let mut running = run(&agent, &[], &STAYS);
    let command = ObservedProcess::of(&running.wait_for_output("pid "));
    let lease = active_lease(&agent.client_unix()).await;
    agent.restart().await;
    let mut watch = agent.watch_events().await;
    running.signal(Signal::KILL);
    command.wait_for_exit();
    watch.wait_for_lease("ended", lease.id).await;
    assert_eq!(run(&agent, &[], &["true"]).code(), 0);
}

#[tokio::test]
async fn killing_gpupool_while_the_agent_is_down_releases_the_lease_later() {
    let mut agent = agent_of("1xH100").start().await;
    let mut running = run(&agent, &[], &STAYS);
    let command = ObservedProcess::of(&running.wait_for_output("pid "));
    let lease = active_lease(&agent.client_unix()).await;
    agent.kill9().await;
    running.signal(Signal::KILL);
    command.wait_for_exit();
    running.code();
    agent.restart().await;
    // The only GPU is granted once the agent has noticed that its holder is gone.
    assert_eq!(run(&agent, &[], &["true"]).code(), 0);
    assert_eq!(lease_end(&agent.client_unix(), lease.id).await, (LeaseState::Released, Some("holder_gone".into())));
}

#[tokio::test]
async fn a_command_can_end_while_the_agent_is_down() {
    let mut agent = agent_of("1xH100").start().await;
    let mut running = run(&agent, &[], &STAYS);
    running.wait_for_output("pid ");
    agent.kill9().await;
    running.signal(Signal::TERM);
    running.wait_for_message("the agent is unreachable");
    assert_eq!(running.code(), 143);
    agent.restart().await;
    assert_eq!(run(&agent, &[], &["true"]).code(), 0);
}

#[tokio::test]
async fn the_connection_that_holds_a_lease_is_reopened() {
    let mut agent = agent_of("1xH100").start().await;
    let mut running = run_at(agent.address(), &[], &STAYS);
    let command = ObservedProcess::of(&running.wait_for_output("pid "));
    let before = active_lease(&agent.client_unix()).await;
    agent.restart().await;
    running.wait_for_message("the agent is reachable again");
    let after = active_lease(&agent.client_unix()).await;
    assert_eq!((after.id, after.token, after.holder), (before.id, before.token, Some(HolderBody::Connection)));
    assert!(command.is_alive());
    running.signal(Signal::TERM);
    assert_eq!(running.code(), 143);
    assert_eq!(live_leases(&agent.client_unix()).await, []);
}

#[tokio::test]
async fn a_revoked_lease_ends_the_command_with_the_reason() {
    for address in [AgentAddress::Socket, AgentAddress::Tcp] {
        let agent = agent_of("1xH100").start().await;
        let mut running = match address {
            AgentAddress::Socket => run(&agent, &[], &STAYS),
            AgentAddress::Tcp => run_at(agent.address(), &[], &STAYS),
        };
        let command = ObservedProcess::of(&running.wait_for_output("pid "));
        let client = agent.client_unix();
        let lease = active_lease(&client).await;
        within_deadline("the revocation", client.revoke(lease.id, 0.0)).await.unwrap();
        let reported = running.wait_for_message("the lease was lost");
        assert!(reported.contains("revoked"), "{reported}");
        assert_eq!(running.code(), 1);
        command.wait_for_exit();
        assert_eq!(lease_end(&client, lease.id).await.0, LeaseState::Revoked);
        // The GPU is free again.
        assert_eq!(run(&agent, &[], &["true"]).code(), 0);
    }
}

enum AgentAddress {
    Socket,
    Tcp,
}

#[tokio::test]
async fn a_lease_revoked_after_a_restart_of_the_agent_ends_the_command() {
    let mut agent = agent_of("1xH100").start().await;
    let mut running = run(&agent, &[], &STAYS);
    let command = ObservedProcess::of(&running.wait_for_output("pid "));
    let lease = active_lease(&agent.client_unix()).await;
    agent.restart().await;
    agent.client_unix().revoke(lease.id, 0.0).await.unwrap();
    running.wait_for_message("the lease was lost");
    assert_eq!(running.code(), 1);
    command.wait_for_exit();
}

#[tokio::test]
async fn a_command_that_ignores_the_loss_of_its_lease_is_killed() {
    let agent = agent_of("1xH100").start().await;
    let stubborn = ["sh", "-c", "trap '' TERM; echo pid $$; while :; do sleep 600; done"];
    let mut running = run(&agent, &[], &stubborn);
    let command = ObservedProcess::of(&running.wait_for_output("pid "));
    let client = agent.client_unix();
    let lease = active_lease(&client).await;
    client.revoke(lease.id, 0.0).await.unwrap();
    running.wait_for_message("the lease was lost");
    command.wait_for_exit();
    assert_eq!(running.code(), 1);
}
