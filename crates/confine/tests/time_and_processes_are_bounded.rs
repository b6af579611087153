//! Jobs that burn processor time or fork without end, on every path by which this machine can hold them: stopped, and
//! nothing left.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::io::Read;
use std::sync::mpsc::channel;
use std::time::Duration;

use gpupool_confine::bounds::{BoundExceeded, BoundsWatcher, EnforcementMethod, JobBounds};
use gpupool_confine::cgroup::CgroupManager;
use gpupool_confine::spawn::{Job, JobEnd, JobSpec};
use support::bounded::{Running, by_groups, by_looking};
use support::{PATIENCE, is_root, skipped, starter_program};

/// Burns processor time: itself, in children that live shortly, in children nobody takes note of. Ends by itself after a
/// multiple of what it may use.
const BURNERS: [(&str, &str); 3] = [
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
fn processor_time_is_held_whoever_of_the_job_uses_it() {
    let mut paths = by_groups(CgroupManager::can_create);
    paths.push(("looking", by_looking()));
    for (path, cgroups) in paths {
        for (burner, script) in BURNERS {
            let allowed = Duration::from_millis(if burner == "ignored" { 1000 } else { 300 });
            let bounds = JobBounds { cpu_time: Some(allowed), ..JobBounds::default() };
            let running = Running::start(&cgroups, &format!("cpu-{path}-{burner}"), &bounds, script, &[]);
            match running.killed_when_told() {
                BoundExceeded::CpuTime { used, allowed: told } if used > allowed && told == allowed => {}
                other => panic!("{path}, {burner}: {other:?}"),
            }
        }
    }
}

#[test]
fn processor_time_can_be_counted_anew() {
    let script = "import os, sys, time\n\
        while time.process_time() < 0.3: pass\n\
        os.write(1, b'!')\n\
        time.sleep(600)";
    let mut paths = by_groups(CgroupManager::can_create);
    paths.push(("looking", by_looking()));
    for (path, cgroups) in paths {
        let bounds = JobBounds { cpu_time: Some(Duration::from_secs(60)), ..JobBounds::default() };
        let mut running = Running::start(&cgroups, &format!("anew-{path}"), &bounds, script, &[]);
        running.output.read_exact(&mut [0]).unwrap();
        let before = running.held.usage().cpu_time.unwrap();
        running.held.restart_cpu_time();
        let after = running.held.usage().cpu_time.unwrap();
        assert!(before >= Duration::from_millis(250), "{path}: {before:?}");
        assert!(after < Duration::from_millis(250), "{path}: {after:?}");
    }
}

/// Starts up to 200 processes in all, however often they are killed; each that cannot start one says so once.
const BOMB: &str = "\
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

fn processes(allowed: u64) -> JobBounds {
    JobBounds { processes: Some(allowed), ..JobBounds::default() }
}

#[test]
fn by_looking_a_fork_bomb_is_seen_and_nothing_of_it_is_left() {
    let running = Running::start(&by_looking(), "bomb", &processes(20), BOMB, &[]);
    match running.killed_when_told() {
        BoundExceeded::Processes { used, allowed: 20 } if used > 20 => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn in_a_group_a_fork_bomb_does_not_grow_and_nothing_of_it_is_left() {
    for (path, cgroups) in by_groups(CgroupManager::limits_pids) {
        let mut running = Running::start(&cgroups, &format!("bomb-{path}"), &processes(20), BOMB, &[]);
        assert!(matches!(running.held.enforcement().processes, Some(EnforcementMethod::Kernel(_))), "{path}");
        let mut first = [0; 8];
        running.output.read_exact(&mut first).unwrap();
        assert_eq!(&first, b"refused\n", "{path}");
        assert!(running.held.usage().processes.unwrap() <= 20, "{path}: {:?}", running.held.usage());
        running.job.kill().unwrap();
        assert_eq!(running.job.wait().unwrap(), JobEnd::Signalled(9), "{path}");
        running.expect_nothing_left();
    }
}

#[test]
fn a_bomb_that_fills_up_again_whatever_is_killed_is_killed_without_a_group() {
    if !is_root() {
        return skipped("a fork bomb", "needs root, to let the bomb run as a user who may have 150 processes");
    }
    // A user nobody else is, so that the kernel's limit is for the bomb alone.
    let bomb = "import os, resource\n\
        os.setgid(64123)\nos.setuid(64123)\nresource.setrlimit(resource.RLIMIT_NPROC, (150, 150))\n\
        while True:\n    try: os.fork()\n    except BlockingIOError: pass";
    for own_group in ["", "if os.fork(): os._exit(0)\n"] {
        // With its main process gone too, the rest is what the job left behind.
        let bomb = bomb.replace("while True", &format!("{own_group}while True"));
        let mut running = Running::start(&by_looking(), "refill", &processes(20), &bomb, &[]);
        if own_group.is_empty() {
            assert!(matches!(running.killed_when_told(), BoundExceeded::Processes { allowed: 20, .. }));
            continue;
        }
        assert_eq!(running.job.wait().unwrap(), JobEnd::Exited(0));
        running.expect_nothing_left();
    }
}

#[test]
fn a_callback_that_panics_ends_no_other_watch() {
    let watcher = BoundsWatcher::start(by_looking()).unwrap();
    let prepare = || {
        let spec = JobSpec::new("sleep").args(["600"]).keeper_program(starter_program());
        Job::prepare(spec).unwrap()
    };
    let (mut first, mut second) = (prepare(), prepare());
    let (sender, told) = channel();
    let panics = sender.clone();
    let _first = watcher.enforce_bounds(
        &mut first,
        "first",
        &processes(0),
        Box::new(move |excess| {
            panics.send(excess).unwrap();
            panic!("as this test wants");
        }),
    );
    told.recv_timeout(PATIENCE).expect("the first is over its bound");
    let _second =
        watcher.enforce_bounds(&mut second, "second", &processes(0), Box::new(move |excess| drop(sender.send(excess))));
    assert_eq!(told.recv_timeout(PATIENCE), Ok(BoundExceeded::Processes { used: 1, allowed: 0 }));
}
