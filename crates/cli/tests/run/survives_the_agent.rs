//! The agent may be killed and restarted while a command runs; it may take the lease back, and then the command ends.
use gpupool_api::lease::{HolderBody, LeaseState};
use gpupool_confine::Signal;
use gpupool_testkit::within_deadline;

use crate::support::{Watched, agent_of, live, over, run, run_at, the_active};

const STAYS: [&str; 3] = ["sh", "-c", "echo pid $$; exec sleep 600"];

#[tokio::test]
async fn the_command_goes_on_through_a_kill_and_restart_of_the_agent() {
    let mut agent = agent_of("1xH100").start().await;
    let mut running = run(&agent, &[], &STAYS);
    let command = Watched::of(&running.says("pid "));
    let before = the_active(&agent.client_unix()).await;
    agent.restart().await;
    assert!(command.is_alive());
    let after = the_active(&agent.client_unix()).await;
    assert_eq!((after.id, after.token, &after.holder), (before.id, before.token, &before.holder));
    assert_eq!(after.holder, Some(HolderBody::Process { pid: running.pid() }));

    running.signal(Signal::TERM);
    assert_eq!(running.code(), 143);
    assert_eq!(over(&agent.client_unix(), before.id).await, (LeaseState::Released, Some("by_owner".into())));
}

#[tokio::test]
async fn a_kill_of_run_after_a_restart_of_the_agent_still_releases() {
    let mut agent = agent_of("1xH100").start().await;
    let mut running = run(&agent, &[], &STAYS);
    let command = Watched::of(&running.says("pid "));
    let lease = the_active(&agent.client_unix()).await;
    agent.restart().await;
    let mut watch = agent.watch_events().await;
    running.signal(Signal::KILL);
    command.expect_end();
    watch.wait_for_lease("ended", lease.id).await;
    assert_eq!(run(&agent, &[], &["true"]).code(), 0);
}

#[tokio::test]
async fn a_kill_of_run_while_the_agent_is_away_releases_when_it_is_back() {
    let mut agent = agent_of("1xH100").start().await;
    let mut running = run(&agent, &[], &STAYS);
    let command = Watched::of(&running.says("pid "));
    let lease = the_active(&agent.client_unix()).await;
    agent.kill9().await;
    running.signal(Signal::KILL);
    command.expect_end();
    running.code();
    agent.restart().await;
    // The only GPU: granted as soon as the agent has seen that its holder is gone.
    assert_eq!(run(&agent, &[], &["true"]).code(), 0);
    assert_eq!(over(&agent.client_unix(), lease.id).await, (LeaseState::Released, Some("holder_gone".into())));
}

#[tokio::test]
async fn a_command_that_ends_while_the_agent_is_away_ends_as_it_would() {
    let mut agent = agent_of("1xH100").start().await;
    let mut running = run(&agent, &[], &STAYS);
    running.says("pid ");
    agent.kill9().await;
    running.signal(Signal::TERM);
    running.tells("the agent is away");
    assert_eq!(running.code(), 143);
    agent.restart().await;
    assert_eq!(run(&agent, &[], &["true"]).code(), 0);
}

#[tokio::test]
async fn over_tcp_the_connection_that_is_the_lease_is_made_anew() {
    let mut agent = agent_of("1xH100").start().await;
    let mut running = run_at(agent.address(), &[], &STAYS);
    let command = Watched::of(&running.says("pid "));
    let before = the_active(&agent.client_unix()).await;
    agent.restart().await;
    running.tells("the agent is back");
    let after = the_active(&agent.client_unix()).await;
    assert_eq!((after.id, after.token, after.holder), (before.id, before.token, Some(HolderBody::Connection)));
    assert!(command.is_alive());
    running.signal(Signal::TERM);
    assert_eq!(running.code(), 143);
    assert_eq!(live(&agent.client_unix()).await, []);
}

#[tokio::test]
async fn a_lease_that_is_taken_back_ends_the_command_with_the_reason() {
    for address in [Way::Socket, Way::Tcp] {
        let agent = agent_of("1xH100").start().await;
        let mut running = match address {
            Way::Socket => run(&agent, &[], &STAYS),
            Way::Tcp => run_at(agent.address(), &[], &STAYS),
        };
        let command = Watched::of(&running.says("pid "));
        let client = agent.client_unix();
        let lease = the_active(&client).await;
        within_deadline("the revocation", client.revoke(lease.id, 0.0)).await.unwrap();
        let told = running.tells("the lease was lost");
        assert!(told.contains("revoked"), "{told}");
        assert_eq!(running.code(), 1);
        command.expect_end();
        assert_eq!(over(&client, lease.id).await.0, LeaseState::Revoked);
        // Nothing of it keeps the GPU.
        assert_eq!(run(&agent, &[], &["true"]).code(), 0);
    }
}

enum Way {
    Socket,
    Tcp,
}

#[tokio::test]
async fn a_lease_that_is_taken_back_after_a_restart_of_the_agent_ends_the_command_too() {
    let mut agent = agent_of("1xH100").start().await;
    let mut running = run(&agent, &[], &STAYS);
    let command = Watched::of(&running.says("pid "));
    let lease = the_active(&agent.client_unix()).await;
    agent.restart().await;
    agent.client_unix().revoke(lease.id, 0.0).await.unwrap();
    running.tells("the lease was lost");
    assert_eq!(running.code(), 1);
    command.expect_end();
}

#[tokio::test]
async fn a_command_that_ignores_the_loss_of_its_lease_is_killed() {
    let agent = agent_of("1xH100").start().await;
    let stubborn = ["sh", "-c", "trap '' TERM; echo pid $$; while :; do sleep 600; done"];
    let mut running = run(&agent, &[], &stubborn);
    let command = Watched::of(&running.says("pid "));
    let client = agent.client_unix();
    let lease = the_active(&client).await;
    client.revoke(lease.id, 0.0).await.unwrap();
    running.tells("the lease was lost");
    command.expect_end();
    assert_eq!(running.code(), 1);
}
