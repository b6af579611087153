//! The audit trail: what a change of a lease row adds to it.
//!
//! Each lease has at most one record of its grant and one of its end, so that keeping a batch again adds nothing.

use std::collections::HashMap;
use std::time::SystemTime;

use gpupool_core::device::DeviceFacts;
use gpupool_core::lease::{EndCause, Promise};
use gpupool_core::row::{DeviceRow, LeaseRow, NodeRow};
use gpupool_core::{Bytes, DeviceId, GpuId, LeaseId, NodeId, Row, Share, Token};
use rusqlite::{OptionalExtension, Transaction, params};
use serde::{Deserialize, Serialize};

use crate::clock::{Clock, wall};
use crate::commit::unwritable;

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
    /// Which lease.
    pub lease: LeaseId,
    /// What happened to it.
    pub event: Event,
    /// When.
    pub at: SystemTime,
    /// Whose it is.
    pub owner: String,
    /// The owner's own name for whoever uses it.
    pub worker_id: Option<String>,
    /// What it holds, or held.
    pub devices: Vec<HeldDevice>,
    /// Its fencing token, where it was granted.
    pub token: Option<Token>,
    /// Why it ended: the name of the cause, and what fault it was after a colon.
    pub cause: Option<String>,
    /// When it was granted.
    pub granted_at: Option<SystemTime>,
    /// When it ended.
    pub ended_at: Option<SystemTime>,
}

/// The columns a [`Record`] is read from.
pub(crate) const COLUMNS: &str = "lease, event, at, owner, worker_id, devices, token, cause, granted_at, ended_at, seq";

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
pub(crate) fn devices_in(json: &str) -> Vec<HeldDevice> {
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
    transaction
        .prepare_cached(
            "INSERT OR IGNORE INTO history
                (lease, event, at, owner, worker_id, devices, token, cause, granted_at, ended_at)
             SELECT lease, 'ended', max(?2, at), owner, worker_id, devices, token, 'forgotten', granted_at, max(?2, at)
             FROM history WHERE lease = ?1 AND event = 'granted'",
        )?
        .execute(params![lease.0.cast_signed(), clock.millis(clock.pool).cast_signed()])
        .map(drop)
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
    transaction
        .prepare_cached(
            "INSERT OR IGNORE INTO history
                (lease, event, at, owner, worker_id, devices, token, cause, granted_at, ended_at)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
        )?
        .execute(params![
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
        ])
        .map(drop)
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
