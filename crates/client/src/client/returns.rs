//! What is on its way, to a server or back: counted, so that stopping can wait until nothing is.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::changes::Changes;

/// How much is on its way.
#[derive(Debug, Default)]
pub(super) struct Returns {
    count: AtomicUsize,
    changes: Arc<Changes>,
}

impl Returns {
    /// One more is, until this is dropped.
    pub fn begin(self: &Arc<Self>) -> UnderWay {
        self.count.fetch_add(1, Ordering::SeqCst);
        UnderWay(self.clone())
    }

    /// Waits until nothing is.
    pub async fn none(&self) {
        let mut changes = self.changes.follow();
        while self.count.load(Ordering::SeqCst) > 0 {
            changes.changed().await;
        }
    }
}

/// Something that is on its way.
#[derive(Debug)]
pub(super) struct UnderWay(Arc<Returns>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.changes.tell();
        }
    }
}
