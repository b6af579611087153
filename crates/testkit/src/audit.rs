//! Search for violations in the audit trail of all runs of an agent.
//!
//! The records are replayed by time: a device is never overcommitted, tokens only grow, and a lease is granted and ends
//! once. The result is compared with the observations of clients: no granted lease is lost, and no released lease is
//! held. Times come from the wall clock: if the clock was set back, they give no order.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use gpupool_api::history::{HistoryDevice, HistoryRecord};
use gpupool_api::pool::DeviceBody;
use gpupool_client::{AgentClient, ClientError, HistoryQuery, LeaseQuery};
use jiff::Timestamp;

/// A whole device, in thousandths.
const WHOLE: u64 = 1_000;

/// A violation of an invariant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditViolation(String);

impl fmt::Display for AuditViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Observations of clients.
#[derive(Debug, Clone, Default)]
pub struct ClientObservations {
    /// Granted leases with their tokens.
    pub granted: Vec<(u64, u64)>,
    /// Leases whose release was confirmed.
    pub released: Vec<u64>,
    /// Idempotency keys, each with the lease of a response.
    pub keyed: Vec<(String, u64)>,
}

/// The trail of all runs, the memory of devices, and the active leases.
#[derive(Debug, Clone, Default)]
pub struct TrailAudit {
    /// Records, in any order.
    pub records: Vec<HistoryRecord>,
    /// Memory that can be promised, in MiB, by UUID; only shares are checked for devices without an entry.
    pub memory_mib: BTreeMap<String, u64>,
    /// Leases that are active now.
    pub active: BTreeSet<u64>,
}

impl TrailAudit {
    /// Reads everything from an agent. Call it while nothing changes.
    pub async fn collect(client: &AgentClient) -> Result<Self, ClientError> {
        let mut audit = Self { records: fetch_all_records(client).await?, ..Self::default() };
        let memory = |device: DeviceBody| Some((device.uuid, device.memory_mib?));
        audit.memory_mib = client.devices().await?.devices.into_iter().filter_map(memory).collect();
        let mut query = LeaseQuery { state: Some("active".into()), ..LeaseQuery::default() };
        loop {
            let page = client.leases(&query).await?;
            audit.active.extend(page.leases.iter().map(|lease| lease.id));
            query.after = page.next;
            if query.after.is_none() {
                return Ok(audit);
            }
        }
    }

    /// Returns all violations.
    pub fn violations(&self, observed: &ClientObservations) -> Vec<AuditViolation> {
        let mut replay = TrailReplay::new(&self.memory_mib);
        let mut by_time: BTreeMap<Timestamp, Vec<&HistoryRecord>> = BTreeMap::new();
        for record in &self.records {
            match record.at.parse() {
                Ok(at) => by_time.entry(at).or_default().push(record),
                Err(_) => replay.report(record, "has no valid time"),
            }
        }
        for instant in by_time.into_values() {
            replay.replay_instant(instant);
        }
        replay.check_observations(observed, &self.active);
        replay.found
    }

    /// Panics with every violation, if there is one.
    pub fn assert_clean(&self, observed: &ClientObservations) {
        let found = self.violations(observed);
        let list: String = found.iter().map(|violation| format!("\n- {violation}")).collect();
        assert!(found.is_empty(), "{} violations in {} records:{list}", found.len(), self.records.len());
    }
}

/// Fetches the whole audit trail.
pub async fn fetch_all_records(client: &AgentClient) -> Result<Vec<HistoryRecord>, ClientError> {
    let mut records = Vec::new();
    let mut query = HistoryQuery::default();
    loop {
        let page = client.history(&query).await?;
        records.extend(page.records);
        query.after = page.next;
        if query.after.is_none() {
            return Ok(records);
        }
    }
}

/// State after each replayed record.
#[derive(Debug)]
struct TrailReplay<'a> {
    memory_mib: &'a BTreeMap<String, u64>,
    last_token: u64,
    held: BTreeMap<u64, &'a HistoryRecord>,
    ended: BTreeMap<u64, &'a HistoryRecord>,
    devices: BTreeMap<&'a str, DeviceCommitment>,
    found: Vec<AuditViolation>,
}

/// Promised shares and memory of a device.
#[derive(Debug, Default, Clone, Copy)]
struct DeviceCommitment {
    thousandths: u64,
    memory_mib: u64,
}

impl<'a> TrailReplay<'a> {
    fn new(memory_mib: &'a BTreeMap<String, u64>) -> Self {
        Self {
            memory_mib,
            last_token: 0,
            held: BTreeMap::new(),
            ended: BTreeMap::new(),
            devices: BTreeMap::new(),
            found: Vec::new(),
        }
    }

    /// Replays the records of one instant. The order within a millisecond is unknown, so ends come as early as
    /// possible: a grant that is too much even then is too much in any order.
    fn replay_instant(&mut self, instant: Vec<&'a HistoryRecord>) {
        let (mut grants, others): (Vec<_>, Vec<_>) = instant.into_iter().partition(|record| record.event == "granted");
        let (mut ends, unknown): (Vec<_>, Vec<_>) = others.into_iter().partition(|record| record.event == "ended");
        for record in unknown {
            self.report(record, &format!("has the unknown event {:?}", record.event));
        }
        grants.sort_by_key(|record| record.token);
        for grant in grants {
            let (now, later) = ends.into_iter().partition(|end| self.held.contains_key(&end.lease));
            ends = later;
            self.replay_ends(now);
            self.replay_grant(grant);
        }
        self.replay_ends(ends);
    }

    fn replay_ends(&mut self, ends: Vec<&'a HistoryRecord>) {
        for end in ends {
            self.replay_end(end);
        }
    }

    fn replay_grant(&mut self, record: &'a HistoryRecord) {
        if self.ended.contains_key(&record.lease) {
            self.report(record, "was granted after its end");
        }
        match record.token {
            None => self.report(record, "was granted without a token"),
            Some(token) if token <= self.last_token => {
                self.report(record, &format!("got token {token} after token {} was granted", self.last_token));
            }
            Some(token) => self.last_token = token,
        }
        if self.held.insert(record.lease, record).is_some() {
            self.report(record, "was granted twice");
            return;
        }
        for device in &record.devices {
            self.add_promise(record, device);
        }
    }

    fn add_promise(&mut self, record: &HistoryRecord, device: &'a HistoryDevice) {
        let promised = self.devices.entry(&device.uuid).or_default();
        promised.thousandths += thousandths(device);
        promised.memory_mib += device.memory_mib;
        let promised = *promised;
        if promised.thousandths > WHOLE {
            let what = format!("made GPU {} promised to {} thousandths", device.gpu_id, promised.thousandths);
            self.report(record, &what);
        }
        if let Some(most) = self.memory_mib.get(&device.uuid).filter(|most| promised.memory_mib > **most) {
            let what = format!("made GPU {} promised to {} of {most} MiB", device.gpu_id, promised.memory_mib);
            self.report(record, &what);
        }
    }

    fn replay_end(&mut self, record: &'a HistoryRecord) {
        if self.ended.insert(record.lease, record).is_some() {
            self.report(record, "ended twice");
            return;
        }
        let Some(granted) = self.held.remove(&record.lease) else {
            if record.token.is_some() {
                self.report(record, "ended with a token, and was never granted");
            }
            return;
        };
        if granted.token != record.token {
            self.report(
                record,
                &format!("was granted with token {:?} and ended with {:?}", granted.token, record.token),
            );
        }
        if granted.devices != record.devices {
            self.report(record, "ended with other devices than it was granted");
        }
        for device in &granted.devices {
            if let Some(promised) = self.devices.get_mut(device.uuid.as_str()) {
                promised.thousandths -= thousandths(device);
                promised.memory_mib -= device.memory_mib;
            }
        }
    }

    /// Compares the observations of clients with the trail.
    fn check_observations(&mut self, observed: &ClientObservations, active: &BTreeSet<u64>) {
        let held: BTreeSet<u64> = self.held.keys().copied().collect();
        let mut wrong: Vec<String> = Vec::new();
        wrong.extend(held.difference(active).map(|id| format!("lease {id} was lost: granted, not ended, not active")));
        wrong.extend(active.difference(&held).map(|id| format!("lease {id} is active and not granted in the trail")));
        for (lease, token) in &observed.granted {
            let written = self.held.get(lease).or_else(|| self.ended.get(lease)).and_then(|record| record.token);
            if written != Some(*token) {
                wrong.push(format!("lease {lease} was granted with token {token}, but the trail has {written:?}"));
            }
        }
        for lease in &observed.released {
            if self.held.contains_key(lease) || active.contains(lease) {
                wrong.push(format!("lease {lease} was released and is still held"));
            }
        }
        let mut leases_of: BTreeMap<&str, u64> = BTreeMap::new();
        for (key, lease) in &observed.keyed {
            let first = *leases_of.entry(key).or_insert(*lease);
            if first != *lease {
                wrong.push(format!("key {key} got lease {first} and lease {lease}"));
            }
        }
        self.found.extend(wrong.into_iter().map(AuditViolation));
    }

    fn report(&mut self, record: &HistoryRecord, what: &str) {
        let text = format!("lease {} {what} (at {}, owner {})", record.lease, record.at, record.owner);
        self.found.push(AuditViolation(text));
    }
}

fn thousandths(device: &HistoryDevice) -> u64 {
    (device.fraction * WHOLE as f64).round() as u64
}

#[cfg(test)]
mod tests;
