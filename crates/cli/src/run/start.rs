//! From a granted lease to a running command: its process first, then the agent is told, then it runs.

use std::ffi::OsString;

use gpupool_api::lease::Lease;
use gpupool_client::{ClientError, LeaseGuard};
use gpupool_confine::spawn::{Job, JobSpec, Prepared, SpawnError, TerminalUse};

use super::here::Agent;
use super::memory::HostMemory;
use super::say::Voice;
use super::tether::Tether;

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

/// Starts the command under the lease. The guard renews it until something better keeps it.
pub(super) async fn start(
    agent: &Agent,
    guard: &mut Option<LeaseGuard>,
    lease: &Lease,
    command: &[OsString],
    host_memory: Option<u64>,
    voice: Voice,
) -> Result<Started, NotStarted> {
    let mut prepared = Job::prepare(spec(command, lease))?;
    let (tether, memory) = tie(agent, lease, &mut prepared, host_memory).await?;
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

async fn tie(
    agent: &Agent,
    lease: &Lease,
    prepared: &mut Prepared,
    host_memory: Option<u64>,
) -> Result<(Tether, HostMemory), ClientError> {
    if agent.knows_us() {
        match Tether::to_process(&agent.client, lease, prepared.id().pid, host_memory).await {
            Ok((tether, attached)) => {
                let memory = HostMemory::arrange(host_memory, Some(&attached), prepared);
                return Ok((tether, memory));
            }
            // An agent in another container sees the connection, not the process.
            Err(error) if error.code() == Some("no_process") => {}
            Err(error) => return Err(error),
        }
    }
    let tether = Tether::to_connection(&agent.client, lease).await?;
    Ok((tether, HostMemory::arrange(host_memory, None, prepared)))
}
