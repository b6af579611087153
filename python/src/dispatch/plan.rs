//! A plan as Python asks for it.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gpupool_confine::bounds::Bounds;
use gpupool_dispatch::{Place, Plan, Program, Remote, Rules, WorkerId, WorkerOutput};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::gpus::{Board, Gpus};
use super::joblog::Log;
use super::of_log;

/// What `gpu_dispatch` asks for; the attributes of an object.
#[derive(FromPyObject)]
pub(super) struct Wish {
    program: Vec<String>,
    environment: HashMap<String, String>,
    settings: String,
    helper: PathBuf,
    pub by_value: bool,
    pub shares_memory: bool,
    places: Vec<WishedPlace>,
    queue_size: usize,
    task_timeout: Option<f64>,
    grace: f64,
    retries: u32,
    output: String,
    tell_started: bool,
    joblog: Option<PathBuf>,
    /// What stands for the command in the job log.
    name: String,
    pub gpus: Option<WishedGpus>,
}

/// GPUs of the pool: how many, and how many workers each has.
#[derive(FromPyObject)]
pub(super) struct WishedGpus(Option<usize>, u32);

impl WishedGpus {
    pub fn start(self, py: Python<'_>, remote: Remote, board: Arc<Board>) -> PyResult<Gpus> {
        Gpus::start(py, self.0, self.1, remote, board)
    }
}

/// A worker: its number, its GPUs, and what is set in its environment.
#[derive(FromPyObject)]
struct WishedPlace(u32, Vec<u32>, HashMap<String, String>);

impl Wish {
    pub fn log(&self) -> PyResult<Option<Log>> {
        self.joblog.as_deref().map(|path| Log::open(path, self.name.clone()).map_err(of_log)).transpose()
    }

    pub fn plan(&self) -> PyResult<Plan> {
        let (program, arguments) =
            self.program.split_first().ok_or_else(|| PyValueError::new_err("program: it is empty"))?;
        let mut program = Program::native(program).args(arguments);
        for (name, value) in &self.environment {
            program = program.env(name, value);
        }
        let settings = serde_json::from_str(&self.settings);
        let output = match self.output.as_str() {
            "inherited" => WorkerOutput::Inherited,
            "dropped" => WorkerOutput::Dropped,
            "told" => WorkerOutput::Told,
            other => return Err(PyValueError::new_err(format!("output: {other:?} is not inherited, dropped or told"))),
        };
        let rules = Rules {
            queue_size: self.queue_size,
            task_timeout: self.task_timeout.map(|limit| seconds("task_timeout", limit)).transpose()?,
            grace: seconds("grace", self.grace)?,
            retries: self.retries,
            ..Rules::default()
        };
        let places = self.places.iter().map(|WishedPlace(id, gpu_ids, environment)| Place {
            gpu_ids: gpu_ids.clone(),
            environment: environment.iter().map(|(name, value)| (name.clone(), Some(value.clone()))).collect(),
            ..Place::new(WorkerId(*id))
        });
        Ok(Plan {
            places: places.collect(),
            rules,
            bounds: Bounds::default(),
            settings: settings.map_err(|error| PyValueError::new_err(format!("settings: {error}")))?,
            output,
            tell_started: self.tell_started,
            helper: Some(self.helper.clone()),
            ..Plan::new(program)
        })
    }
}

fn seconds(what: &str, seconds: f64) -> PyResult<Duration> {
    let time = Duration::try_from_secs_f64(seconds).ok().filter(|time| !time.is_zero());
    time.ok_or_else(|| PyValueError::new_err(format!("{what} must be a positive number of seconds, got {seconds}")))
}
