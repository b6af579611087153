//! One run of an agent: signals that cannot hit anybody else, and an end that is waited for.

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

/// A process that runs until it ends or is killed. A thread waits for its end, and ends with it.
#[derive(Debug)]
pub(crate) struct Process {
    pid: u32,
    handle: OwnedFd,
    ended: watch::Receiver<Option<ExitStatus>>,
    waiter: Option<thread::JoinHandle<()>>,
}

impl Process {
    pub fn new(mut child: Child) -> Self {
        let pid = child.id();
        // Not waited for yet, so the number is still its own.
        let handle = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).expect("a handle on a child");
        let (tell, ended) = watch::channel(None);
        let wait = move || {
            let status = child.wait().expect("the end of a child");
            tell.send_replace(Some(status));
        };
        let waiter = thread::Builder::new().name("agent's end".into()).spawn(wait).expect("a thread can be started");
        Self { pid, handle, ended, waiter: Some(waiter) }
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Sends a signal, unless it has ended.
    pub fn signal(&self, signal: Signal) {
        // Only a process that has ended cannot be signalled by its parent.
        let _ = pidfd_send_signal(&self.handle, signal);
    }

    /// How it ended, where it has.
    pub fn status(&self) -> Option<ExitStatus> {
        *self.ended.borrow()
    }

    /// Waits for its end.
    pub async fn ended(&self) -> ExitStatus {
        let mut ended = self.ended.clone();
        let status = within_deadline("the agent's end", ended.wait_for(Option::is_some)).await;
        status.ok().and_then(|status| *status).expect("the waiting thread tells before it ends")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        if let Some(waiter) = self.waiter.take() {
            let _ = waiter.join();
        }
    }
}

// Where the `gpupool` binary is.

/// The `gpupool` binary that was built together with this test: the one that `GPUPOOL_BINARY` names, or else the one beside
/// the folder of the test's own executable (`target/debug/gpupool` for `target/debug/deps/some_test`).
///
/// The tests of the command line's own crate should rather pass `env!("CARGO_BIN_EXE_gpupool")`, which Cargo builds
/// for them; for the tests of other crates Cargo builds no binary, so it may be missing or old: `cargo build` first.
pub fn gpupool_binary() -> PathBuf {
    if let Some(named) = std::env::var_os("GPUPOOL_BINARY") {
        return named.into();
    }
    let test = std::env::current_exe().expect("a test knows its own executable");
    let beside = test.parent().and_then(|folder| folder.parent()).map(|folder| folder.join("gpupool"));
    let binary = beside.filter(|path| path.is_file());
    binary.unwrap_or_else(|| {
        panic!("no gpupool binary near {}; run `cargo build`, or set GPUPOOL_BINARY", test.display())
    })
}

// What an agent says, line by line, for the messages of failed tests.

/// The last lines of an agent's output, over all its runs. A lock: threads that read and tests that print share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Log {
    lines: Arc<Mutex<VecDeque<String>>>,
}

impl Log {
    /// Reads an output to its end, in a thread that ends with it. Lines after `prefix` are told to `found`.
    pub fn collect(&self, output: impl Read + Send + 'static, prefix: &'static str, found: watch::Sender<Vec<String>>) {
        let log = self.clone();
        let read = move || {
            for line in BufReader::new(output).split(b'\n') {
                let Ok(line) = line else { return };
                let line = String::from_utf8_lossy(&line).into_owned();
                if let Some(rest) = line.strip_prefix(prefix) {
                    found.send_modify(|found| found.push(rest.trim().to_owned()));
                }
                log.add(line);
            }
        };
        thread::Builder::new().name("agent output".into()).spawn(read).expect("a thread can be started");
    }

    pub fn add(&self, line: String) {
        let mut lines = self.lock();
        if lines.len() == LOG_LINES {
            lines.pop_front();
        }
        lines.push_back(line);
    }

    /// Everything that is kept.
    pub fn text(&self) -> String {
        self.lock().iter().map(|line| format!("  | {line}\n")).collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<String>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
