//! What comes from the source and is not dealt with yet: never more than the queue holds.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

use crate::TaskId;
use crate::error::Refused;
use crate::plan::Speaks;

#[derive(Debug)]
pub(crate) struct Feed {
    speaks: Speaks,
    queue_size: usize,
    state: Mutex<State>,
    has_room: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Bytes>,
    /// Tasks the engine took that no worker is at, and results nobody took from the engine yet.
    ahead: usize,
    /// The number of the next task.
    next: u64,
    /// The source has no more, or nobody wants more.
    is_closed: bool,
}

impl Feed {
    pub fn new(speaks: Speaks, queue_size: usize) -> Self {
        Self { speaks, queue_size, state: Mutex::default(), has_room: Condvar::new() }
    }

    /// How many tasks can be put without waiting.
    pub fn room(&self) -> usize {
        self.room_of(&self.lock())
    }

    fn room_of(&self, state: &State) -> usize {
        if state.is_closed { 0 } else { self.queue_size.saturating_sub(state.waiting.len() + state.ahead) }
    }

    /// Puts a task, and waits for room if there is none and `waits`.
    pub fn put(&self, payload: Bytes, waits: bool) -> Result<TaskId, Refused> {
        self.speaks.check(&payload)?;
        let mut state = self.lock();
        while self.room_of(&state) == 0 {
            if state.is_closed {
                return Err(Refused::Closed);
            }
            if !waits {
                return Err(Refused::Full);
            }
            state = self.has_room.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let task = TaskId(state.next);
        state.next += 1;
        state.waiting.push_back(payload);
        Ok(task)
    }

    /// The number of the next task.
    pub fn next(&self) -> TaskId {
        TaskId(self.lock().next)
    }

    /// Nothing more comes.
    pub fn close(&self) {
        self.lock().is_closed = true;
        self.has_room.notify_all();
    }

    /// Takes what the engine has room for; whether that was the last. `ahead` is told of what the engine has, before.
    pub fn take(&self, into: &mut Vec<Bytes>, held: usize, undelivered: usize) -> bool {
        let mut state = self.lock();
        let before = self.room_of(&state);
        let room = self.queue_size.saturating_sub(held + undelivered).min(state.waiting.len());
        into.extend(state.waiting.drain(..room));
        state.ahead = held + undelivered + room;
        let is_last = state.is_closed && state.waiting.is_empty();
        let has_more_room = before == 0 && self.room_of(&state) > 0;
        drop(state);
        if has_more_room {
            self.has_room.notify_all();
        }
        is_last
    }

    /// Whether [`Feed::take`] would tell anything new.
    pub fn has_news(&self, held: usize, undelivered: usize, is_open: bool) -> bool {
        let state = self.lock();
        let has_room = held + undelivered < self.queue_size;
        is_open && ((has_room && !state.waiting.is_empty()) || (state.is_closed && state.waiting.is_empty()))
    }

    /// Nothing more is wanted; what was put is all that comes.
    pub fn take_all(&self, into: &mut Vec<Bytes>) {
        let mut state = self.lock();
        state.is_closed = true;
        into.extend(state.waiting.drain(..));
        drop(state);
        self.has_room.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
