//! A thread that kills and stops processes of the run at random.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use gpupool_confine::Signal;
use gpupool_confine::process::{ProcFs, ProcessHandle};
use gpupool_dispatch::RunHandle;
use gpupool_testkit::SeededRng;

pub struct ProcessKiller {
    is_stopped: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl ProcessKiller {
    pub fn start(handle: RunHandle, mut random: SeededRng) -> Self {
        let is_stopped = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&is_stopped);
        let send_signals = move || {
            let mut ended_before = 0;
            while !stop.load(Ordering::SeqCst) {
                std::thread::park_timeout(Duration::from_millis(random.below(60)));
                // Reading statistics must never disturb the run.
                let stats = handle.stats();
                assert!(stats.workers.len() < 1_000);
                let ended = stats.completed + stats.failed + stats.timeouts;
                // Paced by ended tasks instead of time: on a slow machine no worker would ever be set up.
                let is_due = ended > ended_before;
                match random.below(4) {
                    // Any descendant: workers, their children and their supervisors.
                    0 if is_due => signal(any_descendant(&mut random), Signal::KILL),
                    1 if is_due => signal(any_descendant(&mut random), Signal::STOP),
                    2 => signal(any_descendant(&mut random), Signal::CONT),
                    _ => continue,
                }
                ended_before = ended;
            }
        };
        Self { is_stopped, thread: std::thread::spawn(send_signals) }
    }

    pub fn end(self) {
        self.is_stopped.store(true, Ordering::SeqCst);
        self.thread.thread().unpark();
        self.thread.join().unwrap();
    }
}

fn any_descendant(random: &mut SeededRng) -> Option<ProcessHandle> {
    let all = ProcFs::system().descendants(std::process::id()).unwrap();
    if all.is_empty() {
        return None;
    }
    ProcessHandle::open(*random.pick(&all)).unwrap()
}

fn signal(process: Option<ProcessHandle>, signal: Signal) {
    if let Some(process) = process {
        process.signal(signal).unwrap();
    }
}
