//! The two small processes between a starter and its job: starter → guard → keeper → job.
//!
//! Both adopt what the job orphans (they are child subreapers), both watch the starter, and each watches the other:
//! whoever of the three is killed, even by `kill -9`, one that kills all of the job is left. The guard only watches; the
//! keeper holds the job back until told to start it, passes signals on, reaps, and reports over a socket.
//! They are this same program started anew with a hidden argument: a fresh process with one thread may fork safely, and
//! the kernel's parent-death signal, which follows a thread, then follows the keeper. Both end when nothing of the job
//! is left.

mod link;
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

pub(crate) use link::{FromKeeper, Link, Order, Placement, ToKeeper};
use signals::{ChildEvents, fork, reap, sweep};

use crate::limits::CLEAN_UP_PATIENCE;
use crate::process::ProcessId;

/// The first argument that makes this program a keeper.
pub(crate) const KEEPER_ARGUMENT: &str = "--gpupool-keeper";

/// Becomes a keeper, never to return, if this process was started as one; else returns at once.
///
/// Call it first thing in `main`, before threads, argument parsing and logging.
pub fn run_helper_if_requested() {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_none_or(|first| first != KEEPER_ARGUMENT) {
        return;
    }
    let arguments: Vec<OsString> = arguments.collect();
    let Some(order) = Order::parse(&arguments) else {
        eprintln!("gpupool: {KEEPER_ARGUMENT} is how gpupool starts itself beside a job; it is not for other use");
        std::process::exit(2);
    };
    // Errors before the job exists reach the starter as the end of the link; the reason goes where a person may see it.
    leave(guard(order), "the keeper of a job could not be set up")
}

/// Ends this process, guard or keeper, with nothing of the job left.
fn leave(outcome: io::Result<()>, what_failed: &str) -> ! {
    if let Err(error) = &outcome {
        eprintln!("gpupool: {what_failed}: {error}");
    }
    std::process::exit(i32::from(outcome.is_err()))
}

// The guard: the starter's child and the keeper's parent. It does nothing but wait for one of them to be killed.

/// Who watches whom.
#[derive(Debug)]
struct Watch {
    /// To the starter; hangs up when the starter's end is closed.
    link: Link,
    /// The starter itself: a copy of its end of the link may live on in a process it forked.
    starter: OwnedFd,
}

/// Runs as guard, and in a forked process as keeper.
fn guard(order: Order) -> io::Result<()> {
    let link = adopt(order.link)?;
    let events = ChildEvents::block_and_listen()?;
    // Out of the terminal's foreground group: Ctrl-C and Ctrl-Z are for the job.
    setpgid(None, None)?;
    set_child_subreaper(Some(getpid()))?;
    let Some(parent) = getppid().filter(|parent| parent.as_raw_nonzero().get() == order.starter) else {
        return Ok(()); // The starter is gone already.
    };
    let starter = pidfd_open(parent, PidfdFlags::empty())?;
    let guard = pidfd_open(getpid(), PidfdFlags::empty())?;
    let watch = Watch { link, starter };
    match fork()? {
        None => {
            drop(events);
            let kept = Keeper::begin(order, watch, guard).map(|mut keeper| keeper.keep());
            leave(kept, "the job's process could not be made")
        }
        Some(keeper) => {
            drop(guard);
            let_go_of_streams()?;
            guard_until_the_end(&watch, &events, keeper);
            Ok(())
        }
    }
}

fn guard_until_the_end(watch: &Watch, events: &ChildEvents, keeper: Pid) {
    loop {
        if starter_is_gone(watch, events) {
            sweep(events, None, |_, _| {});
            return;
        }
        events.clear();
        let mut end = None;
        reap(|pid, status| {
            if pid == keeper && (status.exited() || status.signaled()) {
                end = Some(status);
            }
        });
        let Some(status) = end else { continue };
        // Orderly or not, nothing is left after this.
        sweep(events, None, |_, _| {});
        if status.exit_status() != Some(0) {
            let signal = Signal::KILL.as_raw();
            let _ = watch.link.send(FromKeeper::Signalled { signal, stuck: 0 });
        }
        return;
    }
}

/// Waits for something to happen; whether it is the starter's end.
fn starter_is_gone(watch: &Watch, events: &ChildEvents) -> bool {
    let mut fds = [
        // No events asked for: messages are the keeper's to read. Hanging up is always told.
        PollFd::from_borrowed_fd(watch.link.as_fd(), PollFlags::empty()),
        PollFd::from_borrowed_fd(watch.starter.as_fd(), PollFlags::IN),
        PollFd::from_borrowed_fd(events.as_fd(), PollFlags::IN),
    ];
    match poll(&mut fds, None) {
        Ok(_) => !fds[0].revents().is_empty() || !fds[1].revents().is_empty(),
        Err(Errno::INTR) => false,
        // Without a way to watch, the only safe assumption is the worst.
        Err(_) => true,
    }
}

#[allow(unsafe_code, reason = "takes over the file descriptor named on the command line")]
fn adopt(fd: RawFd) -> io::Result<Link> {
    // SAFETY: the starter left exactly this descriptor open for us and named it; nothing else in this fresh process
    // owns it. A number that is not open fails in the next call and is never used.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    if let Err(error) = rustix::io::fcntl_setfd(&socket, FdFlags::CLOEXEC) {
        std::mem::forget(socket);
        return Err(error.into());
    }
    Ok(Link::new(socket))
}

// The keeper: the job's parent. Holds it back, starts it, passes signals on, and reports its end once all is gone.

struct Keeper {
    watch: Watch,
    guard: OwnedFd,
    events: ChildEvents,
    placement: Placement,
    job: Pid,
    /// Opens the job's gate.
    gate: OwnedFd,
    /// Tells whether the program could be run; `None` once that is known.
    exec: Option<OwnedFd>,
    /// How the job ended, once it has been reaped; its pid may mean another process from then on.
    ended: Option<WaitStatus>,
    exec_failed: bool,
}

impl Keeper {
    fn begin(order: Order, watch: Watch, guard: OwnedFd) -> io::Result<Self> {
        set_child_subreaper(Some(getpid()))?;
        let events = ChildEvents::block_and_listen()?;
        let (opened, gate) = pipe_with(PipeFlags::CLOEXEC)?;
        let (exec, failure) = pipe_with(PipeFlags::CLOEXEC)?;
        let keeper = getpid();
        let Some(job) = fork()? else {
            // Its own copies of the writing end would keep the gate from ever ending.
            drop(gate);
            become_job(&order, &Gate { opened, failure }, keeper)
        };
        drop((opened, failure));
        // Done on both sides of the fork: whoever comes first, the group exists before anybody hears of the job.
        let _ = setpgid(Some(job), group(&order));
        let_go_of_streams()?;
        let pid = job.as_raw_nonzero().get().cast_unsigned();
        let id = ProcessId::of_pid(pid)?.ok_or_else(|| io::Error::other("/proc does not show the job's process"))?;
        watch.link.send(FromKeeper::Prepared(id))?;
        let placement = order.placement;
        Ok(Self { watch, guard, events, placement, job, gate, exec: Some(exec), ended: None, exec_failed: false })
    }

    fn keep(&mut self) {
        while self.handle_next().is_continue() {}
        self.kill_group_of_job();
        let stuck = self.sweep(true);
        if !self.exec_failed {
            self.report_end(stuck);
        }
        if stuck > 0 {
            self.sweep(false);
        }
    }

    fn handle_next(&mut self) -> ControlFlow<()> {
        let link = PollFd::from_borrowed_fd(self.watch.link.as_fd(), PollFlags::IN);
        let starter = PollFd::from_borrowed_fd(self.watch.starter.as_fd(), PollFlags::IN);
        let guard = PollFd::from_borrowed_fd(self.guard.as_fd(), PollFlags::IN);
        let children = PollFd::from_borrowed_fd(self.events.as_fd(), PollFlags::IN);
        let mut fds = vec![link, starter, guard, children];
        fds.extend(self.exec.iter().map(|exec| PollFd::from_borrowed_fd(exec.as_fd(), PollFlags::IN)));
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(Errno::INTR) => return ControlFlow::Continue(()),
            // Without a way to watch, the only safe assumption is the worst.
            Err(_) => return ControlFlow::Break(()),
        }
        let [link, starter, guard, children, exec] =
            std::array::from_fn(|at| fds.get(at).is_some_and(|fd| !fd.revents().is_empty()));
        if starter || guard {
            return ControlFlow::Break(());
        }
        if exec {
            self.learn_whether_it_runs();
        }
        if children {
            self.look_at_children();
        }
        if self.ended.is_some() {
            return ControlFlow::Break(());
        }
        if link { self.obey() } else { ControlFlow::Continue(()) }
    }

    fn learn_whether_it_runs(&mut self) {
        let Some(exec) = self.exec.take() else { return };
        let mut errno = [0_u8; 4];
        let message = match rustix::io::read(&exec, &mut errno) {
            Ok(4) => {
                self.exec_failed = true;
                FromKeeper::ExecFailed(i32::from_le_bytes(errno))
            }
            _ => FromKeeper::Started,
        };
        self.tell(message);
    }

    fn look_at_children(&mut self) {
        self.events.clear();
        let mut news = Vec::new();
        reap(|pid, status| {
            if pid == self.job {
                news.push(status);
            }
        });
        for status in news {
            if let Some(signal) = status.stopping_signal() {
                self.tell(FromKeeper::Stopped(signal));
            } else if status.continued() {
                self.tell(FromKeeper::Continued);
            } else {
                // A program that ended at once may be seen before the news that it ran.
                self.learn_whether_it_runs();
                self.ended = Some(status);
            }
        }
    }

    fn obey(&mut self) -> ControlFlow<()> {
        match self.watch.link.receive(RecvFlags::DONTWAIT) {
            Ok(ToKeeper::Start) => {
                // A job killed in the meantime does not read it; its end is told like any other.
                let _ = rustix::io::write(&self.gate, b"!");
            }
            Ok(ToKeeper::Signal(number)) => self.pass_on(number),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Ok(ToKeeper::Kill) | Err(_) => return ControlFlow::Break(()),
        }
        ControlFlow::Continue(())
    }

    /// Only called while the job has not been reaped, so that its pid is surely still its own.
    fn pass_on(&self, number: i32) {
        let Some(signal) = Signal::from_named_raw(number) else {
            return;
        };
        let send = |signal| match self.placement {
            Placement::OwnGroup => kill_process_group(self.job, signal),
            Placement::GroupOfStarter(_) => kill_process(self.job, signal),
        };
        // Not permitted, or nobody left: the job's own doing.
        let _ = send(signal);
        if [Signal::HUP, Signal::INT, Signal::QUIT, Signal::TERM].contains(&signal) {
            // A stopped job would learn only when continued that it is to end.
            let _ = send(Signal::CONT);
        }
    }

    /// At one stroke, before a job that forks without end leaves us no time to look for its processes. Not after the job
    /// was reaped: its number may then be that of another group.
    fn kill_group_of_job(&self) {
        if self.ended.is_none() && self.placement == Placement::OwnGroup {
            let _ = kill_process_group(self.job, Signal::KILL);
        }
    }

    fn sweep(&mut self, patiently: bool) -> u32 {
        let (job, ended) = (self.job, &mut self.ended);
        sweep(&self.events, patiently.then_some(CLEAN_UP_PATIENCE), |pid, status| {
            if pid == job && (status.exited() || status.signaled()) {
                *ended = Some(status);
            }
        })
    }

    fn report_end(&mut self, stuck: u32) {
        self.learn_whether_it_runs();
        let code = self.ended.and_then(WaitStatus::exit_status);
        let signal = self.ended.and_then(WaitStatus::terminating_signal);
        self.tell(match code {
            Some(code) => FromKeeper::Exited { code, stuck },
            // Neither: it has been killed, but hangs inside the kernel.
            None => FromKeeper::Signalled { signal: signal.unwrap_or(Signal::KILL.as_raw()), stuck },
        });
    }

    /// A starter that is gone is noticed by the next poll.
    fn tell(&self, message: FromKeeper) {
        let _ = self.watch.link.send(message);
    }
}

// The job's process between fork and exec.

/// What ties the waiting process to its keeper.
#[derive(Debug)]
struct Gate {
    /// A byte here opens the gate; its end closes it for ever.
    opened: OwnedFd,
    /// Where a failed exec is told; a successful one closes it.
    failure: OwnedFd,
}

/// Waits at the gate and becomes the job's program.
fn become_job(order: &Order, gate: &Gate, keeper: Pid) -> ! {
    if let Err(error) = prepare_and_exec(order, gate, keeper) {
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        // If nobody listens any more, nobody needs to know.
        let _ = rustix::io::write(&gate.failure, &errno.to_le_bytes());
    }
    // Not exit(): the clean-up registered in this program is the keeper's to run.
    leave_at_once(127)
}

fn prepare_and_exec(order: &Order, gate: &Gate, keeper: Pid) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    if getppid() != Some(keeper) {
        return Ok(()); // The keeper died before the line above could matter.
    }
    setpgid(None, group(order))?;
    let mut byte = [0_u8];
    if retry_on_intr(|| rustix::io::read(&gate.opened, &mut byte))? == 0 {
        return Ok(());
    }
    signals::as_for_a_fresh_program()?;
    Err(std::process::Command::new(&order.program).args(&order.arguments).exec())
}

/// The process group the job joins; `None` for its own.
fn group(order: &Order) -> Option<Pid> {
    match order.placement {
        Placement::OwnGroup => None,
        Placement::GroupOfStarter(group) => Pid::from_raw(group),
    }
}

/// Gives up standard input, output and error, so that who reads the job's output sees its end when the job closes it.
fn let_go_of_streams() -> io::Result<()> {
    let null: OwnedFd = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?.into();
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    Ok(())
}

#[allow(unsafe_code, reason = "_exit has no safe wrapper")]
fn leave_at_once(code: i32) -> ! {
    // SAFETY: _exit takes any number and does not return.
    unsafe { libc::_exit(code) }
}
