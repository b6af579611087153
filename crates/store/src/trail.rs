//! The audit trail: what a change of a lease row adds to it.
//!
//! Each lease has at most one record of its grant and one of its end, so that keeping a batch again adds nothing.

use std::collections::{BTreeMap, HashMap};
use std::time::SystemTime;

use gpupool_core::device::DeviceFacts;
use gpupool_core::lease::{EndCause, Promise};
use gpupool_core::row::{DeviceRow, LeaseRow, NodeRow};
use gpupool_core::{Bytes, DeviceId, GpuId, LeaseId, NodeId, Row, Share, Token};
use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior, params, params_from_iter};
use serde::{Deserialize, Serialize};

use crate::clock::{Clock, millis, wall};
use crate::commit::{execute, hear, unwritable};
use crate::error::{CommitError, ReadError};
use crate::limits;
use crate::open::Store;

/// What happened to a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// It was granted.
    Granted,
    /// It ended, granted before or not.
    Ended,
}

/// What a lease held on one device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldDevice {
    /// The name of its node.
    pub node: String,
    /// Its number there.
    pub gpu_id: GpuId,
    /// Its UUID, or its place on the bus where it has none.
    pub uuid: String,
    /// How much of the device was held.
    pub share: Share,
    /// How much of a whole GPU the device is.
    pub of_gpu: Share,
    /// How much of its memory was held.
    pub memory: Bytes,
}

/// A record of the audit trail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    pub lease: LeaseId,
    /// What happened to it.
    pub event: Event,
    pub at: SystemTime,
    pub owner: String,
    /// The owner's own name for whoever uses it.
    pub worker_id: Option<String>,
    /// What it holds, or held.
    pub devices: Vec<HeldDevice>,
    /// Its fencing token, where it was granted.
    pub token: Option<Token>,
    /// Why it ended: the name of the cause, and what fault it was after a colon.
    pub cause: Option<String>,
    pub granted_at: Option<SystemTime>,
    pub ended_at: Option<SystemTime>,
}

/// The columns a [`Record`] is read from.
const COLUMNS: &str = "lease, event, at, owner, worker_id, devices, token, cause, granted_at, ended_at, seq";

impl Record {
    pub(crate) fn read(row: &rusqlite::Row<'_>) -> rusqlite::Result<Self> {
        let event: String = row.get(1)?;
        let time = |column| row.get::<_, Option<i64>>(column).map(|at| at.map(|at| wall(at.max(0).cast_unsigned())));
        Ok(Self {
            lease: LeaseId(row.get::<_, i64>(0)?.cast_unsigned()),
            event: if event == "granted" { Event::Granted } else { Event::Ended },
            at: wall(row.get::<_, i64>(2)?.max(0).cast_unsigned()),
            owner: row.get(3)?,
            worker_id: row.get(4)?,
            devices: devices_in(&row.get::<_, String>(5)?),
            token: row.get::<_, Option<i64>>(6)?.map(|token| Token(token.cast_unsigned())),
            cause: row.get(7)?,
            granted_at: time(8)?,
            ended_at: time(9)?,
        })
    }
}

/// The devices of a record; one that cannot be read counts as holding nothing, and hides no other record.
fn devices_in(json: &str) -> Vec<HeldDevice> {
    serde_json::from_str(json).unwrap_or_default()
}

/// Adds what a new row of a lease tells.
pub(crate) fn follow(
    transaction: &Transaction<'_>,
    lease: &LeaseRow,
    clock: Clock,
    names: &mut Names,
) -> rusqlite::Result<()> {
    let Some(granted_at) = lease.granted_at else {
        return if lease.state.is_ended() { end(transaction, lease, None, clock) } else { Ok(()) };
    };
    let known = granted(transaction, lease.id)?;
    let grant = match known {
        Some(grant) => grant,
        None => {
            let grant =
                Grant { at: clock.millis(granted_at), devices: devices_of(transaction, &lease.promises, names)? };
            add(transaction, lease, "granted", grant.at, Some(&grant), None)?;
            grant
        }
    };
    if lease.state.is_ended() { end(transaction, lease, Some(grant), clock) } else { Ok(()) }
}

/// Ends the trail of a lease that is forgotten before it ended, so that it does not count as held for ever.
pub(crate) fn close(transaction: &Transaction<'_>, lease: LeaseId, clock: Clock) -> rusqlite::Result<()> {
    let sql = "INSERT OR IGNORE INTO history
            (lease, event, at, owner, worker_id, devices, token, cause, granted_at, ended_at)
         SELECT lease, 'ended', max(?2, at), owner, worker_id, devices, token, 'forgotten', granted_at, max(?2, at)
         FROM history WHERE lease = ?1 AND event = 'granted'";
    execute(transaction, sql, [lease.0.cast_signed(), clock.millis(clock.pool).cast_signed()]).map(drop)
}

/// What the trail says of a lease's grant. An ended lease holds nothing any more: what it held is told here.
struct Grant {
    at: u64,
    devices: String,
}

fn granted(transaction: &Transaction<'_>, lease: LeaseId) -> rusqlite::Result<Option<Grant>> {
    transaction
        .prepare_cached("SELECT at, devices FROM history WHERE lease = ?1 AND event = 'granted'")?
        .query_row([lease.0.cast_signed()], |row| {
            Ok(Grant { at: row.get::<_, i64>(0)?.cast_unsigned(), devices: row.get(1)? })
        })
        .optional()
}

fn end(transaction: &Transaction<'_>, lease: &LeaseRow, grant: Option<Grant>, clock: Clock) -> rusqlite::Result<()> {
    let at = clock.millis(lease.ended_at.unwrap_or(clock.pool));
    // The wall clock may have been put back since the grant.
    let at = grant.as_ref().map_or(at, |grant| at.max(grant.at));
    add(transaction, lease, "ended", at, grant.as_ref(), Some(at))
}

fn add(
    transaction: &Transaction<'_>,
    lease: &LeaseRow,
    event: &str,
    at: u64,
    grant: Option<&Grant>,
    ended_at: Option<u64>,
) -> rusqlite::Result<()> {
    let sql = "INSERT OR IGNORE INTO history
            (lease, event, at, owner, worker_id, devices, token, cause, granted_at, ended_at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)";
    let values = params![
        lease.id.0.cast_signed(),
        event,
        at.cast_signed(),
        &*lease.request.owner,
        lease.request.worker_id.as_deref(),
        grant.map_or("[]", |grant| &grant.devices),
        lease.token.map(|token| token.0.cast_signed()),
        ended_at.and(lease.cause.as_ref()).map(name_of),
        grant.map(|grant| grant.at.cast_signed()),
        ended_at.map(u64::cast_signed),
    ];
    execute(transaction, sql, values).map(drop)
}

fn name_of(cause: &EndCause) -> String {
    match serde_json::to_value(cause) {
        Ok(serde_json::Value::String(name)) => name,
        _ => match cause {
            EndCause::Fault(why) => format!("fault: {why}"),
            other => format!("{other:?}"),
        },
    }
}

/// What promises are about, by the names that outlive the pool's own numbers.
fn devices_of(transaction: &Transaction<'_>, promises: &[Promise], names: &mut Names) -> rusqlite::Result<String> {
    let held: Vec<HeldDevice> =
        promises.iter().map(|promise| held(transaction, promise, names)).collect::<rusqlite::Result<_>>()?;
    serde_json::to_string(&held).map_err(unwritable)
}

/// What devices are called, so that their rows need not be read for each grant.
pub(crate) type Names = HashMap<DeviceId, HeldDevice>;

fn held(transaction: &Transaction<'_>, promise: &Promise, names: &mut Names) -> rusqlite::Result<HeldDevice> {
    let named = match names.get(&promise.device) {
        Some(named) => named.clone(),
        None => {
            let named = name(transaction, promise.device)?;
            names.insert(promise.device, named.clone());
            named
        }
    };
    Ok(HeldDevice { share: promise.share, memory: promise.memory, ..named })
}

/// A device of which nothing is held.
fn name(transaction: &Transaction<'_>, id: DeviceId) -> rusqlite::Result<HeldDevice> {
    let device = device(transaction, id)?;
    let node = match &device {
        Some(device) => node_name(transaction, device.node)?,
        None => None,
    };
    Ok(HeldDevice {
        node: node.unwrap_or_default(),
        // Without its row only the pool's number is known, which on one node is the same.
        gpu_id: device.as_ref().map_or(GpuId(id.0), |device| device.gpu_id),
        uuid: device.as_ref().map_or(String::new(), |device| device.facts.identity.to_string()),
        share: Share(0),
        of_gpu: device.as_ref().map_or(Share::WHOLE, |device| DeviceFacts::of_gpu(&device.facts)),
        memory: Bytes::ZERO,
    })
}

fn device(transaction: &Transaction<'_>, device: DeviceId) -> rusqlite::Result<Option<DeviceRow>> {
    Ok(match row(transaction, "device", &device.to_string())? {
        Some(Row::Device(row)) => Some(row),
        _ => None,
    })
}

fn node_name(transaction: &Transaction<'_>, node: NodeId) -> rusqlite::Result<Option<String>> {
    Ok(match row(transaction, "node", &node.to_string())? {
        Some(Row::Node(NodeRow { facts, .. })) => Some(facts.name.to_string()),
        _ => None,
    })
}

fn row(transaction: &Transaction<'_>, kind: &str, key: &str) -> rusqlite::Result<Option<Row>> {
    let text: Option<String> = transaction
        .prepare_cached("SELECT value FROM rows WHERE kind = ?1 AND key = ?2")?
        .query_row([kind, key], |row| row.get(0))
        .optional()?;
    Ok(text.and_then(|text| serde_json::from_str(&text).ok()))
}

// Reading the audit trail, page by page, and removing what is old.

/// Which records. Everything left out means any.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Query {
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
        self.read(|connection| usage_lines(connection, by, millis(since), millis(now)))
    }

    /// Removes the records of leases that ended before `older_than`, up to a thousand leases; says how many records were
    /// removed. Call it again until it says 0, with other commits in between. What is still held is never removed.
    pub fn retain(&mut self, older_than: SystemTime) -> Result<usize, CommitError> {
        self.hear()?;
        let before = millis(older_than).cast_signed();
        let sql = "DELETE FROM history WHERE lease IN
                (SELECT lease FROM history WHERE event = 'ended' AND at < ?1 ORDER BY at LIMIT ?2)";
        self.transact(|transaction| execute(transaction, sql, [before, limits::REMOVED_AT_ONCE as i64]))
    }

    /// Reads the trail as it is once the tables have heard of all notes. Where there is no space for that they have not,
    /// and the reading is the same.
    fn read<T>(&mut self, read: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> Result<T, ReadError> {
        let Self { connection, notes, names, .. } = self;
        if notes.unheard.is_empty() {
            return read(connection).map_err(|source| self.not_read(source));
        }
        let as_if = || {
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            hear(&transaction, notes, names)?;
            let found = read(&transaction)?;
            if transaction.commit().is_ok() {
                notes.unheard.clear();
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

// Who held how much for how long, worked out from the audit trail.

/// What a line of usage is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    Owner,
    /// A device, named `node/gpu_id`.
    Gpu,
}

/// What one owner held, or what was held of one device.
#[derive(Debug, Clone, PartialEq)]
pub struct UsageLine {
    /// The owner, or the device as `node/gpu_id`.
    pub name: String,
    /// In how many leases.
    pub leases: u64,
    /// Whole GPUs × seconds.
    pub gpu_seconds: f64,
    /// Memory in MiB × seconds.
    pub memory_mib_seconds: f64,
}

/// Sums in whole numbers, so that many small leases add up exactly.
#[derive(Default)]
struct Sum {
    leases: u64,
    /// Millionths of a GPU × milliseconds.
    share: u128,
    /// Bytes × milliseconds.
    memory: u128,
}

impl Sum {
    fn add<'a>(&mut self, devices: impl Iterator<Item = &'a HeldDevice>, held_ms: u64) {
        self.leases += 1;
        for device in devices {
            let share = u128::from(device.share.0) * u128::from(device.of_gpu.0);
            self.share = self.share.saturating_add(share.saturating_mul(held_ms.into()));
            let memory = u128::from(device.memory.0).saturating_mul(held_ms.into());
            self.memory = self.memory.saturating_add(memory);
        }
    }

    fn line(self, name: String) -> UsageLine {
        let memory_mib_seconds = self.memory as f64 / (1024.0 * 1024.0 * 1000.0);
        UsageLine { name, leases: self.leases, gpu_seconds: self.share as f64 / 1e9, memory_mib_seconds }
    }
}

/// What was held in the window, most first. Times are milliseconds since 1970.
fn usage_lines(connection: &Connection, by: By, since: u64, now: u64) -> rusqlite::Result<Vec<UsageLine>> {
    let mut statement = connection.prepare_cached(
        "SELECT owner, devices, granted_at, ended_at FROM history
            WHERE event = 'ended' AND granted_at IS NOT NULL AND at > ?1 AND granted_at < ?2
         UNION ALL
         SELECT owner, devices, granted_at, NULL FROM history AS granted
            WHERE event = 'granted' AND granted_at < ?2
            AND NOT EXISTS (SELECT 1 FROM history WHERE lease = granted.lease AND event = 'ended')",
    )?;
    let mut sums: BTreeMap<String, Sum> = BTreeMap::new();
    let mut found = statement.query([since.cast_signed(), now.cast_signed()])?;
    while let Some(row) = found.next()? {
        let devices = devices_in(&row.get::<_, String>(1)?);
        let granted_at = row.get::<_, i64>(2)?.max(0).cast_unsigned();
        let ended_at = row.get::<_, Option<i64>>(3)?.map_or(now, |at| at.max(0).cast_unsigned());
        let held_ms = ended_at.min(now).saturating_sub(granted_at.max(since));
        match by {
            By::Owner => sums.entry(row.get(0)?).or_default().add(devices.iter(), held_ms),
            By::Gpu => {
                for device in &devices {
                    let name = format!("{}/{}", device.node, device.gpu_id);
                    sums.entry(name).or_default().add(std::iter::once(device), held_ms);
                }
            }
        }
    }
    let mut lines: Vec<UsageLine> = sums.into_iter().map(|(name, sum)| sum.line(name)).collect();
    lines.sort_by(|a, b| b.gpu_seconds.total_cmp(&a.gpu_seconds));
    Ok(lines)
}
