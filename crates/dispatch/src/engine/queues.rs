//! Input and output of the engine: the task queue, messages of other threads, and events.

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
use crate::plan::{ResultOrder, WorkerProtocol, WorkerSlot};
use crate::process::{WorkerProcess, WorkerStartError};
use crate::{RunStats, TaskId, WorkerExitCause, WorkerId};

/// Queue of submitted tasks that the engine has not accepted yet. Bounded by `queue_size`.
#[derive(Debug)]
pub(crate) struct TaskQueue {
    protocol: WorkerProtocol,
    queue_size: usize,
    state: Mutex<TaskQueueState>,
    has_room: Condvar,
}

#[derive(Debug, Default)]
struct TaskQueueState {
    waiting: VecDeque<Bytes>,
    /// Accepted tasks that no worker has started, plus undelivered results.
    outstanding: usize,
    /// Number of the next task.
    next_task: u64,
    /// Whether no more tasks are accepted.
    is_closed: bool,
}

impl TaskQueue {
    pub(crate) fn new(protocol: WorkerProtocol, queue_size: usize) -> Self {
        Self { protocol, queue_size, state: Mutex::default(), has_room: Condvar::new() }
    }

    /// Returns the number of tasks that can be submitted without waiting.
    pub(crate) fn room(&self) -> usize {
        self.room_in(&lock(&self.state))
    }

    fn room_in(&self, state: &TaskQueueState) -> usize {
        if state.is_closed { 0 } else { self.queue_size.saturating_sub(state.waiting.len() + state.outstanding) }
    }

    /// Submits a task. With `waits_for_room`, waits while the queue is full.
    pub(crate) fn push_task(&self, payload: Bytes, waits_for_room: bool) -> Result<TaskId, SubmitError> {
        self.protocol.check(&payload)?;
        let mut state = lock(&self.state);
        while self.room_in(&state) == 0 {
            if state.is_closed {
                return Err(SubmitError::Closed);
            }
            if !waits_for_room {
                return Err(SubmitError::Full);
            }
            state = self.has_room.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let task = TaskId(state.next_task);
        state.next_task += 1;
        state.waiting.push_back(payload);
        Ok(task)
    }

    /// Returns the id of the next task.
    pub(crate) fn next_task_id(&self) -> TaskId {
        TaskId(lock(&self.state).next_task)
    }

    /// Closes the queue to further tasks.
    pub(crate) fn close(&self) {
        lock(&self.state).is_closed = true;
        self.has_room.notify_all();
    }

    /// Moves as many tasks as the engine has room for, given its unstarted tasks and undelivered results. Returns
    /// whether the queue is closed and empty.
    pub(crate) fn take_tasks(&self, into: &mut Vec<Bytes>, unstarted: usize, undelivered: usize) -> bool {
        let mut state = lock(&self.state);
        let before = self.room_in(&state);
        let room = self.queue_size.saturating_sub(unstarted + undelivered).min(state.waiting.len());
        into.extend(state.waiting.drain(..room));
        state.outstanding = unstarted + undelivered + room;
        let is_last = state.is_closed && state.waiting.is_empty();
        let has_more_room = before == 0 && self.room_in(&state) > 0;
        drop(state);
        if has_more_room {
            self.has_room.notify_all();
        }
        is_last
    }

    /// Whether [`TaskQueue::take_tasks`] would return tasks or the end of the input.
    pub(crate) fn has_update(&self, unstarted: usize, undelivered: usize, is_open: bool) -> bool {
        let state = lock(&self.state);
        let has_room = unstarted + undelivered < self.queue_size;
        is_open && ((has_room && !state.waiting.is_empty()) || (state.is_closed && state.waiting.is_empty()))
    }

    /// Closes the queue and returns everything in it.
    pub(crate) fn close_and_drain(&self, into: &mut Vec<Bytes>) {
        let mut state = lock(&self.state);
        state.is_closed = true;
        into.extend(state.waiting.drain(..));
        drop(state);
        self.has_room.notify_all();
    }
}

/// A message of another thread to the driver of the engine.
#[derive(Debug)]
pub(crate) enum EngineMessage {
    /// The process of a worker was started, or failed to start.
    Started { slot: usize, generation: u64, outcome: Result<Box<WorkerProcess>, WorkerStartError> },
    /// The process of a worker and all its descendants have exited.
    Reaped { slot: usize, generation: u64, cause: WorkerExitCause },
    /// A worker exceeded a bound.
    ExceededBound { slot: usize, generation: u64, excess: BoundExceeded },
    /// A worker exceeded a bound according to an external measurement of this process.
    ReportedExceededBound { worker: WorkerId, pid: u32, excess: BoundExceeded },
    /// Adds a worker slot, or restores a withdrawn one.
    AddSlot(WorkerSlot),
    /// Withdraws a worker slot and kills its worker.
    WithdrawSlot { worker: WorkerId, why: Arc<str> },
    /// Ends everything now.
    Cancel,
    /// Cancels unfinished tasks and stops the workers in order.
    Stop,
    /// Cancels tasks that no worker has started.
    CancelPending,
    /// Requests the statistics.
    Stats(SyncSender<RunStats>),
}

/// Mailbox of the engine.
#[derive(Debug)]
pub(crate) struct EngineMailbox {
    messages: Mutex<Vec<EngineMessage>>,
    /// Eventfd that wakes a sleeping driver.
    wakeup: OwnedFd,
    /// Whether the driver sleeps or is about to.
    is_asleep: AtomicBool,
}

impl EngineMailbox {
    pub(crate) fn new() -> io::Result<Self> {
        let wakeup = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { messages: Mutex::default(), wakeup, is_asleep: AtomicBool::new(false) })
    }

    pub(crate) fn send(&self, message: EngineMessage) {
        lock(&self.messages).push(message);
        self.wake_driver();
    }

    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.messages).is_empty()
    }

    pub(crate) fn take_messages(&self) -> Vec<EngineMessage> {
        std::mem::take(&mut lock(&self.messages))
    }

    /// Wakes the driver if it sleeps.
    pub(crate) fn wake_driver(&self) {
        if self.is_asleep.swap(false, Ordering::SeqCst) {
            self.force_wakeup();
        }
    }

    /// Wakes the driver in any case.
    pub(crate) fn force_wakeup(&self) {
        // The write fails only if the counter is full, and then the wakeup is pending already.
        let _ = rustix::io::write(&self.wakeup, &1_u64.to_ne_bytes());
    }

    /// Announces a sleep. Check for work again after this call.
    pub(crate) fn announce_sleep(&self) {
        self.is_asleep.store(true, Ordering::SeqCst);
    }

    pub(crate) fn end_sleep(&self) {
        self.is_asleep.store(false, Ordering::SeqCst);
    }

    pub(crate) fn clear_wakeup(&self) {
        let _ = rustix::io::read(&self.wakeup, &mut [0_u8; 8]);
    }
}

impl AsFd for EngineMailbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wakeup.as_fd()
    }
}

/// Events on their way to the caller, with results in the configured order.
#[derive(Debug)]
pub(super) struct EventQueue {
    order: ResultOrder,
    ready: VecDeque<RunEvent>,
    /// Results that wait for the results of earlier tasks.
    out_of_order: BTreeMap<TaskId, TaskEnd>,
    next_task: TaskId,
    pub totals: RunStats,
}

impl EventQueue {
    pub(super) fn new(order: ResultOrder) -> Self {
        let (ready, out_of_order) = (VecDeque::new(), BTreeMap::new());
        Self { order, ready, out_of_order, next_task: TaskId(0), totals: RunStats::default() }
    }

    pub(super) fn push_event(&mut self, event: RunEvent) {
        self.ready.push_back(event);
    }

    pub(super) fn push_task_end(&mut self, end: TaskEnd) {
        self.totals.count(&end.outcome);
        if self.order == ResultOrder::Completion {
            self.ready.push_back(RunEvent::TaskEnded(end));
            return;
        }
        self.out_of_order.insert(end.task, end);
        while let Some(end) = self.out_of_order.remove(&self.next_task) {
            self.next_task.0 += 1;
            self.ready.push_back(RunEvent::TaskEnded(end));
        }
    }

    /// Moves the ready events to the caller.
    pub(super) fn drain_into(&mut self, into: &mut VecDeque<RunEvent>) {
        if into.is_empty() {
            std::mem::swap(&mut self.ready, into);
        } else {
            into.append(&mut self.ready);
        }
    }

    /// Returns the number of events that can be delivered now.
    pub(super) fn ready_count(&self) -> usize {
        self.ready.len()
    }

    /// Returns the number of events and results that the caller has not taken.
    pub(super) fn undelivered_count(&self) -> usize {
        self.ready.len() + self.out_of_order.len()
    }
}
