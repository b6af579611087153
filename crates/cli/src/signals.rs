//! Being told to end, by a person or by the system, while there is something to be put in order first.

use std::process::ExitCode;

use anyhow::Context;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Waits for SIGINT, SIGTERM and SIGHUP, which end nothing by themselves any more once this was made.
#[derive(Debug)]
pub(crate) struct Ending {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
    number: u8,
}

impl Ending {
    pub fn new() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("cannot listen for signals");
        Ok(Self {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
            hang_up: listen(SignalKind::hangup())?,
            number: 0,
        })
    }

    /// Waits until this command is told to end.
    pub async fn told(&mut self) {
        self.number = tokio::select! {
            _ = self.interrupt.recv() => 2,
            _ = self.terminate.recv() => 15,
            _ = self.hang_up.recv() => 1,
        };
    }

    /// What a shell expects of a command that a signal ended.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(128 + self.number)
    }
}
