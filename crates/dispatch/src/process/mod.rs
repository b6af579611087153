//! One worker's process, whoever it works for: started with its socket, counters and bounds; spoken to over its wire; seen
//! off. Nothing here waits for long but [`start`], which is called from threads that may.

mod wire;

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

pub(crate) use wire::{Heard, Wire};

use crate::WorkerExitCause;
use crate::command::Spool;
use crate::limits::{BACKOFF, BACKOFF_MOST, SOCKET_BYTES};
use crate::plan::{AttachDenied, RunPlan, Speaks, WorkerOutputPolicy, WorkerProgram, WorkerSlot};
use crate::protocol::{Frame, Kind, SOCKET_VARIABLE, VERSION, WorkerCounters, send_with};
use crate::worker::{Ready, WorkerHello};

/// How long to wait before a process is started that died so often in a row.
pub(crate) fn backoff(deaths: u32) -> Duration {
    match deaths {
        0 | 1 => Duration::ZERO,
        more => BACKOFF.saturating_mul(1 << (more - 2).min(10)).min(BACKOFF_MOST),
    }
}

/// What a worker said when it was set up, or why we cannot work with it.
pub(crate) fn ready_of(payload: &[u8]) -> Result<Ready, String> {
    let ready: Ready = serde_json::from_slice(payload).map_err(|error| format!("ready: {error}"))?;
    if ready.protocol != VERSION {
        return Err(format!("it speaks version {} of the protocol, we {VERSION}", ready.protocol));
    }
    Ok(ready)
}

/// Tells a worker which one it is, from 0.
const WORKER_VARIABLE: &str = "GPUPOOL_WORKER_ID";

/// A worker's process, running.
#[derive(Debug)]
pub(crate) struct Process {
    pub job: Job,
    pub held: Option<Arc<BoundedJob>>,
    pub wire: Wire,
    pub counters: WorkerCounters,
    /// Our end of what it writes, where that is told or kept.
    pub writes: Option<OwnedFd>,
    /// Where its commands write.
    pub spool: Option<Spool>,
}

/// Why a worker's process does not run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotStarted {
    #[error(transparent)]
    NotAttached(#[from] AttachDenied),
    #[error(transparent)]
    System(#[from] io::Error),
    #[error(transparent)]
    Spawn(#[from] SpawnError),
}

/// Starts a worker, with socket, counters, environment and bounds; or why it cannot be. Takes a moment. What it uses too much of is told to `on_excess`.
pub(crate) fn start(
    plan: &RunPlan,
    place: &WorkerSlot,
    watcher: &BoundsWatcher,
    on_excess: Box<dyn FnOnce(BoundExceeded) + Send>,
) -> Result<Process, NotStarted> {
    let (ours, theirs) = socket_pair()?;
    let counters = WorkerCounters::new()?;
    let (streams, writes, spool) = streams(plan, &theirs)?;
    let [output, error] = streams;
    let mut spec = spec(plan, place).streams(OwnedFd::from(theirs), output, error);
    if let Some(helper) = &plan.helper {
        spec = spec.supervisor_program(helper);
    }
    let mut prepared = Job::prepare(spec)?;
    let has_group = place.attach.as_ref().map_or(Ok(false), |attach| attach(prepared.id().pid))?;
    let held = enforce_bounds(plan, place, watcher, &mut prepared, has_group, on_excess);
    ours.set_nonblocking(true)?;
    let mut rest = Bytes::new();
    if plan.program.speaks != Speaks::Lines {
        // Said before it runs, so that it never waits for it.
        rest = say_hello(plan, place, &ours, &counters)?;
    }
    let job = prepared.start()?;
    let mut wire = Wire::new(ours.into(), plan.program.speaks);
    wire.put(rest);
    Ok(Process { job, held: held.map(Arc::new), wire, counters, writes, spool })
}

/// Holds it to its bounds. Also without any it is put into a group, where nothing dodges its end, unless it is in one.
fn enforce_bounds(
    plan: &RunPlan,
    place: &WorkerSlot,
    watcher: &BoundsWatcher,
    prepared: &mut StagedJob,
    has_group: bool,
    on_excess: Box<dyn FnOnce(BoundExceeded) + Send>,
) -> Option<BoundedJob> {
    let mut bounds = plan.bounds.clone();
    bounds.device_memory.extend_from_slice(&place.device_memory);
    if has_group && bounds == JobBounds::default() {
        return None;
    }
    let name = format!("worker-{}-{}", prepared.id().pid, prepared.id().started);
    Some(watcher.enforce_bounds(prepared, &name, &bounds, on_excess))
}

fn socket_pair() -> io::Result<(UnixStream, UnixStream)> {
    let (ours, theirs) = UnixStream::pair()?;
    for socket in [&ours, &theirs] {
        // As much as the system allows: large payloads then take fewer turns.
        let _ = set_socket_send_buffer_size(socket, SOCKET_BYTES);
        let _ = set_socket_recv_buffer_size(socket, SOCKET_BYTES);
    }
    Ok((ours, theirs))
}

type Streams = ([Stdio; 2], Option<OwnedFd>, Option<Spool>);

fn streams(plan: &RunPlan, socket: &UnixStream) -> io::Result<Streams> {
    if plan.program.speaks == Speaks::Commands && plan.output != WorkerOutputPolicy::Inherited {
        let spool = Spool::new()?;
        return Ok((spool.streams()?, None, Some(spool)));
    }
    let lines = |socket: &UnixStream| socket.try_clone().map(|socket| Stdio::from(OwnedFd::from(socket)));
    let is_lines = plan.program.speaks == Speaks::Lines;
    if plan.output == WorkerOutputPolicy::Inherited {
        let output = if is_lines { lines(socket)? } else { Stdio::inherit() };
        return Ok(([output, Stdio::inherit()], None, None));
    }
    let (reads, writes) = pipe_with(PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&reads, true)?;
    let output = if is_lines { lines(socket)? } else { Stdio::from(writes.try_clone()?) };
    Ok(([output, Stdio::from(writes)], Some(reads), None))
}

fn spec(plan: &RunPlan, place: &WorkerSlot) -> JobSpec {
    let WorkerProgram { speaks, program, arguments, environment, directory } = &plan.program;
    let program = match (&plan.helper, speaks) {
        (Some(helper), Speaks::Commands) => helper.as_os_str(),
        _ => program,
    };
    let mut spec = JobSpec::new(program).args(arguments);
    let of_place = place.environment.iter().map(|(name, value)| (OsStr::new(name), value.as_ref().map(OsStr::new)));
    let of_program = environment.iter().map(|(name, value)| (name.as_os_str(), value.as_deref()));
    for (name, value) in of_program.chain(of_place) {
        spec = match value {
            Some(value) => spec.env(name, value),
            None => spec.env_remove(name),
        };
    }
    spec = spec.env(WORKER_VARIABLE, place.id.to_string());
    spec = match speaks {
        Speaks::Lines => spec.env_remove(SOCKET_VARIABLE),
        Speaks::Frames | Speaks::Commands => spec.env(SOCKET_VARIABLE, "0"),
    };
    match directory {
        Some(directory) => spec.directory(directory),
        None => spec,
    }
}

/// Says hello, and hands the counters over; what is left to be said.
fn say_hello(plan: &RunPlan, place: &WorkerSlot, socket: &UnixStream, counters: &WorkerCounters) -> io::Result<Bytes> {
    let hello = WorkerHello {
        protocol: VERSION,
        worker_id: place.id.0,
        gpu_ids: place.gpu_ids.clone(),
        settings: plan.settings.clone(),
        memory: None,
        counters: None,
    };
    let frame = Frame::new(Kind::Hello, serde_json::to_vec(&hello).map_err(io::Error::other)?);
    let mut bytes = BytesMut::new();
    frame.put_header(&mut bytes).ok_or_else(|| io::Error::other("the settings are too large to be sent"))?;
    bytes.extend_from_slice(&frame.payload);
    let handed: Vec<BorrowedFd<'_>> =
        iter::once(counters.as_fd()).chain(plan.memory.as_deref().map(AsFd::as_fd)).collect();
    let sent = send_with(socket, &bytes, &handed)?;
    Ok(bytes.split_off(sent).freeze())
}

/// Ends a process, with all it started: killed after a grace, in which it may end by itself. A thread of its own sees to
/// that; `tell` hears what the process died of, as far as it was not killed for another reason.
pub(crate) fn end(
    mut job: Job,
    held: Option<Arc<BoundedJob>>,
    wire: &mut Wire,
    grace: Duration,
    tell: impl FnOnce(WorkerExitCause) + Send + 'static,
) {
    if !grace.is_zero() {
        wire.hang_up();
    }
    let reap = move || {
        // Where that fails, dropping it ends it.
        let end = job.wait_or_kill(grace).ok();
        let excess = held.and_then(|held| held.exceeded_bound_at_end(&job));
        tell(match (excess, end) {
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
    // Ends when the process has, after the grace at the latest.
    let thread = thread::Builder::new().name("gpupool-bury".into());
    if untaken_by_threads_of(|| thread.spawn(reap.clone())).is_err() {
        // No thread can be had: then it takes as long as it takes.
        reap();
    }
}

/// Does something that starts threads: they take no signals, which are for the threads of the program, where they interrupt
/// what waits.
///
/// A thread of ours that took one would leave the program's sleeping: Python, for one, runs its handlers in its main thread only,
/// and Ctrl-C in a callback that waits would go unheard.
pub(crate) fn untaken_by_threads_of<T>(start: impl FnOnce() -> T) -> T {
    with_signals_blocked(&[], start)
}
