//! Why a run ends before its time, and what ends it. The first reason counts; a run that is to end soon can still be ended
//! now.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpupool_confine::Signal;
use gpupool_dispatch::Remote;

use super::halt::Trigger;

/// Why a run was ended.
#[derive(Debug)]
pub(super) enum Reason {
    /// We were told to.
    Signal(Signal),
    /// As `--halt` says.
    Halted(Trigger),
    /// Nobody reads what tasks write any more.
    OutputClosed,
    /// Something went wrong that is no task's fault.
    Failed(anyhow::Error),
}

/// Ends a run, from any thread.
#[derive(Debug, Clone)]
pub(super) struct Stop {
    remote: Remote,
    reason: Arc<Mutex<Option<Reason>>>,
}

impl Stop {
    pub fn new(remote: Remote) -> Self {
        Self { remote, reason: Arc::default() }
    }

    /// What runs is killed.
    pub fn now(&self, reason: Reason) {
        self.lock().get_or_insert(reason);
        self.remote.cancel();
    }

    /// What runs comes to its end, and nothing else is begun.
    pub fn soon(&self, reason: Reason) {
        self.lock().get_or_insert(reason);
        self.remote.finish_soon();
    }

    /// What was read so far is done, and the run has failed all the same.
    pub fn after_this(&self, error: anyhow::Error) {
        self.lock().get_or_insert(Reason::Failed(error));
        self.remote.close();
    }

    /// Whether it was ended.
    pub fn is_stopped(&self) -> bool {
        self.lock().is_some()
    }

    /// Why, once all is over.
    pub fn reason(&self) -> Option<Reason> {
        self.lock().take()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Reason>> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
