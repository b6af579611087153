//! How things stand: leases, and devices with what they read and what is promised of them.
//!
//! What a device does not tell, or told too long ago, is left out: a missing line is honest, a zero is not.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use gpupool_api::view::{closure_name, health_and_reason};
use gpupool_core::{Bytes, DeviceClosure, DeviceHealth, ForeignLoad, GpuId, LeaseState, Millis, PoolTime, Share};
use gpupool_devices::{DetectedDevice, Reported};

use crate::authority::{DeviceState, Snapshot};
use crate::limits::OWNERS_TOLD;
use crate::node::statistics::{ListedDevice, SamplingRound};

use super::scrape::Page;

/// Whose share is told together with that of others.
const OTHERS: &str = "other";

/// How the pool stands.
#[derive(Debug)]
pub struct Stand {
    devices: Vec<PoolDevice>,
    queued: usize,
    offered: usize,
    active: usize,
    draining: usize,
    longest_wait: Millis,
    held: HashMap<Arc<str>, Share>,
}

/// What the pool knows of a device.
#[derive(Debug)]
struct PoolDevice {
    gpu_id: GpuId,
    uuid: String,
    name: String,
    health: DeviceHealth,
    closed: Option<DeviceClosure>,
    promised: Share,
    promised_memory: Bytes,
    foreign: Option<ForeignLoad>,
}

impl Stand {
    /// Sums a snapshot up.
    pub fn of(snapshot: &Snapshot, now: PoolTime) -> Self {
        let devices = snapshot.devices().map(|DeviceState { view, .. }| PoolDevice {
            gpu_id: view.gpu_id,
            uuid: view.facts.identity.to_string(),
            name: view.facts.model.to_string(),
            health: view.health.clone(),
            closed: view.closed,
            promised: view.promised,
            promised_memory: view.promised_memory,
            foreign: view.foreign,
        });
        let mut stand = Self {
            devices: devices.collect(),
            queued: snapshot.queued,
            offered: 0,
            active: 0,
            draining: 0,
            longest_wait: snapshot.oldest_request_at.map(|at| now.since(at)).unwrap_or_default(),
            held: HashMap::new(),
        };
        for lease in snapshot.leases() {
            stand.draining += usize::from(lease.draining);
            match lease.state {
                LeaseState::Offered => stand.offered += 1,
                LeaseState::Active => stand.active += 1,
                _ => {}
            }
            if lease.state.is_granted() {
                let share: u32 = lease.promises.iter().map(|promise| promise.share.0).sum();
                stand.held.entry(lease.request.owner.clone()).or_default().0 += share;
            }
        }
        stand
    }
}

/// Writes how the pool stands; nothing where it could not be asked in time.
pub(super) fn encode_leases(stand: Option<&Stand>, page: &mut Page<'_>) -> fmt::Result {
    let states = stand.map(|stand| {
        let Stand { queued, offered, active, draining, .. } = *stand;
        [("queued", queued), ("offered", offered), ("active", active), ("draining", draining)]
    });
    let lines = states.into_iter().flatten().map(|(state, count)| ([("state", state)], count as f64));
    page.gauges("gpupool_leases", "Leases by state", lines)?;
    let longest = stand.map(|stand| stand.longest_wait.0 as f64 / 1000.0);
    page.gauge("gpupool_longest_wait_seconds", "How long the oldest request in the queue waits", longest)?;
    let held = stand.map(|stand| by_owner(&stand.held)).unwrap_or_default();
    let lines = held.iter().map(|(owner, share)| ([("owner", *owner)], share.as_fraction()));
    page.gauges("gpupool_held_gpus", "GPUs held, by owner", lines)
}

/// Those who hold the most by name, the rest together.
fn by_owner(held: &HashMap<Arc<str>, Share>) -> Vec<(&str, Share)> {
    let mut owners: Vec<(&str, Share)> = held.iter().map(|(owner, share)| (&**owner, *share)).collect();
    owners.sort_unstable_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
    let rest: u32 = owners.split_off(owners.len().min(OWNERS_TOLD)).iter().map(|(_, share)| share.0).sum();
    if rest > 0 {
        // Somebody may be called so; a name must not be told twice.
        match owners.iter_mut().find(|(owner, _)| *owner == OTHERS) {
            Some((_, share)) => share.0 += rest,
            None => owners.push((OTHERS, Share(rest))),
        }
    }
    owners
}

/// A device with all that is known of it.
struct Device<'a> {
    gpu_id: String,
    uuid: String,
    name: &'a str,
    node: &'a str,
    seen: Option<&'a ListedDevice>,
    /// Whether what it read is how it is now.
    fresh: bool,
    pooled: Option<&'a PoolDevice>,
}

type DeviceLabels<'a> = [(&'static str, &'a str); 4];

impl<'a> Device<'a> {
    fn labels(&self) -> DeviceLabels<'_> {
        [("gpu_id", &self.gpu_id), ("uuid", &self.uuid), ("name", self.name), ("node", self.node)]
    }

    fn and(&self, name: &'static str, value: &'static str) -> [(&'static str, &str); 5] {
        let [a, b, c, d] = self.labels();
        [a, b, c, d, (name, value)]
    }

    fn found(&self) -> Option<&'a DetectedDevice> {
        self.seen.map(|seen| &*seen.found)
    }

    fn read<T>(&self, of: impl Fn(&'a DetectedDevice) -> &'a Reported<T>) -> Option<&'a T> {
        self.found().filter(|_| self.fresh).and_then(|found| of(found).value())
    }

    /// The pool judges health over time; before it knows the device, the reading does.
    fn health(&self) -> Option<&'a DeviceHealth> {
        self.pooled.map(|pooled| &pooled.health).or(self.seen.map(|seen| &seen.health))
    }
}

/// Every device that is listed or takes work, by number.
fn devices<'a>(round: &'a SamplingRound, stand: Option<&'a Stand>, node: &'a str) -> Vec<Device<'a>> {
    let mut devices: BTreeMap<GpuId, Device<'a>> = BTreeMap::new();
    for seen in round.listed() {
        let device = Device {
            gpu_id: seen.gpu_id.to_string(),
            uuid: seen.identity.to_string(),
            name: seen.found.name.as_deref().unwrap_or("unknown GPU"),
            node,
            seen: Some(seen),
            fresh: !seen.is_lost() && !round.is_stale(seen),
            pooled: None,
        };
        devices.insert(seen.gpu_id, device);
    }
    for pooled in stand.iter().flat_map(|stand| &stand.devices) {
        let unseen = || Device {
            gpu_id: pooled.gpu_id.to_string(),
            uuid: pooled.uuid.clone(),
            name: &pooled.name,
            node,
            seen: None,
            fresh: false,
            pooled: None,
        };
        devices.entry(pooled.gpu_id).or_insert_with(unseen).pooled = Some(pooled);
    }
    devices.into_values().collect()
}

/// Writes what is known of devices at `now`.
pub(super) fn encode_devices(
    page: &mut Page<'_>,
    round: &SamplingRound,
    stand: Option<&Stand>,
    node: &str,
    now: PoolTime,
) -> fmt::Result {
    let devices = devices(round, stand, node);
    read(page, &devices, now)?;
    promised(page, &devices)?;
    foreign(page, &devices)
}

/// A family with a line for each device that has a value.
fn family<'a>(
    page: &mut Page<'_>,
    devices: &[Device<'a>],
    name: &'static str,
    help: &str,
    value: impl Fn(&Device<'a>) -> Option<f64>,
) -> fmt::Result {
    page.gauges(name, help, devices.iter().filter_map(|device| Some((device.labels(), value(device)?))))
}

fn read(page: &mut Page<'_>, devices: &[Device<'_>], now: PoolTime) -> fmt::Result {
    // How much a device has does not change; it is told of old readings too.
    family(page, devices, "gpupool_gpu_memory_total_bytes", "All memory of a GPU", |device| {
        device.found()?.memory.total.value().map(|bytes| bytes.0 as f64)
    })?;
    family(page, devices, "gpupool_gpu_memory_reserved_bytes", "Memory of a GPU that its driver keeps", |device| {
        device.found()?.memory.reserved.value().map(|bytes| bytes.0 as f64)
    })?;
    family(page, devices, "gpupool_gpu_memory_used_bytes", "Memory of a GPU that programs use", |device| {
        let memory = &device.found().filter(|_| device.fresh)?.memory;
        memory.used_by_programs().value().map(|bytes| bytes.0 as f64)
    })?;
    family(page, devices, "gpupool_gpu_utilization_ratio", "How busy a GPU is, 0 to 1", |device| {
        device.read(|found| &found.utilization).map(|busy| busy.as_number() / 100.0)
    })?;
    family(page, devices, "gpupool_gpu_temperature_celsius", "Temperature of a GPU", |device| {
        device.read(|found| &found.temperature_c).map(|degrees| f64::from(*degrees))
    })?;
    family(page, devices, "gpupool_gpu_power_watts", "Power a GPU draws", |device| {
        device.read(|found| &found.power).map(|power| power.as_number())
    })?;
    family(page, devices, "gpupool_gpu_power_limit_watts", "The most power a GPU may draw", |device| {
        device.read(|found| &found.power_limit).map(|power| power.as_number())
    })?;
    family(page, devices, "gpupool_gpu_reading_age_seconds", "Time since a GPU was read", |device| {
        device.seen.map(|seen| now.since(seen.read_at).0 as f64 / 1000.0)
    })?;
    let states = devices.iter().filter_map(|device| Some((device, health_and_reason(device.health()?).0)));
    let lines = states.flat_map(|(device, is)| {
        ["healthy", "unhealthy", "lost"].map(|state| (device.and("state", state), f64::from(u8::from(state == is))))
    });
    page.gauges("gpupool_gpu_health", "1 for the state a GPU is in", lines)
}

fn promised(page: &mut Page<'_>, devices: &[Device<'_>]) -> fmt::Result {
    family(page, devices, "gpupool_gpu_open", "1 where a GPU takes new work", |device| {
        Some(f64::from(u8::from(device.pooled?.closed.is_none())))
    })?;
    let closed = devices.iter().filter_map(|device| Some((device, closure_name(device.pooled?.closed?))));
    let lines = closed.map(|(device, reason)| (device.and("reason", reason), 1.0));
    page.gauges("gpupool_gpu_closed", "1, with the reason, where a GPU takes no new work", lines)?;
    family(page, devices, "gpupool_gpu_promised_ratio", "How much of a GPU is promised, 0 to 1", |device| {
        Some(device.pooled?.promised.as_fraction())
    })?;
    family(page, devices, "gpupool_gpu_promised_memory_bytes", "How much memory of a GPU is promised", |device| {
        Some(device.pooled?.promised_memory.0 as f64)
    })
}

fn foreign(page: &mut Page<'_>, devices: &[Device<'_>]) -> fmt::Result {
    family(page, devices, "gpupool_gpu_foreign_memory_bytes", "Memory in use that no lease explains", |device| {
        Some(device.pooled?.foreign.filter(|_| device.fresh)?.memory?.0 as f64)
    })?;
    let help = "How busy a GPU is beyond what leases explain, 0 to 1";
    family(page, devices, "gpupool_gpu_foreign_utilization_ratio", help, |device| {
        Some(device.pooled?.foreign.filter(|_| device.fresh)?.utilization?.as_number() / 100.0)
    })?;
    family(page, devices, "gpupool_gpu_foreign_processes", "Processes on a GPU that run under no lease", |device| {
        Some(f64::from(device.pooled?.foreign.filter(|_| device.fresh)?.processes))
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use gpupool_core::{DeviceIdentity, Percent, Vendor};
    use gpupool_devices::{MemoryReading, SourceKind, TrackedDevice};

    use super::super::{Form, Metrics, Scrape};
    use super::*;
    use crate::messages::test_facts;
    use crate::node::statistics::{DeviceFilter, Statistics};

    #[test]
    fn many_owners_are_told_in_few_lines_and_nothing_is_lost() {
        let held: HashMap<Arc<str>, Share> = (0..OWNERS_TOLD * 3)
            .map(|n| (format!("owner-{n:04}").into(), Share(100 + n as u32)))
            .chain([(OTHERS.into(), Share(1_000_000))])
            .collect();
        let told = by_owner(&held);
        assert_eq!(told.len(), OWNERS_TOLD);
        let sum = |shares: &mut dyn Iterator<Item = Share>| shares.map(|share| u64::from(share.0)).sum::<u64>();
        assert_eq!(sum(&mut told.iter().map(|(_, share)| *share)), sum(&mut held.values().copied()));
        assert_eq!(told.iter().filter(|(owner, _)| *owner == OTHERS).count(), 1);
    }

    fn listed(number: u32, found: DetectedDevice, read_at: PoolTime, health: DeviceHealth) -> ListedDevice {
        let identity = DeviceIdentity::Uuid(format!("GPU-{number}").into());
        let tracked = TrackedDevice {
            gpu_id: GpuId(number),
            facts: Arc::new(test_facts(identity.clone())),
            identity,
            source: SourceKind::Nvml,
            found: Arc::new(found),
            read_at,
            health,
            is_present: true,
        };
        ListedDevice { tracked: Arc::new(tracked), visible: true, processes: Arc::new([]) }
    }

    fn told(devices: impl FnOnce(PoolTime) -> Vec<ListedDevice>) -> String {
        // Ahead of this machine's clock, so that a slow test does not make readings old.
        let now = crate::clock::now().after(Millis::from_secs(3600));
        let statistics = Statistics::new(DeviceFilter::default(), Duration::from_secs(1), 1);
        let clock = gpupool_store::ClockReading { pool: now, wall: std::time::SystemTime::now() };
        let refresh = Millis::from_secs(1);
        let devices = devices(now);
        statistics.publish(SamplingRound {
            clock,
            devices,
            sources: vec![],
            answered_at: Some(now),
            refresh,
            stopped: false,
        });
        let (metrics, current) = (Arc::new(Metrics::new()), statistics.current());
        Scrape { metrics, current, snapshot: None, node: "here".into(), now }.encode(Form::OpenMetrics)
    }

    fn found(name: &str) -> DetectedDevice {
        DetectedDevice {
            name: Some(name.into()),
            memory: MemoryReading {
                total: Reported::Value(Bytes(1000)),
                used: Reported::Value(Bytes(10)),
                ..MemoryReading::default()
            },
            utilization: Reported::Value(Percent(50_000)),
            ..DetectedDevice::new(Vendor::Nvidia)
        }
    }

    #[test]
    fn what_a_device_does_not_tell_is_absent_and_what_it_tells_is_there() {
        let text = told(|now| vec![listed(0, found("A"), now, DeviceHealth::Healthy)]);
        let labels = r#"{gpu_id="0",uuid="GPU-0",name="A",node="here"}"#;
        for line in [
            format!("gpupool_gpu_utilization_ratio{labels} 0.5"),
            format!("gpupool_gpu_memory_used_bytes{labels} 10.0"),
            format!("gpupool_gpu_reading_age_seconds{labels} 0.0"),
        ] {
            assert!(text.contains(&line), "{line} is not in\n{text}");
        }
        for absent in ["temperature_celsius", "power_watts", "memory_reserved_bytes", "promised_ratio"] {
            assert!(!text.contains(&format!("gpupool_gpu_{absent}{{")), "{absent} is in\n{text}");
        }
    }

    #[test]
    fn an_old_reading_and_that_of_a_lost_device_are_not_passed_off_as_how_it_is() {
        let text = told(|now| {
            let long_ago = PoolTime(now.0 - 60_000);
            vec![listed(0, found("A"), long_ago, DeviceHealth::Healthy), listed(1, found("B"), now, DeviceHealth::Lost)]
        });
        assert!(!text.contains("gpupool_gpu_utilization_ratio{"), "{text}");
        assert!(!text.contains("gpupool_gpu_memory_used_bytes{"), "{text}");
        assert!(text.contains(r#"reading_age_seconds{gpu_id="0",uuid="GPU-0",name="A",node="here"} 60.0"#), "{text}");
        assert!(
            text.contains(r#"gpu_health{gpu_id="1",uuid="GPU-1",name="B",node="here",state="lost"} 1.0"#),
            "{text}"
        );
        assert!(text.contains("gpupool_gpu_memory_total_bytes{"), "how much a device has does not change:\n{text}");
    }

    #[test]
    fn a_name_cannot_break_out_of_its_label() {
        let text = told(|now| vec![listed(0, found("A\"} 1\nfake 2\\"), now, DeviceHealth::Healthy)]);
        assert!(text.contains(r#"name="A\"} 1\nfake 2\\",node="#), "{text}");
        assert!(!text.lines().any(|line| line.starts_with("fake")), "{text}");
    }
}
