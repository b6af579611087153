//! What a worker counts where its death cannot take it along: a page of memory both sides see.
//!
//! The worker adds one to `started` before it begins a task, with the time, and one to `finished` when it has the result. So
//! whoever buries it knows which of its tasks it never touched, and which one it was at. Behind the page is its outbox: answers
//! it has not sent yet, which are read there when it is dead.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::BytesMut;

use super::{MemoryMapping, SharedBytes, create_sealed_memory};

/// Bytes of the counters: one page.
const PAGE_BYTES: usize = 4_096;
/// Bytes of the memory: the page, and the outbox behind it.
const MEMORY_BYTES: usize = PAGE_BYTES + OUTBOX_BYTES;

/// The words of the page, in their order.
#[repr(C)]
struct CounterPage {
    started: AtomicU64,
    finished: AtomicU64,
    /// When the last one was started, in ns of the monotonic clock.
    started_at: AtomicU64,
    /// Written by the dispatcher: which of those that were begun is interrupted.
    interrupted: AtomicU64,
    /// How much the worker had said before what is in its outbox.
    sent_total: AtomicU64,
    /// How much is in its outbox.
    unsent: AtomicU64,
    /// How many tasks the worker has made its own; closed by the dispatcher when it takes the others back.
    claimed: AtomicU64,
}

/// Nothing more can be claimed.
const CLAIMS_CLOSED: u64 = 1 << 63;

/// Whatever the worker is at is interrupted.
const ANY_TASK: u64 = u64::MAX;

/// What an interrupt is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InterruptReason {
    /// The task the worker is at takes too long.
    TaskTimedOut,
    /// Nobody wants anything of the worker any more.
    StopRequested,
}

/// What was counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct TaskCounts {
    /// Tasks that were begun.
    pub started: u64,
    /// Tasks that were finished, well or not.
    pub finished: u64,
    /// When the last one was begun, in ns of the monotonic clock.
    pub started_at_ns: u64,
}

/// The page, on one side.
#[derive(Debug)]
pub struct WorkerCounters {
    /// The page, and the outbox where there is one.
    mapping: MemoryMapping,
    memory: OwnedFd,
}

impl WorkerCounters {
    /// A new page of zeros, which nobody can shorten: whoever reads it is never surprised.
    pub(crate) fn new() -> io::Result<Self> {
        let memory = |bytes: usize| create_sealed_memory("gpupool-worker", bytes as u64);
        // A program whose files may not be long (`ulimit -f`) has no outbox.
        Self::from_memory(memory(MEMORY_BYTES).or_else(|_| memory(PAGE_BYTES))?)
    }

    /// The page behind a file descriptor.
    pub(crate) fn from_memory(memory: OwnedFd) -> io::Result<Self> {
        let size = usize::try_from(rustix::fs::fstat(&memory)?.st_size).unwrap_or(0);
        let length = if size >= MEMORY_BYTES { MEMORY_BYTES } else { PAGE_BYTES };
        if size < length {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the memory of the counters is too short"));
        }
        Ok(Self { mapping: MemoryMapping::shared(&memory, 0, length as u64)?, memory })
    }

    /// What was counted so far.
    pub(crate) fn read(&self) -> TaskCounts {
        let page = self.page();
        // Finished first: it never runs ahead of what was started.
        let finished = page.finished.load(Ordering::Acquire);
        let started = page.started.load(Ordering::Acquire);
        TaskCounts { started, finished, started_at_ns: page.started_at.load(Ordering::Acquire) }
    }

    /// The worker's: makes the next task its own, before it is begun. `false` where that was taken back, as everything up to
    /// [`super::Kind::Recalled`] was.
    pub(crate) fn claim_task(&self) -> bool {
        let claimed = &self.page().claimed;
        let open = |count: u64| (count & CLAIMS_CLOSED == 0).then(|| count.wrapping_add(1));
        claimed.fetch_update(Ordering::AcqRel, Ordering::Acquire, open).is_ok()
    }

    /// The worker's: it has left out what was taken back, and what comes now can be claimed.
    pub(crate) fn reopen_claims(&self) {
        self.page().claimed.fetch_and(!CLAIMS_CLOSED, Ordering::AcqRel);
    }

    /// The dispatcher's: takes back what is not claimed; how many tasks are.
    pub(crate) fn recall_unclaimed(&self) -> u64 {
        self.page().claimed.fetch_or(CLAIMS_CLOSED, Ordering::AcqRel) & !CLAIMS_CLOSED
    }

    /// A task is begun now.
    pub(crate) fn record_start(&self) {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let now = now.tv_sec.unsigned_abs().wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec.unsigned_abs());
        self.page().started_at.store(now, Ordering::Release);
        self.page().started.fetch_add(1, Ordering::AcqRel);
    }

    /// It is finished.
    pub(crate) fn record_finish(&self) {
        self.page().finished.fetch_add(1, Ordering::AcqRel);
    }

    /// The dispatcher's: the task that was begun as the nth is about to be interrupted.
    pub(crate) fn mark_interrupted(&self, nth: u64) {
        self.page().interrupted.store(nth, Ordering::Release);
    }

    /// The dispatcher's: whatever the worker is at is about to be interrupted.
    pub(crate) fn mark_all_interrupted(&self) {
        self.mark_interrupted(ANY_TASK);
    }

    /// The worker's: what an interrupt that came is about; `None` where it is not for the task the worker is at, and may have
    /// come too late for one that is done.
    pub fn interrupt_reason(&self) -> Option<InterruptReason> {
        let TaskCounts { started, finished, .. } = self.read();
        match self.page().interrupted.load(Ordering::Acquire) {
            _ if started == finished => None,
            ANY_TASK => Some(InterruptReason::StopRequested),
            nth => (nth == started).then_some(InterruptReason::TaskTimedOut),
        }
    }

    /// The worker's: whether nobody wants anything of it any more.
    pub fn is_stop_requested(&self) -> bool {
        self.page().interrupted.load(Ordering::Acquire) == ANY_TASK
    }

    /// Whether there is an outbox.
    pub(crate) fn has_outbox(&self) -> bool {
        self.mapping.length() == MEMORY_BYTES
    }

    /// What is in the outbox, if there is one; nothing where the page says more than fits.
    fn outbox(&self) -> Option<SharedBytes<'_>> {
        // The page may change at any time: its word is taken once.
        let length = Some(self.outbox_length()).filter(|unsent| *unsent <= OUTBOX_BYTES && self.has_outbox())?;
        Some(self.mapping.bytes(PAGE_BYTES, length))
    }

    #[allow(unsafe_code, reason = "memory that two processes share")]
    fn page(&self) -> &CounterPage {
        // SAFETY: mapped as long as self lives, aligned to a page, and any bytes are atomics.
        unsafe { self.mapping.address().cast().as_ref() }
    }
}

impl AsFd for WorkerCounters {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

// Answers a worker has not sent yet, in memory its dispatcher sees: they do not die with it.
//
// Everything a worker says has a position in what it says in all. The outbox holds the bytes from `said` on, `unsent` many. Who
// knows how many bytes arrived knows which of them did not.

/// Bytes an outbox holds.
const OUTBOX_BYTES: usize = 128 * 1_024;

impl WorkerCounters {
    /// The worker's: adds bytes to its outbox, all or none of them. Whether there was room.
    pub(crate) fn append_outbox(&self, pieces: [&[u8]; 2]) -> bool {
        let mut to = self.outbox_length();
        let length: usize = pieces.iter().map(|piece| piece.len()).sum();
        if !self.has_outbox() || to.saturating_add(length) > OUTBOX_BYTES {
            return false;
        }
        for piece in pieces {
            // Only the worker writes there, and one thread of it at a time.
            self.mapping.write(PAGE_BYTES + to, piece);
            to += piece.len();
        }
        // There before it counts: whoever reads it after our death reads whole frames.
        self.page().unsent.store(to as u64, Ordering::Release);
        true
    }

    /// The worker's: how much is in its outbox.
    pub(crate) fn outbox_length(&self) -> usize {
        usize::try_from(self.page().unsent.load(Ordering::Acquire)).unwrap_or(usize::MAX)
    }

    /// The worker's: sends what is in its outbox, and empties it. The buffer is for a copy, because other processes may change
    /// this memory.
    pub(crate) fn send_outbox(
        &self,
        copy: &mut BytesMut,
        send: impl FnOnce(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let Some(outbox) = self.outbox().filter(|outbox| !outbox.is_empty()) else { return Ok(()) };
        copy.clear();
        outbox.append_to(copy);
        let sent = send(copy);
        // In this order: in between it says that there is nothing, which is so.
        self.page().unsent.store(0, Ordering::Release);
        self.record_sent(outbox.len() as u64);
        sent
    }

    /// The worker's: bytes were sent past the outbox, which was empty.
    pub(crate) fn record_sent(&self, bytes: u64) {
        self.page().sent_total.fetch_add(bytes, Ordering::AcqRel);
    }

    /// The dispatcher's, of a worker that is dead: what it said and could not send. So many bytes arrived, the last of which may
    /// be the beginning of a frame. Nothing, where these are not what the outbox says: then somebody else wrote to the socket.
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

/// Whether a frame begins at this position of an outbox, or the last one ends there.
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
    fn both_sides_see_what_one_counts() {
        let ours = WorkerCounters::new().unwrap();
        let theirs = WorkerCounters::from_memory(ours.as_fd().try_clone_to_owned().unwrap()).unwrap();
        theirs.record_start();
        let amid = ours.read();
        assert_eq!((amid.started, amid.finished), (1, 0));
        assert!(amid.started_at_ns > 0);
        theirs.record_finish();
        theirs.record_start();
        drop(theirs);
        assert_eq!((ours.read().started, ours.read().finished), (2, 1));
    }

    #[test]
    fn an_interrupt_is_for_one_task_and_not_for_the_next() {
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
    fn what_is_recalled_cannot_be_claimed_and_what_is_claimed_not_recalled() {
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

    /// A frame of a kind and a task that do not matter here.
    fn frame(text: &str) -> Vec<u8> {
        let length = u32::try_from(9 + text.len()).unwrap();
        [&length.to_le_bytes()[..], &[68; 9], text.as_bytes()].concat()
    }

    #[test]
    fn what_was_not_sent_is_known_by_how_much_arrived() {
        let counters = WorkerCounters::new().unwrap();
        let (one, two, three) = (frame("one"), frame("two"), frame("three"));
        assert!(counters.append_outbox([&one, b""]) && counters.append_outbox([&two[..13], &two[13..]]));
        let both = [one.clone(), two.clone()].concat();
        assert_eq!(counters.recover_unsent(0, b""), both);
        assert_eq!(counters.recover_unsent(one.len() as u64, b""), two);
        assert_eq!(counters.recover_unsent(both.len() as u64, b""), b"");
        let amid = one.len() + 5;
        assert_eq!(counters.recover_unsent(amid as u64, &two[..5]), &two[5..]);
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
    fn what_somebody_else_wrote_to_the_socket_is_not_gone_on_with() {
        let counters = WorkerCounters::new().unwrap();
        let (one, two) = (frame("one"), frame("two"));
        assert!(counters.append_outbox([&one, &two]));
        // Half a frame that is none of the worker's, or bytes that end amid one of its frames.
        for (received, partial_frame) in
            [(7, &b"garbage"[..]), (7, &b""[..]), (one.len() as u64 + 3, &b"abc"[..]), (999, &b""[..])]
        {
            assert_eq!(counters.recover_unsent(received, partial_frame), b"", "{received} {partial_frame:?}");
        }
        counters.record_sent(50);
        assert_eq!(counters.recover_unsent(7, b""), b"");
    }

    #[test]
    fn what_does_not_fit_is_not_put_at_all() {
        let counters = WorkerCounters::new().unwrap();
        assert!(counters.append_outbox([&[b'x'; OUTBOX_BYTES - 1], b""]));
        assert!(!counters.append_outbox([b"y", b"z"]));
        assert!(counters.append_outbox([b"", b"y"]));
        assert_eq!(counters.outbox_length(), OUTBOX_BYTES);
        counters.page().unsent.store(u64::MAX, Ordering::Release);
        assert!(!counters.append_outbox([b"z", b""]) && counters.recover_unsent(0, b"").is_empty());
    }
}
