//! What the progress of a run looks like: a row for each GPU, or for each worker where there is none, and a line for all of
//! it. Made of numbers and names alone.

use std::time::{Duration, Instant};

use gpupool_dispatch::{Stats, WorkerState, WorkerStats};

use super::rate::Rates;
use crate::map::tasks::OpenTasks;
use crate::table::{Column, Table};
use crate::terminal::{Paint, Screen};
use crate::text::{clean, cut};
use crate::units::shown;

/// What a page is made of.
pub(super) struct Page<'a> {
    pub stats: &'a Stats,
    pub tasks: &'a OpenTasks,
    /// Tasks of this run, where that is known.
    pub total: Option<u64>,
    /// GPUs that are waited for, and how that goes.
    pub waiting: &'a [String],
}

/// Workers that have one line: those of a GPU, or one without.
struct Row<'a> {
    name: String,
    workers: Vec<&'a WorkerStats>,
}

impl Page<'_> {
    /// The lines, at most so many.
    pub fn lines(&self, rates: &mut Rates, now: Instant, screen: Screen, most: usize) -> Vec<String> {
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
        let name = self.tasks.get(task).map(|task| task.argument()).unwrap_or_default();
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
pub(super) fn over(stats: &Stats) -> u64 {
    stats.completed + stats.failed + stats.timeouts
}

/// How it stands, in one line.
pub(in crate::map) fn summary(stats: &Stats, total: Option<u64>, rate: f64) -> String {
    let of = total.map(|total| format!(" of {total}")).unwrap_or_default();
    let mut text = format!(
        "done {}{of}, failed {}, timeouts {}, {}/s",
        stats.completed,
        stats.failed,
        stats.timeouts,
        per_second(rate)
    );
    let left = total.map(|total| total.saturating_sub(over(stats))).filter(|left| *left > 0 && rate > 0.0);
    if let Some(left) = left.and_then(|left| Duration::try_from_secs_f64(left as f64 / rate).ok()) {
        text.push_str(&format!(", {} left", shown(left)));
    }
    text
}

/// A rate in few signs.
pub(in crate::map) fn per_second(rate: f64) -> String {
    if rate >= 100.0 { format!("{rate:.0}") } else { format!("{rate:.1}") }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use gpupool_dispatch::{TaskId, WorkerId};

    use super::*;
    use crate::map::tasks::Task;
    use crate::text::columns;

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
        tasks.insert(TaskId(7), Task { seq: 8, arguments: vec![argument], shown: Bytes::new() });
        let mut stats = Stats { completed: 203, failed: 2, timeouts: 0, workers, ..Stats::default() };
        let mut rates = Rates::default();
        let screen = Screen { width: Some(width), colours: false };
        let lines = |stats: &Stats, rates: &mut Rates, now| {
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
}
