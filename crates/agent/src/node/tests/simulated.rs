//! Samples of simulated devices, the processes on them, and the filter.

use gpupool_api::simulate::FaultBody;
use gpupool_api::stats::GpuHistoryBody;
use gpupool_core::{Bytes, GpuId, LeaseId, ProcessAttribution, Share};
use gpupool_devices::GpuIdRegistry;
use gpupool_devices::simulated::SimulatedFault;

use super::stage::{
    DEADLINE, DeliveredSample, SamplerSetup, all_read, at, each, fault, mend, of_gpus, simulated, start,
};
use crate::messages::PreparedDevice;
use crate::node::SimulationError;
use crate::node::statistics::HealthStatus;

#[test]
fn every_device_is_reported_at_once_and_again() {
    let (_simulation, sampled) = start("2xH100,1xMI300X");
    assert!(sampled.sampler.wait_for_first(DEADLINE));
    let first = sampled.sample("all are read", all_read);
    assert_eq!(each(&first, |device| device.gpu_id.0), [0, 1, 2]);
    assert_eq!(first.present(), [0, 1, 2]);
    assert!(!first.links.is_empty() && first.failures.is_empty());
    let later = sampled.sample("all are read again", all_read);
    for (place, (before, after)) in first.devices.iter().zip(&later.devices).enumerate() {
        assert!(first.read_at(place) < later.read_at(place));
        assert!(later.read_at(place) <= later.current.round.clock.pool);
        assert_eq!(after.reading.as_ref().map(|reading| reading.at), Some(later.read_at(place)));
        assert_eq!(before.facts, after.facts);
    }
    let (status, stats) = sampled.stats_response();
    assert_eq!((status, stats.gpu_count, stats.stale, stats.error), (200, 3, false, None));
    let memory = &stats.gpus[0].memory;
    assert_eq!(Some(memory.total_mb - memory.used_mb - memory.free_mb), memory.reserved_mb);
    let health = sampled.statistics.health();
    assert_eq!((health.status, health.nvidia_smi_available), (HealthStatus::Healthy, true));
    sampled.sampler.stop();
}

#[test]
fn processes_of_leases_and_squatters_are_told_apart() {
    let (simulation, sampled) = start("2xH100");
    let sample = sampled.sample("all are read", all_read);
    let whole = |place: usize| PreparedDevice {
        identity: sample.devices[place].facts.identity.clone(),
        share: Share::WHOLE,
        memory: Bytes(1 << 34),
    };
    simulation.lease_started(LeaseId(7), &[whole(0), whole(1)]);
    sampled.hold(7, &[0]);
    fault(&simulation, &at(0), &format!("squatter:{}:2048:30", std::process::id()));
    let attributions = |sample: &DeliveredSample, place: usize| {
        let processes = sample.devices[place].reading.as_ref().and_then(|reading| reading.processes.clone());
        processes.unwrap_or_default().iter().map(|process| process.attribution).collect::<Vec<_>>()
    };
    let leased = ProcessAttribution::Lease(LeaseId(7));
    sampled.sample("both are there", |sample| attributions(sample, 0) == [ProcessAttribution::Foreign, leased]);
    let current = sampled.statistics.current();
    let squatters = |place: usize| {
        let processes = &current.round.devices[place].processes;
        processes.iter().map(|process| (process.lease, process.squatter)).collect::<Vec<_>>()
    };
    assert_eq!(squatters(0), [(None, true), (Some(7), false)]);
    assert_eq!(squatters(1), [(Some(7), true)], "a lease squats where it holds nothing");
    simulation.lease_gone(LeaseId(7));
    mend(&simulation);
    sampled.sample("no process is left", |sample| {
        all_read(sample) && attributions(sample, 0).is_empty() && attributions(sample, 1).is_empty()
    });
}

#[test]
fn numbers_stay_after_a_restart_even_if_a_device_is_gone() {
    let (_, sampled) = start("4xH100");
    let sample = sampled.sample("all are read", all_read);
    let numbers: Vec<_> = sample.devices.iter().map(|device| (device.facts.identity.clone(), device.gpu_id)).collect();
    sampled.sampler.stop();
    let (simulation, source) = simulated("4xH100");
    fault(&simulation, &at(0), "vanish");
    let mut setup = SamplerSetup::new(vec![source]);
    setup.ids = GpuIdRegistry::restore(numbers);
    let sampled = setup.start();
    let sample = sampled.sample("all are read", all_read);
    assert_eq!(each(&sample, |device| device.gpu_id.0), [1, 2, 3]);
    assert_eq!(of_gpus(&sampled.stats_response().1, |gpu| gpu.gpu_id), [1, 2, 3]);
}

#[test]
fn hidden_devices_are_neither_listed_nor_leased() {
    let (simulation, source) = simulated("4xH100");
    fault(&simulation, &at(3), "lost");
    let mut setup = SamplerSetup::new(vec![source]);
    setup.filter = Some("2,0 9");
    let sampled = setup.start();
    let sample = sampled.sample("some are read", all_read);
    assert_eq!(each(&sample, |device| device.gpu_id.0), [0, 2]);
    assert_eq!(sample.present().len(), 4, "jobs are shown their devices among all there are");
    assert_eq!(of_gpus(&sampled.stats_response().1, |gpu| gpu.gpu_id), [0, 2]);
    let filtering = sampled.statistics.gpu_filtering();
    assert_eq!((filtering.visible_gpu_ids, filtering.total_system_gpus), (Some(vec![0, 2]), 4));
    assert_eq!((filtering.filtering_active, filtering.visible_gpu_count), (true, 2));
    assert_eq!(filtering.cuda_visible_devices.as_deref(), Some("2,0 9"));
    assert_eq!(sampled.statistics.health().status, HealthStatus::Healthy, "a hidden GPU does not count");
}

#[test]
fn the_history_is_bounded() {
    let (_simulation, sampled) = start("2xH100");
    for _ in 0..8 {
        sampled.sample("all are read", all_read);
    }
    let history: GpuHistoryBody = serde_json::from_slice(&sampled.statistics.history().body).unwrap();
    assert_eq!((history.max_history, history.gpus.len()), (5, 2));
    for gpu in &history.gpus {
        assert_eq!(gpu.readings.len(), 5);
        assert!(gpu.readings.is_sorted_by_key(|reading| reading.timestamp.clone()));
        assert!(gpu.readings.iter().all(|reading| reading.temperature_c.is_some()));
    }
}

#[test]
fn faults_are_set_by_number_and_listed() {
    let (simulation, sampled) = start("2xH100");
    let sample = sampled.sample("all are read", all_read);
    let identity_of = |gpu_id: GpuId| {
        sample.devices.iter().find(|device| device.gpu_id == gpu_id).map(|device| device.facts.identity.clone())
    };
    let ask =
        |gpu_id: Option<u32>, fault: serde_json::Value| simulation.fault(&FaultBody { gpu_id, fault }, identity_of);
    let count = |asked: Result<usize, _>| asked.map_err(|error: SimulationError| error.to_string());
    assert_eq!(count(ask(Some(1), "lost".into())), Ok(1));
    assert_eq!(count(ask(None, serde_json::json!({"fault": "hot", "temperature_c": 97}))), Ok(2));
    let number_of = |identity: &_| sample.devices.iter().find(|it| it.facts.identity == *identity).map(|it| it.gpu_id);
    let faults = simulation.faults(number_of);
    let listed: Vec<_> = faults.faults.iter().map(|it| (it.gpu_id, it.fault["fault"].as_str().unwrap())).collect();
    assert_eq!(listed, [(0, "hot"), (1, "lost"), (1, "hot")]);
    assert_eq!(faults.known.len(), SimulatedFault::KINDS.len());
    assert_eq!(count(ask(Some(1), serde_json::Value::Null)), Ok(2));
    for (gpu_id, wrong, field) in [
        (Some(9), serde_json::json!("lost"), "gpu_id: 9"),
        (None, serde_json::json!("melted"), "fault: \"melted\""),
        (None, serde_json::json!({"fault": "hot"}), "temperature_c"),
        (None, serde_json::json!({"fault": "hot", "temperature_c": 999}), "temperature_c: \"999\""),
        (None, serde_json::json!(7), "fault: 7"),
    ] {
        let message = count(ask(gpu_id, wrong)).unwrap_err();
        assert!(message.contains(field) && message.contains("allowed"), "{message}");
    }
}
