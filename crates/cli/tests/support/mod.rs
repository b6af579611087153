//! Runs the real binary as a person would, with nothing of the tester's own environment: to its end ([`Said`]), or while it
//! goes on ([`Running`]). All waiting is on lines, pidfds and events, with one generous deadline after which the test fails
//! and says what it waited for.
#![allow(dead_code, reason = "each program of tests uses a part of it")]

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
/// A user that owns nothing, on every machine.
const NOBODY: &str = "65534";

/// An agent with so many simulated devices.
pub fn agent_of(devices: &str) -> TestAgentBuilder {
    TestAgent::builder(BINARY).simulate(devices)
}

/// What a command said, and how it ended.
#[derive(Debug)]
pub struct Said {
    pub command: String,
    pub code: Option<i32>,
    pub bytes: Vec<u8>,
    pub out: String,
    pub err: String,
}

impl Said {
    /// Runs a command to its end, with nothing on its standard input.
    pub fn of(command: impl BorrowMut<Command>) -> Self {
        with_input(command, b"")
    }

    /// What it wrote, where it ended so.
    #[track_caller]
    pub fn with(self, code: i32) -> String {
        assert_eq!(self.code, Some(code), "{self:#?}");
        String::from_utf8(self.bytes).unwrap()
    }

    /// What it wrote, where all went well.
    #[track_caller]
    pub fn fine(self) -> String {
        self.with(0)
    }

    /// What it wrote in JSON, where all went well.
    #[track_caller]
    pub fn json(self) -> Value {
        let text = self.fine();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// It ended so, and said each of these on standard error.
    #[track_caller]
    pub fn tells(self, code: i32, says: &[&str]) -> Self {
        assert_eq!(self.code, Some(code), "{self:#?}");
        for part in says {
            assert!(self.err.contains(part), "{part:?} is missing in {self:#?}");
        }
        self
    }

    /// It ended with this number and said nothing but an error with each of these in it.
    #[track_caller]
    pub fn failed(self, code: i32, says: &[&str]) {
        let said = self.tells(code, says);
        assert_eq!(said.out, "", "{said:#?}");
        assert!(said.err.starts_with("error: "), "{said:#?}");
        assert!(said.err.matches("os error").count() < 2, "the cause is said twice: {said:#?}");
    }
}

/// Runs a command to its end, with this on its standard input.
pub fn with_input(mut command: impl BorrowMut<Command>, input: &[u8]) -> Said {
    let command = command.borrow_mut();
    let text = format!("{command:?}");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|error| panic!("{text}: {error}"));
    let (pid, mut stdin, input) = (child.id(), child.stdin.take().unwrap(), input.to_vec());
    std::thread::spawn(move || {
        // Whoever has enough closes it.
        let _ = stdin.write_all(&input);
    });
    let (tell, told) = channel();
    std::thread::spawn(move || drop(tell.send(child.wait_with_output())));
    let Ok(output) = told.recv_timeout(DEADLINE) else {
        let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
        panic!("{text} did not end within {DEADLINE:?}");
    };
    let Output { status, stdout, stderr } = output.unwrap();
    let lossy = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Said { command: text, code: status.code(), out: lossy(&stdout), bytes: stdout, err: lossy(&stderr) }
}

/// The command with nothing in its environment but what lets it run; its home is `home`.
pub fn at_home(home: &Path, args: &[&str]) -> Command {
    let mut command = bare(Command::new(BINARY));
    command.args(args).env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin").env("HOME", home);
    command.env("GPUPOOL_STATE_DIR", home.join("state"));
    command
}

/// The command, asking this agent over its socket, on a page of 80 columns.
pub fn asking(agent: &TestAgent, args: &[&str]) -> Command {
    let mut command = at_home(agent.state_dir(), args);
    command.env("GPU_SERVICE_ENDPOINT", format!("unix:{}", agent.socket().display())).env("COLUMNS", "80");
    command
}

/// What the command says of this agent.
pub fn ask(agent: &TestAgent, args: &[&str]) -> Said {
    Said::of(asking(agent, args))
}

/// The command as a user who is not the agent's, asking it over loopback; `None`, and said so, where that cannot be tried.
pub fn as_nobody(agent: &TestAgent, args: &[&str]) -> Option<Command> {
    if !rustix::process::geteuid().is_root() {
        skipped("a command of another user", "only root can become another user");
        return None;
    }
    let become_nobody = |args: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", BINARY]).args(args).env_clear();
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

/// `gpupool map` without GPUs, in an environment that nothing else can change.
pub fn map(arguments: &[&str]) -> Command {
    let mut command = bare(Command::new(BINARY));
    command.args(["map", "--gpus", "0"]).args(arguments);
    command
}

/// What it says to its end, with nothing on its standard input.
pub fn said(arguments: &[&str]) -> Said {
    Said::of(map(arguments))
}

/// One `gpupool run`. Killed when dropped.
pub struct Running {
    child: Child,
    what: String,
    output: Lines,
    messages: Lines,
}

/// Lines that are waited for, and those that passed.
struct Lines {
    lines: Receiver<String>,
    passed: Vec<String>,
}

/// `gpupool run` with these options, over the agent's Unix socket, in an environment that nothing else can change.
pub fn run(agent: &TestAgent, options: &[&str], command: &[&str]) -> Running {
    run_at(&format!("unix:{}", agent.socket().display()), options, command)
}

/// The same at another address.
pub fn run_at(endpoint: &str, options: &[&str], command: &[&str]) -> Running {
    let mut line = bare(Command::new(BINARY));
    line.args(["run", "--endpoint", endpoint]).args(options).arg("--").args(command);
    Running::start(line)
}

/// A command without the variables that change what `gpupool` does.
pub fn bare(mut command: Command) -> Command {
    let path = std::env::var_os("PATH").unwrap_or_default();
    command.env_clear().env("PATH", path).env("HOME", "/nonexistent");
    for kept in ["LLVM_PROFILE_FILE", "LD_LIBRARY_PATH"] {
        if let Some(value) = std::env::var_os(kept) {
            command.env(kept, value);
        }
    }
    command
}

impl Running {
    pub fn start(mut command: Command) -> Self {
        let what = format!("{command:?}");
        let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = spawned.unwrap_or_else(|error| panic!("{what}: {error}"));
        let output = Lines::of(child.stdout.take().unwrap());
        let messages = Lines::of(child.stderr.take().unwrap());
        Self { child, what, output, messages }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a line of the command that begins so; the rest of it.
    pub fn says(&mut self, beginning: &str) -> String {
        let found = self.output.until(|line| line.starts_with(beginning));
        let line = found.unwrap_or_else(|why| panic!("{why} a line {beginning:?}\n{}", self.story()));
        line[beginning.len()..].to_owned()
    }

    /// Waits for a message of `gpupool` that holds this.
    pub fn tells(&mut self, part: &str) -> String {
        let found = self.messages.until(|line| line.contains(part));
        found.unwrap_or_else(|why| panic!("{why} a message with {part:?}\n{}", self.story()))
    }

    pub fn signal(&self, signal: Signal) {
        handle(self.pid()).signal(signal).unwrap();
    }

    /// Writes to its standard input, or presses keys where that is a terminal.
    pub fn press(&mut self, keys: &[u8]) {
        self.child.stdin.as_mut().unwrap().write_all(keys).unwrap();
    }

    /// Waits for its end; its exit code, or 128 and the signal.
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

    /// Waits for its end; its exit code and everything it said, output first.
    pub fn ended(mut self) -> (i32, String, String) {
        let code = self.code();
        (code, self.output.rest(), self.messages.rest())
    }

    fn story(&mut self) -> String {
        format!("{}\nout: {:#?}\nerr: {:#?}", self.what, self.output.passed, self.messages.passed)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let rest = self.messages.rest();
            eprintln!("{} said:\n{rest}", self.what);
        }
    }
}

impl Lines {
    /// A thread reads them; it ends with the output, i.e. when the last process that can write to it has gone. A line that
    /// is written over counts as one too.
    fn of(output: impl Read + Send + 'static) -> Self {
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for piece in BufReader::new(Returns(output)).split(b'\n').map_while(Result::ok) {
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

    /// All of it, to its end.
    fn rest(&mut self) -> String {
        while let Ok(line) = self.lines.recv_timeout(DEADLINE) {
            self.passed.push(line);
        }
        self.passed.join("\n")
    }
}

/// Reads every return of the carriage as the end of a line.
struct Returns<R>(R);

impl<R: Read> Read for Returns<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let length = self.0.read(buffer)?;
        for byte in buffer[..length].iter_mut().filter(|byte| **byte == b'\r') {
            *byte = b'\n';
        }
        Ok(length)
    }
}

fn handle(pid: u32) -> ProcessHandle {
    let id = ProcessId::of_pid(pid).unwrap().unwrap_or_else(|| panic!("process {pid} has gone"));
    ProcessHandle::open(id).unwrap().unwrap_or_else(|| panic!("process {pid} has gone"))
}

fn wait_for_end(process: &ProcessHandle, what: &str) {
    let most = Timespec { tv_sec: i64::try_from(DEADLINE.as_secs()).unwrap(), tv_nsec: 0 };
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    assert_eq!(poll(&mut fds, Some(&most)), Ok(1), "{what} did not end within {DEADLINE:?}");
}

/// A process somebody told us of, while it is surely alive; its end can be waited for.
pub struct Watched(ProcessHandle);

impl Watched {
    pub fn of(pid: &str) -> Self {
        Self(handle(pid.parse().unwrap_or_else(|_| panic!("{pid:?} is no pid"))))
    }

    pub fn signal(&self, signal: Signal) {
        self.0.signal(signal).unwrap();
    }

    pub fn expect_end(&self) {
        wait_for_end(&self.0, &format!("process {}", self.0.id()));
    }

    pub fn is_alive(&self) -> bool {
        !self.0.has_exited().unwrap()
    }
}

/// Takes devices over the agent's API, as another program would; they are held by renewing, so for a minute.
pub async fn take(client: &AgentClient, gpus: u16) -> LeaseBody {
    let body = RequestBody { gpus: Some(gpus), queue: Some(false), ..RequestBody::default() };
    client.request(&body).await.unwrap()
}

/// The leases that are not over.
pub async fn live(client: &AgentClient) -> Vec<LeaseBody> {
    client.leases(&LeaseQuery::default()).await.unwrap().leases
}

/// The one lease that is active.
pub async fn the_active(client: &AgentClient) -> LeaseBody {
    let live = live(client).await;
    let [lease] = live.as_slice() else { panic!("one lease should be there: {live:#?}") };
    assert_eq!(lease.state, LeaseState::Active, "{lease:#?}");
    lease.clone()
}

/// How a lease ended.
pub async fn over(client: &AgentClient, lease: u64) -> (LeaseState, Option<String>) {
    let lease = client.follow(lease, Duration::ZERO).await.unwrap();
    (lease.state, lease.cause)
}

/// Whether this test runs as root; says that it cannot be tried where it does not.
pub fn is_root(story: &str) -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        skipped(story, "only root can become another user");
    }
    is_root
}
