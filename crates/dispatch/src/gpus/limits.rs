//! The bounds of GPUs from the pool, each with its reason.

use std::time::Duration;

/// GPUs of one run: more than any machine has.
pub const GPUS: usize = 1_024;
/// How long the agent may take to answer something a starting or running worker depends on.
pub const ANSWER_PATIENCE: Duration = Duration::from_secs(5);
/// Pause before a request that failed for a reason that may pass is made again.
pub const ASK_AGAIN: Duration = Duration::from_millis(500);
/// A lease that lived shorter than this was of no use; so that this does not go on without pause, the next one is asked for
/// after the pause above.
pub const SHORT_LIFE: Duration = Duration::from_secs(1);
/// How long leases that could not be given back, because the agent was away, are tried to be given back in the background by a
/// process that lives on.
pub const GIVE_BACK_LATER: Duration = Duration::from_secs(600);
