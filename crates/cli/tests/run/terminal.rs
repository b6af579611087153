//! At a terminal `gpupool run` is as good as the command alone: the keyboard is the command's, Ctrl-C too.
use std::process::Command;

use gpupool_api::lease::HolderBody;
use gpupool_confine::Signal;
use gpupool_testkit::TestAgent;

use crate::support::{BINARY, Running, Watched, agent_of, bare, live, skipped, take, the_active};

const CTRL_C: &[u8] = b"\x03";

/// Counts interrupts, and tells how many there were when it is told to end. Waits for them rather than handling them: a handler
/// called right before a sleep would be held up by it.
const COUNTS: &str = "import signal\n\
    count, heard = 0, {signal.SIGINT, signal.SIGTERM}\n\
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)\n\
    print('ready', flush=True)\n\
    while signal.sigwait(heard) == signal.SIGINT: count += 1; print('interrupt', flush=True)\n\
    print('count', count, flush=True)\n\
    exit(5)";

/// A shell line on a terminal of its own, in which `GPUPOOL_RUN` stands for `gpupool run` with the agent's address.
fn at_terminal(agent: &TestAgent, line: &str) -> Option<Running> {
    if Command::new("script").arg("--version").output().is_err() {
        skipped("a terminal", "the program `script` is not there");
        return None;
    }
    let run = format!("'{BINARY}' run --endpoint 'unix:{}'", agent.socket().display());
    let mut command = bare(Command::new("script"));
    command.env("SHELL", "/bin/sh").env("COUNTS", COUNTS);
    command.args(["-q", "-e", "-c", &format!("stty -echo; {}", line.replace("GPUPOOL_RUN", &run)), "/dev/null"]);
    Some(Running::start(command))
}

/// The process that holds the only lease.
async fn holder(agent: &TestAgent) -> Watched {
    match the_active(&agent.client_unix()).await.holder {
        Some(HolderBody::Process { pid }) => Watched::of(&pid.to_string()),
        other => panic!("a process should hold the lease, not {other:?}"),
    }
}

#[tokio::test]
async fn the_keyboard_is_the_commands() {
    let agent = agent_of("1xH100").start().await;
    let line = "exec GPUPOOL_RUN -- sh -c 'echo ready; read line; echo heard $line'";
    let Some(mut running) = at_terminal(&agent, line) else { return };
    running.says("ready");
    running.press(b"hello\n");
    running.says("heard hello");
    assert_eq!(running.code(), 0);
}

#[tokio::test]
async fn an_interrupt_from_the_keyboard_reaches_the_command_once() {
    // Alone at the terminal, and beside a shell that shares it.
    for line in
        ["exec GPUPOOL_RUN -- python3 -c \"$COUNTS\"", "trap : INT; GPUPOOL_RUN -- python3 -c \"$COUNTS\"; exit $?"]
    {
        let agent = agent_of("1xH100").start().await;
        let Some(mut running) = at_terminal(&agent, line) else { return };
        running.says("ready");
        running.press(CTRL_C);
        running.says("interrupt");
        holder(&agent).await.signal(Signal::TERM);
        assert_eq!(running.says("count "), "1", "{line}");
        assert_eq!(running.code(), 5, "{line}");
        assert_eq!(live(&agent.client_unix()).await, []);
    }
}

#[tokio::test]
async fn a_live_line_tells_how_the_waiting_goes_and_an_interrupt_cancels_it() {
    let agent = agent_of("1xH100").start().await;
    let client = agent.client_unix();
    let held = take(&client, 1).await;
    let Some(mut running) = at_terminal(&agent, "stty cols 200; exec GPUPOOL_RUN -- true") else { return };
    let line = running.says("gpupool: ");
    assert!(line.contains("waits, number 1 in the queue") && line.contains(&held.owner), "{line}");
    running.press(CTRL_C);
    running.says("gpupool: cancelled");
    assert_eq!(running.code(), 130);
    assert_eq!(live(&client).await.len(), 1);
}
