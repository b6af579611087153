//! A client process that can be killed. It runs one test of this program, which requests a lease over the Unix socket,
//! attaches it to itself, prints it, and waits to be killed.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use gpupool_api::RequestBody;
use gpupool_api::lease::{AttachBody, LeaseState};
use gpupool_client::{AgentClient, Endpoint};

/// The variable with the path of the socket. Without it the test below does nothing.
const SOCKET_VARIABLE: &str = "GPUPOOL_TEST_CLIENT";

/// The text before a granted lease and its token.
const LEASE_PREFIX: &str = "client holds ";

/// A client process. Dropping it kills the process.
pub struct ClientProcess(Child);

impl ClientProcess {
    /// Starts a client of this socket.
    pub fn start(socket: &Path) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["common::child::holds_a_lease_until_it_is_killed", "--exact", "--nocapture"]);
        let started = command.env(SOCKET_VARIABLE, socket).stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        Self(started.unwrap())
    }

    /// Waits for its lease and token; `None` if the process ended without a lease.
    pub fn wait_for_lease(&mut self) -> Option<(u64, u64)> {
        let lines = BufReader::new(self.0.stdout.take()?).lines();
        let line = lines.map_while(Result::ok).find_map(|text| Some(text.split_once(LEASE_PREFIX)?.1.to_owned()))?;
        let (lease, token) = line.split_once(' ')?;
        Some((lease.parse().ok()?, token.parse().ok()?))
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Kills the process (SIGKILL), and waits until it is reaped.
    pub fn kill(&mut self) {
        // The process may have ended already.
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
    let Some(socket) = std::env::var_os(SOCKET_VARIABLE) else { return };
    let client = AgentClient::new(Endpoint::unix(Path::new(&socket)).unwrap()).unwrap();
    let body = RequestBody { fraction: Some(0.1), wait_secs: Some(5.0), ttl_secs: Some(2.0), ..Default::default() };
    let Ok(lease) = client.request(&body).await else { return };
    let (LeaseState::Active, Some(token)) = (lease.state, lease.token) else { return };
    let attached = client.attach(lease.id, &AttachBody { token, ..AttachBody::default() }).await;
    if attached.is_err() {
        return;
    }
    println!("{LEASE_PREFIX}{} {token}", lease.id);
    std::io::stdout().flush().unwrap();
    std::future::pending().await
}
