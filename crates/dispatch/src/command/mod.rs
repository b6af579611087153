//! A command for each task.
//!
//! A runner, which is this very program started again, is the worker: it starts each task's command, waits for it, ends what
//! the command left behind, and says how it went. What commands write goes to two files the dispatcher made, one behind the
//! other; so it needs no copying and survives the runner. A program that dispatches commands calls [`crate::run_helper_if_requested`] first
//! thing in its `main`.

mod output_spool;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{env, io};

use bytes::{BufMut as _, Bytes, BytesMut};
use gpupool_confine::process::kill_descendants;
use rustix::fs::FileType;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitOptions, WaitStatus, kill_process_group, wait, waitid, waitpid,
};
use serde::{Deserialize, Serialize};

pub use output_spool::CommandOutput;
pub(crate) use output_spool::OutputSpool;

use crate::TaskId;
use crate::limits::{LEFTOVER_KILL_PAUSE, LEFTOVER_KILL_TIMEOUT};
use crate::worker::{TaskWorker, WorkerHello, serve_tasks};

/// The first argument that makes this program a runner.
pub(crate) const RUNNER_ARGUMENT: &str = "gpupool-command-runner";

/// A command line, as the payload of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandLine {
    arguments: Vec<OsString>,
}

impl CommandLine {
    /// A program, looked up in `PATH` unless it holds a `/`, and its arguments.
    pub fn direct(arguments: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        Self { arguments: arguments.into_iter().map(Into::into).collect() }
    }

    /// A text for the shell.
    pub fn shell(text: impl Into<OsString>) -> Self {
        Self { arguments: vec!["/bin/sh".into(), "-c".into(), text.into()] }
    }

    /// The program.
    pub fn program(&self) -> &OsStr {
        self.arguments.first().map_or(OsStr::new(""), OsString::as_os_str)
    }

    /// What follows the program.
    pub fn arguments(&self) -> &[OsString] {
        self.arguments.get(1..).unwrap_or_default()
    }

    /// The task: the words, each ended by a zero byte, which no word of a command can hold.
    pub fn to_payload(&self) -> Bytes {
        let mut payload = BytesMut::with_capacity(self.arguments.iter().map(|word| word.len() + 1).sum());
        for word in &self.arguments {
            payload.put_slice(word.as_bytes());
            payload.put_u8(0);
        }
        payload.freeze()
    }

    /// The words of a task; `None` where it is none.
    pub(crate) fn from_payload(payload: &[u8]) -> Option<Self> {
        let words = payload.strip_suffix(b"\0")?.split(|byte| *byte == 0);
        Some(Self { arguments: words.map(|word| OsString::from_vec(word.to_vec())).collect() })
    }
}

/// How a command went: what a task's outcome holds where each task is a command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandReport {
    /// The code it exited with; `None` where a signal ended it.
    pub exit_code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Why it could not be started, where it could not: then the code is what a shell would give, 126 or 127.
    pub not_started: Option<String>,
    /// When it was started, in nanoseconds since 1970.
    pub started_unix_ns: u64,
    /// How long it took, in nanoseconds.
    pub took_ns: u64,
    /// Bytes of its standard output, and of its standard error, where the runner's go to a file: from and to.
    pub(crate) written: [Option<(u64, u64)>; 2],
}

impl CommandReport {
    /// What a task's outcome says; `None` where that is no report.
    pub fn parse(payload: &[u8]) -> Option<Self> {
        serde_json::from_slice(payload).ok()
    }

    /// How long it took.
    pub fn duration(&self) -> Duration {
        Duration::from_nanos(self.took_ns)
    }

    /// Whether it exited with 0.
    pub(crate) fn is_success(&self) -> bool {
        self.exit_code == Some(0)
    }
}

// The runner: the worker that starts a command for each task. One thread; it ends when it is told to, or whoever gave it
// work is gone.

/// Runs as runner and never comes back, if this program was started as one.
pub(crate) fn run_helper_if_requested() {
    if env::args_os().nth(1).is_none_or(|argument| argument != RUNNER_ARGUMENT) {
        return;
    }
    let served = serve_tasks::<CommandRunner>();
    if let Err(error) = &served {
        eprintln!("gpupool: {error}");
    }
    std::process::exit(i32::from(served.is_err()));
}

/// The process group of the command that runs, for the handler of signals; 0 where none does.
static RUNNING_GROUP: AtomicI32 = AtomicI32::new(0);

struct CommandRunner {
    /// How long the files of standard output and error were after the last command; `None` where they are no files.
    output_lengths: [Option<u64>; 2],
}

impl TaskWorker for CommandRunner {
    fn set_up(_: &WorkerHello) -> Result<Self, String> {
        let failed = |error: io::Error| error.to_string();
        // What commands leave behind becomes ours, and is ended before the next one.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid())).map_err(|error| failed(error.into()))?;
        forward_interrupts().map_err(failed)?;
        Ok(Self { output_lengths: output_lengths() })
    }

    fn process(&mut self, _: TaskId, payload: Bytes) -> Result<Bytes, String> {
        let started_unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let started = Instant::now();
        let Some(line) = CommandLine::from_payload(&payload) else { return Err("this is no command line".into()) };
        let ended = run_command(&line);
        end_leftover_processes();
        let took = started.elapsed();
        let now = output_lengths();
        let written = std::array::from_fn(|stream| Some((self.output_lengths[stream]?, now[stream]?)));
        self.output_lengths = now;
        let (exit_code, signal, not_started) = match ended {
            Ok(status) => (status.exit_status(), status.terminating_signal(), None),
            Err(error) => (Some(shell_exit_code(&error)), None, Some(format!("{}: {error}", line.program().display()))),
        };
        let report = CommandReport {
            exit_code,
            signal,
            not_started,
            started_unix_ns: u64::try_from(started_unix.as_nanos()).unwrap_or(u64::MAX),
            took_ns: u64::try_from(took.as_nanos()).unwrap_or(u64::MAX),
            written,
        };
        let payload = serde_json::to_string(&report).map_err(|error| error.to_string())?;
        if report.is_success() { Ok(payload.into()) } else { Err(payload) }
    }
}

fn run_command(line: &CommandLine) -> io::Result<WaitStatus> {
    let mut command = Command::new(line.program());
    // A group of its own, so that all of it can be interrupted, and not we.
    command.args(line.arguments()).stdin(Stdio::null()).process_group(0);
    let child = command.spawn()?;
    wait_for_child(&child)
}

fn wait_for_child(child: &Child) -> io::Result<WaitStatus> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::NotFound)?;
    RUNNING_GROUP.store(pid.as_raw_nonzero().get(), Ordering::SeqCst);
    // Ended, but not reaped: until then its number is nobody else's, and the handler may use it.
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    let ended = rustix::io::retry_on_intr(|| waitid(WaitId::Pid(pid), options));
    RUNNING_GROUP.store(0, Ordering::SeqCst);
    ended?;
    let reaped = rustix::io::retry_on_intr(|| waitpid(Some(pid), WaitOptions::empty()))?;
    reaped.map(|(_, status)| status).ok_or_else(|| io::Error::other("the command was not there to be reaped"))
}

/// Kills whatever the command started and did not wait for. What cannot be killed (it hangs inside the kernel, or is another
/// user's) is left to whoever ends us.
fn end_leftover_processes() {
    let begun = Instant::now();
    while begun.elapsed() < LEFTOVER_KILL_TIMEOUT {
        match wait(WaitOptions::NOHANG) {
            Ok(Some(_)) | Err(rustix::io::Errno::INTR) => {}
            Ok(None) => {
                kill_descendants();
                std::thread::sleep(LEFTOVER_KILL_PAUSE);
            }
            Err(_) => return,
        }
    }
}

/// What a shell would exit with.
fn shell_exit_code(error: &io::Error) -> i32 {
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENOTDIR) => 127,
        _ => 126,
    }
}

fn output_lengths() -> [Option<u64>; 2] {
    let length = |stat: rustix::io::Result<rustix::fs::Stat>| {
        let stat = stat.ok().filter(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)?;
        u64::try_from(stat.st_size).ok()
    };
    [length(rustix::fs::fstat(rustix::stdio::stdout())), length(rustix::fs::fstat(rustix::stdio::stderr()))]
}

/// An interrupt of ours is one for the command: told to end, it may still tidy up.
#[allow(unsafe_code, reason = "a handler of a signal")]
fn forward_interrupts() -> io::Result<()> {
    extern "C" fn forward_interrupt(_: libc::c_int) {
        if let Some(group) = Pid::from_raw(RUNNING_GROUP.load(Ordering::SeqCst)) {
            // Gone already, or of another user: then the grace ends it.
            let _ = kill_process_group(group, Signal::TERM);
            let _ = kill_process_group(group, Signal::CONT);
        }
    }
    // SAFETY: the handler only reads an atomic and sends signals, which may be done in one; the structure is whole.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = forward_interrupt as *const () as libc::sighandler_t;
        libc::sigemptyset(&mut action.sa_mask);
        libc::sigaction(libc::SIGINT, &action, std::ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_command_line_survives_the_way(words in prop::collection::vec("[^\0]{0,9}", 1..5)) {
            let line = CommandLine::direct(&words);
            prop_assert_eq!(CommandLine::from_payload(&line.to_payload()), Some(line));
        }
    }

    #[test]
    fn what_is_no_command_line_is_refused() {
        assert_eq!(CommandLine::from_payload(b""), None);
        assert_eq!(CommandLine::from_payload(b"true"), None);
    }
}
