//! Samples of NVIDIA devices, read through the real loader from a stand-in for the library, and of real processes on them.

use std::process::{Child, Command, Stdio};
use std::time::Instant;

use gpupool_api::job_environment;
use gpupool_api::stats::SummaryBody;
use gpupool_core::{GpuId, LeaseId, ProcessAttribution, ReadingField, Token};
use gpupool_devices::{NvmlSource, SourcePaths};
use nvml_standin::machines::{FUNCTIONS_SINCE_510, mig_gpu, server_gpu, server_scenario, unified_memory_scenario};
use nvml_standin::{NvmlScenario, StandInProcess, install_library, write_scenario};
use tempfile::TempDir;

use super::stage::{DEADLINE, DeliveredSample, SamplerSetup, SamplerStage, all_read, each, of_gpus};
use crate::node::attribution::Holding;

fn machine(scenario: &NvmlScenario, missing: &[&str]) -> (TempDir, SamplerStage) {
    let folder = tempfile::tempdir().unwrap();
    install_library(folder.path(), scenario, missing).unwrap();
    let places = SourcePaths {
        nvml: folder.path().join("libnvidia-ml.so.1"),
        sys: folder.path().join("sys"),
        ..SourcePaths::default()
    };
    let mut setup = SamplerSetup::new(vec![Box::new(NvmlSource::new(&places))]);
    (setup.places, setup.simulated) = (places, false);
    setup.unresponsive_after = DEADLINE;
    (folder, setup.start())
}

#[test]
fn a_gpu_cut_by_mig_is_listed_and_only_its_instances_take_work() {
    let scenario =
        NvmlScenario { devices: vec![mig_gpu(), server_gpu(1)], driver: "570".into(), ..NvmlScenario::default() };
    let (_folder, sampled) = machine(&scenario, &[]);
    let sample = sampled.sample("all are read", all_read);
    assert_eq!(each(&sample, |device| device.facts.partition.is_some()), [true, true, true, false]);
    let parent = &sample.devices[0].facts.partition.as_ref().unwrap().parent;
    assert_eq!(parent.to_string(), mig_gpu().uuid);
    let (_, stats) = sampled.stats_response();
    assert_eq!(stats.gpu_count, 5);
    let unsupported = of_gpus(&stats, |gpu| gpu.unsupported.contains(&"utilization_percent".to_owned()));
    assert_eq!(unsupported.iter().filter(|unsupported| **unsupported).count(), 4, "{stats:#?}");
    let summary: SummaryBody = serde_json::from_slice(&sampled.statistics.summary().body).unwrap();
    assert_eq!(summary.total_memory_mb, 2 * 81_559, "what is cut from a GPU is not counted twice");
    assert_eq!((summary.average_utilization_percent, summary.average_over), (10.0, 1));
    assert!(sampled.statistics.health().nvidia_smi_available);
}

#[test]
fn memory_that_is_shared_with_the_host_is_not_reported_as_empty() {
    let (_folder, sampled) = machine(&unified_memory_scenario(), &[]);
    let sample = sampled.sample("it is read", all_read);
    assert_eq!(sample.devices[0].facts.memory, None);
    assert_ne!(sample.devices[0].reading.as_ref().unwrap().utilization, ReadingField::Unsupported);
    let (_, stats) = sampled.stats_response();
    let gpu = &stats.gpus[0];
    let missing = ["memory.total_mb", "memory.used_mb", "memory.free_mb", "memory.usage_percent"];
    assert_eq!((gpu.unsupported.as_slice(), gpu.utilization_percent), (&missing.map(String::from)[..], 4));
}

#[test]
fn memory_that_the_driver_reserves_is_reported_apart_from_used_memory() {
    for missing in [&[][..], &FUNCTIONS_SINCE_510[..]] {
        let (_folder, sampled) = machine(&server_scenario(3), missing);
        sampled.sample("all are read", all_read);
        let (_, stats) = sampled.stats_response();
        let memory = &stats.gpus[2].memory;
        assert!(memory.used_mb + memory.free_mb <= memory.total_mb);
        let reserved = memory.total_mb - memory.used_mb - memory.free_mb;
        assert_eq!(memory.reserved_mb.unwrap_or(0), reserved, "{memory:?} without {missing:?}");
    }
}

/// A child that lives until it is dropped.
struct KilledOnDrop(Child);

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn child(lease: Option<(u64, u64)>) -> KilledOnDrop {
    let mut command = Command::new("sleep");
    command.arg("600").env_remove(job_environment::LEASE);
    if let Some((lease, token)) = lease {
        command.env(job_environment::LEASE, lease.to_string());
        command.env(job_environment::FENCING_TOKEN, token.to_string());
    }
    let child = KilledOnDrop(command.stdin(Stdio::null()).spawn().unwrap());
    // Right after its start a process shows no environment.
    let environment = || std::fs::read(format!("/proc/{}/environ", child.0.id())).unwrap();
    let start = Instant::now();
    while environment().is_empty() {
        assert!(start.elapsed() < DEADLINE, "sleep has no environment for a minute");
        std::thread::yield_now();
    }
    child
}

fn start_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap().parse().unwrap()
}

#[test]
fn real_processes_belong_to_the_lease_that_their_environment_or_their_ancestor_names() {
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap();
    let is_host = namespace.as_os_str() == "pid:[4026531836]";
    let (jobs, squatter) = ([child(Some((7, 70))), child(Some((7, 71)))], child(None));
    let pids = [jobs[0].0.id(), jobs[1].0.id(), squatter.0.id()];
    let mut scenario = server_scenario(1);
    scenario.devices[0].compute = pids.map(|pid| StandInProcess { pid, memory: 1 << 30 }).to_vec();
    let (folder, sampled) = machine(&scenario, &[]);
    let attributions = |sample: &DeliveredSample| {
        let processes = sample.devices.first()?.reading.as_ref()?.processes.clone()?;
        Some(processes.iter().map(|process| process.attribution).collect::<Vec<_>>())
    };
    if !is_host {
        eprintln!("not in the host's PID namespace ({}): trying only that nothing is attributed", namespace.display());
        sampled
            .sample("no process is known", |sample| attributions(sample) == Some(vec![ProcessAttribution::Unknown; 3]));
        return;
    }
    let (of, foreign) = (|lease| ProcessAttribution::Lease(LeaseId(lease)), ProcessAttribution::Foreign);
    let holding = |lease, token| Holding {
        lease: LeaseId(lease),
        token: Token(token),
        devices: vec![GpuId(0)],
        ..Holding::default()
    };
    sampled.holdings.lock().unwrap().leases.push(holding(7, 70));
    sampled.sample("the token decides", |sample| attributions(sample) == Some(vec![of(7), foreign, foreign]));
    let me = std::process::id();
    let mine = Holding { holder_pid: Some((me, start_ticks(me))), ..holding(8, 80) };
    sampled.holdings.lock().unwrap().leases.push(mine);
    sampled.sample("descent counts more", |sample| attributions(sample) == Some(vec![of(8); 3]));
    scenario.devices[0].compute.truncate(1);
    write_scenario(folder.path(), &scenario).unwrap();
    sampled.holdings.lock().unwrap().leases.clear();
    sampled.sample("a process without a lease is a squatter", |sample| attributions(sample) == Some(vec![foreign]));
    let current = sampled.statistics.current();
    let process = &current.round.devices[0].processes[0];
    assert_eq!((process.pid, process.command.as_deref(), process.squatter), (Some(pids[0]), Some("sleep 600"), true));
}
