//! Tasks that end with their owner.

use std::sync::{Mutex, PoisonError};

use tokio::sync::oneshot;
use tokio::task::{JoinHandle, JoinSet};

/// A task that ends when it is dropped.
#[derive(Debug)]
pub(super) struct OwnedTask(JoinHandle<()>);

impl OwnedTask {
    /// Starts a task.
    pub(super) fn spawn(task: impl Future<Output = ()> + Send + 'static) -> Self {
        Self(tokio::spawn(task))
    }
}

impl Drop for OwnedTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Tasks that outlive their callers and end when this is dropped.
#[derive(Debug, Default)]
pub(super) struct OwnedTasks(Mutex<JoinSet<()>>);

impl OwnedTasks {
    /// Starts a task. The receiver gets its result.
    pub(super) fn spawn<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> oneshot::Receiver<T> {
        let (reply, result) = oneshot::channel();
        let mut tasks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        tasks.spawn(async move { drop(reply.send(task.await)) });
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn tasks_outlive_their_callers_and_end_with_their_owner() {
        let (tasks, (go_on, may_go_on)) = (OwnedTasks::default(), oneshot::channel::<()>());
        let (ended, has_ended) = oneshot::channel();
        drop(tasks.spawn(async move {
            may_go_on.await.unwrap();
            ended.send(()).unwrap();
        }));
        go_on.send(()).unwrap();
        has_ended.await.unwrap();
        let waits_for_ever = tasks.spawn(std::future::pending::<()>());
        let (held, is_dropped) = oneshot::channel::<()>();
        let task = OwnedTask::spawn(async move {
            let _held = held;
            std::future::pending().await
        });
        drop((tasks, task));
        assert!(waits_for_ever.await.is_err() && is_dropped.await.is_err());
    }
}
