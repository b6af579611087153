//! Log of finished tasks in the columns of GNU parallel, with which an interrupted run can resume.
//!
//! [`JobLog`] appends a line as soon as a task ends, so killing the run loses none. A background thread syncs the lines
//! to the disk, spends only a small part of the time on it, and ends with the log. [`FinishedTasks`] holds the tasks
//! that the log of an earlier run lists as finished, in two bytes each.

use std::fs::{File, OpenOptions, TryLockError};
use std::hash::{DefaultHasher, Hasher};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use gpupool_confine::lock;

use crate::limits::{
    JOBLOG_SYNC_PAUSE, JOBLOG_SYNC_REST_FACTOR, MAX_JOBLOG_COMMAND_BYTES, MAX_JOBLOG_LINE_BYTES, MAX_JOBLOG_SEQ,
};

/// Error of a job log.
#[derive(Debug, thiserror::Error)]
pub enum JobLogError {
    /// The file cannot be read or written.
    #[error("the job log {} cannot be {operation}: {source}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Failed operation, as a past participle.
        operation: &'static str,
        /// Error of the system.
        source: io::Error,
    },
    /// Another run writes to the log.
    #[error("the job log {} is in use by another run; wait for its end, or name another file", .0.display())]
    InUse(PathBuf),
    /// The file is not a job log and was left unchanged.
    #[error("{} is not a job log (its first line is not `Seq Host Starttime …`); name another file", .0.display())]
    NotAJobLog(PathBuf),
    /// A line cannot be parsed.
    #[error("line {line} of the job log {} is invalid: {problem}; correct or remove the line to resume", path.display())]
    BadLine {
        /// Path of the log.
        path: PathBuf,
        /// Line number, from 1.
        line: u64,
        /// Problem with the line.
        problem: &'static str,
    },
    /// The log holds another command under this task number.
    #[error(
        "the job log {} belongs to another run: task {seq} is `{logged}` there and `{requested}` here; resume with the same \
         command and arguments, or name another file",
        path.display()
    )]
    AnotherRun {
        /// Path of the log.
        path: PathBuf,
        /// Task number, from 1.
        seq: u64,
        /// Command in the log.
        logged: String,
        /// Command of this run.
        requested: String,
    },
}

/// Adds the path and the operation to an error of the system.
fn file_error(path: &Path, operation: &'static str) -> impl FnOnce(io::Error) -> JobLogError {
    let path = path.to_owned();
    move |source| JobLogError::File { path, operation, source }
}

// The file of a job log: created or resumed, locked for one run, and only appended to.

/// Logged tasks that a resumed run repeats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RerunPolicy {
    /// No logged task.
    Nothing,
    /// Failed tasks.
    Failed,
}

/// A log that is being written. The file is locked against other runs.
#[derive(Debug)]
pub struct JobLog {
    path: PathBuf,
    file: File,
    /// End of the last complete line.
    end: u64,
    line: Vec<u8>,
    syncing: BackgroundSync,
}

impl JobLog {
    /// Creates a log and discards an earlier log in the same file.
    pub fn create(path: &Path) -> Result<Self, JobLogError> {
        let file = open_locked(path)?;
        let mut beginning = Vec::new();
        let read = (&file).take(HEADER.len() as u64).read_to_end(&mut beginning);
        read.map_err(file_error(path, "read"))?;
        // Any other file must not be overwritten.
        if !HEADER.starts_with(&beginning) {
            return Err(JobLogError::NotAJobLog(path.to_owned()));
        }
        Self::start_at(file, path, 0)
    }

    /// Resumes the log of an earlier run, or creates one if there is none. Removes an incomplete last line, whose task
    /// counts as not logged.
    pub fn resume(path: &Path, again: RerunPolicy) -> Result<(Self, FinishedTasks), JobLogError> {
        let mut file = open_locked(path)?;
        let (finished, end) = FinishedTasks::read(&mut file, path, again)?;
        Ok((Self::start_at(file, path, end)?, finished))
    }

    fn start_at(mut file: File, path: &Path, end: u64) -> Result<Self, JobLogError> {
        let prepare = |file: &mut File| {
            file.set_len(end)?;
            file.seek(SeekFrom::Start(end))?;
            if end == 0 {
                file.write_all(HEADER)?;
            }
            file.sync_all()
        };
        prepare(&mut file).map_err(file_error(path, "written"))?;
        let syncing = file.try_clone().and_then(BackgroundSync::start).map_err(file_error(path, "written"))?;
        let end = end.max(HEADER.len() as u64);
        Ok(Self { path: path.to_owned(), file, end, line: Vec::new(), syncing })
    }

    /// Appends the entry of a task. The entry is in the file when this returns, and synced to the disk shortly after.
    pub fn append(&mut self, entry: &JobLogEntry<'_>) -> Result<(), JobLogError> {
        self.line.clear();
        entry.write_line(&mut self.line);
        if let Err(error) = self.file.write_all(&self.line) {
            // On a full disk, half a line would corrupt the next one.
            let _ = self.file.set_len(self.end).and_then(|()| self.file.seek(SeekFrom::Start(self.end)));
            return Err(file_error(&self.path, "written")(error));
        }
        self.end += self.line.len() as u64;
        self.syncing.mark_written().map_err(file_error(&self.path, "synced to the disk"))
    }

    /// Waits until all entries are synced to the disk.
    pub fn finish(self) -> Result<(), JobLogError> {
        self.syncing.finish().map_err(file_error(&self.path, "synced to the disk"))
    }
}

fn open_locked(path: &Path) -> Result<File, JobLogError> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
    let file = file.map_err(file_error(path, "opened"))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(JobLogError::InUse(path.to_owned())),
        Err(TryLockError::Error(error)) => Err(file_error(path, "locked")(error)),
    }
}

// One line of the log. Tabs, line ends, zero bytes and backslashes of a command are escaped as `\t`, `\n`, `\r`, `\0`
// and `\\`; very long commands are truncated.

/// First line of a log.
const HEADER: &[u8] = b"Seq\tHost\tStarttime\tJobRuntime\tSend\tReceive\tExitval\tSignal\tCommand\n";
/// Host column: GNU parallel's name for this machine.
const THIS_HOST: &str = ":";

/// Entry of a finished task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobLogEntry<'a> {
    /// Position in the source, from 1.
    pub seq: u64,
    /// Start of the task.
    pub started: SystemTime,
    /// Run time of the task.
    pub took: Duration,
    /// Bytes of its standard output or of its result.
    pub received: u64,
    /// Exit code; -1 if the task did not exit on its own.
    pub exit_code: i32,
    /// Signal that ended the task, or 0.
    pub signal: i32,
    /// Command of the task, in any bytes.
    pub command: &'a [u8],
}

impl JobLogEntry<'_> {
    fn write_line(&self, line: &mut Vec<u8>) {
        let started = self.started.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
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

/// Escapes a command for the log.
fn escape(command: &[u8], into: &mut Vec<u8>) {
    let limit = into.len() + MAX_JOBLOG_COMMAND_BYTES;
    for byte in command {
        if into.len() + 2 > limit {
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

/// Fields of a log line that a resumed run needs.
#[derive(Debug, PartialEq, Eq)]
struct ParsedLogLine<'a> {
    pub seq: u64,
    /// Whether the task exited with 0.
    pub is_success: bool,
    /// Command in its escaped form.
    pub command: &'a [u8],
}

impl<'a> ParsedLogLine<'a> {
    /// Parses a line without its line end. The error names the problem.
    pub(crate) fn parse(line: &'a [u8]) -> Result<Self, &'static str> {
        let mut fields = line.splitn(9, |byte| *byte == b'\t');
        let mut next = || fields.next().ok_or("fewer than 9 columns");
        let seq = parse_number(next()?)
            .and_then(|seq| u64::try_from(seq).ok())
            .filter(|seq| (1..=MAX_JOBLOG_SEQ).contains(seq));
        let seq = seq.ok_or("Seq is not a number from 1 to 4294967296")?;
        for _ in ["Host", "Starttime", "JobRuntime", "Send", "Receive"] {
            next()?;
        }
        let exit_code = parse_number(next()?).ok_or("Exitval is not a number")?;
        let signal = parse_number(next()?).ok_or("Signal is not a number")?;
        Ok(Self { seq, is_success: exit_code == 0 && signal == 0, command: next()? })
    }
}

fn parse_number(field: &[u8]) -> Option<i64> {
    std::str::from_utf8(field).ok()?.trim_matches(' ').parse().ok()
}

// Finished tasks of an earlier run, with a digest of each command that detects the log of another run. Two bytes per
// task, in blocks, so that gaps cost nothing.

const DIGESTS_PER_PIECE: u64 = 2_048;
/// Size of the read buffer.
const READ_BYTES: usize = 1 << 18;

/// Tasks that a resumed run skips.
#[derive(Debug)]
pub struct FinishedTasks {
    path: PathBuf,
    /// Command digests by task number; 0 for unfinished tasks.
    pieces: Vec<Option<Box<[u16]>>>,
    count: u64,
    scratch: Vec<u8>,
}

impl FinishedTasks {
    /// Returns the number of finished tasks.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Whether this task is finished. Fails if the log holds another command under its number.
    pub fn contains(&mut self, seq: u64, command: &[u8]) -> Result<bool, JobLogError> {
        let logged = self.digest_of(seq);
        if logged == 0 {
            return Ok(false);
        }
        self.scratch.clear();
        escape(command, &mut self.scratch);
        if logged == digest(&self.scratch) {
            return Ok(true);
        }
        let requested = String::from_utf8_lossy(&self.scratch).into_owned();
        let logged = last_logged_command(&self.path, seq)?;
        Err(JobLogError::AnotherRun { path: self.path.clone(), seq, logged, requested })
    }

    /// Reads a log from the start. Also returns the end of its last complete line.
    fn read(file: &mut File, path: &Path, again: RerunPolicy) -> Result<(Self, u64), JobLogError> {
        let mut finished = Self { path: path.to_owned(), pieces: Vec::new(), count: 0, scratch: Vec::new() };
        let end = for_each_entry(file, path, |logged| {
            let is_over = logged.is_success || again == RerunPolicy::Nothing;
            finished.set_digest(logged.seq, if is_over { digest(logged.command) } else { 0 });
        })?;
        Ok((finished, end))
    }

    fn digest_of(&self, seq: u64) -> u16 {
        let (piece, within) = digest_position(seq);
        self.pieces.get(piece).and_then(Option::as_ref).map_or(0, |piece| piece[within])
    }

    fn set_digest(&mut self, seq: u64, digest: u16) {
        let (piece, within) = digest_position(seq);
        if self.pieces.len() <= piece {
            self.pieces.resize(piece + 1, None);
        }
        let digests = self.pieces[piece].get_or_insert_with(|| vec![0; DIGESTS_PER_PIECE as usize].into_boxed_slice());
        let before = std::mem::replace(&mut digests[within], digest);
        self.count += u64::from(digest != 0);
        self.count -= u64::from(before != 0);
    }
}

/// Returns the block and the index within it. Task numbers are bounded when they are read.
fn digest_position(seq: u64) -> (usize, usize) {
    (usize::try_from(seq / DIGESTS_PER_PIECE).unwrap_or(usize::MAX), (seq % DIGESTS_PER_PIECE) as usize)
}

fn digest(command: &[u8]) -> u16 {
    let mut hasher = DefaultHasher::new();
    hasher.write(command);
    (hasher.finish() % u64::from(u16::MAX)) as u16 + 1
}

/// Returns the last logged command of a task.
fn last_logged_command(path: &Path, seq: u64) -> Result<String, JobLogError> {
    let mut file = File::open(path).map_err(file_error(path, "read"))?;
    let mut found = String::new();
    for_each_entry(&mut file, path, |logged| {
        if logged.seq == seq {
            found = String::from_utf8_lossy(logged.command).into_owned();
        }
    })?;
    Ok(found)
}

/// Passes every entry to `show`. Returns the end of the last complete line; what follows was cut off during a write.
fn for_each_entry(file: &mut File, path: &Path, mut show: impl FnMut(ParsedLogLine<'_>)) -> Result<u64, JobLogError> {
    file.rewind().map_err(file_error(path, "read"))?;
    let mut reader = BufReader::with_capacity(READ_BYTES, file);
    let mut line = Vec::new();
    let mut end = 0;
    for number in 1.. {
        line.clear();
        let limit = MAX_JOBLOG_LINE_BYTES as u64;
        let length = reader.by_ref().take(limit).read_until(b'\n', &mut line).map_err(file_error(path, "read"))?;
        let Some(text) = line.strip_suffix(b"\n") else {
            let problem = "longer than 4 MiB";
            let is_header = number > 1 || HEADER.starts_with(&line);
            return match (is_header, line.len() < MAX_JOBLOG_LINE_BYTES) {
                (false, _) => Err(JobLogError::NotAJobLog(path.to_owned())),
                (true, false) => Err(JobLogError::BadLine { path: path.to_owned(), line: number, problem }),
                (true, true) => Ok(end),
            };
        };
        if number == 1 && line != HEADER {
            return Err(JobLogError::NotAJobLog(path.to_owned()));
        }
        if number > 1 {
            let bad = |problem| JobLogError::BadLine { path: path.to_owned(), line: number, problem };
            show(ParsedLogLine::parse(text).map_err(bad)?);
        }
        end += length as u64;
    }
    Ok(end)
}

// Background sync: a thread syncs written lines to the disk, spends only a small part of the time on it, and syncs once
// more at the end.

#[derive(Debug)]
struct BackgroundSync {
    context: Arc<SyncContext>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct SyncContext {
    state: Mutex<SyncState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct SyncState {
    is_behind: bool,
    is_ending: bool,
    failure: Option<io::Error>,
}

impl BackgroundSync {
    pub(crate) fn start(file: File) -> io::Result<Self> {
        let context = Arc::new(SyncContext { state: Mutex::default(), changed: Condvar::new() });
        let shared = Arc::clone(&context);
        let thread = std::thread::Builder::new().name("gpupool-joblog".into()).spawn(move || shared.run_sync(&file))?;
        Ok(Self { context, thread: Some(thread) })
    }

    /// Marks that lines were written. Returns the error of the last sync, if it failed.
    pub(crate) fn mark_written(&self) -> io::Result<()> {
        let mut state = lock(&self.context.state);
        if !std::mem::replace(&mut state.is_behind, true) {
            self.context.changed.notify_one();
        }
        state.failure.take().map_or(Ok(()), Err)
    }

    /// Waits until all lines are synced to the disk.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.end();
        lock(&self.context.state).failure.take().map_or(Ok(()), Err)
    }

    fn end(&mut self) {
        lock(&self.context.state).is_ending = true;
        self.context.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // The thread does not panic; if it did, there is nothing to wait for.
            let _ = thread.join();
        }
    }
}

impl Drop for BackgroundSync {
    fn drop(&mut self) {
        self.end();
    }
}

impl SyncContext {
    fn run_sync(&self, file: &File) {
        let mut state = lock(&self.state);
        loop {
            let idle = |state: &mut SyncState| !state.is_behind && !state.is_ending;
            state = self.changed.wait_while(state, idle).unwrap_or_else(PoisonError::into_inner);
            if !std::mem::take(&mut state.is_behind) {
                return;
            }
            drop(state);
            let started_at = Instant::now();
            let done = file.sync_data();
            let rest = (started_at.elapsed() * JOBLOG_SYNC_REST_FACTOR).max(JOBLOG_SYNC_PAUSE);
            state = lock(&self.state);
            if let Err(error) = done {
                state.failure = Some(error);
            }
            let wait = self.changed.wait_timeout_while(state, rest, |state| !state.is_ending);
            state = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(command: &[u8]) -> JobLogEntry<'_> {
        let started = SystemTime::UNIX_EPOCH + Duration::from_millis(1_700_000_000_042);
        JobLogEntry {
            seq: 7,
            started,
            took: Duration::from_millis(1_503),
            received: 12,
            exit_code: 0,
            signal: 0,
            command,
        }
    }

    #[test]
    fn a_line_has_the_columns_of_gnu_parallel() {
        let mut line = Vec::new();
        entry(b"echo 'a\tb\n' \\ \r\0").write_line(&mut line);
        let expected = "7\t:\t1700000000.042\t     1.503\t0\t12\t0\t0\techo 'a\\tb\\n' \\\\ \\r\\0\n";
        assert_eq!(String::from_utf8(line).unwrap(), expected);
    }

    #[test]
    fn written_lines_parse_and_invalid_ones_are_reported() {
        let mut line = Vec::new();
        JobLogEntry { exit_code: -1, ..entry(b"x") }.write_line(&mut line);
        let read = ParsedLogLine::parse(line.trim_ascii_end()).unwrap();
        assert_eq!(read, ParsedLogLine { seq: 7, is_success: false, command: b"x" });
        for (line, expected) in [
            ("", "Seq"),
            ("0\t:\t1\t1\t0\t0\t0\t0\tx", "from 1"),
            ("4294967297\t:\t1\t1\t0\t0\t0\t0\tx", "from 1"),
            ("1\t:\t1\t1\t0\t0\t0\t0", "columns"),
            ("1\t:\t1\t1\t0\t0\tx\t0\tx", "Exitval"),
            ("1\t:\t1\t1\t0\t0\t0\t\tx", "Signal"),
        ] {
            assert!(ParsedLogLine::parse(line.as_bytes()).is_err_and(|problem| problem.contains(expected)), "{line:?}");
        }
    }

    #[test]
    fn a_long_command_is_cut_but_not_within_an_escape() {
        let mut line = Vec::new();
        escape(&vec![b'\t'; MAX_JOBLOG_COMMAND_BYTES], &mut line);
        assert!(line.len() <= MAX_JOBLOG_COMMAND_BYTES && line.ends_with(b"\\t") && line.len() % 2 == 0);
    }
}
