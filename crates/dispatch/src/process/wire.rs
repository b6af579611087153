//! The socket to one worker: what is to be sent, what was heard. Never waits.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::iter;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bytes::{Buf as _, Bytes, BytesMut};
use rustix::net::{SendAncillaryBuffer, SendFlags, Shutdown, send, sendmsg, shutdown};

use crate::limits::{LARGE_BYTES, LINE_BYTES, PIECES, READ_BYTES};
use crate::plan::Speaks;
use crate::protocol::{Decoder, Frame, Kind, WorkerCounters, read_into};
use crate::{TaskId, TaskOutcome};

/// What a worker said.
#[derive(Debug)]
pub(crate) enum Heard {
    Frame(Frame),
    /// The result of whatever it is at: who speaks in lines names no task.
    Result(TaskOutcome),
}

#[derive(Debug)]
pub(crate) struct Wire {
    socket: OwnedFd,
    out: VecDeque<Bytes>,
    /// What was put last, to be sent together.
    tail: BytesMut,
    ears: Ears,
    /// Whether to hang up when all is sent.
    hangs_up: bool,
    /// How many bytes were read.
    arrived: u64,
}

#[derive(Debug)]
enum Ears {
    Frames(Decoder),
    Lines(Lines),
}

impl Wire {
    /// Of a socket that does not block.
    pub(crate) fn new(socket: OwnedFd, speaks: Speaks) -> Self {
        let ears = match speaks {
            Speaks::Lines => Ears::Lines(Lines::default()),
            Speaks::Frames | Speaks::Commands => Ears::Frames(Decoder::default()),
        };
        Self { socket, out: VecDeque::new(), tail: BytesMut::new(), ears, hangs_up: false, arrived: 0 }
    }

    /// A task is to be sent. Whether its payload can be was asked when it was taken in.
    pub(crate) fn put_task(&mut self, task: TaskId, payload: Bytes) {
        match self.ears {
            Ears::Frames(_) => {
                let frame = Frame::about(Kind::Task, task, payload);
                if frame.put_header(&mut self.tail).is_some() {
                    self.put(frame.payload);
                }
            }
            Ears::Lines(_) => {
                self.put(payload);
                self.tail.extend_from_slice(b"\n");
            }
        }
    }

    /// Nothing more comes: the worker is to clean up and end.
    pub(crate) fn put_stop(&mut self) {
        match self.ears {
            // An empty frame is never too large.
            Ears::Frames(_) => drop(Frame::new(Kind::Stop, Bytes::new()).put_header(&mut self.tail)),
            // For who speaks in lines the end of the input is the word to stop.
            Ears::Lines(_) => self.hangs_up = true,
        }
    }

    /// What it was sent and has not claimed is not its own any more.
    pub(crate) fn put_recalled(&mut self) {
        // An empty frame is never too large.
        let _ = Frame::new(Kind::Recalled, Bytes::new()).put_header(&mut self.tail);
    }

    /// Says nothing any more, so that a worker that waits for more ends.
    pub(crate) fn hang_up(&mut self) {
        // Gone already: just as well.
        let _ = shutdown(&self.socket, Shutdown::Write);
    }

    /// Bytes are to be sent.
    pub(crate) fn put(&mut self, bytes: Bytes) {
        if bytes.len() < LARGE_BYTES {
            self.tail.extend_from_slice(&bytes);
            return;
        }
        if !self.tail.is_empty() {
            self.out.push_back(self.tail.split().freeze());
        }
        self.out.push_back(bytes);
    }

    /// Whether there is something to be sent.
    pub(crate) fn is_full(&self) -> bool {
        !self.out.is_empty() || !self.tail.is_empty() || self.hangs_up
    }

    /// Sends what can be sent now.
    pub(crate) fn send(&mut self) -> io::Result<()> {
        if !self.tail.is_empty() {
            self.out.push_back(self.tail.split().freeze());
        }
        while !self.out.is_empty() {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            let sent = match self.out.make_contiguous() {
                // One piece, the most common case, has a cheaper call.
                [one] => send(&self.socket, one, flags),
                many => {
                    let pieces: Vec<IoSlice<'_>> = many.iter().take(PIECES).map(|bytes| IoSlice::new(bytes)).collect();
                    sendmsg(&self.socket, &pieces, &mut SendAncillaryBuffer::default(), flags)
                }
            };
            let mut sent = match sent {
                Ok(sent) => sent,
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            while let Some(first) = self.out.front_mut() {
                if sent < first.len() {
                    first.advance(sent);
                    break;
                }
                sent -= first.len();
                self.out.pop_front();
            }
        }
        if std::mem::take(&mut self.hangs_up) {
            self.hang_up();
        }
        Ok(())
    }

    /// Reads once; `false` at the end. `WouldBlock` where there is nothing.
    pub(crate) fn read(&mut self) -> io::Result<bool> {
        let read = match &mut self.ears {
            Ears::Frames(decoder) => decoder.read_from(&self.socket)?,
            Ears::Lines(lines) => read_into(&mut lines.bytes, READ_BYTES, &self.socket)?,
        };
        self.arrived += read as u64;
        Ok(read > 0)
    }

    /// What is left of what a dead worker said: what arrived, and then what it had to say and could not send any more.
    /// Nonsense is not listened to any further.
    pub(crate) fn last_heard(&mut self, counters: &WorkerCounters) -> Vec<Heard> {
        while matches!(self.read(), Ok(true)) {}
        let mut all: Vec<Heard> = iter::from_fn(|| self.heard().ok().flatten()).collect();
        if let Ears::Frames(decoder) = &mut self.ears {
            let unsent = counters.unsent_after(self.arrived, decoder.begun());
            decoder.add(&unsent);
            all.extend(iter::from_fn(|| self.heard().ok().flatten()));
        }
        all
    }

    /// The next thing it said, or why that is nonsense.
    pub(crate) fn heard(&mut self) -> Result<Option<Heard>, String> {
        match &mut self.ears {
            Ears::Frames(decoder) => {
                decoder.next().map(|frame| frame.map(Heard::Frame)).map_err(|garbage| format!("it sent {garbage}"))
            }
            Ears::Lines(lines) => lines.next().map(|line| line.map(|line| Heard::Result(outcome_of(line)))),
        }
    }
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Makes lines of bytes.
#[derive(Debug, Default)]
struct Lines {
    bytes: BytesMut,
    /// Bytes from the front that hold no end of a line.
    searched: usize,
}

impl Lines {
    fn next(&mut self) -> Result<Option<Bytes>, String> {
        let Some(at) = self.bytes[self.searched..].iter().position(|byte| *byte == b'\n') else {
            self.searched = self.bytes.len();
            if self.searched > LINE_BYTES {
                return Err(format!("it wrote a line of more than {LINE_BYTES} bytes"));
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

/// A line is a result, unless it is an object with nothing but `error` in it.
fn outcome_of(line: Bytes) -> TaskOutcome {
    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Failure {
        error: serde_json::Value,
    }
    match serde_json::from_slice(&line) {
        Ok(Failure { error: serde_json::Value::String(why) }) => TaskOutcome::Failed(why.into()),
        Ok(Failure { error }) => TaskOutcome::Failed(error.to_string().into()),
        Err(_) => TaskOutcome::Done(line),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn lines_are_results_and_an_error_alone_is_a_failure() {
        let done = |text: &'static str| TaskOutcome::Done(text.into());
        assert_eq!(outcome_of("7".into()), done("7"));
        assert_eq!(outcome_of("no JSON at all".into()), done("no JSON at all"));
        assert_eq!(outcome_of(r#"{"error":null,"x":1}"#.into()), done(r#"{"error":null,"x":1}"#));
        assert_eq!(outcome_of(r#"{"error":"too hot"}"#.into()), TaskOutcome::Failed("too hot".into()));
        assert_eq!(outcome_of(r#"{"error":{"code":3}}"#.into()), TaskOutcome::Failed(r#"{"code":3}"#.into()));
    }

    #[test]
    fn lines_come_out_whole_however_they_come_in() {
        let mut lines = Lines::default();
        let mut whole = Vec::new();
        for piece in ["a", "b\r\n\nc", "d", "\ne"] {
            lines.bytes.extend_from_slice(piece.as_bytes());
            whole.extend(std::iter::from_fn(|| lines.next().unwrap()));
        }
        assert_eq!(whole, ["ab", "", "cd"]);
    }

    #[test]
    fn a_full_socket_is_gone_on_with_later() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let mut wire = Wire::new(ours.into(), Speaks::Frames);
        let large = Bytes::from(vec![7; 3 << 20]);
        wire.put_task(TaskId(1), "small".into());
        wire.put_task(TaskId(2), large.clone());
        let reader = std::thread::spawn(move || {
            let mut decoder = Decoder::default();
            let mut frames = Vec::new();
            while frames.len() < 2 {
                decoder.read_from(&theirs).unwrap();
                frames.extend(std::iter::from_fn(|| decoder.next().unwrap()));
            }
            frames
        });
        while wire.is_full() {
            wire.send().unwrap();
        }
        let frames = reader.join().unwrap();
        assert_eq!(frames[0], Frame::about(Kind::Task, TaskId(1), "small"));
        assert_eq!(frames[1], Frame::about(Kind::Task, TaskId(2), large));
    }
}
