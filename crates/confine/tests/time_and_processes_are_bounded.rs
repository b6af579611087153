//! Jobs that use up CPU time or keep forking are stopped with every enforcement method of this machine, and no process
//! is left.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::io::Read;
use std::sync::mpsc::channel;
use std::time::Duration;

use gpupool_confine::bounds::{BoundExceeded, BoundsWatcher, EnforcementMethod, JobBounds};
use gpupool_confine::cgroup::CgroupManager;
use gpupool_confine::spawn::{Job, JobEnd, JobSpec};
use support::bounded::{BoundedTestJob, polling_only, usable_cgroup_versions};
use support::{WAIT_TIMEOUT, is_root, skipped, starter_program};

/// Burns CPU time: itself, in short-lived children, in ignored children. Ends on its own after a multiple of its bound.
const CPU_BURNERS: [(&str, &str); 3] = [
    ("itself", "import time\nwhile time.process_time() < 20: pass"),
    (
        "short",
        "import os, time\n\
         for _ in range(60):\n    \
             if os.fork() == 0:\n        \
                 while time.process_time() < 0.02: pass\n        \
                 os._exit(0)\n    \
             os.wait()",
    ),
    (
        "ignored",
        "import os, signal, time\n\
         signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n\
         for _ in range(50):\n    \
             if os.fork() == 0:\n        \
                 while time.process_time() < 0.4: pass\n        \
                 os._exit(0)\n    \
             try: os.wait()\n    \
             except ChildProcessError: pass",
    ),
];

#[test]
fn cpu_time_of_every_process_counts() {
    let mut paths = usable_cgroup_versions(CgroupManager::can_create);
    paths.push(("looking", polling_only()));
    for (path, cgroups) in paths {
        for (burner, script) in CPU_BURNERS {
            let allowed = Duration::from_millis(if burner == "ignored" { 1000 } else { 300 });
            let bounds = JobBounds { cpu_time: Some(allowed), ..JobBounds::default() };
            let running = BoundedTestJob::start(&cgroups, &format!("cpu-{path}-{burner}"), &bounds, script, &[]);
            match running.kill_on_excess() {
                BoundExceeded::CpuTime { used, allowed: reported } if used > allowed && reported == allowed => {}
                other => panic!("{path}, {burner}: {other:?}"),
            }
        }
    }
}

#[test]
fn cpu_time_can_be_restarted() {
    let script = "import os, sys, time\n\
        while time.process_time() < 0.3: pass\n\
        os.write(1, b'!')\n\
        time.sleep(600)";
    let mut paths = usable_cgroup_versions(CgroupManager::can_create);
    paths.push(("looking", polling_only()));
    for (path, cgroups) in paths {
        let bounds = JobBounds { cpu_time: Some(Duration::from_secs(60)), ..JobBounds::default() };
        let mut running = BoundedTestJob::start(&cgroups, &format!("anew-{path}"), &bounds, script, &[]);
        running.output.read_exact(&mut [0]).unwrap();
        let before = running.bounded.usage().cpu_time.unwrap();
        running.bounded.restart_cpu_time();
        let after = running.bounded.usage().cpu_time.unwrap();
        assert!(before >= Duration::from_millis(250), "{path}: {before:?}");
        assert!(after < Duration::from_millis(250), "{path}: {after:?}");
    }
}

/// Starts up to 200 processes in all, even if some are killed; each process that cannot start one reports it once.
const FORK_BOMB: &str = "\
import mmap, os, time
count = mmap.mmap(-1, 1)
os.setpgid(0, 0)
while count[0] < 200:
    count[0] += 1
    try: os.fork()
    except BlockingIOError:
        os.write(1, b'refused\\n')
        break
time.sleep(600)
";

fn process_bound(allowed: u64) -> JobBounds {
    JobBounds { processes: Some(allowed), ..JobBounds::default() }
}

#[test]
fn polling_detects_a_fork_bomb_and_no_process_is_left() {
    let running = BoundedTestJob::start(&polling_only(), "bomb", &process_bound(20), FORK_BOMB, &[]);
    match running.kill_on_excess() {
        BoundExceeded::Processes { used, allowed: 20 } if used > 20 => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_cgroup_stops_a_fork_bomb_and_no_process_is_left() {
    for (path, cgroups) in usable_cgroup_versions(CgroupManager::limits_pids) {
        let mut running = BoundedTestJob::start(&cgroups, &format!("bomb-{path}"), &process_bound(20), FORK_BOMB, &[]);
        assert!(matches!(running.bounded.enforcement().processes, Some(EnforcementMethod::Kernel(_))), "{path}");
        let mut first = [0; 8];
        running.output.read_exact(&mut first).unwrap();
        assert_eq!(&first, b"refused\n", "{path}");
        assert!(running.bounded.usage().processes.unwrap() <= 20, "{path}: {:?}", running.bounded.usage());
        running.job.kill().unwrap();
        assert_eq!(running.job.wait().unwrap(), JobEnd::Signalled(9), "{path}");
        running.expect_nothing_left();
    }
}

#[test]
fn a_fork_bomb_that_replaces_killed_processes_is_killed_without_a_cgroup() {
    if !is_root() {
        return skipped("a fork bomb", "needs root, to let the bomb run as a user who may have 150 processes");
    }
    // A user without other processes, so that the kernel's limit applies to the bomb alone.
    let bomb = "import os, resource\n\
        os.setgid(64123)\nos.setuid(64123)\nresource.setrlimit(resource.RLIMIT_NPROC, (150, 150))\n\
        while True:\n    try: os.fork()\n    except BlockingIOError: pass";
    for own_group in ["", "if os.fork(): os._exit(0)\n"] {
        // The main process is gone too, so the rest are leftovers of the job.
        let bomb = bomb.replace("while True", &format!("{own_group}while True"));
        let mut running = BoundedTestJob::start(&polling_only(), "refill", &process_bound(20), &bomb, &[]);
        if own_group.is_empty() {
            assert!(matches!(running.kill_on_excess(), BoundExceeded::Processes { allowed: 20, .. }));
            continue;
        }
        assert_eq!(running.job.wait().unwrap(), JobEnd::Exited(0));
        running.expect_nothing_left();
    }
}

#[test]
fn a_panicking_callback_does_not_stop_the_watcher() {
    let watcher = BoundsWatcher::start(polling_only()).unwrap();
    let prepare = || {
        let spec = JobSpec::new("sleep").args(["600"]).supervisor_program(starter_program());
        Job::prepare(spec).unwrap()
    };
    let (mut first, mut second) = (prepare(), prepare());
    let (sender, reports) = channel();
    let panics = sender.clone();
    let _first = watcher.enforce_bounds(
        &mut first,
        "first",
        &process_bound(0),
        Box::new(move |excess| {
            panics.send(excess).unwrap();
            panic!("intended by this test");
        }),
    );
    reports.recv_timeout(WAIT_TIMEOUT).expect("the first is over its bound");
    let _second = watcher.enforce_bounds(
        &mut second,
        "second",
        &process_bound(0),
        Box::new(move |excess| drop(sender.send(excess))),
    );
    assert_eq!(reports.recv_timeout(WAIT_TIMEOUT), Ok(BoundExceeded::Processes { used: 1, allowed: 0 }));
}
