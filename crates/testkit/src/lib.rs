//! For tests: starts real agents on free ports, waits for their events, and audits their records.
//!
//! [`TestAgent`] runs the `gpupool` binary; [`EventWatcher`] waits for events; [`audit`] finds violations in the audit
//! trail. Each panic shows how to repeat the failure: the command and the agent's output.

mod agent;
mod agent_process;
pub mod audit;
mod chaos;
mod event_watcher;
mod proxy;
mod seeded_rng;
#[path = "../../../tests/skipped.rs"]
mod skipped;

pub use agent::{TestAgent, TestAgentBuilder};
pub use agent_process::gpupool_binary;
pub use audit::{AuditViolation, ClientObservations, TrailAudit};
pub use chaos::ChaosRun;
pub use event_watcher::{EventWatcher, eventually, within_deadline};
pub use proxy::{FaultProxy, ProxyMode};
pub use seeded_rng::SeededRng;
pub use skipped::skipped;

use std::time::Duration;

/// Maximum duration of any wait in a test.
pub const DEADLINE: Duration = Duration::from_secs(60);
/// Retained lines of an agent's output.
const LOG_LINES: usize = 2_000;
