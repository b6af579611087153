//! Somebody outside who kills and stops processes of the run.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use gpupool_confine::Signal;
use gpupool_confine::process::{ProcFs, ProcessHandle};
use gpupool_dispatch::RunHandle;
use gpupool_testkit::SeededRng;

pub struct Outside {
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Outside {
    pub fn start(remote: RunHandle, mut chance: SeededRng) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&is_over);
        let meddle = move || {
            let mut over_before = 0;
            while !told.load(Ordering::SeqCst) {
                std::thread::park_timeout(Duration::from_millis(chance.below(60)));
                // Looking must never disturb.
                let stats = remote.stats();
                assert!(stats.workers.len() < 1_000);
                let over = stats.completed + stats.failed + stats.timeouts;
                // By what was done and not by the clock: a machine may be so slow that else no worker would ever be set up.
                let is_due = over > over_before;
                match chance.below(4) {
                    // Anybody below us: workers, what they started, and those who keep them.
                    0 if is_due => signal(any_descendant(&mut chance), Signal::KILL),
                    1 if is_due => signal(any_descendant(&mut chance), Signal::STOP),
                    2 => signal(any_descendant(&mut chance), Signal::CONT),
                    _ => continue,
                }
                over_before = over;
            }
        };
        Self { is_over, thread: std::thread::spawn(meddle) }
    }

    pub fn end(self) {
        self.is_over.store(true, Ordering::SeqCst);
        self.thread.thread().unpark();
        self.thread.join().unwrap();
    }
}

fn any_descendant(chance: &mut SeededRng) -> Option<ProcessHandle> {
    let all = ProcFs::system().descendants(std::process::id()).unwrap();
    if all.is_empty() {
        return None;
    }
    ProcessHandle::open(*chance.pick(&all)).unwrap()
}

fn signal(process: Option<ProcessHandle>, signal: Signal) {
    if let Some(process) = process {
        process.signal(signal).unwrap();
    }
}
