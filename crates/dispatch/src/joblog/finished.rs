//! What an earlier run's log says: which tasks are over, and a digest of each one's command, so that another run's log is
//! noticed. Two bytes for each task, in pieces, so that a gap costs nothing.

use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::io::{BufRead, BufReader, Read, Seek};
use std::path::{Path, PathBuf};

use super::file::Again;
use super::line::{HEADER, Logged, escape};
use super::{JobLogError, trouble};
use crate::limits::JOBLOG_LINE_BYTES;

const PIECE: u64 = 2_048;
/// How much is read at once.
const READ_BYTES: usize = 1 << 18;

/// Tasks that are not to be repeated.
#[derive(Debug)]
pub struct Finished {
    path: PathBuf,
    /// By number: 0 where it is not over, else the digest of its command.
    pieces: Vec<Option<Box<[u16]>>>,
    count: u64,
    scratch: Vec<u8>,
}

impl Finished {
    /// How many there are.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Whether this task is over. An error where the log tells of another command with its number.
    pub fn has(&mut self, seq: u64, command: &[u8]) -> Result<bool, JobLogError> {
        let logged = self.digest_of(seq);
        if logged == 0 {
            return Ok(false);
        }
        self.scratch.clear();
        escape(command, &mut self.scratch);
        if logged == digest(&self.scratch) {
            return Ok(true);
        }
        let asked = String::from_utf8_lossy(&self.scratch).into_owned();
        let logged = last_command(&self.path, seq)?;
        Err(JobLogError::AnotherRun { path: self.path.clone(), seq, logged, asked })
    }

    /// Reads a log from its beginning. Gives where its last whole line ends too.
    pub(super) fn read(file: &mut File, path: &Path, again: Again) -> Result<(Self, u64), JobLogError> {
        let mut finished = Self { path: path.to_owned(), pieces: Vec::new(), count: 0, scratch: Vec::new() };
        let end = each_entry(file, path, |logged| {
            let is_over = logged.is_good || again == Again::Nothing;
            finished.set(logged.seq, if is_over { digest(logged.command) } else { 0 });
        })?;
        Ok((finished, end))
    }

    fn digest_of(&self, seq: u64) -> u16 {
        let (piece, within) = place(seq);
        self.pieces.get(piece).and_then(Option::as_ref).map_or(0, |piece| piece[within])
    }

    fn set(&mut self, seq: u64, digest: u16) {
        let (piece, within) = place(seq);
        if self.pieces.len() <= piece {
            self.pieces.resize(piece + 1, None);
        }
        let digests = self.pieces[piece].get_or_insert_with(|| vec![0; PIECE as usize].into_boxed_slice());
        let before = std::mem::replace(&mut digests[within], digest);
        self.count += u64::from(digest != 0);
        self.count -= u64::from(before != 0);
    }
}

/// Which piece, and where in it. Numbers are bounded where they are read.
fn place(seq: u64) -> (usize, usize) {
    (usize::try_from(seq / PIECE).unwrap_or(usize::MAX), (seq % PIECE) as usize)
}

fn digest(command: &[u8]) -> u16 {
    let mut hasher = DefaultHasher::new();
    hasher.write(command);
    (hasher.finish() % u64::from(u16::MAX)) as u16 + 1
}

/// What the log says last of a task.
fn last_command(path: &Path, seq: u64) -> Result<String, JobLogError> {
    let mut file = File::open(path).map_err(trouble(path, "read"))?;
    let mut found = String::new();
    each_entry(&mut file, path, |logged| {
        if logged.seq == seq {
            found = String::from_utf8_lossy(logged.command).into_owned();
        }
    })?;
    Ok(found)
}

/// Shows every entry. Gives where the last whole line ends: what follows it was cut off while it was written.
fn each_entry(file: &mut File, path: &Path, mut show: impl FnMut(Logged<'_>)) -> Result<u64, JobLogError> {
    file.rewind().map_err(trouble(path, "read"))?;
    let mut reader = BufReader::with_capacity(READ_BYTES, file);
    let mut line = Vec::new();
    let mut end = 0;
    for number in 1.. {
        line.clear();
        let most = JOBLOG_LINE_BYTES as u64;
        let length = reader.by_ref().take(most).read_until(b'\n', &mut line).map_err(trouble(path, "read"))?;
        let Some(text) = line.strip_suffix(b"\n") else {
            let what = "it is longer than 4 MiB";
            let is_header = number > 1 || HEADER.starts_with(&line);
            return match (is_header, line.len() < JOBLOG_LINE_BYTES) {
                (false, _) => Err(JobLogError::NotAJobLog(path.to_owned())),
                (true, false) => Err(JobLogError::BadLine { path: path.to_owned(), line: number, what }),
                (true, true) => Ok(end),
            };
        };
        if number == 1 && line != HEADER {
            return Err(JobLogError::NotAJobLog(path.to_owned()));
        }
        if number > 1 {
            let bad = |what| JobLogError::BadLine { path: path.to_owned(), line: number, what };
            show(Logged::parse(text).map_err(bad)?);
        }
        end += length as u64;
    }
    Ok(end)
}
