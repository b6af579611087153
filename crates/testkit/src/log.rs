//! What an agent says, line by line, for the messages of failed tests.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Read};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use tokio::sync::watch;

use crate::LOG_LINES;

/// The last lines of an agent's output, over all its runs. A lock: threads that read and tests that print share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Log {
    lines: Arc<Mutex<VecDeque<String>>>,
}

impl Log {
    /// Reads an output to its end, in a thread that ends with it. Lines after `prefix` are told to `found`.
    pub fn collect(&self, output: impl Read + Send + 'static, prefix: &'static str, found: watch::Sender<Vec<String>>) {
        let log = self.clone();
        let read = move || {
            for line in BufReader::new(output).split(b'\n') {
                let Ok(line) = line else { return };
                let line = String::from_utf8_lossy(&line).into_owned();
                if let Some(rest) = line.strip_prefix(prefix) {
                    found.send_modify(|found| found.push(rest.trim().to_owned()));
                }
                log.add(line);
            }
        };
        thread::Builder::new().name("agent output".into()).spawn(read).expect("a thread can be started");
    }

    pub fn add(&self, line: String) {
        let mut lines = self.lock();
        if lines.len() == LOG_LINES {
            lines.pop_front();
        }
        lines.push_back(line);
    }

    /// Everything that is kept.
    pub fn text(&self) -> String {
        self.lock().iter().map(|line| format!("  | {line}\n")).collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<String>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
