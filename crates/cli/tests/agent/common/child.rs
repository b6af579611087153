//! A client that is a process of its own and can be killed: this very program, started again to run one test that asks for
//! a lease over the Unix socket, ties it to itself, says so, and waits to be killed.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use gpupool_api::RequestBody;
use gpupool_api::lease::{AttachBody, LeaseState};
use gpupool_client::{AgentClient, Endpoint};

/// Names the socket to ask; only then the test below is a client.
const SOCKET: &str = "GPUPOOL_TEST_CLIENT";

/// What is said in front of a granted lease and its token.
const HOLDS: &str = "client holds ";

/// A client process. Killed when it is dropped.
pub struct ClientProcess(Child);

impl ClientProcess {
    /// Starts one that asks there.
    pub fn start(socket: &Path) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["common::child::holds_a_lease_until_it_is_killed", "--exact", "--nocapture"]);
        let started = command.env(SOCKET, socket).stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        Self(started.unwrap())
    }

    /// What it was granted, with the token; `None` where it ended without. Waits until either is known.
    pub fn holds(&mut self) -> Option<(u64, u64)> {
        let lines = BufReader::new(self.0.stdout.take()?).lines();
        let said = lines.map_while(Result::ok).find_map(|line| Some(line.split_once(HOLDS)?.1.to_owned()))?;
        let (lease, token) = said.split_once(' ')?;
        Some((lease.parse().ok()?, token.parse().ok()?))
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Kills it (SIGKILL), and waits until it is gone.
    pub fn kill(&mut self) {
        // One that has ended already is what was wanted.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for ClientProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

#[tokio::test]
async fn holds_a_lease_until_it_is_killed() {
    let Some(socket) = std::env::var_os(SOCKET) else { return };
    let client = AgentClient::new(Endpoint::unix(Path::new(&socket)).unwrap()).unwrap();
    let body = RequestBody { fraction: Some(0.1), wait_secs: Some(5.0), ttl_secs: Some(2.0), ..Default::default() };
    let Ok(lease) = client.request(&body).await else { return };
    let (LeaseState::Active, Some(token)) = (lease.state, lease.token) else { return };
    let attached = client.attach(lease.id, &AttachBody { token, ..AttachBody::default() }).await;
    if attached.is_err() {
        return;
    }
    println!("{HOLDS}{} {token}", lease.id);
    std::io::stdout().flush().unwrap();
    std::future::pending().await
}
