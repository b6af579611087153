//! Runs of the odd worker.

use std::collections::BTreeMap;

use bytes::Bytes;
use gpupool_dispatch::{
    DispatchError, Dispatcher, RunError, RunEvent, RunPlan, RunStats, TaskEnd, TaskId, TaskOutcome, WorkerProgram,
};

use crate::support::odd_worker;

/// Plan with odd workers without a GPU.
pub fn odd_worker_plan(workers: u32) -> RunPlan {
    with_helper(RunPlan::new(WorkerProgram::native(odd_worker())).workers(workers))
}

/// Plan with one command per task.
pub fn command_plan(workers: u32) -> RunPlan {
    with_helper(RunPlan::new(WorkerProgram::commands()).workers(workers))
}

pub fn with_helper(mut plan: RunPlan) -> RunPlan {
    plan.helper = Some(odd_worker());
    plan
}

/// Result of a run.
pub struct RunResult {
    pub task_ends: BTreeMap<TaskId, TaskEnd>,
    /// In the order of their reports.
    pub order: Vec<TaskId>,
    pub events: Vec<RunEvent>,
    pub stats: Result<RunStats, DispatchError>,
}

impl RunResult {
    pub fn done(&self, task: u64) -> String {
        match &self.outcome(task) {
            TaskOutcome::Done(result) => String::from_utf8_lossy(result).into_owned(),
            other => panic!("task {task} was not done: {other:?}"),
        }
    }

    pub fn outcome(&self, task: u64) -> &TaskOutcome {
        &self.task_ends.get(&TaskId(task)).unwrap_or_else(|| panic!("task {task} never ended")).outcome
    }

    pub fn count(&self, is_such: impl Fn(&TaskOutcome) -> bool) -> usize {
        self.task_ends.values().filter(|end| is_such(&end.outcome)).count()
    }
}

/// Runs these tasks to the end.
pub fn run(plan: RunPlan, tasks: impl IntoIterator<Item = impl Into<Bytes>>) -> RunResult {
    let source = tasks.into_iter().map(|task| Ok::<Bytes, std::convert::Infallible>(task.into()));
    let mut result =
        RunResult { task_ends: BTreeMap::new(), order: Vec::new(), events: Vec::new(), stats: Ok(RunStats::default()) };
    let stats = Dispatcher::start(plan).unwrap().run(source, |event| match event {
        RunEvent::TaskEnded(end) => {
            result.order.push(end.task);
            let twice = result.task_ends.insert(end.task, end);
            assert!(twice.is_none(), "ended twice: {twice:?}");
        }
        other => result.events.push(other),
    });
    result.stats = stats.map_err(|error| match error {
        RunError::Dispatch(error) => error,
        other => panic!("{other}"),
    });
    result
}
