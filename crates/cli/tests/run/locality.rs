//! `gpupool run` starts its command on this machine, so it uses only agents of this machine.
use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::Command;

use gpupool_api::lease::HolderBody;
use gpupool_confine::Signal;

use crate::support::{BINARY, BackgroundCommand, active_lease, agent_of, live_leases, run_at, without_variables};

/// Starts a server that returns this JSON for every request, as an agent of another machine. Its thread ends with the
/// test.
fn agent_elsewhere(body: String) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for mut connection in listener.incoming().flatten() {
            let mut request = Vec::new();
            let mut buffer = [0; 4096];
            while !request.windows(4).any(|end| end == b"\r\n\r\n") {
                match connection.read(&mut buffer) {
                    Ok(0) | Err(_) => break,
                    Ok(length) => request.extend_from_slice(&buffer[..length]),
                }
            }
            let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length:";
            let _ = write!(connection, "{head} {}\r\n\r\n{body}", body.len());
        }
    });
    address
}

#[tokio::test]
async fn an_agent_of_another_machine_is_refused_with_a_remedy() {
    let agent = agent_of("1xH100").start().await;
    let mut pool = agent.client_unix().pool().await.unwrap();
    (pool.node_id, pool.node) = ("0".repeat(64), "gpu7".into());
    let address = agent_elsewhere(serde_json::to_string(&pool).unwrap());
    let (code, output, messages) = run_at(&address, &[], &["echo", "ran"]).ended();
    assert_eq!((code, output.as_str()), (1, ""), "{messages}");
    assert!(messages.contains("another machine (gpu7)") && messages.contains("run this command there"), "{messages}");
}

#[tokio::test]
async fn the_local_one_of_several_agents_is_used() {
    let agent = agent_of("1xH100").start().await;
    let mut pool = agent.client_unix().pool().await.unwrap();
    pool.node_id = "0".repeat(64);
    let elsewhere = agent_elsewhere(serde_json::to_string(&pool).unwrap());
    let mut line = without_variables(Command::new(BINARY));
    line.env("GPU_STATS_SERVICE_ENDPOINTS", format!("{elsewhere},{}", agent.address()));
    line.args(["run", "--", "echo", "ran"]);
    let (code, output, messages) = BackgroundCommand::start(line).ended();
    assert_eq!((code, output.as_str()), (0, "ran"), "{messages}");
}

#[tokio::test]
async fn the_agents_socket_is_preferred_over_tcp_if_it_is_known() {
    let agent = agent_of("1xH100").start().await;
    let other = agent_of("1xH100").start().await;
    let client = agent.client_unix();
    let cases =
        [(agent.state_dir(), true, "its own socket"), (other.state_dir(), false, "the socket of another agent")];
    for (state_dir, is_process, what) in cases {
        let mut line = without_variables(Command::new(BINARY));
        line.env("GPUPOOL_STATE_DIR", state_dir);
        line.args(["run", "--endpoint", agent.address(), "--", "sh", "-c", "echo ready; exec sleep 600"]);
        let mut running = BackgroundCommand::start(line);
        running.wait_for_output("ready");
        let holder = active_lease(&client).await.holder.unwrap();
        assert_eq!(matches!(holder, HolderBody::Process { .. }), is_process, "{what}: {holder:?}");
        running.signal(Signal::TERM);
        assert_eq!(running.code(), 143);
        assert_eq!(live_leases(&client).await, []);
    }
    assert_eq!(live_leases(&other.client_unix()).await, []);
}

#[tokio::test]
async fn the_socket_of_the_state_directory_is_the_default() {
    let agent = agent_of("1xH100").start().await;
    let mut line = without_variables(Command::new(BINARY));
    // A token for another server must not matter.
    line.env("GPUPOOL_STATE_DIR", agent.state_dir()).env("GPUPOOL_TOKEN", "for-another-server");
    line.args(["run", "--", "echo", "ran"]);
    let (code, output, messages) = BackgroundCommand::start(line).ended();
    assert_eq!((code, output.as_str()), (0, "ran"), "{messages}");
}
