//! The keeper: the job's parent. Holds it back, starts it, passes signals on, and reports its end once all is gone.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{
    Pid, Signal, WaitStatus, getpid, kill_process, kill_process_group, set_child_subreaper, setpgid,
};

use super::child::{self, Gate};
use super::guard::Watch;
use super::message::{FromKeeper, ToKeeper};
use super::order::{Order, Placement};
use super::signals::{ChildEvents, fork};
use super::sweep::{reap, sweep};
use crate::limits::CLEAN_UP_PATIENCE;
use crate::process::ProcessId;

/// Runs as keeper; ends with nothing of the job left.
pub(super) fn run(order: Order, watch: Watch, guard: OwnedFd) -> ! {
    match Keeper::begin(order, watch, guard) {
        Ok(mut keeper) => {
            keeper.keep();
            std::process::exit(0)
        }
        Err(error) => {
            eprintln!("gpupool: the job's process could not be made: {error}");
            std::process::exit(1)
        }
    }
}

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

/// What the keeper does after looking at an event.
#[derive(PartialEq, Eq)]
enum Next {
    GoOn,
    End,
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
            child::become_job(&order, &Gate { opened, failure }, keeper)
        };
        drop((opened, failure));
        // Done on both sides of the fork: whoever comes first, the group exists before anybody hears of the job.
        let _ = setpgid(Some(job), child::group(&order));
        child::let_go_of_streams()?;
        let pid = job.as_raw_nonzero().get().cast_unsigned();
        let id = ProcessId::of(pid)?.ok_or_else(|| io::Error::other("/proc does not show the job's process"))?;
        watch.link.send(FromKeeper::Prepared(id))?;
        let placement = order.placement;
        Ok(Self { watch, guard, events, placement, job, gate, exec: Some(exec), ended: None, exec_failed: false })
    }

    fn keep(&mut self) {
        while self.handle_next() == Next::GoOn {}
        self.kill_group_of_job();
        let stuck = self.sweep(true);
        if !self.exec_failed {
            self.report_end(stuck);
        }
        if stuck > 0 {
            self.sweep(false);
        }
    }

    fn handle_next(&mut self) -> Next {
        let link = PollFd::from_borrowed_fd(self.watch.link.as_fd(), PollFlags::IN);
        let starter = PollFd::from_borrowed_fd(self.watch.starter.as_fd(), PollFlags::IN);
        let guard = PollFd::from_borrowed_fd(self.guard.as_fd(), PollFlags::IN);
        let children = PollFd::from_borrowed_fd(self.events.as_fd(), PollFlags::IN);
        let mut fds = vec![link, starter, guard, children];
        fds.extend(self.exec.iter().map(|exec| PollFd::from_borrowed_fd(exec.as_fd(), PollFlags::IN)));
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(Errno::INTR) => return Next::GoOn,
            // Without a way to watch, the only safe assumption is the worst.
            Err(_) => return Next::End,
        }
        let [link, starter, guard, children, exec] =
            std::array::from_fn(|at| fds.get(at).is_some_and(|fd| !fd.revents().is_empty()));
        if starter || guard {
            return Next::End;
        }
        if exec {
            self.learn_whether_it_runs();
        }
        if children {
            self.look_at_children();
        }
        if self.ended.is_some() {
            return Next::End;
        }
        if link { self.obey() } else { Next::GoOn }
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

    fn obey(&mut self) -> Next {
        match self.watch.link.receive(RecvFlags::DONTWAIT) {
            Ok(ToKeeper::Start) => {
                // A job killed in the meantime does not read it; its end is told like any other.
                let _ = rustix::io::write(&self.gate, b"!");
            }
            Ok(ToKeeper::Signal(number)) => self.pass_on(number),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Ok(ToKeeper::Kill) | Err(_) => return Next::End,
        }
        Next::GoOn
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
