//! `gpupool map`: runs a command for each of many arguments, on the GPUs it is granted.
//!
//! This thread starts the workers and deals with what happens; others read the arguments, keep the GPUs, show progress and
//! listen for signals. Each way to an early end goes through [`stop::Stop`], and every way ends here: all tasks are over, no
//! process is left, the GPUs are given back, and the exit code says how it went.

mod arguments;
mod feeder;
mod follow;
mod gpus;
mod progress;
mod report;
mod shell;
mod stop;
mod template;

use std::ffi::OsString;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gpupool_confine::bounds::JobBounds;
use gpupool_dispatch::job_log::{FinishedTasks, JobLog, RerunPolicy};
use gpupool_dispatch::{
    DispatchRules, Dispatcher, ResultOrder, RunHandle, RunPlan, WorkerId, WorkerOutputPolicy, WorkerProgram, WorkerSlot,
};

pub(crate) use arguments::Map;

use crate::output::{Voice, written};
use arguments::Speaks;
use feeder::{Feeder, Kind, Named, OpenTasks, Sources, Total};
use follow::Following;
use gpus::{Gpus, Wanted};
use progress::{Style, Waiting};
use report::Outlet;
use stop::{Listening, Stop, Trigger};
use template::{SLOT, Template, worker_command};

/// How long a task that was told to end may take before it is killed, unless `--kill-after` says otherwise.
const KILL_AFTER: Duration = Duration::from_secs(10);
/// Tasks that are read ahead, unless `--queue-size` says otherwise.
const QUEUE_SIZE: usize = 1_024;
/// What a shell says of a command that wrote where nobody reads.
const BROKEN_PIPE: u8 = 128 + 13;

/// What the threads of a run share.
#[derive(Debug, Clone)]
struct MapContext {
    remote: RunHandle,
    stop: Stop,
    voice: Voice,
    tasks: OpenTasks,
    total: Total,
    waiting: Waiting,
}

pub(crate) fn run(map: &Map) -> anyhow::Result<ExitCode> {
    let work = map.work()?;
    let kind = match map.speaks {
        None => Kind::Command(Template::parse(&work.command, work.sources.len())?),
        Some(_) => Kind::Argument,
    };
    let reads_terminal = work.sources.contains(&Named::File("-".into())) && std::io::stdin().is_terminal();
    let sources = Sources::open(work.sources, if map.null { b'\0' } else { b'\n' })?;
    if map.dry_run {
        return dry_run(&kind, sources);
    }
    let wanted = if map.is_without_gpus() { None } else { Some(Wanted::find(map)?) };
    let (log, finished) = open_log(map)?;
    // Listened for before anything is started: from here on every way out is ours.
    let listening = Listening::start()?;
    let begun = Instant::now();
    let mut dispatcher = Dispatcher::start(plan(map, &work.command))?;
    let is_shown = map.progress || !(map.no_progress || map.quiet || map.json);
    let style = Style::here(is_shown, !(map.json || map.ungroup || reads_terminal));
    let skipped = finished.as_ref().map_or(0, FinishedTasks::count);
    let context = MapContext {
        remote: dispatcher.handle(),
        stop: Stop::new(dispatcher.handle()),
        voice: Voice { is_quiet: map.quiet || map.json, bars: style.bars() },
        tasks: OpenTasks::default(),
        total: Arc::new(Mutex::new(sources.total().map(|total| total.saturating_sub(skipped)))),
        waiting: Waiting::default(),
    };
    listening.obey(context.stop.clone(), context.voice.clone())?;
    if reads_terminal {
        context.voice.note("arguments are read from the terminal, one in each line; Ctrl-D ends them");
    }
    let mut following = Following::new(map, context.clone(), log)?;
    let progress = progress::show(style, context.clone())?;
    let gpus = wanted.map(|wanted| Gpus::start(wanted, context.clone())).transpose()?;
    Feeder { kind, sources, finished, context }.start()?;
    while let Some(event) = dispatcher.next_event() {
        following.on(event);
        if !dispatcher.has_event() {
            following.pause();
        }
    }
    drop(progress);
    let stats = dispatcher.stats();
    let failure = dispatcher.finish().err();
    // No process is left on them.
    drop(gpus);
    following.finish(&stats, failure, skipped, begun)
}

/// The plan of a run. Its workers are in it where they need no GPU.
fn plan(map: &Map, command: &[OsString]) -> RunPlan {
    let program = match map.speaks {
        None => WorkerProgram::commands(),
        Some(speaks) => {
            let mut words = worker_command(command).into_iter();
            let program = words.next().unwrap_or_default();
            match speaks {
                Speaks::Lines => WorkerProgram::lines(program).args(words),
                Speaks::Frames => WorkerProgram::native(program).args(words),
            }
        }
    };
    let mut plan = RunPlan::new(program);
    plan.rules = DispatchRules {
        queue_size: map.queue_size.unwrap_or(QUEUE_SIZE),
        task_timeout: map.timeout,
        grace: map.kill_after.unwrap_or(KILL_AFTER),
        retries: map.retries,
        // What a worker has ahead is begun though nothing new is to be: then it has nothing ahead.
        prefetch: map.halt.trigger == Trigger::Never,
    };
    plan.order = if map.keep_order { ResultOrder::Input } else { ResultOrder::Completion };
    plan.bounds = JobBounds {
        host_memory: map.worker_memory.map(|mib| mib << 20),
        processes: map.processes,
        cpu_time: map.cpu_time,
        ..JobBounds::default()
    };
    plan.cpu_time_per_task = true;
    plan.setup_timeout = map.setup_timeout;
    plan.worker_lifetime = map.worker_lifetime;
    plan.output = if map.ungroup { WorkerOutputPolicy::Inherited } else { WorkerOutputPolicy::Reported };
    plan.report_started = map.json;
    if map.is_without_gpus() {
        let cpus = || std::thread::available_parallelism().map_or(1, |cpus| u32::try_from(cpus.get()).unwrap_or(1));
        plan.slots = (0..map.jobs.unwrap_or_else(cpus)).map(|id| place(WorkerId(id))).collect();
    }
    plan
}

/// A worker's place without a GPU, in which commands find the number of their worker.
pub(super) fn place(id: WorkerId) -> WorkerSlot {
    let mut place = WorkerSlot::new(id);
    place.environment.push((SLOT.into(), Some((id.0 + 1).to_string())));
    place
}

fn open_log(map: &Map) -> anyhow::Result<(Option<JobLog>, Option<FinishedTasks>)> {
    let Some(path) = &map.joblog else { return Ok((None, None)) };
    let again = if map.resume_failed { RerunPolicy::Failed } else { RerunPolicy::Nothing };
    if map.resume || map.resume_failed {
        let (log, finished) = JobLog::resume(path, again)?;
        return Ok((Some(log), Some(finished)));
    }
    Ok((Some(JobLog::create(path)?), None))
}

fn dry_run(kind: &Kind, mut sources: Sources) -> anyhow::Result<ExitCode> {
    let mut outlet = Outlet::new(None)?;
    let mut seq = 0;
    while let Some(arguments) = sources.next()? {
        seq += 1;
        let line = outlet.line(&kind.shown(&arguments, seq), None);
        if line.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe) {
            return Ok(ExitCode::from(BROKEN_PIPE));
        }
        written(line)?;
    }
    written(outlet.flush())?;
    Ok(ExitCode::SUCCESS)
}

/// What a thread that panicked left locked is as good as it was before.
fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
