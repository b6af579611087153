//! The audit trail: holds of workers with task, worker, times and end.
//!
//! The last holds are kept in memory. With a file, each hold appends a complete line when it begins and another when it
//! ends, so the file is readable after a crash; half a line is skipped. A separate thread writes, so a slow disk delays
//! no caller; it ends with the trail, when all lines are written.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Instant, SystemTime};

use gpupool_confine::lock;
use serde::{Deserialize, Serialize};

use crate::limits::{AUDIT_SYNC_INTERVAL, DROP_TIMEOUT, MAX_AUDIT_ENTRIES, MAX_AUDIT_LINE_BYTES, MAX_AUDIT_UNWRITTEN};

/// One hold of a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditEntry {
    /// Pool among all that write to the file: process id and start time of the pool.
    pub pool: Arc<str>,
    /// Number of the hold in its pool.
    pub hold: u64,
    /// Task that held the worker.
    pub task_id: Arc<str>,
    /// Worker id.
    pub worker_id: u32,
    /// Device of the worker.
    pub device: Arc<str>,
    /// Process id of the worker.
    pub pid: u32,
    /// Time of the acquire, in ms since 1970.
    pub acquired_at_ms: u64,
    /// End of the hold, if it has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<WorkerHoldEnd>,
}

/// The end of a hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerHoldEnd {
    /// Time in ms since 1970.
    pub at_ms: u64,
    /// Reason of the end.
    pub how: WorkerHoldEndReason,
    /// Details.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<Arc<str>>,
}

/// Reason for which a hold ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerHoldEndReason {
    /// The holder released the worker.
    Released,
    /// The hold reached its time limit.
    Timeout,
    /// The worker exceeded its memory limit.
    Memory,
    /// The worker exceeded another limit.
    #[serde(rename = "excess")]
    BoundExceeded,
    /// The holder killed the worker.
    Killed,
    /// The worker exited.
    Lost,
    /// The worker was returned while it was busy.
    Abandoned,
    /// The pool was shut down.
    Closed,
}

/// Audit trail of one pool. Written by the pool's thread and read by any thread, hence a briefly held lock.
#[derive(Debug)]
pub(super) struct AuditTrail {
    pool: Arc<str>,
    records: Mutex<AuditRecords>,
    failure: Arc<OnceLock<Arc<str>>>,
}

#[derive(Debug, Default)]
struct AuditRecords {
    current: BTreeMap<u64, AuditEntry>,
    past: VecDeque<AuditEntry>,
    writer: Option<AuditFileWriter>,
}

#[derive(Debug)]
struct AuditFileWriter {
    lines: SyncSender<Vec<u8>>,
    /// Closed when all lines are written.
    done: Receiver<()>,
}

impl AuditTrail {
    pub(super) fn new(path: Option<&Path>) -> io::Result<Self> {
        let failure = Arc::new(OnceLock::new());
        let writer = path.map(|path| AuditFileWriter::start(path, Arc::clone(&failure))).transpose()?;
        let pool = unique_pool_name();
        Ok(Self { pool, records: Mutex::new(AuditRecords { writer, ..AuditRecords::default() }), failure })
    }

    pub(super) fn begin_hold(&self, hold: u64, task_id: Arc<str>, worker_id: u32, device: Arc<str>, pid: u32) {
        let pool = Arc::clone(&self.pool);
        let entry = AuditEntry { pool, hold, task_id, worker_id, device, pid, acquired_at_ms: now_ms(), ended: None };
        let mut records = lock(&self.records);
        self.write(&records, &entry);
        records.current.insert(hold, entry);
    }

    pub(super) fn end_hold(&self, hold: u64, how: WorkerHoldEndReason, why: Option<Arc<str>>) {
        let mut records = lock(&self.records);
        let Some(mut entry) = records.current.remove(&hold) else { return };
        entry.ended = Some(WorkerHoldEnd { at_ms: now_ms(), how, why });
        self.write(&records, &entry);
        if records.past.len() >= MAX_AUDIT_ENTRIES {
            records.past.pop_front();
        }
        records.past.push_back(entry);
    }

    /// Returns the last holds in the order they began.
    pub(super) fn entries(&self) -> Vec<AuditEntry> {
        let records = lock(&self.records);
        let mut entries: Vec<AuditEntry> = records.past.iter().chain(records.current.values()).cloned().collect();
        entries.sort_unstable_by_key(|entry| entry.hold);
        entries
    }

    /// Returns the reason for which the file is incomplete.
    pub(super) fn failure(&self) -> Option<Arc<str>> {
        self.failure.get().cloned()
    }

    /// Waits for a limited time until all lines are written.
    pub(super) fn close(&self) {
        let Some(AuditFileWriter { lines, done }) = lock(&self.records).writer.take() else { return };
        drop(lines);
        // The channel carries no message; it closes or the wait times out.
        let _ = done.recv_timeout(DROP_TIMEOUT);
    }

    fn write(&self, records: &AuditRecords, entry: &AuditEntry) {
        let Some(writer) = &records.writer else { return };
        let Ok(mut line) = serde_json::to_vec(entry) else { return };
        line.push(b'\n');
        if writer.lines.try_send(line).is_err() {
            let _ = self.failure.set("lines were dropped: the disk is too slow".into());
        }
    }
}

impl AuditFileWriter {
    fn start(path: &Path, failure: Arc<OnceLock<Arc<str>>>) -> io::Result<Self> {
        let mut file = File::options().create(true).append(true).read(true).open(path)?;
        end_torn_line(&mut file)?;
        let (lines, incoming) = sync_channel(MAX_AUDIT_UNWRITTEN);
        let (is_done, done) = sync_channel(0);
        // Ends when the channel of lines closes, which `close` waits for.
        std::thread::Builder::new().name("gpupool-audit".into()).spawn(move || {
            if let Err(error) = write_lines(&file, &incoming) {
                let _ = failure.set(error.to_string().into());
            }
            drop::<SyncSender<()>>(is_done);
        })?;
        Ok(Self { lines, done })
    }
}

/// Ends half a line that a crash left, so that it does not corrupt the next one.
fn end_torn_line(file: &mut File) -> io::Result<()> {
    if file.seek(SeekFrom::End(0))? == 0 {
        return Ok(());
    }
    file.seek(SeekFrom::End(-1))?;
    let mut last = [0];
    file.read_exact(&mut last)?;
    if last == *b"\n" { Ok(()) } else { file.write_all(b"\n") }
}

/// Writes each line at once and syncs the file at intervals.
fn write_lines(mut file: &File, lines: &Receiver<Vec<u8>>) -> io::Result<()> {
    let mut sync_at: Option<Instant> = None;
    loop {
        let pause = sync_at.map(|at| at.saturating_duration_since(Instant::now()));
        let next = match pause {
            Some(pause) => lines.recv_timeout(pause),
            None => lines.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match next {
            Ok(line) => {
                file.write_all(&line)?;
                sync_at.get_or_insert_with(|| Instant::now() + AUDIT_SYNC_INTERVAL);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return file.sync_data(),
        }
        if sync_at.is_some_and(|at| at <= Instant::now()) {
            file.sync_data()?;
            sync_at = None;
        }
    }
}

/// Reads the last holds from an audit file, in the order they began. A hold without an end still runs or was cut off by
/// a crash. Invalid lines are skipped.
pub fn read_audit_file(path: &Path) -> io::Result<Vec<AuditEntry>> {
    let mut reader = BufReader::new(File::open(path)?);
    let mut holds: BTreeMap<usize, AuditEntry> = BTreeMap::new();
    // Order of each hold in the file.
    let mut positions: HashMap<(Arc<str>, u64), usize> = HashMap::new();
    let mut line = Vec::new();
    for number in 0.. {
        line.clear();
        if reader.by_ref().take(MAX_AUDIT_LINE_BYTES).read_until(b'\n', &mut line)? == 0 {
            break;
        }
        let Ok(entry) = serde_json::from_slice::<AuditEntry>(&line) else { continue };
        let position = *positions.entry((Arc::clone(&entry.pool), entry.hold)).or_insert(number);
        holds.insert(position, entry);
        if holds.len() > MAX_AUDIT_ENTRIES
            && let Some((_, oldest)) = holds.pop_first()
        {
            positions.remove(&(oldest.pool, oldest.hold));
        }
    }
    Ok(holds.into_values().collect())
}

/// Returns a unique name, even for pools created within one millisecond.
fn unique_pool_name() -> Arc<str> {
    static POOLS: AtomicU64 = AtomicU64::new(0);
    let nth = POOLS.fetch_add(1, Ordering::Relaxed);
    format!("{}-{}-{nth}", std::process::id(), now_ms()).into()
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin_hold(trail: &AuditTrail, hold: u64) {
        trail.begin_hold(hold, format!("task {hold}").into(), 1, "cpu".into(), 77);
    }

    #[test]
    fn the_file_matches_memory_even_after_a_torn_line() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let trail = AuditTrail::new(Some(file.path())).unwrap();
        begin_hold(&trail, 0);
        begin_hold(&trail, 1);
        trail.end_hold(0, WorkerHoldEndReason::Lost, Some("it exited with code 3".into()));
        trail.close();
        assert_eq!(read_audit_file(file.path()).unwrap(), trail.entries());
        let first = trail.entries();
        assert_eq!(first[0].ended.as_ref().unwrap().how, WorkerHoldEndReason::Lost);
        assert_eq!(first[1].ended, None);

        // The program crashed during a write.
        let whole = std::fs::read(file.path()).unwrap();
        std::fs::write(file.path(), &whole[..whole.len() - 20]).unwrap();
        let torn = read_audit_file(file.path()).unwrap();
        assert_eq!((torn.len(), &torn[0].ended), (2, &None), "the line of its end was torn");
        let next = AuditTrail::new(Some(file.path())).unwrap();
        begin_hold(&next, 0);
        next.close();
        assert_eq!(read_audit_file(file.path()).unwrap().last(), next.entries().last());
        assert_eq!(trail.failure(), None);
    }

    #[test]
    fn only_the_last_holds_are_retained() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let trail = AuditTrail::new(Some(file.path())).unwrap();
        begin_hold(&trail, 0);
        for hold in 1..=MAX_AUDIT_ENTRIES as u64 + 5 {
            begin_hold(&trail, hold);
            trail.end_hold(hold, WorkerHoldEndReason::Released, None);
        }
        trail.close();
        let entries = trail.entries();
        assert_eq!((entries.len(), entries[0].hold, entries[1].hold), (MAX_AUDIT_ENTRIES + 1, 0, 6));
        assert!(trail.failure().is_some() || read_audit_file(file.path()).unwrap().len() == MAX_AUDIT_ENTRIES);
    }
}
