//! Events as lines of JSON, for `--json`.

use std::io::{self, Write};
use std::time::{Duration, SystemTime};

use gpupool_dispatch::command::TaskOutput;
use gpupool_dispatch::{Outcome, Stats, WorkerId};
use serde_json::{Value, json};

use super::ending::{Ending, How};
use super::limits::EVENT_BYTES;
use super::tasks::Task;

/// A task is worked on.
pub(super) fn started(task: &Task, worker: WorkerId) -> Value {
    json!({"event": "started", "seq": task.seq, "argument": task.argument(), "worker": worker.0 + 1})
}

/// A task failed and is tried again.
pub(super) fn retried(task: &Task, worker: WorkerId, outcome: &Outcome) -> Value {
    let outcome = match outcome {
        Outcome::TimedOut(_) => How::TimedOut,
        Outcome::WorkerLost(_) => How::WorkerLost,
        _ => How::Failed,
    };
    json!({"event": "retried", "seq": task.seq, "worker": worker.0 + 1, "outcome": outcome})
}

/// A task is over.
pub(super) fn over(task: &Task, worker: Option<WorkerId>, tries: u32, ending: &Ending) -> Value {
    let started = ending.started.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    json!({
        "event": "over", "seq": task.seq, "argument": task.argument(), "command": String::from_utf8_lossy(&task.shown),
        "worker": worker.map(|worker| worker.0 + 1), "outcome": ending.how, "exit_code": ending.exit_code,
        "signal": ending.signal, "why": ending.why, "tries": tries, "started": millis(started), "seconds": millis(ending.took),
    })
}

/// Something about a worker.
pub(super) fn worker(event: &str, worker: WorkerId, why: Option<&str>) -> Value {
    json!({"event": event, "worker": worker.0 + 1, "why": why})
}

/// The last line.
pub(super) fn summary(stats: &Stats, skipped: u64, took: Duration, exit_code: u8) -> Value {
    json!({
        "event": "summary", "completed": stats.completed, "failed": stats.failed, "timeouts": stats.timeouts,
        "lost": stats.lost, "cancelled": stats.cancelled, "retried": stats.retried, "skipped": skipped,
        "seconds": millis(took), "exit_code": exit_code,
    })
}

/// Adds what a task wrote, as text, as much of it as an event holds.
pub(super) fn add_output(event: &mut Value, output: &TaskOutput) -> io::Result<()> {
    let (out_length, err_length) = output.lengths();
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
