//! The audit trail in the table `history`: the writer's records, and a reader with its own connection.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use gpupool_core::{DeviceId, LeaseId, PoolRow, Token};
use rusqlite::config::DbConfig;
use rusqlite::types::Value;
use rusqlite::{Connection, OpenFlags, OptionalExtension, ToSql, params, params_from_iter};

use crate::clock::{millis, wall};
use crate::error::{BoxedError, ReadError};
use crate::lease_store::{TrailReader, device_key, node_key};
use crate::limits::LOCK_WAIT;
use crate::trail::{
    HeldDevice, HoldingPeriod, TrailEvent, TrailLog, TrailPage, TrailQuery, TrailRecord, UsageDimension, UsageTotal,
    add_records, has_end, name_device, sum_usage,
};

use super::buffer::WriteAheadBuffer;
use super::{encode_error, execute};

/// Reads a record from the columns `lease, event, at, owner, worker_id, devices, token, cause, granted_at, ended_at`.
fn read_record(row: &rusqlite::Row<'_>) -> rusqlite::Result<TrailRecord> {
    let time = |column| row.get::<_, Option<i64>>(column).map(|at| at.map(|at| wall(at.max(0).cast_unsigned())));
    Ok(TrailRecord {
        lease: LeaseId(row.get::<_, i64>(0)?.cast_unsigned()),
        event: if row.get_ref(1)?.as_str()? == "granted" { TrailEvent::Granted } else { TrailEvent::Ended },
        at: time(2)?.unwrap_or(SystemTime::UNIX_EPOCH),
        owner: row.get(3)?,
        worker_id: row.get(4)?,
        devices: read_devices(row, 5)?,
        token: row.get::<_, Option<i64>>(6)?.map(|token| Token(token.cast_unsigned())),
        cause: row.get(7)?,
        granted_at: time(8)?,
        ended_at: time(9)?,
    })
}

/// Reads the devices of a record. Unreadable devices count as none, so that they hide no other record.
fn read_devices(row: &rusqlite::Row<'_>, column: usize) -> rusqlite::Result<Vec<HeldDevice>> {
    Ok(serde_json::from_str(row.get_ref(column)?.as_str()?).unwrap_or_default())
}

fn event_name(event: TrailEvent) -> &'static str {
    match event {
        TrailEvent::Granted => "granted",
        TrailEvent::Ended => "ended",
    }
}

/// Cache of device names, so that a grant need not read the rows of its devices.
pub(super) type DeviceNames = HashMap<DeviceId, HeldDevice>;

/// Trail in the tables.
pub(super) struct TableTrail<'a> {
    pub connection: &'a Connection,
    pub names: &'a mut DeviceNames,
}

impl TableTrail<'_> {
    fn has_record(&self, lease: LeaseId, event: TrailEvent) -> rusqlite::Result<bool> {
        let sql = "SELECT 1 FROM history WHERE lease = ?1 AND event = ?2";
        self.connection.prepare_cached(sql)?.exists(params![lease.0.cast_signed(), event_name(event)])
    }

    /// Reads the row of a device or node; `None` if there is none or it is unreadable.
    fn row(&self, (kind, key): (&str, String)) -> rusqlite::Result<Option<PoolRow>> {
        let sql = "SELECT value FROM rows WHERE kind = ?1 AND key = ?2";
        let text: Option<String> =
            self.connection.prepare_cached(sql)?.query_row([kind, &key], |row| row.get(0)).optional()?;
        Ok(text.and_then(|text| serde_json::from_str(&text).ok()))
    }
}

impl TrailLog for TableTrail<'_> {
    type Error = rusqlite::Error;

    fn grant(&mut self, lease: LeaseId) -> rusqlite::Result<Option<TrailRecord>> {
        let sql = "SELECT lease, event, at, owner, worker_id, devices, token, cause, granted_at, ended_at FROM history
            WHERE lease = ?1 AND event = 'granted'";
        self.connection.prepare_cached(sql)?.query_row([lease.0.cast_signed()], read_record).optional()
    }

    fn device_names(&mut self, id: DeviceId) -> rusqlite::Result<HeldDevice> {
        if let Some(names) = self.names.get(&id) {
            return Ok(names.clone());
        }
        let device = match self.row(device_key(id))? {
            Some(PoolRow::Device(device)) => Some(device),
            _ => None,
        };
        let node = match &device {
            Some(device) => self.row(node_key(device.node))?,
            None => None,
        };
        let node = if let Some(PoolRow::Node(node)) = &node { Some(node) } else { None };
        let names = name_device(id, device.as_ref(), node);
        self.names.insert(id, names.clone());
        Ok(names)
    }

    fn add(&mut self, record: TrailRecord) -> rusqlite::Result<()> {
        let sql = "INSERT OR IGNORE INTO history
                (lease, event, at, owner, worker_id, devices, token, cause, granted_at, ended_at)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)";
        let time = |at| millis(at).cast_signed();
        let values = params![
            record.lease.0.cast_signed(),
            event_name(record.event),
            time(record.at),
            record.owner,
            record.worker_id,
            serde_json::to_string(&record.devices).map_err(encode_error)?,
            record.token.map(|token| token.0.cast_signed()),
            record.cause,
            record.granted_at.map(time),
            record.ended_at.map(time),
        ];
        execute(self.connection, sql, values).map(drop)
    }
}

/// Records of unflushed batches, which follow those in the tables.
struct UnflushedTrail<'a> {
    tables: TableTrail<'a>,
    records: Vec<TrailRecord>,
}

impl<'a> UnflushedTrail<'a> {
    /// Derives the records from the batches of the buffer.
    fn read(buffer: &WriteAheadBuffer, tables: TableTrail<'a>) -> rusqlite::Result<Vec<TrailRecord>> {
        let mut trail = Self { tables, records: Vec::new() };
        buffer.rows().try_for_each(|(row, clock)| add_records(&mut trail, row, clock))?;
        Ok(trail.records)
    }

    fn find(&self, lease: LeaseId, event: TrailEvent) -> Option<&TrailRecord> {
        self.records.iter().find(|record| record.lease == lease && record.event == event)
    }
}

impl TrailLog for UnflushedTrail<'_> {
    type Error = rusqlite::Error;

    fn grant(&mut self, lease: LeaseId) -> rusqlite::Result<Option<TrailRecord>> {
        match self.find(lease, TrailEvent::Granted) {
            Some(grant) => Ok(Some(grant.clone())),
            None => self.tables.grant(lease),
        }
    }

    fn device_names(&mut self, device: DeviceId) -> rusqlite::Result<HeldDevice> {
        self.tables.device_names(device)
    }

    fn add(&mut self, record: TrailRecord) -> rusqlite::Result<()> {
        if self.find(record.lease, record.event).is_none() && !self.tables.has_record(record.lease, record.event)? {
            self.records.push(record);
        }
        Ok(())
    }
}

/// Removes the records of that many leases that ended before a time.
pub(super) fn prune_trail(connection: &Connection, before: SystemTime, leases: usize) -> rusqlite::Result<usize> {
    let sql = "DELETE FROM history WHERE lease IN
            (SELECT lease FROM history WHERE event = 'ended' AND at < ?1 ORDER BY at LIMIT ?2)";
    execute(connection, sql, params![millis(before).cast_signed(), leases as i64])
}

/// Reader of the trail in a database file.
///
/// Each reading has its own read-only connection and sees the database at one instant, including the write-ahead
/// buffer. It shares nothing with the writer but the file. No connection stays open in between: the last connection to
/// close cleans up the log, and that must be the writer's.
#[derive(Debug)]
pub(super) struct SqliteTrailReader {
    pub file: PathBuf,
}

impl SqliteTrailReader {
    /// Reads the trail at one instant; `read` also receives the unflushed records.
    fn read<T>(&self, read: impl FnOnce(&Connection, Vec<TrailRecord>) -> rusqlite::Result<T>) -> Result<T, ReadError> {
        self.try_read(read).map_err(|source| ReadError { file: self.file.clone(), source })
    }

    fn try_read<T>(
        &self,
        read: impl FnOnce(&Connection, Vec<TrailRecord>) -> rusqlite::Result<T>,
    ) -> Result<T, BoxedError> {
        let mut connection = open_read_only(&self.file)?;
        let snapshot = connection.transaction()?;
        let buffer = WriteAheadBuffer::read(&snapshot)??;
        let tables = TableTrail { connection: &snapshot, names: &mut DeviceNames::new() };
        let unflushed = UnflushedTrail::read(&buffer, tables)?;
        Ok(read(&snapshot, unflushed)?)
    }
}

fn open_read_only(file: &Path) -> rusqlite::Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(file, flags)?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
    connection.busy_timeout(LOCK_WAIT)?;
    Ok(connection)
}

impl TrailReader for SqliteTrailReader {
    fn history(&self, query: &TrailQuery) -> Result<TrailPage, ReadError> {
        self.read(|connection, unflushed| read_page(connection, unflushed, query))
    }

    fn usage(&self, by: UsageDimension, since: SystemTime, now: SystemTime) -> Result<Vec<UsageTotal>, ReadError> {
        self.read(|connection, unflushed| read_usage(connection, &unflushed, by, millis(since), millis(now)))
    }
}

fn read_page(connection: &Connection, unflushed: Vec<TrailRecord>, query: &TrailQuery) -> rusqlite::Result<TrailPage> {
    let mut sql = String::from(
        "SELECT lease, event, at, owner, worker_id, devices, token, cause, granted_at, ended_at, seq FROM history WHERE true",
    );
    let mut values: Vec<Value> = Vec::new();
    let mut add_condition = |condition: &str, arguments: &[Value]| {
        sql.push_str(" AND ");
        sql.push_str(condition);
        values.extend_from_slice(arguments);
    };
    let number = |number: u64| Value::Integer(number.cast_signed());
    if let Some(owner) = &query.owner {
        add_condition("owner = ?", &[Value::Text(owner.clone())]);
    }
    if let Some(since) = query.since {
        add_condition("at >= ?", &[number(millis(since))]);
    }
    if let Some(until) = query.until {
        add_condition("at < ?", &[number(millis(until))]);
    }
    if let Some(after) = query.after {
        add_condition("seq > ?", &[number(after.0)]);
    }
    if query.gpu_id.is_some() || query.node.is_some() {
        let on_device = "json_valid(devices) AND EXISTS (SELECT 1 FROM json_each(devices)
            WHERE json_extract(value, '$.gpu_id') IS coalesce(?, json_extract(value, '$.gpu_id'))
            AND json_extract(value, '$.node') IS coalesce(?, json_extract(value, '$.node')))";
        let gpu_id = query.gpu_id.map_or(Value::Null, |gpu_id| number(gpu_id.0.into()));
        add_condition(on_device, &[gpu_id, query.node.clone().map_or(Value::Null, Value::Text)]);
    }
    sql.push_str(" ORDER BY seq LIMIT ?");
    // One record beyond the limit indicates that there are more.
    values.push(number(query.page_records() as u64 + 1));

    let last: i64 = connection.query_row("SELECT coalesce(max(seq), 0) FROM history", [], |row| row.get(0))?;
    let unflushed = (last.cast_unsigned() + 1..).zip(unflushed).filter(|(seq, record)| query.matches(*seq, record));
    let mut statement = connection.prepare(&sql)?;
    let flushed = statement
        .query_map(params_from_iter(values), |row| Ok((row.get::<_, i64>(10)?.cast_unsigned(), read_record(row)?)))?;
    TrailPage::collect(query, flushed.chain(unflushed.map(Ok)))
}

/// Sums the usage in a window. Times are milliseconds since 1970.
fn read_usage(
    connection: &Connection,
    unflushed: &[TrailRecord],
    by: UsageDimension,
    since: u64,
    now: u64,
) -> rusqlite::Result<Vec<UsageTotal>> {
    let mut statement = connection.prepare(
        "SELECT lease, owner, devices, granted_at, ended_at FROM history
            WHERE event = 'ended' AND granted_at IS NOT NULL AND at > ?1 AND granted_at < ?2
         UNION ALL
         SELECT lease, owner, devices, granted_at, NULL FROM history AS granted
            WHERE event = 'granted' AND granted_at < ?2
            AND NOT EXISTS (SELECT 1 FROM history WHERE lease = granted.lease AND event = 'ended')",
    )?;
    let window: [&dyn ToSql; 2] = [&since.cast_signed(), &now.cast_signed()];
    let flushed = statement.query_map(window, |row| {
        let held = HoldingPeriod {
            owner: row.get(1)?,
            devices: read_devices(row, 2)?,
            granted_at: row.get::<_, i64>(3)?.max(0).cast_unsigned(),
            ended_at: row.get::<_, Option<i64>>(4)?.map(|at| at.max(0).cast_unsigned()),
        };
        Ok((LeaseId(row.get::<_, i64>(0)?.cast_unsigned()), held))
    })?;
    let flushed = flushed.filter_map(|found| match found {
        Ok((lease, _)) if has_end(unflushed, lease) => None,
        found => Some(found.map(|(_, held)| held)),
    });
    sum_usage(by, since, now, flushed.chain(HoldingPeriod::from_records(unflushed).map(Ok)))
}
