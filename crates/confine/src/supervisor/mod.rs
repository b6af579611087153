//! The two helper processes between a starter and its job: starter → guard → supervisor → job.
//!
//! Both adopt orphans of the job (they are child subreapers), both watch the starter, and each watches the other. If
//! one of the three is killed, even by `kill -9`, another one remains that kills every process of the job. The guard
//! only watches; the supervisor holds the job back until it may start, forwards signals, reaps, and reports over a
//! socket. Both are this same program, started again with a hidden argument: a fresh process with one thread may fork
//! safely, and the kernel's parent-death signal, which follows a thread, then follows the supervisor. Both exit when no
//! process of the job is left.

mod messages;
mod signals;

use std::ffi::OsString;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, FdFlags, retry_on_intr};
use rustix::net::RecvFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitStatus, getpid, getppid, kill_process, kill_process_group, pidfd_open,
    set_child_subreaper, set_parent_process_death_signal, setpgid,
};

pub(crate) use messages::{JobProcessGroup, SupervisorArguments, SupervisorCommand, SupervisorEvent, SupervisorSocket};
use signals::{ChildSignalFd, fork, kill_all_descendants, reap_children};

use crate::limits::CLEAN_UP_TIMEOUT;
use crate::process::ProcessId;

/// First argument that makes this program a supervisor.
pub(crate) const SUPERVISOR_ARGUMENT: &str = "--gpupool-keeper";

/// Runs as supervisor and never returns, if this process was started as one; otherwise returns at once.
///
/// Call it first in `main`, before threads, argument parsing and logging.
pub fn run_helper_if_requested() {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_none_or(|first| first != SUPERVISOR_ARGUMENT) {
        return;
    }
    let arguments: Vec<OsString> = arguments.collect();
    let Some(arguments) = SupervisorArguments::parse(&arguments) else {
        eprintln!("gpupool: {SUPERVISOR_ARGUMENT} is reserved for processes that gpupool starts beside a job");
        std::process::exit(2);
    };
    // An error before the job exists reaches the starter as a closed socket; the reason goes to standard error.
    exit_helper(run_guard(arguments), "cannot set up the job supervisor")
}

/// Exits this process, guard or supervisor, after no process of the job is left.
fn exit_helper(outcome: io::Result<()>, what_failed: &str) -> ! {
    if let Err(error) = &outcome {
        eprintln!("gpupool: {what_failed}: {error}");
    }
    std::process::exit(i32::from(outcome.is_err()))
}

// The guard: the starter's child and the supervisor's parent. It only waits for one of them to die.

/// Connection to the starter, for detecting its end.
#[derive(Debug)]
struct StarterConnection {
    /// Socket to the starter; hangs up when the starter's end is closed.
    socket: SupervisorSocket,
    /// The starter itself: a process that it forked may hold a copy of its end of the socket.
    starter: OwnedFd,
}

/// Runs as guard, and as supervisor in a forked process.
fn run_guard(arguments: SupervisorArguments) -> io::Result<()> {
    let socket = adopt_socket(arguments.socket)?;
    let events = ChildSignalFd::open()?;
    // Leaves the terminal's foreground group: Ctrl-C and Ctrl-Z are for the job.
    setpgid(None, None)?;
    set_child_subreaper(Some(getpid()))?;
    let Some(parent) = getppid().filter(|parent| parent.as_raw_nonzero().get() == arguments.starter) else {
        return Ok(()); // The starter is already gone.
    };
    let starter = pidfd_open(parent, PidfdFlags::empty())?;
    let guard = pidfd_open(getpid(), PidfdFlags::empty())?;
    let connection = StarterConnection { socket, starter };
    match fork()? {
        None => {
            drop(events);
            let outcome = JobSupervisor::start(arguments, connection, guard).map(|mut supervisor| supervisor.run());
            exit_helper(outcome, "cannot create the job's process")
        }
        Some(supervisor) => {
            drop(guard);
            close_standard_streams()?;
            guard_until_done(&connection, &events, supervisor);
            Ok(())
        }
    }
}

fn guard_until_done(connection: &StarterConnection, events: &ChildSignalFd, supervisor: Pid) {
    loop {
        if starter_has_exited(connection, events) {
            kill_all_descendants(events, None, |_, _| {});
            return;
        }
        events.clear();
        let mut end = None;
        reap_children(|pid, status| {
            if pid == supervisor && (status.exited() || status.signaled()) {
                end = Some(status);
            }
        });
        let Some(status) = end else { continue };
        // No process is left after this, whether the supervisor failed or not.
        kill_all_descendants(events, None, |_, _| {});
        if status.exit_status() != Some(0) {
            let signal = Signal::KILL.as_raw();
            let _ = connection.socket.send(SupervisorEvent::Signalled { signal, stuck: 0 });
        }
        return;
    }
}

/// Waits for an event; returns whether the starter is gone.
fn starter_has_exited(connection: &StarterConnection, events: &ChildSignalFd) -> bool {
    let mut fds = [
        // No events requested: messages are for the supervisor to read. A hang-up is always reported.
        PollFd::from_borrowed_fd(connection.socket.as_fd(), PollFlags::empty()),
        PollFd::from_borrowed_fd(connection.starter.as_fd(), PollFlags::IN),
        PollFd::from_borrowed_fd(events.as_fd(), PollFlags::IN),
    ];
    match poll(&mut fds, None) {
        Ok(_) => !fds[0].revents().is_empty() || !fds[1].revents().is_empty(),
        Err(Errno::INTR) => false,
        // If polling fails, assume the worst.
        Err(_) => true,
    }
}

#[allow(unsafe_code, reason = "takes over the file descriptor named on the command line")]
fn adopt_socket(fd: RawFd) -> io::Result<SupervisorSocket> {
    // SAFETY: the starter left exactly this descriptor open for us and named it; nothing else in this fresh process
    // owns it. A number that is not open fails in the next call and is never used.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    if let Err(error) = rustix::io::fcntl_setfd(&socket, FdFlags::CLOEXEC) {
        std::mem::forget(socket);
        return Err(error.into());
    }
    Ok(SupervisorSocket::new(socket))
}

// The supervisor: the job's parent. Holds the job back, starts it, forwards signals, and reports its end.

struct JobSupervisor {
    connection: StarterConnection,
    guard: OwnedFd,
    events: ChildSignalFd,
    process_group: JobProcessGroup,
    job: Pid,
    /// Writing end of the job's gate.
    gate: OwnedFd,
    /// Reading end for the exec result; `None` once it is known.
    exec: Option<OwnedFd>,
    /// Exit status of the job once it is reaped; its pid may then belong to another process.
    ended: Option<WaitStatus>,
    exec_failed: bool,
}

impl JobSupervisor {
    fn start(arguments: SupervisorArguments, connection: StarterConnection, guard: OwnedFd) -> io::Result<Self> {
        set_child_subreaper(Some(getpid()))?;
        let events = ChildSignalFd::open()?;
        let (opened, gate) = pipe_with(PipeFlags::CLOEXEC)?;
        let (exec, failure) = pipe_with(PipeFlags::CLOEXEC)?;
        let supervisor = getpid();
        let Some(job) = fork()? else {
            // A copy of the writing end in this process would keep the gate from ever closing.
            drop(gate);
            exec_job(&arguments, &ExecGate { opened, failure }, supervisor)
        };
        drop((opened, failure));
        // Done on both sides of the fork, so that the group exists before the job is reported.
        let _ = setpgid(Some(job), process_group(&arguments));
        close_standard_streams()?;
        let pid = job.as_raw_nonzero().get().cast_unsigned();
        let id = ProcessId::of_pid(pid)?.ok_or_else(|| io::Error::other("/proc does not show the job's process"))?;
        connection.socket.send(SupervisorEvent::Prepared(id))?;
        let process_group = arguments.process_group;
        Ok(Self {
            connection,
            guard,
            events,
            process_group,
            job,
            gate,
            exec: Some(exec),
            ended: None,
            exec_failed: false,
        })
    }

    fn run(&mut self) {
        while self.handle_next().is_continue() {}
        self.kill_job_process_group();
        let stuck = self.kill_all_descendants(true);
        if !self.exec_failed {
            self.report_end(stuck);
        }
        if stuck > 0 {
            self.kill_all_descendants(false);
        }
    }

    fn handle_next(&mut self) -> ControlFlow<()> {
        let socket = PollFd::from_borrowed_fd(self.connection.socket.as_fd(), PollFlags::IN);
        let starter = PollFd::from_borrowed_fd(self.connection.starter.as_fd(), PollFlags::IN);
        let guard = PollFd::from_borrowed_fd(self.guard.as_fd(), PollFlags::IN);
        let children = PollFd::from_borrowed_fd(self.events.as_fd(), PollFlags::IN);
        let mut fds = vec![socket, starter, guard, children];
        fds.extend(self.exec.iter().map(|exec| PollFd::from_borrowed_fd(exec.as_fd(), PollFlags::IN)));
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(Errno::INTR) => return ControlFlow::Continue(()),
            // If polling fails, assume the worst.
            Err(_) => return ControlFlow::Break(()),
        }
        let [socket, starter, guard, children, exec] =
            std::array::from_fn(|at| fds.get(at).is_some_and(|fd| !fd.revents().is_empty()));
        if starter || guard {
            return ControlFlow::Break(());
        }
        if exec {
            self.report_exec_result();
        }
        if children {
            self.handle_child_events();
        }
        if self.ended.is_some() {
            return ControlFlow::Break(());
        }
        if socket { self.handle_command() } else { ControlFlow::Continue(()) }
    }

    fn report_exec_result(&mut self) {
        let Some(exec) = self.exec.take() else { return };
        let mut errno = [0_u8; 4];
        let message = match rustix::io::read(&exec, &mut errno) {
            Ok(4) => {
                self.exec_failed = true;
                SupervisorEvent::ExecFailed(i32::from_le_bytes(errno))
            }
            _ => SupervisorEvent::Started,
        };
        self.report(message);
    }

    fn handle_child_events(&mut self) {
        self.events.clear();
        let mut statuses = Vec::new();
        reap_children(|pid, status| {
            if pid == self.job {
                statuses.push(status);
            }
        });
        for status in statuses {
            if let Some(signal) = status.stopping_signal() {
                self.report(SupervisorEvent::Stopped(signal));
            } else if status.continued() {
                self.report(SupervisorEvent::Continued);
            } else {
                // The exit of a short program may arrive before its exec result.
                self.report_exec_result();
                self.ended = Some(status);
            }
        }
    }

    fn handle_command(&mut self) -> ControlFlow<()> {
        match self.connection.socket.receive(RecvFlags::DONTWAIT) {
            Ok(SupervisorCommand::Start) => {
                // A job killed meanwhile does not read it; its end is reported as usual.
                let _ = rustix::io::write(&self.gate, b"!");
            }
            Ok(SupervisorCommand::Signal(number)) => self.forward_signal(number),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Ok(SupervisorCommand::Kill) | Err(_) => return ControlFlow::Break(()),
        }
        ControlFlow::Continue(())
    }

    /// Forwards a signal to the job. Called only before the job is reaped, so that its pid is still its own.
    fn forward_signal(&self, number: i32) {
        let Some(signal) = Signal::from_named_raw(number) else {
            return;
        };
        let send = |signal| match self.process_group {
            JobProcessGroup::Own => kill_process_group(self.job, signal),
            JobProcessGroup::OfStarter(_) => kill_process(self.job, signal),
        };
        // A refused signal, or a group without processes, is the job's own doing.
        let _ = send(signal);
        if [Signal::HUP, Signal::INT, Signal::QUIT, Signal::TERM].contains(&signal) {
            // A stopped job would not act on the signal until it is continued.
            let _ = send(Signal::CONT);
        }
    }

    /// Kills the job's process group at once, before a job that keeps forking leaves no time to scan for its processes.
    /// Not after the job was reaped: its number may then belong to another group.
    fn kill_job_process_group(&self) {
        if self.ended.is_none() && self.process_group == JobProcessGroup::Own {
            let _ = kill_process_group(self.job, Signal::KILL);
        }
    }

    fn kill_all_descendants(&mut self, has_timeout: bool) -> u32 {
        let (job, ended) = (self.job, &mut self.ended);
        kill_all_descendants(&self.events, has_timeout.then_some(CLEAN_UP_TIMEOUT), |pid, status| {
            if pid == job && (status.exited() || status.signaled()) {
                *ended = Some(status);
            }
        })
    }

    fn report_end(&mut self, stuck: u32) {
        self.report_exec_result();
        let code = self.ended.and_then(WaitStatus::exit_status);
        let signal = self.ended.and_then(WaitStatus::terminating_signal);
        self.report(match code {
            Some(code) => SupervisorEvent::Exited { code, stuck },
            // Neither: the job was killed but hangs inside the kernel.
            None => SupervisorEvent::Signalled { signal: signal.unwrap_or(Signal::KILL.as_raw()), stuck },
        });
    }

    /// Sends an event to the starter. Errors are ignored: the next poll detects a starter that is gone.
    fn report(&self, message: SupervisorEvent) {
        let _ = self.connection.socket.send(message);
    }
}

// The job's process between fork and exec.

/// Pipes between the waiting process and its supervisor.
#[derive(Debug)]
struct ExecGate {
    /// A byte opens the gate; end of file closes it permanently.
    opened: OwnedFd,
    /// Receives the error of a failed exec; a successful exec closes it.
    failure: OwnedFd,
}

/// Waits at the gate and executes the job's program.
fn exec_job(arguments: &SupervisorArguments, gate: &ExecGate, supervisor: Pid) -> ! {
    if let Err(error) = prepare_and_exec(arguments, gate, supervisor) {
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        // Without a reader the error does not matter.
        let _ = rustix::io::write(&gate.failure, &errno.to_le_bytes());
    }
    // Not exit(): exit handlers of this program belong to the supervisor.
    exit_immediately(127)
}

fn prepare_and_exec(arguments: &SupervisorArguments, gate: &ExecGate, supervisor: Pid) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    if getppid() != Some(supervisor) {
        return Ok(()); // The supervisor died before the line above took effect.
    }
    setpgid(None, process_group(arguments))?;
    let mut byte = [0_u8];
    if retry_on_intr(|| rustix::io::read(&gate.opened, &mut byte))? == 0 {
        return Ok(());
    }
    signals::reset_signals()?;
    Err(std::process::Command::new(&arguments.program).args(&arguments.arguments).exec())
}

/// Process group that the job joins; `None` for its own.
fn process_group(arguments: &SupervisorArguments) -> Option<Pid> {
    match arguments.process_group {
        JobProcessGroup::Own => None,
        JobProcessGroup::OfStarter(group) => Pid::from_raw(group),
    }
}

/// Replaces standard input, output and error with `/dev/null`, so that readers see the end when the job closes its
/// streams.
fn close_standard_streams() -> io::Result<()> {
    let null: OwnedFd = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?.into();
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    Ok(())
}

#[allow(unsafe_code, reason = "_exit has no safe wrapper")]
fn exit_immediately(code: i32) -> ! {
    // SAFETY: _exit takes any number and does not return.
    unsafe { libc::_exit(code) }
}
