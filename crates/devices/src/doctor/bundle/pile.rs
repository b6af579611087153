//! The files of a bundle while they are collected, within bounds of number, size and time.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use crate::{kernel_file, limits};

/// After so many files that do not answer no other is read: each keeps a thread that cannot be ended.
const STUCK: usize = 4;

/// A file and where it is from.
#[derive(Debug)]
pub(super) struct Entry {
    pub source: String,
    pub bytes: Vec<u8>,
}

/// What was collected, and what was not with the reason.
pub(super) struct Pile {
    files: BTreeMap<String, Entry>,
    missing: Vec<(String, String)>,
    bytes: usize,
    until: Instant,
    patience: Duration,
    reader: Option<Reader>,
    stuck: usize,
}

/// A thread that reads files, so that one that never answers holds nobody up.
struct Reader {
    ask: Sender<PathBuf>,
    answer: Receiver<io::Result<Vec<u8>>>,
}

impl Pile {
    /// An empty pile that takes files until a time, and waits so long for each.
    pub fn new(until: Instant, patience: Duration) -> Self {
        let (files, missing) = (BTreeMap::new(), Vec::new());
        Self { files, missing, bytes: 0, until, patience, reader: None, stuck: 0 }
    }

    /// Copies a file of the machine.
    pub fn copy(&mut self, name: &str, path: &Path) {
        match self.read(path) {
            Ok(bytes) => self.add(name, &path.display().to_string(), bytes),
            Err(why) => self.miss(name, &why),
        }
    }

    /// Adds a file.
    pub fn add(&mut self, name: &str, source: &str, bytes: Vec<u8>) {
        if self.files.len() >= limits::BUNDLE_FILES || self.bytes + bytes.len() > limits::BUNDLE_BYTES {
            return self.miss(name, "the bundle is full");
        }
        self.bytes += bytes.len();
        self.files.insert(name.to_owned(), Entry { source: source.to_owned(), bytes });
    }

    /// Says why a file is not in the bundle.
    pub fn miss(&mut self, name: &str, why: &str) {
        if self.missing.len() < limits::BUNDLE_FILES {
            self.missing.push((name.to_owned(), why.to_owned()));
        }
    }

    /// Whether the time is over.
    pub fn is_late(&self) -> bool {
        Instant::now() >= self.until
    }

    /// The files, and what is missing.
    pub fn into_parts(self) -> (BTreeMap<String, Entry>, Vec<(String, String)>) {
        (self.files, self.missing)
    }

    fn read(&mut self, path: &Path) -> Result<Vec<u8>, String> {
        if self.is_late() {
            return Err("the time for the bundle was over".to_owned());
        }
        if self.stuck >= STUCK {
            return Err("not read: too many other files did not answer".to_owned());
        }
        let reader = self.reader.take().or_else(Reader::start).ok_or("no thread to read it")?;
        let patience = self.patience.min(self.until.saturating_duration_since(Instant::now()));
        match reader.read(path, patience) {
            Some(result) => {
                self.reader = Some(reader);
                result.map_err(|error| error.to_string())
            }
            None => {
                self.stuck += 1;
                Err(format!("unresponsive: it did not answer for {} ms", patience.as_millis()))
            }
        }
    }
}

impl Reader {
    fn start() -> Option<Self> {
        let (ask, asked) = channel::<PathBuf>();
        let (told, answer) = channel();
        let serve = move || {
            for path in asked {
                if told.send(kernel_file::bytes(&path)).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("bundle-reader".into()).spawn(serve).ok()?;
        Some(Self { ask, answer })
    }

    /// What is in a file, or `None` where it does not answer in time; then this reader is lost with it.
    fn read(&self, path: &Path, patience: Duration) -> Option<io::Result<Vec<u8>>> {
        self.ask.send(path.to_owned()).ok()?;
        self.answer.recv_timeout(patience).ok()
    }
}
