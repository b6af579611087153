//! What goes into the engine and what comes out of it: tasks of the source, messages of other threads, events.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use bytes::Bytes;
use gpupool_confine::bounds::BoundExceeded;
use gpupool_confine::lock;
use rustix::event::{EventfdFlags, eventfd};

use crate::event::{RunEvent, SubmitError, TaskEnd};
use crate::plan::{ResultOrder, Speaks, WorkerSlot};
use crate::process::{NotStarted, Process};
use crate::{RunStats, TaskId, WorkerExitCause, WorkerId};

/// What comes from the source and is not dealt with yet: never more than the queue holds.
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
    pub(crate) fn new(speaks: Speaks, queue_size: usize) -> Self {
        Self { speaks, queue_size, state: Mutex::default(), has_room: Condvar::new() }
    }

    /// How many tasks can be put without waiting.
    pub(crate) fn room(&self) -> usize {
        self.room_of(&lock(&self.state))
    }

    fn room_of(&self, state: &State) -> usize {
        if state.is_closed { 0 } else { self.queue_size.saturating_sub(state.waiting.len() + state.ahead) }
    }

    /// Puts a task, and waits for room if there is none and `waits`.
    pub(crate) fn put(&self, payload: Bytes, waits: bool) -> Result<TaskId, SubmitError> {
        self.speaks.check(&payload)?;
        let mut state = lock(&self.state);
        while self.room_of(&state) == 0 {
            if state.is_closed {
                return Err(SubmitError::Closed);
            }
            if !waits {
                return Err(SubmitError::Full);
            }
            state = self.has_room.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let task = TaskId(state.next);
        state.next += 1;
        state.waiting.push_back(payload);
        Ok(task)
    }

    /// The number of the next task.
    pub(crate) fn next(&self) -> TaskId {
        TaskId(lock(&self.state).next)
    }

    /// Nothing more comes.
    pub(crate) fn close(&self) {
        lock(&self.state).is_closed = true;
        self.has_room.notify_all();
    }

    /// Takes what the engine has room for; whether that was the last. `ahead` is told of what the engine has, before.
    pub(crate) fn take(&self, into: &mut Vec<Bytes>, held: usize, undelivered: usize) -> bool {
        let mut state = lock(&self.state);
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
    pub(crate) fn has_news(&self, held: usize, undelivered: usize, is_open: bool) -> bool {
        let state = lock(&self.state);
        let has_room = held + undelivered < self.queue_size;
        is_open && ((has_room && !state.waiting.is_empty()) || (state.is_closed && state.waiting.is_empty()))
    }

    /// Nothing more is wanted; what was put is all that comes.
    pub(crate) fn take_all(&self, into: &mut Vec<Bytes>) {
        let mut state = lock(&self.state);
        state.is_closed = true;
        into.extend(state.waiting.drain(..));
        drop(state);
        self.has_room.notify_all();
    }
}

/// A message to the thread that drives the engine, from another one.
#[derive(Debug)]
pub(crate) enum Message {
    /// A worker's process runs, or does not and why.
    Started { slot: usize, generation: u64, outcome: Result<Box<Process>, NotStarted> },
    /// A worker's process is gone, with all it started.
    Buried { slot: usize, generation: u64, cause: WorkerExitCause },
    /// A worker used more than it may.
    Excess { slot: usize, generation: u64, excess: BoundExceeded },
    /// A worker used more than it may, by somebody else's account of its process.
    ReportedExcess { worker: WorkerId, pid: u32, excess: BoundExceeded },
    /// There is another place for a worker.
    Add(WorkerSlot),
    /// A place is taken away.
    Withdraw { worker: WorkerId, why: Arc<str> },
    /// Everything is to end, now.
    Cancel,
    /// What is not done is given up; the workers end as they do when all is done.
    Stop,
    /// Nothing is to be begun any more.
    FinishSoon,
    /// Somebody wants to know how things stand.
    Stats(SyncSender<RunStats>),
}

/// Where messages are left.
#[derive(Debug)]
pub(crate) struct Post {
    messages: Mutex<Vec<Message>>,
    /// Readable while somebody is to wake up.
    bell: OwnedFd,
    /// Whether whoever drives sleeps, or is about to.
    is_asleep: AtomicBool,
}

impl Post {
    pub(crate) fn new() -> io::Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { messages: Mutex::default(), bell, is_asleep: AtomicBool::new(false) })
    }

    pub(crate) fn send(&self, message: Message) {
        lock(&self.messages).push(message);
        self.wake();
    }

    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.messages).is_empty()
    }

    pub(crate) fn take(&self) -> Vec<Message> {
        std::mem::take(&mut lock(&self.messages))
    }

    /// Wakes whoever drives, if that one sleeps.
    pub(crate) fn wake(&self) {
        if self.is_asleep.swap(false, Ordering::SeqCst) {
            self.ring();
        }
    }

    /// Wakes whoever drives in any case.
    pub(crate) fn ring(&self) {
        // It can only fail where it rings already.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    /// To be said before looking for work a last time, and then sleeping.
    pub(crate) fn falls_asleep(&self) {
        self.is_asleep.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_awake(&self) {
        self.is_asleep.store(false, Ordering::SeqCst);
    }

    pub(crate) fn silence(&self) {
        let _ = rustix::io::read(&self.bell, &mut [0_u8; 8]);
    }
}

impl AsFd for Post {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

/// Events on their way to the caller, results in the order that is wanted.
#[derive(Debug)]
pub(super) struct Delivery {
    order: ResultOrder,
    ready: VecDeque<RunEvent>,
    /// Results that are to be told after others.
    held: BTreeMap<TaskId, TaskEnd>,
    next: TaskId,
    pub tally: RunStats,
}

impl Delivery {
    pub(super) fn new(order: ResultOrder) -> Self {
        let (ready, held) = (VecDeque::new(), BTreeMap::new());
        Self { order, ready, held, next: TaskId(0), tally: RunStats::default() }
    }

    pub(super) fn tell(&mut self, event: RunEvent) {
        self.ready.push_back(event);
    }

    pub(super) fn over(&mut self, over: TaskEnd) {
        self.tally.count(&over.outcome);
        if self.order == ResultOrder::Completion {
            self.ready.push_back(RunEvent::TaskEnded(over));
            return;
        }
        self.held.insert(over.task, over);
        while let Some(over) = self.held.remove(&self.next) {
            self.next.0 += 1;
            self.ready.push_back(RunEvent::TaskEnded(over));
        }
    }

    /// Moves what is ready to be told.
    pub(super) fn take(&mut self, into: &mut VecDeque<RunEvent>) {
        if into.is_empty() {
            std::mem::swap(&mut self.ready, into);
        } else {
            into.append(&mut self.ready);
        }
    }

    /// Events that can be told now.
    pub(super) fn ready(&self) -> usize {
        self.ready.len()
    }

    /// What nobody took yet.
    pub(super) fn undelivered(&self) -> usize {
        self.ready.len() + self.held.len()
    }
}
