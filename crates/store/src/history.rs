//! Reading the audit trail, page by page, and removing what is old.

use std::time::SystemTime;

use gpupool_core::GpuId;
use rusqlite::types::Value;
use rusqlite::{Connection, TransactionBehavior, params_from_iter};

use crate::clock::millis;
use crate::commit::hear;
use crate::error::{CommitError, ReadError};
use crate::limits;
use crate::open::Store;
use crate::trail::{COLUMNS, Record};
use crate::usage::{self, By, UsageLine};

/// Which records. Everything left out means any.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Query {
    /// Only this owner's.
    pub owner: Option<String>,
    /// Only leases on devices with this number on their node.
    pub gpu_id: Option<GpuId>,
    /// Not before.
    pub since: Option<SystemTime>,
    /// Before.
    pub until: Option<SystemTime>,
    /// At most so many; a page has 1000 at most.
    pub limit: Option<usize>,
    /// Go on where a page ended.
    pub after: Option<Cursor>,
}

/// Where a page ended: the place of its last record in the trail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cursor(pub u64);

/// Records, in the order they were made: the wall clock may have been set back in between.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// The records.
    pub records: Vec<Record>,
    /// Where to go on, if there are more.
    pub next: Option<Cursor>,
}

impl Store {
    /// A page of the audit trail, oldest first.
    pub fn history(&mut self, query: &Query) -> Result<Page, ReadError> {
        self.read(|connection| page(connection, query))
    }

    /// What was held from `since` until `now`, what is still held included; most first.
    pub fn usage(&mut self, by: By, since: SystemTime, now: SystemTime) -> Result<Vec<UsageLine>, ReadError> {
        self.read(|connection| usage::lines(connection, by, millis(since), millis(now)))
    }

    /// Removes the records of leases that ended before `older_than`, up to a thousand leases; says how many records were
    /// removed. Call it again until it says 0, with other commits in between. What is still held is never removed.
    pub fn retain(&mut self, older_than: SystemTime) -> Result<usize, CommitError> {
        self.hear()?;
        let before = millis(older_than).cast_signed();
        self.transact(|transaction| {
            transaction
                .prepare_cached(
                    "DELETE FROM history WHERE lease IN
                        (SELECT lease FROM history WHERE event = 'ended' AND at < ?1 ORDER BY at LIMIT ?2)",
                )?
                .execute([before, limits::REMOVED_AT_ONCE as i64])
        })
    }

    /// Reads the trail as it is once the tables have heard of all notes. Where there is no space for that they have not,
    /// and the reading is the same.
    fn read<T>(&mut self, read: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> Result<T, ReadError> {
        let Self { connection, notes, names, .. } = self;
        if notes.count() == 0 {
            return read(connection).map_err(|source| self.not_read(source));
        }
        let as_if = || {
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            hear(&transaction, notes, names)?;
            let found = read(&transaction)?;
            if transaction.commit().is_ok() {
                notes.heard();
            }
            Ok(found)
        };
        as_if().map_err(|source| self.not_read(source))
    }
}

fn page(connection: &Connection, query: &Query) -> rusqlite::Result<Page> {
    let limit = query.limit.unwrap_or(limits::PAGE_RECORDS).min(limits::PAGE_RECORDS);
    let mut sql = format!("SELECT {COLUMNS} FROM history WHERE true");
    let mut values: Vec<Value> = Vec::new();
    let mut only = |part: &str, given: &[Value]| {
        sql.push_str(" AND ");
        sql.push_str(part);
        values.extend_from_slice(given);
    };
    let number = |number: u64| Value::Integer(number.cast_signed());
    if let Some(owner) = &query.owner {
        only("owner = ?", &[Value::Text(owner.clone())]);
    }
    if let Some(since) = query.since {
        only("at >= ?", &[number(millis(since))]);
    }
    if let Some(until) = query.until {
        only("at < ?", &[number(millis(until))]);
    }
    if let Some(after) = query.after {
        only("seq > ?", &[number(after.0)]);
    }
    if let Some(gpu_id) = query.gpu_id {
        let on_it = "json_valid(devices) AND EXISTS (SELECT 1 FROM json_each(devices) WHERE json_extract(value, '$.gpu_id') = ?)";
        only(on_it, &[number(gpu_id.0.into())]);
    }
    sql.push_str(" ORDER BY seq LIMIT ?");
    // One more than asked for, to know whether there are more.
    values.push(number(limit as u64 + 1));

    let mut statement = connection.prepare_cached(&sql)?;
    let mut found = statement.query(params_from_iter(values))?;
    let mut page = Page { records: Vec::new(), next: None };
    let mut last = None;
    while let Some(row) = found.next()? {
        if page.records.len() == limit {
            page.next = last.or(query.after);
            break;
        }
        last = Some(Cursor(row.get::<_, i64>(10)?.cast_unsigned()));
        page.records.push(Record::read(row)?);
    }
    Ok(page)
}
