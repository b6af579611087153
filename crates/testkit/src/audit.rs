//! What must never happen, looked for in the audit trail of all runs of an agent.
//!
//! The trail is gone through by its times, whatever order it comes in: a device is never promised beyond what it has,
//! tokens only grow, and a lease begins and ends once. What clients were told is compared with it: nothing granted is
//! lost, nothing released lives. Times are people's: where the clock was set back meanwhile, they are no order.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use gpupool_api::history::{HistoryDevice, HistoryRecord};
use gpupool_api::pool::DeviceBody;
use gpupool_client::{AgentClient, ClientError, HistoryQuery, LeaseQuery};
use jiff::Timestamp;

/// A whole device, in thousandths.
const WHOLE: u64 = 1_000;

/// Something that must never happen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditViolation(String);

impl fmt::Display for AuditViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What clients were told.
#[derive(Debug, Clone, Default)]
pub struct ClientObservations {
    /// Leases they were granted, with their tokens.
    pub granted: Vec<(u64, u64)>,
    /// Leases whose release was answered.
    pub released: Vec<u64>,
    /// Idempotency keys, each with a lease that was answered to it.
    pub keyed: Vec<(String, u64)>,
}

/// Everything that is known: the trail of all runs, what devices have, and which leases live.
#[derive(Debug, Clone, Default)]
pub struct TrailAudit {
    /// Records, in any order.
    pub records: Vec<HistoryRecord>,
    /// Memory that can be promised, in MiB, by UUID; devices without an entry are judged by shares alone.
    pub memory_mib: BTreeMap<String, u64>,
    /// Leases that are active now.
    pub active: BTreeSet<u64>,
}

impl TrailAudit {
    /// Asks an agent for everything. To be done while nothing changes.
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

    /// What must never happen and did; empty where all is well.
    pub fn violations(&self, seen: &ClientObservations) -> Vec<AuditViolation> {
        let mut trail = Trail::new(&self.memory_mib);
        let mut by_time: BTreeMap<Timestamp, Vec<&HistoryRecord>> = BTreeMap::new();
        for record in &self.records {
            match record.at.parse() {
                Ok(at) => by_time.entry(at).or_default().push(record),
                Err(_) => trail.say(record, "has no time that can be read"),
            }
        }
        for instant in by_time.into_values() {
            trail.take(instant);
        }
        trail.compare(seen, &self.active);
        trail.found
    }

    /// Panics with every violation, where there is one.
    pub fn assert_clean(&self, seen: &ClientObservations) {
        let found = self.violations(seen);
        let list: String = found.iter().map(|violation| format!("\n- {violation}")).collect();
        assert!(found.is_empty(), "{} violations in {} records:{list}", found.len(), self.records.len());
    }
}

/// The whole audit trail.
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

/// How things stood after each record.
#[derive(Debug)]
struct Trail<'a> {
    memory_mib: &'a BTreeMap<String, u64>,
    last_token: u64,
    held: BTreeMap<u64, &'a HistoryRecord>,
    ended: BTreeMap<u64, &'a HistoryRecord>,
    devices: BTreeMap<&'a str, Promised>,
    found: Vec<AuditViolation>,
}

/// What is promised of a device.
#[derive(Debug, Default, Clone, Copy)]
struct Promised {
    thousandths: u64,
    memory_mib: u64,
}

impl<'a> Trail<'a> {
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

    /// What happened at one instant. Which came first within a millisecond is not written, so ends come as early as they
    /// can: a grant that is too much even then is too much in any order.
    fn take(&mut self, instant: Vec<&'a HistoryRecord>) {
        let (mut grants, others): (Vec<_>, Vec<_>) = instant.into_iter().partition(|record| record.event == "granted");
        let (mut ends, strange): (Vec<_>, Vec<_>) = others.into_iter().partition(|record| record.event == "ended");
        for record in strange {
            self.say(record, &format!("has the unknown event {:?}", record.event));
        }
        grants.sort_by_key(|record| record.token);
        for grant in grants {
            let (now, later) = ends.into_iter().partition(|end| self.held.contains_key(&end.lease));
            ends = later;
            self.end_all(now);
            self.grant(grant);
        }
        self.end_all(ends);
    }

    fn end_all(&mut self, ends: Vec<&'a HistoryRecord>) {
        for end in ends {
            self.end(end);
        }
    }

    fn grant(&mut self, record: &'a HistoryRecord) {
        if self.ended.contains_key(&record.lease) {
            self.say(record, "was granted after its end");
        }
        match record.token {
            None => self.say(record, "was granted without a token"),
            Some(token) if token <= self.last_token => {
                self.say(record, &format!("got token {token} after token {} was given out", self.last_token));
            }
            Some(token) => self.last_token = token,
        }
        if self.held.insert(record.lease, record).is_some() {
            self.say(record, "was granted twice");
            return;
        }
        for device in &record.devices {
            self.promise(record, device);
        }
    }

    fn promise(&mut self, record: &HistoryRecord, device: &'a HistoryDevice) {
        let promised = self.devices.entry(&device.uuid).or_default();
        promised.thousandths += thousandths(device);
        promised.memory_mib += device.memory_mib;
        let promised = *promised;
        if promised.thousandths > WHOLE {
            let what = format!("made GPU {} promised to {} thousandths", device.gpu_id, promised.thousandths);
            self.say(record, &what);
        }
        if let Some(most) = self.memory_mib.get(&device.uuid).filter(|most| promised.memory_mib > **most) {
            let what = format!("made GPU {} promised to {} of {most} MiB", device.gpu_id, promised.memory_mib);
            self.say(record, &what);
        }
    }

    fn end(&mut self, record: &'a HistoryRecord) {
        if self.ended.insert(record.lease, record).is_some() {
            self.say(record, "ended twice");
            return;
        }
        let Some(granted) = self.held.remove(&record.lease) else {
            if record.token.is_some() {
                self.say(record, "ended with a token, and was never granted");
            }
            return;
        };
        if granted.token != record.token {
            self.say(record, &format!("was granted with token {:?} and ended with {:?}", granted.token, record.token));
        }
        if granted.devices != record.devices {
            self.say(record, "ended with other devices than it was granted");
        }
        for device in &granted.devices {
            if let Some(promised) = self.devices.get_mut(device.uuid.as_str()) {
                promised.thousandths -= thousandths(device);
                promised.memory_mib -= device.memory_mib;
            }
        }
    }

    /// What clients were told must be what is written.
    fn compare(&mut self, seen: &ClientObservations, active: &BTreeSet<u64>) {
        let held: BTreeSet<u64> = self.held.keys().copied().collect();
        let mut wrong: Vec<String> = Vec::new();
        wrong.extend(held.difference(active).map(|id| format!("lease {id} was lost: granted, not ended, not active")));
        wrong.extend(active.difference(&held).map(|id| format!("lease {id} is active and not granted in the trail")));
        for (lease, token) in &seen.granted {
            let written = self.held.get(lease).or_else(|| self.ended.get(lease)).and_then(|record| record.token);
            if written != Some(*token) {
                wrong.push(format!("lease {lease} was granted with token {token}, and the trail says {written:?}"));
            }
        }
        for lease in &seen.released {
            if self.held.contains_key(lease) || active.contains(lease) {
                wrong.push(format!("lease {lease} was released and lives"));
            }
        }
        let mut leases_of: BTreeMap<&str, u64> = BTreeMap::new();
        for (key, lease) in &seen.keyed {
            let first = *leases_of.entry(key).or_insert(*lease);
            if first != *lease {
                wrong.push(format!("the key {key} got lease {first} and lease {lease}"));
            }
        }
        self.found.extend(wrong.into_iter().map(AuditViolation));
    }

    fn say(&mut self, record: &HistoryRecord, what: &str) {
        let said = format!("lease {} {what} (at {}, owner {})", record.lease, record.at, record.owner);
        self.found.push(AuditViolation(said));
    }
}

fn thousandths(device: &HistoryDevice) -> u64 {
    (device.fraction * WHOLE as f64).round() as u64
}

#[cfg(test)]
mod tests;
