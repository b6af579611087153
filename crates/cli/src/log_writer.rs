//! Writes log lines to standard error on a separate thread.
//!
//! A slow reader of the log must not delay the agent. The thread wakes at most every few milliseconds and writes all
//! buffered lines at once. Lines that exceed the buffer are dropped and counted in the log.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use tracing_subscriber::fmt::MakeWriter;

/// Capacity of the buffer.
const BUFFER_BYTES: usize = 1 << 20;
/// Minimum time between two writes.
const WRITE_INTERVAL: Duration = Duration::from_millis(5);
/// Maximum time to wait for pending lines when the process ends.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Sender of log lines; clones share one buffer.
#[derive(Clone)]
pub(crate) struct LogWriter {
    buffer: Arc<Mutex<LogBuffer>>,
    writer: Thread,
}

/// Owner of the writing thread; dropping it writes the pending lines and stops the thread.
pub(crate) struct LogThread {
    log: LogWriter,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct LogBuffer {
    lines: Vec<u8>,
    dropped: u64,
    /// Whether the thread is writing lines it has taken.
    is_writing: bool,
    is_over: bool,
}

impl LogWriter {
    /// Starts the thread that writes to `to`.
    pub(crate) fn start(to: impl Write + Send + 'static) -> io::Result<(Self, LogThread)> {
        let buffer = Arc::new(Mutex::new(LogBuffer::default()));
        let thread_buffer = buffer.clone();
        let thread = thread::Builder::new().name("log".into()).spawn(move || write_lines(&thread_buffer, to))?;
        let log = Self { buffer, writer: thread.thread().clone() };
        Ok((log.clone(), LogThread { log, thread: Some(thread) }))
    }

    /// Waits until pending lines are written, at most [`FLUSH_TIMEOUT`].
    pub(crate) fn flush_log(&self) {
        let started = Instant::now();
        let is_pending = |buffer: MutexGuard<'_, LogBuffer>| !buffer.lines.is_empty() || buffer.is_writing;
        while is_pending(lock(&self.buffer)) && started.elapsed() < FLUSH_TIMEOUT {
            thread::sleep(WRITE_INTERVAL / 10);
        }
    }
}

impl<'a> MakeWriter<'a> for LogWriter {
    type Writer = &'a LogWriter;

    fn make_writer(&'a self) -> &'a LogWriter {
        self
    }
}

impl Write for &LogWriter {
    /// Appends whole lines.
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        let mut buffer = lock(&self.buffer);
        // The thread is awake if lines are pending.
        let wakes = buffer.lines.is_empty();
        if buffer.lines.len() + lines.len() > BUFFER_BYTES {
            buffer.dropped += 1;
        } else {
            buffer.lines.extend_from_slice(lines);
        }
        drop(buffer);
        if wakes {
            self.writer.unpark();
        }
        Ok(lines.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn lock(buffer: &Mutex<LogBuffer>) -> MutexGuard<'_, LogBuffer> {
    // A panic cannot leave the buffer inconsistent.
    buffer.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes buffered lines until the log ends. Write errors are ignored: there is no place to report them.
fn write_lines(thread_buffer: &Mutex<LogBuffer>, mut to: impl Write) {
    let mut lines = Vec::new();
    loop {
        let mut buffer = lock(thread_buffer);
        std::mem::swap(&mut lines, &mut buffer.lines);
        let (dropped, is_over) = (std::mem::take(&mut buffer.dropped), buffer.is_over);
        buffer.is_writing = !lines.is_empty() || dropped > 0 || is_over;
        let is_idle = !buffer.is_writing;
        drop(buffer);
        if is_idle {
            thread::park();
            continue;
        }
        let _ = to.write_all(&lines);
        lines.clear();
        if dropped > 0 {
            let _ = writeln!(to, "{dropped} log lines were dropped because the log buffer was full");
        }
        let _ = to.flush();
        lock(thread_buffer).is_writing = false;
        if is_over {
            return;
        }
        thread::sleep(WRITE_INTERVAL);
    }
}

impl Drop for LogThread {
    fn drop(&mut self) {
        lock(&self.log.buffer).is_over = true;
        self.log.writer.unpark();
        // A thread that panicked has nothing left to write.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Output that reports each write and waits until it may continue.
    struct SlowOutput {
        pieces: mpsc::SyncSender<String>,
        go: mpsc::Receiver<()>,
    }

    impl Write for SlowOutput {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.pieces.send(String::from_utf8_lossy(bytes).into_owned()).unwrap();
            // The test closes the channel to let all writes pass.
            let _ = self.go.recv();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Upper bound for the writes of a test.
    const MAX_PIECES: usize = 4_096;

    fn slow_log() -> (LogWriter, LogThread, mpsc::Receiver<String>, mpsc::SyncSender<()>) {
        let (pieces, written) = mpsc::sync_channel(MAX_PIECES);
        let (go_on, go) = mpsc::sync_channel(0);
        let (log, log_thread) = LogWriter::start(SlowOutput { pieces, go }).unwrap();
        (log, log_thread, written, go_on)
    }

    #[test]
    fn all_lines_are_written_in_order_before_the_log_ends() {
        let (log, log_thread, written, go_on) = slow_log();
        drop(go_on);
        let lines: Vec<String> = (0..1000).map(|number| format!("line {number}\n")).collect();
        for line in &lines {
            (&log).write_all(line.as_bytes()).unwrap();
        }
        drop(log_thread);
        assert_eq!(written.try_iter().collect::<String>(), lines.concat());
    }

    #[test]
    fn flushing_waits_until_the_lines_are_written() {
        let (log, _log_thread, written, go_on) = slow_log();
        drop(go_on);
        for line in ["first\n", "second\n"] {
            (&log).write_all(line.as_bytes()).unwrap();
            log.flush_log();
            assert_eq!(written.try_iter().collect::<String>(), line);
        }
        log.flush_log();
    }

    #[test]
    fn a_line_larger_than_the_buffer_is_counted_as_dropped() {
        let (log, log_thread, written, go_on) = slow_log();
        drop(go_on);
        (&log).write_all(&vec![b'x'; BUFFER_BYTES + 1]).unwrap();
        drop(log_thread);
        assert!(written.try_iter().collect::<String>().starts_with("1 log lines were dropped"));
    }

    #[test]
    fn a_slow_reader_delays_nothing_and_dropped_lines_are_counted() {
        let (log, log_thread, written, go_on) = slow_log();
        (&log).write_all(b"first\n").unwrap();
        assert_eq!(written.recv().unwrap(), "first\n");
        let line = [b'x'; 1024];
        for _ in 0..2 * BUFFER_BYTES / line.len() {
            (&log).write_all(&line).unwrap();
        }
        drop(go_on);
        drop(log_thread);
        let rest: Vec<String> = written.try_iter().collect();
        assert_eq!(rest[0].len(), BUFFER_BYTES);
        assert!(rest[1..].concat().starts_with("1024 log lines were dropped"), "{:?}", &rest[1..]);
    }
}
