//! The ends of a run before its time: a signal, `--halt`, output that is not read any more, or something that went wrong.
//!
//! The first reason counts; a run that is to end soon can still be ended now. An interrupt or a hang-up ends everything now,
//! SIGTERM lets what runs come to its end, and a second one of any kind ends it now.

use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex};

use anyhow::Context;
use gpupool_confine::Signal;
use gpupool_dispatch::RunHandle;
use tokio::runtime::Runtime;

use super::lock;
use crate::output::Voice;
use crate::signals::Signals;

/// Why a run was ended.
#[derive(Debug)]
pub(super) enum Reason {
    Signal(Signal),
    /// As `--halt` says.
    Halted(Trigger),
    /// Nobody reads what tasks write any more.
    OutputClosed,
    /// Something went wrong that is no task's fault.
    Failed(anyhow::Error),
}

/// Ends a run, from any thread.
#[derive(Debug, Clone)]
pub(super) struct Stop {
    remote: RunHandle,
    reason: Arc<Mutex<Option<Reason>>>,
}

impl Stop {
    pub fn new(remote: RunHandle) -> Self {
        Self { remote, reason: Arc::default() }
    }

    /// What runs is killed.
    pub fn now(&self, reason: Reason) {
        lock(&self.reason).get_or_insert(reason);
        self.remote.cancel();
    }

    /// What runs comes to its end, and nothing else is begun.
    pub fn soon(&self, reason: Reason) {
        lock(&self.reason).get_or_insert(reason);
        self.remote.cancel_pending();
    }

    /// What was read so far is done, and the run has failed all the same.
    pub fn after_this(&self, error: anyhow::Error) {
        lock(&self.reason).get_or_insert(Reason::Failed(error));
        self.remote.close();
    }

    pub fn is_stopped(&self) -> bool {
        lock(&self.reason).is_some()
    }

    /// Why, once all is over.
    pub fn reason(&self) -> Option<Reason> {
        lock(&self.reason).take()
    }
}

/// Signals that are ours from now on. The thread that listens ends with the program.
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
    pub fn obey(self, stop: Stop, voice: Voice) -> anyhow::Result<()> {
        let Self { runtime, mut signals } = self;
        let obey = move || {
            runtime.block_on(async {
                let mut is_first = true;
                loop {
                    let signal = signals.next_to_end().await;
                    if std::mem::take(&mut is_first) && signal == Signal::TERM {
                        stop.soon(Reason::Signal(signal));
                        voice.note("told to end: what runs comes to its end, and nothing else is begun; told again, all ends now");
                    } else {
                        stop.now(Reason::Signal(signal));
                    }
                }
            });
        };
        // Ends with the process, which it ends on request until then.
        let thread = std::thread::Builder::new().name("gpupool-signals".into()).spawn(obey);
        thread.map(drop).context("cannot start a thread to listen for signals")
    }
}

/// When a run is given up before its end, and how: `--halt`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Halt {
    pub when: When,
    pub trigger: Trigger,
}

/// What becomes of the tasks that run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum When {
    /// They are killed.
    Now,
    /// They come to their end; no other is begun.
    Soon,
}

/// What makes a run be given up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Trigger {
    Never,
    Failed(u64),
    /// So many of a hundred that are over, and at least [`LEAST_FAILED`].
    FailedPercent(f64),
    Succeeded(u64),
    Over(u64),
}

/// A percentage of less tells nothing.
const LEAST_FAILED: u64 = 3;

const ALLOWED: &str =
    "allowed are never, and now or soon with fail=N, fail=N%, success=N or done=N, such as now,fail=1";

impl Halt {
    /// Whether the run is given up when so many have succeeded and failed.
    pub fn is_due(&self, succeeded: u64, failed: u64) -> bool {
        let over = succeeded + failed;
        match self.trigger {
            Trigger::Never => false,
            Trigger::Failed(most) => failed >= most,
            Trigger::FailedPercent(percent) => failed >= LEAST_FAILED && failed as f64 * 100.0 >= percent * over as f64,
            Trigger::Succeeded(most) => succeeded >= most,
            Trigger::Over(most) => over >= most,
        }
    }
}

impl FromStr for Halt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "never" {
            return Ok(Self { when: When::Soon, trigger: Trigger::Never });
        }
        let (when, trigger) = text.split_once(',').ok_or(ALLOWED)?;
        let when = match when {
            "now" => When::Now,
            "soon" => When::Soon,
            _ => return Err(ALLOWED.into()),
        };
        let (what, number) = trigger.split_once('=').ok_or(ALLOWED)?;
        let count = number.parse::<u64>().ok().filter(|count| *count > 0);
        let trigger = match (what, number.strip_suffix('%'), count) {
            ("fail", Some(percent), _) => {
                let percent = percent.parse::<f64>().ok().filter(|percent| *percent > 0.0 && *percent <= 100.0);
                Trigger::FailedPercent(percent.ok_or("allowed are percentages above 0% and up to 100%")?)
            }
            ("fail", None, Some(count)) => Trigger::Failed(count),
            ("success", None, Some(count)) => Trigger::Succeeded(count),
            ("done", None, Some(count)) => Trigger::Over(count),
            _ => return Err(ALLOWED.into()),
        };
        Ok(Self { when, trigger })
    }
}

impl fmt::Display for Trigger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Never => write!(f, "never"),
            Self::Failed(count) => write!(f, "fail={count}"),
            Self::FailedPercent(percent) => write!(f, "fail={percent}%"),
            Self::Succeeded(count) => write!(f, "success={count}"),
            Self::Over(count) => write!(f, "done={count}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_trigger_is_read_and_due_in_time() {
        for (text, not_yet, due) in [
            ("now,fail=2", (9, 1), (0, 2)),
            ("soon,fail=10%", (0, 2), (27, 3)),
            ("soon,fail=10%", (28, 3), (0, 3)),
            ("now,success=1", (0, 9), (1, 0)),
            ("soon,done=3", (1, 1), (1, 2)),
        ] {
            let halt: Halt = text.parse().unwrap();
            assert!(!halt.is_due(not_yet.0, not_yet.1), "{text} at {not_yet:?}");
            assert!(halt.is_due(due.0, due.1), "{text} at {due:?}");
            assert!(text.ends_with(&halt.trigger.to_string()));
            assert_eq!(halt.when == When::Now, text.starts_with("now"));
        }
        assert!(!"never".parse::<Halt>().unwrap().is_due(0, u64::MAX));
    }

    #[test]
    fn anything_else_is_refused_with_what_is_allowed() {
        for text in [
            "",
            "now",
            "later,fail=1",
            "now,fail",
            "now,fail=0",
            "now,fail=0%",
            "now,fail=101%",
            "now,fail=nan%",
            "soon,done=5%",
            "2",
        ] {
            let error = text.parse::<Halt>().unwrap_err();
            assert!(error.contains("allowed"), "{text}: {error}");
        }
    }
}
