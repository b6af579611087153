//! A real agent with simulated devices: started, killed, paused and restarted as tests like.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use gpupool_client::{AgentClient, Endpoint};
use rustix::process::Signal;
use tempfile::TempDir;
use tokio::sync::watch;

use crate::process::{Log, Process};
use crate::{DEADLINE, EventWatcher};

/// An agent says so for each place where it listens, on a line of its own on its standard output.
const LISTENING: &str = "gpupool is listening on ";

/// Variables an agent under test is given from the test's own environment; no other can change what it does.
const PASSED_ON: [&str; 6] = ["PATH", "HOME", "LD_LIBRARY_PATH", "LLVM_PROFILE_FILE", "RUST_BACKTRACE", "TMPDIR"];

/// How to start an agent.
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

    /// Looks for real devices.
    pub fn real_devices(self) -> Self {
        Self { simulate: None, ..self }
    }

    /// Keeps its state there, in place of a folder of its own that goes with it.
    pub fn state_dir(self, folder: impl Into<PathBuf>) -> Self {
        Self { state_dir: Some(folder.into()), ..self }
    }

    /// Adds an argument of `gpupool serve`.
    pub fn argument(mut self, argument: impl Into<OsString>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// Sets a variable of its environment.
    pub fn variable(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// Starts it on a free port and waits until it listens. Panics with what it said where it does not.
    pub async fn start(self) -> TestAgent {
        let own_folder = TempDir::with_prefix("gpupool-test-").expect("a temporary folder");
        let state_dir = self.state_dir.clone().unwrap_or_else(|| own_folder.path().to_owned());
        let log = Log::default();
        let running = self.run(&state_dir, 0, &log).await;
        TestAgent { builder: self, state_dir, log, running, _own_folder: own_folder }
    }

    async fn run(&self, state_dir: &Path, port: u16, log: &Log) -> Running {
        let mut command = self.command(state_dir, port);
        log.add(format!("+ {command:?}"));
        let spawned = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = spawned.unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let (tell, mut listening) = watch::channel(Vec::new());
        if let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) {
            log.collect(stdout, LISTENING, tell.clone());
            log.collect(stderr, LISTENING, tell);
        }
        let process = Process::new(child);
        let places = tokio::time::timeout(DEADLINE, listening.wait_for(|places| Places::of(places).is_some())).await;
        match places {
            Ok(Ok(places)) => Running { process, places: Places::of(&places).expect("just seen") },
            Ok(Err(_)) => panic!("the agent ended before it listened ({:?}):\n{}", process.status(), log.text()),
            Err(_) => panic!("the agent did not listen within {DEADLINE:?}:\n{}", log.text()),
        }
    }

    fn command(&self, state_dir: &Path, port: u16) -> Command {
        let mut command = Command::new(&self.binary);
        command.arg("serve").arg("--port").arg(port.to_string()).arg("--state-dir").arg(state_dir);
        if let Some(devices) = &self.simulate {
            command.arg("--simulate").arg(devices);
        }
        let passed_on = PASSED_ON.iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
        command.args(&self.arguments).env_clear().envs(passed_on);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }
}

/// An agent that runs. Killed when it is dropped; where the test has failed, what it said is printed.
#[derive(Debug)]
pub struct TestAgent {
    builder: TestAgentBuilder,
    state_dir: PathBuf,
    log: Log,
    running: Running,
    _own_folder: TempDir,
}

#[derive(Debug)]
struct Running {
    process: Process,
    places: Places,
}

/// Where an agent listens.
#[derive(Debug, Clone, PartialEq)]
struct Places {
    address: String,
    port: u16,
    socket: PathBuf,
}

impl Places {
    /// Once both are known.
    fn of(told: &[String]) -> Option<Self> {
        let address = told.iter().find(|place| place.starts_with("http"))?.clone();
        let socket = told.iter().find_map(|place| place.strip_prefix("unix://"))?.into();
        // After the port there may be a prefix of all routes.
        let port = address.rsplit_once(':')?.1.split('/').next()?.parse().ok()?;
        Some(Self { address, port, socket })
    }
}

impl TestAgent {
    /// An agent of this binary, with four simulated H100 unless said otherwise.
    pub fn builder(binary: impl Into<PathBuf>) -> TestAgentBuilder {
        TestAgentBuilder {
            binary: binary.into(),
            simulate: Some("4xH100".into()),
            state_dir: None,
            arguments: Vec::new(),
            environment: Vec::new(),
        }
    }

    /// The number of its process.
    pub fn pid(&self) -> u32 {
        self.running.process.pid()
    }

    /// Its address, as in `http://127.0.0.1:40123`; the same after a restart.
    pub fn address(&self) -> &str {
        &self.running.places.address
    }

    /// Its port; the same after a restart.
    pub fn port(&self) -> u16 {
        self.running.places.port
    }

    /// The path of its Unix socket.
    pub fn socket(&self) -> &Path {
        &self.running.places.socket
    }

    /// Where it keeps its state.
    pub fn state_dir(&self) -> &Path {
        &self.state_dir
    }

    /// A client of its own connections, over TCP.
    pub fn client(&self) -> AgentClient {
        let endpoint: Endpoint = self.address().parse().expect("an agent's address can be read");
        AgentClient::new(endpoint).expect("a client of a local agent")
    }

    /// A client of its own connections, over the Unix socket.
    pub fn client_unix(&self) -> AgentClient {
        let endpoint = Endpoint::unix(self.socket()).expect("an agent's socket can be named");
        AgentClient::new(endpoint).expect("a client of a local agent")
    }

    /// Follows what happens from now on.
    pub async fn watch_events(&self) -> EventWatcher {
        EventWatcher::new(&self.client_unix()).await
    }

    /// Kills it at once, and waits until it is gone. `restart` brings it back.
    pub async fn kill9(&self) {
        self.running.process.signal(Signal::KILL);
        self.running.process.ended().await;
    }

    /// Asks it to end (SIGTERM), and waits until it has.
    pub async fn stop(&self) -> ExitStatus {
        self.running.process.signal(Signal::TERM);
        self.running.process.ended().await
    }

    /// Starts it again on the same state and the same port; one that still runs is killed before.
    pub async fn restart(&mut self) {
        self.kill9().await;
        self.running = self.builder.run(&self.state_dir, self.running.places.port, &self.log).await;
    }

    /// Stops it from doing anything (SIGSTOP) until it is resumed.
    pub fn pause(&self) {
        self.running.process.signal(Signal::STOP);
    }

    /// Lets a paused one go on.
    pub fn resume(&self) {
        self.running.process.signal(Signal::CONT);
    }

    /// Tells it to read its certificates again (SIGHUP).
    pub fn send_sighup(&self) {
        self.running.process.signal(Signal::HUP);
    }

    /// What it said, over all its runs.
    pub fn log(&self) -> String {
        self.log.text()
    }
}

impl Drop for TestAgent {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the agent said:\n{}", self.log.text());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_listens_once_it_named_both_places() {
        let told = |lines: &[&str]| Places::of(&lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>());
        assert_eq!(told(&["http://127.0.0.1:40123"]), None);
        assert_eq!(told(&["unix:///x/agent.sock"]), None);
        let both = told(&["unix:///x/agent.sock", "http://127.0.0.1:40123"]).unwrap();
        assert_eq!((both.port, both.socket.as_path()), (40_123, Path::new("/x/agent.sock")));
        assert_eq!(told(&["http://[::1]:7/api", "unix:///x"]).unwrap().port, 7);
        let prefixed = told(&["unix:///x/agent.sock", "http://[::1]:40123/api/v2"]).unwrap();
        assert_eq!((prefixed.port, prefixed.address.as_str()), (40_123, "http://[::1]:40123/api/v2"));
    }
}
