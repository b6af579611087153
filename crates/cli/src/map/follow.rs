//! What happens in a run, dealt with one event after the other: output goes out, then the log is written, then it is decided
//! whether to go on. A task that is in the log has been told of in full.

use std::io;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context;
use gpupool_dispatch::job_log::{JobLog, JobLogEntry};
use gpupool_dispatch::{DispatchError, RunEvent, RunStats, TaskEnd, TaskId, TaskOutcome, WorkerExitCause};
use serde_json::Value;

use super::arguments::Map;
use super::feeder::Task;
use super::report::{self, Ending, Failures, How, Outlet};
use super::stop::{Reason, Trigger, When};
use super::{BROKEN_PIPE, MapContext, lock};
use crate::output::written;
use crate::signals::exit_code;

pub(super) struct Following<'a> {
    map: &'a Map,
    context: MapContext,
    outlet: Outlet,
    log: Option<JobLog>,
    failures: Failures,
    succeeded: u64,
    failed: u64,
    /// Nothing can be written any more.
    is_mute: bool,
}

impl<'a> Following<'a> {
    pub fn new(map: &'a Map, context: MapContext, log: Option<JobLog>) -> anyhow::Result<Self> {
        let outlet = Outlet::new(context.voice.bars.clone())?;
        let failures = Failures::default();
        Ok(Self { map, context, outlet, log, failures, succeeded: 0, failed: 0, is_mute: false })
    }

    /// Deals with one event.
    pub fn on(&mut self, event: RunEvent) {
        match event {
            RunEvent::TaskEnded(over) => self.over(over),
            RunEvent::TaskStarted { task, worker, .. } => {
                if let Some(task) = self.open_task(task) {
                    self.tell(|| report::started_event(&task, worker));
                }
            }
            RunEvent::TaskRetried { task, worker, outcome } => {
                if let Some(task) = self.open_task(task) {
                    self.tell(|| report::retried_event(&task, worker, &outcome));
                }
            }
            RunEvent::WorkerReady { worker } => self.tell(|| report::worker_event("ready", worker, None)),
            RunEvent::WorkerSetupFailed { worker, why } => {
                self.context.voice.warn(format_args!("worker {} could not be set up: {why}", worker.0 + 1));
                self.tell(|| report::worker_event("setup-failed", worker, Some(&why)));
            }
            RunEvent::WorkerCleanupFailed { worker, why } => {
                self.context.voice.warn(format_args!("worker {} could not clean up: {why}", worker.0 + 1));
                self.tell(|| report::worker_event("cleanup-failed", worker, Some(&why)));
            }
            RunEvent::WorkerGone { worker, cause, .. } => {
                let is_expected = matches!(
                    cause,
                    WorkerExitCause::Stopped | WorkerExitCause::Exited(0) | WorkerExitCause::GpuWithdrawn(_)
                );
                if !is_expected {
                    self.context.voice.note(format_args!("worker {} is gone: {cause}", worker.0 + 1));
                }
                self.tell(|| report::worker_event("gone", worker, Some(&cause.to_string())));
            }
            RunEvent::WorkerWrote { bytes, .. } => self.outlet.words(&bytes),
        }
    }

    /// Nothing else happened for now: what was written is let go.
    pub fn pause(&mut self) {
        let flushed = self.outlet.flush();
        self.written(flushed);
    }

    fn open_task(&self, id: TaskId) -> Option<Task> {
        lock(&self.context.tasks).get(&id).cloned()
    }

    fn over(&mut self, over: TaskEnd) {
        let Some(task) = lock(&self.context.tasks).remove(&over.task) else { return };
        let ending = Ending::of(&over, self.map.speaks.is_none());
        let written = self.print(&task, &over, &ending);
        let received = written.as_ref().ok().copied().unwrap_or(0);
        self.written(written.map(drop));
        // What is logged is not repeated: so nothing is whose output was lost, or that was not done to its end.
        if !self.is_mute && ending.how != How::Cancelled {
            self.log(&task, &ending, received);
        }
        match ending.how {
            How::Done => self.succeeded += 1,
            How::Cancelled => return,
            How::Failed | How::TimedOut | How::WorkerLost => {
                self.failed += 1;
                self.failures.add(&task, &ending, over.output.as_ref());
            }
        }
        if self.map.halt.is_due(self.succeeded, self.failed) && !self.context.stop.is_stopped() {
            let reason = Reason::Halted(self.map.halt.trigger);
            match self.map.halt.when {
                When::Now => self.context.stop.now(reason),
                When::Soon => self.context.stop.soon(reason),
            }
        }
    }

    /// Lets the task's output or result out; how many bytes it was.
    fn print(&mut self, task: &Task, over: &TaskEnd, ending: &Ending) -> io::Result<u64> {
        if self.is_mute {
            return Ok(0);
        }
        let result = match &over.outcome {
            TaskOutcome::Done(result) if self.map.speaks.is_some() => Some(result),
            _ => None,
        };
        if self.map.json {
            let mut event = report::over_event(task, over.worker, over.tries, ending);
            if let Some(output) = &over.output {
                report::add_output(&mut event, output)?;
            }
            if let Some(result) = result {
                event["result"] = String::from_utf8_lossy(result).into();
            }
            self.outlet.line(event.to_string().as_bytes(), None)?;
            return Ok(over.output.as_ref().map_or(0, |output| output.stream_lengths().0));
        }
        let tag = self.map.tag.then(|| [task.arguments.join(&b' ').as_slice(), b"\t"].concat());
        if let Some(result) = result {
            self.outlet.line(result, tag.as_deref())?;
            return Ok(result.len() as u64);
        }
        match &over.output {
            Some(output) => self.outlet.output(output, tag.as_deref()),
            None => Ok(0),
        }
    }

    fn log(&mut self, task: &Task, ending: &Ending, received: u64) {
        if self.log.is_none() {
            return;
        }
        self.pause();
        let Some(log) = self.log.as_mut().filter(|_| !self.is_mute) else { return };
        let entry = JobLogEntry {
            seq: task.seq,
            started: ending.started,
            took: ending.took,
            received,
            exit_code: ending.exit_code,
            signal: ending.signal,
            command: &task.shown,
        };
        if let Err(error) = log.append(&entry) {
            self.log = None;
            self.context.stop.now(Reason::Failed(error.into()));
        }
    }

    fn tell(&mut self, event: impl FnOnce() -> Value) {
        if self.map.json && !self.is_mute {
            let written = self.outlet.line(event().to_string().as_bytes(), None);
            self.written(written);
        }
    }

    /// Whoever stopped reading has read enough, and ends the run.
    fn written(&mut self, written: io::Result<()>) {
        let Err(error) = written else { return };
        self.is_mute = true;
        self.context.stop.now(if error.kind() == io::ErrorKind::BrokenPipe {
            Reason::OutputClosed
        } else {
            Reason::Failed(anyhow::Error::from(error).context("the output of a task cannot be written"))
        });
    }

    /// All is over: tells what is left to tell, and how it went. The job log is on the disk then, or an error says why not.
    pub fn finish(
        mut self,
        stats: &RunStats,
        failure: Option<DispatchError>,
        skipped: u64,
        begun: Instant,
    ) -> anyhow::Result<ExitCode> {
        let log = self.log.take().map_or(Ok(()), JobLog::finish).context("the job log may lack its last lines");
        let voice = &self.context.voice;
        let some_failed = u8::from(self.failed > 0);
        let (code, error) = match self.context.stop.reason() {
            Some(Reason::OutputClosed) => return Ok(ExitCode::from(BROKEN_PIPE)),
            Some(Reason::Signal(signal)) => (exit_code(signal), None),
            Some(Reason::Failed(error)) => (1, Some(error)),
            Some(Reason::Halted(Trigger::Succeeded(_))) => (0, None),
            Some(Reason::Halted(trigger)) => {
                voice.note(format_args!("given up, as --halt {trigger} says"));
                (some_failed, None)
            }
            None => match failure {
                Some(failure) => (1, Some(failure.into())),
                None => (some_failed, None),
            },
        };
        let took = begun.elapsed();
        if self.map.json {
            let event = report::summary_event(stats, skipped, took, code);
            written(self.outlet.line(event.to_string().as_bytes(), None).and_then(|()| self.outlet.flush()))?;
        }
        for line in self.failures.lines() {
            voice.note(line);
        }
        voice.note(report::last_line(stats, skipped, took));
        match (error, log) {
            (Some(error), _) | (None, Err(error)) => Err(error),
            (None, Ok(())) => Ok(ExitCode::from(code)),
        }
    }
}
