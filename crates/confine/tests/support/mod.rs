//! Starts the example `starter` and observes its processes. All waits are for events (lines, pidfds), with one generous
//! timeout after which the test fails and names the missing event.
#![allow(dead_code, reason = "each story uses a part of it")]

pub mod bounded;
#[path = "../../../../tests/skipped.rs"]
mod skipped;

use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use gpupool_confine::Signal;
use gpupool_confine::cgroup::{CgroupLayout, CgroupManager};
use gpupool_confine::process::{ProcFs, ProcessHandle, ProcessId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
pub use skipped::skipped;

pub const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Path of the example program, built together with the tests.
pub fn starter_program() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let program = test.parent().and_then(|deps| deps.parent()).unwrap().join("examples/starter");
    assert!(program.exists(), "{} is missing: cargo build -p gpupool-confine --examples", program.display());
    program
}

/// A job that starts one ordinary child and one that escapes by setsid and a double fork, prints both pids and its own
/// as `pid N`, and then runs `finally` (Python).
pub fn job_with_escapes(finally: &str) -> [String; 3] {
    let script = format!(
        "import os, sys, time, signal\n\
         def tell(): os.write(1, b'pid %d\\n' % os.getpid())\n\
         if os.fork() == 0:\n    tell(); time.sleep(600)\n\
         escape = os.fork()\n\
         if escape == 0:\n    os.setsid()\n    if os.fork() == 0:\n        tell(); time.sleep(600)\n    os._exit(0)\n\
         os.waitpid(escape, 0)\n\
         tell()\n\
         {finally}\n"
    );
    ["python3".to_owned(), "-c".to_owned(), script]
}

/// Number of pids that such a job prints.
pub const ESCAPING_PID_COUNT: usize = 3;

pub struct StarterProcess {
    pub child: Child,
    pub input: Option<ChildStdin>,
    lines: Receiver<String>,
    seen: Vec<String>,
}

impl StarterProcess {
    pub fn run(options: &[&str], job: &[impl AsRef<str>]) -> Self {
        Self::run_by(Command::new(starter_program()), options, job)
    }

    /// Runs the starter through another program (`setpriv …`) that ends by executing it.
    pub fn run_by(mut command: Command, options: &[&str], job: &[impl AsRef<str>]) -> Self {
        command.args(options).arg("--").args(job.iter().map(AsRef::as_ref));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = child.stdout.take().unwrap();
        let input = child.stdin.take();
        let mut starter = Self::follow_output(child, output);
        starter.input = input;
        starter
    }

    /// Reads the lines of a starter from any source.
    pub fn follow_output(child: Child, output: impl Read + Send + 'static) -> Self {
        let (sender, lines) = channel();
        // Ends with the output, when the last process that can write to it exits.
        let output = BufReader::new(output).lines().map_while(Result::ok);
        std::thread::spawn(move || output.into_iter().try_for_each(|line| sender.send(line)));
        Self { child, input: None, lines, seen: Vec::new() }
    }

    /// Waits for a line with this beginning and returns the rest of it.
    pub fn expect(&mut self, beginning: &str) -> String {
        loop {
            let line = match self.lines.recv_timeout(WAIT_TIMEOUT) {
                Ok(line) => line,
                Err(RecvTimeoutError::Timeout) => panic!("no line {beginning:?} in time; seen: {:?}", self.seen),
                Err(RecvTimeoutError::Disconnected) => panic!("ended without {beginning:?}; seen: {:?}", self.seen),
            };
            self.seen.push(line.clone());
            // A terminal shows the pressed keys before the line.
            if let Some(rest) = line.trim_start_matches("^C").trim_start_matches("^Z").strip_prefix(beginning) {
                return rest.trim().to_owned();
            }
        }
    }

    /// Opens the processes whose pids the job printed.
    pub fn escaped_processes(&mut self) -> Vec<ProcessHandle> {
        (0..ESCAPING_PID_COUNT).map(|_| open_process(self.expect("pid ").parse().unwrap())).collect()
    }

    /// Opens the guard and the supervisor.
    pub fn helper_processes(&self) -> (ProcessHandle, ProcessHandle) {
        let children = |pid: u32| {
            let all = ProcFs::system().processes().unwrap();
            all.into_iter().filter(|stat| stat.parent == pid).map(|stat| stat.pid).collect::<Vec<_>>()
        };
        let [guard] = children(self.child.id())[..] else { panic!("not one child of the starter") };
        let [supervisor] = children(guard)[..] else { panic!("not one child of the guard") };
        (open_process(guard), open_process(supervisor))
    }

    pub fn send_input(&mut self) {
        self.input.take().unwrap().write_all(b"x").unwrap();
    }

    pub fn exit_code(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

impl Drop for StarterProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn open_process(pid: u32) -> ProcessHandle {
    let id = ProcessId::of_pid(pid).unwrap().unwrap_or_else(|| panic!("process {pid} is gone"));
    ProcessHandle::open(id).unwrap().unwrap_or_else(|| panic!("process {id} is gone"))
}

pub fn kill_process(process: &ProcessHandle) {
    assert!(process.signal(Signal::KILL).unwrap(), "{} was gone before it was killed", process.id());
}

/// Waits for the exit of each process.
pub fn expect_exited<'a>(processes: impl IntoIterator<Item = &'a ProcessHandle>) {
    let patience = Timespec { tv_sec: WAIT_TIMEOUT.as_secs() as i64, tv_nsec: 0 };
    for process in processes {
        let ready = poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&patience)).unwrap();
        assert_eq!(ready, 1, "process {} outlived", process.id());
    }
}

/// The machine's cgroups, if cgroups can be created here.
pub fn cgroups_or_skip() -> Option<CgroupManager> {
    let cgroups = CgroupManager::detect();
    if !cgroups.can_create() {
        skipped("control groups", &cgroups.describe());
        return None;
    }
    Some(cgroups)
}

/// The same machine as if it had cgroup v1 alone; `None` if it has none.
pub fn detect_v1_only() -> Option<CgroupManager> {
    let mountinfo = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let without_v2: String =
        mountinfo.lines().filter(|line| !line.contains(" - cgroup2 ")).map(|l| format!("{l}\n")).collect();
    let proc_self = tempfile::tempdir().unwrap();
    std::fs::write(proc_self.path().join("mountinfo"), without_v2).unwrap();
    std::fs::copy("/proc/self/cgroup", proc_self.path().join("cgroup")).unwrap();
    Some(CgroupManager::detect_in(proc_self.path(), is_root())).filter(|cgroups| cgroups.layout() == CgroupLayout::V1)
}

/// Peak memory of a cgroup; `None` if no cgroup counts memory or the kernel keeps no peak (before 5.19).
pub fn memory_peak(cgroups: &CgroupManager, name: &str) -> Option<u64> {
    let files = ["memory.peak", "memory.max_usage_in_bytes"];
    let paths = cgroups.base_paths().flat_map(|base| files.map(|file| base.join(name).join(file)));
    let texts: Vec<String> = paths.filter_map(|path| std::fs::read_to_string(path).ok()).collect();
    texts.first().and_then(|text| text.trim().parse().ok())
}

/// A cgroup name that no other test and no other run uses.
pub fn unique_group_name(story: &str) -> String {
    format!("test-{story}-{}", std::process::id())
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}
