//! The bodies of the statistics routes keep their form and their ranges for any readings.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use gpupool_api::stats::{GpuCountBody, GpuHistoryBody, StatsBody, SummaryBody};
use gpupool_core::{Bytes, DeviceHealth, DeviceIdentity, GpuId, Millis, Percent, PoolTime, Vendor};
use gpupool_devices::{
    DetectedDevice, MemoryReading, Milliwatts, Reported, SourceError, SourceKind, SourceState, SourceStatus,
    TrackedDevice, UsedMemoryScope,
};
use proptest::prelude::*;

use crate::messages::test_facts;
use crate::node::statistics::{DeviceFilter, HealthStatus, ListedDevice, PreparedResponse, SamplingRound, Statistics};

fn reported<T: Clone + std::fmt::Debug + 'static>(
    value: impl Strategy<Value = T> + 'static,
) -> BoxedStrategy<Reported<T>> {
    prop_oneof![
        4 => value.prop_map(Reported::Value),
        1 => Just(Reported::Unsupported("[N/A]".into())),
        1 => Just(Reported::Failed("\"\u{0}\n".into())),
    ]
    .boxed()
}

fn bytes() -> BoxedStrategy<Reported<Bytes>> {
    reported(prop_oneof![0..1u64 << 40, Just(u64::MAX), Just(0)].prop_map(Bytes))
}

fn memory() -> impl Strategy<Value = MemoryReading> {
    let means = prop_oneof![
        Just(UsedMemoryScope::WithReserved),
        Just(UsedMemoryScope::WithoutReserved),
        Just(UsedMemoryScope::Unknown)
    ];
    (bytes(), bytes(), bytes(), bytes(), means).prop_map(|(total, reserved, used, host_total, used_means)| {
        MemoryReading { total, reserved, used, used_means, host_total, ..MemoryReading::default() }
    })
}

fn found() -> impl Strategy<Value = DetectedDevice> {
    let percent = (0..=200_000u32).prop_map(Percent);
    let sensors = (
        reported(percent),
        reported(any::<i16>()),
        reported(any::<u64>().prop_map(Milliwatts)),
        reported(any::<u64>().prop_map(Milliwatts)),
    );
    (memory(), sensors, prop::option::of(".{0,12}")).prop_map(|(memory, sensors, name)| {
        let (utilization, temperature_c, power, power_limit) = sensors;
        let name = name.map(Into::into);
        DetectedDevice {
            memory,
            utilization,
            temperature_c,
            power,
            power_limit,
            name,
            ..DetectedDevice::new(Vendor::Nvidia)
        }
    })
}

fn tracked() -> impl Strategy<Value = (TrackedDevice, bool)> {
    let health =
        prop_oneof![Just(DeviceHealth::Healthy), Just(DeviceHealth::Unhealthy("hot".into())), Just(DeviceHealth::Lost)];
    (found(), health, 0..20_000u64, any::<bool>()).prop_map(|(found, health, read_at, visible)| {
        let identity = DeviceIdentity::Uuid("GPU-a".into());
        let tracked = TrackedDevice {
            gpu_id: GpuId(0),
            facts: Arc::new(test_facts(identity.clone())),
            identity,
            source: SourceKind::Nvml,
            found: Arc::new(found),
            read_at: PoolTime(read_at),
            health,
            is_present: true,
        };
        (tracked, visible)
    })
}

fn state() -> impl Strategy<Value = SourceState> {
    prop_oneof![
        Just(SourceState::Ready),
        Just(SourceState::Pending),
        Just(SourceState::Failed(SourceError::Driver("no".into()))),
        Just(SourceState::Failed(SourceError::NotPresent { what: "it".into(), why: "gone".into() })),
    ]
}

fn round(devices: Vec<(TrackedDevice, bool)>, state: SourceState, answered_at: Option<u64>) -> SamplingRound {
    // A clock ahead of this machine's, so that the round counts as fresh.
    let pool = crate::clock::now().after(Millis::from_secs(3600));
    let listed = |(place, (mut tracked, visible)): (usize, (TrackedDevice, bool))| {
        tracked.gpu_id = GpuId(place as u32);
        tracked.read_at = PoolTime(pool.0 - tracked.read_at.0.min(pool.0));
        ListedDevice { tracked: Arc::new(tracked), visible, processes: Arc::new([]) }
    };
    SamplingRound {
        clock: gpupool_store::ClockReading { pool, wall: SystemTime::now() },
        devices: devices.into_iter().enumerate().map(listed).collect(),
        sources: vec![SourceStatus { kind: SourceKind::Nvml, state }],
        answered_at: answered_at.map(PoolTime),
        refresh: Millis::from_secs(1),
        rivals: Vec::new(),
        stopped: false,
    }
}

fn parsed<T: serde::de::DeserializeOwned>(prepared: &PreparedResponse) -> T {
    serde_json::from_slice(&prepared.body).unwrap_or_else(|error| panic!("{error}: {:?}", prepared.body))
}

proptest! {
    #[test]
    fn bodies_keep_their_form_and_their_ranges(
        devices in prop::collection::vec(tracked(), 0..5),
        state in state(),
        answered_at in prop::option::of(0..1_000u64),
    ) {
        let statistics = Statistics::new(DeviceFilter::default(), Duration::from_secs(1), 10);
        let round = round(devices, state, answered_at);
        statistics.publish(round.clone());
        let stats: StatsBody = parsed(&statistics.stats());
        let count: GpuCountBody = parsed(&statistics.count());
        let summary: SummaryBody = parsed(&statistics.summary());
        let history: GpuHistoryBody = parsed(&statistics.history());
        let listed = round.devices.iter().filter(|seen| seen.visible).count();
        prop_assert_eq!([stats.gpu_count, count.gpu_count, summary.gpu_count], [listed; 3]);
        prop_assert_eq!([stats.gpus.len(), summary.gpus_summary.len(), history.gpus.len()], [listed; 3]);
        for gpu in &stats.gpus {
            prop_assert!((0.0..=100.0).contains(&gpu.memory.usage_percent), "{gpu:?}");
            prop_assert!(gpu.utilization_percent <= 100);
            prop_assert!(gpu.memory.used_mb + gpu.memory.free_mb <= gpu.memory.total_mb, "{gpu:?}");
            let hundredths = gpu.memory.usage_percent * 100.0;
            prop_assert!((hundredths - hundredths.round()).abs() < 1e-6);
            prop_assert!(gpu.health != "lost" || gpu.temperature_c.is_none());
        }
        prop_assert!((0.0..=100.0).contains(&summary.total_memory_usage_percent));
        prop_assert!((0.0..=100.0).contains(&summary.average_utilization_percent));
        prop_assert!(summary.total_used_memory_mb <= summary.total_memory_mb);
        let failed = round.devices.is_empty() && (stats.error.is_some() || answered_at.is_none());
        prop_assert_eq!(statistics.stats().status, if failed { 503 } else { 200 });
        prop_assert!(statistics.health().status == HealthStatus::Healthy || !statistics.health().problems.is_empty());
        prop_assert!(stats.gpus.iter().all(|gpu| !gpu.stale || gpu.health == "lost") || stats.stale);
    }
}

#[test]
fn before_the_first_round_statistics_count_as_failed() {
    let statistics = Statistics::new(DeviceFilter::default(), Duration::from_secs(1), 10);
    let stats: StatsBody = parsed(&statistics.stats());
    assert_eq!((statistics.stats().status, stats.gpu_count, stats.stale), (503, 0, true));
}
