//! How well the devices can be read: what `GET /health` says of them.
//!
//! Healthy: every source that is on this machine answers, and every listed device is well; no GPU at all is healthy
//! too. Unhealthy: there is something to read and none of it can be. Degraded: anything between.

use gpupool_api::stats::SourceHealth;
use gpupool_core::device::Health as DeviceHealth;

use super::round::{Round, Seen, SourceSeen, SourceState};

/// The short answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Status {
    /// Nothing is wrong.
    Healthy,
    /// Some devices or sources fail, or readings are stale.
    Degraded,
    /// Nothing can be read though there is something to read.
    Unhealthy,
}

impl Status {
    /// As the contract spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Degraded => "degraded",
            Self::Unhealthy => "unhealthy",
        }
    }
}

/// How well the devices can be read.
#[derive(Debug, Clone, PartialEq)]
pub struct Health {
    /// The short answer.
    pub status: Status,
    /// Whether NVIDIA devices can be read, by whatever source.
    pub nvidia_smi_available: bool,
    /// When the reading that is told was taken.
    pub timestamp: String,
    /// What is wrong, for people.
    pub problems: Vec<String>,
    /// Where readings come from.
    pub sources: Vec<SourceHealth>,
    /// Seconds since the last answer of a source; `None` before the first.
    pub reading_age_secs: Option<f64>,
}

/// How well devices can be read after a round, at `now`.
pub fn health(round: &Round, now: gpupool_core::Time) -> Health {
    let mut problems: Vec<String> = round.sources.iter().filter_map(SourceSeen::trouble).collect();
    problems.extend(round.listed().filter_map(|seen| complaint(seen, round)));
    if round.stopped {
        problems.push("readings are overdue: everything told is old".to_owned());
    }
    Health {
        status: status(round, &problems),
        nvidia_smi_available: round.reads_nvidia(),
        timestamp: round.told(round.read_at()),
        problems,
        sources: round.sources.iter().map(source).collect(),
        reading_age_secs: round.answered_at.map(|at| now.since(at).0 as f64 / 1000.0),
    }
}

fn status(round: &Round, problems: &[String]) -> Status {
    if problems.is_empty() {
        return Status::Healthy;
    }
    let answers = |seen: &Seen| round.sources.iter().any(|source| source.kind == seen.source && source.answers());
    let any_readable = round.listed().any(|seen| !seen.is_lost() && answers(seen));
    if any_readable { Status::Degraded } else { Status::Unhealthy }
}

fn complaint(seen: &Seen, round: &Round) -> Option<String> {
    let name = seen.found.name.as_deref().unwrap_or("unknown GPU");
    match &seen.health {
        DeviceHealth::Lost => Some(format!("GPU {} ({name}) is lost", seen.gpu_id)),
        DeviceHealth::Unhealthy(why) => Some(format!("GPU {} ({name}): {why}", seen.gpu_id)),
        DeviceHealth::Healthy if round.is_stale(seen) && !round.stopped => {
            Some(format!("GPU {} ({name}) was last read at {}", seen.gpu_id, round.told(seen.read_at)))
        }
        DeviceHealth::Healthy => None,
    }
}

fn source(source: &SourceSeen) -> SourceHealth {
    let error = match &source.state {
        SourceState::Failed(error) => Some(error.to_string()),
        SourceState::Awaited => Some("has not answered yet".to_owned()),
        SourceState::Answers => None,
    };
    SourceHealth { name: source.kind.name().to_owned(), available: source.answers(), error }
}
