//! The thread that looks after many jobs, each when it is due.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::excess::Excess;
use super::look::{Verdict, Watched};
use super::table::Table;
use crate::cgroup::{Cgroups, Leftovers};
use crate::process::ProcFs;

/// One thread that looks after many jobs; ends when dropped.
#[derive(Debug)]
pub struct Watcher {
    pub(super) cgroups: Cgroups,
    pub(super) shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    /// Starts the thread. Groups for jobs are made by `cgroups`, where it can ([`Cgroups::none`]: none are made). Empty
    /// groups of jobs whose program was killed are removed, a moment later.
    pub fn start(cgroups: Cgroups) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let (for_thread, left_by_others) = (Arc::clone(&shared), cgroups.clone());
        let watch = move || watch(&for_thread, &left_by_others);
        let thread = std::thread::Builder::new().name("gpupool-bounds".into()).spawn(watch)?;
        Ok(Self { cgroups, shared, thread: Some(thread) })
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        lock(&self.shared.state).has_ended = true;
        self.shared.changed.notify_all();
        let Some(thread) = self.thread.take() else { return };
        // Dropped by a callback, it must not wait for itself.
        if thread.thread().id() != std::thread::current().id() {
            let _ = thread.join();
        }
    }
}

/// What the thread and those who add and remove jobs share: both sides only ever add, take or remove an entry.
#[derive(Debug, Default)]
pub(super) struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    entries: HashMap<u64, Entry>,
    next_key: u64,
    has_ended: bool,
}

struct Entry {
    due: Instant,
    /// How much earlier it may be looked at, to look at several at once.
    early: Duration,
    watched: Arc<Mutex<Watched>>,
    tell: Box<dyn FnOnce(Excess) + Send>,
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entry").field("due", &self.due).finish_non_exhaustive()
    }
}

impl Shared {
    /// Has a job looked at from now on; gives its number.
    pub(super) fn add(&self, watched: Arc<Mutex<Watched>>, tell: Box<dyn FnOnce(Excess) + Send>) -> u64 {
        let mut state = lock(&self.state);
        let key = state.next_key;
        state.next_key += 1;
        state.entries.insert(key, Entry { due: Instant::now(), early: Duration::ZERO, watched, tell });
        self.changed.notify_all();
        key
    }

    /// Has it looked at no longer.
    pub(super) fn remove(&self, key: u64) {
        // Dropped without the lock: what a callback holds may do anything when it is dropped.
        let removed = lock(&self.state).entries.remove(&key);
        drop(removed);
    }

    /// Waits until jobs are due, or something else is; `None` when the watcher has ended.
    fn next_due(&self, else_due: Option<Instant>) -> Option<Vec<(u64, Arc<Mutex<Watched>>)>> {
        let mut state = lock(&self.state);
        loop {
            if state.has_ended {
                return None;
            }
            let now = Instant::now();
            let first = state.entries.values().map(|entry| entry.due).chain(else_due).min();
            match first {
                Some(first) if first <= now => break,
                Some(first) => state = self.wait(state, first - now),
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
        let now = Instant::now();
        let due = state.entries.iter().filter(|(_, entry)| entry.due <= now + entry.early);
        Some(due.map(|(key, entry)| (*key, Arc::clone(&entry.watched))).collect())
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, pause: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0
    }

    fn put_off(&self, key: u64, pause: Duration) {
        if let Some(entry) = lock(&self.state).entries.get_mut(&key) {
            entry.due = Instant::now() + pause;
            entry.early = pause / 4;
        }
    }

    fn tell(&self, key: u64, excess: Excess) {
        let Some(entry) = lock(&self.state).entries.remove(&key) else { return };
        // One caller's mistake must not end the watch over all other jobs.
        if catch_unwind(AssertUnwindSafe(move || (entry.tell)(excess))).is_err() {
            tracing::error!("what is done about a job over its bounds panicked");
        }
    }
}

fn watch(shared: &Shared, cgroups: &Cgroups) {
    let mut table = Table::new(ProcFs::here());
    let mut leftovers = Some(Leftovers::look(cgroups));
    while let Some(due) = shared.next_due(leftovers.as_ref().and_then(Leftovers::due)) {
        let is_due = |leftovers: &mut Leftovers| leftovers.due().is_some_and(|due| due <= Instant::now());
        if let Some(leftovers) = leftovers.take_if(is_due) {
            leftovers.remove();
        }
        for (key, watched) in due {
            // Bound to a name, so that the job is let go of before anybody is told.
            let verdict = lock(&watched).look(&mut table);
            match verdict {
                Verdict::Fine(pause) => shared.put_off(key, pause),
                Verdict::Over(excess) => shared.tell(key, excess),
                Verdict::Gone => shared.remove(key),
            }
        }
    }
}

/// A panic elsewhere leaves nothing half-done behind these locks.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
