//! Runs the real binary with a clean environment: to its end ([`FinishedCommand`]) or in the background
//! ([`BackgroundCommand`]). Every wait is on a line, pidfd or event, with one generous deadline; a test that exceeds it
//! reports what it waited for.
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::borrow::BorrowMut;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_api::lease::{LeaseBody, LeaseState};
use gpupool_client::{AgentClient, LeaseQuery};
use gpupool_confine::Signal;
use gpupool_confine::process::{ProcessHandle, ProcessId};
use gpupool_testkit::{DEADLINE, TestAgent, TestAgentBuilder};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::Value;

pub use gpupool_testkit::skipped;

pub const BINARY: &str = env!("CARGO_BIN_EXE_gpupool");
/// Uid of a user without files or leases.
const NOBODY_UID: &str = "65534";

/// Prepares an agent with simulated devices.
pub fn agent_of(devices: &str) -> TestAgentBuilder {
    TestAgent::builder(BINARY).simulate(devices)
}

/// Output and exit code of a command that has ended.
#[derive(Debug)]
pub struct FinishedCommand {
    pub command: String,
    pub code: Option<i32>,
    pub bytes: Vec<u8>,
    pub out: String,
    pub err: String,
}

impl FinishedCommand {
    /// Runs a command to its end, with empty standard input.
    pub fn run(command: impl BorrowMut<Command>) -> Self {
        with_input(command, b"")
    }

    /// Checks the exit code and returns standard output.
    #[track_caller]
    pub fn with(self, code: i32) -> String {
        assert_eq!(self.code, Some(code), "{self:#?}");
        String::from_utf8(self.bytes).unwrap()
    }

    /// Checks for success and returns standard output.
    #[track_caller]
    pub fn success(self) -> String {
        self.with(0)
    }

    /// Checks for success and parses standard output as JSON.
    #[track_caller]
    pub fn json(self) -> Value {
        let text = self.success();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// Checks the exit code and that standard error contains each part.
    #[track_caller]
    pub fn reports(self, code: i32, expected_parts: &[&str]) -> Self {
        assert_eq!(self.code, Some(code), "{self:#?}");
        for part in expected_parts {
            assert!(self.err.contains(part), "{part:?} is missing in {self:#?}");
        }
        self
    }

    /// Checks that the command failed, printed nothing but an error, and that the error contains each part.
    #[track_caller]
    pub fn fails(self, code: i32, expected_parts: &[&str]) {
        let printed = self.reports(code, expected_parts);
        assert_eq!(printed.out, "", "{printed:#?}");
        assert!(printed.err.starts_with("error: "), "{printed:#?}");
        assert!(printed.err.matches("os error").count() < 2, "the cause is repeated: {printed:#?}");
    }
}

/// Runs a command to its end, with this standard input.
pub fn with_input(mut command: impl BorrowMut<Command>, input: &[u8]) -> FinishedCommand {
    let command = command.borrow_mut();
    let text = format!("{command:?}");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|error| panic!("{text}: {error}"));
    let (pid, mut stdin, input) = (child.id(), child.stdin.take().unwrap(), input.to_vec());
    std::thread::spawn(move || {
        // The command may close its input early.
        let _ = stdin.write_all(&input);
    });
    let (tell, reported) = channel();
    std::thread::spawn(move || drop(tell.send(child.wait_with_output())));
    let Ok(output) = reported.recv_timeout(DEADLINE) else {
        let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
        panic!("{text} did not end within {DEADLINE:?}");
    };
    let Output { status, stdout, stderr } = output.unwrap();
    let lossy = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    FinishedCommand { command: text, code: status.code(), out: lossy(&stdout), bytes: stdout, err: lossy(&stderr) }
}

/// Prepares `gpupool` with a minimal environment and this home directory.
pub fn command_in(home: &Path, args: &[&str]) -> Command {
    let mut command = without_variables(Command::new(BINARY));
    command.args(args).env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin").env("HOME", home);
    command.env("GPUPOOL_STATE_DIR", home.join("state"));
    command
}

/// Prepares `gpupool` for this agent's socket, on a terminal of 80 columns.
pub fn command_for(agent: &TestAgent, args: &[&str]) -> Command {
    let mut command = command_in(agent.state_dir(), args);
    command.env("GPU_SERVICE_ENDPOINT", format!("unix:{}", agent.socket().display())).env("COLUMNS", "80");
    command
}

/// Runs `gpupool` for this agent's socket.
pub fn run_command(agent: &TestAgent, args: &[&str]) -> FinishedCommand {
    FinishedCommand::run(command_for(agent, args))
}

/// Prepares `gpupool` as another user than the agent's, over loopback; `None`, with a note, if that is impossible here.
pub fn command_as_nobody(agent: &TestAgent, args: &[&str]) -> Option<Command> {
    if !rustix::process::geteuid().is_root() {
        skipped("a command of another user", "only root can become another user");
        return None;
    }
    let become_nobody = |args: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", NOBODY_UID, "--regid", NOBODY_UID, "--clear-groups", BINARY]).args(args).env_clear();
        command.env("PATH", "/usr/bin:/bin").env("HOME", "/nonexistent").env("GPU_SERVICE_ENDPOINT", agent.address());
        command
    };
    match become_nobody(&["--version"]).output() {
        Ok(output) if output.status.success() => Some(become_nobody(args)),
        tried => {
            skipped("a command of another user", &format!("it cannot run this binary: {tried:?}"));
            None
        }
    }
}

/// Prepares `gpupool map` without GPUs, with a clean environment.
pub fn map(arguments: &[&str]) -> Command {
    let mut command = without_variables(Command::new(BINARY));
    command.args(["map", "--gpus", "0"]).args(arguments);
    command
}

/// Runs `gpupool map` without GPUs, with empty standard input.
pub fn run_map(arguments: &[&str]) -> FinishedCommand {
    FinishedCommand::run(map(arguments))
}

/// Running command, killed on drop.
pub struct BackgroundCommand {
    child: Child,
    what: String,
    output: LineStream,
    messages: LineStream,
}

/// Lines of an output, and those that were read already.
struct LineStream {
    lines: Receiver<String>,
    passed: Vec<String>,
}

/// Starts `gpupool run` over the agent's Unix socket, with a clean environment.
pub fn run(agent: &TestAgent, options: &[&str], command: &[&str]) -> BackgroundCommand {
    run_at(&format!("unix:{}", agent.socket().display()), options, command)
}

/// Starts `gpupool run` for an endpoint, with a clean environment.
pub fn run_at(endpoint: &str, options: &[&str], command: &[&str]) -> BackgroundCommand {
    let mut line = without_variables(Command::new(BINARY));
    line.args(["run", "--endpoint", endpoint]).args(options).arg("--").args(command);
    BackgroundCommand::start(line)
}

/// Removes the variables that affect `gpupool`.
pub fn without_variables(mut command: Command) -> Command {
    let path = std::env::var_os("PATH").unwrap_or_default();
    command.env_clear().env("PATH", path).env("HOME", "/nonexistent");
    for kept in ["LLVM_PROFILE_FILE", "LD_LIBRARY_PATH"] {
        if let Some(value) = std::env::var_os(kept) {
            command.env(kept, value);
        }
    }
    command
}

impl BackgroundCommand {
    pub fn start(mut command: Command) -> Self {
        let what = format!("{command:?}");
        let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = spawned.unwrap_or_else(|error| panic!("{what}: {error}"));
        let output = LineStream::of(child.stdout.take().unwrap());
        let messages = LineStream::of(child.stderr.take().unwrap());
        Self { child, what, output, messages }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for an output line with this beginning and returns the rest of the line.
    pub fn wait_for_output(&mut self, beginning: &str) -> String {
        let found = self.output.until(|line| line.starts_with(beginning));
        let line = found.unwrap_or_else(|why| panic!("{why} a line {beginning:?}\n{}", self.story()));
        line[beginning.len()..].to_owned()
    }

    /// Waits for a message on standard error that contains `part`.
    pub fn wait_for_message(&mut self, part: &str) -> String {
        let found = self.messages.until(|line| line.contains(part));
        found.unwrap_or_else(|why| panic!("{why} a message with {part:?}\n{}", self.story()))
    }

    pub fn signal(&self, signal: Signal) {
        handle(self.pid()).signal(signal).unwrap();
    }

    /// Writes to standard input, which may be a terminal.
    pub fn send_keys(&mut self, keys: &[u8]) {
        self.child.stdin.as_mut().unwrap().write_all(keys).unwrap();
    }

    /// Waits for the end and returns the exit code, or 128 plus the signal.
    pub fn code(&mut self) -> i32 {
        use std::os::unix::process::ExitStatusExt;
        if let Some(id) = ProcessId::of_pid(self.child.id()).unwrap()
            && let Some(process) = ProcessHandle::open(id).unwrap()
        {
            wait_for_end(&process, &self.what);
        }
        let status = self.child.wait().unwrap();
        status.code().unwrap_or_else(|| 128 + status.signal().unwrap())
    }

    /// Waits for the end and returns exit code, output and messages.
    pub fn ended(mut self) -> (i32, String, String) {
        let code = self.code();
        (code, self.output.rest(), self.messages.rest())
    }

    fn story(&mut self) -> String {
        format!("{}\nout: {:#?}\nerr: {:#?}", self.what, self.output.passed, self.messages.passed)
    }
}

impl Drop for BackgroundCommand {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let rest = self.messages.rest();
            eprintln!("{} said:\n{rest}", self.what);
        }
    }
}

impl LineStream {
    /// Starts a thread that reads until the last process with the output open has ended. A carriage return ends a line
    /// as well.
    fn of(output: impl Read + Send + 'static) -> Self {
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for piece in BufReader::new(CarriageReturns(output)).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&piece).into_owned();
                if !line.is_empty() && sender.send(line).is_err() {
                    return;
                }
            }
        });
        Self { lines, passed: Vec::new() }
    }

    fn until(&mut self, wanted: impl Fn(&str) -> bool) -> Result<String, &'static str> {
        loop {
            let line = match self.lines.recv_timeout(DEADLINE) {
                Ok(line) => line,
                Err(RecvTimeoutError::Timeout) => return Err("too long without"),
                Err(RecvTimeoutError::Disconnected) => return Err("it ended without"),
            };
            self.passed.push(line.clone());
            if wanted(&line) {
                return Ok(line);
            }
        }
    }

    /// Reads to the end and returns all lines.
    fn rest(&mut self) -> String {
        while let Ok(line) = self.lines.recv_timeout(DEADLINE) {
            self.passed.push(line);
        }
        self.passed.join("\n")
    }
}

/// Reader that turns carriage returns into newlines.
struct CarriageReturns<R>(R);

impl<R: Read> Read for CarriageReturns<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let length = self.0.read(buffer)?;
        for byte in buffer[..length].iter_mut().filter(|byte| **byte == b'\r') {
            *byte = b'\n';
        }
        Ok(length)
    }
}

fn handle(pid: u32) -> ProcessHandle {
    let id = ProcessId::of_pid(pid).unwrap().unwrap_or_else(|| panic!("process {pid} is gone"));
    ProcessHandle::open(id).unwrap().unwrap_or_else(|| panic!("process {pid} is gone"))
}

fn wait_for_end(process: &ProcessHandle, what: &str) {
    let most = Timespec { tv_sec: i64::try_from(DEADLINE.as_secs()).unwrap(), tv_nsec: 0 };
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    assert_eq!(poll(&mut fds, Some(&most)), Ok(1), "{what} did not end within {DEADLINE:?}");
}

/// Process whose end can be awaited. It must be alive when this is created.
pub struct ObservedProcess(ProcessHandle);

impl ObservedProcess {
    pub fn of(pid: &str) -> Self {
        Self(handle(pid.parse().unwrap_or_else(|_| panic!("{pid:?} is no pid"))))
    }

    pub fn signal(&self, signal: Signal) {
        self.0.signal(signal).unwrap();
    }

    pub fn wait_for_exit(&self) {
        wait_for_end(&self.0, &format!("process {}", self.0.id()));
    }

    pub fn is_alive(&self) -> bool {
        !self.0.has_exited().unwrap()
    }
}

/// Leases GPUs over the API, as another program would, for the default ttl.
pub async fn take_gpus(client: &AgentClient, gpus: u16) -> LeaseBody {
    let body = RequestBody { gpus: Some(gpus), queue: Some(false), ..RequestBody::default() };
    client.request(&body).await.unwrap()
}

/// Returns the leases that have not ended.
pub async fn live_leases(client: &AgentClient) -> Vec<LeaseBody> {
    client.leases(&LeaseQuery::default()).await.unwrap().leases
}

/// Returns the only active lease.
pub async fn active_lease(client: &AgentClient) -> LeaseBody {
    let live = live_leases(client).await;
    let [lease] = live.as_slice() else { panic!("one lease should be there: {live:#?}") };
    assert_eq!(lease.state, LeaseState::Active, "{lease:#?}");
    lease.clone()
}

/// Returns state and cause of an ended lease.
pub async fn lease_end(client: &AgentClient, lease: u64) -> (LeaseState, Option<String>) {
    let lease = client.follow(lease, Duration::ZERO).await.unwrap();
    (lease.state, lease.cause)
}

/// Returns whether the test runs as root, with a note if not.
pub fn is_root(story: &str) -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        skipped(story, "only root can become another user");
    }
    is_root
}
