//! What the sampler tells of simulated devices, well and not.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod sampled;

use std::time::Duration;

use gpupool_agent::sampler::{Sample, SampledDevice};
use gpupool_agent::simulation::{Simulation, SimulationError};
use gpupool_agent::stats::Status;
use gpupool_api::simulate::FaultBody;
use gpupool_api::stats::{GpuHistory, Summary};
use gpupool_core::device::{Health, Vendor};
use gpupool_core::ids::{GpuId, LeaseId};
use gpupool_core::reading::{Attribution, Field};
use gpupool_core::units::{Bytes, Share};
use gpupool_devices::gpu_ids::GpuIds;
use gpupool_devices::simulated::{Fault, Place, Target};
use gpupool_devices::watch::Change;
use gpupool_devices::{Snapshot, Source, SourceError, SourceKind};
use sampled::{DEADLINE, REFRESH, Sampled, Setup, all_read, each, of_gpus};

fn simulated(text: &str) -> (Simulation, Box<dyn Source>) {
    Simulation::new(text, "test-node").unwrap()
}

fn start(text: &str) -> (Simulation, Sampled) {
    let (simulation, source) = simulated(text);
    (simulation, Setup::new(vec![source]).start())
}

/// With readings that are stale as soon as a few are missing.
fn start_impatient(sources: Vec<Box<dyn Source>>) -> Sampled {
    let mut setup = Setup::new(sources);
    setup.told_every = REFRESH;
    setup.start()
}

fn at(place: usize) -> Target {
    Target::Place(Place(place))
}

fn fault(simulation: &Simulation, target: &Target, text: &str) {
    let fault: Fault = text.parse().unwrap();
    assert!(simulation.control().fault(target, &fault).unwrap() > 0);
}

fn mend(simulation: &Simulation) {
    simulation.control().clear(&Target::All, None).unwrap();
}

/// A simulated source that says to be another: sources are told apart by what they are.
struct Named(SourceKind, Box<dyn Source>);

impl Source for Named {
    fn kind(&self) -> SourceKind {
        self.0
    }

    fn read(&mut self) -> Result<Snapshot, SourceError> {
        self.1.read()
    }
}

#[test]
fn every_device_is_told_at_once_and_again() {
    let (_simulation, sampled) = start("2xH100,1xMI300X");
    assert!(sampled.sampler.wait_for_first(DEADLINE));
    let first = sampled.sample("all are read", all_read);
    assert_eq!(each(&first, |device| device.gpu_id.0), [0, 1, 2]);
    assert_eq!((first.all.len(), &*first.all_ids), (3, &[GpuId(0), GpuId(1), GpuId(2)][..]));
    assert_eq!(first.numbers.as_ref().map(Vec::len), Some(3));
    assert!(!first.links.is_empty() && first.troubles.is_empty());
    let later = sampled.sample("all are read again", all_read);
    for (before, after) in first.devices.iter().zip(&later.devices) {
        assert!(before.read_at < after.read_at && after.read_at <= later.at);
        assert_eq!(after.reading.as_ref().map(|reading| reading.at), Some(after.read_at));
        assert_eq!(before.facts, after.facts);
    }
    assert_eq!((later.changes.len(), later.numbers), (0, None));
    let (status, stats) = sampled.told();
    assert_eq!((status, stats.gpu_count, stats.stale, stats.error), (200, 3, false, None));
    let memory = &stats.gpus[0].memory;
    assert_eq!(Some(memory.total_mb - memory.used_mb - memory.free_mb), memory.reserved_mb);
    let health = sampled.statistics.health();
    assert_eq!((health.status, health.nvidia_smi_available), (Status::Healthy, true));
    sampled.sampler.stop();
}

#[test]
fn a_driver_that_hangs_from_the_start_holds_up_nobody_and_is_told_as_failed_until_it_answers() {
    let (simulation, source) = simulated("4xH100");
    fault(&simulation, &at(0), "hung_driver");
    let sampled = Setup::new(vec![source]).start();
    assert!(sampled.sampler.wait_for_first(DEADLINE));
    let (status, stats) = sampled.told();
    assert_eq!((status, stats.gpu_count, stats.stale), (503, 0, true));
    assert!(stats.error.unwrap().starts_with("simulated: "));
    assert_eq!(sampled.statistics.health().status, Status::Unhealthy);
    let hung = sampled.sample("the driver is unresponsive", |sample| !sample.troubles.is_empty());
    assert_eq!(hung.troubles[0].1.code(), "driver_unresponsive");
    let summary: Summary = serde_json::from_slice(&sampled.statistics.summary().body).unwrap();
    assert_eq!((summary.gpu_count, summary.total_memory_usage_percent), (0, 0.0));
    mend(&simulation);
    sampled.sample("all are read", |sample| all_read(sample) && sample.devices.len() == 4);
    let stats = sampled.stats("all are there", |stats| stats.gpu_count == 4 && !stats.stale);
    assert_eq!(stats.error, None);
    assert_eq!(sampled.statistics.health().status, Status::Healthy);
}

#[test]
fn a_driver_that_hangs_delays_only_its_own_devices() {
    let (hanging, source) = simulated("2xH100");
    let (_other, amd) = simulated("2xMI300X");
    let sampled = start_impatient(vec![source, Box::new(Named(SourceKind::AmdSysfs, amd))]);
    sampled.sample("all are read", |sample| all_read(sample) && sample.devices.len() == 4);
    fault(&hanging, &Target::All, "hung_driver");
    // Whoever answered first has the first numbers, so devices are told apart by their maker.
    let hangs = |vendor: &str| vendor == "nvidia";
    let stats = sampled.stats("the hanging ones are stale", |stats| {
        of_gpus(stats, |gpu| gpu.stale) == of_gpus(stats, |gpu| hangs(&gpu.vendor))
    });
    assert!(stats.stale && Some(&stats.timestamp) == of_gpus(&stats, |gpu| gpu.timestamp.clone()).iter().min());
    assert_eq!(sampled.told().0, 200);
    let hung = sampled.sample("the driver is unresponsive", |sample| !sample.troubles.is_empty());
    let well = |device: &SampledDevice| device.health == Health::Healthy;
    let answers = |device: &SampledDevice| device.facts.vendor == Vendor::Amd;
    assert_eq!(each(&hung, well), each(&hung, answers));
    sampled.sample("only the others are read again", |sample| {
        each(sample, |device| device.reading.is_some()) == each(sample, answers)
    });
    let health = sampled.statistics.health();
    assert_eq!((health.status, health.nvidia_smi_available), (Status::Degraded, false));
    mend(&hanging);
    let back = sampled.sample("the driver is back", |sample| !sample.changes.is_empty());
    assert!(back.changes.contains(&Change::SourceBack(SourceKind::Simulated)), "{:?}", back.changes);
    assert!(back.devices.iter().all(|device| device.reading.is_some() || answers(device)));
    assert_eq!(each(&back, well), [true; 4]);
}

#[test]
fn a_slow_driver_is_neither_failed_nor_waited_for() {
    let (slow, source) = simulated("1xH100");
    let (_other, amd) = simulated("1xMI300X");
    let mut setup = Setup::new(vec![source, Box::new(Named(SourceKind::AmdSysfs, amd))]);
    setup.unresponsive_after = DEADLINE;
    let sampled = setup.start();
    sampled.sample("all are read", |sample| all_read(sample) && sample.devices.len() == 2);
    fault(&slow, &Target::All, "slow:150");
    let is_slow = |device: &SampledDevice| device.facts.vendor == Vendor::Nvidia;
    for _ in 0..2 {
        sampled.sample("only the quick one is read", |sample| {
            sample.devices.iter().all(|device| device.reading.is_some() != is_slow(device))
        });
        let late = sampled.sample("the slow one is read", |sample| {
            sample.devices.iter().any(|device| is_slow(device) && device.reading.is_some())
        });
        assert!(late.troubles.is_empty() && late.devices.iter().all(|device| device.read_at <= late.at));
    }
}

#[test]
fn lost_and_vanished_devices_are_told_as_lost_and_leave_the_others_alone() {
    let (simulation, sampled) = start("4xH100");
    sampled.sample("all are read", all_read);
    fault(&simulation, &at(1), "lost");
    fault(&simulation, &at(3), "vanish");
    let sample = sampled.sample("two are lost", |sample| {
        each(sample, |device| device.health == Health::Lost) == [false, true, false, true]
    });
    assert_eq!(&*sample.all_ids, &[0, 1, 2].map(GpuId));
    assert_eq!(sample.devices[1].facts.memory, sample.devices[0].facts.memory, "what it is stays known");
    let stats =
        sampled.stats("two are lost", |stats| of_gpus(stats, |gpu| gpu.health == "lost") == [false, true, false, true]);
    for lost in [&stats.gpus[1], &stats.gpus[3]] {
        let missing = ["utilization_percent", "memory.used_mb", "memory.free_mb", "memory.usage_percent"];
        assert_eq!(
            (lost.unsupported.as_slice(), lost.temperature_c, lost.power.draw_w),
            (&missing.map(String::from)[..], None, None)
        );
    }
    assert!(!stats.stale, "whoever is gone does not make the others old");
    let health = sampled.statistics.health();
    assert_eq!((health.status, health.problems.len()), (Status::Degraded, 2));
    mend(&simulation);
    sampled.sample("all are well", |sample| each(sample, |device| device.health == Health::Healthy) == [true; 4]);
}

#[test]
fn a_version_mismatch_keeps_what_is_known_and_takes_no_new_work() {
    let (simulation, source) = simulated("2xH100");
    let sampled = start_impatient(vec![source]);
    sampled.sample("all are read", all_read);
    fault(&simulation, &at(0), "mismatch");
    let sample = sampled.sample("the source fails", |sample| !sample.troubles.is_empty());
    assert!(
        sample.devices.iter().all(|device| matches!(device.health, Health::Unhealthy(_)) && device.reading.is_none())
    );
    let stats = sampled.stats("the reading is stale", |stats| stats.stale);
    assert!(stats.error.unwrap().contains("different versions"));
    assert_eq!((stats.gpu_count, sampled.told().0), (2, 200));
    assert_eq!(sampled.statistics.health().status, Status::Unhealthy);
}

#[test]
fn what_a_device_cannot_tell_is_null_or_named_and_not_averaged() {
    let (simulation, source) = simulated("2xH100");
    fault(&simulation, &at(0), "not_available:utilization+temperature+power");
    fault(&simulation, &at(1), "failed_field:memory+power_limit");
    fault(&simulation, &at(1), "stuck_utilization");
    let sampled = Setup::new(vec![source]).start();
    let sample = sampled.sample("all are read", all_read);
    assert_eq!(sample.devices[0].reading.as_ref().unwrap().utilization, Field::Unsupported);
    assert_eq!(sample.devices[1].reading.as_ref().unwrap().memory_used, Field::Failed);
    let (_, stats) = sampled.told();
    let (first, second) = (&stats.gpus[0], &stats.gpus[1]);
    assert_eq!((first.utilization_percent, first.temperature_c, first.power.draw_w), (0, None, None));
    assert_eq!(
        (first.unsupported.as_slice(), first.power.limit_w),
        (&["utilization_percent".to_owned()][..], Some(700.0))
    );
    assert_eq!((second.memory.total_mb, second.unsupported.len(), second.power.limit_w), (0, 4, None));
    let summary: Summary = serde_json::from_slice(&sampled.statistics.summary().body).unwrap();
    assert_eq!((summary.average_utilization_percent, summary.average_over), (100.0, 1));
    assert_eq!(summary.gpus_summary[1].unsupported, ["memory_usage_percent"]);
    mend(&simulation);
    let known = sampled.sample("its memory is known", |sample| sample.devices[1].facts.memory.is_some());
    fault(&simulation, &at(1), "failed_field:memory");
    let failed = sampled.sample("its memory fails", |sample| {
        sample.devices[1].reading.as_ref().is_some_and(|reading| reading.memory_used == Field::Failed)
    });
    assert_eq!(failed.devices[1].facts, known.devices[1].facts, "a failure is no change of the device");
}

#[test]
fn processes_of_leases_and_squatters_are_told_apart() {
    let (simulation, sampled) = start("2xH100");
    let sample = sampled.sample("all are read", all_read);
    let whole = |place: usize| (sample.devices[place].identity.clone(), Share::WHOLE, Bytes(1 << 34));
    simulation.lease_started(LeaseId(7), &[whole(0), whole(1)]);
    sampled.hold(7, &[0]);
    fault(&simulation, &at(0), &format!("squatter:{}:2048:30", std::process::id()));
    let attributions = |sample: &Sample, place: usize| {
        let processes = sample.devices[place].reading.as_ref().and_then(|reading| reading.processes.clone());
        processes.unwrap_or_default().iter().map(|process| process.attribution).collect::<Vec<_>>()
    };
    let leased = Attribution::Lease(LeaseId(7));
    sampled.sample("both are there", |sample| attributions(sample, 0) == [Attribution::Foreign, leased]);
    let current = sampled.statistics.current();
    let squatters = |place: usize| {
        let processes = &current.round.devices[place].processes;
        processes.iter().map(|process| (process.lease, process.squatter)).collect::<Vec<_>>()
    };
    assert_eq!(squatters(0), [(None, true), (Some(7), false)]);
    assert_eq!(squatters(1), [(Some(7), true)], "a lease squats where it holds nothing");
    simulation.lease_gone(LeaseId(7));
    mend(&simulation);
    sampled.sample("nobody is left", |sample| {
        all_read(sample) && attributions(sample, 0).is_empty() && attributions(sample, 1).is_empty()
    });
}

#[test]
fn numbers_stay_after_a_restart_whoever_is_gone() {
    let (_, sampled) = start("4xH100");
    let numbers = sampled.sample("numbers are given", |sample| sample.numbers.is_some()).numbers.unwrap();
    sampled.sampler.stop();
    let (simulation, source) = simulated("4xH100");
    fault(&simulation, &at(0), "vanish");
    let mut setup = Setup::new(vec![source]);
    setup.ids = GpuIds::restore(numbers);
    let sampled = setup.start();
    let sample = sampled.sample("all are read", all_read);
    assert_eq!((each(&sample, |device| device.gpu_id.0), sample.numbers), (vec![1, 2, 3], None));
    assert_eq!(of_gpus(&sampled.told().1, |gpu| gpu.gpu_id), [1, 2, 3]);
}

#[test]
fn what_the_filter_hides_is_neither_told_nor_leased() {
    let (simulation, source) = simulated("4xH100");
    fault(&simulation, &at(3), "lost");
    let mut setup = Setup::new(vec![source]);
    setup.filter = Some("2,0 9");
    let sampled = setup.start();
    let sample = sampled.sample("some are read", all_read);
    assert_eq!(each(&sample, |device| device.gpu_id.0), [0, 2]);
    assert_eq!(sample.all.len(), 4, "jobs are shown their devices among all there are");
    assert_eq!(of_gpus(&sampled.told().1, |gpu| gpu.gpu_id), [0, 2]);
    let filtering = sampled.statistics.gpu_filtering();
    assert_eq!((filtering.visible_gpu_ids, filtering.total_system_gpus), (Some(vec![0, 2]), 4));
    assert_eq!((filtering.filtering_active, filtering.visible_gpu_count), (true, 2));
    assert_eq!(filtering.cuda_visible_devices.as_deref(), Some("2,0 9"));
    assert_eq!(sampled.statistics.health().status, Status::Healthy, "a hidden GPU is nobody's concern");
}

#[test]
fn so_many_readings_are_kept_and_no_more() {
    let (_simulation, sampled) = start("2xH100");
    for _ in 0..8 {
        sampled.sample("all are read", all_read);
    }
    let history: GpuHistory = serde_json::from_slice(&sampled.statistics.history().body).unwrap();
    assert_eq!((history.max_history, history.gpus.len()), (5, 2));
    for gpu in &history.gpus {
        assert_eq!(gpu.readings.len(), 5);
        assert!(gpu.readings.is_sorted_by_key(|reading| reading.timestamp.clone()));
        assert!(gpu.readings.iter().all(|reading| reading.temperature_c.is_some()));
    }
}

#[test]
fn what_is_not_read_any_more_is_told_as_stale() {
    let (_simulation, source) = simulated("2xH100");
    let sampled = start_impatient(vec![source]);
    sampled.stats("all are fresh", |stats| stats.gpu_count == 2 && !stats.stale);
    let Sampled { sampler, statistics, .. } = sampled;
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
    assert_eq!((health.status, health.nvidia_smi_available), (Status::Degraded, false));
    assert!(health.reading_age_secs.unwrap() > 0.0);
}

#[test]
fn no_gpu_is_a_complete_answer_and_no_error() {
    struct Empty;
    impl Source for Empty {
        fn kind(&self) -> SourceKind {
            SourceKind::AmdSysfs
        }

        fn read(&mut self) -> Result<Snapshot, SourceError> {
            Ok(Snapshot::default())
        }
    }
    struct NotHere;
    impl Source for NotHere {
        fn kind(&self) -> SourceKind {
            SourceKind::Nvml
        }

        fn read(&mut self) -> Result<Snapshot, SourceError> {
            Err(SourceError::NotHere { what: "libnvidia-ml.so.1".into(), why: "no such file".into() })
        }
    }
    let sources: [Vec<Box<dyn Source>>; 2] = [vec![Box::new(NotHere)], vec![Box::new(NotHere), Box::new(Empty)]];
    for sources in sources {
        let sampled = Setup::new(sources).start();
        let stats = sampled.stats("it was looked", |stats| !stats.stale);
        assert_eq!((sampled.told().0, stats.gpu_count, stats.error), (200, 0, None));
        let health = sampled.statistics.health();
        assert_eq!((health.status, health.nvidia_smi_available), (Status::Healthy, false));
        assert!(sampled.sample("nothing is wrong", |_| true).troubles.is_empty());
    }
}

#[test]
fn faults_are_asked_for_by_number_and_told_again() {
    let (simulation, sampled) = start("2xH100");
    let sample = sampled.sample("all are read", all_read);
    let identity_of = |gpu_id: GpuId| {
        sample.devices.iter().find(|device| device.gpu_id == gpu_id).map(|device| device.identity.clone())
    };
    let ask =
        |gpu_id: Option<u32>, fault: serde_json::Value| simulation.fault(&FaultBody { gpu_id, fault }, identity_of);
    let count = |asked: Result<usize, _>| asked.map_err(|error: SimulationError| error.to_string());
    assert_eq!(count(ask(Some(1), "lost".into())), Ok(1));
    assert_eq!(count(ask(None, serde_json::json!({"fault": "hot", "temperature_c": 97}))), Ok(2));
    let number_of = |identity: &_| sample.devices.iter().find(|it| it.identity == *identity).map(|it| it.gpu_id);
    let faults = simulation.faults(number_of);
    let told: Vec<_> = faults.faults.iter().map(|it| (it.gpu_id, it.fault["fault"].as_str().unwrap())).collect();
    assert_eq!(told, [(0, "hot"), (1, "lost"), (1, "hot")]);
    assert_eq!(faults.known.len(), Fault::KINDS.len());
    assert_eq!(count(ask(Some(1), serde_json::Value::Null)), Ok(2));
    for (gpu_id, wrong, field) in [
        (Some(9), serde_json::json!("lost"), "gpu_id: 9"),
        (None, serde_json::json!("melted"), "fault: \"melted\""),
        (None, serde_json::json!({"fault": "hot"}), "temperature_c"),
        (None, serde_json::json!({"fault": "hot", "temperature_c": 999}), "temperature_c: \"999\""),
        (None, serde_json::json!(7), "fault: 7"),
    ] {
        let said = count(ask(gpu_id, wrong)).unwrap_err();
        assert!(said.contains(field) && said.contains("allowed"), "{said}");
    }
}

#[test]
fn a_sampler_stops_while_a_driver_hangs() {
    let (simulation, source) = simulated("1xH100");
    fault(&simulation, &at(0), "hung_driver");
    let sampled = Setup::new(vec![source]).start();
    assert!(simulation.control().wait_for_blocked_reading(Duration::from_secs(60)));
    sampled.sampler.stop();
    mend(&simulation);
}
