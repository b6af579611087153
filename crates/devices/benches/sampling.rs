//! What sampling eight devices costs an agent: the probe's thread, the reading, naming the processes, the books.
//!
//! Readings are taken one after the other and the processor time of the whole process is divided by their number; once
//! a second, that is the share of one core that sampling takes.

#![allow(clippy::unwrap_used, reason = "a benchmark may panic")]

mod support;

use std::time::Duration;

use gpupool_core::Time;
use gpupool_devices::{Attributor, DeviceTracker, Nvml, Places, Probe, Source};
use nvml_standin::machines::server;
use rustix::time::{ClockId, clock_gettime};
use support::{CARDS, Tree};

const READINGS: u32 = 2_000;

fn main() {
    let folder = tempfile::tempdir().unwrap();
    let library = nvml_standin::install(folder.path(), &server(CARDS), &[]).unwrap();
    let places = Places { nvml: library, sys: folder.path().join("sys"), ..Places::default() };
    report("NVML (stand-in)", Box::new(Nvml::new(&places)));
    for processes in [0, 500] {
        let tree = Tree::new(processes);
        report(&format!("AMD sysfs, {processes} processes"), Box::new(tree.source()));
    }
}

fn report(what: &str, source: Box<dyn Source>) {
    let mut probe = Probe::start(source, Duration::from_secs(10)).unwrap();
    let mut attributor = Attributor::new(&Places::default());
    let mut tracker = DeviceTracker::default();
    let mut sample = |at| {
        probe.ask();
        let answer = probe.answer();
        let snapshot = answer.result.map(|mut snapshot| {
            attributor.attribute(&mut snapshot);
            snapshot
        });
        tracker.observe(Time(at), answer.kind, snapshot);
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
