//! Bounded jobs, with every enforcement method of this machine.
#![allow(dead_code, reason = "each story uses a part of it")]

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};

use gpupool_confine::bounds::{BoundExceeded, BoundedJob, BoundsWatcher, JobBounds};
use gpupool_confine::cgroup::CgroupManager;
use gpupool_confine::spawn::{Job, JobEnd, JobSpec};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{WAIT_TIMEOUT, detect_v1_only, skipped, starter_program, unique_group_name};

/// A running job with bounds.
pub struct BoundedTestJob {
    pub job: Job,
    pub bounded: BoundedJob,
    pub excesses: Receiver<BoundExceeded>,
    /// Our end of its output, which ends when the last of its processes exits.
    pub output: File,
    _watcher: BoundsWatcher,
}

impl BoundedTestJob {
    pub fn start(cgroups: &CgroupManager, story: &str, bounds: &JobBounds, script: &str, arguments: &[&Path]) -> Self {
        let (output, theirs) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let null = || std::process::Stdio::null();
        let spec = JobSpec::new("python3").args(["-c", script]).args(arguments).supervisor_program(starter_program());
        let mut prepared = Job::prepare(spec.streams(null(), theirs, std::process::Stdio::inherit())).unwrap();
        let watcher = BoundsWatcher::start(cgroups.clone()).unwrap();
        let (sender, excesses): (Sender<BoundExceeded>, _) = channel();
        let on_excess = Box::new(move |excess| drop(sender.send(excess)));
        let bounded = watcher.enforce_bounds(&mut prepared, &unique_group_name(story), bounds, on_excess);
        Self { job: prepared.start().unwrap(), bounded, excesses, output: output.into(), _watcher: watcher }
    }

    /// Kills the job when the watcher reports an exceeded bound, and returns the bound.
    pub fn kill_on_excess(mut self) -> BoundExceeded {
        let excess = self.excesses.recv_timeout(WAIT_TIMEOUT);
        self.job.kill().unwrap();
        let excess =
            excess.unwrap_or_else(|_| panic!("no excess was reported; enforcement: {}", self.bounded.enforcement()));
        assert_eq!(self.job.wait().unwrap(), JobEnd::Signalled(9), "{excess}");
        assert_eq!(self.bounded.exceeded_bound_at_end(&self.job).as_ref(), Some(&excess));
        self.expect_nothing_left();
        excess
    }

    /// Waits until the job has ended on its own, without reading its end yet: its cgroup still exists.
    pub fn wait_for_its_end(&self) {
        let patience = Timespec { tv_sec: WAIT_TIMEOUT.as_secs() as i64, tv_nsec: 0 };
        let ready = poll(&mut [PollFd::new(&self.job, PollFlags::IN)], Some(&patience)).unwrap();
        assert_eq!(ready, 1, "the job did not end; enforcement: {}", self.bounded.enforcement());
    }

    /// Returns the job's output, complete once all its processes have exited.
    pub fn expect_nothing_left(mut self) -> String {
        assert_eq!(self.job.stuck_processes(), 0);
        let (sender, text) = channel();
        std::thread::spawn(move || {
            let mut text = String::new();
            self.output.read_to_string(&mut text).unwrap();
            sender.send(text)
        });
        text.recv_timeout(WAIT_TIMEOUT).expect("a process of the job still has its output open")
    }
}

/// Polling, which works on every machine.
pub fn polling_only() -> CgroupManager {
    CgroupManager::unavailable("this test wants no groups")
}

/// Cgroup managers that this machine supports; prints a note if there are none.
pub fn usable_cgroup_versions(can: impl Fn(&CgroupManager) -> bool) -> Vec<(&'static str, CgroupManager)> {
    let all = [Some(("groups", CgroupManager::detect())), detect_v1_only().map(|v1| ("v1", v1))];
    let usable = |(path, cgroups): &(&str, CgroupManager)| {
        let can = can(cgroups);
        if !can {
            skipped("limits by control groups", &format!("the path {path:?}: {cgroups}"));
        }
        can
    };
    all.into_iter().flatten().filter(usable).collect()
}
