//! Samples and statistics while devices, drivers or the sampler fail.

use std::time::Duration;

use gpupool_api::stats::SummaryBody;
use gpupool_core::{DeviceHealth, ReadingField, Vendor};
use gpupool_devices::simulated::FaultTarget;
use gpupool_devices::{DeviceSource, SourceError, SourceKind, SourceReading};

use super::stage::{
    DEADLINE, SamplerSetup, SamplerStage, all_read, at, each, fault, mend, of_gpus, scripted, simulated, start,
    start_impatient,
};
use crate::messages::DeviceSample;
use crate::node::statistics::HealthStatus;

#[test]
fn a_driver_that_hangs_from_the_start_delays_nothing_and_counts_as_failed_until_it_replies() {
    let (simulation, source) = simulated("4xH100");
    fault(&simulation, &at(0), "hung_driver");
    let sampled = SamplerSetup::new(vec![source]).start();
    assert!(sampled.sampler.wait_for_first(DEADLINE));
    let (status, stats) = sampled.stats_response();
    assert_eq!((status, stats.gpu_count, stats.stale), (503, 0, true));
    assert!(stats.error.unwrap().starts_with("simulated: "));
    assert_eq!(sampled.statistics.health().status, HealthStatus::Unhealthy);
    let hung = sampled.sample("the driver is unresponsive", |sample| !sample.failures.is_empty());
    assert_eq!(hung.failures[0].1.code(), "driver_unresponsive");
    let summary: SummaryBody = serde_json::from_slice(&sampled.statistics.summary().body).unwrap();
    assert_eq!((summary.gpu_count, summary.total_memory_usage_percent), (0, 0.0));
    mend(&simulation);
    sampled.sample("all are read", |sample| all_read(sample) && sample.devices.len() == 4);
    let stats = sampled.stats("all are there", |stats| stats.gpu_count == 4 && !stats.stale);
    assert_eq!(stats.error, None);
    assert_eq!(sampled.statistics.health().status, HealthStatus::Healthy);
}

#[test]
fn a_driver_that_hangs_delays_only_its_own_devices() {
    let (hanging, source) = simulated("2xH100");
    let (_other, mut amd) = simulated("2xMI300X");
    let sampled = start_impatient(vec![source, scripted(SourceKind::AmdSysfs, move || amd.read())]);
    sampled.sample("all are read", |sample| all_read(sample) && sample.devices.len() == 4);
    fault(&hanging, &FaultTarget::All, "hung_driver");
    // The source that replied first has the first numbers, so the vendor distinguishes the devices.
    let hangs = |vendor: &str| vendor == "nvidia";
    let stats = sampled.stats("the hanging ones are stale", |stats| {
        of_gpus(stats, |gpu| gpu.stale) == of_gpus(stats, |gpu| hangs(&gpu.vendor))
    });
    assert!(stats.stale && Some(&stats.timestamp) == of_gpus(&stats, |gpu| gpu.timestamp.clone()).iter().min());
    assert_eq!(sampled.stats_response().0, 200);
    let hung = sampled.sample("the driver is unresponsive", |sample| !sample.failures.is_empty());
    let well = |device: &DeviceSample| device.health == DeviceHealth::Healthy;
    let answers = |device: &DeviceSample| device.facts.vendor == Vendor::Amd;
    assert_eq!(each(&hung, well), each(&hung, answers));
    sampled.sample("only the others are read again", |sample| {
        each(sample, |device| device.reading.is_some()) == each(sample, answers)
    });
    let health = sampled.statistics.health();
    assert_eq!((health.status, health.nvidia_smi_available), (HealthStatus::Degraded, false));
    mend(&hanging);
    let back = sampled.sample("the driver is back", |sample| sample.failures.is_empty());
    assert!(back.devices.iter().all(|device| device.reading.is_some() || answers(device)));
    assert_eq!(each(&back, well), [true; 4]);
}

#[test]
fn a_slow_driver_is_neither_failed_nor_waited_for() {
    let (slow, source) = simulated("1xH100");
    let (_other, mut amd) = simulated("1xMI300X");
    let mut setup = SamplerSetup::new(vec![source, scripted(SourceKind::AmdSysfs, move || amd.read())]);
    setup.unresponsive_after = DEADLINE;
    let sampled = setup.start();
    sampled.sample("all are read", |sample| all_read(sample) && sample.devices.len() == 2);
    fault(&slow, &FaultTarget::All, "slow:150");
    let is_slow = |device: &DeviceSample| device.facts.vendor == Vendor::Nvidia;
    for _ in 0..2 {
        sampled.sample("only the quick one is read", |sample| {
            sample.devices.iter().all(|device| device.reading.is_some() != is_slow(device))
        });
        let late = sampled.sample("the slow one is read", |sample| {
            sample.devices.iter().any(|device| is_slow(device) && device.reading.is_some())
        });
        let now = late.current.round.clock.pool;
        assert!(late.failures.is_empty() && (0..late.devices.len()).all(|place| late.read_at(place) <= now));
    }
}

#[test]
fn lost_and_vanished_devices_are_reported_as_lost_and_leave_the_others_alone() {
    let (simulation, sampled) = start("4xH100");
    sampled.sample("all are read", all_read);
    fault(&simulation, &at(1), "lost");
    fault(&simulation, &at(3), "vanish");
    let sample = sampled.sample("two are lost", |sample| {
        each(sample, |device| device.health == DeviceHealth::Lost) == [false, true, false, true]
    });
    assert_eq!(sample.present(), [0, 1, 2]);
    assert_eq!(sample.devices[1].facts.memory, sample.devices[0].facts.memory, "its properties stay known");
    let stats =
        sampled.stats("two are lost", |stats| of_gpus(stats, |gpu| gpu.health == "lost") == [false, true, false, true]);
    for lost in [&stats.gpus[1], &stats.gpus[3]] {
        let missing = ["utilization_percent", "memory.used_mb", "memory.free_mb", "memory.usage_percent"];
        assert_eq!(
            (lost.unsupported.as_slice(), lost.temperature_c, lost.power.draw_w),
            (&missing.map(String::from)[..], None, None)
        );
    }
    assert!(!stats.stale, "a lost device does not make the others stale");
    let health = sampled.statistics.health();
    assert_eq!((health.status, health.problems.len()), (HealthStatus::Degraded, 2));
    mend(&simulation);
    sampled.sample("all are well", |sample| each(sample, |device| device.health == DeviceHealth::Healthy) == [true; 4]);
}

#[test]
fn after_a_version_mismatch_devices_stay_known_and_take_no_new_work() {
    let (simulation, source) = simulated("2xH100");
    let sampled = start_impatient(vec![source]);
    sampled.sample("all are read", all_read);
    fault(&simulation, &at(0), "mismatch");
    let sample = sampled.sample("the source fails", |sample| !sample.failures.is_empty());
    assert!(
        sample
            .devices
            .iter()
            .all(|device| matches!(device.health, DeviceHealth::Unhealthy(_)) && device.reading.is_none())
    );
    let stats = sampled.stats("the reading is stale", |stats| stats.stale);
    assert!(stats.error.unwrap().contains("different versions"));
    assert_eq!((stats.gpu_count, sampled.stats_response().0), (2, 200));
    assert_eq!(sampled.statistics.health().status, HealthStatus::Unhealthy);
}

#[test]
fn unsupported_fields_are_null_or_named_and_not_averaged() {
    let (simulation, source) = simulated("2xH100");
    fault(&simulation, &at(0), "not_available:utilization+temperature+power");
    fault(&simulation, &at(1), "failed_field:memory+power_limit");
    fault(&simulation, &at(1), "stuck_utilization");
    let sampled = SamplerSetup::new(vec![source]).start();
    let sample = sampled.sample("all are read", all_read);
    assert_eq!(sample.devices[0].reading.as_ref().unwrap().utilization, ReadingField::Unsupported);
    assert_eq!(sample.devices[1].reading.as_ref().unwrap().memory_used, ReadingField::Failed);
    let (_, stats) = sampled.stats_response();
    let (first, second) = (&stats.gpus[0], &stats.gpus[1]);
    assert_eq!((first.utilization_percent, first.temperature_c, first.power.draw_w), (0, None, None));
    assert_eq!(
        (first.unsupported.as_slice(), first.power.limit_w),
        (&["utilization_percent".to_owned()][..], Some(700.0))
    );
    assert_eq!((second.memory.total_mb, second.unsupported.len(), second.power.limit_w), (0, 4, None));
    let summary: SummaryBody = serde_json::from_slice(&sampled.statistics.summary().body).unwrap();
    assert_eq!((summary.average_utilization_percent, summary.average_over), (100.0, 1));
    assert_eq!(summary.gpus_summary[1].unsupported, ["memory_usage_percent"]);
    mend(&simulation);
    let known = sampled.sample("its memory is known", |sample| sample.devices[1].facts.memory.is_some());
    fault(&simulation, &at(1), "failed_field:memory");
    let failed = sampled.sample("its memory fails", |sample| {
        sample.devices[1].reading.as_ref().is_some_and(|reading| reading.memory_used == ReadingField::Failed)
    });
    assert_eq!(failed.devices[1].facts, known.devices[1].facts, "a failure is no change of the device");
}

#[test]
fn devices_that_are_no_longer_read_are_stale() {
    let (_simulation, source) = simulated("2xH100");
    let sampled = start_impatient(vec![source]);
    sampled.stats("all are fresh", |stats| stats.gpu_count == 2 && !stats.stale);
    let SamplerStage { sampler, statistics, .. } = sampled;
    sampler.stop();
    let start = std::time::Instant::now();
    let stats = loop {
        let stats = statistics.current().stats.clone();
        if stats.stale {
            break stats;
        }
        assert!(start.elapsed() < DEADLINE, "fresh for a minute after the last reading");
        std::thread::yield_now();
    };
    assert!(stats.gpus.iter().all(|gpu| gpu.stale));
    let health = statistics.health();
    assert_eq!((health.status, health.nvidia_smi_available), (HealthStatus::Degraded, false));
    assert!(health.reading_age_secs.unwrap() > 0.0);
}

#[test]
fn a_machine_without_gpus_is_no_error() {
    let not_here = || Err(SourceError::NotPresent { what: "libnvidia-ml.so.1".into(), why: "no such file".into() });
    let sources: [Vec<Box<dyn DeviceSource>>; 2] = [
        vec![scripted(SourceKind::Nvml, not_here)],
        vec![scripted(SourceKind::Nvml, not_here), scripted(SourceKind::AmdSysfs, || Ok(SourceReading::default()))],
    ];
    for sources in sources {
        let sampled = SamplerSetup::new(sources).start();
        let stats = sampled.stats("there was a reading", |stats| !stats.stale);
        assert_eq!((sampled.stats_response().0, stats.gpu_count, stats.error), (200, 0, None));
        let health = sampled.statistics.health();
        assert_eq!((health.status, health.nvidia_smi_available), (HealthStatus::Healthy, false));
        assert!(sampled.sample("nothing is wrong", |_| true).failures.is_empty());
    }
}

#[test]
fn a_sampler_stops_while_a_driver_hangs() {
    let (simulation, source) = simulated("1xH100");
    fault(&simulation, &at(0), "hung_driver");
    let sampled = SamplerSetup::new(vec![source]).start();
    assert!(simulation.control().wait_for_blocked_reading(Duration::from_secs(60)));
    sampled.sampler.stop();
    mend(&simulation);
}

#[test]
fn a_source_without_devices_does_not_make_up_for_a_failing_one() {
    let failing = || Err(SourceError::Driver("no answer".into()));
    let nothing = || Ok(SourceReading::default());
    let sources = vec![scripted(SourceKind::Nvml, failing), scripted(SourceKind::AmdSysfs, nothing)];
    let sampled = SamplerSetup::new(sources).start();
    sampled.sample("one fails", |sample| !sample.failures.is_empty());
    let (status, stats) = sampled.stats_response();
    assert_eq!((status, stats.error.as_deref()), (503, Some("nvml: the driver failed: no answer")));
    let health = sampled.statistics.health();
    let available: Vec<_> = health.sources.iter().map(|source| source.available).collect();
    assert_eq!((health.status, available), (HealthStatus::Unhealthy, vec![false, true]));
}
