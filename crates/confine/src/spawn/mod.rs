//! Starting a job that cannot outlive its starter.
//!
//! [`Job::prepare`] makes the job's process and stops short of running the program, so that it can be put into a group
//! or told to the agent first; [`StagedJob::start`] lets it run. When a [`Job`] is dropped, or this program dies in
//! whatever way, everything the job ever started is killed ([`crate::keeper`] does it); nothing is left either when the
//! job ends by itself. The program must call [`crate::keeper::run_helper_if_requested`] first thing in its `main`.

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

use job::arrange;
pub use job::{Job, JobEnd, JobEvent};

use crate::cgroup::{CgroupError, ProcessCgroup};
use crate::keeper::{FromKeeper, KEEPER_ARGUMENT, Link, Order, Placement, ToKeeper};
use crate::limits::{KEEPER_START_PATIENCE, STOPPED_PAUSE};
use crate::process::{ProcFs, ProcessHandle, ProcessId};
use crate::wait_for;

/// What a job has to do with the terminal this program runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TerminalUse {
    /// Nothing: it runs in a process group of its own, in the background.
    #[default]
    Background,
    /// What it would have if started by hand: the keyboard, Ctrl-C and Ctrl-Z are the job's while we are in the
    /// foreground. Without a terminal, or in the background, the same as [`TerminalUse::Background`].
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
    keeper_program: PathBuf,
}

impl JobSpec {
    /// Runs this program, looked up in the job's `PATH` unless it holds a `/`.
    pub fn new(program: impl Into<OsString>) -> Self {
        Self {
            program: program.into(),
            arguments: Vec::new(),
            environment: Vec::new(),
            directory: None,
            streams: None,
            terminal: TerminalUse::default(),
            // The running program itself, also when its file has been replaced or removed since.
            keeper_program: PathBuf::from("/proc/self/exe"),
        }
    }

    /// Adds arguments.
    pub fn args(mut self, arguments: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Sets a variable of the job's environment, which else is ours.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.environment.push((name.as_ref().to_owned(), Some(value.as_ref().to_owned())));
        self
    }

    /// Removes a variable from the job's environment.
    pub fn env_remove(mut self, name: impl AsRef<OsStr>) -> Self {
        self.environment.push((name.as_ref().to_owned(), None));
        self
    }

    /// The directory to run in, else ours.
    pub fn directory(mut self, directory: impl Into<PathBuf>) -> Self {
        self.directory = Some(directory.into());
        self
    }

    /// Standard input, output and error, else ours. Of pipes, our ends are taken by [`Job::take_streams`].
    pub fn streams(mut self, input: impl Into<Stdio>, output: impl Into<Stdio>, error: impl Into<Stdio>) -> Self {
        self.streams = Some([input.into(), output.into(), error.into()]);
        self
    }

    /// What the job has to do with our terminal.
    pub fn terminal(mut self, terminal: TerminalUse) -> Self {
        self.terminal = terminal;
        self
    }

    /// Another program to act as keeper: one whose `main` calls [`crate::keeper::run_helper_if_requested`]. For programs that
    /// cannot do so themselves, such as an interpreter that loaded this crate.
    pub fn keeper_program(mut self, program: impl Into<PathBuf>) -> Self {
        self.keeper_program = program.into();
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

    /// Makes the job's process, which then waits for [`StagedJob::start`].
    pub fn prepare(spec: JobSpec) -> Result<StagedJob, SpawnError> {
        let (placement, terminal) = arrange(spec.terminal).trying("looking at the terminal")?;
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .trying("making the link to the keeper of the job")?;
        let program = spec.program.clone();
        let mut guard = start_guard(spec, placement, theirs)?;
        let link = Link::new(ours);
        let why = match next_message(&link, || wake(&guard)) {
            Ok(Some(FromKeeper::Prepared(id))) => {
                return Ok(StagedJob { job: Job::new(guard, link, id, placement, terminal), program });
            }
            Ok(None) => SpawnError::Keeper { why: "did not come up in time" },
            Err(error @ SpawnError::Io { .. }) => error,
            Ok(Some(_)) | Err(_) => SpawnError::Keeper { why: "ended before the job's process existed" },
        };
        // Without its first word it holds no job; closing the link would end it too, this is to reap it.
        let _ = guard.kill();
        let _ = guard.wait();
        Err(why)
    }
}

impl StagedJob {
    /// The process that will run the program, under this very pid.
    pub fn id(&self) -> ProcessId {
        self.job.id()
    }

    /// Puts the process into a group, which from now on is the job's: killed and removed with it.
    pub fn join_cgroup(&mut self, group: ProcessCgroup) -> Result<(), SpawnError> {
        group.add_process(self.id())?;
        self.job.group = Some(group);
        Ok(())
    }

    /// Lets the program run. Returns when it does, or says why it cannot.
    pub fn start(mut self) -> Result<Job, SpawnError> {
        self.job.give_terminal()?;
        self.job.tell(ToKeeper::Start)?;
        loop {
            match next_message(&self.job.link, || self.job.wake_keepers())? {
                Some(FromKeeper::Started) => return Ok(self.job),
                Some(FromKeeper::ExecFailed(errno)) => return Err(SpawnError::of_exec(self.program, errno)),
                // Somebody stopped the waiting process: it starts when they let it go on.
                Some(FromKeeper::Stopped(_) | FromKeeper::Continued) => {}
                Some(_) => return Err(SpawnError::Keeper { why: "was killed before the job started" }),
                None => return Err(SpawnError::Keeper { why: "did not start the job in time" }),
            }
        }
    }
}

fn start_guard(spec: JobSpec, placement: Placement, link: OwnedFd) -> Result<Child, SpawnError> {
    let order = Order {
        link: link.as_raw_fd(),
        starter: std::process::id().cast_signed(),
        placement,
        program: spec.program,
        arguments: spec.arguments,
    };
    let mut command = Command::new(spec.keeper_program);
    command.arg0("gpupool-keeper").arg(KEEPER_ARGUMENT).args(order.to_arguments());
    for (name, value) in spec.environment {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    if let Some(directory) = &spec.directory {
        // Asked here, as the failure of the start below would not tell directory and program apart.
        let path = || directory.clone();
        can_be_entered(directory).map_err(|source| SpawnError::Directory { path: path(), source })?;
        command.current_dir(directory);
    }
    if let Some([input, output, error]) = spec.streams {
        command.stdin(input).stdout(output).stderr(error);
    }
    inherit(&mut command, link);
    command.spawn().trying("starting the keeper of the job")
}

fn can_be_entered(directory: &Path) -> io::Result<()> {
    if !std::fs::metadata(directory)?.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    Ok(rustix::fs::access(directory, rustix::fs::Access::EXEC_OK)?)
}

/// Leaves the link open in this one child; all others started meanwhile by other threads do not get it.
#[allow(unsafe_code, reason = "code between fork and exec")]
fn inherit(command: &mut Command, link: OwnedFd) {
    // SAFETY: one fcntl system call, no memory taken, no lock touched. The descriptor is owned by the closure and so
    // open until the command is dropped after the start.
    unsafe {
        command.pre_exec(move || Ok(rustix::io::fcntl_setfd(&link, FdFlags::empty())?));
    }
}

/// Somebody may have stopped those who are to keep the job.
fn wake(guard: &Child) {
    let below = ProcFs::system().descendants(guard.id()).unwrap_or_default();
    let all = ProcessId::of_pid(guard.id()).ok().flatten().into_iter().chain(below);
    for process in all.filter_map(|id| ProcessHandle::open(id).ok().flatten()) {
        // Gone meanwhile: that is told by the link.
        let _ = process.signal(Signal::CONT);
    }
}

/// The next thing a keeper says that is being started; `None` if it says nothing in time. Somebody may have stopped it: it
/// is woken now and then.
fn next_message(link: &Link, wake: impl Fn()) -> Result<Option<FromKeeper>, SpawnError> {
    let deadline = Instant::now() + KEEPER_START_PATIENCE;
    loop {
        match link.receive(RecvFlags::DONTWAIT) {
            Ok(message) => return Ok(Some(message)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(SpawnError::Keeper { why: "was killed before the job started" });
            }
            Err(error) => return Err(error).trying("waiting for the job to start"),
        }
        if Instant::now() > deadline {
            return Ok(None);
        }
        if !wait_for(link, PollFlags::IN, STOPPED_PAUSE).trying("waiting for the keeper of the job")? {
            wake();
        }
    }
}

/// Why a job could not be started or followed, by what the caller can do about it.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// There is no such program: a shell would exit with 127.
    #[error("{}: command not found", program.display())]
    NotFound { program: OsString },
    /// The program is there but cannot be run: a shell would exit with 126.
    #[error("{} cannot be run: {source}", program.display())]
    NotExecutable { program: OsString, source: io::Error },
    /// The working directory cannot be entered.
    #[error("working directory {}: {source}", path.display())]
    Directory { path: PathBuf, source: io::Error },
    /// The process beside the job did not come up or was killed.
    #[error("the keeper of the job {why}")]
    Keeper { why: &'static str },
    /// The process could not be put into its group.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// The system refused.
    #[error("{action}: {source}")]
    Io { action: &'static str, source: io::Error },
}

impl SpawnError {
    /// The exit code a shell would give.
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::NotFound { .. } => 127,
            _ => 126,
        }
    }

    fn of_exec(program: OsString, errno: i32) -> Self {
        match errno {
            libc::ENOENT | libc::ENOTDIR => Self::NotFound { program },
            _ => Self::NotExecutable { program, source: io::Error::from_raw_os_error(errno) },
        }
    }
}

/// Adds what was tried to a system error.
pub(super) trait Trying<T> {
    fn trying(self, action: &'static str) -> Result<T, SpawnError>;
}

impl<T, E: Into<io::Error>> Trying<T> for Result<T, E> {
    fn trying(self, action: &'static str) -> Result<T, SpawnError> {
        self.map_err(|source| SpawnError::Io { action, source: source.into() })
    }
}
