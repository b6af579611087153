//! What happens to a client's endpoints and requests, as it happens, for whoever wants to follow it.

use futures_util::Stream;
use futures_util::stream::unfold;
use serde::Serialize;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

use super::capacity::Gpu;

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

/// Follows what happens from when it was made. Has no task of its own.
#[derive(Debug)]
pub struct Updates(pub(super) broadcast::Receiver<Update>);

impl Updates {
    /// The next one; `None` once the client is gone.
    pub async fn next(&mut self) -> Option<Update> {
        match self.0.recv().await {
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
