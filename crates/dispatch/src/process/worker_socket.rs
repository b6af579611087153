//! Nonblocking socket to one worker: queued bytes to send, and received messages.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::iter;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bytes::{Buf as _, Bytes, BytesMut};
use rustix::net::{SendAncillaryBuffer, SendFlags, Shutdown, send, sendmsg, shutdown};

use crate::limits::{LARGE_PAYLOAD_BYTES, MAX_LINE_BYTES, MAX_SEND_PIECES, READ_BYTES};
use crate::plan::WorkerProtocol;
use crate::protocol::{FrameDecoder, FrameKind, WorkerCounters, WorkerFrame, read_into_buffer};
use crate::{TaskId, TaskOutcome};

/// A message of a worker.
#[derive(Debug)]
pub(crate) enum WorkerMessage {
    Frame(WorkerFrame),
    /// Result of the current task. Workers with the line protocol name no task.
    Result(TaskOutcome),
}

#[derive(Debug)]
pub(crate) struct WorkerSocket {
    socket: OwnedFd,
    unsent: VecDeque<Bytes>,
    /// Small pieces that are sent together.
    tail: BytesMut,
    decoder: MessageDecoder,
    /// Whether to close the sending side when all bytes are sent.
    will_close: bool,
    /// Number of received bytes.
    received: u64,
}

#[derive(Debug)]
enum MessageDecoder {
    Frames(FrameDecoder),
    Lines(LineDecoder),
}

impl WorkerSocket {
    /// Wraps a nonblocking socket.
    pub(crate) fn new(socket: OwnedFd, protocol: WorkerProtocol) -> Self {
        let decoder = match protocol {
            WorkerProtocol::Lines => MessageDecoder::Lines(LineDecoder::default()),
            WorkerProtocol::Frames | WorkerProtocol::Commands => MessageDecoder::Frames(FrameDecoder::default()),
        };
        Self { socket, unsent: VecDeque::new(), tail: BytesMut::new(), decoder, will_close: false, received: 0 }
    }

    /// Queues a task, whose payload was checked when it was submitted.
    pub(crate) fn queue_task(&mut self, task: TaskId, payload: Bytes) {
        match self.decoder {
            MessageDecoder::Frames(_) => {
                let frame = WorkerFrame::for_task(FrameKind::Task, task, payload);
                if frame.write_header(&mut self.tail).is_some() {
                    self.queue_bytes(frame.payload);
                }
            }
            MessageDecoder::Lines(_) => {
                self.queue_bytes(payload);
                self.tail.extend_from_slice(b"\n");
            }
        }
    }

    /// Queues the order to clean up and exit.
    pub(crate) fn queue_stop(&mut self) {
        match self.decoder {
            MessageDecoder::Frames(_) => {
                let _ = WorkerFrame::new(FrameKind::Stop, Bytes::new()).write_header(&mut self.tail);
            }
            // Workers with the line protocol stop at the end of their input.
            MessageDecoder::Lines(_) => self.will_close = true,
        }
    }

    /// Queues the notice that unclaimed tasks were recalled.
    pub(crate) fn queue_recalled(&mut self) {
        // An empty frame is never too large.
        let _ = WorkerFrame::new(FrameKind::Recalled, Bytes::new()).write_header(&mut self.tail);
    }

    /// Closes the sending side, so that a worker that waits for frames exits.
    pub(crate) fn close_writing(&mut self) {
        // Fails only if the worker has closed the socket.
        let _ = shutdown(&self.socket, Shutdown::Write);
    }

    /// Queues bytes.
    pub(crate) fn queue_bytes(&mut self, bytes: Bytes) {
        if bytes.len() < LARGE_PAYLOAD_BYTES {
            self.tail.extend_from_slice(&bytes);
            return;
        }
        if !self.tail.is_empty() {
            self.unsent.push_back(self.tail.split().freeze());
        }
        self.unsent.push_back(bytes);
    }

    /// Whether bytes wait to be sent.
    pub(crate) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty() || !self.tail.is_empty() || self.will_close
    }

    /// Sends as many bytes as the socket accepts now.
    pub(crate) fn send_pending(&mut self) -> io::Result<()> {
        if !self.tail.is_empty() {
            self.unsent.push_back(self.tail.split().freeze());
        }
        while !self.unsent.is_empty() {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            let sent = match self.unsent.make_contiguous() {
                // The most common case, one piece, has a cheaper call.
                [single] => send(&self.socket, single, flags),
                many => {
                    let pieces: Vec<IoSlice<'_>> =
                        many.iter().take(MAX_SEND_PIECES).map(|bytes| IoSlice::new(bytes)).collect();
                    sendmsg(&self.socket, &pieces, &mut SendAncillaryBuffer::default(), flags)
                }
            };
            let mut sent = match sent {
                Ok(sent) => sent,
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            while let Some(first) = self.unsent.front_mut() {
                if sent < first.len() {
                    first.advance(sent);
                    break;
                }
                sent -= first.len();
                self.unsent.pop_front();
            }
        }
        if std::mem::take(&mut self.will_close) {
            self.close_writing();
        }
        Ok(())
    }

    /// Reads once. Returns `false` at the end of the stream; fails with `WouldBlock` if there is nothing to read.
    pub(crate) fn read(&mut self) -> io::Result<bool> {
        let read = match &mut self.decoder {
            MessageDecoder::Frames(decoder) => decoder.read_from(&self.socket)?,
            MessageDecoder::Lines(lines) => read_into_buffer(&mut lines.bytes, READ_BYTES, &self.socket)?,
        };
        self.received += read as u64;
        Ok(read > 0)
    }

    /// Returns the remaining messages of a worker that has exited: received bytes, then unsent results in its outbox.
    /// Stops at the first invalid message.
    pub(crate) fn remaining_messages(&mut self, counters: &WorkerCounters) -> Vec<WorkerMessage> {
        while matches!(self.read(), Ok(true)) {}
        let mut all: Vec<WorkerMessage> = iter::from_fn(|| self.next_message().ok().flatten()).collect();
        if let MessageDecoder::Frames(decoder) = &mut self.decoder {
            let unsent = counters.recover_unsent(self.received, decoder.partial_frame());
            decoder.push_bytes(&unsent);
            all.extend(iter::from_fn(|| self.next_message().ok().flatten()));
        }
        all
    }

    /// Returns the next message. The error describes a protocol violation.
    pub(crate) fn next_message(&mut self) -> Result<Option<WorkerMessage>, String> {
        match &mut self.decoder {
            MessageDecoder::Frames(decoder) => decoder
                .next_frame()
                .map(|frame| frame.map(WorkerMessage::Frame))
                .map_err(|error| format!("it sent {error}")),
            MessageDecoder::Lines(lines) => {
                lines.next_line().map(|line| line.map(|line| WorkerMessage::Result(parse_line_result(line))))
            }
        }
    }
}

impl AsFd for WorkerSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Splits bytes into lines.
#[derive(Debug, Default)]
struct LineDecoder {
    bytes: BytesMut,
    /// Number of leading bytes that contain no line end.
    searched: usize,
}

impl LineDecoder {
    fn next_line(&mut self) -> Result<Option<Bytes>, String> {
        let Some(at) = self.bytes[self.searched..].iter().position(|byte| *byte == b'\n') else {
            self.searched = self.bytes.len();
            if self.searched > MAX_LINE_BYTES {
                return Err(format!("it wrote a line longer than {MAX_LINE_BYTES} bytes"));
            }
            return Ok(None);
        };
        let mut line = self.bytes.split_to(self.searched + at + 1);
        self.searched = 0;
        line.truncate(line.len() - 1);
        if line.last() == Some(&b'\r') {
            line.truncate(line.len() - 1);
        }
        Ok(Some(line.freeze()))
    }
}

/// Parses a result line: an object with only an `error` field is a failure, any other line a result.
fn parse_line_result(line: Bytes) -> TaskOutcome {
    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct LineFailure {
        error: serde_json::Value,
    }
    match serde_json::from_slice(&line) {
        Ok(LineFailure { error: serde_json::Value::String(why) }) => TaskOutcome::Failed(why.into()),
        Ok(LineFailure { error }) => TaskOutcome::Failed(error.to_string().into()),
        Err(_) => TaskOutcome::Done(line),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_line_is_a_result_and_a_lone_error_field_a_failure() {
        let done = |text: &'static str| TaskOutcome::Done(text.into());
        assert_eq!(parse_line_result("7".into()), done("7"));
        assert_eq!(parse_line_result("no JSON at all".into()), done("no JSON at all"));
        assert_eq!(parse_line_result(r#"{"error":null,"x":1}"#.into()), done(r#"{"error":null,"x":1}"#));
        assert_eq!(parse_line_result(r#"{"error":"too hot"}"#.into()), TaskOutcome::Failed("too hot".into()));
        assert_eq!(parse_line_result(r#"{"error":{"code":3}}"#.into()), TaskOutcome::Failed(r#"{"code":3}"#.into()));
    }

    #[test]
    fn lines_are_decoded_from_any_pieces() {
        let mut lines = LineDecoder::default();
        let mut whole = Vec::new();
        for piece in ["a", "b\r\n\nc", "d", "\ne"] {
            lines.bytes.extend_from_slice(piece.as_bytes());
            whole.extend(std::iter::from_fn(|| lines.next_line().unwrap()));
        }
        assert_eq!(whole, ["ab", "", "cd"]);
    }

    #[test]
    fn sending_resumes_after_a_full_socket() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let mut socket = WorkerSocket::new(ours.into(), WorkerProtocol::Frames);
        let large = Bytes::from(vec![7; 3 << 20]);
        socket.queue_task(TaskId(1), "small".into());
        socket.queue_task(TaskId(2), large.clone());
        let reader = std::thread::spawn(move || {
            let mut decoder = FrameDecoder::default();
            let mut frames = Vec::new();
            while frames.len() < 2 {
                decoder.read_from(&theirs).unwrap();
                frames.extend(std::iter::from_fn(|| decoder.next_frame().unwrap()));
            }
            frames
        });
        while socket.has_unsent() {
            socket.send_pending().unwrap();
        }
        let frames = reader.join().unwrap();
        assert_eq!(frames[0], WorkerFrame::for_task(FrameKind::Task, TaskId(1), "small"));
        assert_eq!(frames[1], WorkerFrame::for_task(FrameKind::Task, TaskId(2), large));
    }
}
