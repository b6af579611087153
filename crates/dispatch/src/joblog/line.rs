//! One line of the log. Tabs, line ends, zero bytes and backslashes of a command are written as `\t`, `\n`, `\r`, `\0` and
//! `\\`; very long commands are cut.

use std::io::Write as _;
use std::time::{Duration, SystemTime};

use crate::limits::{JOBLOG_COMMAND_BYTES, JOBLOG_SEQ};

/// The first line of a log.
pub(super) const HEADER: &[u8] = b"Seq\tHost\tStarttime\tJobRuntime\tSend\tReceive\tExitval\tSignal\tCommand\n";
/// What GNU parallel writes for this machine.
const THIS_HOST: &str = ":";

/// A task that is over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Its place in the source, from 1.
    pub seq: u64,
    /// Since when it was worked on.
    pub started: SystemTime,
    /// How long.
    pub took: Duration,
    /// Bytes it wrote to its standard output, or its result.
    pub received: u64,
    /// Its exit code; -1 where it did not end by itself.
    pub exit_code: i32,
    /// The signal that ended it, else 0.
    pub signal: i32,
    /// What was done, in whatever bytes.
    pub command: &'a [u8],
}

impl Entry<'_> {
    pub(super) fn write(&self, line: &mut Vec<u8>) {
        let started = self.started.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        // Writing to memory cannot fail.
        let _ = write!(
            line,
            "{}\t{THIS_HOST}\t{}.{:03}\t{:>6}.{:03}\t0\t{}\t{}\t{}\t",
            self.seq,
            started.as_secs(),
            started.subsec_millis(),
            self.took.as_secs(),
            self.took.subsec_millis(),
            self.received,
            self.exit_code,
            self.signal,
        );
        escape(self.command, line);
        line.push(b'\n');
    }
}

/// The command as it stands in a log.
pub(super) fn escape(command: &[u8], into: &mut Vec<u8>) {
    let most = into.len() + JOBLOG_COMMAND_BYTES;
    for byte in command {
        if into.len() + 2 > most {
            return;
        }
        match byte {
            b'\t' => into.extend_from_slice(b"\\t"),
            b'\n' => into.extend_from_slice(b"\\n"),
            b'\r' => into.extend_from_slice(b"\\r"),
            b'\0' => into.extend_from_slice(b"\\0"),
            b'\\' => into.extend_from_slice(b"\\\\"),
            other => into.push(*other),
        }
    }
}

/// What of a line matters to a run that goes on.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Logged<'a> {
    pub seq: u64,
    /// It ended by itself, with 0.
    pub is_good: bool,
    /// As it stands in the log.
    pub command: &'a [u8],
}

impl<'a> Logged<'a> {
    /// Reads a line without its end, or says what is wrong with it.
    pub fn parse(line: &'a [u8]) -> Result<Self, &'static str> {
        let mut fields = line.splitn(9, |byte| *byte == b'\t');
        let mut next = || fields.next().ok_or("it has fewer than 9 columns");
        let seq = number(next()?).and_then(|seq| u64::try_from(seq).ok()).filter(|seq| (1..=JOBLOG_SEQ).contains(seq));
        let seq = seq.ok_or("Seq is no number from 1 to 4294967296")?;
        for _ in ["Host", "Starttime", "JobRuntime", "Send", "Receive"] {
            next()?;
        }
        let exit_code = number(next()?).ok_or("Exitval is no number")?;
        let signal = number(next()?).ok_or("Signal is no number")?;
        Ok(Self { seq, is_good: exit_code == 0 && signal == 0, command: next()? })
    }
}

fn number(field: &[u8]) -> Option<i64> {
    std::str::from_utf8(field).ok()?.trim_matches(' ').parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(command: &[u8]) -> Entry<'_> {
        let started = SystemTime::UNIX_EPOCH + Duration::from_millis(1_700_000_000_042);
        Entry { seq: 7, started, took: Duration::from_millis(1_503), received: 12, exit_code: 0, signal: 0, command }
    }

    #[test]
    fn a_line_has_the_columns_of_gnu_parallel() {
        let mut line = Vec::new();
        entry(b"echo 'a\tb\n' \\ \r\0").write(&mut line);
        let expected = "7\t:\t1700000000.042\t     1.503\t0\t12\t0\t0\techo 'a\\tb\\n' \\\\ \\r\\0\n";
        assert_eq!(String::from_utf8(line).unwrap(), expected);
    }

    #[test]
    fn what_was_written_is_read_and_what_is_no_entry_is_told() {
        let mut line = Vec::new();
        Entry { exit_code: -1, ..entry(b"x") }.write(&mut line);
        let read = Logged::parse(line.trim_ascii_end()).unwrap();
        assert_eq!(read, Logged { seq: 7, is_good: false, command: b"x" });
        for (line, says) in [
            ("", "Seq"),
            ("0\t:\t1\t1\t0\t0\t0\t0\tx", "from 1"),
            ("4294967297\t:\t1\t1\t0\t0\t0\t0\tx", "from 1"),
            ("1\t:\t1\t1\t0\t0\t0\t0", "columns"),
            ("1\t:\t1\t1\t0\t0\tx\t0\tx", "Exitval"),
            ("1\t:\t1\t1\t0\t0\t0\t\tx", "Signal"),
        ] {
            assert!(Logged::parse(line.as_bytes()).is_err_and(|what| what.contains(says)), "{line:?}");
        }
    }

    #[test]
    fn a_very_long_command_is_cut_and_not_within_an_escape() {
        let mut line = Vec::new();
        escape(&vec![b'\t'; JOBLOG_COMMAND_BYTES], &mut line);
        assert!(line.len() <= JOBLOG_COMMAND_BYTES && line.ends_with(b"\\t") && line.len() % 2 == 0);
    }
}
