//! The audit trail: records of granted and ended leases, derived from lease rows.
//!
//! Each lease has at most one record of its grant and one of its end, so committing a batch again adds nothing. A
//! [`TrailLog`] stores the records, in tables or in memory.

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

/// Event in the life of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrailEvent {
    /// The lease was granted.
    Granted,
    /// The lease ended, with or without a grant.
    Ended,
}

/// Amount that a lease holds of one device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldDevice {
    /// Name of the node.
    pub node: String,
    /// Number of the device on its node.
    pub gpu_id: GpuId,
    /// UUID of the device, or its PCI address if it has none.
    pub uuid: String,
    /// Share of the device.
    pub share: Share,
    /// Share of a whole GPU that the device is.
    #[serde(rename = "of_gpu")]
    pub share_of_gpu: Share,
    /// Memory of the device.
    pub memory: Bytes,
}

/// Record of the audit trail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrailRecord {
    pub lease: LeaseId,
    /// Event that the record describes.
    pub event: TrailEvent,
    pub at: SystemTime,
    pub owner: String,
    /// Identifier of the owner's worker, chosen by the owner.
    pub worker_id: Option<String>,
    /// Devices of the lease; also those it held before its end.
    pub devices: Vec<HeldDevice>,
    /// Fencing token, if the lease was granted.
    pub token: Option<Token>,
    /// Reason of the end: the name of the cause; a fault, or the author of a revocation, follows after a colon.
    pub cause: Option<String>,
    pub granted_at: Option<SystemTime>,
    pub ended_at: Option<SystemTime>,
}

// Derivation of records from rows.

/// Storage of trail records.
pub(crate) trait TrailLog {
    type Error;

    /// Returns the record of a lease's grant, if there is one.
    fn grant(&mut self, lease: LeaseId) -> Result<Option<TrailRecord>, Self::Error>;

    /// Returns a device with its current names and no amounts.
    fn device_names(&mut self, device: DeviceId) -> Result<HeldDevice, Self::Error>;

    /// Adds a record, unless the same event of the same lease has one.
    fn add(&mut self, record: TrailRecord) -> Result<(), Self::Error>;
}

/// Adds the records that follow from a row.
pub(crate) fn add_records<T: TrailLog>(trail: &mut T, row: &PoolRow, clock: ClockReading) -> Result<(), T::Error> {
    match row {
        PoolRow::Lease(lease) => add_lease_records(trail, lease, clock),
        PoolRow::Forget(lease) => end_forgotten_lease(trail, *lease, clock),
        _ => Ok(()),
    }
}

fn add_lease_records<T: TrailLog>(trail: &mut T, lease: &LeaseRow, clock: ClockReading) -> Result<(), T::Error> {
    let grant = match lease.granted_at {
        Some(granted_at) => Some(match trail.grant(lease.id)? {
            Some(grant) => grant,
            None => {
                let grant = grant_record(trail, lease, clock.wall_of(granted_at))?;
                trail.add(grant.clone())?;
                grant
            }
        }),
        None => None,
    };
    if lease.state.is_ended() { trail.add(end_record(lease, grant, clock)) } else { Ok(()) }
}

fn grant_record<T: TrailLog>(trail: &mut T, lease: &LeaseRow, at: SystemTime) -> Result<TrailRecord, T::Error> {
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

/// Returns the record of a lease's end. An ended lease holds nothing; its devices come from the record of the grant.
fn end_record(lease: &LeaseRow, grant: Option<TrailRecord>, clock: ClockReading) -> TrailRecord {
    let at = clock.wall_of(lease.ended_at.unwrap_or(clock.pool));
    // The wall clock may have been set back since the grant.
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
        cause: lease.cause.as_ref().map(|cause| match (cause, &lease.revocation) {
            (EndCause::Revoked, Some(revocation)) => format!("{}: {revocation}", cause_name(cause)),
            _ => cause_name(cause),
        }),
        ended_at: Some(at),
    }
}

/// Adds the end of a lease that is forgotten before it ended; otherwise it would count as held forever.
fn end_forgotten_lease<T: TrailLog>(trail: &mut T, lease: LeaseId, clock: ClockReading) -> Result<(), T::Error> {
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

fn cause_name(cause: &EndCause) -> String {
    match serde_json::to_value(cause) {
        Ok(serde_json::Value::String(name)) => name,
        _ => match cause {
            EndCause::Fault(why) => format!("fault: {why}"),
            other => format!("{other:?}"),
        },
    }
}

/// Returns a device with names that outlive the pool's own numbers, and no amounts.
pub(crate) fn name_device(id: DeviceId, device: Option<&DeviceRow>, node: Option<&NodeRow>) -> HeldDevice {
    HeldDevice {
        node: node.map(|node| node.facts.name.to_string()).unwrap_or_default(),
        // Without its row only the pool's number is known, which is the same on a pool of one node.
        gpu_id: device.map_or(GpuId(id.0), |device| device.gpu_id),
        uuid: device.map_or(String::new(), |device| device.facts.identity.to_string()),
        share: Share(0),
        share_of_gpu: device.map_or(Share::WHOLE, |device| DeviceFacts::share_of_gpu(&device.facts)),
        memory: Bytes::ZERO,
    }
}

// Pages of the trail.

/// Filter of records. An absent field matches every record.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrailQuery {
    pub owner: Option<String>,
    /// Only leases on devices of the node with this name.
    pub node: Option<String>,
    /// Only leases on devices with this number on their node; with `node`, on that one.
    pub gpu_id: Option<GpuId>,
    /// Earliest time, inclusive.
    pub since: Option<SystemTime>,
    /// Latest time, exclusive.
    pub until: Option<SystemTime>,
    /// Maximum number of records; a page has at most 1000.
    pub limit: Option<usize>,
    /// End of the previous page.
    pub after: Option<TrailCursor>,
}

/// End of a page: the sequence number of its last record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrailCursor(pub u64);

/// Records in the order of their creation, since the wall clock may have been set back in between.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrailPage {
    pub records: Vec<TrailRecord>,
    /// Start of the next page, if there are more records.
    pub next: Option<TrailCursor>,
}

impl TrailQuery {
    /// Returns the maximum number of records on a page.
    pub(crate) fn page_records(&self) -> usize {
        self.limit.unwrap_or(PAGE_RECORDS).min(PAGE_RECORDS)
    }

    /// Returns whether a record with this sequence number matches.
    pub(crate) fn matches(&self, sequence: u64, record: &TrailRecord) -> bool {
        self.owner.as_ref().is_none_or(|owner| *owner == record.owner)
            && ((self.gpu_id.is_none() && self.node.is_none())
                || record.devices.iter().any(|device| self.matches_device(device)))
            && self.since.is_none_or(|since| millis(record.at) >= millis(since))
            && self.until.is_none_or(|until| millis(record.at) < millis(until))
            && self.after.is_none_or(|after| sequence > after.0)
    }

    fn matches_device(&self, device: &HeldDevice) -> bool {
        self.gpu_id.is_none_or(|gpu_id| device.gpu_id == gpu_id)
            && self.node.as_ref().is_none_or(|node| *node == device.node)
    }
}

impl TrailPage {
    /// Collects matching records with their sequence numbers into a page. One record beyond the limit indicates that
    /// there are more.
    pub(crate) fn collect<E>(
        query: &TrailQuery,
        found: impl Iterator<Item = Result<(u64, TrailRecord), E>>,
    ) -> Result<Self, E> {
        let mut page = Self { records: Vec::new(), next: None };
        let mut last = query.after;
        for found in found {
            let (sequence, record) = found?;
            if page.records.len() == query.page_records() {
                page.next = last;
                break;
            }
            last = Some(TrailCursor(sequence));
            page.records.push(record);
        }
        Ok(page)
    }
}

// Usage: sums over the audit trail.

/// Dimension by which usage is summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UsageDimension {
    Owner,
    /// A device, named `node/gpu_id`.
    Gpu,
}

/// Usage of one owner or of one device.
#[derive(Debug, Clone, PartialEq)]
pub struct UsageTotal {
    /// Owner, or device as `node/gpu_id`.
    pub name: String,
    /// Number of leases.
    pub leases: u64,
    /// Whole GPUs × seconds.
    pub gpu_seconds: f64,
    /// Memory in MiB × seconds.
    pub memory_mib_seconds: f64,
}

/// Sums as integers, so that many small leases add up exactly.
#[derive(Default)]
struct UsageSum {
    leases: u64,
    /// Millionths of a GPU × milliseconds.
    share: u128,
    /// Bytes × milliseconds.
    memory: u128,
}

impl UsageSum {
    fn add<'a>(&mut self, devices: impl IntoIterator<Item = &'a HeldDevice>, held_ms: u64) {
        self.leases += 1;
        for device in devices {
            let share = u128::from(device.share.0) * u128::from(device.share_of_gpu.0);
            self.share = self.share.saturating_add(share.saturating_mul(held_ms.into()));
            let memory = u128::from(device.memory.0).saturating_mul(held_ms.into());
            self.memory = self.memory.saturating_add(memory);
        }
    }

    fn into_total(self, name: String) -> UsageTotal {
        let memory_mib_seconds = self.memory as f64 / (1024.0 * 1024.0 * 1000.0);
        UsageTotal { name, leases: self.leases, gpu_seconds: self.share as f64 / 1e9, memory_mib_seconds }
    }
}

/// Period in which a lease holds its devices, in milliseconds since 1970.
pub(crate) struct HoldingPeriod {
    pub owner: String,
    pub devices: Vec<HeldDevice>,
    pub granted_at: u64,
    /// `None` while the lease is held.
    pub ended_at: Option<u64>,
}

impl HoldingPeriod {
    /// Returns the periods in these records. For each end, the records contain the grant, or the end has the time of
    /// the grant.
    pub(crate) fn from_records(records: &[TrailRecord]) -> impl Iterator<Item = Self> {
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

/// Returns whether these records contain a lease's end.
pub(crate) fn has_end(records: &[TrailRecord], lease: LeaseId) -> bool {
    records.iter().any(|record| record.lease == lease && record.event == TrailEvent::Ended)
}

/// Sums the usage in a window, highest first. Times are milliseconds since 1970.
pub(crate) fn sum_usage<E>(
    by: UsageDimension,
    since: u64,
    now: u64,
    held: impl Iterator<Item = Result<HoldingPeriod, E>>,
) -> Result<Vec<UsageTotal>, E> {
    let mut sums: BTreeMap<String, UsageSum> = BTreeMap::new();
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
    let mut totals: Vec<UsageTotal> = sums.into_iter().map(|(name, sum)| sum.into_total(name)).collect();
    totals.sort_by(|a, b| b.gpu_seconds.total_cmp(&a.gpu_seconds));
    Ok(totals)
}
