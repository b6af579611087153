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

    /// The dispatcher's, of a worker that is dead: what it said and could not send. So many bytes arrived, the last of which may
    /// be the beginning of a frame. Nothing, where these are not what the outbox says: then somebody else wrote to the socket.
    pub(crate) fn unsent_after(&self, arrived: u64, begun: &[u8]) -> Vec<u8> {
        let outbox = self.copy_of_outbox();
        let said = self.page().said.load(Ordering::Acquire);
        let from = arrived.checked_sub(begun.len() as u64).and_then(|frame| frame.checked_sub(said));
        let from = from.and_then(|from| usize::try_from(from).ok()).filter(|from| is_frame(&outbox, *from));
        let rest = from.and_then(|from| outbox.get(from..)?.strip_prefix(begun));
        rest.map(<[u8]>::to_vec).unwrap_or_default()
    }

    #[allow(unsafe_code, reason = "memory that two processes share")]
    fn copy_of_outbox(&self) -> Vec<u8> {
        let unsent = usize::try_from(self.page().unsent.load(Ordering::Acquire)).unwrap_or(usize::MAX);
        let Some(outbox) = self.outbox_at().filter(|_| unsent <= OUTBOX_BYTES) else { return Vec::new() };
        // SAFETY: within the outbox; its writer is dead. Copied: whoever else has the memory may change it.
        unsafe { std::slice::from_raw_parts(outbox.as_ptr(), unsent) }.to_vec()
    }
}

/// Whether a frame begins at this place of an outbox, or the last one ends there.
fn is_frame(outbox: &[u8], place: usize) -> bool {
    let mut at = 0;
    while at < place {
        let Some(length) = outbox.get(at..).and_then(<[u8]>::first_chunk) else { return false };
        at = at.saturating_add(4).saturating_add(u32::from_le_bytes(*length) as usize);
    }
    at == place && at <= outbox.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A frame of a kind and a task that do not matter here.
    fn frame(text: &str) -> Vec<u8> {
        let length = u32::try_from(9 + text.len()).unwrap();
        [&length.to_le_bytes()[..], &[68; 9], text.as_bytes()].concat()
    }

    #[test]
    fn what_was_not_sent_is_known_by_how_much_arrived() {
        let counters = Counters::new().unwrap();
        let (one, two, three) = (frame("one"), frame("two"), frame("three"));
        assert!(counters.put([&one, b""]) && counters.put([&two[..13], &two[13..]]));
        let both = [one.clone(), two.clone()].concat();
        assert_eq!(counters.unsent_after(0, b""), both);
        assert_eq!(counters.unsent_after(one.len() as u64, b""), two);
        assert_eq!(counters.unsent_after(both.len() as u64, b""), b"");
        let amid = one.len() + 5;
        assert_eq!(counters.unsent_after(amid as u64, &two[..5]), &two[5..]);
        let mut sent = Vec::new();
        counters
            .send(|bytes| {
                sent.extend_from_slice(bytes);
                Ok(())
            })
            .unwrap();
        assert_eq!((&sent, counters.unsent_after(both.len() as u64, b"")), (&both, Vec::new()));
        counters.said_more(100);
        assert!(counters.put([&three, b""]));
        assert_eq!(counters.unsent_after(both.len() as u64 + 100, b""), three);
    }

    #[test]
    fn what_somebody_else_wrote_to_the_socket_is_not_gone_on_with() {
        let counters = Counters::new().unwrap();
        let (one, two) = (frame("one"), frame("two"));
        assert!(counters.put([&one, &two]));
        // Half a frame that is none of the worker's, or bytes that end amid one of its frames.
        for (arrived, begun) in
            [(7, &b"garbage"[..]), (7, &b""[..]), (one.len() as u64 + 3, &b"abc"[..]), (999, &b""[..])]
        {
            assert_eq!(counters.unsent_after(arrived, begun), b"", "{arrived} {begun:?}");
        }
        counters.said_more(50);
        assert_eq!(counters.unsent_after(7, b""), b"");
    }

    #[test]
    fn what_does_not_fit_is_not_put_at_all() {
        let counters = Counters::new().unwrap();
        assert!(counters.put([&[b'x'; OUTBOX_BYTES - 1], b""]));
        assert!(!counters.put([b"y", b"z"]));
        assert!(counters.put([b"", b"y"]));
        assert_eq!(counters.unsent(), OUTBOX_BYTES);
        counters.page().unsent.store(u64::MAX, Ordering::Release);
        assert!(!counters.put([b"z", b""]) && counters.unsent_after(0, b"").is_empty());
    }
}
