//! Starts a job that cannot outlive its starter.
//!
//! [`Job::prepare`] creates the job's process without running the program, so that the process can first join a cgroup
//! or be registered with the agent; [`StagedJob::start`] runs the program. When the job ends, a [`Job`] is dropped, or
//! this program dies in any way, [`crate::supervisor`] kills every process that the job started. The program must call
//! [`crate::supervisor::run_helper_if_requested`] first in its `main`.

mod job;

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use rustix::event::PollFlags;
use rustix::io::FdFlags;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, socketpair};
use rustix::process::Signal;

use job::plan_terminal;
pub use job::{Job, JobEnd, JobEvent};

use crate::cgroup::{CgroupError, ProcessCgroup};
use crate::limits::{SUPERVISOR_CHECK_INTERVAL, SUPERVISOR_START_TIMEOUT};
use crate::process::{ProcFs, ProcessHandle, ProcessId};
use crate::supervisor::{
    JobProcessGroup, SUPERVISOR_ARGUMENT, SupervisorArguments, SupervisorCommand, SupervisorEvent, SupervisorSocket,
};
use crate::wait_until_ready;

/// Relation between a job and the terminal of this program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TerminalUse {
    /// No terminal: the job runs in a process group of its own, in the background.
    #[default]
    Background,
    /// The job gets the keyboard, Ctrl-C and Ctrl-Z while this program is in the foreground. Without a terminal, or in
    /// the background, the same as [`TerminalUse::Background`].
    Foreground,
}

/// A program to run, with its arguments, environment and streams.
#[derive(Debug)]
pub struct JobSpec {
    program: OsString,
    arguments: Vec<OsString>,
    /// `None` removes a variable; all others are inherited.
    environment: Vec<(OsString, Option<OsString>)>,
    directory: Option<PathBuf>,
    streams: Option<[Stdio; 3]>,
    terminal: TerminalUse,
    supervisor_program: PathBuf,
}

impl JobSpec {
    /// Runs this program, looked up in the job's `PATH` unless it contains a `/`.
    pub fn new(program: impl Into<OsString>) -> Self {
        Self {
            program: program.into(),
            arguments: Vec::new(),
            environment: Vec::new(),
            directory: None,
            streams: None,
            terminal: TerminalUse::default(),
            // The running program itself, even if its file was replaced or removed.
            supervisor_program: PathBuf::from("/proc/self/exe"),
        }
    }

    /// Adds arguments.
    pub fn args(mut self, arguments: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Sets a variable in the job's environment, which is otherwise inherited.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.environment.push((name.as_ref().to_owned(), Some(value.as_ref().to_owned())));
        self
    }

    /// Removes a variable from the job's environment.
    pub fn env_remove(mut self, name: impl AsRef<OsStr>) -> Self {
        self.environment.push((name.as_ref().to_owned(), None));
        self
    }

    /// Sets the working directory (default: inherited).
    pub fn directory(mut self, directory: impl Into<PathBuf>) -> Self {
        self.directory = Some(directory.into());
        self
    }

    /// Sets standard input, output and error (default: inherited). [`Job::take_streams`] returns our ends of pipes.
    pub fn streams(mut self, input: impl Into<Stdio>, output: impl Into<Stdio>, error: impl Into<Stdio>) -> Self {
        self.streams = Some([input.into(), output.into(), error.into()]);
        self
    }

    /// Sets the job's relation to our terminal.
    pub fn terminal(mut self, terminal: TerminalUse) -> Self {
        self.terminal = terminal;
        self
    }

    /// Sets another program as supervisor: its `main` must call [`crate::supervisor::run_helper_if_requested`]. For
    /// programs that cannot call it themselves, such as an interpreter that loaded this crate.
    pub fn supervisor_program(mut self, program: impl Into<PathBuf>) -> Self {
        self.supervisor_program = program.into();
        self
    }
}

/// A job whose process exists but does not run its program yet. Dropping it ends the process.
#[derive(Debug)]
pub struct StagedJob {
    job: Job,
    program: OsString,
}

impl Job {
    /// Starts a job at once.
    pub fn spawn(spec: JobSpec) -> Result<Self, SpawnError> {
        Self::prepare(spec)?.start()
    }

    /// Creates the job's process, which then waits for [`StagedJob::start`].
    pub fn prepare(spec: JobSpec) -> Result<StagedJob, SpawnError> {
        let (process_group, terminal) = plan_terminal(spec.terminal).trying("examine the terminal")?;
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .trying("create the socket to the job supervisor")?;
        let program = spec.program.clone();
        let mut guard = start_guard(spec, process_group, theirs)?;
        let socket = SupervisorSocket::new(ours);
        let why = match receive_message(&socket, || resume_descendants(&guard)) {
            Ok(Some(SupervisorEvent::Prepared(id))) => {
                return Ok(StagedJob { job: Job::new(guard, socket, id, process_group, terminal), program });
            }
            Ok(None) => SpawnError::Supervisor { why: "did not start in time" },
            Err(error @ SpawnError::Io { .. }) => error,
            Ok(Some(_)) | Err(_) => SpawnError::Supervisor { why: "exited before the job's process existed" },
        };
        // Without its first message the guard holds no job. A closed socket would end it too; the kill is needed to
        // reap it.
        let _ = guard.kill();
        let _ = guard.wait();
        Err(why)
    }
}

impl StagedJob {
    /// Returns the process that will run the program, with the same pid.
    pub fn id(&self) -> ProcessId {
        self.job.id()
    }

    /// Puts the process into a cgroup, which then belongs to the job: killed and removed with it.
    pub fn join_cgroup(&mut self, group: ProcessCgroup) -> Result<(), SpawnError> {
        group.add_process(self.id())?;
        self.job.group = Some(group);
        Ok(())
    }

    /// Runs the program. Returns when it runs, or with the reason why it cannot.
    pub fn start(mut self) -> Result<Job, SpawnError> {
        self.job.hand_over_terminal()?;
        self.job.send_command(SupervisorCommand::Start)?;
        loop {
            match receive_message(&self.job.socket, || self.job.resume_helpers())? {
                Some(SupervisorEvent::Started) => return Ok(self.job),
                Some(SupervisorEvent::ExecFailed(errno)) => {
                    return Err(SpawnError::from_exec_errno(self.program, errno));
                }
                // The waiting process was stopped: it starts when it is continued.
                Some(SupervisorEvent::Stopped(_) | SupervisorEvent::Continued) => {}
                Some(_) => return Err(SpawnError::Supervisor { why: "was killed before the job started" }),
                None => return Err(SpawnError::Supervisor { why: "did not start the job in time" }),
            }
        }
    }
}

fn start_guard(spec: JobSpec, process_group: JobProcessGroup, socket: OwnedFd) -> Result<Child, SpawnError> {
    let arguments = SupervisorArguments {
        socket: socket.as_raw_fd(),
        starter: std::process::id().cast_signed(),
        process_group,
        program: spec.program,
        arguments: spec.arguments,
    };
    let mut command = Command::new(spec.supervisor_program);
    command.arg0("gpupool-keeper").arg(SUPERVISOR_ARGUMENT).args(arguments.to_arguments());
    for (name, value) in spec.environment {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    if let Some(directory) = &spec.directory {
        // Checked here because the error of the spawn does not distinguish directory and program.
        let path = || directory.clone();
        check_directory(directory).map_err(|source| SpawnError::Directory { path: path(), source })?;
        command.current_dir(directory);
    }
    if let Some([input, output, error]) = spec.streams {
        command.stdin(input).stdout(output).stderr(error);
    }
    pass_socket(&mut command, socket);
    command.spawn().trying("start the job supervisor")
}

fn check_directory(directory: &Path) -> io::Result<()> {
    if !std::fs::metadata(directory)?.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    Ok(rustix::fs::access(directory, rustix::fs::Access::EXEC_OK)?)
}

/// Leaves the socket open in this one child; children of other threads do not inherit it.
#[allow(unsafe_code, reason = "code between fork and exec")]
fn pass_socket(command: &mut Command, socket: OwnedFd) {
    // SAFETY: one fcntl system call, no allocation, no lock. The closure owns the descriptor, so it is open until the
    // command is dropped after the start.
    unsafe {
        command.pre_exec(move || Ok(rustix::io::fcntl_setfd(&socket, FdFlags::empty())?));
    }
}

/// Resumes the helper processes, which may have been stopped.
fn resume_descendants(guard: &Child) {
    let below = ProcFs::system().descendants(guard.id()).unwrap_or_default();
    let all = ProcessId::of_pid(guard.id()).ok().flatten().into_iter().chain(below);
    for process in all.filter_map(|id| ProcessHandle::open(id).ok().flatten()) {
        // A process that is gone is reported through the socket.
        let _ = process.signal(Signal::CONT);
    }
}

/// Returns the next message of a starting supervisor; `None` after the timeout. Resumes the supervisor at intervals,
/// because it may have been stopped.
fn receive_message(socket: &SupervisorSocket, resume: impl Fn()) -> Result<Option<SupervisorEvent>, SpawnError> {
    let deadline = Instant::now() + SUPERVISOR_START_TIMEOUT;
    loop {
        match socket.receive(RecvFlags::DONTWAIT) {
            Ok(message) => return Ok(Some(message)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(SpawnError::Supervisor { why: "was killed before the job started" });
            }
            Err(error) => return Err(error).trying("wait for the job to start"),
        }
        if Instant::now() > deadline {
            return Ok(None);
        }
        if !wait_until_ready(socket, PollFlags::IN, SUPERVISOR_CHECK_INTERVAL).trying("wait for the job supervisor")? {
            resume();
        }
    }
}

/// Error of starting or following a job, by what the caller can do about it.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// The program does not exist: a shell would exit with 127.
    #[error("{}: command not found", program.display())]
    NotFound { program: OsString },
    /// The program exists but cannot be executed: a shell would exit with 126.
    #[error("{} cannot be run: {source}", program.display())]
    NotExecutable { program: OsString, source: io::Error },
    /// The working directory cannot be entered.
    #[error("cannot enter working directory {}: {source}", path.display())]
    Directory { path: PathBuf, source: io::Error },
    /// The supervisor process did not start or was killed.
    #[error("the job supervisor {why}")]
    Supervisor { why: &'static str },
    /// The process could not join its cgroup.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// A system call failed.
    #[error("cannot {action}: {source}")]
    Io { action: &'static str, source: io::Error },
}

impl SpawnError {
    /// Returns the exit code of a shell.
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::NotFound { .. } => 127,
            _ => 126,
        }
    }

    fn from_exec_errno(program: OsString, errno: i32) -> Self {
        match errno {
            libc::ENOENT | libc::ENOTDIR => Self::NotFound { program },
            _ => Self::NotExecutable { program, source: io::Error::from_raw_os_error(errno) },
        }
    }
}

/// Adds the failed action to a system error.
pub(super) trait SpawnIoContext<T> {
    fn trying(self, action: &'static str) -> Result<T, SpawnError>;
}

impl<T, E: Into<io::Error>> SpawnIoContext<T> for Result<T, E> {
    fn trying(self, action: &'static str) -> Result<T, SpawnError> {
        self.map_err(|source| SpawnError::Io { action, source: source.into() })
    }
}
