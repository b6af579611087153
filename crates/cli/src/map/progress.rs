//! How a run goes, shown while it goes: at a terminal a few lines that are drawn anew, elsewhere a line from time to time.
//! Its thread ends, and the lines at the terminal are wiped, when the run is over.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::IsTerminal;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use gpupool_dispatch::{RunStats, WorkerState, WorkerStats};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::feeder::{OpenTasks, Task};
use super::{MapContext, lock};
use crate::terminal::{Column, Paint, Screen, Table, clean, cut};
use crate::units::shown;

/// How often progress is drawn at a terminal.
const DRAW_EVERY: Duration = Duration::from_millis(100);
/// How often a line tells of progress where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);
/// How far back a rate looks.
const WINDOW: Duration = Duration::from_secs(10);
/// How often a count is remembered.
const STEP: Duration = Duration::from_millis(500);

/// How progress is shown.
#[derive(Debug, Clone)]
pub(super) enum Style {
    /// Not at all.
    None,
    /// A line from time to time.
    Lines,
    /// Lines that are drawn anew.
    Bars(MultiProgress),
}

impl Style {
    /// What fits where standard error goes.
    pub fn here(is_wanted: bool, may_draw: bool) -> Self {
        let is_dumb = std::env::var_os("TERM").is_none_or(|terminal| terminal == "dumb");
        match (is_wanted, may_draw && std::io::stderr().is_terminal() && !is_dumb) {
            (false, _) => Self::None,
            (true, false) => Self::Lines,
            (true, true) => Self::Bars(MultiProgress::with_draw_target(ProgressDrawTarget::stderr())),
        }
    }

    /// The lines at the terminal, where there are any.
    pub fn bars(&self) -> Option<MultiProgress> {
        match self {
            Self::Bars(bars) => Some(bars.clone()),
            _ => None,
        }
    }
}

/// GPUs that are waited for, by place, and how that goes.
#[derive(Debug, Clone, Default)]
pub(super) struct Waiting(Arc<Mutex<BTreeMap<usize, String>>>);

impl Waiting {
    /// How it goes at this place; nothing, where it is not waited for. Whether that is new.
    pub fn set(&self, place: usize, text: Option<String>) -> bool {
        let mut waiting = lock(&self.0);
        let before = waiting.remove(&place);
        let is_new = before != text;
        if let Some(text) = text {
            waiting.insert(place, text);
        }
        is_new
    }

    fn texts(&self) -> Vec<String> {
        let waiting = lock(&self.0);
        let mut texts: Vec<String> = waiting.values().cloned().collect();
        texts.dedup();
        texts
    }
}

/// Shows a run's progress until what this gives is dropped.
pub(super) fn show(style: Style, shown: MapContext) -> anyhow::Result<Option<Ticking>> {
    let name = "gpupool-progress";
    Ok(match style {
        Style::None => None,
        Style::Lines => Some(Ticking::start(name, move |end| tell(&shown, end))?),
        Style::Bars(bars) => Some(Ticking::start(name, move |end| draw(&shown, &bars, end))?),
    })
}

fn tell(shown: &MapContext, end: &RunEnd) {
    let mut rates = Rates::default();
    rates.of("", 0, Instant::now());
    while !end.within(LINE_EVERY) {
        let stats = shown.remote.stats();
        let rate = rates.of("", over(&stats), Instant::now());
        let total = *lock(&shown.total);
        shown.voice.warn(summary(&stats, total, rate));
    }
}

fn draw(shown: &MapContext, bars: &MultiProgress, end: &RunEnd) {
    let mut rates = Rates::default();
    // One bar of many lines: with a bar for each, a line could be drawn beside older ones of other widths.
    let bar = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{msg}") {
        bar.set_style(style);
    }
    let bar = bars.add(bar);
    loop {
        let (stats, waiting) = (shown.remote.stats(), shown.waiting.texts());
        let page = Page { stats: &stats, tasks: &shown.tasks, total: *lock(&shown.total), waiting: &waiting };
        let (screen, height) = screen();
        let lines = page.lines(&mut rates, Instant::now(), screen, height);
        bar.set_message(lines.join("\n"));
        if end.within(DRAW_EVERY) {
            // Wiped: the last word is the summary's.
            let _ = bars.clear();
            return;
        }
    }
}

/// Where standard error is drawn to. The last column stays free: writing there makes some terminals begin a new line.
fn screen() -> (Screen, usize) {
    let size = rustix::termios::tcgetwinsize(std::io::stderr()).ok();
    let (width, height) = size.map_or((0, 0), |size| (usize::from(size.ws_col), usize::from(size.ws_row)));
    let or = |value, usual| if value == 0 { usual } else { value };
    (Screen { width: Some(or(width, 80) - 1), colours: false }, or(height, 24) - 1)
}

/// A row for each GPU, or for each worker where there is none, and a line for all of it. Made of numbers and names alone.
struct Page<'a> {
    stats: &'a RunStats,
    tasks: &'a OpenTasks,
    /// Tasks of this run, where that is known.
    total: Option<u64>,
    /// GPUs that are waited for, and how that goes.
    waiting: &'a [String],
}

/// Workers that have one line: those of a GPU, or one without.
struct Row<'a> {
    name: String,
    workers: Vec<&'a WorkerStats>,
}

impl Page<'_> {
    /// The lines, at most so many.
    fn lines(&self, rates: &mut Rates, now: Instant, screen: Screen, most: usize) -> Vec<String> {
        let rows = self.rows();
        // Beside the rows: their headings, what is waited for, all of it; and how many more there are.
        let room = most.saturating_sub(2 + self.waiting.len());
        let fitting = if rows.len() <= room { rows.len() } else { room.saturating_sub(1).max(1) };
        let mut lines: Vec<String> = Vec::new();
        if !rows.is_empty() {
            lines.extend(self.table(&rows[..fitting], rates, now).render(screen).lines().map(Into::into));
        }
        if rows.len() > fitting {
            lines.push(format!("… and {} more", rows.len() - fitting));
        }
        let width = screen.width.unwrap_or(usize::MAX);
        lines.extend(self.waiting.iter().map(|text| cut(&clean(text), width)));
        let rate = rates.of("", over(self.stats), now);
        lines.push(cut(&summary(self.stats, self.total, rate), width));
        lines
    }

    fn table(&self, rows: &[Row<'_>], rates: &mut Rates, now: Instant) -> Table<7> {
        let has_gpus = rows.iter().flat_map(|row| &row.workers).any(|worker| !worker.gpu_ids.is_empty());
        let mut table = Table::new([
            Column::words(if has_gpus { "GPU" } else { "WORKER" }),
            Column::words("STATE"),
            Column::number("DONE"),
            Column::number("FAILED").weighs(2),
            Column::number("TIMEOUTS").weighs(2),
            Column::number("RATE").weighs(1),
            Column::words("TASK").at_least(10),
        ]);
        for row in rows {
            let sum = |of: fn(&WorkerStats) -> u64| row.workers.iter().map(|worker| of(worker)).sum::<u64>();
            let counts = [sum(|worker| worker.completed), sum(|worker| worker.failed), sum(|worker| worker.timeouts)];
            let rate = per_second(rates.of(&row.name, counts.iter().sum(), now));
            let [done, failed, timeouts] = counts.map(|count| count.to_string());
            table.row([row.name.clone(), state(row), done, failed, timeouts, rate, self.task(row, now)], Paint::Plain);
        }
        table
    }

    fn rows(&self) -> Vec<Row<'_>> {
        let mut rows: Vec<Row<'_>> = Vec::new();
        for worker in &self.stats.workers {
            let ids: Vec<String> = worker.gpu_ids.iter().map(ToString::to_string).collect();
            let name = if ids.is_empty() { (worker.id.0 + 1).to_string() } else { ids.join("+") };
            match rows.iter_mut().find(|row| row.name == name) {
                Some(row) => row.workers.push(worker),
                None => rows.push(Row { name, workers: vec![worker] }),
            }
        }
        // Not in the order they were granted in.
        rows.sort_by_key(|row| row.workers.first().map(|worker| (worker.gpu_ids.clone(), worker.id)));
        rows
    }

    /// The task that runs longest, and for how long.
    fn task(&self, row: &Row<'_>, now: Instant) -> String {
        let running = row.workers.iter().filter_map(|worker| Some((worker.task_since?, worker.task?)));
        let Some((since, task)) = running.min() else { return String::new() };
        let name = lock(self.tasks).get(&task).map(Task::argument).unwrap_or_default();
        match now.saturating_duration_since(since) {
            short if short < Duration::from_secs(1) => name,
            long => format!("{} · {name}", shown(long)),
        }
    }
}

/// `busy`, or `busy 2 of 3`.
fn state(row: &Row<'_>) -> String {
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

/// Tasks that are over, and were not given up.
pub(super) fn over(stats: &RunStats) -> u64 {
    stats.completed + stats.failed + stats.timeouts
}

/// How it stands, in one line.
fn summary(stats: &RunStats, total: Option<u64>, rate: f64) -> String {
    let of = total.map(|total| format!(" of {total}")).unwrap_or_default();
    let RunStats { completed, failed, timeouts, .. } = stats;
    let mut text = format!("done {completed}{of}, failed {failed}, timeouts {timeouts}, {}/s", per_second(rate));
    let left = total.map(|total| total.saturating_sub(over(stats))).filter(|left| *left > 0 && rate > 0.0);
    if let Some(left) = left.and_then(|left| Duration::try_from_secs_f64(left as f64 / rate).ok()) {
        text.push_str(&format!(", {} left", shown(left)));
    }
    text
}

/// A rate in few signs.
pub(super) fn per_second(rate: f64) -> String {
    if rate >= 100.0 { format!("{rate:.0}") } else { format!("{rate:.1}") }
}

/// Rates by name: over the last seconds, not since the beginning.
#[derive(Debug, Default)]
struct Rates {
    counts: HashMap<String, VecDeque<(Instant, u64)>>,
}

impl Rates {
    /// How many a second, when it is so many now.
    fn of(&mut self, name: &str, count: u64, now: Instant) -> f64 {
        let counts = self.counts.entry(name.to_owned()).or_default();
        if counts.back().is_none_or(|(at, _)| now.saturating_duration_since(*at) >= STEP) {
            counts.push_back((now, count));
        }
        while counts.len() > 2 && counts.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) > WINDOW) {
            counts.pop_front();
        }
        let Some((since, before)) = counts.front() else { return 0.0 };
        let secs = now.saturating_duration_since(*since).as_secs_f64();
        if secs > 0.0 { count.saturating_sub(*before) as f64 / secs } else { 0.0 }
    }
}

/// A thread that does something again and again until the run is over, which is when this is dropped.
#[derive(Debug)]
pub(super) struct Ticking {
    run: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Tells such a thread that the run is over.
#[derive(Debug)]
pub(super) struct RunEnd(Receiver<()>);

impl Ticking {
    pub fn start(name: &str, work: impl FnOnce(&RunEnd) + Send + 'static) -> anyhow::Result<Self> {
        // Nothing is ever sent: it hangs up.
        let (run, end) = sync_channel(0);
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || work(&RunEnd(end)));
        Ok(Self { run: Some(run), thread: Some(thread.with_context(|| format!("cannot start the thread {name}"))?) })
    }
}

impl Drop for Ticking {
    fn drop(&mut self) {
        drop(self.run.take());
        // A panic of it has told of itself.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl RunEnd {
    /// Waits so long; whether the run is over.
    pub fn within(&self, time: Duration) -> bool {
        self.0.recv_timeout(time) == Err(RecvTimeoutError::Disconnected)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use gpupool_dispatch::{TaskId, WorkerId};

    use super::super::feeder::Task;
    use super::*;
    use crate::terminal::columns;

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
        let (begun, tasks) = (Instant::now(), OpenTasks::default());
        let argument = Bytes::from_static("data/ärger\u{1b}[2J-with-a-long-name-0001.wav".as_bytes());
        lock(&tasks).insert(TaskId(7), Task { seq: 8, arguments: vec![argument], shown: Bytes::new() });
        let mut stats = RunStats { completed: 203, failed: 2, timeouts: 0, workers, ..RunStats::default() };
        let mut rates = Rates::default();
        let screen = Screen { width: Some(width), colours: false };
        let lines = |stats: &RunStats, rates: &mut Rates, now| {
            Page { stats, tasks: &tasks, total: Some(1000), waiting: &[] }.lines(rates, now, screen, most)
        };
        lines(&stats, &mut rates, begun);
        for worker in &mut stats.workers {
            worker.completed += 50;
            stats.completed += 50;
        }
        lines(&stats, &mut rates, begun + Duration::from_secs(10))
    }

    #[test]
    fn a_gpu_has_a_row_and_all_of_it_a_line() {
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
    fn it_fits_the_terminal_whatever_there_is() {
        for (width, most) in [(40, 4), (60, 10), (80, 24), (200, 50)] {
            let workers = (0..30).map(|id| worker(id, None, WorkerState::Idle, None)).collect();
            let lines = page(workers, width, most);
            assert!(lines.len() <= most.max(5), "{most}: {}", lines.join("\n"));
            assert!(lines.iter().all(|line| columns(line) <= width), "{width}: {}", lines.join("\n"));
        }
    }

    #[test]
    fn a_rate_is_that_of_the_last_seconds() {
        let (mut rates, begun) = (Rates::default(), Instant::now());
        assert_eq!(rates.of("x", 0, begun), 0.0);
        assert_eq!(rates.of("x", 10, begun + Duration::from_secs(5)), 2.0);
        let mut last = 0.0;
        for second in 6..60 {
            last = rates.of("x", 10, begun + Duration::from_secs(second));
        }
        assert_eq!(last, 0.0, "nothing went on for long");
    }
}
