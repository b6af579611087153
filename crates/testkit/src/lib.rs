//! For tests: starts real agents on free ports, waits on what they tell, and audits what they did.
//!
//! [`TestAgent`] runs the `gpupool` binary; [`EventWatcher`] waits for events; [`audit`] finds in the audit trail what must never
//! happen. Everything panics with what is needed to see the failure again: the command, and what the agent said.

mod agent;
pub mod audit;
mod chance;
mod chaos;
mod process;
mod proxy;
#[path = "../../../tests/skipped.rs"]
mod skipped;
mod watch;

pub use agent::{TestAgent, TestAgentBuilder};
pub use audit::{AuditViolation, ClientObservations, TrailAudit};
pub use chance::SeededRng;
pub use chaos::ChaosRun;
pub use process::gpupool_binary;
pub use proxy::{FaultProxy, ProxyMode};
pub use skipped::skipped;
pub use watch::{EventWatcher, eventually, within_deadline};

use std::time::Duration;

/// No wait in a test takes this long; one that does has failed.
pub const DEADLINE: Duration = Duration::from_secs(60);
/// Lines of an agent's output that are kept.
const LOG_LINES: usize = 2_000;
