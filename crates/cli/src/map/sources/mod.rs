//! Where the arguments of tasks come from: the command line, files, or standard input; several of them in all combinations.
//!
//! The first source is read as its lines are needed, however many there are. Those that follow it are needed again for each
//! of its lines, and are held.

mod count;
mod lines;

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufReader};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use anyhow::{Context, bail};
use bytes::Bytes;

use super::limits::HELD_BYTES;
use crate::output::WrongUsage;
use lines::Lines;

/// A source as it was named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Named {
    /// After `:::`.
    Given(Vec<OsString>),
    /// A file; `-` is standard input.
    File(PathBuf),
}

/// The arguments of one task after the other, one for each source.
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
                    let total = count::ends(&file, separator);
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

/// Read at once.
const READ_BYTES: usize = 1 << 16;

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
}
