//! Brings what was written to the disk, in a thread of its own, without spending more than a small part of the time on it.
//! The thread ends when it is told to, after a last time.

use std::fs::File;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::limits::{JOBLOG_SYNC_PAUSE, JOBLOG_SYNC_REST};

#[derive(Debug)]
pub(super) struct Syncing {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    is_behind: bool,
    is_ending: bool,
    failure: Option<io::Error>,
}

impl Syncing {
    pub fn start(file: File) -> io::Result<Self> {
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::new() });
        let for_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("job log".into()).spawn(move || for_thread.work(&file))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Something was written. Tells what went wrong since the last time.
    pub fn wrote(&self) -> io::Result<()> {
        let mut state = self.shared.lock();
        if !std::mem::replace(&mut state.is_behind, true) {
            self.shared.changed.notify_one();
        }
        state.failure.take().map_or(Ok(()), Err)
    }

    /// Waits until everything is on the disk.
    pub fn finish(mut self) -> io::Result<()> {
        self.end();
        self.shared.lock().failure.take().map_or(Ok(()), Err)
    }

    fn end(&mut self) {
        self.shared.lock().is_ending = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // It cannot panic; where it did, nothing is left to wait for.
            let _ = thread.join();
        }
    }
}

impl Drop for Syncing {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self, file: &File) {
        let mut state = self.lock();
        loop {
            let idle = |state: &mut State| !state.is_behind && !state.is_ending;
            state = self.changed.wait_while(state, idle).unwrap_or_else(PoisonError::into_inner);
            if !std::mem::take(&mut state.is_behind) {
                return;
            }
            drop(state);
            let begun = Instant::now();
            let done = file.sync_data();
            let rest = (begun.elapsed() * JOBLOG_SYNC_REST).max(JOBLOG_SYNC_PAUSE);
            state = self.lock();
            if let Err(error) = done {
                state.failure = Some(error);
            }
            let wait = self.changed.wait_timeout_while(state, rest, |state| !state.is_ending);
            state = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
