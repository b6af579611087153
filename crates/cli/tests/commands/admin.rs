//! Commands for administrators: `gpupool cordon`, `uncordon`, `revoke` and `device`, and the release of another's lease.

use std::process::Command;

use gpupool_api::lease::LeaseState;
use gpupool_testkit::TestAgent;

use crate::support::{
    BINARY, BackgroundCommand, FinishedCommand, command_as_nobody, lease_end, run_command, without_variables,
};

/// Starts `gpupool run` with a token.
fn run_with_token(agent: &TestAgent, secret: &str, command: &[&str]) -> BackgroundCommand {
    let mut line = without_variables(Command::new(BINARY));
    line.args(["run", "--endpoint", agent.address(), "--"]).args(command).env("GPUPOOL_TOKEN", secret);
    BackgroundCommand::start(line)
}

#[tokio::test]
async fn a_gpu_is_cordoned_and_uncordoned_by_administrators_only() {
    let agent = TestAgent::builder(BINARY).simulate("2xH100").argument("--node-name").argument("lab7").start().await;
    let cordoned = run_command(&agent, &["cordon", "1"]).success();
    assert_eq!(cordoned, "GPU 1 of lab7 takes no new work; its leases continue\n");
    assert!(run_command(&agent, &["status"]).success().contains("closed: cordoned"));
    assert!(run_command(&agent, &["device", "list"]).success().contains("cordoned"));
    run_command(&agent, &["lease", "acquire", "--gpus", "2", "--no-wait"]).fails(1, &["--no-wait"]);
    assert_eq!(run_command(&agent, &["uncordon", "1", "--node", "lab7"]).success(), "GPU 1 of lab7 takes new work\n");
    run_command(&agent, &["cordon", "9"]).fails(1, &["no GPU 9 on lab7"]);
    run_command(&agent, &["cordon", "1", "--node", "lab8"]).fails(1, &["lab8", "lab7"]);
    run_command(&agent, &["device", "forget", "1"]).fails(1, &["cannot be forgotten: it is present"]);
    let mut watch = agent.watch_events().await;
    run_command(&agent, &["simulate", "fault", "lost", "--gpu", "0"]).success();
    watch.wait_for_device("device_closed", 0).await;
    assert_eq!(run_command(&agent, &["device", "forget", "0"]).success(), "GPU 0 forgotten\n");
    let Some(mut cordon) = command_as_nobody(&agent, &["cordon", "1"]) else { return };
    FinishedCommand::run(&mut cordon).fails(1, &["not an administrator"]);
    for args in [&["device", "forget", "1"][..], &["revoke", "1"]] {
        FinishedCommand::run(&mut command_as_nobody(&agent, args).unwrap()).fails(1, &["not an administrator"]);
    }
}

#[tokio::test]
async fn a_revocation_names_its_author_and_reason_to_the_owner_and_in_the_audit_trail() {
    let agent = TestAgent::builder(BINARY).simulate("1xH100").start().await;
    let client = agent.client_unix();
    let root = client.request(&Default::default()).await.unwrap();
    client.release(root.id).await.unwrap();
    run_command(&agent, &["lease", "acquire"]).success();
    let revoked = run_command(&agent, &["revoke", "2", "--reason", "the demo starts"]).success();
    assert_eq!(revoked, "lease 2 revoked\n");
    let lease = client.follow(2, std::time::Duration::ZERO).await.unwrap();
    let expected = format!("revoked by an administrator ({}): the demo starts", root.owner);
    assert_eq!((lease.cause.as_deref(), lease.reason.as_deref()), (Some("revoked"), Some(expected.as_str())));
    let records = client.history(&Default::default()).await.unwrap().records;
    let end = records.iter().find(|record| record.lease == 2 && record.event == "ended").unwrap();
    assert_eq!((end.cause.as_deref(), end.reason.as_deref()), (Some("revoked"), Some(expected.as_str())));
    run_command(&agent, &["lease", "acquire"]).success();
    let announced = run_command(&agent, &["revoke", "3", "--grace", "1h"]).success();
    assert!(announced.starts_with(&format!("lease 3 of {} ends at 20", root.owner)), "{announced}");
    run_command(&agent, &["revoke", "9"]).fails(1, &["9"]);
    run_command(&agent, &["revoke", "3", "--grace", "9d"]).fails(1, &["grace_secs", "604800"]);
}

#[tokio::test]
async fn an_administrator_who_releases_anothers_running_job_revokes_it_and_the_job_can_end_in_order() {
    let agent = TestAgent::builder(BINARY).simulate("1xH100").start().await;
    let client = agent.client_unix();
    let secret = run_command(&agent, &["token", "create", "--owner", "alice"]).success();
    let script = "trap 'echo saved; exit 5' TERM; echo ready; while :; do sleep 0.1; done";
    let mut job = run_with_token(&agent, secret.trim(), &["sh", "-c", script]);
    job.wait_for_output("ready");
    let mut watch = agent.watch_events().await;
    let announced = run_command(&agent, &["lease", "release", "1"]).success();
    assert!(announced.starts_with("lease 1 of alice ends at 20"), "{announced}");
    let told = watch.wait_for_lease("revoking", 1).await.reason.unwrap();
    assert!(told.contains("ends at 20") && told.contains("revoked by an administrator ("), "{told}");
    let still = client.follow(1, std::time::Duration::ZERO).await.unwrap();
    assert_eq!((still.state, still.revoke_at.is_some()), (LeaseState::Active, true));
    job.wait_for_output("saved");
    assert_eq!(lease_end(&client, 1).await, (LeaseState::Revoked, Some("revoked".into())));
    // The owner's own release, and that of the administrator who requested the lease, end it at once.
    let lease = run_command(&agent, &["lease", "acquire", "--owner", "bob"]).json();
    let id = lease["id"].to_string();
    assert_eq!(run_command(&agent, &["lease", "release", &id]).success(), format!("lease {id} released\n"));
    assert_eq!(lease_end(&client, 2).await, (LeaseState::Released, Some("by_owner".into())));
}
