//! The write-ahead buffer: a small batch is written to one page before its rows reach the tables.
//!
//! A grant changes half a dozen pages: those of its lease, the counters, the audit trail and the trail's indexes. All
//! of them would have to be durable before the grant is acknowledged. Encoded as one text, its rows fit on one page:
//! that page is made durable, the grant is acknowledged, and a flush later moves many such batches to the tables
//! together. Buffer and tables are one database with one log, so a crash loses only the end of the log: a batch is in
//! the tables, or still in the buffer.
//!
//! In the database the buffer is the table `notes`, and `heard` has the number of the last flushed batch.

use std::collections::{BTreeMap, BTreeSet};

use gpupool_core::{PoolRow, PoolTime};
use rusqlite::{Connection, OptionalExtension, params};
use serde::{Deserialize, Serialize};

use crate::clock::{ClockReading, millis, wall};
use crate::lease_store::{RowKey, is_removal, renames_devices, row_key};
use crate::limits::{BUFFER_BATCHES, BUFFERED_BATCH_BYTES, BUFFERED_ROWS};

use super::execute;

/// Batches that are durable and not yet in the tables, oldest first.
#[derive(Debug, Default)]
pub(super) struct WriteAheadBuffer {
    batches: Vec<(Vec<PoolRow>, ClockReading)>,
    /// Number of the last written batch.
    last: i64,
}

/// Stored form of a batch.
#[derive(Serialize, Deserialize)]
struct BufferedBatch<R> {
    pool: PoolTime,
    wall: u64,
    rows: R,
}

impl WriteAheadBuffer {
    /// Reads the buffer of a database, or returns the reason why a batch is unreadable.
    pub fn read(connection: &Connection) -> rusqlite::Result<Result<Self, String>> {
        let flushed: Option<i64> = connection.query_row("SELECT number FROM heard", [], |row| row.get(0)).optional()?;
        let mut buffer = Self { batches: Vec::new(), last: flushed.unwrap_or_default() };
        let mut statement = connection.prepare("SELECT number, batch FROM notes WHERE number > ?1 ORDER BY number")?;
        let mut found = statement.query([buffer.last])?;
        while let Some(row) = found.next()? {
            buffer.last = row.get(0)?;
            let text = row.get_ref(1)?.as_bytes().unwrap_or_default();
            match serde_json::from_slice::<BufferedBatch<Vec<PoolRow>>>(text) {
                Ok(batch) => {
                    buffer.batches.push((batch.rows, ClockReading { pool: batch.pool, wall: wall(batch.wall) }))
                }
                Err(why) => {
                    return Ok(Err(format!("buffered batch number {} cannot be read: {why}", buffer.last)));
                }
            }
        }
        Ok(Ok(buffer))
    }

    /// Returns the number of buffered batches.
    pub fn len(&self) -> usize {
        self.batches.len()
    }

    /// Returns whether the buffer is empty.
    pub fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    /// Returns each buffered row with the clock of its batch, in commit order.
    pub fn rows(&self) -> impl Iterator<Item = (&PoolRow, ClockReading)> {
        self.batches.iter().flat_map(|(rows, clock)| rows.iter().map(|row| (row, *clock)))
    }

    /// Returns the text of a batch, or `None` if the batch must go to the tables.
    pub fn encode(&self, rows: &[PoolRow], clock: ClockReading) -> Option<String> {
        // The trail reads device names from the tables.
        if self.batches.len() >= BUFFER_BATCHES || rows.len() > BUFFERED_ROWS || rows.iter().any(renames_devices) {
            return None;
        }
        let mut text = Vec::with_capacity(BUFFERED_BATCH_BYTES);
        let batch = BufferedBatch { pool: clock.pool, wall: millis(clock.wall), rows };
        serde_json::to_writer(&mut text, &batch).ok()?;
        if text.len() > BUFFERED_BATCH_BYTES {
            return None;
        }
        text.resize(BUFFERED_BATCH_BYTES, b' ');
        String::from_utf8(text).ok()
    }

    /// Writes a batch to the slot of a flushed one: one statement, which is its own transaction.
    pub fn write(&self, connection: &Connection, text: &str) -> rusqlite::Result<()> {
        let number = self.last + 1;
        let sql = "INSERT OR REPLACE INTO notes (place, number, batch) VALUES (?1, ?2, ?3)";
        execute(connection, sql, params![number % BUFFER_BATCHES as i64, number, text]).map(drop)
    }

    /// Adds a batch that is durable.
    pub fn push(&mut self, rows: &[PoolRow], clock: ClockReading) {
        self.last += 1;
        self.batches.push((rows.to_vec(), clock));
    }

    /// Writes that every batch is in the tables.
    pub fn write_flushed(&self, connection: &Connection) -> rusqlite::Result<()> {
        execute(connection, "INSERT OR REPLACE INTO heard (one, number) VALUES (1, ?1)", [self.last]).map(drop)
    }

    /// Removes all batches after a flush.
    pub fn clear(&mut self) {
        self.batches.clear();
    }

    /// Returns the last buffered row about each entity.
    pub fn latest_rows(&self) -> Result<impl Iterator<Item = &PoolRow>, serde_json::Error> {
        let rows = self.rows().map(|(row, _)| Ok((row_key(row)?, row)));
        let latest: BTreeMap<RowKey<'_>, &PoolRow> = rows.collect::<Result<_, serde_json::Error>>()?;
        Ok(latest.into_values())
    }

    /// Returns the rows of the tables as they will be after a flush.
    pub fn overlay(&self, rows: Vec<PoolRow>) -> Result<Vec<PoolRow>, serde_json::Error> {
        if self.is_empty() {
            return Ok(rows);
        }
        let latest: Vec<&PoolRow> = self.latest_rows()?.collect();
        let replaced: BTreeSet<RowKey<'_>> = latest.iter().map(|row| row_key(row)).collect::<Result<_, _>>()?;
        let mut kept = Vec::with_capacity(rows.len() + latest.len());
        for row in rows {
            let is_replaced = replaced.contains(&row_key(&row)?);
            if !is_replaced {
                kept.push(row);
            }
        }
        kept.extend(latest.into_iter().filter(|row| !is_removal(row)).cloned());
        Ok(kept)
    }
}
