//! The word that the agent is stopping: begun once, seen by everybody who holds a clone.

use std::sync::Arc;

use tokio::sync::watch;

/// Tells the listeners and the handlers of long requests that the agent is stopping. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Shutdown(Arc<watch::Sender<bool>>);

impl Shutdown {
    /// A shutdown that has not begun.
    pub fn new() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }

    /// Begins it; further calls change nothing.
    pub fn begin(&self) {
        self.0.send_replace(true);
    }

    /// Whether it has begun.
    pub fn has_begun(&self) -> bool {
        *self.0.borrow()
    }

    /// Waits until it begins; a long poll answers early then, a stream ends.
    pub async fn begun(&self) {
        // The sender lives as long as `self`, so the wait cannot fail.
        let _ = self.0.subscribe().wait_for(|begun| *begun).await;
    }
}

impl Default for Shutdown {
    fn default() -> Self {
        Self::new()
    }
}
