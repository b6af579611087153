//! What happens to a client's endpoints and requests, as it happens, for whoever wants to follow it.

use std::sync::Arc;

use futures_util::Stream;
use futures_util::stream::unfold;
use serde::Serialize;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

use super::capacity::Gpu;
use crate::limits::UPDATES;

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Update {
    /// An endpoint was looked at.
    Statistics {
        /// Which.
        endpoint_id: String,
        /// Its GPUs.
        gpus: Vec<Gpu>,
    },
    /// An endpoint can be asked from now on.
    EndpointUp {
        /// Which.
        endpoint_id: String,
    },
    /// An endpoint failed too often, and is left alone for a while.
    EndpointDown {
        /// Which.
        endpoint_id: String,
        /// What went wrong.
        error: String,
    },
    /// A request waits.
    Blocked {
        /// Whose.
        worker_id: String,
    },
    /// A request that waited was granted.
    Unblocked {
        /// Whose.
        worker_id: String,
    },
    /// GPUs were assigned.
    Assigned {
        /// To whom.
        worker_id: String,
        /// Where.
        endpoint_id: String,
        /// Which, on that endpoint.
        gpu_ids: Vec<u32>,
    },
    /// An assignment was given back.
    Released {
        /// By whom.
        worker_id: String,
        /// Where.
        endpoint_id: String,
        /// Which, on that endpoint.
        gpu_ids: Vec<u32>,
    },
    /// An assignment was lost: its GPUs may be somebody else's.
    Lost {
        /// By whom.
        worker_id: String,
        /// Where.
        endpoint_id: String,
        /// Why.
        reason: String,
    },
    /// So many updates came faster than they were read, and are gone.
    Missed {
        /// How many.
        count: u64,
    },
}

impl Update {
    /// Whether it comes with every look and every assignment, and is of no news to the program that asked for it.
    fn is_frequent(&self) -> bool {
        matches!(self, Self::Statistics { .. } | Self::Assigned { .. } | Self::Released { .. })
    }
}

/// Where updates are told.
#[derive(Debug)]
pub(super) struct Telling {
    updates: broadcast::Sender<Update>,
    everything: Everything,
}

/// While one of these lives, updates that come often are told as well.
#[derive(Debug, Clone, Default)]
pub struct Everything(Arc<()>);

impl Telling {
    pub fn new() -> Self {
        Self { updates: broadcast::Sender::new(UPDATES), everything: Everything::default() }
    }

    /// Whether anybody wants to hear of what happens often.
    pub fn wants_everything(&self) -> bool {
        Arc::strong_count(&self.everything.0) > 1
    }

    pub fn tell(&self, update: Update) {
        // Telling wakes whoever follows, though it be for nothing.
        if !update.is_frequent() || self.wants_everything() {
            // Nobody need listen.
            let _ = self.updates.send(update);
        }
    }

    pub fn everything(&self) -> Everything {
        self.everything.clone()
    }

    pub fn follow(&self, everything: Option<Everything>) -> Updates {
        Updates { receiver: self.updates.subscribe(), _everything: everything }
    }
}

/// Follows what happens from when it was made. Has no task of its own.
#[derive(Debug)]
pub struct Updates {
    receiver: broadcast::Receiver<Update>,
    /// Has what comes often told as well.
    _everything: Option<Everything>,
}

impl Updates {
    /// The next one; `None` once the client is gone.
    pub async fn next(&mut self) -> Option<Update> {
        match self.receiver.recv().await {
            Ok(update) => Some(update),
            Err(RecvError::Lagged(count)) => Some(Update::Missed { count }),
            Err(RecvError::Closed) => None,
        }
    }

    /// The same as a stream.
    pub fn into_stream(self) -> impl Stream<Item = Update> {
        unfold(self, |mut updates| async move { updates.next().await.map(|update| (update, updates)) })
    }
}
