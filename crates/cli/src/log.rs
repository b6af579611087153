//! Log lines on their way to standard error, written by a thread of their own.
//!
//! Whoever reads the log slowly must not slow the agent, and nor must the log: the thread takes lines at most every few
//! milliseconds, so that most of them wake nobody. What finds no room is dropped, and how much that was is told.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use tracing_subscriber::fmt::MakeWriter;

/// Bytes of lines that may wait to be written.
const ROOM: usize = 1 << 20;
/// Time from one writing to the next at least, in which lines gather.
const GATHER: Duration = Duration::from_millis(5);
/// How long a process that ends waits for its last lines to be written.
const PATIENCE: Duration = Duration::from_secs(1);

/// Where lines go. Its clones lead to the same place.
#[derive(Clone)]
pub(crate) struct Log {
    waiting: Arc<Mutex<Waiting>>,
    writer: Thread,
}

/// Lines are written until this is dropped, and those that wait then as well.
pub(crate) struct Writing {
    log: Log,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Waiting {
    lines: Vec<u8>,
    dropped: u64,
    /// Whether the thread writes lines it has taken.
    is_writing: bool,
    is_over: bool,
}

impl Log {
    /// Lines of this log go to `to`.
    pub(crate) fn start(to: impl Write + Send + 'static) -> io::Result<(Self, Writing)> {
        let waiting = Arc::new(Mutex::new(Waiting::default()));
        let shared = waiting.clone();
        let thread = thread::Builder::new().name("log".into()).spawn(move || write_all(&shared, to))?;
        let log = Self { waiting, writer: thread.thread().clone() };
        Ok((log.clone(), Writing { log, thread: Some(thread) }))
    }

    /// Comes back when what was logged before is written, or not within [`PATIENCE`]: for those who end the process.
    pub(crate) fn finish(&self) {
        let since = Instant::now();
        let is_left = |waiting: MutexGuard<'_, Waiting>| !waiting.lines.is_empty() || waiting.is_writing;
        while is_left(lock(&self.waiting)) && since.elapsed() < PATIENCE {
            thread::sleep(GATHER / 10);
        }
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
        let mut waiting = lock(&self.waiting);
        // The thread looks by itself for what follows the first.
        let wakes = waiting.lines.is_empty();
        if waiting.lines.len() + lines.len() > ROOM {
            waiting.dropped += 1;
        } else {
            waiting.lines.extend_from_slice(lines);
        }
        drop(waiting);
        if wakes {
            self.writer.unpark();
        }
        Ok(lines.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn lock(waiting: &Mutex<Waiting>) -> MutexGuard<'_, Waiting> {
    // Bytes are as good as they were when somebody panicked.
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes what comes until it is over. Nobody can be told that it cannot be written.
fn write_all(shared: &Mutex<Waiting>, mut to: impl Write) {
    let mut lines = Vec::new();
    loop {
        let mut waiting = lock(shared);
        std::mem::swap(&mut lines, &mut waiting.lines);
        let (dropped, is_over) = (std::mem::take(&mut waiting.dropped), waiting.is_over);
        waiting.is_writing = !lines.is_empty() || dropped > 0 || is_over;
        let is_idle = !waiting.is_writing;
        drop(waiting);
        if is_idle {
            thread::park();
            continue;
        }
        let _ = to.write_all(&lines);
        lines.clear();
        if dropped > 0 {
            let _ = writeln!(to, "{dropped} log lines found no room and were dropped");
        }
        let _ = to.flush();
        lock(shared).is_writing = false;
        if is_over {
            return;
        }
        thread::sleep(GATHER);
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        lock(&self.log.waiting).is_over = true;
        self.log.writer.unpark();
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
        pieces: mpsc::SyncSender<String>,
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

    /// More pieces than any of these tests writes.
    const PIECES: usize = 4_096;

    fn slow() -> (Log, Writing, mpsc::Receiver<String>, mpsc::SyncSender<()>) {
        let (pieces, written) = mpsc::sync_channel(PIECES);
        let (go_on, go) = mpsc::sync_channel(0);
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
    fn a_line_that_never_finds_room_is_counted() {
        let (log, writing, written, go_on) = slow();
        drop(go_on);
        (&log).write_all(&vec![b'x'; ROOM + 1]).unwrap();
        drop(writing);
        assert!(written.try_iter().collect::<String>().starts_with("1 log lines found no room"));
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
