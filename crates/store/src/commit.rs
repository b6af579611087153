//! Keeping the rows of a batch: one transaction, one sync of the disk, all or nothing.
//!
//! A small batch is noted, and the tables hear of it later; a large one they are told at once.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use gpupool_core::{Row, Time};
use rusqlite::{Connection, OptionalExtension, Params, Transaction, TransactionBehavior, params};
use serde::{Deserialize, Serialize};

use crate::clock::{Clock, millis, wall};
use crate::error::CommitError;
use crate::limits::{NOTE_BYTES, NOTE_ROWS, NOTES};
use crate::open::Store;
use crate::trail::{self, Names};

impl Store {
    /// Keeps these rows, in this order, and what they mean for the audit trail. When this returns they are on disk; when
    /// it fails nothing of them is kept. Keeping the same rows again is harmless.
    pub fn commit(&mut self, rows: &[Row], clock: Clock) -> Result<(), CommitError> {
        let Some(text) = self.notes.text_of(rows, clock) else { return self.tell_tables(rows, clock) };
        self.notes.write(&self.connection, &text).map_err(|source| self.not_kept(source))?;
        self.notes.add(rows, clock);
        Ok(())
    }

    /// How many batches are kept as notes that the tables have yet to hear of.
    pub fn unheard(&self) -> usize {
        self.notes.unheard.len()
    }

    /// Lets the tables hear of all batches that are kept as notes. Where this fails they stay notes, and nothing is lost.
    pub fn hear(&mut self) -> Result<(), CommitError> {
        if self.notes.unheard.is_empty() { Ok(()) } else { self.tell_tables(&[], Clock::NEVER) }
    }

    /// Lets the tables hear of all notes and of these rows, in one transaction.
    fn tell_tables(&mut self, rows: &[Row], clock: Clock) -> Result<(), CommitError> {
        let Self { connection, notes, names, .. } = self;
        // What devices are called is remembered from batch to batch; a batch that changes it or fails is none to learn from.
        let is_named = rows.iter().any(|row| matches!(row, Row::Device(_) | Row::Node(_)));
        let mut learned = std::mem::take(names);
        let told = transact(connection, |transaction| {
            hear(transaction, notes, &mut learned)?;
            if is_named {
                learned.clear();
            }
            rows.iter().try_for_each(|row| {
                trail(transaction, row, clock, &mut learned)?;
                put(transaction, row)
            })
        });
        told.map_err(|source| self.not_kept(source))?;
        self.notes.unheard.clear();
        if !is_named {
            self.names = learned;
        }
        Ok(())
    }

    /// As [`Store::commit`], for batches that only give back: where no space is left, the ballast is given up for them.
    pub fn commit_urgent(&mut self, rows: &[Row], clock: Clock) -> Result<(), CommitError> {
        match self.commit(rows, clock) {
            // A quota that is used up looks like a disk that fails.
            Err(CommitError::Full { .. } | CommitError::Io { .. }) if self.ballast.give_up() => {
                self.commit(rows, clock)
            }
            kept => kept,
        }
    }

    /// Makes the ballast anew where it was given up; says whether it is there.
    pub fn regain_ballast(&mut self) -> bool {
        self.ballast.take().is_ok()
    }

    /// Runs a change in one transaction.
    pub(crate) fn transact<T>(
        &mut self,
        change: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<T>,
    ) -> Result<T, CommitError> {
        transact(&mut self.connection, change).map_err(|source| self.not_kept(source))
    }
}

fn transact<T>(
    connection: &mut Connection,
    change: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<T>,
) -> rusqlite::Result<T> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let done = change(&transaction)?;
    transaction.commit()?;
    Ok(done)
}

/// Lets the tables hear of all notes.
pub(crate) fn hear(transaction: &Transaction<'_>, notes: &Notes, names: &mut Names) -> rusqlite::Result<()> {
    if notes.unheard.is_empty() {
        return Ok(());
    }
    for (rows, clock) in &notes.unheard {
        rows.iter().try_for_each(|row| trail(transaction, row, *clock, names))?;
    }
    notes.last_rows().map_err(unwritable)?.try_for_each(|row| put(transaction, row))?;
    notes.write_heard(transaction)
}

/// Adds to the audit trail what a row means for it.
fn trail(transaction: &Transaction<'_>, row: &Row, clock: Clock, names: &mut Names) -> rusqlite::Result<()> {
    match row {
        Row::Lease(lease) => trail::follow(transaction, lease, clock, names),
        Row::Forget(lease) => trail::close(transaction, *lease, clock),
        _ => Ok(()),
    }
}

/// Puts a row in the place of the one before about the same thing.
fn put(transaction: &Transaction<'_>, row: &Row) -> rusqlite::Result<()> {
    let json = || serde_json::to_string(row).map_err(unwritable);
    let put = match row {
        Row::Lease(lease) => {
            let sql = "INSERT OR REPLACE INTO leases (id, value) VALUES (?1, ?2)";
            execute(transaction, sql, params![lease.id.0.cast_signed(), json()?])
        }
        Row::Forget(lease) => execute(transaction, "DELETE FROM leases WHERE id = ?1", [lease.0.cast_signed()]),
        _ => {
            let (kind, key) = key_of(row).map_err(unwritable)?;
            let sql = "INSERT OR REPLACE INTO rows (kind, key, value) VALUES (?1, ?2, ?3)";
            execute(transaction, sql, params![kind, key, json()?])
        }
    };
    put.map(drop)
}

/// Runs a statement that stays prepared, and returns how many rows it changed.
pub(crate) fn execute(connection: &Connection, sql: &str, values: impl Params) -> rusqlite::Result<usize> {
    connection.prepare_cached(sql)?.execute(values)
}

pub(crate) fn unwritable(error: serde_json::Error) -> rusqlite::Error {
    rusqlite::Error::ToSqlConversionFailure(Box::new(error))
}

/// What a row is about: a later row with the same kind and key replaces it.
pub(crate) fn key_of(row: &Row) -> Result<(&'static str, Cow<'_, str>), serde_json::Error> {
    Ok(match row {
        Row::Node(row) => ("node", row.node.to_string().into()),
        Row::Device(row) => ("device", row.device.to_string().into()),
        Row::Lease(row) => ("lease", row.id.to_string().into()),
        Row::Forget(lease) => ("lease", lease.to_string().into()),
        Row::Counters(_) => ("counters", "".into()),
        Row::Policies(_) => ("policies", "".into()),
        Row::Usage(row) => ("usage", Cow::Borrowed(&row.owner)),
        Row::Workload(row) => ("workload", serde_json::to_string(&row.class)?.into()),
    })
}

// Small batches are noted whole before the tables hear of them.
//
// A grant changes half a dozen pages: those of its lease, of the counters, of the audit trail and of the trail's indexes.
// All of them would have to be on disk before it is answered. Its rows as one text fit on one page: that page is made
// durable, the answer goes out, and the tables hear of many such batches together while nobody waits. Notes and tables
// are one database with one log, so that whatever is lost in a crash is lost from the end: tables that have heard of a
// batch never come back without it, and a note they have not heard of is still there.

/// The batches that are noted and that the tables have yet to hear of, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    pub unheard: Vec<(Vec<Row>, Clock)>,
    /// The number of the last note ever made.
    last: i64,
}

/// A note as it is written and read.
#[derive(Serialize, Deserialize)]
struct Note<R> {
    pool: Time,
    wall: u64,
    rows: R,
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
            match serde_json::from_slice::<Note<Vec<Row>>>(text) {
                Ok(note) => notes.unheard.push((note.rows, Clock { pool: note.pool, wall: wall(note.wall) })),
                Err(why) => {
                    return Ok(Err(format!("what was noted under number {} cannot be read: {why}", notes.last)));
                }
            }
        }
        Ok(Ok(notes))
    }

    /// These rows as a note, unless they are better told to the tables at once.
    pub fn text_of(&self, rows: &[Row], clock: Clock) -> Option<String> {
        // What devices are called is read from the tables when the trail hears of a grant.
        let is_named = |row: &Row| matches!(row, Row::Node(_) | Row::Device(_));
        if self.unheard.len() >= NOTES || rows.len() > NOTE_ROWS || rows.iter().any(is_named) {
            return None;
        }
        let mut text = Vec::with_capacity(NOTE_BYTES);
        let note = Note { pool: clock.pool, wall: millis(clock.wall), rows };
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
        let sql = "INSERT OR REPLACE INTO notes (place, number, batch) VALUES (?1, ?2, ?3)";
        execute(connection, sql, params![number % NOTES as i64, number, text]).map(drop)
    }

    /// The note was written, and is durable.
    pub fn add(&mut self, rows: &[Row], clock: Clock) {
        self.last += 1;
        self.unheard.push((rows.to_vec(), clock));
    }

    /// Writes that the tables have heard of all notes.
    pub fn write_heard(&self, transaction: &Transaction<'_>) -> rusqlite::Result<()> {
        execute(transaction, "INSERT OR REPLACE INTO heard (one, number) VALUES (1, ?1)", [self.last]).map(drop)
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

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use gpupool_core::row::Counters;
    use gpupool_core::{LeaseId, Time};
    use tempfile::{TempDir, tempdir};

    use super::*;
    use crate::open::Opened;

    const CLOCK: Clock = Clock { pool: Time(0), wall: UNIX_EPOCH };

    fn store() -> (TempDir, Store) {
        let dir = tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap().store;
        (dir, store)
    }

    /// Rows of owners' usage: the simplest that there can be many of.
    fn usage(count: u64) -> Vec<Row> {
        let row = |number| gpupool_core::row::UsageRow {
            owner: format!("owner {number}").into(),
            period: 0,
            share_millis: number,
            settled_at: Time(0),
        };
        (0..count).map(row).map(Row::Usage).collect()
    }

    fn limit_pages(store: &Store, pages: u32) {
        store.connection.pragma_update_and_check(None, "max_page_count", pages, |_| Ok(())).unwrap();
    }

    #[test]
    fn a_batch_that_finds_no_space_leaves_nothing_and_can_be_kept_later() {
        let (_dir, mut store) = store();
        let first = Row::Counters(Counters { next_lease: 1, ..Counters::default() });
        store.commit(std::slice::from_ref(&first), CLOCK).unwrap();
        limit_pages(&store, 12);
        let error = store.commit(&usage(5_000), CLOCK).unwrap_err();
        assert!(matches!(error, CommitError::Full { .. }), "{error}");
        assert_eq!(store.rows().unwrap().0, [first]);
        limit_pages(&store, 1_000_000);
        store.commit(&usage(5_000), CLOCK).unwrap();
        assert_eq!(store.rows().unwrap().0.len(), 5_001);
    }

    #[test]
    fn the_ballast_is_given_up_once_and_for_urgent_batches_only() {
        let (dir, mut store) = store();
        let ballast = dir.path().join("ballast");
        limit_pages(&store, 12);
        store.commit(&usage(5_000), CLOCK).unwrap_err();
        assert!(ballast.exists());
        let error = store.commit_urgent(&usage(5_000), CLOCK).unwrap_err();
        assert!(matches!(error, CommitError::Full { .. }), "{error}");
        assert!(!ballast.exists());
        assert!(store.regain_ballast() && ballast.exists());
    }

    #[test]
    fn a_small_batch_writes_one_page_and_is_there_before_the_tables_hear_of_it() {
        let (dir, mut store) = store();
        let row = |next_lease| Row::Counters(Counters { next_lease, ..Counters::default() });
        let one = |store: &mut Store, number| store.commit(&[row(number)], CLOCK).unwrap();
        // Each place for a note is made when it is first used.
        (0..100).for_each(|number| one(&mut store, number));
        let pages_of_log = |store: &Store| -> i64 {
            store.connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |row| row.get(1)).unwrap()
        };
        pages_of_log(&store);
        (100..103).for_each(|number| one(&mut store, number));
        assert_eq!(pages_of_log(&store), 3);
        assert!(store.unheard() > 0);
        assert_eq!(store.rows().unwrap().0, [row(102)]);
        drop(store);
        let Opened { mut store, rows, .. } = Store::open(dir.path()).unwrap();
        assert_eq!(rows, [row(102)]);
        assert!(store.unheard() > 0, "nobody told the tables");
        store.hear().unwrap();
        assert_eq!((store.unheard(), store.rows().unwrap().0), (0, vec![row(102)]));
        one(&mut store, 103);
        drop(store);
        assert_eq!(Store::open(dir.path()).unwrap().rows, [row(103)]);
    }

    #[test]
    fn a_note_stays_one_where_the_tables_find_no_space() {
        let (_dir, mut store) = store();
        let lease = |id| Row::Forget(LeaseId(id));
        store.commit(&[lease(1)], CLOCK).unwrap();
        store.connection.pragma_update(None, "query_only", true).unwrap();
        store.hear().unwrap_err();
        assert_eq!(store.unheard(), 1);
        store.connection.pragma_update(None, "query_only", false).unwrap();
        store.hear().unwrap();
        assert_eq!(store.unheard(), 0);
    }

    #[test]
    fn a_database_that_cannot_be_written_says_so() {
        let (_dir, mut store) = store();
        store.connection.pragma_update(None, "query_only", true).unwrap();
        let error = store.commit(&[Row::Forget(LeaseId(1))], CLOCK).unwrap_err();
        assert!(matches!(error, CommitError::ReadOnly { .. }), "{error}");
    }

    #[test]
    fn a_store_can_be_given_to_a_thread() {
        fn is_send(_: impl Send) {}
        is_send(store().1);
    }
}
