//! Jobs under watch, on each path by which this machine can hold them.
#![allow(dead_code, reason = "each story uses a part of it")]

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};

use gpupool_confine::bounds::{BoundExceeded, BoundedJob, BoundsWatcher, JobBounds};
use gpupool_confine::cgroup::CgroupManager;
use gpupool_confine::spawn::{Job, JobEnd, JobSpec};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{PATIENCE, group_name, skipped, starter_program, v1_alone};

/// A running job under watch.
pub struct Running {
    pub job: Job,
    pub held: BoundedJob,
    pub excesses: Receiver<BoundExceeded>,
    /// Our end of its output, which ends when the last of its processes does.
    pub output: File,
    _watcher: BoundsWatcher,
}

impl Running {
    pub fn start(cgroups: &CgroupManager, story: &str, bounds: &JobBounds, script: &str, arguments: &[&Path]) -> Self {
        let (output, theirs) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let null = || std::process::Stdio::null();
        let spec = JobSpec::new("python3").args(["-c", script]).args(arguments).keeper_program(starter_program());
        let mut prepared = Job::prepare(spec.streams(null(), theirs, std::process::Stdio::inherit())).unwrap();
        let watcher = BoundsWatcher::start(cgroups.clone()).unwrap();
        let (sender, excesses): (Sender<BoundExceeded>, _) = channel();
        let on_excess = Box::new(move |excess| drop(sender.send(excess)));
        let held = watcher.enforce_bounds(&mut prepared, &group_name(story), bounds, on_excess);
        Self { job: prepared.start().unwrap(), held, excesses, output: output.into(), _watcher: watcher }
    }

    /// Kills the job when the watcher says why, and gives that.
    pub fn killed_when_told(mut self) -> BoundExceeded {
        let excess = self.excesses.recv_timeout(PATIENCE);
        self.job.kill().unwrap();
        let excess = excess.unwrap_or_else(|_| panic!("nothing was told; held {}", self.held.enforcement()));
        assert_eq!(self.job.wait().unwrap(), JobEnd::Signalled(9), "{excess}");
        assert_eq!(self.held.exceeded_bound_at_end(&self.job).as_ref(), Some(&excess));
        self.expect_nothing_left();
        excess
    }

    /// Waits until the job has ended by itself, without looking at its end yet: its group is still there.
    pub fn wait_for_its_end(&self) {
        let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
        let ready = poll(&mut [PollFd::new(&self.job, PollFlags::IN)], Some(&patience)).unwrap();
        assert_eq!(ready, 1, "the job did not end; held {}", self.held.enforcement());
    }

    /// What it wrote, known when all its processes have gone.
    pub fn expect_nothing_left(mut self) -> String {
        assert_eq!(self.job.stuck_processes(), 0);
        let (sender, text) = channel();
        std::thread::spawn(move || {
            let mut text = String::new();
            self.output.read_to_string(&mut text).unwrap();
            sender.send(text)
        });
        text.recv_timeout(PATIENCE).expect("a process of the job still has its output open")
    }
}

/// The path by looking at processes, which every machine has.
pub fn by_looking() -> CgroupManager {
    CgroupManager::unavailable("this test wants no groups")
}

/// The paths by groups that this machine has; says so where there are none.
pub fn by_groups(can: impl Fn(&CgroupManager) -> bool) -> Vec<(&'static str, CgroupManager)> {
    let all = [Some(("groups", CgroupManager::detect())), v1_alone().map(|v1| ("v1", v1))];
    let usable = |(path, cgroups): &(&str, CgroupManager)| {
        let can = can(cgroups);
        if !can {
            skipped("limits by control groups", &format!("the path {path:?}: {cgroups}"));
        }
        can
    };
    all.into_iter().flatten().filter(usable).collect()
}
