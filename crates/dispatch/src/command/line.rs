//! What a task's command is, and how it is sent.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

use bytes::{BufMut as _, Bytes, BytesMut};

/// A command line, as the payload of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandLine {
    arguments: Vec<OsString>,
}

impl CommandLine {
    /// A program, looked up in `PATH` unless it holds a `/`, and its arguments.
    pub fn direct(arguments: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        Self { arguments: arguments.into_iter().map(Into::into).collect() }
    }

    /// A text for the shell.
    pub fn shell(text: impl Into<OsString>) -> Self {
        Self { arguments: vec!["/bin/sh".into(), "-c".into(), text.into()] }
    }

    /// The program.
    pub fn program(&self) -> &OsStr {
        self.arguments.first().map_or(OsStr::new(""), OsString::as_os_str)
    }

    /// What follows the program.
    pub fn arguments(&self) -> &[OsString] {
        self.arguments.get(1..).unwrap_or_default()
    }

    /// The task: the words, each ended by a zero byte, which no word of a command can hold.
    pub fn to_payload(&self) -> Bytes {
        let mut payload = BytesMut::with_capacity(self.arguments.iter().map(|word| word.len() + 1).sum());
        for word in &self.arguments {
            payload.put_slice(word.as_bytes());
            payload.put_u8(0);
        }
        payload.freeze()
    }

    /// The words of a task; `None` where it is none.
    pub fn of_payload(payload: &[u8]) -> Option<Self> {
        let words = payload.strip_suffix(b"\0")?.split(|byte| *byte == 0);
        Some(Self { arguments: words.map(|word| OsString::from_vec(word.to_vec())).collect() })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_command_line_survives_the_way(words in prop::collection::vec("[^\0]{0,9}", 1..5)) {
            let line = CommandLine::direct(&words);
            prop_assert_eq!(CommandLine::of_payload(&line.to_payload()), Some(line));
        }
    }

    #[test]
    fn what_is_no_command_line_is_refused() {
        assert_eq!(CommandLine::of_payload(b""), None);
        assert_eq!(CommandLine::of_payload(b"true"), None);
    }
}
