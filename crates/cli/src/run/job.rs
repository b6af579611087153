//! The command on its lease: its process is made first, then the agent is told, then it runs and is followed to its end
//! through its signals, its time, its memory and its lease.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use anyhow::Context;
use gpupool_api::lease::{AttachBody, AttachResponse, LeaseBody};
use gpupool_client::LeaseGuard;
use gpupool_client::local::{LeaseBinding, LeaseNotice, LocalAgent};
use gpupool_confine::Signal;
use gpupool_confine::bounds::{BoundExceeded, BoundedJob, BoundsWatcher, EnforcementMethod, JobBounds};
use gpupool_confine::cgroup::{CgroupManager, MemoryCgroup};
use gpupool_confine::spawn::{Job, JobEnd, JobEvent, JobSpec, SpawnError, StagedJob, TerminalUse};
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::Run;
use crate::output::Voice;
use crate::signals::Signals;

/// How long a job whose lease is lost may take to end: below the 5 s after which the agent kills what is left, so that we
/// can still say what happened.
const LOST_GRACE: Duration = Duration::from_secs(4);

/// A running command.
#[derive(Debug)]
pub(super) struct Started {
    pub job: Job,
    pub tether: LeaseBinding,
    pub memory: HostMemory,
}

/// Why it does not run.
#[derive(Debug)]
pub(super) struct NotStarted {
    pub why: String,
    /// What a shell would say of the command; 1 where it is not the command's fault.
    pub exit_code: u8,
}

impl From<SpawnError> for NotStarted {
    fn from(error: SpawnError) -> Self {
        Self { exit_code: u8::try_from(error.exit_code()).unwrap_or(1), why: error.to_string() }
    }
}

/// Starts the command under the lease. The guard renews it until something better keeps it.
pub(super) async fn start(
    agent: &LocalAgent,
    guard: &mut Option<LeaseGuard>,
    lease: &LeaseBody,
    asked: &Run,
    voice: &Voice,
) -> Result<Started, NotStarted> {
    let host_memory = asked.wish.host_memory;
    let mut prepared = Job::prepare(spec(&asked.command, lease))?;
    let job = AttachBody { job_pid: Some(prepared.id().pid), host_memory_mib: host_memory, ..AttachBody::default() };
    let (tether, attached) = agent
        .bind_lease(lease, job)
        .await
        .map_err(|error| NotStarted { exit_code: 1, why: format!("the lease could not be kept: {error}") })?;
    let memory = HostMemory::arrange(host_memory, attached.as_ref(), &mut prepared);
    let memory =
        memory.map_err(|error| NotStarted { exit_code: 1, why: format!("the command cannot be watched: {error}") })?;
    if let Some(guard) = guard.take() {
        guard.detach();
    }
    if let Some(how) = memory.describe(host_memory) {
        voice.note(how);
    }
    Ok(Started { job: prepared.start()?, tether, memory })
}

fn spec(command: &[OsString], lease: &LeaseBody) -> JobSpec {
    let (program, arguments) =
        command.split_first().map_or((OsString::new(), &[][..]), |(program, rest)| (program.clone(), rest));
    let spec = JobSpec::new(program).args(arguments).terminal(TerminalUse::Foreground);
    lease.env.iter().fold(spec, |spec, (name, value)| match value {
        Some(value) => spec.env(name, value),
        None => spec.env_remove(name),
    })
}

/// Why we ended the command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Cut {
    /// Its time was over.
    TimedOut,
    /// Its lease was lost, and why.
    Lost(String),
    /// It used too much host memory.
    Memory(BoundExceeded),
}

/// Follows the command until it has ended. Says why we ended it, where we did.
pub(super) async fn follow(
    started: &mut Started,
    signals: &mut Signals,
    asked: &Run,
    voice: &Voice,
) -> anyhow::Result<(JobEnd, Option<Cut>)> {
    let Started { job, tether, memory } = started;
    if !job.shares_our_process_group() {
        // In a group of its own the command hears of these only through us.
        signals.add(&[Signal::WINCH, Signal::TSTP, Signal::CONT]).context("cannot listen for signals")?;
    }
    let news = News::of(job).context("cannot follow the command")?;
    let lost = tether.wait_until_lost(|notice| tell(voice, notice));
    let exceeded = memory.exceeded();
    tokio::pin!(lost, exceeded);
    let mut ending = Ending { cut: None, is_told: false, kill_at: None };
    let time_over = asked.timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        tokio::select! {
            event = news.next(job) => match event? {
                JobEvent::Ended(end) => return Ok((end, ending.cut)),
                JobEvent::Stopped(signal) => job.mirror_stop(signal)?,
                JobEvent::Continued => {}
            },
            signal = signals.next() => ending.pass_on(job, signal)?,
            why = &mut lost, if ending.cut.is_none() => {
                voice.warn(format_args!("the lease was lost ({why}); ending the command"));
                ending.begin(job, Cut::Lost(why), LOST_GRACE)?;
            }
            () = at(time_over), if ending.cut.is_none() => ending.begin(job, Cut::TimedOut, asked.kill_after())?,
            excess = &mut exceeded, if ending.cut.is_none() => ending.begin(job, Cut::Memory(excess), Duration::ZERO)?,
            () = at(ending.kill_at), if ending.kill_at.is_some() => {
                ending.kill_at = None;
                job.kill()?;
            }
        }
    }
}

fn tell(voice: &Voice, notice: LeaseNotice) {
    match notice {
        LeaseNotice::AgentAway(error) => voice.note(format_args!("the agent is away, the command goes on ({error})")),
        LeaseNotice::AgentReturned => voice.note("the agent is back"),
        LeaseNotice::RevocationAnnounced(reason) => {
            let reason = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
            voice.warn(format_args!("the lease will be taken back soon{reason}"));
        }
    }
}

pub(super) async fn at(time: Option<Instant>) {
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
        if job.shares_our_process_group() && [Signal::INT, Signal::QUIT].contains(&signal) {
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
            match job.try_next_event()? {
                Some(event) => return Ok(event),
                None => ready.clear_ready(),
            }
        }
    }
}

/// How a command is held to its host memory.
#[derive(Debug)]
pub(super) enum HostMemory {
    /// It is not.
    Free,
    /// By the kernel, in a group of the agent.
    AgentsGroup(Option<MemoryCgroup>),
    /// By us: by the kernel, in a group of ours, or by looking.
    Ours(Box<Watch>),
}

/// Our own watch over a command.
#[derive(Debug)]
pub(super) struct Watch {
    held: BoundedJob,
    excess: oneshot::Receiver<BoundExceeded>,
    _watcher: BoundsWatcher,
}

impl HostMemory {
    /// Puts a command that does not run yet where it is held as well as possible.
    pub fn arrange(
        most_mib: Option<u64>,
        attached: Option<&AttachResponse>,
        prepared: &mut StagedJob,
    ) -> std::io::Result<Self> {
        let cgroups = match attached.filter(|attached| attached.cgroup.is_some()) {
            None => CgroupManager::detect(),
            Some(_) if most_mib.is_none() => return Ok(Self::Free),
            Some(attached) if attached.memory_limited => {
                return Ok(Self::AgentsGroup(MemoryCgroup::of_process(prepared.id().pid)));
            }
            // It stays in the agent's group, which kills it whole.
            Some(attached) => CgroupManager::unavailable(
                attached.caveat.clone().unwrap_or_else(|| "the agent cannot limit memory".into()),
            ),
        };
        let name = format!("run-{}-{}", prepared.id().pid, prepared.id().started);
        let bounds = JobBounds { host_memory: most_mib.map(|mib| mib.saturating_mul(1 << 20)), ..JobBounds::default() };
        let (tell, excess) = oneshot::channel();
        let watcher = BoundsWatcher::start(cgroups)?;
        // Nobody listens once the command has ended.
        let held = watcher.enforce_bounds(prepared, &name, &bounds, Box::new(move |excess| drop(tell.send(excess))));
        Ok(Self::Ours(Box::new(Watch { held, excess, _watcher: watcher })))
    }

    /// What is in force, in a sentence, where anything is.
    pub fn describe(&self, most_mib: Option<u64>) -> Option<String> {
        let most = most_mib?;
        let how = match self {
            Self::Free => return None,
            Self::AgentsGroup(_) => "by a control group of the agent".to_owned(),
            Self::Ours(watch) => match watch.held.enforcement().host_memory.as_ref()? {
                EnforcementMethod::Kernel(_) => "by a control group of this user".to_owned(),
                by_looking => by_looking.to_string(),
            },
        };
        Some(format!("host memory is limited to {most} MiB {how}"))
    }

    /// Comes back when the command used too much and still runs.
    pub async fn exceeded(&mut self) -> BoundExceeded {
        if let Self::Ours(watch) = self
            && let Ok(excess) = (&mut watch.excess).await
        {
            return excess;
        }
        std::future::pending().await
    }

    /// How many processes the kernel killed for being over the limit.
    pub fn kills(&self, job: &Job) -> u64 {
        match self {
            Self::AgentsGroup(Some(group)) => group.oom_kills().unwrap_or(0),
            Self::Ours(_) => job.oom_kills(),
            _ => 0,
        }
    }
}
