//! From a granted lease to a running command: its process first, then the agent is told, then it runs.

use std::ffi::OsString;
use std::io;

use gpupool_api::lease::{AttachBody, Lease};
use gpupool_client::local::{LocalAgent, Tether};
use gpupool_client::{ClientError, LeaseGuard};
use gpupool_confine::spawn::{Job, JobSpec, SpawnError, TerminalUse};

use super::memory::HostMemory;
use super::say::Voice;

/// A running command.
#[derive(Debug)]
pub(super) struct Started {
    pub job: Job,
    pub tether: Tether,
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

impl From<ClientError> for NotStarted {
    fn from(error: ClientError) -> Self {
        Self { exit_code: 1, why: format!("the lease could not be kept: {error}") }
    }
}

impl From<io::Error> for NotStarted {
    fn from(error: io::Error) -> Self {
        Self { exit_code: 1, why: format!("the command cannot be watched: {error}") }
    }
}

/// Starts the command under the lease. The guard renews it until something better keeps it.
pub(super) async fn start(
    agent: &LocalAgent,
    guard: &mut Option<LeaseGuard>,
    lease: &Lease,
    command: &[OsString],
    host_memory: Option<u64>,
    voice: Voice,
) -> Result<Started, NotStarted> {
    let mut prepared = Job::prepare(spec(command, lease))?;
    let job = AttachBody { job_pid: Some(prepared.id().pid), host_memory_mib: host_memory, ..AttachBody::default() };
    let (tether, attached) = agent.tie(lease, job).await?;
    let memory = HostMemory::arrange(host_memory, attached.as_ref(), &mut prepared)?;
    if let Some(guard) = guard.take() {
        guard.let_go_on();
    }
    if let Some(how) = memory.describe(host_memory) {
        voice.note(how);
    }
    Ok(Started { job: prepared.start()?, tether, memory })
}

fn spec(command: &[OsString], lease: &Lease) -> JobSpec {
    let (program, arguments) =
        command.split_first().map_or((OsString::new(), &[][..]), |(program, rest)| (program.clone(), rest));
    let spec = JobSpec::new(program).args(arguments).terminal(TerminalUse::Foreground);
    lease.env.iter().fold(spec, |spec, (name, value)| match value {
        Some(value) => spec.env(name, value),
        None => spec.env_remove(name),
    })
}
