//! At a terminal, keyboard input and Ctrl-C belong to the command.
use std::process::Command;

use gpupool_api::lease::HolderBody;
use gpupool_confine::Signal;
use gpupool_testkit::TestAgent;

use crate::support::{
    BINARY, BackgroundCommand, ObservedProcess, active_lease, agent_of, live_leases, skipped, take_gpus,
    without_variables,
};

const CTRL_C: &[u8] = b"\x03";

/// Counts interrupts and prints the count on SIGTERM. Waits for signals instead of handling them, because a sleep would
/// delay a handler called just before it.
const COUNTS: &str = "import signal\n\
    count, heard = 0, {signal.SIGINT, signal.SIGTERM}\n\
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)\n\
    print('ready', flush=True)\n\
    while signal.sigwait(heard) == signal.SIGINT: count += 1; print('interrupt', flush=True)\n\
    print('count', count, flush=True)\n\
    exit(5)";

/// Runs a shell line on its own terminal; `GPUPOOL_RUN` stands for `gpupool run` with the agent's endpoint.
fn at_terminal(agent: &TestAgent, line: &str) -> Option<BackgroundCommand> {
    if Command::new("script").arg("--version").output().is_err() {
        skipped("a terminal", "the program `script` is not there");
        return None;
    }
    let run = format!("'{BINARY}' run --endpoint 'unix:{}'", agent.socket().display());
    let mut command = without_variables(Command::new("script"));
    command.env("SHELL", "/bin/sh").env("COUNTS", COUNTS);
    command.args(["-q", "-e", "-c", &format!("stty -echo; {}", line.replace("GPUPOOL_RUN", &run)), "/dev/null"]);
    Some(BackgroundCommand::start(command))
}

/// Returns the process that holds the only lease.
async fn holder(agent: &TestAgent) -> ObservedProcess {
    match active_lease(&agent.client_unix()).await.holder {
        Some(HolderBody::Process { pid: Some(pid) }) => ObservedProcess::of(&pid.to_string()),
        other => panic!("a process should hold the lease, not {other:?}"),
    }
}

#[tokio::test]
async fn keyboard_input_goes_to_the_command() {
    let agent = agent_of("1xH100").start().await;
    let line = "exec GPUPOOL_RUN -- sh -c 'echo ready; read line; echo heard $line'";
    let Some(mut running) = at_terminal(&agent, line) else { return };
    running.wait_for_output("ready");
    running.send_keys(b"hello\n");
    running.wait_for_output("heard hello");
    assert_eq!(running.code(), 0);
}

#[tokio::test]
async fn an_interrupt_from_the_keyboard_reaches_the_command_once() {
    // Once alone at the terminal, once with a shell that shares it.
    for line in
        ["exec GPUPOOL_RUN -- python3 -c \"$COUNTS\"", "trap : INT; GPUPOOL_RUN -- python3 -c \"$COUNTS\"; exit $?"]
    {
        let agent = agent_of("1xH100").start().await;
        let Some(mut running) = at_terminal(&agent, line) else { return };
        running.wait_for_output("ready");
        running.send_keys(CTRL_C);
        running.wait_for_output("interrupt");
        holder(&agent).await.signal(Signal::TERM);
        assert_eq!(running.wait_for_output("count "), "1", "{line}");
        assert_eq!(running.code(), 5, "{line}");
        assert_eq!(live_leases(&agent.client_unix()).await, []);
    }
}

#[tokio::test]
async fn a_progress_line_shows_the_wait_and_an_interrupt_cancels_it() {
    let agent = agent_of("1xH100").start().await;
    let client = agent.client_unix();
    let held = take_gpus(&client, 1).await;
    let Some(mut running) = at_terminal(&agent, "stty cols 200; exec GPUPOOL_RUN -- true") else { return };
    let line = running.wait_for_output("gpupool: ");
    assert!(line.contains("number 1 · needs") && line.contains(&held.owner), "{line}");
    running.send_keys(CTRL_C);
    running.wait_for_output("gpupool: cancelled");
    assert_eq!(running.code(), 130);
    assert_eq!(live_leases(&client).await.len(), 1);
}
