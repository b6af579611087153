//! Being told to end: an interrupt or a hang-up ends everything now, SIGTERM lets what runs come to its end, and a second one
//! of any kind ends it now. The thread that listens ends with the program.

use anyhow::Context;
use gpupool_confine::Signal;
use tokio::runtime::Runtime;

use super::say::Say;
use super::stop::{Reason, Stop};
use crate::run::signals::Signals;

/// Signals that are ours from now on.
#[derive(Debug)]
pub(super) struct Listening {
    runtime: Runtime,
    signals: Signals,
}

impl Listening {
    pub fn start() -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.context("cannot start a runtime to listen for signals")?;
        let signals = {
            let _within = runtime.enter();
            Signals::listen()?
        };
        Ok(Self { runtime, signals })
    }

    /// Ends the run when we are told to.
    pub fn obey(self, stop: Stop, say: Say) -> anyhow::Result<()> {
        let Self { runtime, mut signals } = self;
        let obey = move || {
            runtime.block_on(async {
                let mut is_first = true;
                loop {
                    let signal = signals.next_to_end().await;
                    let is_soon = signal == Signal::TERM && is_first;
                    is_first = false;
                    if is_soon {
                        stop.soon(Reason::Signal(signal));
                        say.note("told to end: what runs comes to its end, and nothing else is begun; told again, all ends now");
                    } else {
                        stop.now(Reason::Signal(signal));
                    }
                }
            });
        };
        let thread = std::thread::Builder::new().name("gpupool-signals".into()).spawn(obey);
        thread.map(drop).context("cannot start a thread to listen for signals")
    }
}
