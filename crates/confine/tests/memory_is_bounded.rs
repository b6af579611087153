//! Jobs that exceed their memory bound, with every enforcement method of this machine.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gpupool_confine::bounds::{BoundExceeded, EnforcementMethod, JobBounds};
use gpupool_confine::cgroup::{CgroupManager, CgroupVersion};
use gpupool_confine::spawn::JobEnd;
use support::bounded::{BoundedTestJob, polling_only, usable_cgroup_versions};
use support::memory_peak;

/// Takes 2 MiB every 10 ms, so 200 MiB a second, and writes its peak so far into a file; ends on its own at 400 MiB.
const MEMORY_HOG: &str = "\
import os, sys, time, resource
progress = os.open(sys.argv[1], os.O_WRONLY)
blocks = []
due = time.monotonic()
for step in range(200):
    blocks.append(bytearray(b'x') * (2 << 20))
    os.pwrite(progress, b'%12d' % resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0)
    due = max(due + 0.01, time.monotonic())
    time.sleep(max(due - time.monotonic(), 0))
os._exit(7)
";

const MIB: u64 = 1 << 20;
const ALLOWED: u64 = 100 * MIB;

fn memory_bound(allowed: u64) -> JobBounds {
    JobBounds { host_memory: Some(allowed), ..JobBounds::default() }
}

/// The file for the hog's peak, and a function that reads it in bytes.
fn progress() -> (tempfile::NamedTempFile, impl Fn(&tempfile::NamedTempFile) -> u64) {
    let file = tempfile::NamedTempFile::new().unwrap();
    let read = |file: &tempfile::NamedTempFile| {
        let text = std::fs::read_to_string(file.path()).unwrap();
        text.trim().parse::<u64>().unwrap_or_else(|_| panic!("the hog never began: {text:?}")) * 1024
    };
    (file, read)
}

#[test]
fn polling_keeps_a_memory_hog_below_one_and_a_half_times_its_bound() {
    // The hog itself, and the hog as an orphan after two forks.
    let orphan = format!(
        "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n    {}\n\
        import time; time.sleep(600)",
        "exec(__import__('sys').argv[2])"
    );
    let scripts = [MEMORY_HOG, &orphan];
    for script in scripts {
        let mut tries = 0;
        loop {
            let delays = SchedulingDelayProbe::watch();
            let (file, peak) = progress();
            let running = BoundedTestJob::start(
                &polling_only(),
                "hog",
                &memory_bound(ALLOWED),
                script,
                &[file.path(), Path::new(MEMORY_HOG)],
            );
            assert!(matches!(running.bounded.enforcement().host_memory, Some(EnforcementMethod::Polling { .. })));
            let BoundExceeded::HostMemory { used: Some(used), allowed: ALLOWED } = running.kill_on_excess() else {
                panic!("it was not for its memory");
            };
            assert!(used > ALLOWED, "{used}");
            let (peak, still) = (peak(&file), delays.longest());
            if peak < ALLOWED * 3 / 2 {
                break;
            }
            // Polling fails on a machine that schedules only the hog: try again.
            tries += 1;
            assert!(still > LATE_WAKEUP && tries < 10, "it got to {} MiB; longest delays {still:?}", peak / MIB);
            eprintln!("tried again: the machine stood still for {still:?}");
        }
    }
}

/// A wake-up this late shows that the machine has no time for its threads.
const LATE_WAKEUP: Duration = Duration::from_millis(50);

/// Measures how late a thread wakes up. The thread ends on request.
struct SchedulingDelayProbe {
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<Duration>,
}

impl SchedulingDelayProbe {
    fn watch() -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&is_over);
        let thread = std::thread::spawn(move || {
            let (pause, mut longest) = (Duration::from_millis(5), Duration::ZERO);
            while !ends.load(Ordering::Relaxed) {
                let start = Instant::now();
                std::thread::sleep(pause);
                longest = longest.max(start.elapsed().saturating_sub(pause));
            }
            longest
        });
        Self { is_over, thread }
    }

    fn longest(self) -> Duration {
        self.is_over.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

#[test]
fn a_cgroup_keeps_a_memory_hog_below_its_bound() {
    for (path, cgroups) in usable_cgroup_versions(CgroupManager::limits_memory) {
        let (file, peak) = progress();
        let mut running = BoundedTestJob::start(&cgroups, path, &memory_bound(ALLOWED), MEMORY_HOG, &[file.path()]);
        assert!(matches!(running.bounded.enforcement().host_memory, Some(EnforcementMethod::Kernel(_))), "{path}");
        running.wait_for_its_end();
        let cgroup_peak = memory_peak(&cgroups, running.job.cgroup().unwrap().name());
        assert_eq!(running.job.wait().unwrap(), JobEnd::Signalled(9), "{path}");
        let excess = running.bounded.exceeded_bound_at_end(&running.job);
        assert_eq!(excess, Some(BoundExceeded::HostMemory { used: None, allowed: ALLOWED }), "{path}");
        running.expect_nothing_left();
        assert!(cgroup_peak.is_none_or(|peak| peak <= ALLOWED), "{path}: {cgroup_peak:?}");
        // Pages that were in memory before the hog joined the cgroup are not charged to the cgroup.
        assert!(peak(&file) < ALLOWED + 20 * MIB, "{path}");
    }
}

#[test]
fn a_job_that_lost_a_process_to_the_oom_killer_exceeds_its_bound() {
    let script = format!("import os, time\nif os.fork() == 0:\n    exec({MEMORY_HOG:?})\ntime.sleep(600)");
    for (path, cgroups) in usable_cgroup_versions(CgroupManager::limits_memory) {
        let (file, _) = progress();
        let running =
            BoundedTestJob::start(&cgroups, &format!("lost-{path}"), &memory_bound(ALLOWED), &script, &[file.path()]);
        let expected = BoundExceeded::HostMemory { used: None, allowed: ALLOWED };
        if running.bounded.enforcement().host_memory == Some(EnforcementMethod::Kernel(CgroupVersion::V2)) {
            // The kernel kills the whole job at once.
            let mut running = running;
            running.job.wait().unwrap();
            assert_eq!(running.bounded.exceeded_bound_at_end(&running.job), Some(expected), "{path}");
            continue;
        }
        assert_eq!(running.kill_on_excess(), expected, "{path}");
    }
}

#[test]
fn memory_that_children_share_is_counted_once() {
    // 60 MiB in five processes are 60 MiB: they were written before the forks.
    let script = "import os, sys, time\n\
        block = bytearray(b'x') * (60 << 20)\n\
        for _ in range(4):\n    if os.fork() == 0: time.sleep(600)\n\
        os.write(1, b'ready\\n')\n\
        time.sleep(600)";
    let mut running = BoundedTestJob::start(&polling_only(), "share", &memory_bound(ALLOWED), script, &[]);
    let mut ready = [0; 6];
    running.output.read_exact(&mut ready).unwrap();
    let usage = running.bounded.usage();
    let used = usage.host_memory.unwrap();
    assert!((60 * MIB..ALLOWED).contains(&used), "{} MiB", used / MIB);
    assert_eq!(usage.processes, Some(5));
    assert!(running.excesses.try_recv().is_err());
    running.job.kill().unwrap();
    running.job.wait().unwrap();
    assert_eq!(running.bounded.exceeded_bound_at_end(&running.job), None);
    running.expect_nothing_left();
}
