//! What is told of tasks: how each ended in words and numbers, events for `--json`, the output of tasks, and the summary.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::fd::AsFd;
use std::time::{Duration, SystemTime};

use anyhow::Context;
use gpupool_dispatch::command::{CommandOutput, CommandReport};
use gpupool_dispatch::{RunStats, TaskEnd, TaskOutcome, WorkerExitCause, WorkerId};
use indicatif::MultiProgress;
use serde_json::{Value, json};

use super::feeder::Task;
use super::progress::{over, per_second};
use crate::terminal::clean;
use crate::units::shown_finely;

/// Small outputs are collected up to this.
const COLLECTED_BYTES: usize = 1 << 16;
/// Of what a task wrote, this much stands in an event of `--json`.
const EVENT_BYTES: usize = 64 << 10;
/// Failures that are told at the end; the rest is counted.
const FAILURES_TOLD: usize = 5;
/// Of what a failed task wrote last to its standard error, this much is told.
const TAIL_BYTES: u64 = 2_048;
/// The same in lines.
const TAIL_LINES: usize = 5;

/// How a task ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ending {
    pub how: How,
    /// -1 where it did not end by itself.
    pub exit_code: i32,
    /// 0 where none ended it.
    pub signal: i32,
    /// What went wrong; nothing where it is done.
    pub why: String,
    pub started: SystemTime,
    pub took: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum How {
    Done,
    Failed,
    TimedOut,
    WorkerLost,
    Cancelled,
}

impl Ending {
    pub fn of(over: &TaskEnd, is_command: bool) -> Self {
        let took = over.started.map_or(Duration::ZERO, |started| over.finished.saturating_duration_since(started));
        let started = SystemTime::now().checked_sub(took + over.finished.elapsed()).unwrap_or(SystemTime::UNIX_EPOCH);
        let ending = |how, exit_code, why| Self { how, exit_code, signal: 0, why, started, took };
        match &over.outcome {
            TaskOutcome::Done(said) => ending(How::Done, 0, String::new()).told(is_command.then_some(said)),
            TaskOutcome::Failed(said) if is_command => ending(How::Failed, 1, String::new()).told(Some(said)),
            TaskOutcome::Failed(said) => ending(How::Failed, 1, String::from_utf8_lossy(said).into_owned()),
            TaskOutcome::TimedOut(limit) => {
                ending(How::TimedOut, -1, format!("it took longer than {}", shown_finely(*limit)))
            }
            TaskOutcome::WorkerLost(loss) => {
                let signal = if let WorkerExitCause::Signalled(signal) = loss.cause { signal } else { 0 };
                Self { signal, ..ending(How::WorkerLost, -1, loss.to_string()) }
            }
            TaskOutcome::Cancelled => ending(How::Cancelled, -1, "it was cancelled".into()),
        }
    }

    /// With what the runner of commands says.
    fn told(self, said: Option<&bytes::Bytes>) -> Self {
        let Some(report) = said.and_then(|said| CommandReport::parse(said)) else {
            let why = said.filter(|_| self.how != How::Done).map(|said| String::from_utf8_lossy(said).into_owned());
            return Self { why: why.unwrap_or_default(), ..self };
        };
        let why = match (&report.not_started, report.exit_code, report.signal) {
            (Some(why), ..) => format!("it could not be started: {why}"),
            (None, Some(0), _) => String::new(),
            (None, Some(code), _) => format!("exit code {code}"),
            (None, None, signal) => format!("it was killed by signal {}", signal.unwrap_or(0)),
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

/// Our standard output and error: what tasks wrote goes out here, a task's whole output at once, above the progress where
/// there is one.
#[derive(Debug)]
pub(super) struct Outlet {
    out: BufWriter<File>,
    err: File,
    /// Lines of progress on the same terminal.
    bars: Option<MultiProgress>,
}

impl Outlet {
    pub fn new(bars: Option<MultiProgress>) -> anyhow::Result<Self> {
        let out = own(io::stdout()).context("standard output is not open")?;
        let err = own(io::stderr()).context("standard error is not open")?;
        Ok(Self { out: BufWriter::with_capacity(COLLECTED_BYTES, out), err, bars })
    }

    /// Writes what a task's command wrote, each line after the tag where there is one. How much of it was standard output.
    pub fn output(&mut self, output: &CommandOutput, tag: Option<&[u8]>) -> io::Result<u64> {
        let (out_length, err_length) = output.stream_lengths();
        if out_length + err_length == 0 {
            return Ok(0);
        }
        self.above(|out, err| {
            match tag {
                None => output.copy_stdout_to(out)?,
                Some(tag) => output.copy_stdout_to(&mut Tagged::new(out, tag))?,
            };
            if err_length > 0 {
                // In the order of time where both go to one place.
                out.flush()?;
                // Nobody may be reading it, which is no reason to stop.
                let _ = match tag {
                    None => output.copy_stderr_to(err),
                    Some(tag) => output.copy_stderr_to(&mut Tagged::new(err, tag)),
                };
            }
            Ok(())
        })?;
        Ok(out_length)
    }

    /// Writes a result, or whatever else is a line.
    pub fn line(&mut self, bytes: &[u8], tag: Option<&[u8]>) -> io::Result<()> {
        self.above(|out, _| {
            if let Some(tag) = tag {
                out.write_all(tag)?;
            }
            out.write_all(bytes)?;
            out.write_all(b"\n")
        })
    }

    /// Writes to standard error what a worker wrote there.
    pub fn words(&mut self, bytes: &[u8]) {
        // Nobody may be reading it, which is no reason to stop.
        let _ = self.above(|_, err| err.write_all(bytes));
    }

    /// Lets go of what was collected.
    pub fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    fn above(&mut self, write: impl FnOnce(&mut BufWriter<File>, &mut File) -> io::Result<()>) -> io::Result<()> {
        let Self { out, err, bars } = self;
        match bars {
            Some(bars) => bars.suspend(|| write(out, err).and_then(|()| out.flush())),
            None => write(out, err),
        }
    }
}

fn own(stream: impl AsFd) -> io::Result<File> {
    stream.as_fd().try_clone_to_owned().map(File::from)
}

/// Puts a tag before each line.
struct Tagged<'a, W> {
    to: &'a mut W,
    tag: &'a [u8],
    is_at_start: bool,
}

impl<'a, W: Write> Tagged<'a, W> {
    fn new(to: &'a mut W, tag: &'a [u8]) -> Self {
        Self { to, tag, is_at_start: true }
    }
}

impl<W: Write> Write for Tagged<'_, W> {
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

/// Events as lines of JSON, for `--json`. A task is worked on.
pub(super) fn started_event(task: &Task, worker: WorkerId) -> Value {
    json!({"event": "started", "seq": task.seq, "argument": task.argument(), "worker": worker.0 + 1})
}

/// A task failed and is tried again.
pub(super) fn retried_event(task: &Task, worker: WorkerId, outcome: &TaskOutcome) -> Value {
    let outcome = match outcome {
        TaskOutcome::TimedOut(_) => How::TimedOut,
        TaskOutcome::WorkerLost(_) => How::WorkerLost,
        _ => How::Failed,
    };
    json!({"event": "retried", "seq": task.seq, "worker": worker.0 + 1, "outcome": outcome})
}

/// A task is over.
pub(super) fn over_event(task: &Task, worker: Option<WorkerId>, tries: u32, ending: &Ending) -> Value {
    let started = ending.started.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    json!({
        "event": "over", "seq": task.seq, "argument": task.argument(), "command": String::from_utf8_lossy(&task.shown),
        "worker": worker.map(|worker| worker.0 + 1), "outcome": ending.how, "exit_code": ending.exit_code,
        "signal": ending.signal, "why": ending.why, "tries": tries, "started": millis(started), "seconds": millis(ending.took),
    })
}

/// Something about a worker.
pub(super) fn worker_event(event: &str, worker: WorkerId, why: Option<&str>) -> Value {
    json!({"event": event, "worker": worker.0 + 1, "why": why})
}

/// The last event.
pub(super) fn summary_event(stats: &RunStats, skipped: u64, took: Duration, exit_code: u8) -> Value {
    json!({
        "event": "summary", "completed": stats.completed, "failed": stats.failed, "timeouts": stats.timeouts,
        "lost": stats.lost, "cancelled": stats.cancelled, "retried": stats.retried, "skipped": skipped,
        "seconds": millis(took), "exit_code": exit_code,
    })
}

/// Adds what a task wrote, as text, as much of it as an event holds.
pub(super) fn add_output(event: &mut Value, output: &CommandOutput) -> io::Result<()> {
    let (out_length, err_length) = output.stream_lengths();
    let (mut out, mut err) = (Beginning::default(), Beginning::default());
    output.copy_stdout_to(&mut out)?;
    output.copy_stderr_to(&mut err)?;
    (event["stdout"], event["stdout_bytes"]) = (out.text(), out_length.into());
    (event["stderr"], event["stderr_bytes"]) = (err.text(), err_length.into());
    Ok(())
}

fn millis(time: Duration) -> f64 {
    (time.as_secs_f64() * 1000.0).round() / 1000.0
}

/// Keeps the beginning of what is written.
#[derive(Default)]
struct Beginning(Vec<u8>);

impl Beginning {
    fn text(&self) -> Value {
        String::from_utf8_lossy(&self.0).into()
    }
}

impl Write for Beginning {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = EVENT_BYTES.saturating_sub(self.0.len()).min(bytes.len());
        self.0.extend_from_slice(&bytes[..room]);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The first failures, each in a few lines.
#[derive(Debug, Default)]
pub(super) struct Failures {
    told: Vec<String>,
    more: u64,
}

impl Failures {
    pub fn add(&mut self, task: &Task, ending: &Ending, output: Option<&CommandOutput>) {
        if self.told.len() == FAILURES_TOLD {
            self.more += 1;
            return;
        }
        let mut why = ending.why.lines();
        let mut text =
            format!("task {} ({}): {}", task.seq, clean(&task.argument()), clean(why.next().unwrap_or_default()));
        let wrote = output.map(|output| output.stderr_tail(TAIL_BYTES)).unwrap_or_default();
        let lines: Vec<&str> = why.chain(wrote.lines()).collect();
        for line in &lines[lines.len().saturating_sub(TAIL_LINES)..] {
            text.push_str("\n    ");
            text.push_str(&clean(line));
        }
        self.told.push(text);
    }

    /// What is to be said of them.
    pub fn lines(self) -> Vec<String> {
        let more = (self.more > 0).then(|| format!("and {} more failed", self.more));
        self.told.into_iter().chain(more).collect()
    }
}

/// The last line for people.
pub(super) fn last_line(stats: &RunStats, skipped: u64, took: Duration) -> String {
    let mut text = format!("done {}, failed {}, timeouts {}", stats.completed, stats.failed, stats.timeouts);
    for (count, what) in [(stats.cancelled, "cancelled"), (stats.retried, "retried"), (skipped, "skipped")] {
        if count > 0 {
            text.push_str(&format!(", {what} {count}"));
        }
    }
    let rate = if took.is_zero() { 0.0 } else { over(stats) as f64 / took.as_secs_f64() };
    text + &format!(", {}/s in {}", per_second(rate), shown_finely(took))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_has_its_tag_however_it_is_cut() {
        let mut to = Vec::new();
        let mut tagged = Tagged::new(&mut to, b"a\t");
        for piece in [&b"on"[..], b"e\ntwo\n", b"", b"\nthr", b"ee"] {
            tagged.write_all(piece).unwrap();
        }
        assert_eq!(to, b"a\tone\na\ttwo\na\t\na\tthree");
    }
}
