//! Worker protocol: frames over a socket, and counters in shared memory.

mod counters;
mod mapping;

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

pub(crate) use counters::TaskCounts;
pub use counters::{InterruptReason, WorkerCounters};
pub use mapping::{MemoryMapping, SharedBytes, create_sealed_memory};

use crate::TaskId;
use crate::limits::{MAX_FRAME_BYTES, READ_BYTES};

/// Protocol version. A worker refuses any other.
pub(crate) const PROTOCOL_VERSION: u32 = 1;
/// Environment variable with the descriptor number of the socket, usually 0, the standard input.
pub(crate) const SOCKET_VARIABLE: &str = "GPUPOOL_WORKER_FD";

// Frames: length, kind, task and payload.
//
// `length: u32 | kind: u8 | task: u64 | payload`, little endian; the length counts everything after itself.

/// Bytes before the payload.
pub(crate) const HEADER_BYTES: usize = 13;
/// Smallest value of the length field.
const MIN_FRAME_LENGTH: usize = HEADER_BYTES - 4;

/// Kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum FrameKind {
    /// To a worker, first: its id, GPUs and settings, in JSON.
    Hello = 1,
    /// To a worker: a task.
    Task = 2,
    /// To a worker: clean up and exit after the queued tasks.
    Stop = 3,
    /// To a worker with recallable tasks: earlier tasks that it has not claimed were recalled.
    Recalled = 4,
    /// From a worker: setup is done; protocol version and capabilities, in JSON.
    Ready = 65,
    /// From a worker: setup failed, with the reason.
    SetupFailed = 66,
    /// From a worker without counters: it starts this task.
    Started = 67,
    /// From a worker: the task succeeded, with its result.
    Done = 68,
    /// From a worker: the task failed, with the reason.
    Failed = 69,
    /// From a worker: cleanup failed, with the reason.
    CleanupFailed = 70,
}

impl FrameKind {
    fn from_byte(byte: u8) -> Option<Self> {
        use FrameKind::{CleanupFailed, Done, Failed, Hello, Ready, Recalled, SetupFailed, Started, Stop, Task};
        let all = [Task, Done, Failed, Started, Hello, Ready, SetupFailed, Recalled, Stop, CleanupFailed];
        all.into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// One message of the worker protocol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WorkerFrame {
    /// Kind of the frame.
    pub kind: FrameKind,
    /// Task id, or 0 if the frame is about no task.
    pub task: TaskId,
    /// Data of the frame.
    pub payload: Bytes,
}

impl WorkerFrame {
    /// Creates a frame about no task.
    pub(crate) fn new(kind: FrameKind, payload: impl Into<Bytes>) -> Self {
        Self { kind, task: TaskId(0), payload: payload.into() }
    }

    /// Creates a frame about a task.
    pub(crate) fn for_task(kind: FrameKind, task: TaskId, payload: impl Into<Bytes>) -> Self {
        Self { kind, task, payload: payload.into() }
    }

    /// Returns the payload as text.
    pub(crate) fn payload_text(&self) -> Arc<str> {
        String::from_utf8_lossy(&self.payload).into()
    }

    /// Appends the frame's header; the payload follows. Returns `None` if the frame is too large.
    pub(crate) fn write_header(&self, into: &mut BytesMut) -> Option<()> {
        let length = MIN_FRAME_LENGTH.checked_add(self.payload.len()).filter(|length| *length <= MAX_FRAME_BYTES)?;
        into.put_u32_le(u32::try_from(length).ok()?);
        into.put_u8(self.kind as u8);
        into.put_u64_le(self.task.0);
        Some(())
    }
}

/// Invalid bytes, after which the peer is not read any further.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FrameError {
    /// The length is out of range.
    #[error("a frame of {0} bytes, not {MIN_FRAME_LENGTH}..={MAX_FRAME_BYTES}")]
    Length(u64),
    /// The kind is unknown.
    #[error("a frame of unknown kind {0}")]
    UnknownKind(u8),
}

/// Decodes frames from bytes in pieces of any size, without copying payloads.
#[derive(Debug, Default)]
pub(crate) struct FrameDecoder {
    bytes: BytesMut,
}

impl FrameDecoder {
    /// Appends bytes that were read.
    pub(crate) fn push_bytes(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Reads once and returns the number of bytes, 0 at the end. Reads as much as a started large frame still needs.
    pub(crate) fn read_from(&mut self, socket: impl AsFd) -> io::Result<usize> {
        let missing = match self.next_length() {
            // Bytes past the largest frame are invalid and not waited for.
            Some(length) => (4 + length.min(MAX_FRAME_BYTES)).saturating_sub(self.bytes.len()),
            None => 0,
        };
        read_into_buffer(&mut self.bytes, missing.max(READ_BYTES), socket)
    }

    /// Returns the next complete frame.
    pub(crate) fn next_frame(&mut self) -> Result<Option<WorkerFrame>, FrameError> {
        let Some(length) = self.next_length() else { return Ok(None) };
        if !(MIN_FRAME_LENGTH..=MAX_FRAME_BYTES).contains(&length) {
            return Err(FrameError::Length(length as u64));
        }
        // The kind is checked before the frame is complete, so that invalid frames are not waited for.
        if let Some(byte) = self.bytes.get(4) {
            FrameKind::from_byte(*byte).ok_or(FrameError::UnknownKind(*byte))?;
        }
        if self.bytes.len() < 4 + length {
            return Ok(None);
        }
        let mut whole = self.bytes.split_to(4 + length);
        whole.advance(4);
        let byte = whole.get_u8();
        let kind = FrameKind::from_byte(byte).ok_or(FrameError::UnknownKind(byte))?;
        let task = TaskId(whole.get_u64_le());
        Ok(Some(WorkerFrame { kind, task, payload: whole.freeze() }))
    }

    /// Returns the bytes of an incomplete frame.
    pub(crate) fn partial_frame(&self) -> &[u8] {
        &self.bytes
    }

    fn next_length(&self) -> Option<usize> {
        let first = self.bytes.first_chunk::<4>()?;
        Some(u32::from_le_bytes(*first) as usize)
    }
}

/// Sends bytes with one or two file descriptors. Returns the number of sent bytes.
pub(crate) fn send_with_fds(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut message = SendAncillaryBuffer::new(&mut space);
    message.push(SendAncillaryMessage::ScmRights(fds));
    Ok(sendmsg(socket, &[IoSlice::new(bytes)], &mut message, SendFlags::NOSIGNAL)?)
}

/// Reads bytes and up to two file descriptors that came with them. Further descriptors are closed.
pub(crate) fn receive_with_fds(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<(usize, [Option<OwnedFd>; 2])> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut message = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut message, RecvFlags::CMSG_CLOEXEC)?;
    let fds = message.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let mut fds = fds.flatten();
    Ok((received.bytes, [fds.next(), fds.next()]))
}

/// Reads once into the buffer, with room for at least `room` bytes. Returns the number of bytes, 0 at the end.
#[allow(unsafe_code, reason = "the length of a buffer that was read into")]
pub(crate) fn read_into_buffer(buffer: &mut BytesMut, room: usize, from: impl AsFd) -> io::Result<usize> {
    buffer.reserve(room);
    let mut read = || rustix::io::read(&from, buffer.spare_capacity_mut()).map(|(read, _)| read.len());
    let read = rustix::io::retry_on_intr(&mut read)?;
    // SAFETY: the bytes after the old length were just written, within the capacity.
    unsafe { buffer.set_len(buffer.len() + read) };
    Ok(read)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sent(frames: &[WorkerFrame]) -> Vec<u8> {
        let mut bytes = BytesMut::new();
        for frame in frames {
            frame.write_header(&mut bytes).unwrap();
            bytes.extend_from_slice(&frame.payload);
        }
        bytes.to_vec()
    }

    fn read(pieces: impl Iterator<Item = Vec<u8>>) -> Result<Vec<WorkerFrame>, FrameError> {
        let mut decoder = FrameDecoder::default();
        let mut frames = Vec::new();
        for piece in pieces {
            decoder.push_bytes(&piece);
            while let Some(frame) = decoder.next_frame()? {
                frames.push(frame);
            }
        }
        Ok(frames)
    }

    #[test]
    fn a_frame_has_the_documented_bytes() {
        let frame = WorkerFrame::for_task(FrameKind::Task, TaskId(7), "ab");
        assert_eq!(sent(&[frame]), [11, 0, 0, 0, 2, 7, 0, 0, 0, 0, 0, 0, 0, b'a', b'b']);
    }

    #[test]
    fn invalid_frames_are_detected_early() {
        let read = |bytes: &[u8]| read(std::iter::once(bytes.to_vec()));
        assert_eq!(read(&[1, 0, 0, 0]), Err(FrameError::Length(1)));
        assert_eq!(read(b"GET / HTTP"), Err(FrameError::UnknownKind(b'/')), "the length alone would be valid");
        assert_eq!(read(&[9, 0, 0, 0, 77]), Err(FrameError::UnknownKind(77)));
        assert_eq!(read(&[9, 0, 0]), Ok(vec![]));
    }

    fn kind() -> impl Strategy<Value = FrameKind> {
        let kinds = [
            FrameKind::Hello,
            FrameKind::Task,
            FrameKind::Stop,
            FrameKind::Ready,
            FrameKind::Started,
            FrameKind::Done,
            FrameKind::Failed,
        ];
        prop::sample::select(kinds.to_vec())
    }

    proptest! {
        #[test]
        fn frames_are_decoded_from_any_pieces(
            frames in prop::collection::vec((kind(), any::<u64>(), prop::collection::vec(any::<u8>(), 0..300)), 0..20),
            cuts in prop::collection::vec(1_usize..50, 1..50),
        ) {
            let frames: Vec<WorkerFrame> =
                frames.into_iter().map(|(kind, task, payload)| WorkerFrame::for_task(kind, TaskId(task), payload)).collect();
            let bytes = sent(&frames);
            let mut rest = &bytes[..];
            let mut cuts = cuts.into_iter().cycle();
            let pieces = std::iter::from_fn(|| {
                let at = cuts.next()?.min(rest.len());
                let (piece, after) = rest.split_at(at);
                rest = after;
                (!piece.is_empty()).then(|| piece.to_vec())
            });
            prop_assert_eq!(read(pieces), Ok(frames));
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(bytes.chunks(7).map(<[u8]>::to_vec));
        }
    }
}
