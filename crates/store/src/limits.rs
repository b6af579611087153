//! Limits of this crate.

use std::time::Duration;

/// Size of the reserved file that is removed when the disk is full, so that releases can still be committed.
pub const BALLAST_BYTES: u64 = 1 << 20;
/// Size to which the database truncates its log.
pub(crate) const LOG_BYTES: i64 = 4 << 20;
/// Minimum free space for writing the log to that size in advance.
pub(crate) const LOG_FREE_BYTES: u64 = 256 << 20;
/// Maximum number of records on a page of history.
pub(crate) const PAGE_RECORDS: usize = 1_000;
/// Number of leases whose records one transaction removes, so that commits can run in between.
pub(crate) const PRUNED_LEASES: usize = 1_000;
/// Maximum number of warnings about single unreadable rows.
pub(crate) const MAX_ROW_WARNINGS: usize = 100;
/// Free space below which a failed write counts as a full disk.
pub(crate) const FULL_DISK_BYTES: u64 = 64 << 10;
/// Number of batches in the write-ahead buffer. The slot of a batch depends on it: with another number, the buffer must
/// be flushed before the first batch is written.
pub(crate) const BUFFER_BATCHES: usize = 64;
/// Maximum number of rows of a batch in the write-ahead buffer.
pub(crate) const BUFFERED_ROWS: usize = 12;
/// Length of every batch in the write-ahead buffer: one fits on a page with its numbers, two do not.
pub(crate) const BUFFERED_BATCH_BYTES: usize = 3_900;
/// Maximum time that a transaction waits for another connection: a reader that finds the log's index half written
/// checks it again under the writer's lock, for some microseconds.
pub(crate) const LOCK_WAIT: Duration = Duration::from_millis(100);
