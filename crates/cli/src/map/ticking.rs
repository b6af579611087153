//! A thread that does something again and again, until the run is over.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;

/// Such a thread. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct Ticking {
    over: Arc<Over>,
    thread: Option<JoinHandle<()>>,
}

/// Whether the run is over.
#[derive(Debug, Default)]
pub(super) struct Over {
    is_over: Mutex<bool>,
    changed: Condvar,
}

impl Ticking {
    pub fn start(name: &str, work: impl FnOnce(&Over) + Send + 'static) -> anyhow::Result<Self> {
        let over = Arc::new(Over::default());
        let for_thread = Arc::clone(&over);
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || work(&for_thread));
        Ok(Self { over, thread: Some(thread.with_context(|| format!("cannot start the thread {name}"))?) })
    }
}

impl Drop for Ticking {
    fn drop(&mut self) {
        *self.over.lock() = true;
        self.over.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // A panic of it has told of itself.
            let _ = thread.join();
        }
    }
}

impl Over {
    fn lock(&self) -> MutexGuard<'_, bool> {
        self.is_over.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits so long; whether the run is over.
    pub fn within(&self, time: Duration) -> bool {
        let wait = self.changed.wait_timeout_while(self.lock(), time, |is_over| !*is_over);
        *wait.unwrap_or_else(PoisonError::into_inner).0
    }
}
