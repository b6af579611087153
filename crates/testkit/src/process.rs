//! One run of an agent: signals that cannot hit anybody else, and an end that is waited for.

use std::os::fd::OwnedFd;
use std::process::{Child, ExitStatus};
use std::thread;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::sync::watch;

use crate::in_time;

/// A process that runs until it ends or is killed. A thread waits for its end, and ends with it.
#[derive(Debug)]
pub(crate) struct Process {
    pid: u32,
    handle: OwnedFd,
    ended: watch::Receiver<Option<ExitStatus>>,
    waiter: Option<thread::JoinHandle<()>>,
}

impl Process {
    pub fn new(mut child: Child) -> Self {
        let pid = child.id();
        // Not waited for yet, so the number is still its own.
        let handle = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).expect("a handle on a child");
        let (tell, ended) = watch::channel(None);
        let wait = move || {
            let status = child.wait().expect("the end of a child");
            tell.send_replace(Some(status));
        };
        let waiter = thread::Builder::new().name("agent's end".into()).spawn(wait).expect("a thread can be started");
        Self { pid, handle, ended, waiter: Some(waiter) }
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Sends a signal, unless it has ended.
    pub fn signal(&self, signal: Signal) {
        // Only a process that has ended cannot be signalled by its parent.
        let _ = pidfd_send_signal(&self.handle, signal);
    }

    /// How it ended, where it has.
    pub fn status(&self) -> Option<ExitStatus> {
        *self.ended.borrow()
    }

    /// Waits for its end.
    pub async fn ended(&self) -> ExitStatus {
        let mut ended = self.ended.clone();
        let status = in_time("the agent's end", ended.wait_for(Option::is_some)).await;
        status.ok().and_then(|status| *status).expect("the waiting thread tells before it ends")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        if let Some(waiter) = self.waiter.take() {
            let _ = waiter.join();
        }
    }
}
