//! Reads arguments from the command line, files and standard input, and submits one task per combination.
//!
//! A thread reads no faster than tasks finish. It ends with its sources or with the run. A thread that is blocked on an
//! input ends with the process.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use anyhow::{Context, anyhow, bail};
use bytes::Bytes;
use gpupool_dispatch::command::CommandLine;
use gpupool_dispatch::job_log::FinishedTasks;
use gpupool_dispatch::{SubmitError, TaskId};

use super::run_stopper::StopReason;
use super::template::CommandTemplate;
use super::{MapContext, lock};
use crate::output::UsageError;

/// Maximum length of an argument, far above what a command accepts.
const MAX_LINE_BYTES: usize = 16 << 20;
/// Maximum size of all sources but the first, which are held in memory.
const MAX_BUFFERED_BYTES: usize = 256 << 20;
/// Maximum size of a file whose arguments are counted in advance.
const MAX_COUNTED_BYTES: u64 = 1 << 30;
/// Size of the read buffer.
const READ_BUFFER_BYTES: usize = 1 << 16;

/// Submits the tasks of a run.
#[derive(Debug)]
pub(super) struct TaskFeeder {
    pub template: TaskTemplate,
    pub sources: ArgumentCombinations,
    /// Tasks that an earlier run finished.
    pub finished: Option<FinishedTasks>,
    pub context: MapContext,
}

/// Form of a task.
#[derive(Debug)]
pub(super) enum TaskTemplate {
    /// Command line of a task.
    Command(CommandTemplate),
    /// Argument that is sent to a worker.
    Argument,
}

impl TaskFeeder {
    pub fn start(mut self) -> anyhow::Result<()> {
        let feed = move || match self.feed() {
            Ok(()) => self.context.run_handle.close(),
            Err(FeedError::Input(error)) => self.context.stop.after_queue(error),
            Err(FeedError::JobLog(error)) => self.context.stop.now(StopReason::Failed(error)),
        };
        // The thread is not joined because it may be blocked on input; it then ends with the process.
        let thread = std::thread::Builder::new().name("gpupool-feeder".into()).spawn(feed);
        thread.map(drop).context("cannot start a thread to read the arguments")
    }

    fn feed(&mut self) -> Result<(), FeedError> {
        let (mut seq, mut submitted) = (0, 0);
        while let Some(arguments) = self.sources.next_arguments().map_err(FeedError::Input)? {
            seq += 1;
            let shown = self.template.shown(&arguments, seq);
            if let Some(finished) = &mut self.finished
                && finished.contains(seq, &shown).map_err(|error| FeedError::JobLog(error.into()))?
            {
                continue;
            }
            let payload = self.template.payload(&arguments, seq).map_err(FeedError::Input)?;
            let id = TaskId(submitted);
            // Registered before it is submitted, because it may finish before this thread continues.
            lock(&self.context.tasks).insert(id, MapTask { seq, arguments, shown });
            match self.context.run_handle.submit_blocking(payload) {
                Ok(same) => debug_assert_eq!(same, id),
                Err(refused) => {
                    lock(&self.context.tasks).remove(&id);
                    if refused == SubmitError::Closed {
                        return Ok(());
                    }
                    return Err(FeedError::Input(anyhow!("argument {seq}: {refused}")));
                }
            }
            submitted += 1;
        }
        *lock(&self.context.total) = Some(submitted);
        Ok(())
    }
}

/// Error that ends the feeding.
enum FeedError {
    /// A source failed; the tasks submitted before are still run.
    Input(anyhow::Error),
    /// The job log failed; the run stops.
    JobLog(anyhow::Error),
}

impl TaskTemplate {
    /// Returns the command as a user would type it.
    pub fn shown(&self, arguments: &[Bytes], seq: u64) -> Bytes {
        match self {
            Self::Command(template) => template.shown(arguments, seq).into(),
            Self::Argument => arguments.first().cloned().unwrap_or_default(),
        }
    }

    fn payload(&self, arguments: &[Bytes], seq: u64) -> anyhow::Result<Bytes> {
        match self {
            Self::Command(template) => {
                if arguments.iter().any(|argument| argument.contains(&0)) {
                    bail!("argument {seq} contains a NUL byte, which a command cannot receive; did you mean --null?");
                }
                Ok(CommandLine::direct(template.argv(arguments, seq)).to_payload())
            }
            Self::Argument => Ok(self.shown(arguments, seq)),
        }
    }
}

/// Task as shown to users.
#[derive(Debug, Clone)]
pub(super) struct MapTask {
    /// Sequence number from 1; the same in every run.
    pub seq: u64,
    pub arguments: Vec<Bytes>,
    /// Command as a user would type it; for a worker, the argument.
    pub shown: Bytes,
}

impl MapTask {
    /// Returns the arguments as text.
    pub fn argument(&self) -> String {
        let arguments: Vec<_> = self.arguments.iter().map(|argument| String::from_utf8_lossy(argument)).collect();
        arguments.join(" ")
    }
}

/// Tasks that are queued or running.
pub(super) type OpenTasks = Arc<Mutex<HashMap<TaskId, MapTask>>>;

/// Number of tasks of this run, if known; exact once all sources have been read.
pub(super) type TaskTotal = Arc<Mutex<Option<u64>>>;

/// Source of arguments as given by the user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ArgumentSource {
    /// Arguments after `:::`.
    Given(Vec<OsString>),
    /// File; `-` for standard input.
    File(PathBuf),
}

/// Iterates over all combinations of the arguments of several sources.
///
/// The first source is read as needed and may be endless. The other sources are repeated for each of its arguments and
/// are held in memory.
#[derive(Debug)]
pub(super) struct ArgumentCombinations {
    first: SourceReader,
    others: Vec<Vec<Bytes>>,
    /// Current argument of the first source, and the next index in each other source.
    current: Option<(Bytes, Vec<usize>)>,
    total: Option<u64>,
}

#[derive(Debug)]
enum SourceReader {
    Given(std::vec::IntoIter<OsString>),
    Lines(LineReader<BufReader<File>>),
}

impl ArgumentCombinations {
    /// Opens all sources. `separator` ends an argument in a file.
    pub fn open(named: Vec<ArgumentSource>, separator: u8) -> anyhow::Result<Self> {
        let mut readers = Vec::new();
        let mut has_input = false;
        for source in named {
            readers.push(match source {
                ArgumentSource::Given(arguments) => {
                    (Some(arguments.len() as u64), SourceReader::Given(arguments.into_iter()))
                }
                ArgumentSource::File(path) => {
                    let is_input = path.as_os_str() == "-";
                    if is_input && std::mem::replace(&mut has_input, true) {
                        return Err(UsageError::new("standard input (-) can be used as a source only once").into());
                    }
                    let file = if is_input { open_stdin() } else { File::open(&path) };
                    let name = if is_input { "standard input".into() } else { path.display().to_string() };
                    let file = file.with_context(|| format!("cannot open {name} as a source of arguments"))?;
                    let total = count_arguments(&file, separator);
                    (
                        total,
                        SourceReader::Lines(LineReader::new(
                            BufReader::with_capacity(READ_BUFFER_BYTES, file),
                            separator,
                            name,
                        )),
                    )
                }
            });
        }
        let mut readers = readers.into_iter();
        let Some((total, first)) = readers.next() else { bail!("no source of arguments") };
        let others = readers.map(|(_, source)| read_all(source)).collect::<anyhow::Result<Vec<_>>>()?;
        let lengths = || others.iter().map(|other| other.len() as u64);
        let total = total.and_then(|first| lengths().try_fold(first, u64::checked_mul));
        Ok(Self { first, others, current: None, total })
    }

    /// Returns the number of combinations if it can be known in advance.
    pub fn total(&self) -> Option<u64> {
        self.total
    }

    /// Returns the arguments of the next task.
    pub fn next_arguments(&mut self) -> anyhow::Result<Option<Vec<Bytes>>> {
        if self.others.iter().any(Vec::is_empty) {
            return Ok(None);
        }
        let (first, indices) = match self.current.take() {
            Some(current) => current,
            None => match self.first.next_argument()? {
                Some(first) => (first, vec![0; self.others.len()]),
                None => return Ok(None),
            },
        };
        let others = self.others.iter().zip(&indices).map(|(other, index)| other[*index].clone());
        let arguments = std::iter::once(first.clone()).chain(others).collect();
        self.current = self.next_indices(indices).map(|indices| (first, indices));
        Ok(Some(arguments))
    }

    /// Advances the indices; the last source varies fastest.
    fn next_indices(&self, mut indices: Vec<usize>) -> Option<Vec<usize>> {
        for (index, other) in indices.iter_mut().zip(&self.others).rev() {
            *index += 1;
            if *index < other.len() {
                return Some(indices);
            }
            *index = 0;
        }
        None
    }
}

impl SourceReader {
    fn next_argument(&mut self) -> anyhow::Result<Option<Bytes>> {
        match self {
            Self::Given(arguments) => Ok(arguments.next().map(|argument| Bytes::from(argument.into_vec()))),
            Self::Lines(lines) => lines.next_argument(),
        }
    }
}

/// Opens standard input without the buffer of the standard library.
fn open_stdin() -> io::Result<File> {
    Ok(File::from(io::stdin().as_fd().try_clone_to_owned()?))
}

fn read_all(mut source: SourceReader) -> anyhow::Result<Vec<Bytes>> {
    let mut arguments = Vec::new();
    let mut bytes = 0;
    while let Some(argument) = source.next_argument()? {
        bytes += argument.len() + size_of::<Bytes>();
        if bytes > MAX_BUFFERED_BYTES {
            bail!("a source of arguments other than the first is larger than 256 MiB; make it the first source");
        }
        arguments.push(argument);
    }
    Ok(arguments)
}

/// Reads arguments that end with a separator from a file or pipe.
#[derive(Debug)]
struct LineReader<R> {
    reader: R,
    separator: u8,
    name: String,
    number: u64,
}

impl<R: BufRead> LineReader<R> {
    fn new(reader: R, separator: u8, name: String) -> Self {
        Self { reader, separator, name, number: 0 }
    }

    /// Returns the next argument without its separator.
    fn next_argument(&mut self) -> anyhow::Result<Option<Bytes>> {
        self.number += 1;
        let mut line = Vec::new();
        let mut reader = self.reader.by_ref().take(MAX_LINE_BYTES as u64 + 1);
        let read = reader.read_until(self.separator, &mut line);
        if read.with_context(|| format!("cannot read {}: line {}", self.name, self.number))? == 0 {
            return Ok(None);
        }
        if line.last() == Some(&self.separator) {
            line.pop();
        } else if line.len() > MAX_LINE_BYTES {
            bail!("{}: line {} is longer than the maximum of 16 MiB", self.name, self.number);
        }
        Ok(Some(Bytes::from(line)))
    }
}

/// Counts the arguments from the current position of a regular file; `None` if the file is too large or not a regular
/// file.
fn count_arguments(mut file: &File, separator: u8) -> Option<u64> {
    let metadata = file.metadata().ok()?;
    if !metadata.is_file() || metadata.len() > MAX_COUNTED_BYTES {
        return None;
    }
    let mut at = file.stream_position().ok()?;
    let mut piece = vec![0; 1 << 16];
    let (mut count, mut last) = (0, separator);
    loop {
        let length = file.read_at(&mut piece, at).ok()?;
        let Some(end) = piece[..length].last() else { break };
        last = *end;
        count += piece[..length].iter().filter(|byte| **byte == separator).count() as u64;
        at += length as u64;
        // The file grows while it is read, so the count is unknown.
        if at > MAX_COUNTED_BYTES {
            return None;
        }
    }
    Some(count + u64::from(last != separator))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn given(arguments: &[&str]) -> ArgumentSource {
        ArgumentSource::Given(arguments.iter().map(OsString::from).collect())
    }

    fn temporary_file(text: &str) -> (tempfile::NamedTempFile, ArgumentSource) {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        let named = ArgumentSource::File(file.path().into());
        (file, named)
    }

    fn collect_all(mut sources: ArgumentCombinations) -> Vec<String> {
        let mut all = Vec::new();
        while let Some(arguments) = sources.next_arguments().unwrap() {
            all.push(arguments.iter().map(|bytes| String::from_utf8_lossy(bytes)).collect::<Vec<_>>().join(" "));
        }
        all
    }

    #[test]
    fn several_sources_are_combined_and_the_last_varies_fastest() {
        let (_file, lines) = temporary_file("x\ny");
        let sources = ArgumentCombinations::open(vec![given(&["a", "b"]), lines, given(&["1", "2"])], b'\n').unwrap();
        assert_eq!(sources.total(), Some(8));
        assert_eq!(collect_all(sources), ["a x 1", "a x 2", "a y 1", "a y 2", "b x 1", "b x 2", "b y 1", "b y 2"]);
        let none = ArgumentCombinations::open(vec![given(&["a"]), given(&[])], b'\n').unwrap();
        assert_eq!((none.total(), collect_all(none)), (Some(0), vec![]));
    }

    #[test]
    fn arguments_are_counted_before_they_are_read() {
        for (text, separator, expected) in [
            ("", b'\n', vec![]),
            ("\n", b'\n', vec![""]),
            ("a\n\nb", b'\n', vec!["a", "", "b"]),
            ("a\r\nb\n", b'\n', vec!["a\r", "b"]),
            ("a\nb\0c", b'\0', vec!["a\nb", "c"]),
        ] {
            let (_file, lines) = temporary_file(text);
            let sources = ArgumentCombinations::open(vec![lines], separator).unwrap();
            assert_eq!(sources.total(), Some(expected.len() as u64), "{text:?}");
            assert_eq!(collect_all(sources), expected, "{text:?}");
        }
    }

    #[test]
    fn the_error_names_a_source_that_cannot_be_opened() {
        let error = ArgumentCombinations::open(vec![ArgumentSource::File("/no/such/file".into())], b'\n').unwrap_err();
        assert!(format!("{error:#}").contains("/no/such/file"), "{error:#}");
        let twice =
            ArgumentCombinations::open(vec![ArgumentSource::File("-".into()), ArgumentSource::File("-".into())], b'\n')
                .unwrap_err();
        assert!(twice.is::<UsageError>());
    }

    #[test]
    fn an_endless_line_is_refused_before_it_fills_memory() {
        let mut lines = LineReader::new(std::io::BufReader::new(std::io::repeat(b'x')), b'\n', "pipe".into());
        let error = lines.next_argument().unwrap_err().to_string();
        assert!(error.contains("pipe: line 1") && error.contains("16 MiB"), "{error}");
    }
}
