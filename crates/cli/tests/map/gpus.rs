//! GPUs from the pool, for as long as the run needs them.

use std::process::Command;

use gpupool_api::simulate::FaultBody;
use gpupool_confine::Signal;
use gpupool_testkit::{TestAgent, eventually};

use crate::support::{BINARY, Running, Said, agent_of, bare, live, take, with_input};

/// `gpupool map` on the agent's GPUs.
fn map_on(agent: &TestAgent, arguments: &[&str]) -> Command {
    let mut command = bare(Command::new(BINARY));
    command.args(["map", "--endpoint", &format!("unix:{}", agent.socket().display())]).args(arguments);
    command
}

fn said_on(agent: &TestAgent, arguments: &[&str]) -> Said {
    with_input(map_on(agent, arguments), b"")
}

#[tokio::test(flavor = "multi_thread")]
async fn each_worker_sees_its_gpu_and_all_are_given_back() {
    let agent = agent_of("2xH100").start().await;
    let client = agent.client_unix();
    let line = "echo {} $GPUPOOL_GPU_IDS $CUDA_VISIBLE_DEVICES; exec sleep 0.1";
    let out = said_on(&agent, &["-k", "--gpus", "2", line, ":::", "a", "b", "c", "d", "e", "f"]).fine();
    let uuids: Vec<String> = client.devices().await.unwrap().devices.into_iter().map(|device| device.uuid).collect();
    let mut used = [0, 0];
    for line in out.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let gpu: usize = fields[1].parse().unwrap();
        assert_eq!(fields[2], uuids[gpu], "{out}");
        used[gpu] += 1;
    }
    assert!(used[0] > 0 && used[1] > 0, "work should spread: {out}");
    assert_eq!(live(&client).await, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn named_gpus_and_parts_of_them_are_taken() {
    let agent = agent_of("2xH100").start().await;
    let out = said_on(&agent, &["-k", "--gpu-ids", "1", "-j2", "echo $GPUPOOL_GPU_IDS {}", ":::", "a", "b"]).fine();
    assert_eq!(out, "1 a\n1 b\n");
    let out = said_on(&agent, &["--fraction", "0.5", "echo $GPUPOOL_FRACTION {}", ":::", "a"]).fine();
    assert_eq!(out, "0.5 a\n");
    said_on(&agent, &["--gpu-ids", "1,1", "true", ":::", "a"]).tells(2, &["gpu_ids", "[1, 1]", "each once"]);
    said_on(&agent, &["--fraction", "3", "true", ":::", "a"]).tells(2, &["--fraction", "'3'", "1.0"]);
    said_on(&agent, &["--gpu-ids", "7", "true", ":::", "a"]).tells(1, &["no GPU"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn work_begins_on_the_first_gpu_while_another_is_waited_for() {
    let agent = agent_of("2xH100").start().await;
    let client = agent.client_unix();
    let other = take(&client, 1).await;
    let mut running =
        Running::start(map_on(&agent, &["-u", "--gpus", "2", "echo begun {}; exec sleep 600", ":::", "a", "b"]));
    running.says("begun a");
    running.tells("queue");
    client.release(other.id).await.unwrap();
    running.says("begun b");
    running.signal(Signal::INT);
    assert_eq!(running.code(), 130);
    assert_eq!(live(&client).await, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gpu_that_is_taken_back_costs_no_task() {
    let agent = agent_of("2xH100").start().await;
    let client = agent.client_unix();
    let dir = tempfile::tempdir().unwrap();
    let line =
        format!("echo begun {{}}; while ! test -e {}/go; do sleep 0.01; done; echo ended {{}}", dir.path().display());
    let mut running = Running::start(map_on(&agent, &["-u", "--gpus", "2", &line, ":::", "a", "b"]));
    running.says("begun");
    running.says("begun");
    let lease = live(&client).await[0].id;
    client.revoke(lease, 0.0).await.unwrap();
    running.tells("a GPU was lost");
    // The task that was lost with it is begun again.
    running.says("begun");
    std::fs::write(dir.path().join("go"), "").unwrap();
    let (code, output, messages) = running.ended();
    assert_eq!(code, 0, "{messages}");
    assert!(output.contains("ended a") && output.contains("ended b"), "{output}");
    assert!(messages.contains("done 2, failed 0"), "{messages}");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_gpu_or_no_agent_is_told() {
    let agent = agent_of("1xH100").start().await;
    let client = agent.client_unix();
    let other = take(&client, 1).await;
    said_on(&agent, &["--no-wait", "true", ":::", "a"]).tells(1, &["no GPU was granted"]);
    client.release(other.id).await.unwrap();
    let mut nobody = bare(Command::new(BINARY));
    nobody.args(["map", "--endpoint", "http://127.0.0.1:1", "true", ":::", "a"]);
    with_input(nobody, b"").tells(1, &["gpupool serve"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_with_too_much_gpu_memory_is_ended() {
    let agent = agent_of("1xH100").variable("REFRESH_INTERVAL", "0.05").start().await;
    let client = agent.client_unix();
    let line = "echo pid $$; [ {} = x ] && exec sleep 600; echo done {}";
    let mut running = Running::start(map_on(&agent, &["-u", "--gpu-memory-limit", "1GiB", line, ":::", "x", "y"]));
    let pid = running.says("pid ");
    let fault = format!("squatter:{pid}:2048").into();
    client.set_fault(&FaultBody { gpu_id: Some(0), fault }).await.unwrap();
    running.says("done y");
    let (code, _, messages) = running.ended();
    assert_eq!(code, 1, "{messages}");
    assert!(messages.contains("2048 MiB") && messages.contains("1024 MiB allowed"), "{messages}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_run_gives_its_gpus_back() {
    let agent = agent_of("1xH100").start().await;
    let client = agent.client_unix();
    let mut running = Running::start(map_on(&agent, &["-u", "echo begun; exec sleep 600", ":::", "a"]));
    running.says("begun");
    running.signal(Signal::KILL);
    assert_eq!(running.code(), 137);
    eventually("the lease is released", async || live(&client).await.is_empty().then_some(())).await;
}
