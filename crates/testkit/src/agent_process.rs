//! One run of an agent: safe signals and an awaited exit.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Read};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, ExitStatus};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::sync::watch;

use crate::{LOG_LINES, within_deadline};

/// A process that runs until it exits or is killed. A thread waits for its exit and ends with it.
#[derive(Debug)]
pub(crate) struct AgentProcess {
    pid: u32,
    handle: OwnedFd,
    ended: watch::Receiver<Option<ExitStatus>>,
    waiter: Option<thread::JoinHandle<()>>,
}

impl AgentProcess {
    pub fn new(mut child: Child) -> Self {
        let pid = child.id();
        // Not reaped yet, so the pid is still its own.
        let handle = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).expect("a handle on a child");
        let (sender, ended) = watch::channel(None);
        let wait = move || {
            let status = child.wait().expect("the exit of a child");
            sender.send_replace(Some(status));
        };
        let waiter = thread::Builder::new().name("agent exit".into()).spawn(wait).expect("a thread can be started");
        Self { pid, handle, ended, waiter: Some(waiter) }
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Sends a signal, unless the process has exited.
    pub fn signal(&self, signal: Signal) {
        // A parent can signal its child until the child has exited.
        let _ = pidfd_send_signal(&self.handle, signal);
    }

    /// Returns the exit status, if the process has exited.
    pub fn status(&self) -> Option<ExitStatus> {
        *self.ended.borrow()
    }

    /// Waits for the exit.
    pub async fn wait_ended(&self) -> ExitStatus {
        let mut ended = self.ended.clone();
        let status = within_deadline("the exit of the agent", ended.wait_for(Option::is_some)).await;
        status.ok().and_then(|status| *status).expect("the waiting thread reports the exit")
    }
}

impl Drop for AgentProcess {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        if let Some(waiter) = self.waiter.take() {
            let _ = waiter.join();
        }
    }
}

// Location of the `gpupool` binary.

/// Returns the `gpupool` binary built together with this test: `GPUPOOL_BINARY`, or else the one next to the directory
/// of the test's executable (`target/debug/gpupool` for `target/debug/deps/some_test`).
///
/// Tests of the CLI crate should pass `env!("CARGO_BIN_EXE_gpupool")` instead, which Cargo builds for them. For tests
/// of other crates Cargo builds no binary, so it may be missing or old: run `cargo build` first.
pub fn gpupool_binary() -> PathBuf {
    if let Some(named) = std::env::var_os("GPUPOOL_BINARY") {
        return named.into();
    }
    let test = std::env::current_exe().expect("the path of the test executable");
    let beside = test.parent().and_then(|folder| folder.parent()).map(|folder| folder.join("gpupool"));
    let binary = beside.filter(|path| path.is_file());
    binary.unwrap_or_else(|| {
        panic!("no gpupool binary near {}; run `cargo build`, or set GPUPOOL_BINARY", test.display())
    })
}

// Output of an agent, for the messages of failed tests.

/// Last lines of an agent's output over all its runs. Locked because reader threads and tests share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct AgentOutput {
    lines: Arc<Mutex<VecDeque<String>>>,
}

impl AgentOutput {
    /// Reads an output to its end, in a thread that ends with it. The rest of each line after `prefix` goes to `found`.
    pub fn collect(&self, output: impl Read + Send + 'static, prefix: &'static str, found: watch::Sender<Vec<String>>) {
        let log = self.clone();
        let read = move || {
            for line in BufReader::new(output).split(b'\n') {
                let Ok(line) = line else { return };
                let line = String::from_utf8_lossy(&line).into_owned();
                if let Some(rest) = line.strip_prefix(prefix) {
                    found.send_modify(|found| found.push(rest.trim().to_owned()));
                }
                log.add_line(line);
            }
        };
        thread::Builder::new().name("agent output".into()).spawn(read).expect("a thread can be started");
    }

    pub fn add_line(&self, line: String) {
        let mut lines = self.lock();
        if lines.len() == LOG_LINES {
            lines.pop_front();
        }
        lines.push_back(line);
    }

    /// Returns all retained lines.
    pub fn text(&self) -> String {
        self.lock().iter().map(|line| format!("  | {line}\n")).collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<String>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
