//! Handles the events of a run one by one: prints output, writes the job log, then decides whether the run continues. A
//! task in the job log has been reported completely.
use std::io;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context;
use gpupool_dispatch::job_log::{JobLog, JobLogEntry};
use gpupool_dispatch::{DispatchError, RunEvent, RunStats, TaskEnd, TaskId, TaskOutcome, WorkerExitCause};
use serde_json::Value;

use super::arguments::MapArgs;
use super::report::{self, FailureList, OutputWriter, TaskReport, TaskVerdict};
use super::run_stopper::{HaltTiming, HaltTrigger, StopReason};
use super::task_feeder::MapTask;
use super::{BROKEN_PIPE_CODE, MapContext, lock};
use crate::output::ignore_closed_pipe;
use crate::signals::exit_code;

/// Handler of the events of one run.
pub(super) struct RunEventHandler<'a> {
    map: &'a MapArgs,
    context: MapContext,
    output_writer: OutputWriter,
    log: Option<JobLog>,
    failures: FailureList,
    succeeded: u64,
    failed: u64,
    /// Whether output can no longer be written.
    is_output_closed: bool,
}

impl<'a> RunEventHandler<'a> {
    pub fn new(map: &'a MapArgs, context: MapContext, log: Option<JobLog>) -> anyhow::Result<Self> {
        let output_writer = OutputWriter::new(context.printer.bars.clone())?;
        let failures = FailureList::default();
        Ok(Self { map, context, output_writer, log, failures, succeeded: 0, failed: 0, is_output_closed: false })
    }

    pub fn handle_event(&mut self, event: RunEvent) {
        match event {
            RunEvent::TaskEnded(over) => self.on_task_ended(over),
            RunEvent::TaskStarted { task, worker, .. } => {
                if let Some(task) = self.open_task(task) {
                    self.print_event(|| report::started_event(&task, worker));
                }
            }
            RunEvent::TaskRetried { task, worker, outcome } => {
                if let Some(task) = self.open_task(task) {
                    self.print_event(|| report::retried_event(&task, worker, &outcome));
                }
            }
            RunEvent::WorkerReady { worker } => self.print_event(|| report::worker_event("ready", worker, None)),
            RunEvent::WorkerSetupFailed { worker, why } => {
                self.context.printer.warn(format_args!("worker {} failed to start: {why}", worker.0 + 1));
                self.print_event(|| report::worker_event("setup-failed", worker, Some(&why)));
            }
            RunEvent::WorkerCleanupFailed { worker, why } => {
                self.context.printer.warn(format_args!("worker {} failed to clean up: {why}", worker.0 + 1));
                self.print_event(|| report::worker_event("cleanup-failed", worker, Some(&why)));
            }
            RunEvent::WorkerGone { worker, cause, .. } => {
                let is_expected = matches!(
                    cause,
                    WorkerExitCause::Stopped | WorkerExitCause::Exited(0) | WorkerExitCause::GpuWithdrawn(_)
                );
                if !is_expected {
                    self.context.printer.info(format_args!("worker {} exited: {cause}", worker.0 + 1));
                }
                self.print_event(|| report::worker_event("gone", worker, Some(&cause.to_string())));
            }
            RunEvent::WorkerWrote { bytes, .. } => self.output_writer.write_stderr(&bytes),
        }
    }

    /// Flushes the output while no event is pending.
    pub fn flush_output(&mut self) {
        let flushed = self.output_writer.flush();
        self.check_written(flushed);
    }

    fn open_task(&self, id: TaskId) -> Option<MapTask> {
        lock(&self.context.tasks).get(&id).cloned()
    }

    fn on_task_ended(&mut self, over: TaskEnd) {
        let Some(task) = lock(&self.context.tasks).remove(&over.task) else { return };
        let report = TaskReport::new(&over, self.map.speaks.is_none());
        let result = self.print_output(&task, &over, &report);
        let received = result.as_ref().ok().copied().unwrap_or(0);
        self.check_written(result.map(drop));
        // Logged tasks are not repeated, so a task whose output was lost or that did not finish is not logged.
        if !self.is_output_closed && report.verdict != TaskVerdict::Cancelled {
            self.log_task(&task, &report, received);
        }
        match report.verdict {
            TaskVerdict::Done => self.succeeded += 1,
            TaskVerdict::Cancelled => return,
            TaskVerdict::Failed | TaskVerdict::TimedOut | TaskVerdict::WorkerLost => {
                self.failed += 1;
                self.failures.add(&task, &report, over.output.as_ref());
            }
        }
        if self.map.halt.is_due(self.succeeded, self.failed) && !self.context.stop.is_stopped() {
            let reason = StopReason::Halted(self.map.halt.trigger);
            match self.map.halt.when {
                HaltTiming::Now => self.context.stop.now(reason),
                HaltTiming::Soon => self.context.stop.soon(reason),
            }
        }
    }

    /// Prints the output or result of a task and returns its length in bytes.
    fn print_output(&mut self, task: &MapTask, over: &TaskEnd, report: &TaskReport) -> io::Result<u64> {
        if self.is_output_closed {
            return Ok(0);
        }
        let result = match &over.outcome {
            TaskOutcome::Done(result) if self.map.speaks.is_some() => Some(result),
            _ => None,
        };
        if self.map.json {
            let mut event = report::over_event(task, over.worker, over.tries, report);
            if let Some(output) = &over.output {
                report::add_output(&mut event, output)?;
            }
            if let Some(result) = result {
                event["result"] = String::from_utf8_lossy(result).into();
            }
            self.output_writer.write_line(event.to_string().as_bytes(), None)?;
            return Ok(over.output.as_ref().map_or(0, |output| output.stream_lengths().0));
        }
        let tag = self.map.tag.then(|| [task.arguments.join(&b' ').as_slice(), b"\t"].concat());
        if let Some(result) = result {
            self.output_writer.write_line(result, tag.as_deref())?;
            return Ok(result.len() as u64);
        }
        match &over.output {
            Some(output) => self.output_writer.write_output(output, tag.as_deref()),
            None => Ok(0),
        }
    }

    fn log_task(&mut self, task: &MapTask, report: &TaskReport, received: u64) {
        if self.log.is_none() {
            return;
        }
        self.flush_output();
        let Some(log) = self.log.as_mut().filter(|_| !self.is_output_closed) else { return };
        let entry = JobLogEntry {
            seq: task.seq,
            started: report.started,
            took: report.took,
            received,
            exit_code: report.exit_code,
            signal: report.signal,
            command: &task.shown,
        };
        if let Err(error) = log.append(&entry) {
            self.log = None;
            self.context.stop.now(StopReason::Failed(error.into()));
        }
    }

    fn print_event(&mut self, event: impl FnOnce() -> Value) {
        if self.map.json && !self.is_output_closed {
            let result = self.output_writer.write_line(event().to_string().as_bytes(), None);
            self.check_written(result);
        }
    }

    /// Stops the run if the output cannot be written.
    fn check_written(&mut self, result: io::Result<()>) {
        let Err(error) = result else { return };
        self.is_output_closed = true;
        self.context.stop.now(if error.kind() == io::ErrorKind::BrokenPipe {
            StopReason::OutputClosed
        } else {
            StopReason::Failed(anyhow::Error::from(error).context("cannot write the output of a task"))
        });
    }

    /// Prints the summary and returns the exit code. The job log is on disk afterwards, or the error has the reason.
    pub fn finish(
        mut self,
        stats: &RunStats,
        failure: Option<DispatchError>,
        skipped: u64,
        started_at: Instant,
    ) -> anyhow::Result<ExitCode> {
        let log = self.log.take().map_or(Ok(()), JobLog::finish).context("the job log may be missing its last lines");
        let printer = &self.context.printer;
        let some_failed = u8::from(self.failed > 0);
        let (code, error) = match self.context.stop.take_reason() {
            Some(StopReason::OutputClosed) => return Ok(ExitCode::from(BROKEN_PIPE_CODE)),
            Some(StopReason::Signal(signal)) => (exit_code(signal), None),
            Some(StopReason::Failed(error)) => (1, Some(error)),
            Some(StopReason::Halted(HaltTrigger::Succeeded(_))) => (0, None),
            Some(StopReason::Halted(trigger)) => {
                printer.info(format_args!("stopped by --halt {trigger}"));
                (some_failed, None)
            }
            None => match failure {
                Some(failure) => (1, Some(failure.into())),
                None => (some_failed, None),
            },
        };
        let took = started_at.elapsed();
        if self.map.json {
            let event = report::summary_event(stats, skipped, took, code);
            ignore_closed_pipe(
                self.output_writer
                    .write_line(event.to_string().as_bytes(), None)
                    .and_then(|()| self.output_writer.flush()),
            )?;
        }
        for line in self.failures.lines() {
            printer.info(line);
        }
        printer.info(report::last_line(stats, skipped, took));
        match (error, log) {
            (Some(error), _) | (None, Err(error)) => Err(error),
            (None, Ok(())) => Ok(ExitCode::from(code)),
        }
    }
}
