//! Messages to whoever drives the engine, from other threads.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, PoisonError};

use gpupool_confine::bounds::Excess;
use gpupool_confine::spawn::JobEnd;
use rustix::event::{EventfdFlags, eventfd};

use crate::plan::Place;
use crate::process::{NotStarted, Process};
use crate::{Stats, WorkerId};

/// A message.
#[derive(Debug)]
pub(crate) enum Message {
    /// A worker's process runs, or does not and why.
    Started { slot: usize, generation: u64, outcome: Result<Box<Process>, NotStarted> },
    /// A worker's process is gone, with all it started.
    Buried { slot: usize, generation: u64, end: Option<JobEnd>, excess: Option<Excess> },
    /// A worker used more than it may.
    Excess { slot: usize, generation: u64, excess: Excess },
    /// A worker used more than it may, by somebody else's account of its process.
    ReportedExcess { worker: WorkerId, pid: u32, excess: Excess },
    /// There is another place for a worker.
    Add(Place),
    /// A place is taken away.
    Withdraw { worker: WorkerId, why: Arc<str> },
    /// Everything is to end, now.
    Cancel,
    /// What is not done is given up; the workers end as they do when all is done.
    Stop,
    /// Nothing is to be begun any more.
    FinishSoon,
    /// Somebody wants to know how things stand.
    Stats(SyncSender<Stats>),
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
    pub fn new() -> io::Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { messages: Mutex::default(), bell, is_asleep: AtomicBool::new(false) })
    }

    pub fn send(&self, message: Message) {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner).push(message);
        self.wake();
    }

    pub fn is_empty(&self) -> bool {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    pub fn take(&self) -> Vec<Message> {
        std::mem::take(&mut self.messages.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Wakes whoever drives, if that one sleeps.
    pub fn wake(&self) {
        if self.is_asleep.swap(false, Ordering::SeqCst) {
            self.ring();
        }
    }

    /// Wakes whoever drives in any case.
    pub fn ring(&self) {
        // It can only fail where it rings already.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    /// To be said before looking for work a last time, and then sleeping.
    pub fn falls_asleep(&self) {
        self.is_asleep.store(true, Ordering::SeqCst);
    }

    pub fn is_awake(&self) {
        self.is_asleep.store(false, Ordering::SeqCst);
    }

    pub fn silence(&self) {
        let _ = rustix::io::read(&self.bell, &mut [0_u8; 8]);
    }
}

impl AsFd for Post {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}
