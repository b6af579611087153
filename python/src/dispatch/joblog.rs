//! The job log of a run: which tasks an earlier run did, and what becomes of those of this one.
//!
//! A task is logged when its callback has come back, so that none is taken for done whose result nobody got.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use gpupool_dispatch::joblog::{Again, Entry, Finished, JobLog, JobLogError};
use gpupool_dispatch::{Cause, Outcome, Over, TaskId};

/// What is known of the log, by the thread that feeds and the one that takes events.
#[derive(Debug)]
pub(super) struct Log {
    /// What stands for the command.
    name: String,
    finished: Mutex<Option<Finished>>,
    books: Mutex<Books>,
}

#[derive(Debug)]
struct Books {
    file: Option<JobLog>,
    /// Tasks' places in the source, by their numbers in this run.
    places: HashMap<TaskId, u64>,
    /// Over, and not logged yet.
    told: Vec<Ended>,
}

#[derive(Debug)]
struct Ended {
    place: u64,
    started: SystemTime,
    took: Duration,
    received: u64,
    exit_code: i32,
    signal: i32,
}

impl Log {
    /// Goes on with a log, or begins one. What failed is done again.
    pub fn open(path: &Path, name: String) -> Result<Self, JobLogError> {
        let (file, finished) = JobLog::resume(path, Again::Failed)?;
        let books = Books { file: Some(file), places: HashMap::new(), told: Vec::new() };
        Ok(Self { name, finished: Mutex::new(Some(finished)), books: Mutex::new(books) })
    }

    /// Whether an earlier run did the task at this place of the source.
    pub fn has(&self, place: u64) -> Result<bool, JobLogError> {
        let mut finished = self.finished.lock().unwrap_or_else(PoisonError::into_inner);
        finished.as_mut().map_or(Ok(false), |finished| finished.has(place + 1, self.name.as_bytes()))
    }

    /// The task of this number is at that place of the source.
    pub fn put(&self, task: TaskId, place: u64) {
        self.lock().places.insert(task, place);
    }

    /// The place of a task.
    pub fn place(&self, task: TaskId) -> Option<u64> {
        self.lock().places.get(&task).copied()
    }

    /// A task is over. It is logged by [`Log::write`].
    pub fn over(&self, over: &Over) {
        let mut books = self.lock();
        let Some(place) = books.places.remove(&over.task) else { return };
        let took = over.started.map_or(Duration::ZERO, |started| over.finished.saturating_duration_since(started));
        let started = SystemTime::now().checked_sub(took + over.finished.elapsed()).unwrap_or(SystemTime::UNIX_EPOCH);
        let (received, exit_code, signal) = match &over.outcome {
            Outcome::Done(result) => (result.len() as u64, 0, 0),
            Outcome::Failed(_) => (0, 1, 0),
            Outcome::TimedOut(_) => (0, -1, 0),
            Outcome::WorkerLost(loss) => (0, -1, if let Cause::Signalled(signal) = loss.cause { signal } else { 0 }),
            Outcome::Cancelled => return,
        };
        books.told.push(Ended { place, started, took, received, exit_code, signal });
    }

    /// The callbacks of all that is over have come back.
    pub fn write(&self) -> Result<(), JobLogError> {
        let mut books = self.lock();
        let Books { file, told, .. } = &mut *books;
        let Some(file) = file else { return Ok(()) };
        for ended in told.drain(..) {
            file.append(&Entry {
                seq: ended.place + 1,
                started: ended.started,
                took: ended.took,
                received: ended.received,
                exit_code: ended.exit_code,
                signal: ended.signal,
                command: self.name.as_bytes(),
            })?;
        }
        Ok(())
    }

    /// What was not written is not: its callbacks did not come back.
    pub fn forget(&self) {
        self.lock().told.clear();
    }

    /// All is over: waits until it is on the disk.
    pub fn finish(&self) -> Result<(), JobLogError> {
        self.write()?;
        let file = self.lock().file.take();
        file.map_or(Ok(()), JobLog::finish)
    }

    fn lock(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
