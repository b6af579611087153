//! The bounds of `gpupool run`, each with its reason.

use std::time::Duration;

/// How long a job that is told to end may take, unless `--kill-after` says otherwise.
pub(super) const KILL_AFTER: Duration = Duration::from_secs(10);
/// The same for a job whose lease is lost: below the 5 s after which the agent kills what is left, so that we can still
/// say what happened.
pub(super) const LOST_GRACE: Duration = Duration::from_secs(4);
/// What a lease lives beyond the job's own time limit: starting and ending take a moment.
pub(super) const LEASE_SLACK: Duration = Duration::from_secs(30);
/// How much later than the agent we give up waiting: only where it does not.
pub(super) const WAIT_SLACK: Duration = Duration::from_secs(15);
/// How often the live line is written anew: it shows seconds.
pub(super) const LINE_EVERY: Duration = Duration::from_secs(1);
/// Holders named while waiting; the rest is counted.
pub(super) const HOLDERS_NAMED: usize = 4;
/// Width of the live line where the terminal does not tell.
pub(super) const LINE_WIDTH: usize = 80;
