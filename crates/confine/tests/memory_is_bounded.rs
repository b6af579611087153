//! Jobs that take too much memory, on every path by which this machine can hold them.
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
use support::bounded::{Running, by_groups, by_looking};
use support::memory_peak;

/// Takes 2 MiB every 10 ms, so 200 MiB a second, and writes its peak so far into a file; ends by itself at 400 MiB.
const HOG: &str = "\
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

fn memory(allowed: u64) -> JobBounds {
    JobBounds { host_memory: Some(allowed), ..JobBounds::default() }
}

/// Where the hog writes its peak, and reading it in bytes.
fn progress() -> (tempfile::NamedTempFile, impl Fn(&tempfile::NamedTempFile) -> u64) {
    let file = tempfile::NamedTempFile::new().unwrap();
    let read = |file: &tempfile::NamedTempFile| {
        let text = std::fs::read_to_string(file.path()).unwrap();
        text.trim().parse::<u64>().unwrap_or_else(|_| panic!("the hog never began: {text:?}")) * 1024
    };
    (file, read)
}

#[test]
fn by_looking_a_hog_never_passes_one_and_a_half_of_its_memory() {
    // Itself, and where nobody looks first: forked twice, with its parents gone.
    let orphan = format!(
        "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n    {}\n\
        import time; time.sleep(600)",
        "exec(__import__('sys').argv[2])"
    );
    let scripts = [HOG, &orphan];
    for script in scripts {
        let mut tries = 0;
        loop {
            let standstill = Standstill::watch();
            let (file, peak) = progress();
            let running =
                Running::start(&by_looking(), "hog", &memory(ALLOWED), script, &[file.path(), Path::new(HOG)]);
            assert!(matches!(running.held.enforcement().host_memory, Some(EnforcementMethod::Polling { .. })));
            let BoundExceeded::HostMemory { used: Some(used), allowed: ALLOWED } = running.killed_when_told() else {
                panic!("it was not for its memory");
            };
            assert!(used > ALLOWED, "{used}");
            let (peak, still) = (peak(&file), standstill.longest());
            if peak < ALLOWED * 3 / 2 {
                break;
            }
            // Nobody can look on a machine where nobody's turn comes, and only the hog's did.
            tries += 1;
            assert!(still > LATE && tries < 10, "it got to {} MiB; longest standstill {still:?}", peak / MIB);
            eprintln!("tried again: the machine stood still for {still:?}");
        }
    }
}

/// A thread that is due for so much longer than it asked to sleep shows that the machine has no time for its threads.
const LATE: Duration = Duration::from_millis(50);

/// Sees how late threads are that want to run now and then. Its thread ends when it is asked.
struct Standstill {
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<Duration>,
}

impl Standstill {
    fn watch() -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&is_over);
        let thread = std::thread::spawn(move || {
            let (pause, mut longest) = (Duration::from_millis(5), Duration::ZERO);
            while !ends.load(Ordering::Relaxed) {
                let asked = Instant::now();
                std::thread::sleep(pause);
                longest = longest.max(asked.elapsed().saturating_sub(pause));
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
fn in_a_group_a_hog_never_passes_its_memory() {
    for (path, cgroups) in by_groups(CgroupManager::limits_memory) {
        let (file, peak) = progress();
        let mut running = Running::start(&cgroups, path, &memory(ALLOWED), HOG, &[file.path()]);
        assert!(matches!(running.held.enforcement().host_memory, Some(EnforcementMethod::Kernel(_))), "{path}");
        running.wait_for_its_end();
        let told = memory_peak(&cgroups, running.job.cgroup().unwrap().name());
        assert_eq!(running.job.wait().unwrap(), JobEnd::Signalled(9), "{path}");
        let excess = running.held.exceeded_bound_at_end(&running.job);
        assert_eq!(excess, Some(BoundExceeded::HostMemory { used: None, allowed: ALLOWED }), "{path}");
        running.expect_nothing_left();
        assert!(told.is_none_or(|told| told <= ALLOWED), "{path}: {told:?}");
        // Its own pages that were in memory before it came into the group are not charged to it.
        assert!(peak(&file) < ALLOWED + 20 * MIB, "{path}");
    }
}

#[test]
fn a_job_that_lost_a_process_to_the_limit_is_told_to_be_over_it() {
    let script = format!("import os, time\nif os.fork() == 0:\n    exec({HOG:?})\ntime.sleep(600)");
    for (path, cgroups) in by_groups(CgroupManager::limits_memory) {
        let (file, _) = progress();
        let running = Running::start(&cgroups, &format!("lost-{path}"), &memory(ALLOWED), &script, &[file.path()]);
        let expected = BoundExceeded::HostMemory { used: None, allowed: ALLOWED };
        if running.held.enforcement().host_memory == Some(EnforcementMethod::Kernel(CgroupVersion::V2)) {
            // The kernel kills all of it at once.
            let mut running = running;
            running.job.wait().unwrap();
            assert_eq!(running.held.exceeded_bound_at_end(&running.job), Some(expected), "{path}");
            continue;
        }
        assert_eq!(running.killed_when_told(), expected, "{path}");
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
    let mut running = Running::start(&by_looking(), "share", &memory(ALLOWED), script, &[]);
    let mut ready = [0; 6];
    running.output.read_exact(&mut ready).unwrap();
    let usage = running.held.usage();
    let used = usage.host_memory.unwrap();
    assert!((60 * MIB..ALLOWED).contains(&used), "{} MiB", used / MIB);
    assert_eq!(usage.processes, Some(5));
    assert!(running.excesses.try_recv().is_err());
    running.job.kill().unwrap();
    running.job.wait().unwrap();
    assert_eq!(running.held.exceeded_bound_at_end(&running.job), None);
    running.expect_nothing_left();
}
