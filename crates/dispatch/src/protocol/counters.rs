//! Counters of a worker in a memory page that both sides map, so that they survive the worker.
//!
//! The worker increments `started` (and stores the time) before it starts a task, and `finished` when it has the
//! result. After its exit the counters show which tasks it never started and which one it was running. Behind the page
//! lies its outbox: results that it has not sent yet.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::BytesMut;

use super::{MemoryMapping, SharedBytes, create_sealed_memory};

/// Bytes of the counters: one page.
const PAGE_BYTES: usize = 4_096;
/// Bytes of the memory: the page, then the outbox.
const MEMORY_BYTES: usize = PAGE_BYTES + OUTBOX_BYTES;

/// Layout of the page.
#[repr(C)]
struct CounterPage {
    started: AtomicU64,
    finished: AtomicU64,
    /// Start time of the last task, in ns of the monotonic clock.
    started_at: AtomicU64,
    /// Written by the dispatcher: ordinal of the started task that is interrupted.
    interrupted: AtomicU64,
    /// Bytes that the worker sent before those in its outbox.
    sent_total: AtomicU64,
    /// Bytes in the outbox.
    unsent: AtomicU64,
    /// Number of claimed tasks; the dispatcher sets the top bit to recall the others.
    claimed: AtomicU64,
}

/// Bit that forbids further claims.
const CLAIMS_CLOSED: u64 = 1 << 63;

/// Interrupts any task.
const ANY_TASK: u64 = u64::MAX;

/// Reason of an interrupt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InterruptReason {
    /// The current task exceeded its time limit.
    TaskTimedOut,
    /// The dispatcher needs no more results of this worker.
    StopRequested,
}

/// Snapshot of the counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct TaskCounts {
    /// Tasks that were started.
    pub started: u64,
    /// Tasks that succeeded or failed.
    pub finished: u64,
    /// Start time of the last task, in ns of the monotonic clock.
    pub started_at_ns: u64,
}

/// One side's mapping of the counters.
#[derive(Debug)]
pub struct WorkerCounters {
    /// The page, and the outbox if there is one.
    mapping: MemoryMapping,
    memory: OwnedFd,
}

impl WorkerCounters {
    /// Creates zeroed counters. The memory is sealed, so no process can shrink it under a reader.
    pub(crate) fn new() -> io::Result<Self> {
        let memory = |bytes: usize| create_sealed_memory("gpupool-worker", bytes as u64);
        // A program with a small file size limit (`ulimit -f`) has no outbox.
        Self::from_memory(memory(MEMORY_BYTES).or_else(|_| memory(PAGE_BYTES))?)
    }

    /// Maps the counters behind a file descriptor.
    pub(crate) fn from_memory(memory: OwnedFd) -> io::Result<Self> {
        let size = usize::try_from(rustix::fs::fstat(&memory)?.st_size).unwrap_or(0);
        let length = if size >= MEMORY_BYTES { MEMORY_BYTES } else { PAGE_BYTES };
        if size < length {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the shared memory is too short for the counters"));
        }
        Ok(Self { mapping: MemoryMapping::shared(&memory, 0, length as u64)?, memory })
    }

    /// Reads the counters.
    pub(crate) fn read(&self) -> TaskCounts {
        let page = self.page();
        // Reads `finished` first, so that it never exceeds `started`.
        let finished = page.finished.load(Ordering::Acquire);
        let started = page.started.load(Ordering::Acquire);
        TaskCounts { started, finished, started_at_ns: page.started_at.load(Ordering::Acquire) }
    }

    /// Claims the next task before its start. For the worker. Returns `false` if the task was recalled, as are all
    /// tasks up to [`super::FrameKind::Recalled`].
    pub(crate) fn claim_task(&self) -> bool {
        let claimed = &self.page().claimed;
        let open = |count: u64| (count & CLAIMS_CLOSED == 0).then(|| count.wrapping_add(1));
        claimed.fetch_update(Ordering::AcqRel, Ordering::Acquire, open).is_ok()
    }

    /// Allows claims again after the recalled tasks were skipped. For the worker.
    pub(crate) fn reopen_claims(&self) {
        self.page().claimed.fetch_and(!CLAIMS_CLOSED, Ordering::AcqRel);
    }

    /// Recalls the unclaimed tasks. For the dispatcher. Returns the number of claimed tasks.
    pub(crate) fn recall_unclaimed(&self) -> u64 {
        self.page().claimed.fetch_or(CLAIMS_CLOSED, Ordering::AcqRel) & !CLAIMS_CLOSED
    }

    /// Counts the start of a task. For the worker.
    pub(crate) fn record_start(&self) {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let now = now.tv_sec.unsigned_abs().wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec.unsigned_abs());
        self.page().started_at.store(now, Ordering::Release);
        self.page().started.fetch_add(1, Ordering::AcqRel);
    }

    /// Counts the end of a task. For the worker.
    pub(crate) fn record_finish(&self) {
        self.page().finished.fetch_add(1, Ordering::AcqRel);
    }

    /// Announces an interrupt of the task that was started as the nth. For the dispatcher.
    pub(crate) fn mark_interrupted(&self, nth: u64) {
        self.page().interrupted.store(nth, Ordering::Release);
    }

    /// Announces an interrupt of any task. For the dispatcher.
    pub(crate) fn mark_all_interrupted(&self) {
        self.mark_interrupted(ANY_TASK);
    }

    /// Returns the reason of an interrupt. For the worker. `None` if it does not apply to the current task, for example
    /// because it came too late.
    pub fn interrupt_reason(&self) -> Option<InterruptReason> {
        let TaskCounts { started, finished, .. } = self.read();
        match self.page().interrupted.load(Ordering::Acquire) {
            _ if started == finished => None,
            ANY_TASK => Some(InterruptReason::StopRequested),
            nth => (nth == started).then_some(InterruptReason::TaskTimedOut),
        }
    }

    /// Whether the dispatcher needs no more results of this worker. For the worker.
    pub fn is_stop_requested(&self) -> bool {
        self.page().interrupted.load(Ordering::Acquire) == ANY_TASK
    }

    /// Whether the memory has an outbox.
    pub(crate) fn has_outbox(&self) -> bool {
        self.mapping.length() == MEMORY_BYTES
    }

    /// Returns the contents of the outbox, if there is one and the stored length is valid.
    fn outbox(&self) -> Option<SharedBytes<'_>> {
        // The page may change at any time, so the length is read once.
        let length = Some(self.outbox_length()).filter(|unsent| *unsent <= OUTBOX_BYTES && self.has_outbox())?;
        Some(self.mapping.bytes(PAGE_BYTES, length))
    }

    #[allow(unsafe_code, reason = "memory that two processes share")]
    fn page(&self) -> &CounterPage {
        // SAFETY: mapped for the lifetime of `self`, aligned to a page, and valid as atomics for any bytes.
        unsafe { self.mapping.address().cast().as_ref() }
    }
}

impl AsFd for WorkerCounters {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

// The outbox: unsent results of a worker, in memory that the dispatcher can read after the worker's exit.
//
// Every byte that a worker sends has a position in its whole output. The outbox holds `unsent` bytes from position
// `sent_total` on. The number of received bytes therefore shows which of them did not arrive.

/// Capacity of the outbox in bytes.
const OUTBOX_BYTES: usize = 128 * 1_024;

impl WorkerCounters {
    /// Appends the pieces to the outbox, all or none. For the worker. Returns whether they fit.
    pub(crate) fn append_outbox(&self, pieces: [&[u8]; 2]) -> bool {
        let mut to = self.outbox_length();
        let length: usize = pieces.iter().map(|piece| piece.len()).sum();
        if !self.has_outbox() || to.saturating_add(length) > OUTBOX_BYTES {
            return false;
        }
        for piece in pieces {
            // Only one thread of the worker writes here at a time.
            self.mapping.write(PAGE_BYTES + to, piece);
            to += piece.len();
        }
        // Stored after the bytes, so that a reader after the worker's exit sees complete frames.
        self.page().unsent.store(to as u64, Ordering::Release);
        true
    }

    /// Returns the number of bytes in the outbox. For the worker.
    pub(crate) fn outbox_length(&self) -> usize {
        usize::try_from(self.page().unsent.load(Ordering::Acquire)).unwrap_or(usize::MAX)
    }

    /// Sends and empties the outbox. For the worker. `copy` is a buffer, needed because other processes may change the
    /// memory.
    pub(crate) fn send_outbox(
        &self,
        copy: &mut BytesMut,
        send: impl FnOnce(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let Some(outbox) = self.outbox().filter(|outbox| !outbox.is_empty()) else { return Ok(()) };
        copy.clear();
        outbox.append_to(copy);
        let sent = send(copy);
        // In this order: in between, the outbox reads as empty, which is true.
        self.page().unsent.store(0, Ordering::Release);
        self.record_sent(outbox.len() as u64);
        sent
    }

    /// Counts bytes that bypassed the empty outbox. For the worker.
    pub(crate) fn record_sent(&self, bytes: u64) {
        self.page().sent_total.fetch_add(bytes, Ordering::AcqRel);
    }

    /// Returns the bytes that the worker could not send. For the dispatcher, after the worker's exit. `received` counts
    /// all received bytes, of which `partial_frame` are the start of a frame. Returns nothing if these bytes do not
    /// match the outbox, because another process wrote to the socket.
    pub(crate) fn recover_unsent(&self, received: u64, partial_frame: &[u8]) -> Vec<u8> {
        let mut outbox = BytesMut::new();
        if let Some(unsent) = self.outbox() {
            unsent.append_to(&mut outbox);
        }
        let sent_total = self.page().sent_total.load(Ordering::Acquire);
        let from = received.checked_sub(partial_frame.len() as u64).and_then(|frame| frame.checked_sub(sent_total));
        let from = from.and_then(|from| usize::try_from(from).ok()).filter(|from| is_frame_boundary(&outbox, *from));
        let rest = from.and_then(|from| outbox.get(from..)?.strip_prefix(partial_frame));
        rest.map(<[u8]>::to_vec).unwrap_or_default()
    }
}

/// Whether this position of the outbox is a frame boundary.
fn is_frame_boundary(outbox: &[u8], position: usize) -> bool {
    let mut at = 0;
    while at < position {
        let Some(length) = outbox.get(at..).and_then(<[u8]>::first_chunk) else { return false };
        at = at.saturating_add(4).saturating_add(u32::from_le_bytes(*length) as usize);
    }
    at == position && at <= outbox.len()
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    #[test]
    fn both_sides_see_the_counts() {
        let ours = WorkerCounters::new().unwrap();
        let theirs = WorkerCounters::from_memory(ours.as_fd().try_clone_to_owned().unwrap()).unwrap();
        theirs.record_start();
        let running = ours.read();
        assert_eq!((running.started, running.finished), (1, 0));
        assert!(running.started_at_ns > 0);
        theirs.record_finish();
        theirs.record_start();
        drop(theirs);
        assert_eq!((ours.read().started, ours.read().finished), (2, 1));
    }

    #[test]
    fn an_interrupt_applies_to_one_task_only() {
        let ours = WorkerCounters::new().unwrap();
        ours.record_start();
        assert_eq!(ours.interrupt_reason(), None);
        ours.mark_interrupted(1);
        assert_eq!(ours.interrupt_reason(), Some(InterruptReason::TaskTimedOut));
        ours.record_finish();
        assert_eq!(ours.interrupt_reason(), None);
        ours.record_start();
        assert_eq!(ours.interrupt_reason(), None);
        ours.mark_all_interrupted();
        assert_eq!(ours.interrupt_reason(), Some(InterruptReason::StopRequested));
        ours.record_finish();
        assert_eq!((ours.interrupt_reason(), ours.is_stop_requested()), (None, true));
    }

    #[test]
    fn a_task_is_either_claimed_or_recalled() {
        let counters = WorkerCounters::new().unwrap();
        assert!(counters.claim_task() && counters.claim_task());
        assert_eq!(counters.recall_unclaimed(), 2);
        assert!(!counters.claim_task());
        assert_eq!(counters.recall_unclaimed(), 2);
        counters.reopen_claims();
        assert!(counters.claim_task());
        assert_eq!(counters.recall_unclaimed(), 3);
    }

    #[test]
    fn memory_that_is_too_short_is_refused() {
        let short = memfd_create("short", MemfdFlags::CLOEXEC).unwrap();
        assert_eq!(WorkerCounters::from_memory(short).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    /// Returns a frame with an arbitrary kind and task.
    fn frame(text: &str) -> Vec<u8> {
        let length = u32::try_from(9 + text.len()).unwrap();
        [&length.to_le_bytes()[..], &[68; 9], text.as_bytes()].concat()
    }

    #[test]
    fn unsent_bytes_follow_from_the_received_count() {
        let counters = WorkerCounters::new().unwrap();
        let (one, two, three) = (frame("one"), frame("two"), frame("three"));
        assert!(counters.append_outbox([&one, b""]) && counters.append_outbox([&two[..13], &two[13..]]));
        let both = [one.clone(), two.clone()].concat();
        assert_eq!(counters.recover_unsent(0, b""), both);
        assert_eq!(counters.recover_unsent(one.len() as u64, b""), two);
        assert_eq!(counters.recover_unsent(both.len() as u64, b""), b"");
        let cut = one.len() + 5;
        assert_eq!(counters.recover_unsent(cut as u64, &two[..5]), &two[5..]);
        let mut sent = Vec::new();
        counters
            .send_outbox(&mut BytesMut::new(), |bytes| {
                sent.extend_from_slice(bytes);
                Ok(())
            })
            .unwrap();
        assert_eq!((&sent, counters.recover_unsent(both.len() as u64, b"")), (&both, Vec::new()));
        counters.record_sent(100);
        assert!(counters.append_outbox([&three, b""]));
        assert_eq!(counters.recover_unsent(both.len() as u64 + 100, b""), three);
    }

    #[test]
    fn foreign_bytes_on_the_socket_recover_nothing() {
        let counters = WorkerCounters::new().unwrap();
        let (one, two) = (frame("one"), frame("two"));
        assert!(counters.append_outbox([&one, &two]));
        // Half a frame of another process, or bytes that end inside a frame.
        for (received, partial_frame) in
            [(7, &b"garbage"[..]), (7, &b""[..]), (one.len() as u64 + 3, &b"abc"[..]), (999, &b""[..])]
        {
            assert_eq!(counters.recover_unsent(received, partial_frame), b"", "{received} {partial_frame:?}");
        }
        counters.record_sent(50);
        assert_eq!(counters.recover_unsent(7, b""), b"");
    }

    #[test]
    fn pieces_that_do_not_fit_are_not_appended() {
        let counters = WorkerCounters::new().unwrap();
        assert!(counters.append_outbox([&[b'x'; OUTBOX_BYTES - 1], b""]));
        assert!(!counters.append_outbox([b"y", b"z"]));
        assert!(counters.append_outbox([b"", b"y"]));
        assert_eq!(counters.outbox_length(), OUTBOX_BYTES);
        counters.page().unsent.store(u64::MAX, Ordering::Release);
        assert!(!counters.append_outbox([b"z", b""]) && counters.recover_unsent(0, b"").is_empty());
    }
}
