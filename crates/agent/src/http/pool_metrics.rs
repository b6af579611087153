//! Metrics of the present state: leases, and devices with their readings and promises.
//!
//! A value that a device does not report, or reported too long ago, has no line: a missing line is honest, a zero would
//! not be.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use gpupool_api::view::{closure_name, health_and_reason};
use gpupool_core::{DeviceHealth, DeviceView, GpuId, LeaseState, Millis, PoolTime, Share, escape_text};
use gpupool_devices::{DetectedDevice, Reported};

use crate::authority::Snapshot;
use crate::limits::NAMED_OWNERS;
use crate::metrics::MetricsWriter;
use crate::node::statistics::{ListedDevice, SamplingRound};

/// The label of the owners that are counted together.
const OTHER_OWNERS: &str = "other";

/// The sums over the leases of a snapshot.
#[derive(Debug)]
pub(super) struct PoolTotals {
    queued: usize,
    offered: usize,
    active: usize,
    draining: usize,
    longest_wait: Millis,
    held: HashMap<Arc<str>, Share>,
}

impl PoolTotals {
    pub(super) fn new(snapshot: &Snapshot, now: PoolTime) -> Self {
        let mut totals = Self {
            queued: snapshot.queued,
            offered: 0,
            active: 0,
            draining: 0,
            longest_wait: snapshot.oldest_request_at.map(|at| now.since(at)).unwrap_or_default(),
            held: HashMap::new(),
        };
        for lease in snapshot.leases() {
            totals.draining += usize::from(lease.draining);
            match lease.state {
                LeaseState::Offered => totals.offered += 1,
                LeaseState::Active => totals.active += 1,
                _ => {}
            }
            if lease.state.is_granted() {
                let share: u32 = lease.promises.iter().map(|promise| promise.share.0).sum();
                totals.held.entry(lease.request.owner.clone()).or_default().0 += share;
            }
        }
        totals
    }
}

/// Writes the metrics of leases; without totals only their names.
pub(super) fn encode_leases(writer: &mut MetricsWriter<'_>, totals: Option<&PoolTotals>) -> fmt::Result {
    let states = totals.map(|totals| {
        let PoolTotals { queued, offered, active, draining, .. } = *totals;
        [("queued", queued), ("offered", offered), ("active", active), ("draining", draining)]
    });
    let lines = states.into_iter().flatten().map(|(state, count)| ([("state", state)], count as f64));
    writer.gauges("gpupool_leases", "Leases by state", lines)?;
    let longest = totals.map(|totals| totals.longest_wait.0 as f64 / 1000.0);
    writer.gauge("gpupool_longest_wait_seconds", "Time that the oldest request in the queue has waited", longest)?;
    let held = totals.map(|totals| largest_owners(&totals.held)).unwrap_or_default();
    let lines = held.iter().map(|(owner, share)| ([("owner", escape_text(owner))], share.as_fraction()));
    writer.gauges("gpupool_held_gpus", "GPUs held, by owner", lines)
}

/// Returns the owners that hold the most by name, and the rest together.
fn largest_owners(held: &HashMap<Arc<str>, Share>) -> Vec<(&str, Share)> {
    let mut owners: Vec<(&str, Share)> = held.iter().map(|(owner, share)| (&**owner, *share)).collect();
    owners.sort_unstable_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
    let rest: u32 = owners.split_off(owners.len().min(NAMED_OWNERS)).iter().map(|(_, share)| share.0).sum();
    if rest > 0 {
        // An owner may have this name, and a label must not be written twice.
        match owners.iter_mut().find(|(owner, _)| *owner == OTHER_OWNERS) {
            Some((_, share)) => share.0 += rest,
            None => owners.push((OTHER_OWNERS, Share(rest))),
        }
    }
    owners
}

/// A device with its latest reading on this node and its state in the pool.
struct MeasuredDevice<'a> {
    gpu_id: String,
    uuid: String,
    name: &'a str,
    node: &'a str,
    listed: Option<&'a ListedDevice>,
    /// Whether the latest reading is still fresh.
    is_fresh: bool,
    view: Option<&'a DeviceView>,
}

type DeviceLabels<'a> = [(&'static str, &'a str); 4];

impl<'a> MeasuredDevice<'a> {
    fn labels(&self) -> DeviceLabels<'_> {
        [("gpu_id", &self.gpu_id), ("uuid", &self.uuid), ("name", self.name), ("node", self.node)]
    }

    fn labels_and(&self, name: &'static str, value: &'static str) -> [(&'static str, &str); 5] {
        let [a, b, c, d] = self.labels();
        [a, b, c, d, (name, value)]
    }

    fn found(&self) -> Option<&'a DetectedDevice> {
        self.listed.map(|listed| &*listed.found)
    }

    fn fresh_value<T>(&self, of: impl Fn(&'a DetectedDevice) -> &'a Reported<T>) -> Option<&'a T> {
        self.found().filter(|_| self.is_fresh).and_then(|found| of(found).value())
    }

    /// Returns the health. The pool judges it over time; a device that the pool does not know yet has the health of its
    /// reading.
    fn health(&self) -> Option<&'a DeviceHealth> {
        self.view.map(|view| &view.health).or(self.listed.map(|listed| &listed.health))
    }
}

/// Returns every device that this node lists or the pool knows, by node and number.
fn measured_devices<'a>(
    round: &'a SamplingRound,
    snapshot: Option<&'a Snapshot>,
    node: &'a str,
) -> impl Iterator<Item = MeasuredDevice<'a>> {
    let mut devices: BTreeMap<(&str, GpuId), MeasuredDevice<'_>> = BTreeMap::new();
    for listed in round.listed() {
        let device = MeasuredDevice {
            gpu_id: listed.gpu_id.to_string(),
            uuid: listed.identity.to_string(),
            name: listed.found.name.as_deref().unwrap_or("unknown GPU"),
            node,
            listed: Some(listed),
            is_fresh: !listed.is_lost() && !round.is_stale(listed),
            view: None,
        };
        devices.insert((node, listed.gpu_id), device);
    }
    for (snapshot, state) in snapshot.iter().flat_map(|snapshot| snapshot.devices().map(move |state| (snapshot, state)))
    {
        let view = &state.view;
        let node = snapshot.node_name(view.node);
        let unlisted = || MeasuredDevice {
            gpu_id: view.gpu_id.to_string(),
            uuid: view.facts.identity.to_string(),
            name: &view.facts.model,
            node,
            listed: None,
            is_fresh: false,
            view: None,
        };
        devices.entry((node, view.gpu_id)).or_insert_with(unlisted).view = Some(view);
    }
    devices.into_values()
}

/// Writes the metrics of devices at `now`.
pub(super) fn encode_devices(
    writer: &mut MetricsWriter<'_>,
    round: &SamplingRound,
    snapshot: Option<&Snapshot>,
    node: &str,
    now: PoolTime,
) -> fmt::Result {
    let devices: Vec<_> = measured_devices(round, snapshot, node).collect();
    encode_readings(writer, &devices, now)?;
    encode_promises(writer, &devices)?;
    encode_foreign_load(writer, &devices)
}

/// Writes a family with one line for each device that has a value.
fn encode_family<'a>(
    writer: &mut MetricsWriter<'_>,
    devices: &[MeasuredDevice<'a>],
    name: &'static str,
    help: &str,
    value: impl Fn(&MeasuredDevice<'a>) -> Option<f64>,
) -> fmt::Result {
    writer.gauges(name, help, devices.iter().filter_map(|device| Some((device.labels(), value(device)?))))
}

fn encode_readings(writer: &mut MetricsWriter<'_>, devices: &[MeasuredDevice<'_>], now: PoolTime) -> fmt::Result {
    // The size of a device does not change, so old readings count too.
    encode_family(writer, devices, "gpupool_gpu_memory_total_bytes", "All memory of a GPU", |device| {
        device.found()?.memory.total.value().map(|bytes| bytes.0 as f64)
    })?;
    let help = "Memory of a GPU that its driver keeps";
    encode_family(writer, devices, "gpupool_gpu_memory_reserved_bytes", help, |device| {
        device.found()?.memory.reserved.value().map(|bytes| bytes.0 as f64)
    })?;
    encode_family(writer, devices, "gpupool_gpu_memory_used_bytes", "Memory of a GPU that programs use", |device| {
        let memory = &device.found().filter(|_| device.is_fresh)?.memory;
        memory.used_by_programs().value().map(|bytes| bytes.0 as f64)
    })?;
    encode_family(writer, devices, "gpupool_gpu_utilization_ratio", "Utilization of a GPU, 0 to 1", |device| {
        device.fresh_value(|found| &found.utilization).map(|busy| busy.as_number() / 100.0)
    })?;
    encode_family(writer, devices, "gpupool_gpu_temperature_celsius", "Temperature of a GPU", |device| {
        device.fresh_value(|found| &found.temperature_c).map(|degrees| f64::from(*degrees))
    })?;
    encode_family(writer, devices, "gpupool_gpu_power_watts", "Power draw of a GPU", |device| {
        device.fresh_value(|found| &found.power).map(|power| power.as_number())
    })?;
    encode_family(writer, devices, "gpupool_gpu_power_limit_watts", "Power limit of a GPU", |device| {
        device.fresh_value(|found| &found.power_limit).map(|power| power.as_number())
    })?;
    encode_family(writer, devices, "gpupool_gpu_reading_age_seconds", "Time since a GPU was read", |device| {
        device.listed.map(|listed| now.since(listed.read_at).0 as f64 / 1000.0)
    })?;
    let states = devices.iter().filter_map(|device| Some((device, health_and_reason(device.health()?).0)));
    let lines = states.flat_map(|(device, is)| {
        ["healthy", "unhealthy", "lost"]
            .map(|state| (device.labels_and("state", state), f64::from(u8::from(state == is))))
    });
    writer.gauges("gpupool_gpu_health", "1 for the current state of a GPU", lines)
}

fn encode_promises(writer: &mut MetricsWriter<'_>, devices: &[MeasuredDevice<'_>]) -> fmt::Result {
    encode_family(writer, devices, "gpupool_gpu_open", "1 if a GPU takes new work", |device| {
        Some(f64::from(u8::from(device.view?.closed.is_none())))
    })?;
    let closed = devices.iter().filter_map(|device| Some((device, closure_name(device.view?.closed?))));
    let lines = closed.map(|(device, reason)| (device.labels_and("reason", reason), 1.0));
    writer.gauges("gpupool_gpu_closed", "1, with the reason, if a GPU takes no new work", lines)?;
    encode_family(writer, devices, "gpupool_gpu_promised_ratio", "Promised part of a GPU, 0 to 1", |device| {
        Some(device.view?.promised.as_fraction())
    })?;
    encode_family(writer, devices, "gpupool_gpu_promised_memory_bytes", "Promised memory of a GPU", |device| {
        Some(device.view?.promised_memory.0 as f64)
    })
}

fn encode_foreign_load(writer: &mut MetricsWriter<'_>, devices: &[MeasuredDevice<'_>]) -> fmt::Result {
    let help = "Memory in use that no lease explains";
    encode_family(writer, devices, "gpupool_gpu_foreign_memory_bytes", help, |device| {
        Some(device.view?.foreign.filter(|_| device.is_fresh)?.memory?.0 as f64)
    })?;
    let help = "Utilization of a GPU that no lease explains, 0 to 1";
    encode_family(writer, devices, "gpupool_gpu_foreign_utilization_ratio", help, |device| {
        Some(device.view?.foreign.filter(|_| device.is_fresh)?.utilization?.as_number() / 100.0)
    })?;
    encode_family(writer, devices, "gpupool_gpu_foreign_processes", "Processes on a GPU without a lease", |device| {
        Some(f64::from(device.view?.foreign.filter(|_| device.is_fresh)?.processes))
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use gpupool_core::{Bytes, CordonState, DeviceId, DeviceIdentity, NodeFacts, NodeId, Percent, Vendor};
    use gpupool_devices::{MemoryReading, SourceKind, TrackedDevice};

    use super::super::metrics::{MetricsFormat, MetricsScrape};
    use super::*;
    use crate::authority::NodeSummary;
    use crate::messages::test_facts;
    use crate::node::statistics::{DeviceFilter, Statistics};

    #[test]
    fn many_owners_take_few_lines_and_no_share_is_lost() {
        let held: HashMap<Arc<str>, Share> = (0..NAMED_OWNERS * 3)
            .map(|n| (format!("owner-{n:04}").into(), Share(100 + n as u32)))
            .chain([(OTHER_OWNERS.into(), Share(1_000_000))])
            .collect();
        let owners = largest_owners(&held);
        assert_eq!(owners.len(), NAMED_OWNERS);
        let sum = |shares: &mut dyn Iterator<Item = Share>| shares.map(|share| u64::from(share.0)).sum::<u64>();
        assert_eq!(sum(&mut owners.iter().map(|(_, share)| *share)), sum(&mut held.values().copied()));
        assert_eq!(owners.iter().filter(|(owner, _)| *owner == OTHER_OWNERS).count(), 1);
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

    /// Returns the metrics of these devices, and of a pool.
    fn metrics_text(snapshot: Option<Snapshot>, devices: impl FnOnce(PoolTime) -> Vec<ListedDevice>) -> String {
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
            rivals: Vec::new(),
            stopped: false,
        });
        let (metrics, current) = (Arc::default(), statistics.current());
        let pool = snapshot.map(|snapshot| (Arc::new(snapshot), Millis(0)));
        MetricsScrape { metrics, current, pool, node: "here".into(), now }.encode(MetricsFormat::OpenMetrics)
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
    fn values_that_a_device_does_not_report_are_absent() {
        let text = metrics_text(None, |now| vec![listed(0, found("A"), now, DeviceHealth::Healthy)]);
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
    fn readings_that_are_old_or_of_a_lost_device_are_absent() {
        let text = metrics_text(None, |now| {
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
    fn a_device_name_cannot_break_out_of_its_label() {
        let text = metrics_text(None, |now| vec![listed(0, found("A\"} 1\nfake 2\\"), now, DeviceHealth::Healthy)]);
        assert!(text.contains(r#"name="A\"} 1\nfake 2\\",node="#), "{text}");
        assert!(!text.lines().any(|line| line.starts_with("fake")), "{text}");
    }

    #[test]
    fn devices_of_two_nodes_with_the_same_number_have_a_line_each() {
        let now = crate::clock::now();
        let at = gpupool_store::ClockReading { pool: now, wall: std::time::SystemTime::now() };
        let mut snapshot = Snapshot::new(at, Arc::default());
        for (number, name) in [(1, "here"), (2, "there")] {
            let name: Arc<str> = name.into();
            let facts = NodeFacts {
                name: name.clone(),
                cpus: Default::default(),
                memory: Bytes::ZERO,
                labels: Default::default(),
            };
            let summary = NodeSummary { facts, cpus_promised: Default::default(), memory_promised: Bytes::ZERO };
            snapshot.set_node(NodeId(number), Some(summary));
            let identity = DeviceIdentity::Uuid(format!("GPU-{name}").into());
            let view = DeviceView {
                device: DeviceId(number),
                node: NodeId(number),
                gpu_id: GpuId(0),
                facts: Arc::new(test_facts(identity)),
                health: DeviceHealth::Healthy,
                cordon: CordonState::Open,
                closed: None,
                promised: Share(500 * number),
                promised_memory: Bytes::ZERO,
                leases: Vec::new(),
                foreign: None,
                memory_percent: Percent(0),
                utilization_percent: Percent(0),
                temperature_c: None,
                read_at: None,
            };
            snapshot.set_device(DeviceId(number), Some(view));
        }
        let text = metrics_text(Some(snapshot), |now| vec![listed(0, found("A"), now, DeviceHealth::Healthy)]);
        for line in [
            r#"gpupool_gpu_promised_ratio{gpu_id="0",uuid="GPU-0",name="A",node="here"} 0.5"#,
            r#"gpupool_gpu_promised_ratio{gpu_id="0",uuid="GPU-there",name="GPU",node="there"} 1.0"#,
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        assert_eq!(text.matches("gpupool_gpu_utilization_ratio{").count(), 1, "only this node reads devices:\n{text}");
    }
}
