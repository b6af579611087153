//! Runs of the odd worker.

use std::collections::BTreeMap;

use bytes::Bytes;
use gpupool_dispatch::{DispatchError, Dispatcher, Event, Outcome, Over, Plan, Program, RunError, Stats, TaskId};

use crate::support::odd_worker;

/// Odd workers without a GPU.
pub fn odd(workers: u32) -> Plan {
    with_helper(Plan::new(Program::native(odd_worker())).workers(workers))
}

/// Commands.
pub fn commands(workers: u32) -> Plan {
    with_helper(Plan::new(Program::commands()).workers(workers))
}

pub fn with_helper(mut plan: Plan) -> Plan {
    plan.helper = Some(odd_worker());
    plan
}

/// What came of a run.
pub struct Ran {
    pub overs: BTreeMap<TaskId, Over>,
    /// In the order they were told.
    pub order: Vec<TaskId>,
    pub events: Vec<Event>,
    pub stats: Result<Stats, DispatchError>,
}

impl Ran {
    pub fn done(&self, task: u64) -> String {
        match &self.outcome(task) {
            Outcome::Done(result) => String::from_utf8_lossy(result).into_owned(),
            other => panic!("task {task} was not done: {other:?}"),
        }
    }

    pub fn outcome(&self, task: u64) -> &Outcome {
        &self.overs.get(&TaskId(task)).unwrap_or_else(|| panic!("task {task} was never over")).outcome
    }

    pub fn count(&self, is_such: impl Fn(&Outcome) -> bool) -> usize {
        self.overs.values().filter(|over| is_such(&over.outcome)).count()
    }
}

/// Runs these tasks to the end.
pub fn run(plan: Plan, tasks: impl IntoIterator<Item = impl Into<Bytes>>) -> Ran {
    let source = tasks.into_iter().map(|task| Ok::<Bytes, std::convert::Infallible>(task.into()));
    let mut ran = Ran { overs: BTreeMap::new(), order: Vec::new(), events: Vec::new(), stats: Ok(Stats::default()) };
    let stats = Dispatcher::start(plan).unwrap().run(source, |event| match event {
        Event::Over(over) => {
            ran.order.push(over.task);
            let twice = ran.overs.insert(over.task, over);
            assert!(twice.is_none(), "told twice: {twice:?}");
        }
        other => ran.events.push(other),
    });
    ran.stats = stats.map_err(|error| match error {
        RunError::Dispatch(error) => error,
        other => panic!("{other}"),
    });
    ran
}
