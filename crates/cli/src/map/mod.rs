//! `gpupool map`: runs a command for each of many arguments on leased GPUs.
//!
//! This thread starts the workers and handles events. Other threads read the arguments, hold the GPUs, show progress
//! and receive signals. Every early end goes through [`run_stopper::RunStopper`]. At every exit all tasks have ended,
//! no process is left, the GPUs are released, and the exit code reports the result.

mod arguments;
mod event_handler;
mod leased_gpus;
mod progress;
mod report;
mod run_stopper;
mod shell;
mod task_feeder;
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

pub(crate) use arguments::MapArgs;

use crate::output::{MessagePrinter, ignore_closed_pipe};
use crate::program::hidden_variables;
use arguments::WorkerDialect;
use event_handler::RunEventHandler;
use leased_gpus::{GpuPlan, MapGpus};
use progress::{ProgressMode, WaitingGpus};
use report::OutputWriter;
use run_stopper::{HaltTrigger, RunStopper, SignalThread};
use task_feeder::{ArgumentCombinations, ArgumentSource, OpenTasks, TaskFeeder, TaskTemplate, TaskTotal};
use template::{CommandTemplate, SLOT_VARIABLE, worker_command};

/// Default of `--kill-after`.
const DEFAULT_KILL_AFTER: Duration = Duration::from_secs(10);
/// Default of `--queue-size`.
const DEFAULT_QUEUE_SIZE: usize = 1_024;
/// Exit code of a shell for a command ended by SIGPIPE.
const BROKEN_PIPE_CODE: u8 = 128 + 13;

/// Examples in the help of `gpupool map`.
pub(crate) const EXAMPLES: &str = "\
Examples:
  gpupool map --gpus 4 python eval.py {} ::: checkpoints/*.pt
  gpupool map --fraction 0.25 python embed.py {} :::: files.txt
  find . -name '*.wav' | gpupool map 'transcribe {} > {.}.txt'
  gpupool map --gpus 0 --jobs 8 gzip ::: *.log       # without GPUs
  gpupool map --joblog run.log --resume ./task {} :::: inputs.txt

Exit status:
  0      every task succeeded
  1      a task failed, or the run failed
  2      wrong usage
  128+N  signal N ended the run";

/// State that the threads of a run share.
#[derive(Debug, Clone)]
struct MapContext {
    run_handle: RunHandle,
    stop: RunStopper,
    printer: MessagePrinter,
    tasks: OpenTasks,
    total: TaskTotal,
    waiting: WaitingGpus,
    /// Variables that workers do not get.
    hidden_variables: &'static [&'static str],
}

pub(crate) fn run(map: &MapArgs) -> anyhow::Result<ExitCode> {
    let input = map.split_words()?;
    let template = match map.speaks {
        None => TaskTemplate::Command(CommandTemplate::parse(&input.command, input.sources.len())?),
        Some(_) => TaskTemplate::Argument,
    };
    let reads_terminal = input.sources.contains(&ArgumentSource::File("-".into())) && std::io::stdin().is_terminal();
    let sources = ArgumentCombinations::open(input.sources, if map.null { b'\0' } else { b'\n' })?;
    if map.dry_run {
        return dry_run(&template, sources);
    }
    let gpu_plan = if map.is_without_gpus() {
        None
    } else {
        // Found after minutes in the queue otherwise.
        shell::check_command(&input.command)?;
        Some(GpuPlan::find(map)?)
    };
    let (log, finished) = open_log(map)?;
    // From here on signals end the run in an orderly way.
    let signal_thread = SignalThread::start()?;
    let started_at = Instant::now();
    let mut dispatcher = Dispatcher::start(run_plan(map, &input.command))?;
    let is_shown = map.progress || !(map.no_progress || map.quiet || map.json);
    let mode = ProgressMode::detect(is_shown, !(map.json || map.ungroup || reads_terminal));
    let skipped = finished.as_ref().map_or(0, FinishedTasks::count);
    let context = MapContext {
        run_handle: dispatcher.handle(),
        stop: RunStopper::new(dispatcher.handle()),
        printer: MessagePrinter { is_quiet: map.quiet || map.json, bars: mode.bars() },
        tasks: OpenTasks::default(),
        total: Arc::new(Mutex::new(sources.total().map(|total| total.saturating_sub(skipped)))),
        waiting: WaitingGpus::default(),
        hidden_variables: hidden_variables(map.keep_token),
    };
    signal_thread.stop_run(context.stop.clone(), context.printer.clone())?;
    if reads_terminal {
        context.printer.info("reading arguments from the terminal, one per line; press Ctrl-D to finish");
    }
    let mut event_handler = RunEventHandler::new(map, context.clone(), log)?;
    let progress = progress::start_progress(mode, context.clone())?;
    let leased_gpus = gpu_plan.map(|gpu_plan| MapGpus::start(gpu_plan, context.clone())).transpose()?;
    TaskFeeder { template, sources, finished, context }.start()?;
    while let Some(event) = dispatcher.next_event() {
        event_handler.handle_event(event);
        if !dispatcher.has_event() {
            event_handler.flush_output();
        }
    }
    drop(progress);
    let stats = dispatcher.stats();
    let failure = dispatcher.finish().err();
    // No process uses the GPUs any more.
    drop(leased_gpus);
    event_handler.finish(&stats, failure, skipped, started_at)
}

/// Builds the plan of a run. It contains the workers only if they need no GPU.
fn run_plan(map: &MapArgs, command: &[OsString]) -> RunPlan {
    let program = match map.speaks {
        None => WorkerProgram::commands(),
        Some(speaks) => {
            let mut words = worker_command(command).into_iter();
            let program = words.next().unwrap_or_default();
            match speaks {
                WorkerDialect::Lines => WorkerProgram::lines(program).args(words),
                WorkerDialect::Frames => WorkerProgram::native(program).args(words),
            }
        }
    };
    let mut plan = RunPlan::new(program);
    plan.rules = DispatchRules {
        queue_size: map.queue_size.unwrap_or(DEFAULT_QUEUE_SIZE),
        task_timeout: map.timeout,
        grace: map.kill_after.unwrap_or(DEFAULT_KILL_AFTER),
        retries: map.retries,
        // A prefetched task would start even after the run is halted.
        prefetch: map.halt.trigger == HaltTrigger::Never,
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
        plan.slots = (0..map.jobs.unwrap_or_else(cpus))
            .map(|id| worker_slot(WorkerId(id), hidden_variables(map.keep_token)))
            .collect();
    }
    plan
}

/// Returns a worker slot without a GPU, with the worker's number and without these variables in the environment.
pub(super) fn worker_slot(id: WorkerId, hidden_variables: &[&str]) -> WorkerSlot {
    let mut slot = WorkerSlot::new(id);
    slot.environment.extend(hidden_variables.iter().map(|name| ((*name).into(), None)));
    slot.environment.push((SLOT_VARIABLE.into(), Some((id.0 + 1).to_string())));
    slot
}

fn open_log(map: &MapArgs) -> anyhow::Result<(Option<JobLog>, Option<FinishedTasks>)> {
    let Some(path) = &map.joblog else { return Ok((None, None)) };
    let again = if map.resume_failed { RerunPolicy::Failed } else { RerunPolicy::Nothing };
    if map.resume || map.resume_failed {
        let (log, finished) = JobLog::resume(path, again)?;
        return Ok((Some(log), Some(finished)));
    }
    Ok((Some(JobLog::create(path)?), None))
}

fn dry_run(template: &TaskTemplate, mut sources: ArgumentCombinations) -> anyhow::Result<ExitCode> {
    let mut output_writer = OutputWriter::new(None)?;
    let mut seq = 0;
    while let Some(arguments) = sources.next_arguments()? {
        seq += 1;
        let line = output_writer.write_line(&template.shown(&arguments, seq), None);
        if line.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe) {
            return Ok(ExitCode::from(BROKEN_PIPE_CODE));
        }
        ignore_closed_pipe(line)?;
    }
    ignore_closed_pipe(output_writer.flush())?;
    Ok(ExitCode::SUCCESS)
}

/// Locks a mutex; the shared values stay valid if a thread panics.
fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
