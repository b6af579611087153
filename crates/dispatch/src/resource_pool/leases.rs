//! Leased GPUs: each worker has one of its own, from the agent of this machine.
//!
//! They are asked for when the pool starts, for all workers it may have, and given back when this is dropped, which is when the
//! last worker has gone.

use std::sync::Arc;

use gpupool_client::local::LocalAgent;
use tokio::sync::mpsc;

use super::config::worker_id;
use crate::gpus::{GpuError, GpuKeeper, GpuNews, GpuWish, Granted};
use crate::plan::Place;

/// What a worker calls its GPU: it sees no other, and frameworks call those of all vendors so.
pub(super) const DEVICE: &str = "cuda:0";

/// What workers lease, and of whom.
#[derive(Debug, Clone)]
pub struct LeasedGpus {
    /// The agent of this machine.
    pub agent: LocalAgent,
    /// What is asked for, for each worker.
    pub body: gpupool_api::RequestBody,
}

/// The GPUs of a pool's workers.
#[derive(Debug)]
pub(super) struct Leases {
    keeper: Arc<GpuKeeper>,
    granted: Vec<Option<Granted>>,
    /// How the wait for each goes.
    waiting: Vec<Option<Arc<str>>>,
}

/// What it means for a worker.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// It may be started.
    Granted(usize),
    /// It must stop now.
    Lost(usize, Arc<str>),
    /// It will never be.
    Refused(usize, Arc<str>),
}

impl Leases {
    /// Asks for a GPU for each worker.
    pub fn start(wish: LeasedGpus, workers: u32, news: mpsc::UnboundedSender<GpuNews>) -> Result<Self, GpuError> {
        let places = workers as usize;
        let LeasedGpus { agent, body } = wish;
        let wish = GpuWish { body, leases: places, gpu_ids: Vec::new() };
        let keeper = GpuKeeper::start(agent, wish, move |told| drop(news.send(told)))?;
        Ok(Self { keeper: Arc::new(keeper), granted: vec![None; places], waiting: vec![None; places] })
    }

    pub fn hear(&mut self, news: GpuNews) -> Option<Change> {
        match news {
            GpuNews::Granted(granted) => {
                let place = granted.place;
                (self.granted[place], self.waiting[place]) = (Some(granted), None);
                Some(Change::Granted(place))
            }
            GpuNews::Lost { place, why } => {
                self.granted[place] = None;
                Some(Change::Lost(place, why.into()))
            }
            GpuNews::Refused { place, why } => {
                self.waiting[place] = None;
                Some(Change::Refused(place, why.into()))
            }
            GpuNews::Waiting { place, text } => {
                self.waiting[place] = Some(text.into());
                None
            }
            GpuNews::Note(_) => None,
        }
    }

    /// How the wait for a GPU goes, if one is waited for.
    pub fn waiting(&self) -> Option<Arc<str>> {
        self.waiting.iter().flatten().next().cloned()
    }

    pub fn gpu_ids(&self, slot: usize) -> Vec<u32> {
        self.granted[slot].as_ref().map(Granted::gpu_ids).unwrap_or_default()
    }

    /// Where the worker of a slot works.
    pub fn place(&self, slot: usize) -> Place {
        let Some(granted) = &self.granted[slot] else { return Place::new(worker_id(slot)) };
        self.keeper.place(worker_id(slot), granted)
    }
}
