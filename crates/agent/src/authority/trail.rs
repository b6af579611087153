//! Reading the audit trail: one thread with a read-only connection, so that neither a long query nor a hung disk holds up
//! the authority.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread;

use gpupool_store::TrailReader;
use tokio::sync::oneshot;

use crate::limits::{QUERY_PATIENCE, TRAIL_QUERIES};

use super::Refusal;

type TrailTask = Box<dyn FnOnce(&dyn TrailReader) + Send>;

/// A handle of the thread that reads the audit trail. The thread ends with the last handle.
#[derive(Clone)]
pub(crate) struct TrailHandle {
    queries: SyncSender<TrailTask>,
}

impl TrailHandle {
    pub(super) fn start(reader: Box<dyn TrailReader>) -> io::Result<Self> {
        let (queries, inbox) = sync_channel::<TrailTask>(TRAIL_QUERIES);
        thread::Builder::new().name("trail".into()).spawn(move || {
            for query in inbox {
                query(&*reader);
            }
        })?;
        Ok(Self { queries })
    }

    /// Runs a query. A query that takes too long is refused as busy. A panic of the query is passed on to the caller.
    pub(crate) async fn query<T: Send + 'static>(
        &self,
        query: impl FnOnce(&dyn TrailReader) -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        let (reply, receiver) = oneshot::channel();
        let query: TrailTask = Box::new(move |reader| {
            // A client that hung up needs no reply, and its query may take long.
            if !reply.is_closed() {
                // A reader has no state of its own, so it stays usable after a panic.
                drop(reply.send(catch_unwind(AssertUnwindSafe(|| query(reader)))));
            }
        });
        self.queries.try_send(query).map_err(|error| match error {
            TrySendError::Full(_) => Refusal::Busy,
            TrySendError::Disconnected(_) => Refusal::Stopping,
        })?;
        match tokio::time::timeout(QUERY_PATIENCE, receiver).await {
            Ok(Ok(reply)) => reply.map_err(|panic| resume_unwind(panic)),
            Ok(Err(_)) => Err(Refusal::Stopping),
            Err(_) => Err(Refusal::Busy),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use gpupool_store::{LeaseStore, MemoryDisk, UsageDimension};

    use super::*;

    #[tokio::test]
    async fn a_query_that_panics_ends_its_own_call_and_no_other() {
        let trail = TrailHandle::start(MemoryDisk::default().open().trail_reader()).unwrap();
        let calls = trail.clone();
        let panicked = tokio::spawn(async move { calls.query(|_| -> () { panic!("a bad query") }).await });
        assert!(panicked.await.unwrap_err().is_panic());
        let since = SystemTime::UNIX_EPOCH;
        let usage = trail.query(move |reader| reader.usage(UsageDimension::Owner, since, since).unwrap().len()).await;
        assert_eq!(usage, Ok(0));
    }
}
