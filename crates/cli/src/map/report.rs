//! Reports about tasks: the result of each, events for `--json`, task output and the summary.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::fd::AsFd;
use std::time::{Duration, SystemTime};

use anyhow::Context;
use gpupool_dispatch::command::{CommandOutput, CommandReport};
use gpupool_dispatch::{RunStats, TaskEnd, TaskOutcome, WorkerExitCause, WorkerId};
use indicatif::MultiProgress;
use serde_json::{Value, json};

use super::progress::{finished_tasks, format_rate};
use super::task_feeder::MapTask;
use crate::terminal::sanitize;
use crate::units::format_short_duration;

/// Size of the output buffer.
const OUTPUT_BUFFER_BYTES: usize = 1 << 16;
/// Maximum output of a task in an event of `--json`.
const MAX_EVENT_OUTPUT_BYTES: usize = 64 << 10;
/// Number of failures listed at the end; the others are counted.
const MAX_SHOWN_FAILURES: usize = 5;
/// Bytes shown from the end of a failed task's standard error.
const STDERR_TAIL_BYTES: u64 = 2_048;
/// Lines shown from the end of a failed task's standard error.
const STDERR_TAIL_LINES: usize = 5;

/// Result of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TaskReport {
    pub verdict: TaskVerdict,
    /// Exit code; -1 if the task did not exit on its own.
    pub exit_code: i32,
    /// Signal that ended the task; 0 for none.
    pub signal: i32,
    /// Error; empty on success.
    pub why: String,
    pub started: SystemTime,
    pub took: Duration,
}

/// Kind of a task's result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum TaskVerdict {
    Done,
    Failed,
    TimedOut,
    WorkerLost,
    Cancelled,
}

impl TaskReport {
    pub fn new(over: &TaskEnd, is_command: bool) -> Self {
        let took = over.started.map_or(Duration::ZERO, |started| over.finished.saturating_duration_since(started));
        let started = SystemTime::now().checked_sub(took + over.finished.elapsed()).unwrap_or(SystemTime::UNIX_EPOCH);
        let report = |verdict, exit_code, why| Self { verdict, exit_code, signal: 0, why, started, took };
        match &over.outcome {
            TaskOutcome::Done(result) => {
                report(TaskVerdict::Done, 0, String::new()).with_command_report(is_command.then_some(result))
            }
            TaskOutcome::Failed(result) if is_command => {
                report(TaskVerdict::Failed, 1, String::new()).with_command_report(Some(result))
            }
            TaskOutcome::Failed(result) => report(TaskVerdict::Failed, 1, String::from_utf8_lossy(result).into_owned()),
            TaskOutcome::TimedOut(limit) => report(
                TaskVerdict::TimedOut,
                -1,
                format!("exceeded the time limit of {}", format_short_duration(*limit)),
            ),
            TaskOutcome::WorkerLost(loss) => {
                let signal = if let WorkerExitCause::Signalled(signal) = loss.cause { signal } else { 0 };
                Self { signal, ..report(TaskVerdict::WorkerLost, -1, loss.to_string()) }
            }
            TaskOutcome::Cancelled => report(TaskVerdict::Cancelled, -1, "cancelled".into()),
        }
    }

    /// Adds the report of the process that ran the command.
    fn with_command_report(self, result: Option<&bytes::Bytes>) -> Self {
        let Some(report) = result.and_then(|result| CommandReport::parse(result)) else {
            let why = result
                .filter(|_| self.verdict != TaskVerdict::Done)
                .map(|result| String::from_utf8_lossy(result).into_owned());
            return Self { why: why.unwrap_or_default(), ..self };
        };
        let why = match (&report.not_started, report.exit_code, report.signal) {
            (Some(why), ..) => format!("cannot be started: {why}"),
            (None, Some(0), _) => String::new(),
            (None, Some(code), _) => format!("exit code {code}"),
            (None, None, signal) => format!("killed by signal {}", signal.unwrap_or(0)),
        };
        Self {
            exit_code: report.exit_code.unwrap_or(0),
            signal: report.signal.unwrap_or(0),
            why,
            started: SystemTime::UNIX_EPOCH + Duration::from_nanos(report.started_unix_ns),
            took: report.duration(),
            ..self
        }
    }
}

/// Standard output and standard error of this process. The output of a task is written in one piece above the progress
/// display.
#[derive(Debug)]
pub(super) struct OutputWriter {
    out: BufWriter<File>,
    err: File,
    /// Progress display on the same terminal.
    bars: Option<MultiProgress>,
}

impl OutputWriter {
    pub fn new(bars: Option<MultiProgress>) -> anyhow::Result<Self> {
        let out = duplicate(io::stdout()).context("standard output is not open")?;
        let err = duplicate(io::stderr()).context("standard error is not open")?;
        Ok(Self { out: BufWriter::with_capacity(OUTPUT_BUFFER_BYTES, out), err, bars })
    }

    /// Writes the output of a task, each line after the tag if there is one. Returns the length of its standard output.
    pub fn write_output(&mut self, output: &CommandOutput, tag: Option<&[u8]>) -> io::Result<u64> {
        let (out_length, err_length) = output.stream_lengths();
        if out_length + err_length == 0 {
            return Ok(0);
        }
        self.write_above_progress(|out, err| {
            match tag {
                None => output.copy_stdout_to(out)?,
                Some(tag) => output.copy_stdout_to(&mut LineTagger::new(out, tag))?,
            };
            if err_length > 0 {
                // Keeps the order if both streams go to the same place.
                out.flush()?;
                // A closed standard error does not stop the run.
                let _ = match tag {
                    None => output.copy_stderr_to(err),
                    Some(tag) => output.copy_stderr_to(&mut LineTagger::new(err, tag)),
                };
            }
            Ok(())
        })?;
        Ok(out_length)
    }

    /// Writes one line, such as a result.
    pub fn write_line(&mut self, bytes: &[u8], tag: Option<&[u8]>) -> io::Result<()> {
        self.write_above_progress(|out, _| {
            if let Some(tag) = tag {
                out.write_all(tag)?;
            }
            out.write_all(bytes)?;
            out.write_all(b"\n")
        })
    }

    /// Writes the standard error of a worker.
    pub fn write_stderr(&mut self, bytes: &[u8]) {
        // A closed standard error does not stop the run.
        let _ = self.write_above_progress(|_, err| err.write_all(bytes));
    }

    pub fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    fn write_above_progress(
        &mut self,
        write: impl FnOnce(&mut BufWriter<File>, &mut File) -> io::Result<()>,
    ) -> io::Result<()> {
        let Self { out, err, bars } = self;
        match bars {
            Some(bars) => bars.suspend(|| write(out, err).and_then(|()| out.flush())),
            None => write(out, err),
        }
    }
}

fn duplicate(stream: impl AsFd) -> io::Result<File> {
    stream.as_fd().try_clone_to_owned().map(File::from)
}

/// Writer that prefixes each line with a tag.
struct LineTagger<'a, W> {
    to: &'a mut W,
    tag: &'a [u8],
    is_at_start: bool,
}

impl<'a, W: Write> LineTagger<'a, W> {
    fn new(to: &'a mut W, tag: &'a [u8]) -> Self {
        Self { to, tag, is_at_start: true }
    }
}

impl<W: Write> Write for LineTagger<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            if self.is_at_start {
                self.to.write_all(self.tag)?;
            }
            self.to.write_all(line)?;
            self.is_at_start = line.ends_with(b"\n");
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Returns the `--json` event of a started task.
pub(super) fn started_event(task: &MapTask, worker: WorkerId) -> Value {
    json!({"event": "started", "seq": task.seq, "argument": task.argument(), "worker": worker.0 + 1})
}

/// Returns the event of a task that failed and is retried.
pub(super) fn retried_event(task: &MapTask, worker: WorkerId, outcome: &TaskOutcome) -> Value {
    let outcome = match outcome {
        TaskOutcome::TimedOut(_) => TaskVerdict::TimedOut,
        TaskOutcome::WorkerLost(_) => TaskVerdict::WorkerLost,
        _ => TaskVerdict::Failed,
    };
    json!({"event": "retried", "seq": task.seq, "worker": worker.0 + 1, "outcome": outcome})
}

/// Returns the event of an ended task.
pub(super) fn over_event(task: &MapTask, worker: Option<WorkerId>, tries: u32, report: &TaskReport) -> Value {
    let started = report.started.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    json!({
        "event": "over", "seq": task.seq, "argument": task.argument(), "command": String::from_utf8_lossy(&task.shown),
        "worker": worker.map(|worker| worker.0 + 1), "outcome": report.verdict, "exit_code": report.exit_code,
        "signal": report.signal, "why": report.why, "tries": tries, "started": rounded_secs(started), "seconds": rounded_secs(report.took),
    })
}

/// Returns an event about a worker.
pub(super) fn worker_event(event: &str, worker: WorkerId, why: Option<&str>) -> Value {
    json!({"event": event, "worker": worker.0 + 1, "why": why})
}

/// Returns the last event, the summary.
pub(super) fn summary_event(stats: &RunStats, skipped: u64, took: Duration, exit_code: u8) -> Value {
    json!({
        "event": "summary", "completed": stats.completed, "failed": stats.failed, "timeouts": stats.timeouts,
        "lost": stats.lost, "cancelled": stats.cancelled, "retried": stats.retried, "skipped": skipped,
        "seconds": rounded_secs(took), "exit_code": exit_code,
    })
}

/// Adds the output of a task, up to [`MAX_EVENT_OUTPUT_BYTES`] per stream.
pub(super) fn add_output(event: &mut Value, output: &CommandOutput) -> io::Result<()> {
    let (out_length, err_length) = output.stream_lengths();
    let (mut out, mut err) = (TruncatedBuffer::default(), TruncatedBuffer::default());
    output.copy_stdout_to(&mut out)?;
    output.copy_stderr_to(&mut err)?;
    (event["stdout"], event["stdout_bytes"]) = (out.text(), out_length.into());
    (event["stderr"], event["stderr_bytes"]) = (err.text(), err_length.into());
    Ok(())
}

fn rounded_secs(time: Duration) -> f64 {
    (time.as_secs_f64() * 1000.0).round() / 1000.0
}

/// Writer that keeps the first [`MAX_EVENT_OUTPUT_BYTES`].
#[derive(Default)]
struct TruncatedBuffer(Vec<u8>);

impl TruncatedBuffer {
    fn text(&self) -> Value {
        String::from_utf8_lossy(&self.0).into()
    }
}

impl Write for TruncatedBuffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = MAX_EVENT_OUTPUT_BYTES.saturating_sub(self.0.len()).min(bytes.len());
        self.0.extend_from_slice(&bytes[..room]);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// First failures of a run, in a few lines each.
#[derive(Debug, Default)]
pub(super) struct FailureList {
    shown: Vec<String>,
    more: u64,
}

impl FailureList {
    pub fn add(&mut self, task: &MapTask, report: &TaskReport, output: Option<&CommandOutput>) {
        if self.shown.len() == MAX_SHOWN_FAILURES {
            self.more += 1;
            return;
        }
        let mut why = report.why.lines();
        let mut text =
            format!("task {} ({}): {}", task.seq, sanitize(&task.argument()), sanitize(why.next().unwrap_or_default()));
        let wrote = output.map(|output| output.stderr_tail(STDERR_TAIL_BYTES)).unwrap_or_default();
        let lines: Vec<&str> = why.chain(wrote.lines()).collect();
        for line in &lines[lines.len().saturating_sub(STDERR_TAIL_LINES)..] {
            text.push_str("\n    ");
            text.push_str(&sanitize(line));
        }
        self.shown.push(text);
    }

    /// Returns the lines to print.
    pub fn lines(self) -> Vec<String> {
        let more = (self.more > 0).then(|| format!("and {} more failed", self.more));
        self.shown.into_iter().chain(more).collect()
    }
}

/// Formats the final summary.
pub(super) fn last_line(stats: &RunStats, skipped: u64, took: Duration) -> String {
    let mut text = format!("done {}, failed {}, timeouts {}", stats.completed, stats.failed, stats.timeouts);
    for (count, what) in [(stats.cancelled, "cancelled"), (stats.retried, "retried"), (skipped, "skipped")] {
        if count > 0 {
            text.push_str(&format!(", {what} {count}"));
        }
    }
    let rate = if took.is_zero() { 0.0 } else { finished_tasks(stats) as f64 / took.as_secs_f64() };
    text + &format!(", {}/s in {}", format_rate(rate), format_short_duration(took))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_is_tagged_however_the_writes_are_split() {
        let mut to = Vec::new();
        let mut tagged = LineTagger::new(&mut to, b"a\t");
        for piece in [&b"on"[..], b"e\ntwo\n", b"", b"\nthr", b"ee"] {
            tagged.write_all(piece).unwrap();
        }
        assert_eq!(to, b"a\tone\na\ttwo\na\t\na\tthree");
    }
}
