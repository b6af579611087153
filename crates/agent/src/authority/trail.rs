//! Reading the audit trail: one thread with a read-only connection, so that neither a long query nor a hung disk holds up
//! the authority.

use std::io;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;

use gpupool_store::TrailReader;
use tokio::sync::oneshot;

use crate::limits::{QUERY_PATIENCE, TRAIL_QUERIES};

use super::Refusal;

type TrailReadRequest = Box<dyn FnOnce(&dyn TrailReader) + Send>;

/// A handle of the thread that reads the audit trail. The thread ends with the last handle.
#[derive(Clone)]
pub struct Trail {
    queries: SyncSender<TrailReadRequest>,
}

impl Trail {
    pub(super) fn start(reader: Box<dyn TrailReader>) -> io::Result<Self> {
        let (queries, asked) = sync_channel::<TrailReadRequest>(TRAIL_QUERIES);
        thread::Builder::new().name("trail".into()).spawn(move || {
            for query in asked {
                query(&*reader);
            }
        })?;
        Ok(Self { queries })
    }

    /// Runs a query. A query that takes too long is refused as busy.
    pub async fn query<T: Send + 'static>(
        &self,
        query: impl FnOnce(&dyn TrailReader) -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        let (reply, answer) = oneshot::channel();
        let query: TrailReadRequest = Box::new(move |reader| {
            // A client that hung up needs no answer, and its query may take long.
            if !reply.is_closed() {
                drop(reply.send(query(reader)));
            }
        });
        self.queries.try_send(query).map_err(|_| Refusal::Busy)?;
        match tokio::time::timeout(QUERY_PATIENCE, answer).await {
            Ok(answer) => answer.map_err(|_| Refusal::Stopping),
            Err(_) => Err(Refusal::Busy),
        }
    }
}
