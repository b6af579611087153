//! From arguments to tasks: where arguments come from (the command line, files, standard input), and the thread that makes
//! tasks of them, no faster than they are done. It ends with its source, when the run takes no more, or with the program,
//! where it waits for a source that says nothing.

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

use super::stop::Reason;
use super::template::Template;
use super::{MapContext, lock};
use crate::output::WrongUsage;

/// Longest line of a source: far more than a command takes, and no endless one is held.
const LINE_BYTES: usize = 16 << 20;
/// What sources other than the first may hold.
const HELD_BYTES: usize = 256 << 20;
/// Larger files are not read through to know how many lines they have.
const COUNTED_BYTES: u64 = 1 << 30;
/// Read at once.
const READ_BYTES: usize = 1 << 16;

/// Makes tasks.
#[derive(Debug)]
pub(super) struct Feeder {
    pub kind: Kind,
    pub sources: Sources,
    /// What an earlier run did.
    pub finished: Option<FinishedTasks>,
    pub context: MapContext,
}

/// What a task is.
#[derive(Debug)]
pub(super) enum Kind {
    /// A command.
    Command(Template),
    /// Its argument, given to a worker.
    Argument,
}

impl Feeder {
    /// Begins to make tasks.
    pub fn start(mut self) -> anyhow::Result<()> {
        let feed = move || match self.feed() {
            Ok(()) => self.context.remote.close(),
            Err(Trouble::Source(error)) => self.context.stop.after_this(error),
            Err(Trouble::Log(error)) => self.context.stop.now(Reason::Failed(error)),
        };
        // Ends with its source or the run. Nobody joins it: it may wait for input for ever, and then ends with the process.
        let thread = std::thread::Builder::new().name("gpupool-feeder".into()).spawn(feed);
        thread.map(drop).context("cannot start a thread to read the arguments")
    }

    fn feed(&mut self) -> Result<(), Trouble> {
        let (mut seq, mut put) = (0, 0);
        while let Some(arguments) = self.sources.next().map_err(Trouble::Source)? {
            seq += 1;
            let shown = self.kind.shown(&arguments, seq);
            if let Some(finished) = &mut self.finished
                && finished.contains(seq, &shown).map_err(|error| Trouble::Log(error.into()))?
            {
                continue;
            }
            let payload = self.kind.payload(&arguments, seq).map_err(Trouble::Source)?;
            let id = TaskId(put);
            // Told of before it is put: it may be over before this thread goes on.
            lock(&self.context.tasks).insert(id, Task { seq, arguments, shown });
            match self.context.remote.submit_blocking(payload) {
                Ok(same) => debug_assert_eq!(same, id),
                Err(refused) => {
                    lock(&self.context.tasks).remove(&id);
                    if refused == SubmitError::Closed {
                        return Ok(());
                    }
                    return Err(Trouble::Source(anyhow!("argument {seq}: {refused}")));
                }
            }
            put += 1;
        }
        *lock(&self.context.total) = Some(put);
        Ok(())
    }
}

enum Trouble {
    /// What was read before is done.
    Source(anyhow::Error),
    /// Nothing more is to be done.
    Log(anyhow::Error),
}

impl Kind {
    /// What a person would type for it.
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
                    bail!("argument {seq} holds a zero byte, which no command can be given; did you mean --null?");
                }
                Ok(CommandLine::direct(template.argv(arguments, seq)).to_payload())
            }
            Self::Argument => Ok(self.shown(arguments, seq)),
        }
    }
}

/// A task, as people know it.
#[derive(Debug, Clone)]
pub(super) struct Task {
    /// Its place among the arguments, from 1; the same in every run.
    pub seq: u64,
    pub arguments: Vec<Bytes>,
    /// What a person would type for it; where there is no command, its argument.
    pub shown: Bytes,
}

impl Task {
    /// Its arguments as text.
    pub fn argument(&self) -> String {
        let arguments: Vec<_> = self.arguments.iter().map(|argument| String::from_utf8_lossy(argument)).collect();
        arguments.join(" ")
    }
}

/// The tasks that are not over: as many as the queue holds and workers have.
pub(super) type OpenTasks = Arc<Mutex<HashMap<TaskId, Task>>>;

/// How many tasks there are in this run: as many as there may be, and exactly how many when the source is at its end.
pub(super) type Total = Arc<Mutex<Option<u64>>>;

/// A source as it was named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Named {
    /// After `:::`.
    Given(Vec<OsString>),
    /// A file; `-` is standard input.
    File(PathBuf),
}

/// The arguments of one task after the other, one for each source; several sources in all combinations.
///
/// The first source is read as its lines are needed, however many there are. Those that follow it are needed again for each
/// of its lines, and are held.
#[derive(Debug)]
pub(super) struct Sources {
    first: First,
    others: Vec<Vec<Bytes>>,
    /// The argument of the first source that is combined, and which of the others comes next.
    current: Option<(Bytes, Vec<usize>)>,
    total: Option<u64>,
}

#[derive(Debug)]
enum First {
    Given(std::vec::IntoIter<OsString>),
    Lines(Lines<BufReader<File>>),
}

impl Sources {
    /// Opens them all. `separator` ends an argument in a file.
    pub fn open(named: Vec<Named>, separator: u8) -> anyhow::Result<Self> {
        let mut opened = Vec::new();
        let mut has_input = false;
        for one in named {
            opened.push(match one {
                Named::Given(arguments) => (Some(arguments.len() as u64), First::Given(arguments.into_iter())),
                Named::File(path) => {
                    let is_input = path.as_os_str() == "-";
                    if is_input && std::mem::replace(&mut has_input, true) {
                        return Err(WrongUsage::of("standard input (-) can be a source of arguments only once").into());
                    }
                    let file = if is_input { input() } else { File::open(&path) };
                    let name = if is_input { "standard input".into() } else { path.display().to_string() };
                    let file = file.with_context(|| format!("{name}: it cannot be opened as a source of arguments"))?;
                    let total = count_ends(&file, separator);
                    (total, First::Lines(Lines::new(BufReader::with_capacity(READ_BYTES, file), separator, name)))
                }
            });
        }
        let mut opened = opened.into_iter();
        let Some((total, first)) = opened.next() else { bail!("there is no source of arguments") };
        let others = opened.map(|(_, source)| held(source)).collect::<anyhow::Result<Vec<_>>>()?;
        let lengths = || others.iter().map(|other| other.len() as u64);
        let total = total.and_then(|first| lengths().try_fold(first, u64::checked_mul));
        Ok(Self { first, others, current: None, total })
    }

    /// How many tasks there are, where that can be known before.
    pub fn total(&self) -> Option<u64> {
        self.total
    }

    /// The arguments of the next task.
    pub fn next(&mut self) -> anyhow::Result<Option<Vec<Bytes>>> {
        if self.others.iter().any(Vec::is_empty) {
            return Ok(None);
        }
        let (first, indices) = match self.current.take() {
            Some(current) => current,
            None => match self.first.next()? {
                Some(first) => (first, vec![0; self.others.len()]),
                None => return Ok(None),
            },
        };
        let others = self.others.iter().zip(&indices).map(|(other, index)| other[*index].clone());
        let arguments = std::iter::once(first.clone()).chain(others).collect();
        self.current = self.following(indices).map(|indices| (first, indices));
        Ok(Some(arguments))
    }

    /// The last source goes fastest.
    fn following(&self, mut indices: Vec<usize>) -> Option<Vec<usize>> {
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

impl First {
    fn next(&mut self) -> anyhow::Result<Option<Bytes>> {
        match self {
            Self::Given(arguments) => Ok(arguments.next().map(|argument| Bytes::from(argument.into_vec()))),
            Self::Lines(lines) => lines.next(),
        }
    }
}

/// Standard input, with no buffer of somebody else's.
fn input() -> io::Result<File> {
    Ok(File::from(io::stdin().as_fd().try_clone_to_owned()?))
}

fn held(mut source: First) -> anyhow::Result<Vec<Bytes>> {
    let mut held = Vec::new();
    let mut bytes = 0;
    while let Some(argument) = source.next()? {
        bytes += argument.len() + size_of::<Bytes>();
        if bytes > HELD_BYTES {
            bail!("a source of arguments other than the first is larger than 256 MiB; let it be the first");
        }
        held.push(argument);
    }
    Ok(held)
}

/// Lines of a file or a pipe, or whatever else a separator ends, one when it is asked for.
#[derive(Debug)]
struct Lines<R> {
    reader: R,
    separator: u8,
    name: String,
    number: u64,
}

impl<R: BufRead> Lines<R> {
    fn new(reader: R, separator: u8, name: String) -> Self {
        Self { reader, separator, name, number: 0 }
    }

    /// The next one without its end.
    fn next(&mut self) -> anyhow::Result<Option<Bytes>> {
        self.number += 1;
        let mut line = Vec::new();
        let mut reader = self.reader.by_ref().take(LINE_BYTES as u64 + 1);
        let read = reader.read_until(self.separator, &mut line);
        if read.with_context(|| format!("{}: line {} cannot be read", self.name, self.number))? == 0 {
            return Ok(None);
        }
        if line.last() == Some(&self.separator) {
            line.pop();
        } else if line.len() > LINE_BYTES {
            bail!("{}: line {} is longer than 16 MiB, which is the most", self.name, self.number);
        }
        Ok(Some(Bytes::from(line)))
    }
}

/// How many arguments a file holds from where it stands: only of a regular file, and only of one that is read quickly.
fn count_ends(mut file: &File, separator: u8) -> Option<u64> {
    let about = file.metadata().ok()?;
    if !about.is_file() || about.len() > COUNTED_BYTES {
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
        // It grows while it is read: then nobody knows.
        if at > COUNTED_BYTES {
            return None;
        }
    }
    Some(count + u64::from(last != separator))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn given(arguments: &[&str]) -> Named {
        Named::Given(arguments.iter().map(OsString::from).collect())
    }

    fn file(text: &str) -> (tempfile::NamedTempFile, Named) {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        let named = Named::File(file.path().into());
        (file, named)
    }

    fn all(mut sources: Sources) -> Vec<String> {
        let mut all = Vec::new();
        while let Some(arguments) = sources.next().unwrap() {
            all.push(arguments.iter().map(|bytes| String::from_utf8_lossy(bytes)).collect::<Vec<_>>().join(" "));
        }
        all
    }

    #[test]
    fn several_sources_are_combined_and_the_last_goes_fastest() {
        let (_file, lines) = file("x\ny");
        let sources = Sources::open(vec![given(&["a", "b"]), lines, given(&["1", "2"])], b'\n').unwrap();
        assert_eq!(sources.total(), Some(8));
        assert_eq!(all(sources), ["a x 1", "a x 2", "a y 1", "a y 2", "b x 1", "b x 2", "b y 1", "b y 2"]);
        let none = Sources::open(vec![given(&["a"]), given(&[])], b'\n').unwrap();
        assert_eq!((none.total(), all(none)), (Some(0), vec![]));
    }

    #[test]
    fn lines_are_counted_before_they_are_read() {
        for (text, separator, expected) in [
            ("", b'\n', vec![]),
            ("\n", b'\n', vec![""]),
            ("a\n\nb", b'\n', vec!["a", "", "b"]),
            ("a\r\nb\n", b'\n', vec!["a\r", "b"]),
            ("a\nb\0c", b'\0', vec!["a\nb", "c"]),
        ] {
            let (_file, lines) = file(text);
            let sources = Sources::open(vec![lines], separator).unwrap();
            assert_eq!(sources.total(), Some(expected.len() as u64), "{text:?}");
            assert_eq!(all(sources), expected, "{text:?}");
        }
    }

    #[test]
    fn a_source_that_cannot_be_opened_is_named() {
        let error = Sources::open(vec![Named::File("/no/such/file".into())], b'\n').unwrap_err();
        assert!(format!("{error:#}").contains("/no/such/file"), "{error:#}");
        let twice = Sources::open(vec![Named::File("-".into()), Named::File("-".into())], b'\n').unwrap_err();
        assert!(twice.is::<WrongUsage>());
    }

    #[test]
    fn a_line_without_an_end_is_refused_before_it_is_held() {
        let mut lines = Lines::new(std::io::BufReader::new(std::io::repeat(b'x')), b'\n', "pipe".into());
        let error = lines.next().unwrap_err().to_string();
        assert!(error.contains("pipe: line 1") && error.contains("16 MiB"), "{error}");
    }
}
