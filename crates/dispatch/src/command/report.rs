//! How a command went, in the runner's words.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How a command went: what a task's outcome holds where each task is a command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The code it exited with; `None` where a signal ended it.
    pub exit_code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Why it could not be started, where it could not: then the code is what a shell would give, 126 or 127.
    pub not_started: Option<String>,
    /// When it was started, in nanoseconds since 1970.
    pub started_unix_ns: u64,
    /// How long it took, in nanoseconds.
    pub took_ns: u64,
    /// Bytes of its standard output, and of its standard error, where the runner's go to a file: from and to.
    pub(crate) written: [Option<(u64, u64)>; 2],
}

impl Report {
    /// What a task's outcome says; `None` where that is no report.
    pub fn parse(said: &[u8]) -> Option<Self> {
        serde_json::from_slice(said).ok()
    }

    /// How long it took.
    pub fn took(&self) -> Duration {
        Duration::from_nanos(self.took_ns)
    }

    /// Whether it exited with 0.
    pub fn is_success(&self) -> bool {
        self.exit_code == Some(0)
    }
}
