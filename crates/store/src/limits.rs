//! Every bound of this crate, in one place.

use std::time::Duration;

/// Size of the file that is given up when the disk is full, so that releases can still be kept.
pub const BALLAST_BYTES: u64 = 1 << 20;
/// The log is cut back to this size when it was once longer.
pub(crate) const LOG_BYTES: i64 = 4 << 20;
/// Free space at which the log is made that long at once.
pub(crate) const LOG_SPACE: u64 = 256 << 20;
/// Records on one page of history, however many are asked for.
pub(crate) const PAGE_RECORDS: usize = 1_000;
/// Leases whose records are removed in one transaction, so that commits get their turn in between.
pub(crate) const REMOVED_AT_ONCE: usize = 1_000;
/// Rows that cannot be read are complained of one by one up to this many.
pub(crate) const COMPLAINTS: usize = 100;
/// Free space below which a failed write is taken for a full disk.
pub(crate) const FULL_BELOW_BYTES: u64 = 64 << 10;
/// Batches that fit in the write-ahead buffer. The place of a batch follows from it: with another number, the buffer has to
/// be flushed before the first batch is written.
pub(crate) const BUFFER_BATCHES: usize = 64;
/// Rows of a batch that may go to the write-ahead buffer.
pub(crate) const BUFFERED_ROWS: usize = 12;
/// Length of every batch in the write-ahead buffer: two of them do not fit on a page, and one does with its numbers.
pub(crate) const BUFFERED_BATCH_BYTES: usize = 3_900;
/// How long a transaction waits for another connection: a reader that finds the log's index half written looks at it again
/// under the writer's lock, for some microseconds.
pub(crate) const LOCK_WAIT: Duration = Duration::from_millis(100);
