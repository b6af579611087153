//! Small batches are noted whole before the tables hear of them.
//!
//! A grant changes half a dozen pages: those of its lease, of the counters, of the audit trail and of the trail's indexes.
//! All of them would have to be on disk before it is answered. Its rows as one text fit on one page: that page is made
//! durable, the answer goes out, and the tables hear of many such batches together while nobody waits. Notes and tables
//! are one database with one log, so that whatever is lost in a crash is lost from the end: tables that have heard of a
//! batch never come back without it, and a note they have not heard of is still there.

use std::collections::{BTreeMap, BTreeSet};

use gpupool_core::{Row, Time};
use rusqlite::{Connection, OptionalExtension, Transaction, params};
use serde::{Deserialize, Serialize};

use crate::clock::{Clock, millis, wall};
use crate::commit::key_of;
use crate::limits::{NOTE_BYTES, NOTE_ROWS, NOTES};

/// The batches that are noted and that the tables have yet to hear of, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    unheard: Vec<(Vec<Row>, Clock)>,
    /// The number of the last note ever made.
    last: i64,
}

/// A note as it is written.
#[derive(Serialize)]
struct Written<'a> {
    pool: Time,
    wall: u64,
    rows: &'a [Row],
}

/// A note as it is read.
#[derive(Deserialize)]
struct Read {
    pool: Time,
    wall: u64,
    rows: Vec<Row>,
}

impl Notes {
    /// Those that a database has, or why one of them cannot be read.
    pub fn read(connection: &Connection) -> rusqlite::Result<Result<Self, String>> {
        let heard: Option<i64> = connection.query_row("SELECT number FROM heard", [], |row| row.get(0)).optional()?;
        let mut notes = Self { unheard: Vec::new(), last: heard.unwrap_or_default() };
        let mut statement = connection.prepare("SELECT number, batch FROM notes WHERE number > ?1 ORDER BY number")?;
        let mut found = statement.query([notes.last])?;
        while let Some(row) = found.next()? {
            notes.last = row.get(0)?;
            let text = row.get_ref(1)?.as_bytes().unwrap_or_default();
            match serde_json::from_slice::<Read>(text) {
                Ok(note) => notes.unheard.push((note.rows, Clock { pool: note.pool, wall: wall(note.wall) })),
                Err(why) => {
                    return Ok(Err(format!("what was noted under number {} cannot be read: {why}", notes.last)));
                }
            }
        }
        Ok(Ok(notes))
    }

    /// How many batches the tables have yet to hear of.
    pub fn count(&self) -> usize {
        self.unheard.len()
    }

    /// These rows as a note, unless they are better told to the tables at once.
    pub fn text_of(&self, rows: &[Row], clock: Clock) -> Option<String> {
        // What devices are called is read from the tables when the trail hears of a grant.
        let is_named = |row: &Row| matches!(row, Row::Node(_) | Row::Device(_));
        if self.unheard.len() >= NOTES || rows.len() > NOTE_ROWS || rows.iter().any(is_named) {
            return None;
        }
        let mut text = Vec::with_capacity(NOTE_BYTES);
        let note = Written { pool: clock.pool, wall: millis(clock.wall), rows };
        serde_json::to_writer(&mut text, &note).ok()?;
        if text.len() > NOTE_BYTES {
            return None;
        }
        text.resize(NOTE_BYTES, b' ');
        String::from_utf8(text).ok()
    }

    /// Writes a note, in the place of one that the tables have heard of: one statement, and a transaction by itself.
    pub fn write(&self, connection: &Connection, text: &str) -> rusqlite::Result<()> {
        let number = self.last + 1;
        connection
            .prepare_cached("INSERT OR REPLACE INTO notes (place, number, batch) VALUES (?1, ?2, ?3)")?
            .execute(params![number % NOTES as i64, number, text])
            .map(drop)
    }

    /// The note was written, and is durable.
    pub fn add(&mut self, rows: &[Row], clock: Clock) {
        self.last += 1;
        self.unheard.push((rows.to_vec(), clock));
    }

    /// The batches, oldest first.
    pub fn unheard(&self) -> &[(Vec<Row>, Clock)] {
        &self.unheard
    }

    /// Writes that the tables have heard of all notes.
    pub fn write_heard(&self, transaction: &Transaction<'_>) -> rusqlite::Result<()> {
        transaction
            .prepare_cached("INSERT OR REPLACE INTO heard (one, number) VALUES (1, ?1)")?
            .execute([self.last])
            .map(drop)
    }

    /// The tables have heard of all notes.
    pub fn heard(&mut self) {
        self.unheard.clear();
    }

    /// The last row about each thing that is noted.
    pub fn last_rows(&self) -> Result<impl Iterator<Item = &Row>, serde_json::Error> {
        let rows = self.unheard.iter().flat_map(|(batch, _)| batch);
        let last: BTreeMap<_, &Row> = rows.map(|row| Ok((key_of(row)?, row))).collect::<Result<_, _>>()?;
        Ok(last.into_values())
    }

    /// Rows of the tables, as they are once the tables have heard of all notes.
    pub fn over(&self, rows: Vec<Row>) -> Result<Vec<Row>, serde_json::Error> {
        if self.unheard.is_empty() {
            return Ok(rows);
        }
        let noted: Vec<&Row> = self.last_rows()?.collect();
        let about: BTreeSet<_> = noted.iter().map(|row| key_of(row)).collect::<Result<_, _>>()?;
        let is_old = |row: &Row| Ok::<_, serde_json::Error>(about.contains(&key_of(row)?));
        let mut kept = Vec::with_capacity(rows.len() + noted.len());
        for row in rows {
            if !is_old(&row)? {
                kept.push(row);
            }
        }
        kept.extend(noted.into_iter().filter(|row| !matches!(row, Row::Forget(_))).cloned());
        Ok(kept)
    }
}
