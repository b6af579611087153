//! A real agent with simulated devices, which tests start, kill, pause and restart.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use gpupool_client::{AgentClient, Endpoint};
use rustix::process::Signal;
use tempfile::TempDir;
use tokio::sync::watch;

use crate::agent_process::{AgentOutput, AgentProcess};
use crate::{DEADLINE, EventWatcher};

/// Start of the line that an agent prints to standard output for each of its addresses.
const LISTENING: &str = "gpupool is listening on ";

/// Variables that an agent under test inherits; no other variable can change its behaviour.
const INHERITED_VARIABLES: [&str; 6] =
    ["PATH", "HOME", "LD_LIBRARY_PATH", "LLVM_PROFILE_FILE", "RUST_BACKTRACE", "TMPDIR"];

/// Configuration of an agent to start.
#[derive(Debug, Clone)]
#[must_use = "nothing happens before start()"]
pub struct TestAgentBuilder {
    binary: PathBuf,
    simulate: Option<String>,
    state_dir: Option<PathBuf>,
    arguments: Vec<OsString>,
    environment: Vec<(String, String)>,
}

impl TestAgentBuilder {
    /// Simulates these devices, such as `4xH100`.
    pub fn simulate(self, devices: impl Into<String>) -> Self {
        Self { simulate: Some(devices.into()), ..self }
    }

    /// Uses real devices.
    pub fn real_devices(self) -> Self {
        Self { simulate: None, ..self }
    }

    /// Sets the state directory (default: a temporary directory).
    pub fn state_dir(self, folder: impl Into<PathBuf>) -> Self {
        Self { state_dir: Some(folder.into()), ..self }
    }

    /// Adds an argument of `gpupool serve`.
    pub fn argument(mut self, argument: impl Into<OsString>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// Sets an environment variable.
    pub fn variable(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// Starts the agent on a free port and waits until it listens. Panics with its output if it does not.
    pub async fn start(self) -> TestAgent {
        let own_folder = TempDir::with_prefix("gpupool-test-").expect("a temporary folder");
        let state_dir = self.state_dir.clone().unwrap_or_else(|| own_folder.path().to_owned());
        let log = AgentOutput::default();
        let running = self.spawn(&state_dir, 0, &log).await;
        TestAgent { builder: self, state_dir, log, running, _own_folder: own_folder }
    }

    async fn spawn(&self, state_dir: &Path, port: u16, log: &AgentOutput) -> RunningAgent {
        let mut command = self.command(state_dir, port);
        log.add_line(format!("+ {command:?}"));
        let spawned = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = spawned.unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let (sender, mut listening) = watch::channel(Vec::new());
        if let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) {
            log.collect(stdout, LISTENING, sender.clone());
            log.collect(stderr, LISTENING, sender);
        }
        let process = AgentProcess::new(child);
        let addresses =
            tokio::time::timeout(DEADLINE, listening.wait_for(|addresses| ListenAddresses::parse(addresses).is_some()))
                .await;
        match addresses {
            Ok(Ok(addresses)) => {
                RunningAgent { process, addresses: ListenAddresses::parse(&addresses).expect("both addresses") }
            }
            Ok(Err(_)) => panic!("the agent exited before it listened ({:?}):\n{}", process.status(), log.text()),
            Err(_) => panic!("the agent did not listen within {DEADLINE:?}:\n{}", log.text()),
        }
    }

    fn command(&self, state_dir: &Path, port: u16) -> Command {
        let mut command = Command::new(&self.binary);
        command.arg("serve").arg("--port").arg(port.to_string()).arg("--state-dir").arg(state_dir);
        if let Some(devices) = &self.simulate {
            command.arg("--simulate").arg(devices);
        }
        let inherited = INHERITED_VARIABLES.iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
        command.args(&self.arguments).env_clear().envs(inherited);
        // Agents of several tests read the same invented cards.
        command.env("GPUPOOL_CLAIMS", state_dir.join("claims"));
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }
}

/// A running agent. Killed when dropped; its output is printed if the test failed.
#[derive(Debug)]
pub struct TestAgent {
    builder: TestAgentBuilder,
    state_dir: PathBuf,
    log: AgentOutput,
    running: RunningAgent,
    _own_folder: TempDir,
}

#[derive(Debug)]
struct RunningAgent {
    process: AgentProcess,
    addresses: ListenAddresses,
}

/// Addresses of a listening agent.
#[derive(Debug, Clone, PartialEq)]
struct ListenAddresses {
    address: String,
    port: u16,
    socket: PathBuf,
}

impl ListenAddresses {
    /// Parses the addresses; `None` until both are known.
    fn parse(lines: &[String]) -> Option<Self> {
        let address = lines.iter().find(|address| address.starts_with("http"))?.clone();
        let socket = lines.iter().find_map(|address| address.strip_prefix("unix://"))?.into();
        // A prefix of all routes may follow the port.
        let port = address.rsplit_once(':')?.1.split('/').next()?.parse().ok()?;
        Some(Self { address, port, socket })
    }
}

impl TestAgent {
    /// Returns a builder for this binary, with four simulated H100 by default.
    pub fn builder(binary: impl Into<PathBuf>) -> TestAgentBuilder {
        TestAgentBuilder {
            binary: binary.into(),
            simulate: Some("4xH100".into()),
            state_dir: None,
            arguments: Vec::new(),
            environment: Vec::new(),
        }
    }

    /// Returns its process id.
    pub fn pid(&self) -> u32 {
        self.running.process.pid()
    }

    /// Returns its address, as in `http://127.0.0.1:40123`; the same after a restart.
    pub fn address(&self) -> &str {
        &self.running.addresses.address
    }

    /// Returns its port; the same after a restart.
    pub fn port(&self) -> u16 {
        self.running.addresses.port
    }

    /// Returns the path of its Unix socket.
    pub fn socket(&self) -> &Path {
        &self.running.addresses.socket
    }

    /// Returns its state directory.
    pub fn state_dir(&self) -> &Path {
        &self.state_dir
    }

    /// Creates a client with connections of its own, over TCP.
    pub fn client(&self) -> AgentClient {
        let endpoint: Endpoint = self.address().parse().expect("a valid agent address");
        AgentClient::new(endpoint).expect("a client of a local agent")
    }

    /// Creates a client with connections of its own, over the Unix socket.
    pub fn client_unix(&self) -> AgentClient {
        let endpoint = Endpoint::unix(self.socket()).expect("a valid socket path");
        AgentClient::new(endpoint).expect("a client of a local agent")
    }

    /// Observes events from now on.
    pub async fn watch_events(&self) -> EventWatcher {
        EventWatcher::new(&self.client_unix()).await
    }

    /// Kills the agent and waits until it is gone. `restart` starts it again.
    pub async fn kill9(&self) {
        self.running.process.signal(Signal::KILL);
        self.running.process.wait_ended().await;
    }

    /// Stops the agent (SIGTERM) and waits until it has exited.
    pub async fn stop(&self) -> ExitStatus {
        self.running.process.signal(Signal::TERM);
        self.running.process.wait_ended().await
    }

    /// Restarts the agent on the same state and port; a running one is killed before.
    pub async fn restart(&mut self) {
        self.kill9().await;
        self.running = self.builder.spawn(&self.state_dir, self.running.addresses.port, &self.log).await;
    }

    /// Pauses the agent (SIGSTOP) until it is resumed.
    pub fn pause(&self) {
        self.running.process.signal(Signal::STOP);
    }

    /// Resumes a paused agent.
    pub fn resume(&self) {
        self.running.process.signal(Signal::CONT);
    }

    /// Makes the agent reload its certificates (SIGHUP).
    pub fn send_sighup(&self) {
        self.running.process.signal(Signal::HUP);
    }

    /// Returns the output of all its runs.
    pub fn log(&self) -> String {
        self.log.text()
    }
}

impl Drop for TestAgent {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("output of the agent:\n{}", self.log.text());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_listens_once_it_printed_both_addresses() {
        let parse =
            |lines: &[&str]| ListenAddresses::parse(&lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>());
        assert_eq!(parse(&["http://127.0.0.1:40123"]), None);
        assert_eq!(parse(&["unix:///x/agent.sock"]), None);
        let both = parse(&["unix:///x/agent.sock", "http://127.0.0.1:40123"]).unwrap();
        assert_eq!((both.port, both.socket.as_path()), (40_123, Path::new("/x/agent.sock")));
        assert_eq!(parse(&["http://[::1]:7/api", "unix:///x"]).unwrap().port, 7);
        let prefixed = parse(&["unix:///x/agent.sock", "http://[::1]:40123/api/v2"]).unwrap();
        assert_eq!((prefixed.port, prefixed.address.as_str()), (40_123, "http://[::1]:40123/api/v2"));
    }
}
