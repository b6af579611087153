//! Server-sent events, read from chunks that may end anywhere.

use std::collections::VecDeque;

use crate::limits::EVENT_BYTES;

/// What stood between two empty lines.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Frame {
    /// Where to go on from, where it was said.
    pub id: Option<String>,
    /// The data, lines joined; `None` where there was none, which makes it no event.
    pub data: Option<String>,
}

/// An event, or a line of it, is larger than it may be.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event is larger than {EVENT_BYTES} bytes")]
pub(crate) struct TooLong;

/// Puts chunks together to frames.
#[derive(Debug, Default)]
pub(crate) struct Parser {
    line: Vec<u8>,
    /// The last byte was a carriage return: a line feed after it ends the same line.
    after_return: bool,
    /// Something was read already: a byte order mark can only stand before it.
    begun: bool,
    frame: Frame,
    ready: VecDeque<Frame>,
}

impl Parser {
    /// Takes a chunk.
    pub fn push(&mut self, chunk: &[u8]) -> Result<(), TooLong> {
        for &byte in chunk {
            let ends_same_line = std::mem::replace(&mut self.after_return, byte == b'\r') && byte == b'\n';
            match byte {
                b'\n' if ends_same_line => {}
                b'\n' | b'\r' => self.end_line(),
                _ => self.line.push(byte),
            }
            if self.line.len() + self.frame.data.as_ref().map_or(0, String::len) > EVENT_BYTES {
                return Err(TooLong);
            }
        }
        Ok(())
    }

    /// The next frame that is whole.
    pub fn next(&mut self) -> Option<Frame> {
        self.ready.pop_front()
    }

    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        let line = String::from_utf8_lossy(&line);
        let line = if self.begun { &*line } else { line.strip_prefix('\u{feff}').unwrap_or(&line) };
        self.begun = true;
        if line.is_empty() {
            let frame = std::mem::take(&mut self.frame);
            if frame != Frame::default() {
                self.ready.push_back(frame);
            }
            return;
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "id" if !value.contains('\0') => self.frame.id = Some(value.to_owned()),
            "data" => match &mut self.frame.data {
                Some(data) => {
                    data.push('\n');
                    data.push_str(value);
                }
                none => *none = Some(value.to_owned()),
            },
            // The kind is told in the data too; comments and pauses between connections are not needed.
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(chunks: impl IntoIterator<Item = impl AsRef<[u8]>>) -> Vec<(Option<String>, Option<String>)> {
        let mut parser = Parser::default();
        let mut frames = Vec::new();
        for chunk in chunks {
            parser.push(chunk.as_ref()).unwrap();
            frames.extend(std::iter::from_fn(|| parser.next()).map(|frame| (frame.id, frame.data)));
        }
        frames
    }

    fn frame(id: Option<&str>, data: Option<&str>) -> (Option<String>, Option<String>) {
        (id.map(Into::into), data.map(Into::into))
    }

    const STREAM: &str = "\u{feff}retry: 2000\r\nid: run-0\r\n: listening\r\n\r\nid: run-1\nevent: granted\ndata: {\"ü\":1}\n\n\
                          : still here\n\ndata:a\rdata:  b\rid\r\rdata: unfinished";

    #[test]
    fn frames_are_the_same_wherever_chunks_end() {
        let expected =
            [frame(Some("run-0"), None), frame(Some("run-1"), Some("{\"ü\":1}")), frame(Some(""), Some("a\n b"))];
        assert_eq!(frames([STREAM]), expected);
        for size in 1..STREAM.len() {
            assert_eq!(frames(STREAM.as_bytes().chunks(size)), expected, "chunks of {size} bytes");
        }
    }

    #[test]
    fn what_never_ends_is_refused() {
        let mut parser = Parser::default();
        assert_eq!(parser.push(&vec![b'x'; EVENT_BYTES + 1]), Err(TooLong));
        let mut parser = Parser::default();
        let lines = "data: 1234567890\n".repeat(EVENT_BYTES / 10);
        assert_eq!(parser.push(lines.as_bytes()), Err(TooLong));
    }
}
