//! The end: what failed, why, and how many there were.

use std::time::Duration;

use gpupool_dispatch::Stats;
use gpupool_dispatch::command::TaskOutput;

use super::ending::Ending;
use super::limits::{FAILURES_TOLD, TAIL_BYTES, TAIL_LINES};
use super::progress::per_second;
use super::tasks::Task;
use crate::text::clean;
use crate::units::shown_finely;

/// The first failures, each in a few lines.
#[derive(Debug, Default)]
pub(super) struct Failures {
    told: Vec<String>,
    more: u64,
}

impl Failures {
    pub fn add(&mut self, task: &Task, ending: &Ending, output: Option<&TaskOutput>) {
        if self.told.len() == FAILURES_TOLD {
            self.more += 1;
            return;
        }
        let mut why = ending.why.lines();
        let mut text =
            format!("task {} ({}): {}", task.seq, clean(&task.argument()), clean(why.next().unwrap_or_default()));
        let said: Vec<String> = why.map(Into::into).collect();
        let wrote = output.map(|output| output.stderr_tail(TAIL_BYTES)).unwrap_or_default();
        let lines: Vec<&str> = said.iter().map(String::as_str).chain(wrote.lines()).collect();
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

/// The last line.
pub(super) fn last_line(stats: &Stats, skipped: u64, took: Duration) -> String {
    let mut text = format!("done {}, failed {}, timeouts {}", stats.completed, stats.failed, stats.timeouts);
    for (count, what) in [(stats.cancelled, "cancelled"), (stats.retried, "retried"), (skipped, "skipped")] {
        if count > 0 {
            text.push_str(&format!(", {what} {count}"));
        }
    }
    let over = stats.completed + stats.failed + stats.timeouts;
    let rate = if took.is_zero() { 0.0 } else { over as f64 / took.as_secs_f64() };
    text + &format!(", {}/s in {}", per_second(rate), shown_finely(took))
}
