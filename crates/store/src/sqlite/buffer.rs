//! The write-ahead buffer: small batches are written whole, each on one page, before they reach the tables.
//!
//! A grant changes half a dozen pages: those of its lease, of the counters, of the audit trail and of the trail's indexes.
//! All of them would have to be on disk before it is answered. Its rows as one text fit on one page: that page is made
//! durable, the answer goes out, and a flush brings many such batches to the tables together while nothing waits for it.
//! Buffer and tables are one database with one log, so that a crash loses from the end only: tables that have a batch never
//! come back without it, and a batch that they do not have is still in the buffer.
//!
//! In the database the buffer is the table `notes`, and `heard` has the number of the last batch that was flushed.

use std::collections::{BTreeMap, BTreeSet};

use gpupool_core::{PoolRow, PoolTime};
use rusqlite::{Connection, OptionalExtension, params};
use serde::{Deserialize, Serialize};

use crate::clock::{ClockReading, millis, wall};
use crate::lease_store::{RowKey, is_removal, key_of, names_devices};
use crate::limits::{BUFFER_BATCHES, BUFFERED_BATCH_BYTES, BUFFERED_ROWS};

use super::execute;

/// Batches that are durable and not yet in the tables, oldest first.
#[derive(Debug, Default)]
pub(super) struct WriteAheadBuffer {
    batches: Vec<(Vec<PoolRow>, ClockReading)>,
    /// Number of the last batch that was ever written.
    last: i64,
}

/// A batch as it is written and read.
#[derive(Serialize, Deserialize)]
struct BufferedBatch<R> {
    pool: PoolTime,
    wall: u64,
    rows: R,
}

impl WriteAheadBuffer {
    /// Reads the buffer of a database, or returns why one of its batches cannot be read.
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
                    return Ok(Err(format!("what was noted under number {} cannot be read: {why}", buffer.last)));
                }
            }
        }
        Ok(Ok(buffer))
    }

    /// Returns how many batches wait.
    pub fn len(&self) -> usize {
        self.batches.len()
    }

    /// Returns whether no batch waits.
    pub fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    /// Returns each waiting row with the clock of its batch, in the order they were committed.
    pub fn rows(&self) -> impl Iterator<Item = (&PoolRow, ClockReading)> {
        self.batches.iter().flat_map(|(rows, clock)| rows.iter().map(|row| (row, *clock)))
    }

    /// Returns the text of a batch, unless it has to go to the tables at once.
    pub fn encode(&self, rows: &[PoolRow], clock: ClockReading) -> Option<String> {
        // Names of devices are read from the tables when a grant reaches the trail.
        if self.batches.len() >= BUFFER_BATCHES || rows.len() > BUFFERED_ROWS || rows.iter().any(names_devices) {
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

    /// Writes a batch in the place of one that was flushed: one statement, and a transaction by itself.
    pub fn write(&self, connection: &Connection, text: &str) -> rusqlite::Result<()> {
        let number = self.last + 1;
        let sql = "INSERT OR REPLACE INTO notes (place, number, batch) VALUES (?1, ?2, ?3)";
        execute(connection, sql, params![number % BUFFER_BATCHES as i64, number, text]).map(drop)
    }

    /// Adds a batch that was written, and is durable.
    pub fn push(&mut self, rows: &[PoolRow], clock: ClockReading) {
        self.last += 1;
        self.batches.push((rows.to_vec(), clock));
    }

    /// Writes that the tables have every batch.
    pub fn write_flushed(&self, connection: &Connection) -> rusqlite::Result<()> {
        execute(connection, "INSERT OR REPLACE INTO heard (one, number) VALUES (1, ?1)", [self.last]).map(drop)
    }

    /// Forgets the batches: the tables have them.
    pub fn clear(&mut self) {
        self.batches.clear();
    }

    /// Returns the last waiting row about each thing.
    pub fn latest_rows(&self) -> Result<impl Iterator<Item = &PoolRow>, serde_json::Error> {
        let rows = self.rows().map(|(row, _)| Ok((key_of(row)?, row)));
        let latest: BTreeMap<RowKey<'_>, &PoolRow> = rows.collect::<Result<_, serde_json::Error>>()?;
        Ok(latest.into_values())
    }

    /// Returns the rows of the tables as they will be once everything is flushed.
    pub fn overlay(&self, rows: Vec<PoolRow>) -> Result<Vec<PoolRow>, serde_json::Error> {
        if self.is_empty() {
            return Ok(rows);
        }
        let latest: Vec<&PoolRow> = self.latest_rows()?.collect();
        let replaced: BTreeSet<RowKey<'_>> = latest.iter().map(|row| key_of(row)).collect::<Result<_, _>>()?;
        let mut kept = Vec::with_capacity(rows.len() + latest.len());
        for row in rows {
            let is_replaced = replaced.contains(&key_of(&row)?);
            if !is_replaced {
                kept.push(row);
            }
        }
        kept.extend(latest.into_iter().filter(|row| !is_removal(row)).cloned());
        Ok(kept)
    }
}
