//! Runs vendor tools that may hang in the driver: with a deadline, one run at a time, never killed hard.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use crate::limits;
use crate::source::SourceError;

/// Output and exit code of a tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ToolOutput {
    /// Standard output, bounded; invalid UTF-8 is replaced.
    pub stdout: String,
    /// Standard error, likewise.
    pub stderr: String,
    /// Exit code; `None` after a signal.
    pub code: Option<i32>,
}

/// A vendor's tool. While a run hangs, no other run starts.
#[derive(Debug)]
pub(crate) struct VendorTool {
    path: PathBuf,
    deadline: Duration,
    hung: Option<HungRun>,
}

#[derive(Debug)]
struct HungRun {
    child: Child,
    since: Instant,
}

impl VendorTool {
    /// Creates the tool at `path`, or of this name on the `PATH`; each run gets `deadline`.
    pub(crate) fn new(path: impl Into<PathBuf>, deadline: Duration) -> Self {
        Self { path: path.into(), deadline, hung: None }
    }

    /// Returns the path or the name of the tool.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Runs the tool, unless an earlier run still hangs.
    ///
    /// A run past its deadline gets SIGTERM and is then left alone: a task stuck in the driver cannot be killed, and
    /// killing a monitor hard has been seen to wedge the device.
    pub(crate) fn run(&mut self, args: &[impl AsRef<OsStr>]) -> Result<ToolOutput, SourceError> {
        if let Some(hung) = &mut self.hung {
            if !matches!(hung.child.try_wait(), Ok(Some(_))) {
                return Err(self.unresponsive());
            }
            self.hung = None;
        }
        let started = Instant::now();
        let mut child = Command::new(&self.path)
            .args(args)
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| self.start_error(&error))?;
        let stdout = drain_pipe(child.stdout.take());
        let stderr = drain_pipe(child.stderr.take());
        let text = |pipe: &Receiver<String>| pipe.recv_timeout(self.deadline.saturating_sub(started.elapsed()));
        let printed = text(&stdout).and_then(|stdout| Ok((stdout, text(&stderr)?)));
        let ended = printed.and_then(|printed| Ok((printed, self.wait_for_exit(&mut child, started)?)));
        match ended {
            Ok(((stdout, stderr), status)) => Ok(ToolOutput { stdout, stderr, code: status.code() }),
            Err(_) => {
                if let Some(pid) = rustix::process::Pid::from_raw(child.id() as i32) {
                    let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
                }
                self.hung = Some(HungRun { child, since: started });
                Err(self.unresponsive())
            }
        }
    }

    /// Polls for the exit: the pipes are closed, so the tool usually exits at once, but it may hang.
    fn wait_for_exit(&self, child: &mut Child, started: Instant) -> Result<ExitStatus, RecvTimeoutError> {
        loop {
            if let Ok(Some(status)) = child.try_wait() {
                return Ok(status);
            }
            if started.elapsed() >= self.deadline {
                return Err(RecvTimeoutError::Timeout);
            }
            std::thread::sleep(Duration::from_micros(500));
        }
    }

    fn unresponsive(&self) -> SourceError {
        let after = self.hung.as_ref().map_or(self.deadline, |hung| hung.since.elapsed());
        SourceError::Unresponsive { what: self.name(), after }
    }

    fn start_error(&self, error: &io::Error) -> SourceError {
        match error.kind() {
            io::ErrorKind::PermissionDenied => SourceError::NoPermission(format!("{}: {error}", self.name())),
            _ => SourceError::NotPresent { what: self.name(), why: error.to_string() },
        }
    }

    fn name(&self) -> Cow<'static, str> {
        Cow::Owned(self.path.display().to_string())
    }
}

/// Reads a pipe to its end on a new thread.
fn drain_pipe(pipe: Option<impl Read + Send + 'static>) -> Receiver<String> {
    run_on_thread("tool-output", move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            let _ = (&mut pipe).take(limits::TEXT_BYTES as u64).read_to_end(&mut bytes);
            // The rest is discarded, so that the tool does not block on a full pipe.
            let _ = io::copy(&mut pipe, &mut io::sink());
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Runs work that may never end on a new thread. If the thread cannot start, the receiver is closed.
pub(crate) fn run_on_thread<T: Send + 'static>(name: &str, work: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    // Capacity for the result lets the thread end although the result is never received.
    let (sender, receiver) = sync_channel(1);
    let _ = std::thread::Builder::new().name(name.into()).spawn(move || sender.send(work()));
    receiver
}

/// Installs a shell script as a tool.
#[cfg(test)]
pub(crate) fn install_script(folder: &std::path::Path, script: &str) -> PathBuf {
    let (text, tool) = (folder.join("script"), folder.join("tool"));
    std::fs::write(&text, script).unwrap();
    // A separate process writes the file: a file that this process has open for writing cannot be executed.
    let copy = Command::new("install").args(["-m", "755"]).arg(&text).arg(&tool).status();
    assert!(copy.unwrap().success());
    tool
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(deadline: Duration) -> VendorTool {
        VendorTool::new("/bin/sh", deadline)
    }

    #[test]
    fn output_and_exit_code_of_a_tool_are_returned() {
        let output = shell(Duration::from_secs(60)).run(&["-c", "echo out; echo err >&2; exit 3"]).unwrap();
        assert_eq!((output.stdout.trim(), output.stderr.trim(), output.code), ("out", "err", Some(3)));
    }

    #[test]
    fn a_hanging_tool_is_left_alone_and_not_started_twice() {
        let mut tool = shell(Duration::from_millis(50));
        // The script ignores SIGTERM, as a task stuck in the driver does.
        let dir = std::env::temp_dir().join(format!("gpupool-tool-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let script = format!("echo x >> {0}/runs; trap '' TERM; while [ -d {0} ]; do :; done", dir.display());
        assert!(matches!(tool.run(&["-c", &script]), Err(SourceError::Unresponsive { .. })));
        assert!(matches!(tool.run(&["-c", &script]), Err(SourceError::Unresponsive { .. })));
        assert!(std::fs::read_to_string(dir.join("runs")).unwrap_or_default().lines().count() <= 1);
        std::fs::remove_dir_all(&dir).unwrap();
        // After its exit the tool runs again.
        tool.hung.as_mut().unwrap().child.wait().unwrap();
        tool.deadline = Duration::from_secs(60);
        assert_eq!(tool.run(&["-c", "echo back"]).unwrap().stdout.trim(), "back");
    }

    #[test]
    fn a_missing_tool_is_reported_as_not_present() {
        let missing = VendorTool::new("/no/such/tool", Duration::from_secs(1)).run(&["-L"]);
        assert!(matches!(missing, Err(SourceError::NotPresent { .. })));
    }
}
