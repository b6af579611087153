//! Progress of a run: at a terminal a table that is redrawn in place, elsewhere a line at intervals. The thread
//! ends with the run and clears the table.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::IsTerminal;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use gpupool_dispatch::{RunStats, WorkerState, WorkerStats};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::task_feeder::{MapTask, OpenTasks};
use super::{MapContext, lock};
use crate::terminal::{TableColumn, TerminalFormat, TextStyle, TextTable, sanitize, truncate};
use crate::units::format_duration;

/// Interval between two redraws at a terminal.
const DRAW_INTERVAL: Duration = Duration::from_millis(100);
/// Interval between two lines elsewhere.
const LINE_INTERVAL: Duration = Duration::from_secs(10);
/// Period over which a rate is averaged.
const RATE_WINDOW: Duration = Duration::from_secs(10);
/// Interval between two samples of a count.
const RATE_SAMPLE_INTERVAL: Duration = Duration::from_millis(500);

/// Form of the progress display.
#[derive(Debug, Clone)]
pub(super) enum ProgressMode {
    /// No progress.
    None,
    /// One line at a time.
    Lines,
    /// Table that is redrawn in place.
    Bars(MultiProgress),
}

impl ProgressMode {
    /// Selects the form that suits standard error.
    pub fn detect(is_wanted: bool, may_draw: bool) -> Self {
        let is_dumb = std::env::var_os("TERM").is_none_or(|terminal| terminal == "dumb");
        match (is_wanted, may_draw && std::io::stderr().is_terminal() && !is_dumb) {
            (false, _) => Self::None,
            (true, false) => Self::Lines,
            (true, true) => Self::Bars(MultiProgress::with_draw_target(ProgressDrawTarget::stderr())),
        }
    }

    /// Returns the redrawn display, if any.
    pub fn bars(&self) -> Option<MultiProgress> {
        match self {
            Self::Bars(bars) => Some(bars.clone()),
            _ => None,
        }
    }
}

/// Wait status of the GPUs that are not granted yet, by slot.
#[derive(Debug, Clone, Default)]
pub(super) struct WaitingGpus(Arc<Mutex<BTreeMap<usize, String>>>);

impl WaitingGpus {
    /// Sets or removes the status of a slot. Returns whether it changed.
    pub fn set_text(&self, place: usize, text: Option<String>) -> bool {
        let mut waiting = lock(&self.0);
        let before = waiting.remove(&place);
        let is_new = before != text;
        if let Some(text) = text {
            waiting.insert(place, text);
        }
        is_new
    }

    fn distinct_texts(&self) -> Vec<String> {
        let waiting = lock(&self.0);
        let mut texts: Vec<String> = waiting.values().cloned().collect();
        texts.dedup();
        texts
    }
}

/// Shows progress until the returned guard is dropped.
pub(super) fn start_progress(style: ProgressMode, context: MapContext) -> anyhow::Result<Option<PeriodicThread>> {
    let name = "gpupool-progress";
    Ok(match style {
        ProgressMode::None => None,
        ProgressMode::Lines => Some(PeriodicThread::start(name, move |end| print_lines(&context, end))?),
        ProgressMode::Bars(bars) => Some(PeriodicThread::start(name, move |end| draw_bars(&context, &bars, end))?),
    })
}

fn print_lines(context: &MapContext, end: &RunEndSignal) {
    let mut rates = TaskRates::default();
    rates.rate("", 0, Instant::now());
    while !end.wait(LINE_INTERVAL) {
        let stats = context.run_handle.stats();
        let rate = rates.rate("", finished_tasks(&stats), Instant::now());
        let total = *lock(&context.total);
        context.printer.warn(summary_line(&stats, total, rate));
    }
}

fn draw_bars(context: &MapContext, bars: &MultiProgress, end: &RunEndSignal) {
    let mut rates = TaskRates::default();
    // One bar with many lines: separate bars could be drawn beside older lines of other widths.
    let bar = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{msg}") {
        bar.set_style(style);
    }
    let bar = bars.add(bar);
    loop {
        let (stats, waiting) = (context.run_handle.stats(), context.waiting.distinct_texts());
        let page =
            ProgressPage { stats: &stats, tasks: &context.tasks, total: *lock(&context.total), waiting: &waiting };
        let (format, height) = stderr_format();
        let lines = page.render_lines(&mut rates, Instant::now(), format, height);
        bar.set_message(lines.join("\n"));
        if end.wait(DRAW_INTERVAL) {
            // Cleared: the final summary replaces it.
            let _ = bars.clear();
            return;
        }
    }
}

/// Returns format and height of the terminal. The last column stays free because writing there makes some terminals
/// start a new line.
fn stderr_format() -> (TerminalFormat, usize) {
    let size = rustix::termios::tcgetwinsize(std::io::stderr()).ok();
    let (width, height) = size.map_or((0, 0), |size| (usize::from(size.ws_col), usize::from(size.ws_row)));
    let or = |value, usual| if value == 0 { usual } else { value };
    (TerminalFormat { width: Some(or(width, 80) - 1), colours: false }, or(height, 24) - 1)
}

/// Content of the display: one row per GPU, or per worker without a GPU, and a summary line.
struct ProgressPage<'a> {
    stats: &'a RunStats,
    tasks: &'a OpenTasks,
    /// Number of tasks, if known.
    total: Option<u64>,
    /// Wait status of requested GPUs.
    waiting: &'a [String],
}

/// Workers in one row: those of a GPU, or one without a GPU.
struct ProgressRow<'a> {
    name: String,
    workers: Vec<&'a WorkerStats>,
}

impl ProgressPage<'_> {
    /// Renders at most `most` lines.
    fn render_lines(&self, rates: &mut TaskRates, now: Instant, format: TerminalFormat, most: usize) -> Vec<String> {
        let rows = self.group_rows();
        // Besides the rows there are the header, the waiting GPUs, the summary and the count of hidden rows.
        let room = most.saturating_sub(2 + self.waiting.len());
        let fitting = if rows.len() <= room { rows.len() } else { room.saturating_sub(1).max(1) };
        let mut lines: Vec<String> = Vec::new();
        if !rows.is_empty() {
            lines.extend(self.render_table(&rows[..fitting], rates, now).render(format).lines().map(Into::into));
        }
        if rows.len() > fitting {
            lines.push(format!("… and {} more", rows.len() - fitting));
        }
        let width = format.width.unwrap_or(usize::MAX);
        lines.extend(self.waiting.iter().map(|text| truncate(&sanitize(text), width)));
        let rate = rates.rate("", finished_tasks(self.stats), now);
        lines.push(truncate(&summary_line(self.stats, self.total, rate), width));
        lines
    }

    fn render_table(&self, rows: &[ProgressRow<'_>], rates: &mut TaskRates, now: Instant) -> TextTable<7> {
        let has_gpus = rows.iter().flat_map(|row| &row.workers).any(|worker| !worker.gpu_ids.is_empty());
        let mut table = TextTable::new([
            TableColumn::text(if has_gpus { "GPU" } else { "WORKER" }),
            TableColumn::text("STATE"),
            TableColumn::number("DONE"),
            TableColumn::number("FAILED").drop_priority(2),
            TableColumn::number("TIMEOUTS").drop_priority(2),
            TableColumn::number("RATE").drop_priority(1),
            TableColumn::text("TASK").min_width(10),
        ]);
        for row in rows {
            let sum = |of: fn(&WorkerStats) -> u64| row.workers.iter().map(|worker| of(worker)).sum::<u64>();
            let counts = [sum(|worker| worker.completed), sum(|worker| worker.failed), sum(|worker| worker.timeouts)];
            let rate = format_rate(rates.rate(&row.name, counts.iter().sum(), now));
            let [done, failed, timeouts] = counts.map(|count| count.to_string());
            table.add_row(
                [row.name.clone(), row_state(row), done, failed, timeouts, rate, self.longest_task(row, now)],
                TextStyle::Plain,
            );
        }
        table
    }

    fn group_rows(&self) -> Vec<ProgressRow<'_>> {
        let mut rows: Vec<ProgressRow<'_>> = Vec::new();
        for worker in &self.stats.workers {
            let ids: Vec<String> = worker.gpu_ids.iter().map(ToString::to_string).collect();
            let name = if ids.is_empty() { (worker.id.0 + 1).to_string() } else { ids.join("+") };
            match rows.iter_mut().find(|row| row.name == name) {
                Some(row) => row.workers.push(worker),
                None => rows.push(ProgressRow { name, workers: vec![worker] }),
            }
        }
        // By GPU instead of in the order of the grants.
        rows.sort_by_key(|row| row.workers.first().map(|worker| (worker.gpu_ids.clone(), worker.id)));
        rows
    }

    /// Returns the longest-running task and its run time.
    fn longest_task(&self, row: &ProgressRow<'_>, now: Instant) -> String {
        let running = row.workers.iter().filter_map(|worker| Some((worker.task_since?, worker.task?)));
        let Some((since, task)) = running.min() else { return String::new() };
        let name = lock(self.tasks).get(&task).map(MapTask::argument).unwrap_or_default();
        match now.saturating_duration_since(since) {
            short if short < Duration::from_secs(1) => name,
            long => format!("{} · {name}", format_duration(long)),
        }
    }
}

/// Returns the state of a row: `busy`, or `busy 2 of 3`.
fn row_state(row: &ProgressRow<'_>) -> String {
    let count = |state| row.workers.iter().filter(|worker| worker.state == state).count();
    let order = [
        (WorkerState::Busy, "busy"),
        (WorkerState::SettingUp, "setting up"),
        (WorkerState::Starting, "starting"),
        (WorkerState::Idle, "idle"),
        (WorkerState::Ending, "ending"),
        (WorkerState::Gone, "gone"),
    ];
    let Some((state, name)) = order.into_iter().find(|(state, _)| count(*state) > 0) else { return String::new() };
    match (count(state), row.workers.len()) {
        (all, same) if all == same => name.into(),
        (some, of) => format!("{name} {some} of {of}"),
    }
}

/// Returns the number of finished tasks, without cancelled ones.
pub(super) fn finished_tasks(stats: &RunStats) -> u64 {
    stats.completed + stats.failed + stats.timeouts
}

/// Formats the summary line.
fn summary_line(stats: &RunStats, total: Option<u64>, rate: f64) -> String {
    let of = total.map(|total| format!(" of {total}")).unwrap_or_default();
    let RunStats { completed, failed, timeouts, .. } = stats;
    let mut text = format!("done {completed}{of}, failed {failed}, timeouts {timeouts}, {}/s", format_rate(rate));
    let left = total.map(|total| total.saturating_sub(finished_tasks(stats))).filter(|left| *left > 0 && rate > 0.0);
    if let Some(left) = left.and_then(|left| Duration::try_from_secs_f64(left as f64 / rate).ok()) {
        text.push_str(&format!(", {} left", format_duration(left)));
    }
    text
}

pub(super) fn format_rate(rate: f64) -> String {
    if rate >= 100.0 { format!("{rate:.0}") } else { format!("{rate:.1}") }
}

/// Rates by name over the last [`RATE_WINDOW`].
#[derive(Debug, Default)]
struct TaskRates {
    counts: HashMap<String, VecDeque<(Instant, u64)>>,
}

impl TaskRates {
    /// Adds a sample and returns the rate per second.
    fn rate(&mut self, name: &str, count: u64, now: Instant) -> f64 {
        let counts = self.counts.entry(name.to_owned()).or_default();
        if counts.back().is_none_or(|(at, _)| now.saturating_duration_since(*at) >= RATE_SAMPLE_INTERVAL) {
            counts.push_back((now, count));
        }
        while counts.len() > 2 && counts.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) > RATE_WINDOW)
        {
            counts.pop_front();
        }
        let Some((since, before)) = counts.front() else { return 0.0 };
        let secs = now.saturating_duration_since(*since).as_secs_f64();
        if secs > 0.0 { count.saturating_sub(*before) as f64 / secs } else { 0.0 }
    }
}

/// Thread that repeats its work until this is dropped.
#[derive(Debug)]
pub(super) struct PeriodicThread {
    run_guard: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Signal that ends a [`PeriodicThread`].
#[derive(Debug)]
pub(super) struct RunEndSignal(Receiver<()>);

impl PeriodicThread {
    pub fn start(name: &str, work: impl FnOnce(&RunEndSignal) + Send + 'static) -> anyhow::Result<Self> {
        // The channel carries no message; dropping the sender is the signal.
        let (run_guard, end) = sync_channel(0);
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || work(&RunEndSignal(end)));
        Ok(Self {
            run_guard: Some(run_guard),
            thread: Some(thread.with_context(|| format!("cannot start the thread {name}"))?),
        })
    }
}

impl Drop for PeriodicThread {
    fn drop(&mut self) {
        drop(self.run_guard.take());
        // A panic of the thread was reported already.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl RunEndSignal {
    /// Waits for `time`. Returns whether the thread should end.
    pub fn wait(&self, time: Duration) -> bool {
        self.0.recv_timeout(time) == Err(RecvTimeoutError::Disconnected)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use gpupool_dispatch::{TaskId, WorkerId};

    use super::super::task_feeder::MapTask;
    use super::*;
    use crate::terminal::display_width;

    fn worker(id: u32, gpu: Option<u32>, state: WorkerState, task: Option<(TaskId, Instant)>) -> WorkerStats {
        WorkerStats {
            id: WorkerId(id),
            gpu_ids: gpu.into_iter().collect(),
            state,
            pid: None,
            task: task.map(|(task, _)| task),
            task_since: task.map(|(_, since)| since),
            completed: 100 + u64::from(id),
            failed: 1,
            timeouts: 0,
            replaced: 0,
        }
    }

    fn page(workers: Vec<WorkerStats>, width: usize, most: usize) -> Vec<String> {
        let (started_at, tasks) = (Instant::now(), OpenTasks::default());
        let argument = Bytes::from_static("data/ärger\u{1b}[2J-with-a-long-name-0001.wav".as_bytes());
        lock(&tasks).insert(TaskId(7), MapTask { seq: 8, arguments: vec![argument], shown: Bytes::new() });
        let mut stats = RunStats { completed: 203, failed: 2, timeouts: 0, workers, ..RunStats::default() };
        let mut rates = TaskRates::default();
        let format = TerminalFormat { width: Some(width), colours: false };
        let lines = |stats: &RunStats, rates: &mut TaskRates, now| {
            ProgressPage { stats, tasks: &tasks, total: Some(1000), waiting: &[] }
                .render_lines(rates, now, format, most)
        };
        lines(&stats, &mut rates, started_at);
        for worker in &mut stats.workers {
            worker.completed += 50;
            stats.completed += 50;
        }
        lines(&stats, &mut rates, started_at + Duration::from_secs(10))
    }

    #[test]
    fn each_gpu_has_a_row_and_the_run_a_summary_line() {
        let since = Instant::now() + Duration::from_secs(5);
        let workers = vec![
            worker(0, Some(0), WorkerState::Busy, Some((TaskId(7), since))),
            worker(1, Some(0), WorkerState::Idle, None),
            worker(2, Some(1), WorkerState::SettingUp, None),
        ];
        let lines = page(workers, 80, 24);
        let expected = [
            "GPU  STATE        DONE  FAILED  TIMEOUTS  RATE  TASK",
            "0    busy 1 of 2   301       2         0  10.0  5 s · data/ärger�[2J-with-a-lon…",
            "1    setting up    152       1         0   5.0",
            "done 353 of 1000, failed 2, timeouts 0, 15.0/s, 43 s left",
        ];
        assert_eq!(lines, expected, "{}", lines.join("\n"));
    }

    #[test]
    fn progress_fits_the_terminal() {
        for (width, most) in [(40, 4), (60, 10), (80, 24), (200, 50)] {
            let workers = (0..30).map(|id| worker(id, None, WorkerState::Idle, None)).collect();
            let lines = page(workers, width, most);
            assert!(lines.len() <= most.max(5), "{most}: {}", lines.join("\n"));
            assert!(lines.iter().all(|line| display_width(line) <= width), "{width}: {}", lines.join("\n"));
        }
    }

    #[test]
    fn a_rate_covers_the_last_seconds() {
        let (mut rates, started_at) = (TaskRates::default(), Instant::now());
        assert_eq!(rates.rate("x", 0, started_at), 0.0);
        assert_eq!(rates.rate("x", 10, started_at + Duration::from_secs(5)), 2.0);
        let mut last = 0.0;
        for second in 6..60 {
            last = rates.rate("x", 10, started_at + Duration::from_secs(second));
        }
        assert_eq!(last, 0.0, "no task finished recently");
    }
}
