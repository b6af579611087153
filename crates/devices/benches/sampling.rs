//! Cost of sampling eight devices in an agent: probe thread, reading, process lookup, tracker.
//!
//! The processor time of successive readings is divided by their number; at one reading per second, that is the share
//! of a core that sampling takes.

#![allow(clippy::unwrap_used, reason = "a benchmark may panic")]

mod support;

use std::time::Duration;

use gpupool_core::PoolTime;
use gpupool_devices::{DeviceSource, DeviceTracker, HostProcessResolver, NvmlSource, SourcePaths, SourceProbe};
use nvml_standin::machines::server_scenario;
use rustix::time::{ClockId, clock_gettime};
use support::{CARDS, Tree};

const READINGS: u32 = 2_000;

fn main() {
    let folder = tempfile::tempdir().unwrap();
    let library = nvml_standin::install_library(folder.path(), &server_scenario(CARDS), &[]).unwrap();
    let paths = SourcePaths { nvml: library, sys: folder.path().join("sys"), ..SourcePaths::default() };
    report("NVML (stand-in)", Box::new(NvmlSource::new(&paths)));
    for processes in [0, 500] {
        let tree = Tree::new(processes);
        report(&format!("AMD sysfs, {processes} processes"), Box::new(tree.source()));
    }
}

fn report(what: &str, source: Box<dyn DeviceSource>) {
    let mut probe = SourceProbe::start(source, Duration::from_secs(10)).unwrap();
    let mut resolver = HostProcessResolver::new(&SourcePaths::default());
    let mut tracker = DeviceTracker::default();
    let mut sample = |at| {
        probe.request_reading();
        let answer = probe.wait_reading();
        let snapshot = answer.result.map(|mut snapshot| {
            resolver.resolve_processes(&mut snapshot);
            snapshot
        });
        tracker.observe(PoolTime(at), answer.kind, snapshot);
    };
    sample(0);
    let before = processor_time();
    (1..=u64::from(READINGS)).for_each(&mut sample);
    let each = (processor_time() - before) / READINGS;
    let percent = each.as_secs_f64() * 100.0;
    println!("{CARDS} devices by {what}: {each:?} of processor time each, {percent:.4} % of a core at 1 Hz");
}

fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
