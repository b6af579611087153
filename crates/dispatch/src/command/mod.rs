//! One command per task.
//!
//! The worker is a runner, which is this program started again. It starts each task's command, waits for it, ends
//! leftover processes and reports the result. Commands write to two files that the dispatcher created, one after the
//! other, so output needs no copying and survives the runner. A program that dispatches commands calls
//! [`crate::run_helper_if_requested`] first in its `main`.

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

/// First argument that makes this program a runner.
pub(crate) const RUNNER_ARGUMENT: &str = "gpupool-command-runner";

/// Command line as the payload of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandLine {
    arguments: Vec<OsString>,
}

impl CommandLine {
    /// Creates a command from a program and its arguments. The program is looked up in `PATH` unless it contains a `/`.
    pub fn direct(arguments: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        Self { arguments: arguments.into_iter().map(Into::into).collect() }
    }

    /// Creates a command that the shell runs.
    pub fn shell(text: impl Into<OsString>) -> Self {
        Self { arguments: vec!["/bin/sh".into(), "-c".into(), text.into()] }
    }

    /// Returns the program.
    pub fn program(&self) -> &OsStr {
        self.arguments.first().map_or(OsStr::new(""), OsString::as_os_str)
    }

    /// Returns the arguments of the program.
    pub fn arguments(&self) -> &[OsString] {
        self.arguments.get(1..).unwrap_or_default()
    }

    /// Encodes the words, each ended by a zero byte, which no word can contain.
    pub fn to_payload(&self) -> Bytes {
        let mut payload = BytesMut::with_capacity(self.arguments.iter().map(|word| word.len() + 1).sum());
        for word in &self.arguments {
            payload.put_slice(word.as_bytes());
            payload.put_u8(0);
        }
        payload.freeze()
    }

    /// Decodes a payload; `None` if it is no command line.
    pub(crate) fn from_payload(payload: &[u8]) -> Option<Self> {
        let words = payload.strip_suffix(b"\0")?.split(|byte| *byte == 0);
        Some(Self { arguments: words.map(|word| OsString::from_vec(word.to_vec())).collect() })
    }
}

/// Report of a finished command, the payload of the task's outcome.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandReport {
    /// Exit code; `None` if a signal ended the command.
    pub exit_code: Option<i32>,
    /// Signal that ended the command.
    pub signal: Option<i32>,
    /// Reason for which the command could not be started. The exit code is then a shell's, 126 or 127.
    pub not_started: Option<String>,
    /// Start time in nanoseconds since 1970.
    pub started_unix_ns: u64,
    /// Run time in nanoseconds.
    pub took_ns: u64,
    /// Byte ranges of standard output and error in the runner's output files, if there are any.
    pub(crate) written: [Option<(u64, u64)>; 2],
}

impl CommandReport {
    /// Parses the payload of a task's outcome; `None` if it is no report.
    pub fn parse(payload: &[u8]) -> Option<Self> {
        serde_json::from_slice(payload).ok()
    }

    /// Returns the run time.
    pub fn duration(&self) -> Duration {
        Duration::from_nanos(self.took_ns)
    }

    /// Whether the command exited with 0.
    pub(crate) fn is_success(&self) -> bool {
        self.exit_code == Some(0)
    }
}

// The runner: a single-threaded worker that starts one command per task. Ends when the dispatcher stops it or exits.

/// Runs as a runner and never returns, if this program was started as one.
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

/// Process group of the running command, for the signal handler; 0 if none runs.
static RUNNING_GROUP: AtomicI32 = AtomicI32::new(0);

struct CommandRunner {
    /// Lengths of the output files after the last command; `None` for a stream that is no file.
    output_lengths: [Option<u64>; 2],
}

impl TaskWorker for CommandRunner {
    fn set_up(_: &WorkerHello) -> Result<Self, String> {
        let failed = |error: io::Error| error.to_string();
        // Leftover processes of commands become children of the runner, which ends them before the next command.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid())).map_err(|error| failed(error.into()))?;
        forward_interrupts().map_err(failed)?;
        Ok(Self { output_lengths: output_lengths() })
    }

    fn process(&mut self, _: TaskId, payload: Bytes) -> Result<Bytes, String> {
        let started_unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let started = Instant::now();
        let Some(line) = CommandLine::from_payload(&payload) else { return Err("the task is no command line".into()) };
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
    // Its own process group, so that an interrupt reaches the command and not the runner.
    command.args(line.arguments()).stdin(Stdio::null()).process_group(0);
    let child = command.spawn()?;
    wait_for_child(&child)
}

fn wait_for_child(child: &Child) -> io::Result<WaitStatus> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::NotFound)?;
    RUNNING_GROUP.store(pid.as_raw_nonzero().get(), Ordering::SeqCst);
    // Waits without reaping, so that the pid is not reused while the signal handler may use it.
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    let ended = rustix::io::retry_on_intr(|| waitid(WaitId::Pid(pid), options));
    RUNNING_GROUP.store(0, Ordering::SeqCst);
    ended?;
    let reaped = rustix::io::retry_on_intr(|| waitpid(Some(pid), WaitOptions::empty()))?;
    reaped.map(|(_, status)| status).ok_or_else(|| io::Error::other("the command was already reaped"))
}

/// Kills processes that the command started and did not wait for. A process that cannot be killed (stuck in the kernel,
/// or of another user) is left to the end of the runner.
fn end_leftover_processes() {
    let started = Instant::now();
    while started.elapsed() < LEFTOVER_KILL_TIMEOUT {
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

/// Returns the exit code that a shell would use.
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

/// Forwards the runner's interrupts to the command, as a termination that lets it clean up.
#[allow(unsafe_code, reason = "a handler of a signal")]
fn forward_interrupts() -> io::Result<()> {
    extern "C" fn forward_interrupt(_: libc::c_int) {
        if let Some(group) = Pid::from_raw(RUNNING_GROUP.load(Ordering::SeqCst)) {
            // Fails if the command has exited or is another user's; the grace then ends it.
            let _ = kill_process_group(group, Signal::TERM);
            let _ = kill_process_group(group, Signal::CONT);
        }
    }
    // SAFETY: the handler only reads an atomic and sends signals, which is async-signal-safe; the struct is fully
    // initialized.
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
        fn a_command_line_survives_encoding(words in prop::collection::vec("[^\0]{0,9}", 1..5)) {
            let line = CommandLine::direct(&words);
            prop_assert_eq!(CommandLine::from_payload(&line.to_payload()), Some(line));
        }
    }

    #[test]
    fn invalid_payloads_are_refused() {
        assert_eq!(CommandLine::from_payload(b""), None);
        assert_eq!(CommandLine::from_payload(b"true"), None);
    }
}
