//! GPUs of the pool for a run: workers are started on what is granted, and leave what is lost.
//!
//! The thread that does so ends when the GPUs are given back, which is when this is dropped: after the workers.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;

use gpupool_client::RequestBody;
use gpupool_client::local::LocalAgent;
use gpupool_confine::lock;
use gpupool_dispatch::gpu_leases::{GpuEvent, GpuEventReceiver, GpuLeaseManager, GpuRequest};
use gpupool_dispatch::{RunHandle, WorkerId};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::awaiting::blocking;
use crate::client::local_agent;

/// What became of GPUs, for the thread that takes events.
#[derive(Debug)]
pub(super) struct News {
    pub kind: &'static str,
    pub worker: Option<u32>,
    pub gpu_id: Option<u32>,
    pub text: String,
}

/// News that wait to be taken; of more, the oldest are left out.
const UNTAKEN_NEWS: usize = 4_096;

/// News nobody took yet, and why there will be no GPU at all.
#[derive(Debug, Default)]
pub(super) struct Board {
    news: Mutex<VecDeque<News>>,
    failure: Mutex<Option<String>>,
}

impl Board {
    pub fn take(&self) -> VecDeque<News> {
        std::mem::take(&mut *lock(&self.news))
    }

    pub fn failure(&self) -> Option<String> {
        lock(&self.failure).clone()
    }
}

/// GPUs that are held or waited for.
#[derive(Debug)]
pub(super) struct Gpus {
    keeper: Option<Arc<GpuLeaseManager>>,
    thread: Option<JoinHandle<()>>,
}

impl Gpus {
    /// Asks the agent of this machine for so many GPUs; for all that are free, but at least one, where it is not said.
    pub fn start(
        py: Python<'_>,
        count: Option<usize>,
        workers_each: u32,
        remote: RunHandle,
        board: Arc<Board>,
    ) -> PyResult<Self> {
        let failed = |error: &dyn std::fmt::Display| PyRuntimeError::new_err(format!("gpu_ids=\"auto\": {error}"));
        let (agent, free) = blocking(py, find())?.map_err(|error| failed(&error))?;
        let count = count.unwrap_or(free).max(1);
        let body = RequestBody { worker_id: Some("gpu_dispatch".into()), ..RequestBody::default() };
        let wish = GpuRequest { body, leases: count, gpu_ids: Vec::new() };
        let (keeper, news) = GpuLeaseManager::start(agent, wish).map_err(|error| failed(&error))?;
        let keeper = Arc::new(keeper);
        let workers = Workers { keeper: Arc::downgrade(&keeper), each: workers_each, remote, board, waiting: count };
        let thread = std::thread::Builder::new().name("gpupool-workers".into()).spawn(move || workers.follow(news))?;
        Ok(Self { keeper: Some(keeper), thread: Some(thread) })
    }
}

impl Drop for Gpus {
    fn drop(&mut self) {
        drop(self.keeper.take());
        if let Some(thread) = self.thread.take() {
            // A panic of it has told of itself.
            let _ = thread.join();
        }
    }
}

/// The agent, and how many of its GPUs are free.
async fn find() -> Result<(LocalAgent, usize), String> {
    let agent = local_agent("a dispatcher starts its workers").await?;
    let pool = agent.client().pool().await.map_err(|error| error.to_string())?;
    Ok((agent, pool.free_devices))
}

/// Starts and stops workers as GPUs come and go.
struct Workers {
    keeper: Weak<GpuLeaseManager>,
    each: u32,
    remote: RunHandle,
    board: Arc<Board>,
    /// Places that were not refused.
    waiting: usize,
}

impl Workers {
    fn follow(mut self, mut news: GpuEventReceiver) {
        while let Some(news) = news.blocking_next() {
            match news {
                GpuEvent::Granted(granted) => {
                    // Else they are being given back.
                    let Some(keeper) = self.keeper.upgrade() else { continue };
                    let gpu_id = granted.gpu_ids().first().copied();
                    for worker in self.ids(granted.slot) {
                        self.tell("granted", Some(worker), gpu_id, String::new());
                        self.remote.add_worker(keeper.worker_slot(worker, &granted));
                    }
                }
                GpuEvent::Lost { slot: place, why } => {
                    for worker in self.ids(place) {
                        self.tell("gpu_lost", Some(worker), None, why.clone());
                        self.remote.withdraw_worker(worker, why.as_str());
                    }
                }
                GpuEvent::Refused { why, .. } => self.refused(why),
                GpuEvent::Waiting { text, .. } | GpuEvent::Note(text) => self.tell("gpu_note", None, None, text),
            }
        }
    }

    fn refused(&mut self, why: String) {
        self.waiting -= 1;
        if self.waiting == 0 {
            *lock(&self.board.failure) = Some(format!("no GPU was granted: {why}"));
            self.remote.cancel();
        }
        self.tell("gpu_note", None, None, format!("a GPU was not granted: {why}"));
    }

    fn tell(&self, kind: &'static str, worker: Option<WorkerId>, gpu_id: Option<u32>, text: String) {
        let worker = worker.map(|worker| worker.0);
        let mut news = lock(&self.board.news);
        if news.len() >= UNTAKEN_NEWS {
            news.pop_front();
        }
        news.push_back(News { kind, worker, gpu_id, text });
    }

    fn ids(&self, place: usize) -> impl Iterator<Item = WorkerId> + use<> {
        let first = u32::try_from(place).unwrap_or(u32::MAX).saturating_mul(self.each);
        (first..first.saturating_add(self.each)).map(WorkerId)
    }
}
