//! From a specification to a process that waits to run it.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::FdFlags;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, socketpair};
use rustix::process::Signal;

use super::error::{SpawnError, Trying};
use super::job::Job;
use super::spec::JobSpec;
use super::terminal::arrange;
use crate::cgroup::Group;
use crate::keeper::{FromKeeper, KEEPER_ARGUMENT, Link, Order, Placement, ToKeeper};
use crate::limits::{KEEPER_START_PATIENCE, STOPPED_PAUSE};
use crate::process::{ProcFs, ProcessHandle, ProcessId};

/// A job whose process exists but does not run its program yet. Dropping it ends the process.
#[derive(Debug)]
pub struct Prepared {
    job: Job,
    program: OsString,
}

impl Job {
    /// Starts a job at once.
    pub fn spawn(spec: JobSpec) -> Result<Self, SpawnError> {
        Self::prepare(spec)?.start()
    }

    /// Makes the job's process, which then waits for [`Prepared::start`].
    pub fn prepare(spec: JobSpec) -> Result<Prepared, SpawnError> {
        let (placement, terminal) = arrange(spec.terminal).trying("looking at the terminal")?;
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .trying("making the link to the keeper of the job")?;
        let program = spec.program.clone();
        let mut guard = start_guard(spec, placement, theirs)?;
        let link = Link::new(ours);
        let id = match first_message(&link, &guard) {
            Ok(id) => id,
            Err(error) => {
                // Without its first word it holds no job; closing the link would end it too, this is to reap it.
                let _ = guard.kill();
                let _ = guard.wait();
                return Err(error);
            }
        };
        Ok(Prepared { job: Job::new(guard, link, id, placement, terminal), program })
    }
}

impl Prepared {
    /// The process that will run the program, under this very pid.
    pub fn id(&self) -> ProcessId {
        self.job.id()
    }

    /// Puts the process into a group, which from now on is the job's: killed and removed with it.
    pub fn join(&mut self, group: Group) -> Result<(), SpawnError> {
        group.add(self.id())?;
        self.job.group = Some(group);
        Ok(())
    }

    /// Lets the program run. Returns when it does, or says why it cannot.
    pub fn start(mut self) -> Result<Job, SpawnError> {
        self.job.give_terminal()?;
        self.job.tell(ToKeeper::Start)?;
        let deadline = Instant::now() + KEEPER_START_PATIENCE;
        loop {
            match self.job.link.receive(RecvFlags::DONTWAIT) {
                Ok(FromKeeper::Started) => return Ok(self.job),
                Ok(FromKeeper::ExecFailed(errno)) => return Err(SpawnError::of_exec(self.program, errno)),
                // Somebody stopped the waiting process: it starts when they let it go on.
                Ok(FromKeeper::Stopped(_) | FromKeeper::Continued) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if Instant::now() > deadline {
                        return Err(SpawnError::Keeper { why: "did not start the job in time" });
                    }
                    let mut fds = [PollFd::new(&self.job.link, PollFlags::IN)];
                    if matches!(poll(&mut fds, Some(&crate::timespec(STOPPED_PAUSE))), Ok(0)) {
                        self.job.wake_keepers();
                    }
                }
                Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => {
                    return Err(error).trying("waiting for the job to start");
                }
                Ok(_) | Err(_) => return Err(SpawnError::Keeper { why: "was killed before the job started" }),
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
    let mut command = Command::new(spec.keeper);
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
    let below = ProcFs::here().tree(guard.id()).unwrap_or_default();
    let all = ProcessId::of(guard.id()).ok().flatten().into_iter().chain(below);
    for process in all.filter_map(|id| ProcessHandle::open(id).ok().flatten()) {
        // Gone meanwhile: that is told by the link.
        let _ = process.signal(Signal::CONT);
    }
}

fn first_message(link: &Link, guard: &Child) -> Result<ProcessId, SpawnError> {
    let deadline = Instant::now() + KEEPER_START_PATIENCE;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::new(link, PollFlags::IN)];
        match poll(&mut fds, Some(&crate::timespec(left.min(STOPPED_PAUSE)))) {
            Ok(0) => wake(guard),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).trying("waiting for the keeper of the job"),
        }
        match link.receive(RecvFlags::DONTWAIT) {
            Ok(FromKeeper::Prepared(id)) => return Ok(id),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && left > Duration::ZERO => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(SpawnError::Keeper { why: "did not come up in time" });
            }
            Ok(_) | Err(_) => return Err(SpawnError::Keeper { why: "ended before the job's process existed" }),
        }
    }
}
