//! Following the running command to its end: its signals, its time, its memory, its lease.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use anyhow::Context;
use gpupool_client::local::Notice;
use gpupool_confine::Signal;
use gpupool_confine::bounds::Excess;
use gpupool_confine::spawn::{Job, JobEnd, JobEvent, SpawnError};
use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

use super::limits::LOST_GRACE;
use super::say::Voice;
use super::signals::Signals;
use super::start::Started;

/// Why we ended the command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Cut {
    /// Its time was over.
    TimedOut,
    /// Its lease was lost, and why.
    Lost(String),
    /// It used too much host memory.
    Memory(Excess),
}

/// How long it may run, and how long it may take to end.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    pub timeout: Option<Duration>,
    pub kill_after: Duration,
}

/// Follows the command until it has ended. Says why we ended it, where we did.
pub(super) async fn follow(
    started: &mut Started,
    signals: &mut Signals,
    times: Times,
    voice: Voice,
) -> anyhow::Result<(JobEnd, Option<Cut>)> {
    let Started { job, tether, memory } = started;
    if !job.shares_our_group() {
        // In a group of its own the command hears of these only through us.
        signals.add(&[Signal::WINCH, Signal::TSTP, Signal::CONT]).context("cannot listen for signals")?;
    }
    let news = News::of(job).context("cannot follow the command")?;
    let lost = tether.lost(|notice| tell(voice, notice));
    let exceeded = memory.exceeded();
    tokio::pin!(lost, exceeded);
    let mut ending = Ending { cut: None, is_told: false, kill_at: None };
    let time_over = times.timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        tokio::select! {
            event = news.next(job) => match event? {
                JobEvent::Ended(end) => return Ok((end, ending.cut)),
                JobEvent::Stopped(signal) => job.follow_stop(signal)?,
                JobEvent::Continued => {}
            },
            signal = signals.next() => ending.pass_on(job, signal)?,
            why = &mut lost, if ending.cut.is_none() => {
                voice.warn(format_args!("the lease was lost ({why}); ending the command"));
                ending.begin(job, Cut::Lost(why), LOST_GRACE)?;
            }
            () = at(time_over), if ending.cut.is_none() => ending.begin(job, Cut::TimedOut, times.kill_after)?,
            excess = &mut exceeded, if ending.cut.is_none() => ending.begin(job, Cut::Memory(excess), Duration::ZERO)?,
            () = at(ending.kill_at), if ending.kill_at.is_some() => {
                ending.kill_at = None;
                job.kill()?;
            }
        }
    }
}

fn tell(voice: Voice, notice: Notice) {
    match notice {
        Notice::Away(error) => voice.note(format_args!("the agent is away, the command goes on ({error})")),
        Notice::Back => voice.note("the agent is back"),
        Notice::TakenSoon(reason) => {
            let reason = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
            voice.warn(format_args!("the lease will be taken back soon{reason}"));
        }
    }
}

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}

/// How far we are in ending the command.
struct Ending {
    cut: Option<Cut>,
    /// Whether it was told to end, by us or by somebody through us.
    is_told: bool,
    kill_at: Option<Instant>,
}

impl Ending {
    /// Tells the command to end, and sees to it after a grace; without one it is killed.
    fn begin(&mut self, job: &Job, cut: Cut, grace: Duration) -> Result<(), SpawnError> {
        self.cut = Some(cut);
        if grace.is_zero() {
            return job.kill();
        }
        self.kill_at = Instant::now().checked_add(grace);
        if std::mem::replace(&mut self.is_told, true) { Ok(()) } else { job.signal(Signal::TERM) }
    }

    fn pass_on(&mut self, job: &Job, signal: Signal) -> Result<(), SpawnError> {
        // The agent asks the holder of a lost lease to end; the command has been told already.
        if signal == Signal::TERM && self.cut.is_some() {
            return Ok(());
        }
        // The terminal sends these to everybody in our group, the command included.
        if job.shares_our_group() && [Signal::INT, Signal::QUIT].contains(&signal) {
            return Ok(());
        }
        self.is_told |= signal == Signal::TERM;
        job.signal(signal)
    }
}

/// What the command does, as it does it.
struct News(AsyncFd<OwnedFd>);

impl News {
    #[allow(
        unsafe_code,
        reason = "registering asks for a descriptor that stays open, which only its owner can promise"
    )]
    fn of(job: &Job) -> io::Result<Self> {
        let copy = job.as_fd().try_clone_to_owned()?;
        // SAFETY: the copy is owned by what is registered, and closed with it.
        unsafe { AsyncFd::register(copy) }.map(Self).map_err(io::Error::from)
    }

    /// The next thing it does. Can be dropped and asked for again.
    async fn next(&self, job: &mut Job) -> anyhow::Result<JobEvent> {
        loop {
            let mut ready = self.0.readable().await.context("cannot follow the command")?;
            match job.try_event()? {
                Some(event) => return Ok(event),
                None => ready.clear_ready(),
            }
        }
    }
}
