//! How a task ended, in words and numbers.

use std::time::{Duration, SystemTime};

use gpupool_dispatch::command::Report;
use gpupool_dispatch::{Cause, Outcome, Over};

use crate::units::shown_finely;

/// How a task ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ending {
    pub how: How,
    /// -1 where it did not end by itself.
    pub exit_code: i32,
    /// 0 where none ended it.
    pub signal: i32,
    /// What went wrong; nothing where it is done.
    pub why: String,
    pub started: SystemTime,
    pub took: Duration,
}

/// The kinds of ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum How {
    Done,
    Failed,
    TimedOut,
    WorkerLost,
    Cancelled,
}

impl Ending {
    pub fn of(over: &Over, is_command: bool) -> Self {
        let took = over.started.map_or(Duration::ZERO, |started| over.finished.saturating_duration_since(started));
        let started = SystemTime::now().checked_sub(took + over.finished.elapsed()).unwrap_or(SystemTime::UNIX_EPOCH);
        let ending = |how, exit_code, why| Self { how, exit_code, signal: 0, why, started, took };
        match &over.outcome {
            Outcome::Done(said) => ending(How::Done, 0, String::new()).told(is_command.then_some(said)),
            Outcome::Failed(said) if is_command => ending(How::Failed, 1, String::new()).told(Some(said)),
            Outcome::Failed(said) => ending(How::Failed, 1, String::from_utf8_lossy(said).into_owned()),
            Outcome::TimedOut(limit) => {
                ending(How::TimedOut, -1, format!("it took longer than {}", shown_finely(*limit)))
            }
            Outcome::WorkerLost(loss) => {
                let signal = if let Cause::Signalled(signal) = loss.cause { signal } else { 0 };
                Self { signal, ..ending(How::WorkerLost, -1, loss.to_string()) }
            }
            Outcome::Cancelled => ending(How::Cancelled, -1, "it was cancelled".into()),
        }
    }

    /// With what the runner of commands says.
    fn told(self, said: Option<&bytes::Bytes>) -> Self {
        let Some(report) = said.and_then(|said| Report::parse(said)) else {
            let why = said.filter(|_| self.how != How::Done).map(|said| String::from_utf8_lossy(said).into_owned());
            return Self { why: why.unwrap_or_default(), ..self };
        };
        let why = match (&report.not_started, report.exit_code, report.signal) {
            (Some(why), ..) => format!("it could not be started: {why}"),
            (None, Some(0), _) => String::new(),
            (None, Some(code), _) => format!("exit code {code}"),
            (None, None, signal) => format!("it was killed by signal {}", signal.unwrap_or(0)),
        };
        Self {
            exit_code: report.exit_code.unwrap_or(0),
            signal: report.signal.unwrap_or(0),
            why,
            started: SystemTime::UNIX_EPOCH + Duration::from_nanos(report.started_unix_ns),
            took: report.took(),
            ..self
        }
    }
}
