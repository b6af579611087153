//! Answers a worker has not sent yet, in memory its dispatcher sees: they do not die with it.
//!
//! Everything a worker says has a place in what it says in all. The outbox holds the bytes from `said` on, `unsent` many. Who
//! knows how many bytes arrived knows which of them did not.

use std::sync::atomic::Ordering;

use super::counters::Counters;

/// Bytes an outbox holds.
pub(super) const OUTBOX_BYTES: usize = 128 * 1_024;

impl Counters {
    /// The worker's: adds bytes to its outbox, all or none of them. Whether there was room.
    #[allow(unsafe_code, reason = "memory that two processes share")]
    pub(crate) fn put(&self, pieces: [&[u8]; 2]) -> bool {
        let Some(outbox) = self.outbox_at() else { return false };
        let unsent = &self.page().unsent;
        let at = usize::try_from(unsent.load(Ordering::Acquire)).unwrap_or(OUTBOX_BYTES);
        let length: usize = pieces.iter().map(|piece| piece.len()).sum();
        if at.saturating_add(length) > OUTBOX_BYTES {
            return false;
        }
        let mut to = at;
        for piece in pieces {
            // SAFETY: within the outbox, as was asked above; only the worker writes there, and one thread of it at a time.
            unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), outbox.as_ptr().add(to), piece.len()) };
            to += piece.len();
        }
        // There before it counts: whoever reads it after our death reads whole frames.
        unsent.store(to as u64, Ordering::Release);
        true
    }

    /// The worker's: how much is in its outbox.
    pub(crate) fn unsent(&self) -> usize {
        usize::try_from(self.page().unsent.load(Ordering::Acquire)).unwrap_or(usize::MAX)
    }

    /// The worker's: sends what is in its outbox, and empties it.
    #[allow(unsafe_code, reason = "memory that two processes share")]
    pub(crate) fn send(&self, send: impl FnOnce(&[u8]) -> std::io::Result<()>) -> std::io::Result<()> {
        let length = self.page().unsent.load(Ordering::Acquire);
        let Some(outbox) = self.outbox_at().filter(|_| length > 0) else { return Ok(()) };
        let count = usize::try_from(length).unwrap_or(OUTBOX_BYTES).min(OUTBOX_BYTES);
        // SAFETY: within the outbox; nobody writes there while its only writer is here.
        let sent = send(unsafe { std::slice::from_raw_parts(outbox.as_ptr(), count) });
        // In this order: in between it says that there is nothing, which is so.
        self.page().unsent.store(0, Ordering::Release);
        self.said_more(length);
        sent
    }

    /// The worker's: bytes were sent past the outbox, which was empty.
    pub(crate) fn said_more(&self, bytes: u64) {
        self.page().said.fetch_add(bytes, Ordering::AcqRel);
    }

    /// The dispatcher's, of a worker that is dead: what it said after so many bytes, and could not send.
    #[allow(unsafe_code, reason = "memory that two processes share")]
    pub(crate) fn unsent_after(&self, arrived: u64) -> Vec<u8> {
        let Some(outbox) = self.outbox_at() else { return Vec::new() };
        let (said, unsent) = (self.page().said.load(Ordering::Acquire), self.page().unsent.load(Ordering::Acquire));
        let range = arrived.checked_sub(said).filter(|_| unsent <= OUTBOX_BYTES as u64).map(|from| from..unsent);
        let Some(range) = range.filter(|range| !range.is_empty()) else { return Vec::new() };
        let (from, count) = (range.start as usize, (range.end - range.start) as usize);
        // SAFETY: within the outbox, as was asked above; its writer is dead. Copied: whoever else has the memory may change it.
        unsafe { std::slice::from_raw_parts(outbox.as_ptr().add(from), count) }.to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(counters: &Counters, arrived: u64) -> String {
        String::from_utf8(counters.unsent_after(arrived)).unwrap()
    }

    #[test]
    fn what_was_not_sent_is_known_by_how_much_arrived() {
        let counters = Counters::new().unwrap();
        assert!(counters.put([b"one ", b"two "]));
        assert_eq!(
            (said(&counters, 0), said(&counters, 4), said(&counters, 8)),
            ("one two ".into(), "two ".into(), String::new())
        );
        let mut sent = Vec::new();
        counters
            .send(|bytes| {
                sent.extend_from_slice(bytes);
                Ok(())
            })
            .unwrap();
        assert_eq!((sent.as_slice(), said(&counters, 8)), (&b"one two "[..], String::new()));
        counters.said_more(100);
        assert!(counters.put([b"three", b""]));
        assert_eq!(said(&counters, 108), "three");
        // Somebody who counts what cannot be is told nothing.
        assert_eq!((said(&counters, 7), said(&counters, 999)), (String::new(), String::new()));
    }

    #[test]
    fn what_does_not_fit_is_not_put_at_all() {
        let counters = Counters::new().unwrap();
        assert!(counters.put([&[b'x'; OUTBOX_BYTES - 1], b""]));
        assert!(!counters.put([b"y", b"z"]));
        assert!(counters.put([b"", b"y"]));
        assert_eq!(counters.unsent_after(0).len(), OUTBOX_BYTES);
        counters.page().unsent.store(u64::MAX, Ordering::Release);
        assert!(!counters.put([b"z", b""]) && counters.unsent_after(0).is_empty());
    }
}
