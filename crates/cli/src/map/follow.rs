//! What happens in a run, dealt with one event after the other: output goes out, then the log is written, then it is decided
//! whether to go on. A task that is in the log has been told of in full.

use std::io;

use anyhow::Context;
use gpupool_dispatch::joblog::{Entry, JobLog};
use gpupool_dispatch::{Cause, Event, Outcome, Over};
use serde_json::Value;

use super::ending::{Ending, How};
use super::halt::{Halt, When};
use super::json;
use super::outlet::Outlet;
use super::say::Say;
use super::stop::{Reason, Stop};
use super::summary::Failures;
use super::tasks::{OpenTasks, Task};

/// How results and events are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Telling {
    /// Tasks are commands, and write; else they have results.
    pub is_commands: bool,
    pub is_json: bool,
    pub is_tagged: bool,
}

/// Deals with what happens.
#[derive(Debug)]
pub(super) struct Following {
    pub telling: Telling,
    pub halt: Halt,
    pub tasks: OpenTasks,
    pub outlet: Outlet,
    pub log: Option<JobLog>,
    pub stop: Stop,
    pub say: Say,
    pub failures: Failures,
    pub succeeded: u64,
    pub failed: u64,
    /// Nothing can be written any more.
    pub is_mute: bool,
}

impl Following {
    /// Deals with one event.
    pub fn on(&mut self, event: Event) {
        match event {
            Event::Over(over) => self.over(over),
            Event::Started { task, worker, .. } => {
                if let Some(task) = self.tasks.get(task) {
                    self.tell(|| json::started(&task, worker));
                }
            }
            Event::Retried { task, worker, outcome } => {
                if let Some(task) = self.tasks.get(task) {
                    self.tell(|| json::retried(&task, worker, &outcome));
                }
            }
            Event::Ready { worker } => self.tell(|| json::worker("ready", worker, None)),
            Event::SetupFailed { worker, why } => {
                self.say.warn(format_args!("worker {} could not be set up: {why}", worker.0 + 1));
                self.tell(|| json::worker("setup-failed", worker, Some(&why)));
            }
            Event::CleanupFailed { worker, why } => {
                self.say.warn(format_args!("worker {} could not clean up: {why}", worker.0 + 1));
                self.tell(|| json::worker("cleanup-failed", worker, Some(&why)));
            }
            Event::Gone { worker, cause, .. } => {
                let is_expected = matches!(cause, Cause::Stopped | Cause::Exited(0) | Cause::Withdrawn(_));
                if !is_expected {
                    self.say.note(format_args!("worker {} is gone: {cause}", worker.0 + 1));
                }
                self.tell(|| json::worker("gone", worker, Some(&cause.to_string())));
            }
            Event::Wrote { bytes, .. } => self.outlet.words(&bytes),
        }
    }

    /// Nothing else happened for now: what was written is let go.
    pub fn pause(&mut self) {
        let flushed = self.outlet.flush();
        self.written(flushed);
    }

    fn over(&mut self, over: Over) {
        let Some(task) = self.tasks.remove(over.task) else { return };
        let ending = Ending::of(&over, self.telling.is_commands);
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
        if self.halt.is_due(self.succeeded, self.failed) && !self.stop.is_stopped() {
            let reason = Reason::Halted(self.halt.trigger);
            match self.halt.when {
                When::Now => self.stop.now(reason),
                When::Soon => self.stop.soon(reason),
            }
        }
    }

    /// Lets the task's output or result out; how many bytes it was.
    fn print(&mut self, task: &Task, over: &Over, ending: &Ending) -> io::Result<u64> {
        if self.is_mute {
            return Ok(0);
        }
        let result = match &over.outcome {
            Outcome::Done(result) if !self.telling.is_commands => Some(result),
            _ => None,
        };
        if self.telling.is_json {
            let mut event = json::over(task, over.worker, over.tries, ending);
            if let Some(output) = &over.output {
                json::add_output(&mut event, output)?;
            }
            if let Some(result) = result {
                event["result"] = String::from_utf8_lossy(result).into();
            }
            self.outlet.line(event.to_string().as_bytes(), None)?;
            return Ok(over.output.as_ref().map_or(0, |output| output.lengths().0));
        }
        let tag = self.telling.is_tagged.then(|| [task.arguments.join(&b' ').as_slice(), b"\t"].concat());
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
        let entry = Entry {
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
            self.stop.now(Reason::Failed(error.into()));
        }
    }

    fn tell(&mut self, event: impl FnOnce() -> Value) {
        if self.telling.is_json && !self.is_mute {
            let written = self.outlet.line(event().to_string().as_bytes(), None);
            self.written(written);
        }
    }

    /// Whoever stopped reading has read enough, and ends the run.
    fn written(&mut self, written: io::Result<()>) {
        let Err(error) = written else { return };
        self.is_mute = true;
        self.stop.now(if error.kind() == io::ErrorKind::BrokenPipe {
            Reason::OutputClosed
        } else {
            Reason::Failed(anyhow::Error::from(error).context("the output of a task cannot be written"))
        });
    }

    /// All is over: the log is on the disk, or why it is not.
    pub fn finish_log(&mut self) -> anyhow::Result<()> {
        self.log.take().map_or(Ok(()), JobLog::finish).context("the job log may lack its last lines")
    }
}
