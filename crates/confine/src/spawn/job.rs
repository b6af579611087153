//! A running job: signals, waiting, its end, and the terminal it is given and that is taken back.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::net::{RecvFlags, Shutdown, shutdown};
use rustix::process::{Pid, PidfdFlags, Signal, getpgrp, pidfd_open};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetpgrp, tcsetattr, tcsetpgrp};

use super::{SpawnError, TerminalUse, Trying};
use crate::cgroup::ProcessCgroup;
use crate::keeper::{FromKeeper, Link, Placement, ToKeeper};
use crate::limits::{DROP_PATIENCE, STOPPED_PATIENCE, STOPPED_PAUSE};
use crate::process::{ProcFs, ProcessHandle, ProcessId, as_pid};
use crate::{wait_for, with_signals_blocked};

/// How a job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobEnd {
    /// With this code.
    Exited(i32),
    /// By this signal.
    Signalled(i32),
}

impl JobEnd {
    /// The exit code a shell would give: the job's own, or 128 and the signal's number.
    pub fn exit_code(self) -> i32 {
        match self {
            Self::Exited(code) => code,
            Self::Signalled(signal) => 128 + signal,
        }
    }
}

/// What a job does while it is followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobEvent {
    /// Stopped by this signal (Ctrl-Z, or touching the terminal from the background): see [`Job::mirror_stop`].
    Stopped(i32),
    /// Runs again.
    Continued,
    /// Ended, and nothing it started is left.
    Ended(JobEnd),
}

/// A running job. Dropping it kills it, with all it started.
///
/// Its file descriptor is readable when [`Job::try_next_event`] has something to tell.
#[derive(Debug)]
pub struct Job {
    guard: Child,
    pub(super) link: Link,
    id: ProcessId,
    /// The job's parent.
    keeper: Option<ProcessHandle>,
    placement: Placement,
    terminal: Option<Terminal>,
    pub(super) group: Option<ProcessCgroup>,
    ended: Option<JobEnd>,
    stuck: u32,
    oom_kills: u64,
}

impl Job {
    pub(super) fn new(
        guard: Child,
        link: Link,
        id: ProcessId,
        placement: Placement,
        terminal: Option<Terminal>,
    ) -> Self {
        Self {
            guard,
            link,
            id,
            keeper: parent_of(id),
            placement,
            terminal,
            group: None,
            ended: None,
            stuck: 0,
            oom_kills: 0,
        }
    }

    /// The job's main process.
    pub fn id(&self) -> ProcessId {
        self.id
    }

    /// The job's group, if it was put into one and has not ended.
    pub fn cgroup(&self) -> Option<&ProcessCgroup> {
        self.group.as_ref()
    }

    /// Whether the terminal's own signals (Ctrl-C, Ctrl-\, Ctrl-Z) reach the job without us although we get them too:
    /// it then shares our process group, and who passes them on as well would send them twice.
    pub fn shares_our_process_group(&self) -> bool {
        self.placement != Placement::OwnGroup
    }

    /// Our ends of the job's standard input, output and error, where pipes were asked for.
    pub fn take_streams(&mut self) -> (Option<ChildStdin>, Option<ChildStdout>, Option<ChildStderr>) {
        (self.guard.stdin.take(), self.guard.stdout.take(), self.guard.stderr.take())
    }

    /// Sends a signal to the job's process group (to its main process alone if the group is ours too). A stopped job
    /// that is told to end is continued, so that it can.
    pub fn signal(&self, signal: Signal) -> Result<(), SpawnError> {
        self.tell(ToKeeper::Signal(signal.as_raw()))
    }

    /// Kills the job and everything it started; [`Job::wait`] tells when that is done.
    pub fn kill(&self) -> Result<(), SpawnError> {
        self.tell(ToKeeper::Kill)?;
        match &self.group {
            Some(group) if self.ended.is_none() => Ok(group.kill()?),
            _ => Ok(()),
        }
    }

    /// Kills the job and everything it started, and waits until all is gone. Also where those who keep it were stopped or
    /// killed themselves, or a moment ago were not yet.
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
            if waited > 2 * STOPPED_PATIENCE {
                // Its parent gone, the job is killed by the kernel; what it started is swept by the guard, or below.
                self.signal_keeper(Signal::KILL);
            }
            if waited > 3 * STOPPED_PATIENCE {
                let _ = self.guard.kill();
            }
            if matches!(wait_for(&self.link, PollFlags::IN, STOPPED_PAUSE), Ok(false)) {
                self.wake_keepers();
            }
        }
    }

    /// Whoever stopped the processes that keep the job: they have something to do.
    pub(super) fn wake_keepers(&self) {
        self.signal_keeper(Signal::CONT);
        if let Some(guard) = as_pid(self.guard.id()) {
            // Not reaped, so its number is its own.
            let _ = rustix::process::kill_process(guard, Signal::CONT);
        }
    }

    /// Waits for the job to end by itself, and ends it ([`Job::kill_and_wait`]) where that takes longer.
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
            let _ = wait_for(&self.link, PollFlags::IN, left);
        }
    }

    /// Waits for the job to end; stops and continuations pass by. May be called again for the same answer.
    pub fn wait(&mut self) -> Result<JobEnd, SpawnError> {
        loop {
            if let JobEvent::Ended(end) = self.next_event()? {
                return Ok(end);
            }
        }
    }

    /// Waits for the next thing the job does.
    pub fn next_event(&mut self) -> Result<JobEvent, SpawnError> {
        match self.receive(RecvFlags::empty())? {
            Some(event) => Ok(event),
            None => Err(SpawnError::Keeper { why: "said nothing" }),
        }
    }

    /// What the job did, if there is news. For asynchronous use: wait until the file descriptor is readable, then call
    /// this until it says `None` or that the job has ended.
    pub fn try_next_event(&mut self) -> Result<Option<JobEvent>, SpawnError> {
        self.receive(RecvFlags::DONTWAIT)
    }

    /// How many of the job's processes could not be killed when it ended: they hang inside the kernel or belong to
    /// another user. The keeper goes on trying.
    pub fn stuck_processes(&self) -> u32 {
        self.stuck
    }

    /// How many of the job's processes the kernel had killed, when it ended, because its group was over its memory limit.
    pub fn oom_kills(&self) -> u64 {
        self.oom_kills
    }

    /// To be called on [`JobEvent::Stopped`]: does what a person at the terminal expects. We take the terminal back and
    /// stop ourselves, so that the shell shows its prompt; continued (`fg`, `bg`), we continue the job, in the
    /// foreground if we are. Returns at once if no terminal connects us and the job.
    pub fn mirror_stop(&mut self, signal: i32) -> Result<(), SpawnError> {
        let Some(terminal) = &self.terminal else {
            return Ok(());
        };
        // Stopped for touching the terminal, and we have it: it was brought to the foreground while running.
        let only_wants_it = [libc::SIGTTIN, libc::SIGTTOU].contains(&signal) && terminal.is_ours();
        if !only_wants_it {
            self.take_terminal_back(Modes::Restore)?;
            rustix::process::kill_process(rustix::process::getpid(), Signal::STOP).trying("stopping ourselves")?;
        }
        self.give_terminal()?;
        self.signal(Signal::CONT)
    }

    pub(super) fn give_terminal(&mut self) -> Result<(), SpawnError> {
        let Some(pid) = self.pid() else { return Ok(()) };
        match &mut self.terminal {
            Some(terminal) => terminal.give_to(pid).trying("handing over the terminal"),
            None => Ok(()),
        }
    }

    fn take_terminal_back(&self, modes: Modes) -> Result<(), SpawnError> {
        match (&self.terminal, self.pid()) {
            (Some(terminal), Some(pid)) => terminal.take_back(pid, modes).trying("taking the terminal back"),
            _ => Ok(()),
        }
    }

    fn pid(&self) -> Option<Pid> {
        as_pid(self.id.pid)
    }

    pub(super) fn tell(&self, message: ToKeeper) -> Result<(), SpawnError> {
        match self.link.send(message) {
            // Ended meanwhile: what the message asked for no longer matters.
            Err(error) if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => Ok(()),
            other => other.trying("telling the keeper of the job"),
        }
    }

    fn receive(&mut self, flags: RecvFlags) -> Result<Option<JobEvent>, SpawnError> {
        if let Some(end) = self.ended {
            return Ok(Some(JobEvent::Ended(end)));
        }
        Ok(Some(match self.link.receive(flags) {
            Ok(FromKeeper::Stopped(signal)) => JobEvent::Stopped(signal),
            Ok(FromKeeper::Continued) => JobEvent::Continued,
            Ok(FromKeeper::Exited { code, stuck }) => self.end(JobEnd::Exited(code), stuck),
            Ok(FromKeeper::Signalled { signal, stuck }) => self.end(JobEnd::Signalled(signal), stuck),
            Ok(FromKeeper::Prepared(_) | FromKeeper::Started | FromKeeper::ExecFailed(_)) => {
                return Err(SpawnError::Keeper { why: "spoke out of turn" });
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => self.after_both_keepers_died(),
            Err(error) => return Err(error).trying("waiting for the job"),
        }))
    }

    fn end(&mut self, end: JobEnd, stuck: u32) -> JobEvent {
        self.ended = Some(end);
        self.stuck = stuck;
        let modes = if matches!(end, JobEnd::Exited(_)) { Modes::Keep } else { Modes::Restore };
        if let Err(error) = self.take_terminal_back(modes) {
            tracing::debug!(%error, "the terminal is gone");
        }
        if stuck == 0 {
            // They have nothing left to do; stopped by somebody, they would not end. The keeper first: without its parent
            // nobody would know it any more. An error means that the guard is reaped.
            self.signal_keeper(Signal::KILL);
            if let Some(keeper) = &self.keeper {
                let _ = wait_for(keeper, PollFlags::IN, DROP_PATIENCE);
            }
            let _ = self.guard.kill();
            let _ = self.guard.wait();
        } else {
            tracing::warn!(job = %self.id, stuck, "processes of the job could not be killed");
        }
        self.end_group();
        JobEvent::Ended(end)
    }

    /// Guard and keeper were killed together. The kernel killed the main process with the keeper; what it started is
    /// in the group, if there is one, or still below it for a moment.
    fn after_both_keepers_died(&mut self) -> JobEvent {
        for id in ProcFs::system().descendants(self.id.pid).unwrap_or_default().into_iter().chain([self.id]) {
            if let Ok(Some(process)) = ProcessHandle::open(id) {
                let _ = process.signal(Signal::KILL);
            }
        }
        tracing::warn!(job = %self.id, "the keepers of the job were killed");
        self.end(JobEnd::Signalled(Signal::KILL.as_raw()), 0)
    }

    fn signal_keeper(&self, signal: Signal) {
        if let Some(keeper) = &self.keeper {
            // Gone already: its end is told by others.
            let _ = keeper.signal(signal);
        }
    }

    fn end_group(&mut self) {
        let Some(group) = self.group.take() else { return };
        self.oom_kills = group.usage_meter().oom_kills().unwrap_or(0);
        let ended = group.kill().and_then(|()| group.wait_empty(Instant::now() + DROP_PATIENCE));
        if let Err(error) = ended.and_then(|_| group.remove()) {
            tracing::warn!(group = %group.path().display(), %error, "the job's group could not be removed");
        }
    }
}

/// The keeper of a job that was made a moment ago, and waits.
fn parent_of(job: ProcessId) -> Option<ProcessHandle> {
    let parent = ProcessHandle::open(job).ok()??.parent().ok()??;
    ProcessHandle::open(ProcessId::of_pid(parent).ok()??).ok()?
}

impl AsFd for Job {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.link.as_fd()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if self.ended.is_some() {
            return;
        }
        // Not merely closed: a copy may live on in a process forked from us.
        let _ = shutdown(&self.link, Shutdown::Both);
        self.wake_keepers();
        let guard = as_pid(self.guard.id()).map(|pid| pidfd_open(pid, PidfdFlags::empty()));
        if let Some(Ok(guard)) = guard {
            let _ = wait_for(&guard, PollFlags::IN, DROP_PATIENCE);
        }
        let _ = self.guard.try_wait();
        let _ = self.take_terminal_back(Modes::Restore);
        self.end_group();
    }
}

/// The terminal we run on, to be handed to the job and taken back.
///
/// A terminal has one process group in its foreground, which may read from it and gets Ctrl-C and Ctrl-Z. If we are that
/// group, and alone in it, the job's group takes our place while it runs. If others are in it with us (a pipeline, a
/// script), taking the terminal away would stop them: then the job joins our group instead.
#[derive(Debug)]
pub(super) struct Terminal {
    device: File,
    ours: Pid,
    /// How it was set up when it was handed over; a job killed at work may leave it without echo.
    modes: Option<Termios>,
}

/// What becomes of the terminal's settings when it is taken back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Modes {
    /// The job ended in order, and may have meant what it set.
    Keep,
    /// The job was cut off, and had no chance to tidy up.
    Restore,
}

/// Which process group the job gets, and the terminal to hand over to it, if any.
pub(super) fn arrange(wish: TerminalUse) -> io::Result<(Placement, Option<Terminal>)> {
    if wish == TerminalUse::Background {
        return Ok((Placement::OwnGroup, None));
    }
    let Ok(device) = File::options().read(true).write(true).open("/dev/tty") else {
        return Ok((Placement::OwnGroup, None));
    };
    let terminal = Terminal { device, ours: getpgrp(), modes: None };
    let group = terminal.ours.as_raw_nonzero().get();
    let shared = || -> io::Result<bool> {
        Ok(ProcFs::system().processes()?.iter().any(|stat| stat.group == group && stat.pid != std::process::id()))
    };
    if terminal.is_ours() && shared()? {
        return Ok((Placement::GroupOfStarter(group), None));
    }
    Ok((Placement::OwnGroup, Some(terminal)))
}

impl Terminal {
    /// Whether we are in its foreground right now.
    fn is_ours(&self) -> bool {
        tcgetpgrp(&self.device) == Ok(self.ours)
    }

    /// Hands it to the job's group, if it is ours at the moment.
    fn give_to(&mut self, group: Pid) -> io::Result<()> {
        if self.is_ours() {
            self.modes = tcgetattr(&self.device).ok();
            from_the_background(|| tcsetpgrp(&self.device, group))?;
        }
        Ok(())
    }

    /// Takes it back if the job's group has it; a shell may have given it to somebody else meanwhile.
    fn take_back(&self, group: Pid, modes: Modes) -> io::Result<()> {
        if tcgetpgrp(&self.device)? != group {
            return Ok(());
        }
        from_the_background(|| {
            tcsetpgrp(&self.device, self.ours)?;
            match (&self.modes, modes) {
                (Some(before), Modes::Restore) => tcsetattr(&self.device, OptionalActions::Drain, before),
                _ => Ok(()),
            }
        })?;
        Ok(())
    }
}

/// Touching the terminal from the background works where SIGTTOU is blocked, instead of stopping us.
fn from_the_background<T>(action: impl FnOnce() -> T) -> T {
    with_signals_blocked(&[Signal::TTOU], action)
}
