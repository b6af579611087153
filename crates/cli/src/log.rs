//! Log lines on their way to standard error, written by a thread of their own.
//!
//! Whoever reads the log slowly must not slow the agent, and nor must the log: lines of the same few milliseconds are
//! written together, so that most of them wake nobody. What finds no room is dropped, and how much that was is told.

use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tracing_subscriber::fmt::MakeWriter;

/// Bytes of lines that may wait to be written.
const ROOM: usize = 1 << 20;
/// How long lines gather before they are written.
const GATHER: Duration = Duration::from_millis(5);
/// How long a process that ends waits for its last lines to be written.
const PATIENCE: Duration = Duration::from_secs(1);

/// Where lines go. Its clones lead to the same place.
#[derive(Clone)]
pub(crate) struct Log {
    shared: Arc<Shared>,
}

/// Lines are written until this is dropped, and those that wait then as well.
pub(crate) struct Writing {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    lines: Vec<u8>,
    dropped: u64,
    /// Whether the thread sleeps until somebody wakes it.
    is_asleep: bool,
    /// Whether the thread writes lines it has taken.
    is_writing: bool,
    /// Whether somebody waits for all of it to be written.
    is_hurried: bool,
    is_over: bool,
}

impl Log {
    /// Lines of this log go to `to`.
    pub(crate) fn start(to: impl Write + Send + 'static) -> io::Result<(Self, Writing)> {
        let shared = Arc::new(Shared::default());
        let writer = shared.clone();
        let thread = thread::Builder::new().name("log".into()).spawn(move || writer.write_all(to))?;
        Ok((Self { shared: shared.clone() }, Writing { shared, thread: Some(thread) }))
    }

    /// Comes back when what was logged before is written, or not within [`PATIENCE`]: for those who end the process.
    pub(crate) fn finish(&self) {
        let mut waiting = self.shared.lock();
        waiting.is_hurried = true;
        self.shared.changed.notify_all();
        let is_left = |waiting: &mut Waiting| !waiting.lines.is_empty() || waiting.is_writing;
        drop(self.shared.changed.wait_timeout_while(waiting, PATIENCE, is_left));
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = &'a Log;

    fn make_writer(&'a self) -> &'a Log {
        self
    }
}

impl Write for &Log {
    /// One or more whole lines.
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        let mut waiting = self.shared.lock();
        if waiting.lines.len() + lines.len() > ROOM {
            waiting.dropped += 1;
        } else {
            waiting.lines.extend_from_slice(lines);
        }
        if std::mem::take(&mut waiting.is_asleep) {
            self.shared.changed.notify_all();
        }
        Ok(lines.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        // Bytes are as good as they were when somebody panicked.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes what comes until it is over. Nobody can be told that it cannot be written.
    fn write_all(&self, mut to: impl Write) {
        let mut lines = Vec::new();
        loop {
            let (dropped, is_over) = self.take(&mut lines);
            let _ = to.write_all(&lines);
            lines.clear();
            if dropped > 0 {
                let _ = writeln!(to, "{dropped} log lines found no room and were dropped");
            }
            let _ = to.flush();
            self.lock().is_writing = false;
            self.changed.notify_all();
            if is_over {
                return;
            }
        }
    }

    /// Waits for lines and for those that follow closely, and takes them; also how many were dropped, and whether these
    /// are the last.
    fn take(&self, lines: &mut Vec<u8>) -> (u64, bool) {
        let mut waiting = self.lock();
        while waiting.lines.is_empty() && !waiting.is_over {
            waiting.is_asleep = true;
            waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
        waiting.is_asleep = false;
        let has_time = |waiting: &mut Waiting| !waiting.is_over && !waiting.is_hurried;
        let gathered = self.changed.wait_timeout_while(waiting, GATHER, has_time);
        let (mut waiting, _) = gathered.unwrap_or_else(PoisonError::into_inner);
        (waiting.is_writing, waiting.is_hurried) = (true, false);
        std::mem::swap(lines, &mut waiting.lines);
        (std::mem::take(&mut waiting.dropped), waiting.is_over)
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.shared.lock().is_over = true;
        self.shared.changed.notify_all();
        // A thread that panicked has nothing left to write.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Passes on what is written, and waits with each piece until it may go on.
    struct Slow {
        pieces: mpsc::Sender<String>,
        go: mpsc::Receiver<()>,
    }

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.pieces.send(String::from_utf8_lossy(bytes).into_owned()).unwrap();
            // Whoever tests has seen enough when it is gone.
            let _ = self.go.recv();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn slow() -> (Log, Writing, mpsc::Receiver<String>, mpsc::Sender<()>) {
        let (pieces, written) = mpsc::channel();
        let (go_on, go) = mpsc::channel();
        let (log, writing) = Log::start(Slow { pieces, go }).unwrap();
        (log, writing, written, go_on)
    }

    #[test]
    fn lines_come_out_in_order_and_all_of_them_by_the_end() {
        let (log, writing, written, go_on) = slow();
        drop(go_on);
        let lines: Vec<String> = (0..1000).map(|number| format!("line {number}\n")).collect();
        for line in &lines {
            (&log).write_all(line.as_bytes()).unwrap();
        }
        drop(writing);
        assert_eq!(written.try_iter().collect::<String>(), lines.concat());
    }

    #[test]
    fn whoever_ends_the_process_can_wait_for_what_was_logged() {
        let (log, _writing, written, go_on) = slow();
        drop(go_on);
        for line in ["first\n", "second\n"] {
            (&log).write_all(line.as_bytes()).unwrap();
            log.finish();
            assert_eq!(written.try_iter().collect::<String>(), line);
        }
        log.finish();
    }

    #[test]
    fn who_does_not_read_holds_nobody_up_and_is_told_what_was_dropped() {
        let (log, writing, written, go_on) = slow();
        (&log).write_all(b"first\n").unwrap();
        assert_eq!(written.recv().unwrap(), "first\n");
        let line = [b'x'; 1024];
        for _ in 0..2 * ROOM / line.len() {
            (&log).write_all(&line).unwrap();
        }
        drop(go_on);
        drop(writing);
        let rest: Vec<String> = written.try_iter().collect();
        assert_eq!(rest[0].len(), ROOM);
        assert!(rest[1..].concat().starts_with("1024 log lines found no room"), "{:?}", &rest[1..]);
    }
}
