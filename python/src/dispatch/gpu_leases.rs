//! Leased GPUs of a run: workers start on granted GPUs and leave lost ones.
//!
//! The thread ends when the GPUs are released, after the workers are gone.

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

use crate::asyncio_bridge::blocking;
use crate::client::local_agent;

/// Change of a leased GPU, for the thread that takes events.
#[derive(Debug)]
pub(super) struct GpuNotice {
    pub kind: &'static str,
    pub worker: Option<u32>,
    pub gpu_id: Option<u32>,
    pub text: String,
}

/// Maximum number of pending notices; the oldest are dropped.
const MAX_PENDING_NOTICES: usize = 4_096;

/// Pending notices, and the reason if no GPU will be granted.
#[derive(Debug, Default)]
pub(super) struct GpuNotices {
    pending: Mutex<VecDeque<GpuNotice>>,
    failure: Mutex<Option<String>>,
}

impl GpuNotices {
    pub fn take(&self) -> VecDeque<GpuNotice> {
        std::mem::take(&mut *lock(&self.pending))
    }

    pub fn failure(&self) -> Option<String> {
        lock(&self.failure).clone()
    }
}

/// GPUs that are leased or requested.
#[derive(Debug)]
pub(super) struct LeasedGpus {
    manager: Option<Arc<GpuLeaseManager>>,
    thread: Option<JoinHandle<()>>,
}

impl LeasedGpus {
    /// Requests this many GPUs from the agent of this machine; by default all free ones, but at least one.
    pub fn start(
        py: Python<'_>,
        count: Option<usize>,
        workers_each: u32,
        remote: RunHandle,
        notices: Arc<GpuNotices>,
    ) -> PyResult<Self> {
        let failed = |error: &dyn std::fmt::Display| PyRuntimeError::new_err(format!("gpu_ids=\"auto\": {error}"));
        let (agent, free) = blocking(py, find_agent())?.map_err(|error| failed(&error))?;
        let count = count.unwrap_or(free).max(1);
        let body = RequestBody { worker_id: Some("gpu_dispatch".into()), ..RequestBody::default() };
        let request = GpuRequest { body, leases: count, gpu_ids: Vec::new() };
        let (manager, events) = GpuLeaseManager::start(agent, request).map_err(|error| failed(&error))?;
        let manager = Arc::new(manager);
        let event_loop =
            GpuEventLoop { manager: Arc::downgrade(&manager), each: workers_each, remote, notices, waiting: count };
        let thread =
            std::thread::Builder::new().name("gpupool-workers".into()).spawn(move || event_loop.run(events))?;
        Ok(Self { manager: Some(manager), thread: Some(thread) })
    }
}

impl Drop for LeasedGpus {
    fn drop(&mut self) {
        drop(self.manager.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been reported.
            let _ = thread.join();
        }
    }
}

/// Returns the agent and the number of its free GPUs.
async fn find_agent() -> Result<(LocalAgent, usize), String> {
    let agent = local_agent("a dispatcher starts its workers").await?;
    let pool = agent.client().pool().await.map_err(|error| error.to_string())?;
    Ok((agent, pool.free_devices))
}

/// Starts and stops workers as GPUs are granted and lost.
struct GpuEventLoop {
    manager: Weak<GpuLeaseManager>,
    each: u32,
    remote: RunHandle,
    notices: Arc<GpuNotices>,
    /// Number of requests that were not refused.
    waiting: usize,
}

impl GpuEventLoop {
    fn run(mut self, mut events: GpuEventReceiver) {
        while let Some(event) = events.blocking_next() {
            match event {
                GpuEvent::Granted(granted) => {
                    // Without a manager the GPUs are being released.
                    let Some(manager) = self.manager.upgrade() else { continue };
                    let gpu_id = granted.gpu_ids().first().copied();
                    for worker in self.worker_ids(granted.slot) {
                        self.add_notice("granted", Some(worker), gpu_id, String::new());
                        self.remote.add_worker(manager.worker_slot(worker, &granted));
                    }
                }
                GpuEvent::Lost { slot: place, why } => {
                    for worker in self.worker_ids(place) {
                        self.add_notice("gpu_lost", Some(worker), None, why.clone());
                        self.remote.withdraw_worker(worker, why.as_str());
                    }
                }
                GpuEvent::Refused { why, .. } => self.handle_refusal(why),
                GpuEvent::Waiting { text, .. } | GpuEvent::Note(text) => self.add_notice("gpu_note", None, None, text),
            }
        }
    }

    fn handle_refusal(&mut self, why: String) {
        self.waiting -= 1;
        if self.waiting == 0 {
            *lock(&self.notices.failure) = Some(format!("no GPU was granted: {why}"));
            self.remote.cancel();
        }
        self.add_notice("gpu_note", None, None, format!("a GPU request was refused: {why}"));
    }

    fn add_notice(&self, kind: &'static str, worker: Option<WorkerId>, gpu_id: Option<u32>, text: String) {
        let worker = worker.map(|worker| worker.0);
        let mut pending = lock(&self.notices.pending);
        if pending.len() >= MAX_PENDING_NOTICES {
            pending.pop_front();
        }
        pending.push_back(GpuNotice { kind, worker, gpu_id, text });
    }

    fn worker_ids(&self, place: usize) -> impl Iterator<Item = WorkerId> + use<> {
        let first = u32::try_from(place).unwrap_or(u32::MAX).saturating_mul(self.each);
        (first..first.saturating_add(self.each)).map(WorkerId)
    }
}
