//! The audit trail: records of leases that were granted and ended, and how they follow from the rows of leases.
//!
//! Each lease has at most one record of its grant and one of its end, so that committing a batch again adds nothing. Where
//! records are kept is a [`TrailLog`]'s matter: in tables, or in memory.

use std::collections::BTreeMap;
use std::iter;
use std::time::SystemTime;

use gpupool_core::{
    Bytes, DeviceFacts, DeviceId, DevicePromise, DeviceRow, EndCause, GpuId, LeaseId, LeaseRow, NodeRow, PoolRow,
    Share, Token,
};
use serde::{Deserialize, Serialize};

use crate::clock::{ClockReading, millis};
use crate::limits::PAGE_RECORDS;

/// What happened to a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrailEvent {
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
    #[serde(rename = "of_gpu")]
    pub share_of_gpu: Share,
    /// How much of its memory was held.
    pub memory: Bytes,
}

/// A record of the audit trail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrailRecord {
    pub lease: LeaseId,
    /// What happened to it.
    pub event: TrailEvent,
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

// How records follow from rows.

/// Place where records are kept.
pub(crate) trait TrailLog {
    type Error;

    /// Returns the record of a lease's grant, if there is one.
    fn grant(&mut self, lease: LeaseId) -> Result<Option<TrailRecord>, Self::Error>;

    /// Returns a device by the names it has now, with nothing held of it.
    fn device_names(&mut self, device: DeviceId) -> Result<HeldDevice, Self::Error>;

    /// Adds a record, unless there is one of the same event of the same lease.
    fn add(&mut self, record: TrailRecord) -> Result<(), Self::Error>;
}

/// Adds the records that a row means.
pub(crate) fn follow<T: TrailLog>(trail: &mut T, row: &PoolRow, clock: ClockReading) -> Result<(), T::Error> {
    match row {
        PoolRow::Lease(lease) => follow_lease(trail, lease, clock),
        PoolRow::Forget(lease) => close(trail, *lease, clock),
        _ => Ok(()),
    }
}

fn follow_lease<T: TrailLog>(trail: &mut T, lease: &LeaseRow, clock: ClockReading) -> Result<(), T::Error> {
    let grant = match lease.granted_at {
        Some(granted_at) => Some(match trail.grant(lease.id)? {
            Some(grant) => grant,
            None => {
                let grant = grant_of(trail, lease, clock.wall_of(granted_at))?;
                trail.add(grant.clone())?;
                grant
            }
        }),
        None => None,
    };
    if lease.state.is_ended() { trail.add(end_of(lease, grant, clock)) } else { Ok(()) }
}

fn grant_of<T: TrailLog>(trail: &mut T, lease: &LeaseRow, at: SystemTime) -> Result<TrailRecord, T::Error> {
    let held = |promise: &DevicePromise| {
        let names = trail.device_names(promise.device)?;
        Ok(HeldDevice { share: promise.share, memory: promise.memory, ..names })
    };
    Ok(TrailRecord {
        lease: lease.id,
        event: TrailEvent::Granted,
        at,
        owner: lease.request.owner.to_string(),
        worker_id: lease.request.worker_id.as_deref().map(Into::into),
        devices: lease.promises.iter().map(held).collect::<Result<_, _>>()?,
        token: lease.token,
        cause: None,
        granted_at: Some(at),
        ended_at: None,
    })
}

/// Returns the record of a lease's end. An ended lease holds nothing any more: the record of its grant tells what it held.
fn end_of(lease: &LeaseRow, grant: Option<TrailRecord>, clock: ClockReading) -> TrailRecord {
    let at = clock.wall_of(lease.ended_at.unwrap_or(clock.pool));
    // The wall clock may have been put back since the grant.
    let at = grant.as_ref().map_or(at, |grant| at.max(grant.at));
    TrailRecord {
        lease: lease.id,
        event: TrailEvent::Ended,
        at,
        owner: lease.request.owner.to_string(),
        worker_id: lease.request.worker_id.as_deref().map(Into::into),
        granted_at: grant.as_ref().map(|grant| grant.at),
        devices: grant.map(|grant| grant.devices).unwrap_or_default(),
        token: lease.token,
        cause: lease.cause.as_ref().map(name_of),
        ended_at: Some(at),
    }
}

/// Ends the trail of a lease that is forgotten before it ended, so that it does not count as held for ever.
fn close<T: TrailLog>(trail: &mut T, lease: LeaseId, clock: ClockReading) -> Result<(), T::Error> {
    let Some(grant) = trail.grant(lease)? else { return Ok(()) };
    let at = clock.wall_of(clock.pool).max(grant.at);
    trail.add(TrailRecord {
        event: TrailEvent::Ended,
        at,
        cause: Some("forgotten".into()),
        ended_at: Some(at),
        ..grant
    })
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

/// Returns a device by the names that outlive the pool's own numbers, with nothing held of it.
pub(crate) fn names_of(id: DeviceId, device: Option<&DeviceRow>, node: Option<&NodeRow>) -> HeldDevice {
    HeldDevice {
        node: node.map(|node| node.facts.name.to_string()).unwrap_or_default(),
        // Without its row only the pool's number is known, which on one node is the same.
        gpu_id: device.map_or(GpuId(id.0), |device| device.gpu_id),
        uuid: device.map_or(String::new(), |device| device.facts.identity.to_string()),
        share: Share(0),
        share_of_gpu: device.map_or(Share::WHOLE, |device| DeviceFacts::share_of_gpu(&device.facts)),
        memory: Bytes::ZERO,
    }
}

// Reading, page by page.

/// Which records. Everything left out means any.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrailQuery {
    pub owner: Option<String>,
    /// Only leases on devices of the node with this name.
    pub node: Option<String>,
    /// Only leases on devices with this number on their node; with `node`, on that one.
    pub gpu_id: Option<GpuId>,
    /// Not before.
    pub since: Option<SystemTime>,
    /// Before.
    pub until: Option<SystemTime>,
    /// At most so many; a page has 1000 at most.
    pub limit: Option<usize>,
    /// Go on where a page ended.
    pub after: Option<TrailCursor>,
}

/// Where a page ended: the place of its last record in the trail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrailCursor(pub u64);

/// Records, in the order they were made: the wall clock may have been set back in between.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrailPage {
    pub records: Vec<TrailRecord>,
    /// Where to go on, if there are more.
    pub next: Option<TrailCursor>,
}

impl TrailQuery {
    /// Returns how many records a page may have.
    pub(crate) fn page_records(&self) -> usize {
        self.limit.unwrap_or(PAGE_RECORDS).min(PAGE_RECORDS)
    }

    /// Returns whether a record at this place of the trail is asked for.
    pub(crate) fn matches(&self, place: u64, record: &TrailRecord) -> bool {
        self.owner.as_ref().is_none_or(|owner| *owner == record.owner)
            && ((self.gpu_id.is_none() && self.node.is_none())
                || record.devices.iter().any(|device| self.matches_device(device)))
            && self.since.is_none_or(|since| millis(record.at) >= millis(since))
            && self.until.is_none_or(|until| millis(record.at) < millis(until))
            && self.after.is_none_or(|after| place > after.0)
    }

    fn matches_device(&self, device: &HeldDevice) -> bool {
        self.gpu_id.is_none_or(|gpu_id| device.gpu_id == gpu_id)
            && self.node.as_ref().is_none_or(|node| *node == device.node)
    }
}

impl TrailPage {
    /// Makes a page of records that match a query, each with its place in the trail. One more than the page may have tells
    /// that there are more.
    pub(crate) fn of<E>(
        query: &TrailQuery,
        found: impl Iterator<Item = Result<(u64, TrailRecord), E>>,
    ) -> Result<Self, E> {
        let mut page = Self { records: Vec::new(), next: None };
        let mut last = query.after;
        for found in found {
            let (place, record) = found?;
            if page.records.len() == query.page_records() {
                page.next = last;
                break;
            }
            last = Some(TrailCursor(place));
            page.records.push(record);
        }
        Ok(page)
    }
}

// Usage: sums over the audit trail.

/// What a line of usage is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UsageDimension {
    Owner,
    /// A device, named `node/gpu_id`.
    Gpu,
}

/// What one owner held, or what was held of one device.
#[derive(Debug, Clone, PartialEq)]
pub struct UsageTotal {
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
    fn add<'a>(&mut self, devices: impl IntoIterator<Item = &'a HeldDevice>, held_ms: u64) {
        self.leases += 1;
        for device in devices {
            let share = u128::from(device.share.0) * u128::from(device.share_of_gpu.0);
            self.share = self.share.saturating_add(share.saturating_mul(held_ms.into()));
            let memory = u128::from(device.memory.0).saturating_mul(held_ms.into());
            self.memory = self.memory.saturating_add(memory);
        }
    }

    fn line(self, name: String) -> UsageTotal {
        let memory_mib_seconds = self.memory as f64 / (1024.0 * 1024.0 * 1000.0);
        UsageTotal { name, leases: self.leases, gpu_seconds: self.share as f64 / 1e9, memory_mib_seconds }
    }
}

/// Time that a lease held its devices, in milliseconds since 1970.
pub(crate) struct HeldTime {
    pub owner: String,
    pub devices: Vec<HeldDevice>,
    pub granted_at: u64,
    /// `None` while it is held.
    pub ended_at: Option<u64>,
}

impl HeldTime {
    /// Returns the time that these records tell of. They include the grant of each lease whose end is among them, or its
    /// end tells when it was granted.
    pub(crate) fn of(records: &[TrailRecord]) -> impl Iterator<Item = Self> {
        records.iter().filter_map(|record| {
            if record.event == TrailEvent::Granted && has_end(records, record.lease) {
                return None;
            }
            Some(Self {
                owner: record.owner.clone(),
                devices: record.devices.clone(),
                granted_at: millis(record.granted_at?),
                ended_at: record.ended_at.map(millis),
            })
        })
    }
}

/// Returns whether these records tell of a lease's end.
pub(crate) fn has_end(records: &[TrailRecord], lease: LeaseId) -> bool {
    records.iter().any(|record| record.lease == lease && record.event == TrailEvent::Ended)
}

/// Sums what was held in a window, most first. Times are milliseconds since 1970.
pub(crate) fn usage_lines<E>(
    by: UsageDimension,
    since: u64,
    now: u64,
    held: impl Iterator<Item = Result<HeldTime, E>>,
) -> Result<Vec<UsageTotal>, E> {
    let mut sums: BTreeMap<String, Sum> = BTreeMap::new();
    for held in held {
        let held = held?;
        if held.granted_at >= now || held.ended_at.is_some_and(|ended_at| ended_at <= since) {
            continue;
        }
        let held_ms = held.ended_at.unwrap_or(now).min(now).saturating_sub(held.granted_at.max(since));
        match by {
            UsageDimension::Owner => sums.entry(held.owner).or_default().add(&held.devices, held_ms),
            UsageDimension::Gpu => {
                for device in &held.devices {
                    let name = format!("{}/{}", device.node, device.gpu_id);
                    sums.entry(name).or_default().add(iter::once(device), held_ms);
                }
            }
        }
    }
    let mut lines: Vec<UsageTotal> = sums.into_iter().map(|(name, sum)| sum.line(name)).collect();
    lines.sort_by(|a, b| b.gpu_seconds.total_cmp(&a.gpu_seconds));
    Ok(lines)
}
