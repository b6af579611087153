//! A worker's process: started with socket, counters and bounds, and ended with all its descendants. Only
//! [`start_worker_process`] blocks for long, so threads call it.

mod worker_socket;

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::{io, iter, thread};

use bytes::{Bytes, BytesMut};
use gpupool_confine::bounds::{BoundExceeded, BoundedJob, BoundsWatcher, JobBounds};
use gpupool_confine::spawn::{Job, JobEnd, JobSpec, SpawnError, StagedJob};
use gpupool_confine::{lock, with_signals_blocked};
use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size};
use rustix::pipe::{PipeFlags, pipe_with};

pub(crate) use worker_socket::{WorkerMessage, WorkerSocket};

use crate::WorkerExitCause;
use crate::command::OutputSpool;
use crate::limits::{MAX_RESTART_BACKOFF, RESTART_BACKOFF, SOCKET_BUFFER_BYTES};
use crate::plan::{AttachDenied, RunPlan, WorkerOutputPolicy, WorkerProgram, WorkerProtocol, WorkerSlot};
use crate::protocol::{FrameKind, PROTOCOL_VERSION, SOCKET_VARIABLE, WorkerCounters, WorkerFrame, send_with_fds};
use crate::worker::{ReadyMessage, WorkerHello};

/// Returns the pause before a restart after so many consecutive exits.
pub(crate) fn backoff(deaths: u32) -> Duration {
    match deaths {
        0 | 1 => Duration::ZERO,
        more => RESTART_BACKOFF.saturating_mul(1 << (more - 2).min(10)).min(MAX_RESTART_BACKOFF),
    }
}

/// Parses the ready message of a worker. The error is the reason against using the worker.
pub(crate) fn parse_ready(payload: &[u8]) -> Result<ReadyMessage, String> {
    let ready: ReadyMessage = serde_json::from_slice(payload).map_err(|error| format!("ready: {error}"))?;
    if ready.protocol != PROTOCOL_VERSION {
        return Err(format!("it speaks protocol version {}, the dispatcher {PROTOCOL_VERSION}", ready.protocol));
    }
    Ok(ready)
}

/// Environment variable with the worker id, from 0.
const WORKER_VARIABLE: &str = "GPUPOOL_WORKER_ID";

/// A running worker process.
#[derive(Debug)]
pub(crate) struct WorkerProcess {
    pub job: Job,
    pub bounded_job: Option<Arc<BoundedJob>>,
    pub socket: WorkerSocket,
    pub counters: WorkerCounters,
    /// Read end of the worker's output, if the output is reported or kept.
    pub output_pipe: Option<OwnedFd>,
    /// Files that receive the output of its commands.
    pub output_spool: Option<OutputSpool>,
}

/// Error that prevented the start of a worker's process.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WorkerStartError {
    #[error(transparent)]
    NotAttached(#[from] AttachDenied),
    #[error(transparent)]
    System(#[from] io::Error),
    #[error(transparent)]
    Spawn(#[from] SpawnError),
}

/// Starts a worker with socket, counters, environment and bounds. Reports an exceeded bound to `on_excess`.
pub(crate) fn start_worker_process(
    plan: &RunPlan,
    slot: &WorkerSlot,
    watcher: &BoundsWatcher,
    on_excess: Box<dyn FnOnce(BoundExceeded) + Send>,
) -> Result<WorkerProcess, WorkerStartError> {
    let (ours, worker_socket) = socket_pair()?;
    let counters = WorkerCounters::new()?;
    let (streams, output_pipe, output_spool) = standard_streams(plan, &worker_socket)?;
    let [output, error] = streams;
    let mut spec = job_spec(plan, slot).streams(OwnedFd::from(worker_socket), output, error);
    if let Some(helper) = &plan.helper {
        spec = spec.supervisor_program(helper);
    }
    let mut staged = Job::prepare(spec)?;
    let has_cgroup = slot.attach.as_ref().map_or(Ok(false), |attach| attach(staged.id().pid))?;
    let bounded_job = enforce_bounds(plan, slot, watcher, &mut staged, has_cgroup, on_excess);
    ours.set_nonblocking(true)?;
    let mut rest = Bytes::new();
    if plan.program.protocol != WorkerProtocol::Lines {
        // Sent before the program runs, so that the worker never waits for hello.
        rest = send_hello(plan, slot, &ours, &counters)?;
    }
    let job = staged.start()?;
    let mut socket = WorkerSocket::new(ours.into(), plan.program.protocol);
    socket.queue_bytes(rest);
    Ok(WorkerProcess { job, bounded_job: bounded_job.map(Arc::new), socket, counters, output_pipe, output_spool })
}

/// Enforces the bounds. Even without bounds, the process joins a control group unless it is in one already, so that no
/// descendant survives it.
fn enforce_bounds(
    plan: &RunPlan,
    slot: &WorkerSlot,
    watcher: &BoundsWatcher,
    staged: &mut StagedJob,
    has_cgroup: bool,
    on_excess: Box<dyn FnOnce(BoundExceeded) + Send>,
) -> Option<BoundedJob> {
    let mut bounds = plan.bounds.clone();
    bounds.device_memory.extend_from_slice(&slot.device_memory);
    if has_cgroup && bounds == JobBounds::default() {
        return None;
    }
    let name = format!("worker-{}-{}", staged.id().pid, staged.id().started);
    Some(watcher.enforce_bounds(staged, &name, &bounds, on_excess))
}

fn socket_pair() -> io::Result<(UnixStream, UnixStream)> {
    let (ours, worker_socket) = UnixStream::pair()?;
    for socket in [&ours, &worker_socket] {
        // As large as the system allows, so that large payloads need fewer system calls.
        let _ = set_socket_send_buffer_size(socket, SOCKET_BUFFER_BYTES);
        let _ = set_socket_recv_buffer_size(socket, SOCKET_BUFFER_BYTES);
    }
    Ok((ours, worker_socket))
}

type WorkerStreams = ([Stdio; 2], Option<OwnedFd>, Option<OutputSpool>);

fn standard_streams(plan: &RunPlan, socket: &UnixStream) -> io::Result<WorkerStreams> {
    if plan.program.protocol == WorkerProtocol::Commands && plan.output != WorkerOutputPolicy::Inherited {
        let output_spool = OutputSpool::new()?;
        return Ok((output_spool.streams()?, None, Some(output_spool)));
    }
    let lines = |socket: &UnixStream| socket.try_clone().map(|socket| Stdio::from(OwnedFd::from(socket)));
    let is_lines = plan.program.protocol == WorkerProtocol::Lines;
    if plan.output == WorkerOutputPolicy::Inherited {
        let output = if is_lines { lines(socket)? } else { Stdio::inherit() };
        return Ok(([output, Stdio::inherit()], None, None));
    }
    let (reads, output_pipe) = pipe_with(PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&reads, true)?;
    let output = if is_lines { lines(socket)? } else { Stdio::from(output_pipe.try_clone()?) };
    Ok(([output, Stdio::from(output_pipe)], Some(reads), None))
}

fn job_spec(plan: &RunPlan, slot: &WorkerSlot) -> JobSpec {
    let WorkerProgram { protocol, program, arguments, environment, directory } = &plan.program;
    let program = match (&plan.helper, protocol) {
        (Some(helper), WorkerProtocol::Commands) => helper.as_os_str(),
        _ => program,
    };
    let mut spec = JobSpec::new(program).args(arguments);
    let slot_env = slot.environment.iter().map(|(name, value)| (OsStr::new(name), value.as_ref().map(OsStr::new)));
    let program_env = environment.iter().map(|(name, value)| (name.as_os_str(), value.as_deref()));
    for (name, value) in program_env.chain(slot_env) {
        spec = match value {
            Some(value) => spec.env(name, value),
            None => spec.env_remove(name),
        };
    }
    spec = spec.env(WORKER_VARIABLE, slot.id.to_string());
    spec = match protocol {
        WorkerProtocol::Lines => spec.env_remove(SOCKET_VARIABLE),
        WorkerProtocol::Frames | WorkerProtocol::Commands => spec.env(SOCKET_VARIABLE, "0"),
    };
    match directory {
        Some(directory) => spec.directory(directory),
        None => spec,
    }
}

/// Sends the hello message and the counters. Returns the unsent rest of the message.
fn send_hello(plan: &RunPlan, slot: &WorkerSlot, socket: &UnixStream, counters: &WorkerCounters) -> io::Result<Bytes> {
    let hello = WorkerHello {
        protocol: PROTOCOL_VERSION,
        worker_id: slot.id.0,
        gpu_ids: slot.gpu_ids.clone(),
        settings: plan.settings.clone(),
        memory: None,
        counters: None,
    };
    let frame = WorkerFrame::new(FrameKind::Hello, serde_json::to_vec(&hello).map_err(io::Error::other)?);
    let mut bytes = BytesMut::new();
    frame.write_header(&mut bytes).ok_or_else(|| io::Error::other("the settings are too large to send"))?;
    bytes.extend_from_slice(&frame.payload);
    let fds: Vec<BorrowedFd<'_>> =
        iter::once(counters.as_fd()).chain(plan.memory.as_deref().map(AsFd::as_fd)).collect();
    let sent = send_with_fds(socket, &bytes, &fds)?;
    Ok(bytes.split_off(sent).freeze())
}

/// Ends a process and its descendants: kills them after a grace in which the process may exit on its own. Runs on its
/// own thread and passes the cause of the exit to `on_exit`.
pub(crate) fn end_worker_process(
    mut job: Job,
    bounded_job: Option<Arc<BoundedJob>>,
    socket: &mut WorkerSocket,
    grace: Duration,
    on_exit: impl FnOnce(WorkerExitCause) + Send + 'static,
) {
    if !grace.is_zero() {
        socket.close_writing();
    }
    let reap = move || {
        // On failure, dropping the job ends the process.
        let end = job.wait_or_kill(grace).ok();
        let excess = bounded_job.and_then(|bounded_job| bounded_job.exceeded_bound_at_end(&job));
        on_exit(match (excess, end) {
            (Some(excess), _) => WorkerExitCause::BoundExceeded(excess),
            (None, Some(JobEnd::Exited(code))) => WorkerExitCause::Exited(code),
            (None, Some(JobEnd::Signalled(signal))) => WorkerExitCause::Signalled(signal),
            (None, None) => WorkerExitCause::Stopped,
        });
    };
    let reap = Arc::new(Mutex::new(Some(reap)));
    let reap = move || {
        if let Some(reap) = lock(&reap).take() {
            reap();
        }
    };
    // Ends with the process, after the grace at the latest.
    let thread = thread::Builder::new().name("gpupool-reap".into());
    if spawn_without_signals(|| thread.spawn(reap.clone())).is_err() {
        // Without a thread, the caller waits for the end of the process.
        reap();
    }
}

/// Runs code that starts threads, with all signals blocked in these threads, so that signals interrupt the program's
/// own threads.
///
/// A signal taken by our thread would not interrupt a waiting thread of the program. Python, for example, runs handlers
/// only in its main thread, and Ctrl-C in a waiting callback would go unnoticed.
pub(crate) fn spawn_without_signals<T>(start: impl FnOnce() -> T) -> T {
    with_signals_blocked(&[], start)
}
