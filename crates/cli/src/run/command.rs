//! The command of `gpupool run`: it is staged, attached to its lease by the agent, and runs until it exits or is ended
//! because of a signal, its time limit, its memory limit or the loss of its lease.

use std::collections::BTreeMap;
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

use super::RunArgs;
use crate::output::MessagePrinter;
use crate::program::hidden_variables;
use crate::signals::SignalListener;

/// Grace period of a command whose lease is lost. It is shorter than the 5 s after which the agent kills the rest, so
/// that the command can still report the reason.
const LOST_LEASE_GRACE: Duration = Duration::from_secs(4);

/// Running command with its lease and memory limit.
#[derive(Debug)]
pub(super) struct RunningCommand {
    pub job: Job,
    /// Hold of the lease; `None` if the lease is that of an outer command.
    pub binding: Option<LeaseBinding>,
    pub memory: HostMemoryLimit,
}

/// Failure to start the command.
#[derive(Debug)]
pub(super) struct StartFailure {
    pub why: String,
    /// Exit code of a shell for the failure; 1 if the command is not the cause.
    pub exit_code: u8,
}

impl From<SpawnError> for StartFailure {
    fn from(error: SpawnError) -> Self {
        Self { exit_code: u8::try_from(error.exit_code()).unwrap_or(1), why: error.to_string() }
    }
}

/// Starts the command under the lease. The guard renews the lease until the agent watches the command.
pub(super) async fn start(
    agent: &LocalAgent,
    guard: &mut Option<LeaseGuard>,
    lease: &LeaseBody,
    arguments: &RunArgs,
    printer: &MessagePrinter,
) -> Result<RunningCommand, StartFailure> {
    let host_memory = arguments.request_args.host_memory;
    let mut staged = Job::prepare(job_spec(arguments, &lease.env))?;
    let job = AttachBody { job_pid: Some(staged.id().pid), host_memory_mib: host_memory, ..AttachBody::default() };
    let (binding, attached) = agent
        .bind_lease(lease, job)
        .await
        .map_err(|error| StartFailure { exit_code: 1, why: format!("cannot hold the lease: {error}") })?;
    let memory = HostMemoryLimit::arrange(host_memory, attached.as_ref(), &mut staged);
    let memory =
        memory.map_err(|error| StartFailure { exit_code: 1, why: format!("cannot watch the command: {error}") })?;
    if let Some(guard) = guard.take() {
        guard.detach();
    }
    if let Some(how) = memory.describe(host_memory) {
        printer.info(how);
    }
    Ok(RunningCommand { job: staged.start()?, binding: Some(binding), memory })
}

/// Starts the command under the lease of an outer command, whose variables it has already.
pub(super) fn start_under_parent(
    arguments: &RunArgs,
    printer: &MessagePrinter,
) -> Result<RunningCommand, StartFailure> {
    let host_memory = arguments.request_args.host_memory;
    let mut staged = Job::prepare(job_spec(arguments, &BTreeMap::new()))?;
    let memory = HostMemoryLimit::arrange(host_memory, None, &mut staged);
    let memory =
        memory.map_err(|error| StartFailure { exit_code: 1, why: format!("cannot watch the command: {error}") })?;
    if let Some(how) = memory.describe(host_memory) {
        printer.info(how);
    }
    Ok(RunningCommand { job: staged.start()?, binding: None, memory })
}

fn job_spec(arguments: &RunArgs, environment: &BTreeMap<String, Option<String>>) -> JobSpec {
    let command = &arguments.command;
    let (program, rest) =
        command.split_first().map_or((OsString::new(), &[][..]), |(program, rest)| (program.clone(), rest));
    let spec = JobSpec::new(program).args(rest).terminal(TerminalUse::Foreground);
    let spec = hidden_variables(arguments.keep_token).iter().fold(spec, |spec, name| spec.env_remove(name));
    environment.iter().fold(spec, |spec, (name, value)| match value {
        Some(value) => spec.env(name, value),
        None => spec.env_remove(name),
    })
}

/// Reason why gpupool ended the command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum EarlyEnd {
    /// The time limit passed.
    TimedOut,
    /// The lease was lost, with the reason.
    Lost(String),
    /// The command exceeded its host memory.
    Memory(BoundExceeded),
}

/// Follows the command until it ends. Returns the reason if gpupool ended it.
pub(super) async fn follow(
    started: &mut RunningCommand,
    signals: &mut SignalListener,
    arguments: &RunArgs,
    printer: &MessagePrinter,
) -> anyhow::Result<(JobEnd, Option<EarlyEnd>)> {
    let RunningCommand { job, binding, memory } = started;
    if !job.shares_our_process_group() {
        // A command in its own process group receives these signals only through this process.
        signals.add(&[Signal::WINCH, Signal::TSTP, Signal::CONT]).context("cannot listen for signals")?;
    }
    let job_events = JobEventStream::register(job).context("cannot watch the command")?;
    let lease_lost = async {
        match binding {
            Some(binding) => binding.wait_until_lost(|notice| print_notice(printer, notice)).await,
            None => std::future::pending().await,
        }
    };
    let exceeded = memory.wait_until_exceeded();
    tokio::pin!(lease_lost, exceeded);
    let mut shutdown = CommandShutdown { early_end: None, is_signalled: false, kill_at: None };
    let time_over = arguments.timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        tokio::select! {
            event = job_events.next_event(job) => match event? {
                JobEvent::Ended(end) => return Ok((end, shutdown.early_end)),
                JobEvent::Stopped(signal) => job.mirror_stop(signal)?,
                JobEvent::Continued => {}
            },
            signal = signals.next_signal() => shutdown.forward_signal(job, signal)?,
            why = &mut lease_lost, if shutdown.early_end.is_none() => {
                printer.warn(format_args!("the lease was lost ({why}); ending the command"));
                shutdown.start(job, EarlyEnd::Lost(why), LOST_LEASE_GRACE)?;
            }
            () = sleep_until(time_over), if shutdown.early_end.is_none() => shutdown.start(job, EarlyEnd::TimedOut, arguments.kill_after())?,
            excess = &mut exceeded, if shutdown.early_end.is_none() => shutdown.start(job, EarlyEnd::Memory(excess), Duration::ZERO)?,
            () = sleep_until(shutdown.kill_at), if shutdown.kill_at.is_some() => {
                shutdown.kill_at = None;
                job.kill()?;
            }
        }
    }
}

fn print_notice(printer: &MessagePrinter, notice: LeaseNotice) {
    match notice {
        LeaseNotice::AgentAway(error) => {
            printer.info(format_args!("the agent is unreachable; the command continues ({error})"))
        }
        LeaseNotice::AgentReturned => printer.info("the agent is reachable again"),
        LeaseNotice::RevocationAnnounced(reason) => {
            let reason = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
            printer.warn(format_args!("the lease will be revoked soon{reason}"));
        }
    }
}

pub(super) async fn sleep_until(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}

/// Progress of ending the command.
struct CommandShutdown {
    early_end: Option<EarlyEnd>,
    /// Whether the command has received SIGTERM.
    is_signalled: bool,
    kill_at: Option<Instant>,
}

impl CommandShutdown {
    /// Sends SIGTERM, and SIGKILL after the grace period; a zero grace period kills at once.
    fn start(&mut self, job: &Job, early_end: EarlyEnd, grace: Duration) -> Result<(), SpawnError> {
        self.early_end = Some(early_end);
        if grace.is_zero() {
            return job.kill();
        }
        self.kill_at = Instant::now().checked_add(grace);
        if std::mem::replace(&mut self.is_signalled, true) { Ok(()) } else { job.signal(Signal::TERM) }
    }

    fn forward_signal(&mut self, job: &Job, signal: Signal) -> Result<(), SpawnError> {
        // The agent sends SIGTERM to the holder of a lost lease; the command has received it already.
        if signal == Signal::TERM && self.early_end.is_some() {
            return Ok(());
        }
        // The terminal sends these signals to the whole process group, including the command.
        if job.shares_our_process_group() && [Signal::INT, Signal::QUIT].contains(&signal) {
            return Ok(());
        }
        self.is_signalled |= signal == Signal::TERM;
        job.signal(signal)
    }
}

/// Events of the command.
struct JobEventStream(AsyncFd<OwnedFd>);

impl JobEventStream {
    #[allow(unsafe_code, reason = "registering needs a descriptor that stays open, which only its owner can guarantee")]
    fn register(job: &Job) -> io::Result<Self> {
        let copy = job.as_fd().try_clone_to_owned()?;
        // SAFETY: the registration owns the copy and closes it when dropped.
        unsafe { AsyncFd::register(copy) }.map(Self).map_err(io::Error::from)
    }

    /// Waits for the next event. Cancel safe.
    async fn next_event(&self, job: &mut Job) -> anyhow::Result<JobEvent> {
        loop {
            let mut ready = self.0.readable().await.context("cannot watch the command")?;
            match job.try_next_event()? {
                Some(event) => return Ok(event),
                None => ready.clear_ready(),
            }
        }
    }
}

/// Host memory limit of a command.
#[derive(Debug)]
pub(super) enum HostMemoryLimit {
    /// No limit.
    Free,
    /// Limit of the kernel, in a control group of the agent.
    AgentsGroup(Option<MemoryCgroup>),
    /// Own limit: by the kernel in an own control group, or by polling.
    Ours(Box<OwnMemoryLimit>),
}

/// Memory limit that this process enforces.
#[derive(Debug)]
pub(super) struct OwnMemoryLimit {
    bounded_job: BoundedJob,
    excess: oneshot::Receiver<BoundExceeded>,
    _watcher: BoundsWatcher,
}

impl HostMemoryLimit {
    /// Applies the strongest available limit to a staged command.
    pub fn arrange(
        most_mib: Option<u64>,
        attached: Option<&AttachResponse>,
        staged: &mut StagedJob,
    ) -> std::io::Result<Self> {
        let cgroups = match attached.filter(|attached| attached.cgroup.is_some()) {
            None => CgroupManager::detect(),
            Some(_) if most_mib.is_none() => return Ok(Self::Free),
            Some(attached) if attached.memory_limited => {
                return Ok(Self::AgentsGroup(MemoryCgroup::of_process(staged.id().pid)));
            }
            // The command stays in the agent's group, which kills all of it.
            Some(attached) => CgroupManager::unavailable(
                attached.caveat.clone().unwrap_or_else(|| "the agent cannot limit memory".into()),
            ),
        };
        let name = format!("run-{}-{}", staged.id().pid, staged.id().started);
        let bounds = JobBounds { host_memory: most_mib.map(|mib| mib.saturating_mul(1 << 20)), ..JobBounds::default() };
        let (sender, excess) = oneshot::channel();
        let watcher = BoundsWatcher::start(cgroups)?;
        // The receiver is gone once the command has ended.
        let bounded_job =
            watcher.enforce_bounds(staged, &name, &bounds, Box::new(move |excess| drop(sender.send(excess))));
        Ok(Self::Ours(Box::new(OwnMemoryLimit { bounded_job, excess, _watcher: watcher })))
    }

    /// Describes the limit, if there is one.
    pub fn describe(&self, most_mib: Option<u64>) -> Option<String> {
        let most = most_mib?;
        let how = match self {
            Self::Free => return None,
            Self::AgentsGroup(_) => "by a control group of the agent".to_owned(),
            Self::Ours(watch) => match watch.bounded_job.enforcement().host_memory.as_ref()? {
                EnforcementMethod::Kernel(_) => "by a control group of this user".to_owned(),
                polling => polling.to_string(),
            },
        };
        Some(format!("host memory is limited to {most} MiB {how}"))
    }

    /// Waits until the command exceeds its limit.
    pub async fn wait_until_exceeded(&mut self) -> BoundExceeded {
        if let Self::Ours(watch) = self
            && let Ok(excess) = (&mut watch.excess).await
        {
            return excess;
        }
        std::future::pending().await
    }

    /// Returns the number of processes that the kernel killed because of the limit.
    pub fn oom_kills(&self, job: &Job) -> u64 {
        match self {
            Self::AgentsGroup(Some(group)) => group.oom_kills().unwrap_or(0),
            Self::Ours(_) => job.oom_kills(),
            _ => 0,
        }
    }
}
