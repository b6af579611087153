//! The runner: the worker that starts a command for each task. One thread; it ends when it is told to, or whoever gave it
//! work is gone.

use std::env;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use gpupool_confine::process::kill_descendants;
use rustix::fs::FileType;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitOptions, WaitStatus, kill_process_group, wait, waitid, waitpid,
};

use super::RUNNER_ARGUMENT;
use super::line::CommandLine;
use super::report::Report;
use crate::TaskId;
use crate::limits::{LEFT_PATIENCE, LEFT_PAUSE};
use crate::worker::{Hello, Worker, serve};

/// Runs as runner and never comes back, if this program was started as one.
pub fn main_if_asked() {
    if env::args_os().nth(1).is_none_or(|argument| argument != RUNNER_ARGUMENT) {
        return;
    }
    let code = match serve::<Runner>() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpupool: {error}");
            ExitCode::FAILURE
        }
    };
    std::process::exit(i32::from(code != ExitCode::SUCCESS));
}

/// The process group of the command that runs, for the handler of signals; 0 where none does.
static RUNNING: AtomicI32 = AtomicI32::new(0);

struct Runner {
    /// How long the files of standard output and error were after the last command; `None` where they are no files.
    lengths: [Option<u64>; 2],
}

impl Worker for Runner {
    fn set_up(_: &Hello) -> Result<Self, String> {
        let failed = |error: io::Error| error.to_string();
        // What commands leave behind becomes ours, and is ended before the next one.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid())).map_err(|error| failed(error.into()))?;
        pass_interrupts_on().map_err(failed)?;
        Ok(Self { lengths: lengths() })
    }

    fn process(&mut self, _: TaskId, payload: Bytes) -> Result<Bytes, String> {
        let started_unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let started = Instant::now();
        let Some(line) = CommandLine::of_payload(&payload) else { return Err("this is no command line".into()) };
        let ended = run(&line);
        end_what_is_left();
        let took = started.elapsed();
        let now = lengths();
        let written = std::array::from_fn(|stream| Some((self.lengths[stream]?, now[stream]?)));
        self.lengths = now;
        let (exit_code, signal, not_started) = match ended {
            Ok(status) => (status.exit_status(), status.terminating_signal(), None),
            Err(error) => (Some(code_of(&error)), None, Some(format!("{}: {error}", line.program().display()))),
        };
        let report = Report {
            exit_code,
            signal,
            not_started,
            started_unix_ns: u64::try_from(started_unix.as_nanos()).unwrap_or(u64::MAX),
            took_ns: u64::try_from(took.as_nanos()).unwrap_or(u64::MAX),
            written,
        };
        let said = serde_json::to_string(&report).map_err(|error| error.to_string())?;
        if report.is_success() { Ok(said.into()) } else { Err(said) }
    }
}

fn run(line: &CommandLine) -> io::Result<WaitStatus> {
    let mut command = Command::new(line.program());
    // A group of its own, so that all of it can be interrupted, and not we.
    command.args(line.arguments()).stdin(Stdio::null()).process_group(0);
    let child = command.spawn()?;
    wait_for(&child)
}

fn wait_for(child: &Child) -> io::Result<WaitStatus> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::NotFound)?;
    RUNNING.store(pid.as_raw_nonzero().get(), Ordering::SeqCst);
    // Ended, but not reaped: until then its number is nobody else's, and the handler may use it.
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    let ended = rustix::io::retry_on_intr(|| waitid(WaitId::Pid(pid), options));
    RUNNING.store(0, Ordering::SeqCst);
    ended?;
    let reaped = rustix::io::retry_on_intr(|| waitpid(Some(pid), WaitOptions::empty()))?;
    reaped.map(|(_, status)| status).ok_or_else(|| io::Error::other("the command was not there to be reaped"))
}

/// Kills whatever the command started and did not wait for. What cannot be killed (it hangs inside the kernel, or is another
/// user's) is left to whoever ends us.
fn end_what_is_left() {
    let begun = Instant::now();
    while begun.elapsed() < LEFT_PATIENCE {
        match wait(WaitOptions::NOHANG) {
            Ok(Some(_)) | Err(rustix::io::Errno::INTR) => {}
            Ok(None) => {
                kill_descendants();
                std::thread::sleep(LEFT_PAUSE);
            }
            Err(_) => return,
        }
    }
}

/// What a shell would exit with.
fn code_of(error: &io::Error) -> i32 {
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENOTDIR) => 127,
        _ => 126,
    }
}

fn lengths() -> [Option<u64>; 2] {
    let length = |stat: rustix::io::Result<rustix::fs::Stat>| {
        let stat = stat.ok().filter(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)?;
        u64::try_from(stat.st_size).ok()
    };
    [length(rustix::fs::fstat(rustix::stdio::stdout())), length(rustix::fs::fstat(rustix::stdio::stderr()))]
}

/// An interrupt of ours is one for the command: told to end, it may still tidy up.
#[allow(unsafe_code, reason = "a handler of a signal")]
fn pass_interrupts_on() -> io::Result<()> {
    extern "C" fn pass_on(_: libc::c_int) {
        if let Some(group) = Pid::from_raw(RUNNING.load(Ordering::SeqCst)) {
            // Gone already, or of another user: then the grace ends it.
            let _ = kill_process_group(group, Signal::TERM);
            let _ = kill_process_group(group, Signal::CONT);
        }
    }
    // SAFETY: the handler only reads an atomic and sends signals, which may be done in one; the structure is whole.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = pass_on as *const () as libc::sighandler_t;
        libc::sigemptyset(&mut action.sa_mask);
        libc::sigaction(libc::SIGINT, &action, std::ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
