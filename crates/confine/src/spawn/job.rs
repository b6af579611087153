//! A running job: signals, waiting, its end, and the hand-over of the terminal.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::net::{RecvFlags, Shutdown, shutdown};
use rustix::process::{Pid, PidfdFlags, Signal, getpgrp, pidfd_open};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetpgrp, tcsetattr, tcsetpgrp};

use super::{SpawnError, SpawnIoContext, TerminalUse};
use crate::cgroup::ProcessCgroup;
use crate::limits::{JOB_DROP_TIMEOUT, SUPERVISOR_CHECK_INTERVAL, SUPERVISOR_RESPONSE_TIMEOUT};
use crate::process::{ProcFs, ProcessHandle, ProcessId, as_pid};
use crate::supervisor::{JobProcessGroup, SupervisorCommand, SupervisorEvent, SupervisorSocket};
use crate::{wait_until_ready, with_signals_blocked};

/// Exit status of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobEnd {
    /// Exited with this code.
    Exited(i32),
    /// Killed by this signal.
    Signalled(i32),
}

impl JobEnd {
    /// Returns the exit code of a shell: the job's own, or 128 plus the signal number.
    pub fn exit_code(self) -> i32 {
        match self {
            Self::Exited(code) => code,
            Self::Signalled(signal) => 128 + signal,
        }
    }
}

/// A state change of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobEvent {
    /// Stopped by this signal (Ctrl-Z, or terminal access from the background): see [`Job::mirror_stop`].
    Stopped(i32),
    /// Runs again.
    Continued,
    /// Ended, with no process of the job left.
    Ended(JobEnd),
}

/// A running job. Dropping it kills the job with all its processes.
///
/// Its file descriptor is readable when [`Job::try_next_event`] has an event.
#[derive(Debug)]
pub struct Job {
    guard: Child,
    pub(super) socket: SupervisorSocket,
    id: ProcessId,
    /// The job's parent.
    supervisor: Option<ProcessHandle>,
    process_group: JobProcessGroup,
    terminal: Option<JobTerminal>,
    pub(super) group: Option<ProcessCgroup>,
    ended: Option<JobEnd>,
    stuck: u32,
    oom_kills: u64,
}

impl Job {
    pub(super) fn new(
        guard: Child,
        socket: SupervisorSocket,
        id: ProcessId,
        process_group: JobProcessGroup,
        terminal: Option<JobTerminal>,
    ) -> Self {
        Self {
            guard,
            socket,
            id,
            supervisor: open_parent(id),
            process_group,
            terminal,
            group: None,
            ended: None,
            stuck: 0,
            oom_kills: 0,
        }
    }

    /// Returns the job's main process.
    pub fn id(&self) -> ProcessId {
        self.id
    }

    /// Returns the job's cgroup, if it has one and has not ended.
    pub fn cgroup(&self) -> Option<&ProcessCgroup> {
        self.group.as_ref()
    }

    /// Whether the terminal sends its signals (Ctrl-C, Ctrl-\, Ctrl-Z) to the job as well as to us. The job then shares
    /// our process group, and a caller that forwards these signals would send them twice.
    pub fn shares_our_process_group(&self) -> bool {
        self.process_group != JobProcessGroup::Own
    }

    /// Takes our ends of the job's standard input, output and error, if pipes were requested.
    pub fn take_streams(&mut self) -> (Option<ChildStdin>, Option<ChildStdout>, Option<ChildStderr>) {
        (self.guard.stdin.take(), self.guard.stdout.take(), self.guard.stderr.take())
    }

    /// Sends a signal to the job's process group (only to its main process if the group is also ours). A stopped job is
    /// continued on a termination signal, so that it can end.
    pub fn signal(&self, signal: Signal) -> Result<(), SpawnError> {
        self.send_command(SupervisorCommand::Signal(signal.as_raw()))
    }

    /// Kills every process of the job; [`Job::wait`] returns when they are gone.
    pub fn kill(&self) -> Result<(), SpawnError> {
        self.send_command(SupervisorCommand::Kill)?;
        match &self.group {
            Some(group) if self.ended.is_none() => Ok(group.kill()?),
            _ => Ok(()),
        }
    }

    /// Kills every process of the job and waits until they are gone, even if the helper processes were stopped or
    /// killed.
    pub fn kill_and_wait(&mut self) -> Result<JobEnd, SpawnError> {
        self.kill()?;
        let begun = Instant::now();
        loop {
            while let Some(event) = self.try_next_event()? {
                if let JobEvent::Ended(end) = event {
                    return Ok(end);
                }
            }
            let waited = begun.elapsed();
            if waited > 2 * SUPERVISOR_RESPONSE_TIMEOUT {
                // Without its parent, the kernel kills the job; the guard or the code below kills the job's other
                // processes.
                self.signal_supervisor(Signal::KILL);
            }
            if waited > 3 * SUPERVISOR_RESPONSE_TIMEOUT {
                let _ = self.guard.kill();
            }
            if matches!(wait_until_ready(&self.socket, PollFlags::IN, SUPERVISOR_CHECK_INTERVAL), Ok(false)) {
                self.resume_helpers();
            }
        }
    }

    /// Resumes the helper processes in case they were stopped, because they have work to do.
    pub(super) fn resume_helpers(&self) {
        self.signal_supervisor(Signal::CONT);
        if let Some(guard) = as_pid(self.guard.id()) {
            // The guard is not reaped, so its pid is still its own.
            let _ = rustix::process::kill_process(guard, Signal::CONT);
        }
    }

    /// Waits for the job to end on its own, and kills it ([`Job::kill_and_wait`]) after the grace period.
    pub fn wait_or_kill(&mut self, grace: Duration) -> Result<JobEnd, SpawnError> {
        let until = Instant::now() + grace;
        loop {
            if let Ok(Some(JobEvent::Ended(end))) = self.try_next_event() {
                return Ok(end);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return self.kill_and_wait();
            }
            let _ = wait_until_ready(&self.socket, PollFlags::IN, left);
        }
    }

    /// Waits for the job to end and ignores stops and continuations. Later calls return the same result.
    pub fn wait(&mut self) -> Result<JobEnd, SpawnError> {
        loop {
            if let JobEvent::Ended(end) = self.next_event()? {
                return Ok(end);
            }
        }
    }

    /// Waits for the next event of the job.
    pub fn next_event(&mut self) -> Result<JobEvent, SpawnError> {
        match self.receive(RecvFlags::empty())? {
            Some(event) => Ok(event),
            None => Err(SpawnError::Supervisor { why: "sent no event" }),
        }
    }

    /// Returns the next event, if there is one. For asynchronous use: wait until the file descriptor is readable, then
    /// call this until it returns `None` or the end of the job.
    pub fn try_next_event(&mut self) -> Result<Option<JobEvent>, SpawnError> {
        self.receive(RecvFlags::DONTWAIT)
    }

    /// Returns the number of the job's processes that could not be killed at its end: they hang inside the kernel or
    /// belong to another user. The supervisor continues to kill them.
    pub fn stuck_processes(&self) -> u32 {
        self.stuck
    }

    /// Returns the number of the job's processes that the kernel killed because the cgroup exceeded its memory limit,
    /// known at the end.
    pub fn oom_kills(&self) -> u64 {
        self.oom_kills
    }

    /// Mirrors a stop of the job, on [`JobEvent::Stopped`]. This program takes the terminal back and stops itself, so
    /// that the shell shows its prompt. When continued (`fg`, `bg`), it continues the job, in the foreground if it is
    /// there itself. Returns at once if this program and the job share no terminal.
    pub fn mirror_stop(&mut self, signal: i32) -> Result<(), SpawnError> {
        let Some(terminal) = &self.terminal else {
            return Ok(());
        };
        // Stopped for terminal access while we are in the foreground: the job was brought to the foreground while
        // running.
        let wants_terminal = [libc::SIGTTIN, libc::SIGTTOU].contains(&signal) && terminal.is_in_foreground();
        if !wants_terminal {
            self.reclaim_terminal(TerminalModes::Restore)?;
            rustix::process::kill_process(rustix::process::getpid(), Signal::STOP).trying("stop this process")?;
        }
        self.hand_over_terminal()?;
        self.signal(Signal::CONT)
    }

    pub(super) fn hand_over_terminal(&mut self) -> Result<(), SpawnError> {
        let Some(pid) = self.pid() else { return Ok(()) };
        match &mut self.terminal {
            Some(terminal) => terminal.hand_over(pid).trying("hand over the terminal"),
            None => Ok(()),
        }
    }

    fn reclaim_terminal(&self, modes: TerminalModes) -> Result<(), SpawnError> {
        match (&self.terminal, self.pid()) {
            (Some(terminal), Some(pid)) => terminal.reclaim(pid, modes).trying("take the terminal back"),
            _ => Ok(()),
        }
    }

    fn pid(&self) -> Option<Pid> {
        as_pid(self.id.pid)
    }

    pub(super) fn send_command(&self, message: SupervisorCommand) -> Result<(), SpawnError> {
        match self.socket.send(message) {
            // The job has ended: the command no longer matters.
            Err(error) if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => Ok(()),
            other => other.trying("send a command to the job supervisor"),
        }
    }

    fn receive(&mut self, flags: RecvFlags) -> Result<Option<JobEvent>, SpawnError> {
        if let Some(end) = self.ended {
            return Ok(Some(JobEvent::Ended(end)));
        }
        Ok(Some(match self.socket.receive(flags) {
            Ok(SupervisorEvent::Stopped(signal)) => JobEvent::Stopped(signal),
            Ok(SupervisorEvent::Continued) => JobEvent::Continued,
            Ok(SupervisorEvent::Exited { code, stuck }) => self.record_end(JobEnd::Exited(code), stuck),
            Ok(SupervisorEvent::Signalled { signal, stuck }) => self.record_end(JobEnd::Signalled(signal), stuck),
            Ok(SupervisorEvent::Prepared(_) | SupervisorEvent::Started | SupervisorEvent::ExecFailed(_)) => {
                return Err(SpawnError::Supervisor { why: "sent an unexpected event" });
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => self.end_after_helpers_died(),
            Err(error) => return Err(error).trying("wait for the job"),
        }))
    }

    fn record_end(&mut self, end: JobEnd, stuck: u32) -> JobEvent {
        self.ended = Some(end);
        self.stuck = stuck;
        let modes = if matches!(end, JobEnd::Exited(_)) { TerminalModes::Keep } else { TerminalModes::Restore };
        if let Err(error) = self.reclaim_terminal(modes) {
            tracing::debug!(%error, "cannot take back the terminal");
        }
        if stuck == 0 {
            // The helpers have nothing left to do, but stopped ones would not exit. The supervisor comes first: without
            // its parent it could no longer be identified. An error means that the guard is reaped.
            self.signal_supervisor(Signal::KILL);
            if let Some(supervisor) = &self.supervisor {
                let _ = wait_until_ready(supervisor, PollFlags::IN, JOB_DROP_TIMEOUT);
            }
            let _ = self.guard.kill();
            let _ = self.guard.wait();
        } else {
            tracing::warn!(job = %self.id, stuck, "some processes of the job could not be killed");
        }
        self.remove_cgroup();
        JobEvent::Ended(end)
    }

    /// Handles the death of both helpers. The kernel killed the main process together with the supervisor. The job's
    /// other processes are in the cgroup, if there is one, or still below the main process for a moment.
    fn end_after_helpers_died(&mut self) -> JobEvent {
        for id in ProcFs::system().descendants(self.id.pid).unwrap_or_default().into_iter().chain([self.id]) {
            if let Ok(Some(process)) = ProcessHandle::open(id) {
                let _ = process.signal(Signal::KILL);
            }
        }
        tracing::warn!(job = %self.id, "the helper processes of the job were killed");
        self.record_end(JobEnd::Signalled(Signal::KILL.as_raw()), 0)
    }

    fn signal_supervisor(&self, signal: Signal) {
        if let Some(supervisor) = &self.supervisor {
            // The supervisor may be gone: its end is reported elsewhere.
            let _ = supervisor.signal(signal);
        }
    }

    fn remove_cgroup(&mut self) {
        let Some(group) = self.group.take() else { return };
        self.oom_kills = group.usage_meter().oom_kills().unwrap_or(0);
        let ended = group.kill().and_then(|()| group.wait_empty(Instant::now() + JOB_DROP_TIMEOUT));
        if let Err(error) = ended.and_then(|_| group.remove()) {
            tracing::warn!(cgroup = %group.path().display(), %error, "cannot remove the job's cgroup");
        }
    }
}

/// Opens the supervisor of a prepared job.
fn open_parent(job: ProcessId) -> Option<ProcessHandle> {
    let parent = ProcessHandle::open(job).ok()??.parent().ok()??;
    ProcessHandle::open(ProcessId::of_pid(parent).ok()??).ok()?
}

impl AsFd for Job {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if self.ended.is_some() {
            return;
        }
        // Closing our end is not enough: a process forked from us may hold a copy.
        let _ = shutdown(&self.socket, Shutdown::Both);
        self.resume_helpers();
        let guard = as_pid(self.guard.id()).map(|pid| pidfd_open(pid, PidfdFlags::empty()));
        if let Some(Ok(guard)) = guard {
            let _ = wait_until_ready(&guard, PollFlags::IN, JOB_DROP_TIMEOUT);
        }
        let _ = self.guard.try_wait();
        let _ = self.reclaim_terminal(TerminalModes::Restore);
        self.remove_cgroup();
    }
}

/// Our terminal, for the hand-over to the job and back.
///
/// A terminal has one foreground process group, which may read from it and receives Ctrl-C and Ctrl-Z. If our process
/// is alone in that group, the job's group replaces it while the job runs. If other processes share our group (a
/// pipeline, a script), they would be stopped without the terminal: then the job joins our group instead.
#[derive(Debug)]
pub(super) struct JobTerminal {
    device: File,
    own_group: Pid,
    /// Settings at the hand-over; a killed job may leave the terminal without echo.
    modes: Option<Termios>,
}

/// Treatment of the terminal's settings when it is taken back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TerminalModes {
    /// The job exited, so its settings may be intended.
    Keep,
    /// The job was killed and could not restore the settings.
    Restore,
}

/// Chooses the job's process group and the terminal to hand over, if any.
pub(super) fn plan_terminal(terminal_use: TerminalUse) -> io::Result<(JobProcessGroup, Option<JobTerminal>)> {
    if terminal_use == TerminalUse::Background {
        return Ok((JobProcessGroup::Own, None));
    }
    let Ok(device) = File::options().read(true).write(true).open("/dev/tty") else {
        return Ok((JobProcessGroup::Own, None));
    };
    let terminal = JobTerminal { device, own_group: getpgrp(), modes: None };
    let group = terminal.own_group.as_raw_nonzero().get();
    let shared = || -> io::Result<bool> {
        Ok(ProcFs::system().processes()?.iter().any(|stat| stat.group == group && stat.pid != std::process::id()))
    };
    if terminal.is_in_foreground() && shared()? {
        return Ok((JobProcessGroup::OfStarter(group), None));
    }
    Ok((JobProcessGroup::Own, Some(terminal)))
}

impl JobTerminal {
    /// Whether our group is in the foreground now.
    fn is_in_foreground(&self) -> bool {
        tcgetpgrp(&self.device) == Ok(self.own_group)
    }

    /// Hands the terminal to the job's group, if our group is in the foreground.
    fn hand_over(&mut self, group: Pid) -> io::Result<()> {
        if self.is_in_foreground() {
            self.modes = tcgetattr(&self.device).ok();
            with_ttou_blocked(|| tcsetpgrp(&self.device, group))?;
        }
        Ok(())
    }

    /// Takes the terminal back if the job's group has it; a shell may have given it to another group.
    fn reclaim(&self, group: Pid, modes: TerminalModes) -> io::Result<()> {
        if tcgetpgrp(&self.device)? != group {
            return Ok(());
        }
        with_ttou_blocked(|| {
            tcsetpgrp(&self.device, self.own_group)?;
            match (&self.modes, modes) {
                (Some(before), TerminalModes::Restore) => tcsetattr(&self.device, OptionalActions::Drain, before),
                _ => Ok(()),
            }
        })?;
        Ok(())
    }
}

/// Blocks SIGTTOU during a terminal access from the background, which would otherwise stop us.
fn with_ttou_blocked<T>(action: impl FnOnce() -> T) -> T {
    with_signals_blocked(&[Signal::TTOU], action)
}
