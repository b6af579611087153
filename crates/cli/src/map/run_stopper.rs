//! Early ends of a run: a signal, `--halt`, closed output or an error.
//!
//! The first reason counts. SIGINT and SIGHUP stop the run at once. SIGTERM lets running tasks finish; any second
//! signal stops the run at once.

use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex};

use anyhow::Context;
use gpupool_confine::Signal;
use gpupool_dispatch::RunHandle;
use tokio::runtime::Runtime;

use super::lock;
use crate::output::MessagePrinter;
use crate::signals::SignalListener;

/// Reason for the early end of a run.
#[derive(Debug)]
pub(super) enum StopReason {
    Signal(Signal),
    /// Condition of `--halt`.
    Halted(HaltTrigger),
    /// Standard output was closed.
    OutputClosed,
    /// Error that is not a task's failure.
    Failed(anyhow::Error),
}

/// Stops a run, from any thread.
#[derive(Debug, Clone)]
pub(super) struct RunStopper {
    run_handle: RunHandle,
    reason: Arc<Mutex<Option<StopReason>>>,
}

impl RunStopper {
    pub fn new(run_handle: RunHandle) -> Self {
        Self { run_handle, reason: Arc::default() }
    }

    /// Kills the running tasks.
    pub fn now(&self, reason: StopReason) {
        lock(&self.reason).get_or_insert(reason);
        self.run_handle.cancel();
    }

    /// Lets running tasks finish and starts no others.
    pub fn soon(&self, reason: StopReason) {
        lock(&self.reason).get_or_insert(reason);
        self.run_handle.cancel_pending();
    }

    /// Runs the tasks submitted so far, then fails.
    pub fn after_queue(&self, error: anyhow::Error) {
        lock(&self.reason).get_or_insert(StopReason::Failed(error));
        self.run_handle.close();
    }

    pub fn is_stopped(&self) -> bool {
        lock(&self.reason).is_some()
    }

    /// Takes the reason after the run has ended.
    pub fn take_reason(&self) -> Option<StopReason> {
        lock(&self.reason).take()
    }
}

/// Thread that receives signals until the process ends.
#[derive(Debug)]
pub(super) struct SignalThread {
    runtime: Runtime,
    signals: SignalListener,
}

impl SignalThread {
    pub fn start() -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.context("cannot start a runtime to listen for signals")?;
        let signals = {
            let _within = runtime.enter();
            SignalListener::listen_all()?
        };
        Ok(Self { runtime, signals })
    }

    /// Stops the run on a signal.
    pub fn stop_run(self, stop: RunStopper, printer: MessagePrinter) -> anyhow::Result<()> {
        let Self { runtime, mut signals } = self;
        let obey = move || {
            runtime.block_on(async {
                let mut is_first = true;
                loop {
                    let signal = signals.next_termination().await;
                    if std::mem::take(&mut is_first) && signal == Signal::TERM {
                        stop.soon(StopReason::Signal(signal));
                        printer.info("stopping after the running tasks; send the signal again to stop at once");
                    } else {
                        stop.now(StopReason::Signal(signal));
                    }
                }
            });
        };
        // The thread runs until the process ends.
        let thread = std::thread::Builder::new().name("gpupool-signals".into()).spawn(obey);
        thread.map(drop).context("cannot start a thread to listen for signals")
    }
}

/// Value of `--halt`: the condition for an early end, and its timing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct HaltRule {
    pub when: HaltTiming,
    pub trigger: HaltTrigger,
}

/// Treatment of running tasks when a run is halted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HaltTiming {
    /// They are killed.
    Now,
    /// They finish; no other task starts.
    Soon,
}

/// Condition that halts a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum HaltTrigger {
    Never,
    Failed(u64),
    /// Percentage of failed tasks among finished ones, once [`MIN_FAILURES_FOR_PERCENT`] tasks have failed.
    FailedPercent(f64),
    Succeeded(u64),
    Over(u64),
}

/// Failures below which a percentage is not significant.
const MIN_FAILURES_FOR_PERCENT: u64 = 3;

const HALT_ALLOWED: &str =
    "allowed: never, or now or soon with fail=N, fail=N%, success=N or done=N, such as now,fail=1";

impl HaltRule {
    /// Returns whether the condition is met.
    pub fn is_due(&self, succeeded: u64, failed: u64) -> bool {
        let over = succeeded + failed;
        match self.trigger {
            HaltTrigger::Never => false,
            HaltTrigger::Failed(most) => failed >= most,
            HaltTrigger::FailedPercent(percent) => {
                failed >= MIN_FAILURES_FOR_PERCENT && failed as f64 * 100.0 >= percent * over as f64
            }
            HaltTrigger::Succeeded(most) => succeeded >= most,
            HaltTrigger::Over(most) => over >= most,
        }
    }
}

impl FromStr for HaltRule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "never" {
            return Ok(Self { when: HaltTiming::Soon, trigger: HaltTrigger::Never });
        }
        let (when, trigger) = text.split_once(',').ok_or(HALT_ALLOWED)?;
        let when = match when {
            "now" => HaltTiming::Now,
            "soon" => HaltTiming::Soon,
            _ => return Err(HALT_ALLOWED.into()),
        };
        let (what, number) = trigger.split_once('=').ok_or(HALT_ALLOWED)?;
        let count = number.parse::<u64>().ok().filter(|count| *count > 0);
        let trigger = match (what, number.strip_suffix('%'), count) {
            ("fail", Some(percent), _) => {
                let percent = percent.parse::<f64>().ok().filter(|percent| *percent > 0.0 && *percent <= 100.0);
                HaltTrigger::FailedPercent(percent.ok_or("allowed: percentages above 0% and up to 100%")?)
            }
            ("fail", None, Some(count)) => HaltTrigger::Failed(count),
            ("success", None, Some(count)) => HaltTrigger::Succeeded(count),
            ("done", None, Some(count)) => HaltTrigger::Over(count),
            _ => return Err(HALT_ALLOWED.into()),
        };
        Ok(Self { when, trigger })
    }
}

impl fmt::Display for HaltTrigger {
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
    fn every_trigger_is_parsed_and_met_in_time() {
        for (text, not_yet, due) in [
            ("now,fail=2", (9, 1), (0, 2)),
            ("soon,fail=10%", (0, 2), (27, 3)),
            ("soon,fail=10%", (28, 3), (0, 3)),
            ("now,success=1", (0, 9), (1, 0)),
            ("soon,done=3", (1, 1), (1, 2)),
        ] {
            let halt: HaltRule = text.parse().unwrap();
            assert!(!halt.is_due(not_yet.0, not_yet.1), "{text} at {not_yet:?}");
            assert!(halt.is_due(due.0, due.1), "{text} at {due:?}");
            assert!(text.ends_with(&halt.trigger.to_string()));
            assert_eq!(halt.when == HaltTiming::Now, text.starts_with("now"));
        }
        assert!(!"never".parse::<HaltRule>().unwrap().is_due(0, u64::MAX));
    }

    #[test]
    fn other_values_are_refused_with_the_allowed_ones() {
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
            let error = text.parse::<HaltRule>().unwrap_err();
            assert!(error.contains("allowed"), "{text}: {error}");
        }
    }
}
