//! Leased GPUs of a run.

use std::process::Command;

use gpupool_api::simulate::FaultBody;
use gpupool_api::tokens::NewToken;
use gpupool_confine::Signal;
use gpupool_testkit::{TestAgent, eventually};

use crate::support::{
    BINARY, BackgroundCommand, FinishedCommand, agent_of, live_leases, take_gpus, with_input, without_variables,
};

/// Prepares `gpupool map` on the agent's GPUs.
fn map_on(agent: &TestAgent, arguments: &[&str]) -> Command {
    let mut command = without_variables(Command::new(BINARY));
    command.args(["map", "--endpoint", &format!("unix:{}", agent.socket().display())]).args(arguments);
    command
}

fn run_map_on(agent: &TestAgent, arguments: &[&str]) -> FinishedCommand {
    with_input(map_on(agent, arguments), b"")
}

#[tokio::test(flavor = "multi_thread")]
async fn each_worker_sees_its_gpu_and_all_gpus_are_released() {
    let agent = agent_of("2xH100").start().await;
    let client = agent.client_unix();
    let line = "echo {} $GPUPOOL_GPU_IDS $CUDA_VISIBLE_DEVICES; exec sleep 0.1";
    let out = run_map_on(&agent, &["-k", "--gpus", "2", line, ":::", "a", "b", "c", "d", "e", "f"]).success();
    let uuids: Vec<String> = client.devices().await.unwrap().devices.into_iter().map(|device| device.uuid).collect();
    let mut used = [0, 0];
    for line in out.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let gpu: usize = fields[1].parse().unwrap();
        assert_eq!(fields[2], uuids[gpu], "{out}");
        used[gpu] += 1;
    }
    assert!(used[0] > 0 && used[1] > 0, "work should spread: {out}");
    assert_eq!(live_leases(&client).await, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn selected_gpus_and_fractions_are_leased() {
    let agent = agent_of("2xH100").start().await;
    let out =
        run_map_on(&agent, &["-k", "--gpu-ids", "1", "-j2", "echo $GPUPOOL_GPU_IDS {}", ":::", "a", "b"]).success();
    assert_eq!(out, "1 a\n1 b\n");
    let out = run_map_on(&agent, &["--fraction", "0.5", "echo $GPUPOOL_FRACTION {}", ":::", "a"]).success();
    assert_eq!(out, "0.5 a\n");
    run_map_on(&agent, &["--gpu-ids", "1,1", "true", ":::", "a"])
        .reports(2, &["gpu_ids", "[1, 1]", "without duplicates"]);
    run_map_on(&agent, &["--fraction", "3", "true", ":::", "a"]).reports(2, &["--fraction", "'3'", "1.0"]);
    run_map_on(&agent, &["--gpu-ids", "7", "true", ":::", "a"]).reports(1, &["no GPU"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn work_starts_on_the_first_gpu_while_another_is_awaited() {
    let agent = agent_of("2xH100").start().await;
    let client = agent.client_unix();
    let other = take_gpus(&client, 1).await;
    let mut running = BackgroundCommand::start(map_on(
        &agent,
        &["-u", "--gpus", "2", "echo begun {}; exec sleep 600", ":::", "a", "b"],
    ));
    running.wait_for_output("begun a");
    running.wait_for_message("queue");
    client.release(other.id).await.unwrap();
    running.wait_for_output("begun b");
    running.signal(Signal::INT);
    assert_eq!(running.code(), 130);
    assert_eq!(live_leases(&client).await, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_gpu_costs_no_task() {
    let agent = agent_of("2xH100").start().await;
    let client = agent.client_unix();
    let dir = tempfile::tempdir().unwrap();
    let line =
        format!("echo begun {{}}; while ! test -e {}/go; do sleep 0.01; done; echo ended {{}}", dir.path().display());
    let mut running = BackgroundCommand::start(map_on(&agent, &["-u", "--gpus", "2", &line, ":::", "a", "b"]));
    running.wait_for_output("begun");
    running.wait_for_output("begun");
    let lease = live_leases(&client).await[0].id;
    client.revoke(lease, 0.0).await.unwrap();
    running.wait_for_message("lost a GPU");
    // The lost task starts again.
    running.wait_for_output("begun");
    std::fs::write(dir.path().join("go"), "").unwrap();
    let (code, output, messages) = running.ended();
    assert_eq!(code, 0, "{messages}");
    assert!(output.contains("ended a") && output.contains("ended b"), "{output}");
    assert!(messages.contains("done 2, failed 0"), "{messages}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_command_is_found_before_a_gpu_is_requested() {
    let map = |command: &str| {
        let mut line = without_variables(Command::new(BINARY));
        line.args(["map", "--endpoint", "http://127.0.0.1:1", command, ":::", "a"]);
        with_input(line, b"")
    };
    map("no-such-program {}").fails(2, &["no-such-program: command not found"]);
    // Words of the shell are no programs.
    for known in ["for i in {}; do true; done", "export A={}", "A=b no-such-program"] {
        map(known).fails(1, &["127.0.0.1:1"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_get_the_token_only_if_that_is_asked_for() {
    let agent = agent_of("1xH100").start().await;
    let new = NewToken { owner: "alice".into(), admin: false, read_only: false };
    let secret = agent.client_unix().create_token(&new).await.unwrap().secret;
    for gpus in ["1", "0"] {
        for (keeps, shown) in [(None, "unset\n".to_owned()), (Some("--keep-token"), format!("{secret}\n"))] {
            let mut line = map_on(&agent, &["--gpus", gpus]);
            line.args(keeps).args(["echo ${GPUPOOL_TOKEN-unset}; : {}", ":::", "a"]).env("GPUPOOL_TOKEN", &secret);
            assert_eq!(with_input(line, b"").success(), shown, "--gpus {gpus}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_gpu_or_agent_is_reported() {
    let agent = agent_of("1xH100").start().await;
    let client = agent.client_unix();
    let other = take_gpus(&client, 1).await;
    run_map_on(&agent, &["--no-wait", "true", ":::", "a"]).reports(1, &["no GPU was granted"]);
    client.release(other.id).await.unwrap();
    let mut no_agent = without_variables(Command::new(BINARY));
    no_agent.args(["map", "--endpoint", "http://127.0.0.1:1", "true", ":::", "a"]);
    with_input(no_agent, b"").reports(1, &["gpupool serve"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_above_its_gpu_memory_limit_is_killed() {
    let agent = agent_of("1xH100").variable("REFRESH_INTERVAL", "0.05").start().await;
    let client = agent.client_unix();
    let line = "echo pid $$; [ {} = x ] && exec sleep 600; echo done {}";
    let mut running =
        BackgroundCommand::start(map_on(&agent, &["-u", "--gpu-memory-limit", "1GiB", line, ":::", "x", "y"]));
    let pid = running.wait_for_output("pid ");
    let fault = format!("squatter:{pid}:2048").into();
    client.set_fault(&FaultBody { gpu_id: Some(0), fault }).await.unwrap();
    running.wait_for_output("done y");
    let (code, _, messages) = running.ended();
    assert_eq!(code, 1, "{messages}");
    assert!(messages.contains("2048 MiB") && messages.contains("1024 MiB allowed"), "{messages}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_run_releases_its_gpus() {
    let agent = agent_of("1xH100").start().await;
    let client = agent.client_unix();
    let mut running = BackgroundCommand::start(map_on(&agent, &["-u", "echo begun; exec sleep 600", ":::", "a"]));
    running.wait_for_output("begun");
    running.signal(Signal::KILL);
    assert_eq!(running.code(), 137);
    eventually("the lease is released", async || live_leases(&client).await.is_empty().then_some(())).await;
}
