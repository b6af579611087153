//! The tasks that are not over: what each is called, for whoever tells of it. As many as the queue holds and workers have.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use gpupool_dispatch::TaskId;

/// A task, as people know it.
#[derive(Debug, Clone)]
pub(super) struct Task {
    /// Its place among the arguments, from 1; the same in every run.
    pub seq: u64,
    /// Its arguments.
    pub arguments: Vec<Bytes>,
    /// What a person would type for it; where there is no command, its argument.
    pub shown: Bytes,
}

impl Task {
    /// Its arguments as text.
    pub fn argument(&self) -> String {
        let arguments: Vec<_> = self.arguments.iter().map(|argument| String::from_utf8_lossy(argument)).collect();
        arguments.join(" ")
    }
}

/// The tasks that are not over.
#[derive(Debug, Clone, Default)]
pub(super) struct OpenTasks {
    tasks: Arc<Mutex<HashMap<u64, Task>>>,
}

impl OpenTasks {
    pub fn insert(&self, id: TaskId, task: Task) {
        self.lock().insert(id.0, task);
    }

    pub fn remove(&self, id: TaskId) -> Option<Task> {
        self.lock().remove(&id.0)
    }

    pub fn get(&self, id: TaskId) -> Option<Task> {
        self.lock().get(&id.0).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Task>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
